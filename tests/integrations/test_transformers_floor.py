"""The oldest transformers that pyproject.toml promises passes the tests that the newest one passes."""

import os
import re
from pathlib import Path

from tests.house.tools import ROOT, python_beside, run
from tests.sampling import half

HERE = Path(__file__).resolve()
MODELS = re.compile(r"tests\.integrations\.models")
# Their siblings, which run, meet the same functions of transformers.
ALIKE = (
    "test_minilm.py::test_under_a_window_a_long_text_keeps_most_of_its_meaning",
    "test_transformers_steps.py::test_generate_compiles_one_graph_for_all_steps[plain]",
    "test_transformers_steps.py::test_a_compiled_model_makes_the_masks_of_steps_in_its_graph[1-none]",
    "test_transformers_steps.py::test_a_compiled_model_makes_the_masks_of_steps_in_its_graph[1-gaps]",
)


def pinned() -> str:
    lines = (ROOT / "constraints-transformers-floor.txt").read_text()
    (version,) = re.findall(r"^transformers==(\S+)$", lines, re.M)
    return version


def of_models() -> list[Path]:
    """Half of the tests beside this one that load transformers, other ones in every run. Those of diffusers do not."""
    found = [path for path in HERE.parent.glob("test_*.py") if MODELS.search(path.read_text())]
    return half(sorted(path for path in found if path != HERE))


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
