"""The tree under test, and how its tools are run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {".git", ".venv", ".venv-triton-next", "build", "dist", "__pycache__"}


def tree(*suffixes: str) -> list[Path]:
    """Every file of the project with one of these suffixes, without environments, caches and build folders."""
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name for name in names if name not in LEFT_OUT and not name.endswith((".egg-info", "_cache"))
        ]
        found += [Path(folder, file) for file in files if file.endswith(suffixes)]
    return sorted(found)


def need(module: str) -> None:
    """Skips where a tool could not be installed (a GPU machine without a network); CI has no such excuse."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{module} is not installed; `make env` installs it")
        pytest.skip(f"{module} is not installed here; `make env` installs it where there is a network")


def run(
    *command: str, cwd: Path = ROOT, env: "dict[str, str] | None" = None
) -> subprocess.CompletedProcess[str]:
    """A command's status and output, with this Python's bin folder first on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    full = {**os.environ, "PATH": path, **(env or {})}
    return subprocess.run(
        command, cwd=cwd, env=full, capture_output=True, text=True, timeout=600, check=False
    )


def python(code: str, cwd: Path = ROOT, env: "dict[str, str] | None" = None) -> str:
    """What a fresh interpreter prints for `code`; fails the test with its error."""
    done = run(sys.executable, "-c", code, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
