"""The oldest transformers that pyproject.toml promises passes the tests that the newest one passes."""

import os
import re
from pathlib import Path

from tests.house.tools import ROOT, python_beside, run

HERE = Path(__file__).resolve()
MODELS = re.compile(r"tests\.integrations\.models|integrations import diffusers")


def pinned() -> str:
    lines = (ROOT / "constraints-transformers-floor.txt").read_text()
    (version,) = re.findall(r"^transformers==(\S+)$", lines, re.M)
    return version


def of_models() -> list[Path]:
    """The tests beside this one that load transformers, or diffusers, which does."""
    found = [path for path in HERE.parent.glob("test_*.py") if MODELS.search(path.read_text())]
    return sorted(path for path in found if path != HERE)


def test_the_floor_that_is_tested_is_the_one_that_is_promised():
    (promised,) = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned() == f"{promised}.0"


def test_the_tests_of_integrations_pass_under_the_floor():
    python = python_beside(".venv-transformers-floor", "transformers")
    under = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    found = run(python, "-c", "import importlib.metadata as m; print(m.version('transformers'))", env=under)
    assert found.stdout.strip() == pinned(), found.stderr
    # Compiled, the models of diffusers meet torch's compiler and nothing of transformers.
    options = ("-q", "-m", "not gpu", "-p", "no:cacheprovider", "-k", "not (test_diffusers and compil)")
    done = run(python, "-m", "pytest", *options, *map(str, of_models()), env=under)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 100
