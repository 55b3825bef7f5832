"""Numbers are judged alike on CPUs of other kinds: a few numeric tests, with instruction sets capped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# How torch's own kernels, oneDNN and MKL are capped.
CAPS = {
    "SSE4": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
    "AVX-512": ("avx512", "AVX512_CORE", "AVX512"),
}
# Every other test runs with it.
OWN = torch.backends.cpu.get_cpu_capability().upper().replace("DEFAULT", "SSE4")
TESTS = (
    "tests/ops/test_semi24_gradients.py::test_gradients_are_within_the_error_budget",
    "tests/kernels/sddmm/test_cpu.py::test_every_config_is_within_budget",
    "tests/kernels/spgemm/test_cpu.py::test_every_config_is_within_budget",
    "tests/kernels/attention/test_cpu_bwd.py::test_every_dtype_is_within_budget",
)


@pytest.mark.parametrize("name", [name for name in CAPS if name.replace("-", "") != OWN])
def test_budgets_hold_with_other_instruction_sets(name: str) -> None:
    names = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
    root = Path(__file__).parents[2]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "float32", *TESTS],
        cwd=root,
        env=own | dict(zip(names, CAPS[name], strict=True)) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
