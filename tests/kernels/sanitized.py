"""Runs a script of this folder under compute-sanitizer, and reads what racecheck says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACCESS = re.compile(r"(?:Read|Write) access at \S+ in (\S+\.py):(\d+)")
STARTS = ("def {kernel}(", "gl.warp_specialize(")


def sanitized(tool: str, kernel: str, script: str, *args: str) -> "subprocess.CompletedProcess[str]":
    """`script` under `tool`, which looks at kernels with `kernel` in their name."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    options = ["--tool", tool, "--error-exitcode", "86", "--kernel-name", f"kernel_substring={kernel}"]
    return subprocess.run(
        [sanitizer, *options, sys.executable, str(Path(__file__).with_name(script)), *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def hazards(said: str, kernel: str, file: Path) -> list[str]:
    """The places that races were reported at, but for those where Triton starts its worker warps.

    There racecheck (CUDA 13.0) reports one even in a kernel that has none (racecheck_control.py), in some runs. Triton
    gives that code the lines of the kernel's `def` and of the call of `warp_specialize`; what a warp does has its own.
    """
    lines = file.read_text().splitlines()
    starts = [text.format(kernel=kernel) for text in STARTS]
    found = []
    for name, number in ACCESS.findall(said):
        text = lines[int(number) - 1].strip() if name == file.name else ""
        if not text.startswith(tuple(starts)):
            found.append(f"{name}:{number} {text}")
    return found
