"""scripts/env.py with a stand-in for uv: which torch it installs, and what it takes from the Python that runs it."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need

# Records its arguments. `venv` makes an environment; an install succeeds where INSTALLS is 0.
UV = f"""#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  venv*) for last; do :; done; '{sys.executable}' -m venv --without-pip "$last" ;;
  *--dry-run*) echo "$RESOLVED" >&2 ;;
  *--torch-backend*) exit $FROM_PYTORCH ;;
  *) exit $INSTALLS ;;
esac
"""
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
without_gpu = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")


class Project:
    """A copy of what the script reads, and how it is run."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self.bin = root, root / "log", root / "bin"
        for name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
            *(p.name for p in ROOT.glob("constraints*.txt")),
        ):
            shutil.copy(ROOT / name, root)
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/env.py", root / "scripts")
        (root / "sparsek").symlink_to(ROOT / "sparsek")
        self.bin.mkdir()
        self.command("uv", UV)
        self.command("nvidia-smi", "#!/bin/sh\nexit 1\n")

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def made(self, stage: str = "demo", **env: str) -> "subprocess.CompletedProcess[str]":
        given = {"LOG": str(self.log), "INSTALLS": "0", "FROM_PYTORCH": "0", "RESOLVED": "+ torch==0", **env}
        full = {**HERE, **given, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        command = [sys.executable, str(self.root / "scripts/env.py"), stage]
        return subprocess.run(command, env=full, capture_output=True, text=True, timeout=300, check=False)

    def installs(self) -> "list[str]":
        """The real installs into .venv that were tried."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if "install --python .venv " in line and "--dry-run" not in line]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@without_gpu
def test_a_cpu_build_in_the_usual_index_is_taken_from_there(project: Project) -> None:
    done = project.made(UV_PYTHON="")
    assert done.returncode == 0, done.stderr
    (install,) = project.installs()
    assert "torch==2.13.0" in install
    assert "-c constraints.txt" in install
    assert "--torch-backend" not in install


@without_gpu
def test_a_cuda_build_is_never_installed_without_a_gpu(project: Project) -> None:
    cuda = {"UV_PYTHON": "", "RESOLVED": " + nvidia-cublas==13", "FROM_PYTORCH": "1"}
    done = project.made(**cuda)
    assert done.returncode != 0
    assert "demo is incomplete" in done.stderr
    assert len(project.installs()) == 1
    assert "--torch-backend=auto" in project.installs()[0]


def test_with_a_gpu_the_build_for_the_driver_comes_first_then_any(project: Project) -> None:
    project.command("nvidia-smi", "#!/bin/sh\nexit 0\n")
    done = project.made(UV_PYTHON="", FROM_PYTORCH="1")
    assert done.returncode == 0, done.stderr
    assert ["--torch-backend=auto" in line for line in project.installs()] == [True, False]
    assert all("torch==2.11.0" in line for line in project.installs())


def test_nothing_runs_when_nothing_has_changed_and_a_changed_pin_is_seen(project: Project) -> None:
    assert project.made(UV_PYTHON="").returncode == 0
    project.log.unlink()
    assert project.made(UV_PYTHON="").returncode == 0
    assert not project.log.exists()
    with (project.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert project.made(UV_PYTHON="").returncode == 0
    assert len(project.installs()) == 1


def test_a_torch_that_is_there_is_used_and_what_is_missing_is_listed(project: Project) -> None:
    need("pip")
    done = project.made("test", INSTALLS="1", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = (project.root / ".venv/sparsek-excludes.txt").read_text().split()
    assert {"torch", "numpy"} <= set(kept)
    assert not any("torch==2" in line for line in project.installs())
    show = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    found, here = (
        subprocess.run([python, "-c", show], capture_output=True, text=True, check=True, cwd="/").stdout
        for python in (str(project.root / ".venv/bin/python"), sys.executable)
    )
    assert found == here
    missing = json.loads((project.root / ".venv/sparsek-env.json").read_text())["missing"]
    assert {name.split("==")[0] for name in missing} >= {"triton", "transformers"}


def test_a_folder_that_the_script_did_not_make_stays(project: Project) -> None:
    (project.root / ".venv").mkdir()
    (project.root / ".venv/mine").write_text("kept")
    project.command("uv", "#!/bin/sh\nexit 2\n")
    assert project.made(UV_PYTHON="").returncode != 0
    assert (project.root / ".venv/mine").read_text() == "kept"
