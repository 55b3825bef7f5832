"""`--json`: one document on standard output and nothing else there, at any width."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparsek.core.terminal import print_json
from sparsek.tools.cli import doctor
from sparsek_bench.engine import records

BENCH = ["bench", "spmm", "--m", "64", "--k", "64", "--n", "16", "--block", "16", "--dtype", "fp32"]
BENCH += ["--rounds", "1", "--device", "cpu"]


@pytest.fixture
def parsed(run, monkeypatch: pytest.MonkeyPatch):
    """The document of a command, which exits with a code, on a narrow screen."""
    monkeypatch.setenv("COLUMNS", "30")

    def call(*arguments: object, code: int = 0) -> dict[str, Any]:
        result = run(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return call


def test_a_document_has_null_for_what_json_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("inf"), "b": (1, Path("c")), "d": {"e": float("nan"), "f": True}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, "c"], "d": {"e": None, "f": True}}


def test_doctor(parsed, monkeypatch: pytest.MonkeyPatch) -> None:
    every = doctor.names_for
    monkeypatch.setattr(
        doctor, "names_for", lambda op, storage=None: every(op, storage) if storage == "bsr" else ()
    )
    found = parsed("doctor")
    assert found["torch"] == torch.__version__
    assert found["healthy"] is True
    assert found["cards"] == [] or found["cards"][0]["name"]
    (spmm,) = [each for each in found["operations"] if each["operation"] == "spmm, BSR"]
    assert spmm["on_h200"] == "hopper.spmm"
    assert spmm["predicted_seconds"] > 0
    assert spmm["roofline_seconds"] > 0
    by_name = {each["name"]: each for each in found["kernels"]}
    assert set(by_name) == set(every("spmm", "bsr"))
    assert by_name["cpu.spmm"]["gate"]["passed"] is True
    assert by_name["cpu.spmm"]["why_not"] == []
    if not torch.cuda.is_available():
        assert by_name["hopper.spmm"]["gate"] is None
        assert by_name["hopper.spmm"]["why_not"]


def test_advise(parsed, tmp_path: Path) -> None:
    save_file(
        {"w": torch.randn(64, 64), "b": torch.randn(64), "nan": torch.full((64, 64), np.nan)},
        tmp_path / "m.safetensors",
    )
    small = ["--block", "16", "--tokens", "8", "--device", "h200", "--keep", "0.25"]
    found = parsed("advise", tmp_path / "m.safetensors", *small)
    assert found["question"]["predicted_for"] == "h200"
    assert found["skipped"] == [{"what": "1 of 3 arrays (b)", "why": "no 2-D float matrix"}]
    by_label = {each["label"]: each for each in found["matrices"]}
    assert by_label["nan"]["verdict"] == "failed"
    assert "NaN" in by_label["nan"]["failures"][0]["reason"]
    w = by_label["w"]
    assert (w["shape"], w["stored_blocks"], w["blocks"]) == ([64, 64], 4, 16)
    assert w["times"][0]["predicted"] is True
    assert {"2:4", "dense"} <= {each["name"] for each in w["formats"]}


def test_bench(parsed, tmp_path: Path) -> None:
    found = parsed(*BENCH, "--peers", "torch_dense,cublas", "--out", tmp_path / "r.jsonl")
    assert (found["benchmark"], found["failed"]) == ("spmm", [])
    assert found["records"] == records.read(tmp_path / "r.jsonl")
    assert [each["name"] for each in found["not_measured"]] == ["cublas"]
    assert found["not_measured"][0]["cases"] == ["64²×16 block 16 12.5 % fp32"]


def test_bench_that_measures_nothing(parsed) -> None:
    found = parsed(*BENCH, "--peers", "none", "--kernel", "hopper.spmm", code=1)
    assert found["records"] == []
    assert "Hopper" in found["not_measured"][0]["why"]
