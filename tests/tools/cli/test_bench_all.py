"""`sparsek bench all`: what it measures, where it stops, and that it goes on there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsek_bench.benches import BENCHES
from sparsek_bench.commands import bench_all, bench_run
from sparsek_bench.engine import records
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.suites.spmm import SpmmCase

SMALL = tuple(SuiteRow(SpmmCase(64, 96, n, (32, 32), 0.5, dtype="fp32")) for n in (16, 32, 48))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small rows, which a CPU may measure."""
    monkeypatch.setattr(
        bench_all, "BENCHES", {"spmm": replace(BENCHES["spmm"], suites={"small": SMALL}, peers=())}
    )
    monkeypatch.setattr(bench_all, "refuse_cpu", lambda device: None)
    monkeypatch.setattr("sparsek_bench.engine.data.MAX_SETS", 2)


def test_bench_all_goes_on_where_it_stopped(run, small: None, tmp_path: Path) -> None:
    given = ["bench", "all", "--rounds", "1", "--device", "cpu", "--records", tmp_path]

    def call(*more: Any) -> str:
        result = run(*given, *more)
        assert result.exit_code == 0, result.output
        return result.output

    assert "3 of 3 rows to measure on cpu" in call("--list")
    first = call("--limit", "0.02")
    assert "1/3 spmm: 64×96×16 block 32 50 % fp32: " in first
    assert "stopped with 2 rows left, spmm: 64×96×32 block 32 50 % fp32 first; run again" in first
    second = call()
    assert "2 of 3 rows to measure" in second
    assert "2/2 spmm: 64×96×48 block 32 50 % fp32: " in second
    assert "none left" in second
    assert "0 of 3 rows to measure" in call()
    assert "3/3" in call("--again")
    assert len(records.read(tmp_path / "cpu" / "spmm.jsonl")) == 6


def test_bench_all_keeps_new_records_in_one_file_which_can_be_taken_over(
    run, small: None, tmp_path: Path
) -> None:
    out, folder = tmp_path / "new.jsonl", tmp_path / "records"
    given = ["bench", "all", "--rounds", "1", "--device", "cpu", "--records", folder]
    run(*given, "--limit", "0", "--out", out)
    assert len(records.read(out)) == 1
    result = run(*given, "--out", out)
    assert "2 of 3 rows to measure" in result.output
    assert len(records.read(out)) == 3
    assert not folder.exists()
    assert "3 of 3 rows" in run(*given, "--list").output
    assert "3 records put into" in run("bench", "all", "--records", folder, "--take", out).output
    assert [path.name for path in (folder / "cpu").iterdir()] == ["spmm.jsonl"]
    assert "0 of 3 rows" in run(*given, "--list").output


def test_an_interrupted_row_loses_no_other(
    run, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = bench_all.measured

    def interrupted(entry: SuiteRow, *rest: Any, **more: Any) -> Any:
        if entry == SMALL[1]:
            raise KeyboardInterrupt
        return measure(entry, *rest, **more)

    given = ["bench", "all", "--rounds", "1", "--device", "cpu", "--records", tmp_path]
    monkeypatch.setattr(bench_all, "measured", interrupted)
    result = run(*given)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert "stopped with 2 rows left" in result.output
    assert len(records.read(tmp_path)) == 1
    monkeypatch.setattr(bench_all, "measured", measure)
    assert "2 of 3 rows to measure" in run(*given).output
    assert len(records.read(tmp_path)) == 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA went away"), AssertionError()])
def test_a_row_that_fails_is_named_and_the_others_are_measured(
    run, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    measure = bench_run.measure

    def fails(entry: SuiteRow, **given: Any) -> Any:
        if entry == SMALL[1]:
            raise error
        return measure(entry, **given)

    monkeypatch.setattr(bench_run, "measure", fails)
    result = run("bench", "all", "--rounds", "1", "--device", "cpu", "--records", tmp_path, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [each["case"] for each in document["failed"]] == ["spmm: 64×96×32 block 32 50 % fp32"]
    assert document["failed"][0]["why"]
    assert [each["case"]["n"] for each in document["measured"]] == [16, 48]
    assert (len(document["to_measure"]), document["left"]) == (3, [])
    assert "1 rows gave no record: spmm: 64×96×32" in result.stderr
    assert len(records.read(tmp_path)) == 2


def test_bench_all_writes_a_page_of_what_was_measured_now_or_before(run, small: None, tmp_path: Path) -> None:
    given = ["bench", "all", "--rounds", "1", "--device", "cpu", "--records", tmp_path]
    run(*given, "--limit", "0")
    assert run(*given, "--html", tmp_path / "all.html").exit_code == 0
    text = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert [f"64×96×{n} block 32 50 % fp32" in text for n in (16, 32, 48)] == [True] * 3
