"""The wheel and the editable install, both built without a network; and the version, wherever it is written."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need, python, run

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from."""
    need("setuptools")
    source = tmp_path_factory.mktemp("wheel") / "source"
    shutil.copytree(ROOT / "sparsek", source / "sparsek", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    need("pip")
    folder = source.parent
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


def test_an_editable_install_is_a_plain_path_for_type_checkers(source: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = run(sys.executable, "-c", build, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    inside = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    outside = [name for name in inside.namelist() if ".dist-info/" not in name]
    assert len(outside) == 1
    assert outside[0].endswith(".pth")
    assert Path(inside.read(outside[0]).decode().strip()) == source


def test_one_version_stands_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M) == [version]
    assert f"ersion {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert python("import sparsek; print(sparsek.__version__)") == version
