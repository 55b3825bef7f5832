"""The wheel and the editable install, both built without a network; and the version, wherever it is written."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need, python, run

PACKAGES = ("sparsek", "sparsek_bench")
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from."""
    need("setuptools")
    source = tmp_path_factory.mktemp("wheel") / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
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
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cu", ".json", ".typed", ".xz", ".zip")
    }
    assert held == sources


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    names = {Path(name).name: name for name in inside.namelist() if ".dist-info/" in name}
    assert "Apache License" in inside.read(names["LICENSE"]).decode()
    assert "sparsek = sparsek.tools.cli.__main__:main" in inside.read(names["entry_points.txt"]).decode()


def test_the_installed_wheel_runs_and_measures_in_any_folder(wheel: Path, tmp_path: Path) -> None:
    """With what a wheel requires alone: what only this project's checks need is not found."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    zipfile.ZipFile(wheel).extractall(site)  # as pip does for a wheel without scripts and data
    code = """
import importlib.machinery as machinery, importlib.metadata, json, sys
absent = {"tests", "scripts", "benchmarks", "scipy", "pytest", "hypothesis", "transformers"}
found = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.partition(".")[0] in absent else found(name, *more))
from typer.testing import CliRunner
from sparsek.tools.cli.__main__ import app
small = "--m 64 --k 64 --n 16 --block 16 --dtype fp32 --rounds 1 --device cpu --out r.jsonl --html r.html"
for words in ("bench --help", f"bench spmm {small}", "bench all --take r.jsonl", "bench all --list --device cpu"):
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
places = [each.__file__ for name, each in sys.modules.items() if name.partition(".")[0] in ("sparsek", "sparsek_bench")]
print(json.dumps([places, importlib.metadata.version("sparsek"), done.stdout]))
"""
    places, version, rows = json.loads(python(code, cwd=here, env={"PYTHONPATH": str(site)}))
    assert all(Path(each).is_relative_to(site) for each in places)
    assert version == wheel.name.split("-")[1]
    assert "host: A @ B, " in rows
    assert sorted(each.name for each in here.iterdir()) == ["benchmarks", "r.html", "r.jsonl"]


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
