"""The oldest transformers that pyproject.toml promises passes the tests that the newest one passes."""

import os
import re
from pathlib import Path

from tests.house.tools import ROOT, python_beside, run
from tests.sampling import sampled

HERE = Path(__file__).resolve()
MODELS = re.compile(r"tests\.integrations\.models")
# Their siblings, which run, meet the same functions of transformers.
ALIKE = (
    "test_minilm.py::test_under_a_window_a_long_text_keeps_most_of_its_meaning",
    "test_transformers_steps.py::test_a_layer_with_a_window_compiles_as_often_as_with_eager_attention",
    "test_transformers_steps.py::test_a_compiled_model_makes_the_masks_of_steps_in_its_graph",
)


def pinned() -> str:
    lines = (ROOT / "constraints-transformers-floor.txt").read_text()
    (version,) = re.findall(r"^transformers==(\S+)$", lines, re.M)
    return version


def of_models() -> list[Path]:
    """The plain models, and another test beside this one that loads transformers, drawn in every run."""
    found = [path for path in HERE.parent.glob("test_*.py") if MODELS.search(path.read_text())]
    plain = HERE.with_name("test_transformers.py")
    return [plain, *sampled(sorted(path for path in found if path not in (HERE, plain)), 1)]


def test_the_floor_that_is_tested_is_the_one_that_is_promised():
    (promised,) = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned() == f"{promised}.0"


def test_the_tests_of_integrations_pass_under_the_floor():
    python = python_beside(".venv-transformers-floor", "transformers")
    under = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    found = run(python, "-c", "import importlib.metadata as m; print(m.version('transformers'))", env=under)
    assert found.stdout.strip() == pinned(), found.stderr
    left_out = (f"--deselect={HERE.parent.relative_to(ROOT)}/{test}" for test in ALIKE)
    options = ("-q", "-m", "not gpu", "-p", "no:cacheprovider", *left_out)
    done = run(python, "-m", "pytest", *options, *map(str, of_models()), env=under)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 50
