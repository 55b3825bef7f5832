"""The tree under test, and how its tools are run."""

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_PYTHON = {"diffusers": (3, 11)}  # see constraints.txt
LEFT_OUT = {"build", "dist", "__pycache__"}
# What pyright makes is short-lived: with 16 MB for it, Node's collector takes an eighth of its time.
PYRIGHT = {"NODE_OPTIONS": f"{os.environ.get('NODE_OPTIONS', '')} --max-semi-space-size=128"}


def tree(*suffixes: str) -> list[Path]:
    """Every file of the project with one of these suffixes. Of hidden folders only .ci is looked into."""
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            name
            for name in names
            if name == ".ci" or not (name.startswith(".") or name in LEFT_OUT or name.endswith(".egg-info"))
        ]
        found += [Path(folder, file) for file in files if file.endswith(suffixes)]
    return sorted(found)


def need(module: str) -> None:
    """Skips where a tool could not be installed (a GPU machine without a network); CI has no such excuse."""
    # PathFinder alone: setuptools has a finder that warns where something else has imported distutils before.
    if importlib.machinery.PathFinder.find_spec(module) is None:
        if os.environ.get("CI") and sys.version_info >= NEEDS_PYTHON.get(module, (3,)):
            pytest.fail(f"{module} is not installed; `make env` installs it")
        reason = f"{module} is not installed here; `make env` installs it where there is a network"
        pytest.skip(reason, allow_module_level=True)


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


FORKS = """
import os, sys, torch
from pathlib import Path
for at in range(int(sys.argv[1])):
    if not (child := os.fork()):
        for stream, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(f"{name}{at}", os.O_CREAT | os.O_WRONLY), stream)
        exec(Path(f"code{at}").read_text(), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)  # to take torch apart takes a second
    Path(f"status{at}").write_text(str(os.waitpid(child, 0)[1]))
"""


def pythons(codes: "list[str]", folder: Path) -> list[str]:
    """What a fresh interpreter prints for each code, as `python` does, if it has imported torch before.

    Torch, which takes seconds, is imported once: each code runs in a fork. What has failed is its error.
    """
    for at, code in enumerate(codes):
        (folder / f"code{at}").write_text(code)
    done = run(sys.executable, "-c", FORKS, str(len(codes)), cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = []
    for at in range(len(codes)):
        passed = (folder / f"status{at}").read_text() == "0"
        found.append((folder / f"{'out' if passed else 'error'}{at}").read_text().strip())
    return found


def python_beside(folder: str, package: str) -> str:
    """The Python of an environment beside .venv that has another version of one package.

    Skips only where `make env` has not run or said that it could not make it.
    """
    python = ROOT / folder / "bin" / "python"
    stamp = ROOT / ".venv" / "sparsek-env.json"
    if not stamp.exists():
        pytest.skip("`make env` has not run in this tree")
    for missing in json.loads(stamp.read_text())["missing"]:
        if missing.startswith(f"{package}=="):
            pytest.skip(f"`make env` had no network to fetch {missing} from")
    assert python.exists(), f"`make env` should have made {python}; remove {stamp} and run it again"
    return str(python)
