"""Runs a script of this folder under compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
