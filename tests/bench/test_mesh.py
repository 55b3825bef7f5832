"""The benchmark of a mesh in small sizes, by two processes of gloo."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import MeshError
from sparsek_bench.engine import ranks, records, report
from sparsek_bench.engine.run import GateError
from sparsek_bench.suites import mesh, mesh_ranks
from sparsek_bench.suites.mesh import BENCH, MeshCase, MeshMemoryCase
from sparsek_bench.suites.mesh_models import SEQUENCE, MeshModelCase
from tests.bench.runs import measured

CPU = torch.device("cpu")
CASE = MeshCase(1, 4, 2, 512, 512, 16, 16, "causal", dtype="fp32", repeats=2)
MODEL: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "hidden": 96,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 50,
    "block": (16, 16),
    "dtype": "fp32",
}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    ranks.end_ranks()


def record_of(case: Any) -> Any:
    (record,) = measured(case, rounds=1).records
    assert records.faults(record) == []
    return record


def test_attention_is_measured_by_every_way_over_one_process() -> None:
    record = record_of(CASE)
    assert record["case"]["ranks"] == 2
    best = record["config"]["way"]
    assert {*record["peers"], best} == {"one", *mesh_ranks.WAYS} - {"both"}
    assert all(record["ratio"][name] >= 1 for name in record["peers"] if name != "one")
    alone = record["peers"]["one"]["ms"]["median"]
    assert record["ratio"]["one"] == pytest.approx(alone / record["ms"]["median"], rel=1e-2)
    assert (record["imbalance"], record["bytes_over_fewest"], record["unlike"]) == (1.0, 1.0, 0)
    assert any(name.startswith("sparsek.distributed") for name in record["ran"])
    line = report.markdown([record], "mesh").splitlines()[2]
    assert f"{record['ratio']['one']:.2f}x, 2.00x | {best} | 1, 1 |" in line


def test_four_ranks_have_one_way_more_and_take_lists_of_tokens() -> None:
    record = record_of(replace(CASE, mask="tokens:3:15", block=(64, 64), ranks=4))
    assert {*record["peers"], record["config"]["way"]} == {"one", *mesh_ranks.WAYS}
    assert record["imbalance"] > 1  # of what the lists see, where tokens are dealt by causality
    assert record["unlike"] == 0


@pytest.mark.parametrize(
    ("work", "mode"),
    [("prefill", "eager"), ("train", "eager"), ("prefill", "graph"), ("prefill", SEQUENCE)],
)
def test_a_model_is_split_and_held_to_the_whole_one(work: str, mode: str) -> None:
    record = record_of(MeshModelCase(work, 1, 24, mode, **MODEL))
    assert 0 < record["host_ms"] < 1e4
    assert 0 < record["one_host_ms"] < 1e4
    assert record["ratio"]["one"] > 0
    assert any(name.startswith("sparsek.nn.parallel_linear") for name in record["ran"])


def test_memory_is_that_of_the_fullest_rank_over_its_share() -> None:
    case = MeshMemoryCase(1, 4, 2, 512, 512, 16, 16, "window:128+sinks:8", dtype="fp32")
    record = record_of(case)
    assert (record["peak_gb"], record["one_gb"]) == (None, None)  # of a GPU
    on_gpu = record | {"peak_gb": 5.5, "one_gb": 10.0}
    line = report.markdown([on_gpu], "mesh_memory").splitlines()[2]
    assert "| 1.100 | at most 1.1, met: 1.10 |" in line


def test_a_small_case_keeps_the_share_of_blocks() -> None:
    case = MeshCase.square("topk:128", 128, heads=(32, 8))
    assert (case.small.q_len, case.small.mask) == (16384, "topk:16")
    assert replace(case, mask="causal").small.mask == "causal"


def test_mixed_documents_fill_the_sequence() -> None:
    case = replace(CASE, mask="mixed:128")
    mask = case.mask_maker(CPU)()
    assert (mask.q_len, mask.kv_len) == (512, 512)
    firsts = (mask.to_dense()[0, 0].int().argmax(1) == torch.arange(512)).nonzero().flatten()
    lengths = torch.diff(firsts, append=torch.tensor([512]))
    assert lengths.max() <= 128
    assert len(lengths.unique()) > 2


def test_without_as_many_gpus_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for row in (CASE, MeshModelCase("prefill", 1, 24, **MODEL)):
        outcome: Any = row.run(device=torch.device("cuda"), rounds=1)
        assert not outcome.records
        assert [*outcome.unavailable.values()] == [
            ["2 ranks need as many GPUs of one host; this one has 1: skipped"]
        ]


def wrong(tell: Any, device: Any, case: Any, rounds: int) -> Any:
    """One rank's attention is off."""
    attention = sk.distributed.attention
    if torch.distributed.get_rank() == 1:
        sk.distributed.attention = lambda *args, **more: attention(*args, **more) * 1.5
    try:
        return mesh_ranks.attention_rows(tell, device, case, rounds)
    finally:
        sk.distributed.attention = attention


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "attention_rows", wrong)
    with pytest.raises(GateError, match="WRONG RESULT by gather"):
        record_of(CASE)


def busy(tell: Any, device: Any, kind: str) -> None:
    """Rank 1 does what `kind` says, and the other waits for it."""
    tell("row 7")
    if torch.distributed.get_rank() == 1 and kind != "ready":
        if kind == "hangs":
            time.sleep(60)
        if kind == "ends":
            os._exit(3)
        raise ValueError("no such thing")
    ranks.together()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hangs", r"busy: ranks \[0, 1\] have no answer after 3 s; last report: row 7"),
        ("ends", "busy: rank"),
        ("raises", "busy: rank"),
    ],
)
def test_nobody_waits_for_ever(kind: str, message: str) -> None:
    began, both = time.monotonic(), ranks.ranks_of("cpu", 2)
    both.run(busy, "ready", limit=60)  # imports this module, which takes its time on a slow machine
    with pytest.raises(MeshError, match=message):
        both.run(busy, kind, limit=3 if kind == "hangs" else 30)
    assert time.monotonic() - began < 120
    assert not ranks._STARTED


def test_every_row_of_the_suites_has_a_bar_or_compares_bits() -> None:
    assert len(BENCH.suites["attention"]) == 5
    assert [row.case.repeats for row in BENCH.suites["repeats"]] == [1000, 1000]
    for name, count in (("four", 4), ("eight", 8)):
        cases = [row.case for row in BENCH.suites[name]]
        assert {case.ranks for case in cases} == {count}
        assert {case.q_len for case in cases if isinstance(case, MeshCase)} == {131072, 524288}
