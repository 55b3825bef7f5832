"""`make check`: which tests a change selects, and what becomes of a run of them."""

from pathlib import Path

import pytest

from scripts import check
from tests.house.tools import ROOT


@pytest.mark.parametrize(
    ("changed", "some", "others"),
    [
        (
            "sparsek/products/ops/spmm.py",
            ["tests/ops/test_spmm.py", "tests/ops/test_spmm_compiled.py"],
            "tests/core/test_clock.py",
        ),
        ("sparsek/engine/plan/cache.py", ["tests/plan/test_cache.py"], "tests/core/test_clock.py"),
        ("tests/ops/operands.py", ["tests/ops/test_gradients.py"], "tests/products/formats/test_bsr.py"),
        (
            "tests/products/formats/test_bsr.py",
            ["tests/products/formats/test_bsr.py"],
            "tests/products/formats/test_bsr24.py",
        ),
        (
            "tests/ops/gradients_interpreted.py",
            ["tests/ops/gradients_interpreted.py"],
            "tests/ops/test_spmm.py",
        ),
    ],
)
def test_a_change_selects_the_tests_that_it_touches(changed: str, some: list[str], others: str) -> None:
    found = check.affected([changed], ROOT)
    assert set(some) <= set(found)
    assert others not in found


def test_pages_and_what_everything_depends_on_select_no_test() -> None:
    assert check.affected(["README.md", "tests/conftest.py", "Makefile"], ROOT) == []


@pytest.mark.parametrize(
    ("body", "seconds", "passes"),
    [("pass", 100, True), ("assert False", 100, False), ("time.sleep(8)", 4, True)],
    ids=["passes", "fails", "is stopped"],
)
def test_a_run_of_tests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    seconds: int,
    passes: bool,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_a.py").write_text(f"import time\ndef test_0(): pass\ndef test_a():\n    {body}\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.tests_pass(["test_a.py"], 1, seconds, "0") is passes
    assert ("stopped" in capsys.readouterr().out) == (seconds == 4)
