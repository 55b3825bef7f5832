"""compute-sanitizer finds nothing in the kernels that move memory by hand: a script runs under it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attn.kernels.forward import sanitize as sanitize_attention
from tests.products.kernels.spmm import sanitize, sanitize_24

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
# A kernel, the part of its name that the sanitizer looks for, and the script that runs it.
KERNELS = {
    "hopper.spmm": ("spmm", sanitize),
    "hopper.spmm_paired": ("paired", sanitize),
    "hopper.spmm_mma": ("mma_kernel", sanitize),
    "portable.spmm": ("spmm", sanitize),
    "hopper.semi24": ("semi24", sanitize_24),
    "hopper.bsr24": ("semi24", sanitize_24),
    "hopper.semi24_skinny": ("semi24", sanitize_24),
    "hopper.semi24_fp8": ("semi24", sanitize_24),
    "hopper.bsr24_fp8": ("semi24", sanitize_24),
    "hopper.attention_fwd": ("attention_kernel", sanitize_attention),
    "hopper.attention_fp8": ("attention_fp8", sanitize_attention),
    "hopper.attention_bwd": ("attention_bwd", sanitize_attention),
    "hopper.attention_bwd_wide": ("attention_bwd", sanitize_attention),
}


@pytest.mark.parametrize("name", KERNELS)
def test_memcheck_finds_nothing(name: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    part, script = KERNELS[name]
    options = ["--tool", "memcheck", "--error-exitcode", "86", "--kernel-name", f"kernel_substring={part}"]
    done = subprocess.run(
        [sanitizer, *options, sys.executable, str(script.__file__), name],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    told = done.stdout[-8000:] + done.stderr[-4000:]
    assert done.returncode == 0, told
    assert "every result is within its budget" in done.stdout, told
    assert "ERROR SUMMARY: 0 errors" in told, told
