"""cuSPARSELt as a peer: its algorithms tried in child processes, held against a stand-in of the library on the CPU."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.clock import Times
from sparsek.products.kernels.spmm.vendor_cublas_fp8 import has_rows_on_a_cpu
from sparsek_bench.engine import peer as peers
from sparsek_bench.engine.peer import UnavailableError
from sparsek_bench.peers import cusparselt
from sparsek_bench.peers.cusparselt import (
    LAYOUTS,
    WAYS,
    Task,
    Way,
    attempts,
    listen,
    measured,
    probe,
    usable,
)
from sparsek_bench.suites import fp8, semi24
from sparsek_bench.suites.fp8 import Fp8Case
from sparsek_bench.suites.semi24 import Semi24Case
from sparsek_bench.suites.story import StoryCase

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CUSPARSELT: Any = next(peer for peer in semi24.PEERS if peer.name == "cusparselt")
CUSPARSELT_FP8: Any = next(peer for peer in fp8.PEERS if peer.name == "cusparselt")
CUBLAS_FP8: Any = next(peer for peer in fp8.PEERS if peer.name == "cublas_fp8")
TASK = Task(32, 64, 16, "bf16")
ROWS, TURNED = Way(1, "row", "row"), Way(3, "col", "col")
WHOLE = Semi24Case(64, 96, 32)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the library, whose algorithm 5 is wrong and which has no other beyond 3; the calls it had."""
    told: list[dict[str, Any]] = []

    def multiply(packed: Tensor, b: Tensor, *, alg_id: int, out_dtype: Any, transpose_result: bool) -> Tensor:
        assert b.is_contiguous() or b.mT.is_contiguous()
        if alg_id not in (0, 1, 2, 3, 5):
            raise RuntimeError("CUDA error: invalid value\nmore")
        told.append({"alg_id": alg_id, "by_columns": transpose_result, "b_row": b.is_contiguous()})
        c = packed.float() @ b.float()
        c = (c.mT if transpose_result else c).contiguous().to(out_dtype or b.dtype)
        return c.fill_(torch.nan) if alg_id == 5 else c

    monkeypatch.setattr(torch, "_cslt_compress", lambda a: a.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", None)
    instant = lambda calls, **options: {name: Times.of([float(len(name))]) for name in calls}  # noqa: E731
    monkeypatch.setattr(peers, "time_rounds", instant)
    return told


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_way_is_announced_and_then_answered(library: list[dict[str, Any]], dtype: str) -> None:
    lines = list(attempts(TASK._replace(dtype=dtype), CPU, 0))
    places = [place for place, _ in lines]
    assert places[::2] == places[1::2] == list(range(len(WAYS)))
    assert all(answer is None for _, answer in lines[::2])
    answers = [answer for _, answer in lines[1::2] if answer is not None]
    for answer, way in zip(answers, WAYS, strict=True):
        if way.alg_id > 3 and way.alg_id != 5:
            assert answer == {"why": "CUDA error: invalid value"}
        else:
            assert (answer["error"] < 5e-3) == (way.alg_id != 5)
    asked = dict.fromkeys((told["b_row"], told["by_columns"]) for told in library)
    assert list(asked) == [(b == "row", c == "col") for b, c in LAYOUTS]


def test_it_goes_on_where_the_last_child_ended(library: list[dict[str, Any]]) -> None:
    places = [place for place, _ in attempts(TASK, CPU, 7)]
    assert places[::2] == list(range(7, len(WAYS)))


def test_what_a_way_gives_is_judged(library: list[dict[str, Any]]) -> None:
    a, b = cusparselt.random_24(16, 32, torch.bfloat16, CPU), torch.randn(32, 8).bfloat16()
    assert ((a != 0).view(16, 8, 4).sum(-1) <= 2).all()
    assert (a != 0).sum() > 200
    right = a.float() @ b.float()
    assert measured(a, cusparselt.laid(b, "col"), TURNED, right)["error"] < 5e-3
    assert measured(a, b, ROWS, -right)["error"] == pytest.approx(2, rel=1e-2)
    assert math.isnan(measured(a, b, Way(5, "row", "row"), right)["error"])


def child(*lines: Any, end: str = "") -> list[str]:
    """A process that writes these lines, and ends so."""
    text = "\n".join(json.dumps(line) for line in lines)
    return [sys.executable, "-c", f"import sys\nprint('''{text}''', flush=True)\n{end}"]


def test_a_child_that_dies_leaves_the_place_where_it_was() -> None:
    lines = [0, None], [0, {"ms": 1.0, "error": 0.0}], [1, None]
    answers, why = listen(child(*lines, end="sys.exit('lost\\nillegal')"), 60)
    assert answers == {0: {"ms": 1.0, "error": 0.0}, 1: None}
    assert why == "illegal"
    answers, why = listen(child([0, None], end="import os; os._exit(3)"), 60)
    assert (answers, why) == ({0: None}, "exit status 3")
    answers, why = listen(child([0, None], end="print('[1, nu', end='', flush=True); sys.exit('cut')"), 60)
    assert (answers, why) == ({0: None}, "cut")


def test_a_child_that_hangs_is_ended() -> None:
    answers, why = listen(child([4, None], end="import time; time.sleep(60)"), 2.0)
    assert answers == {4: None}
    assert why == "ended after 2 s"


def test_a_child_ends_itself_when_a_way_gives_no_answer() -> None:
    text = """
import time
from sparsek_bench.peers import cusparselt
cusparselt.SILENT = 1.0
cusparselt.attempts = lambda *given: (time.sleep(60) if place else (place, None) for place in range(2))
cusparselt.main('[1, 1, 1, "bf16"]', "cpu", "0")
"""
    answers, why = listen([sys.executable, "-c", text], 50)
    assert answers == {0: None}
    assert why == "no answer in 20 s"


def test_a_fatal_algorithm_is_left_alone_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    def one(command: Sequence[str], seconds: float) -> tuple[dict[int, Any], str]:
        task, device, start = json.loads(command[3]), command[4], int(command[5])
        assert (task, device) == (list(TASK), "cuda:0")
        starts.append(start)
        good = {"ms": 1.0, "error": 1e-3}
        if start == 0:
            return {0: good, 1: good | {"ms": 0.5}, 4: good, 5: None}, "illegal instruction"
        return {place: {"why": "no such"} for place in range(start, len(WAYS))}, ""

    monkeypatch.setattr(cusparselt, "listen", one)
    reported: list[str] = []
    found = probe(TASK, torch.device("cuda:0"), reported.append)
    assert starts == [0, 8]
    assert reported == ["cuSPARSELt: algorithm 1, B by rows, C by cols is fatal"]
    fatal = {way: one["why"] for way, one in found.items() if one.get("fatal")}
    assert fatal == {WAYS[5]: "illegal instruction"}
    assert list(usable(found)) == [WAYS[1], WAYS[0]]


def test_children_that_die_share_the_time_of_their_task(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def one(command: Sequence[str], seconds: float) -> tuple[dict[int, Any], str]:
        given.append(seconds)
        now[0] += min(15.0, seconds)
        return {int(command[5]): None}, "illegal instruction"

    monkeypatch.setattr(cusparselt, "listen", one)
    monkeypatch.setattr(cusparselt, "monotonic", lambda: now[0])
    monkeypatch.setattr(cusparselt, "LIMIT", 40.0)
    found = probe(TASK, torch.device("cuda:0"), lambda text: None)
    assert given == [40.0, 25.0, 10.0]
    assert list(found) == [WAYS[0], WAYS[4], WAYS[8]]
    given.clear()
    monkeypatch.setattr(cusparselt, "LIMIT", 1e9)
    probe(TASK, torch.device("cuda:0"), lambda text: None)
    assert given == [cusparselt.SECONDS] * cusparselt.DEATHS


def test_a_child_without_an_answer_ends_the_trying_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(cusparselt, "_FOUND", {})
    monkeypatch.setattr(cusparselt, "listen", lambda *given: (started.append(given), ({}, "no device"))[1])
    with pytest.raises(UnavailableError, match="ways of cuSPARSELt ran and was right: no device"):
        cusparselt.ways_that_run(TASK, torch.device("cuda:0"), lambda text: None)
    assert len(started) == 1


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, library: list[dict[str, Any]]) -> list[Task]:
    """A child process that found some ways to be right, one of them by mistake; the tasks it was given."""
    asked: list[Task] = []

    def ways(task: Task, device: torch.device, report: Any) -> dict[Way, Any]:
        asked.append(task)
        return {way: {"ms": 1.0, "error": 1e-3} for way in (ROWS, TURNED, Way(5, "col", "row"))}

    monkeypatch.setattr(cusparselt, "probe", ways)
    monkeypatch.setattr(cusparselt, "_FOUND", {})
    return asked


@pytest.mark.parametrize(
    "case",
    [WHOLE, replace(WHOLE, form="A@B"), replace(WHOLE, dtype="fp16"), StoryCase(64, 128, 32, 0.5, (64, 64))],
    ids=lambda case: case.name,
)
def test_the_fastest_right_way_is_the_peer(
    case: Any, found: list[Task], library: list[dict[str, Any]]
) -> None:
    sets = case.operands(CPU)
    said: list[str] = []
    ready = CUSPARSELT.ready(case, sets, said.append)
    CUSPARSELT.ready(case, sets, lambda text: None)
    assert found == [Task(case.m, case.k, case.n, case.dtype)]  # tried once
    assert ready.note == "algorithm 1, B by rows, C by rows"  # of equal names the first
    assert ready.flops is None
    assert len(ready.calls) == len(sets)
    assert any("algorithm 5, B by cols, C by rows: cuSPARSELt is wrong here" in text for text in said)
    for one, call in zip(sets, ready.calls, strict=True):
        c: Any = call()
        assert one.judge(c.mT if one.is_linear else c).passed
    assert {told["alg_id"] for told in library[-2:]} == {1}


def test_fp8_is_judged_without_scales(found: list[Task]) -> None:
    case = Fp8Case(64, 96, 32, "semi24", None)
    sets = case.operands(CPU)
    ready = CUSPARSELT_FP8.ready(case, sets, lambda text: None)
    assert found == [Task(64, 96, 32, "fp8")]
    for one, call in zip(sets, ready.calls, strict=True):
        c: Any = call()
        a, b = one.dense_factors
        exact = a.double() @ b.double()
        assert c.dtype == torch.bfloat16
        assert (c.double() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize(
    ("peer", "case", "said"),
    [
        (CUSPARSELT, replace(WHOLE, block=(64, 64), m=128, k=128), "without blocks only"),
        (CUSPARSELT, replace(WHOLE, dtype="fp32"), "not set up here for fp32"),
        (CUSPARSELT, replace(WHOLE, m=72), "multiples of 16 and N of 8"),
        (CUSPARSELT, StoryCase(64, 256, 32, 0.25, (64, 64)), "without blocks only"),
        (CUSPARSELT_FP8, Fp8Case(64, 64, 32, "bsr", (32, 32)), "without blocks only"),
        (CUSPARSELT_FP8, Fp8Case(64, 64, 32, "semi24", None, dtype="e5m2"), "not set up here for e5m2"),
        (CUSPARSELT_FP8, Fp8Case(48, 64, 32, "semi24", None), "multiples of 32 and N of 16"),
    ],
)
def test_it_says_what_it_cannot_do(peer: Any, case: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs on cuda, the case is on cpu" in peer.why_not(case, CPU)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    (why,) = peer.why_not(case, CUDA)
    assert said in why
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert len(peer.why_not(case, CUDA)) == 2


@pytest.mark.parametrize("form", ["x@W.T", "A@B"])
def test_cublas_in_fp8_is_the_fastest_that_it_takes(
    form: str, library: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch._scaled_mm

    def no_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        if scale_a.ndim or options["use_fast_accum"]:
            raise RuntimeError("no such product\nmore")
        return real(a, b, scale_a, scale_b, out_dtype=options["out_dtype"])

    case = Fp8Case(64, 96, 32, "semi24", None, form=form)
    (one, *_) = sets = case.operands(CPU)
    ready = CUBLAS_FP8.ready(case, sets, lambda text: None)
    note = f"a scale per {'row' if has_rows_on_a_cpu() else 'tensor'}, fast sums"  # the shortest name
    assert (ready.note, ready.flops) == (note, case.dense_flops)
    c: Any = ready.calls[0]()
    assert c.shape == ((32, 64) if form == "x@W.T" else (64, 32))
    w = torch.randn(64, 96)
    assert 0.1 < float(c.float().norm() / (one.b_as_factor.mT.dequantize() @ w.T).norm()) * 96**0.5 < 10
    monkeypatch.setattr(torch, "_scaled_mm", no_rows)
    assert CUBLAS_FP8.ready(case, sets, lambda text: None).note == "a scale per tensor, float32 sums"
    with pytest.raises(
        UnavailableError, match="a scale per tensor, fast sums: no such product; a scale per row"
    ):
        replace(CUBLAS_FP8, sums=(True,)).ready(case, sets, lambda text: None)
