"""The wheel: built without a network, installed into a folder of its own, imported from there."""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need, python, run

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("pip")
    need("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "sparsek", source / "sparsek", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet")
    done = run(*pip, "-w", str(folder), str(source), cwd=folder, env=OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("sparsek-*.whl"))


def test_the_wheel_holds_every_source_file_and_no_test(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sparsek").rglob("*")
        if path.is_file() and path.suffix in (".py", ".cu", ".json", ".typed", ".zip")
    }
    assert held == sources


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    names = {Path(name).name: name for name in inside.namelist() if ".dist-info/" in name}
    assert "Apache License" in inside.read(names["LICENSE"]).decode()
    assert "sparsek = sparsek.cli.__main__:main" in inside.read(names["entry_points.txt"]).decode()


def test_the_installed_wheel_imports_from_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--quiet",
        "--target",
        str(site),
    )
    done = run(*pip, str(wheel), cwd=tmp_path, env=OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    code = """
import importlib.metadata, json, sparsek, torch
print(json.dumps([sparsek.__file__, importlib.metadata.version("sparsek"), sparsek.BSR.__name__]))
"""
    where, version, name = json.loads(python(code, cwd=tmp_path, env={"PYTHONPATH": str(site)}))
    assert Path(where).is_relative_to(site)
    assert version == wheel.name.split("-")[1]
    assert name == "BSR"
