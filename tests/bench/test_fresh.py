"""New masks through the run: each call makes one, results are held to the CPU's builder, and what the table shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.core import clock
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine import records, report, run
from sparsek_bench.suites import fresh
from sparsek_bench.suites.fresh import (
    BENCH,
    FreshCase,
    FreshProductCase,
    PlannedMaskCase,
    by_the_cpu,
    check_mask,
)
from tests.bench.runs import measured

CPU = torch.device("cpu")
FIELDS = (1, 2, 1, 256, 256, 32, 32)
WINDOW = "window:100+sinks:10"


def small(mask: str, trains: bool = False) -> FreshCase:
    return FreshCase(*FIELDS, mask, (64, 64), "fp32", trains)


def planned(mask: str = WINDOW, **lengths: int) -> PlannedMaskCase:
    fields = small(mask).as_record() | lengths
    del fields["trains"]
    return PlannedMaskCase.from_record(fields)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (FreshCase, FreshProductCase, PlannedMaskCase):
        monkeypatch.setattr(kind, "wall", 1)
    monkeypatch.setattr(clock, "WALL_WARMUP", 0)


def outcome_of(case: Any) -> run.Outcome:
    return measured(case, peers=BENCH.peers, rounds=1)


@pytest.mark.parametrize("case", [small("topk:2"), small("topk:2", True), small("documents:100")])
def test_a_new_mask_in_every_call_is_compared_with_a_kept_one(case: FreshCase, few: None) -> None:
    outcome = outcome_of(case)
    (record,) = outcome.records
    kept = record["peers"]["kept"]["ms"]["median"]
    assert record["ratio"]["kept"] == pytest.approx(kept / record["ms"]["median"], rel=1e-2, abs=1e-4)
    assert ("backward" in case.name) == case.trains == (" + " in record["kernel"])
    assert outcome.unavailable["flex"][0] == "runs on cuda, the case is on cpu"


@pytest.mark.parametrize("trains", [False, True])
def test_a_new_pattern_in_every_call_is_compared_with_a_kept_one(trains: bool, few: None) -> None:
    case = FreshProductCase(128, (32, 32), 0.5, trains, "fp32")
    outcome = outcome_of(case)
    (record,) = outcome.records
    assert record["ratio"]["kept"] > 0
    assert ("backward" in case.name) == trains
    assert outcome.unavailable["flex"] == ["computes attention"]
    one, other, *_ = case.operands(CPU)
    assert not torch.equal(one.kept_pattern.indices, other.kept_pattern.indices)
    assert one.make() is not one.make()
    wrong = other.called(other.make)()
    assert not one.judge(wrong).passed


def test_sets_have_masks_of_their_own(few: None) -> None:
    for text in ("topk:2", "documents:100"):
        sets = small(text).operands(CPU)
        assert len(sets) == 4
        dense = [one.make().to_dense() for one in sets]
        assert not any(torch.equal(dense[0], each) for each in dense[1:])
        assert all(torch.equal(one.mask.to_dense(), each) for one, each in zip(sets, dense, strict=True))


def test_every_call_makes_a_mask() -> None:
    (one, *_) = small("topk:2").operands(CPU)
    made: list[BlockMask] = []

    def make() -> BlockMask:
        made.append(one.make())
        return made[-1]

    call = one.called(make)
    assert torch.equal(call(), call())
    assert len({id(mask) for mask in made}) == 2


@pytest.mark.parametrize("trains", [False, True])
def test_a_wrong_mask_gets_no_time(trains: bool, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's mask is one of other scores than the gate's."""
    monkeypatch.setattr(fresh, "by_the_cpu", lambda make: by_the_cpu(make) & BlockMask.causal(256, block=64))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        outcome_of(small("topk:2", trains))


def test_documents_fill_the_sequence_and_begin_at_other_places(few: None) -> None:
    lengths = [one.make.args[0].diff().tolist() for one in small("documents:100").operands(CPU)]
    assert all(sum(each) == 256 and each[1:3] == [100, 100] and min(each) > 0 for each in lengths)
    assert len({each[0] for each in lengths}) == len(lengths)


def test_a_kernel_by_name_is_refused() -> None:
    (one, *_) = small("topk:2").operands(CPU)
    with pytest.raises(InvalidInput, match=r"as users write them, not by cpu\.attention"):
        one.plan("cpu.attention")


def test_a_planned_mask_is_held_to_the_rule_of_its_name(few: None) -> None:
    (record,) = outcome_of(planned()).records
    assert record["kernel"] == "mask.structured"
    assert record["gate"] == {"error": 0.0, "budget": 0.0, "passed": True}
    gate = check_mask(planned(), planned("window:99+sinks:10").mask_maker(CPU)())
    assert not gate.passed
    assert gate.error > 0


@pytest.mark.parametrize(("q_len", "kv_len"), [(100, 300), (300, 100), (2048, 2048)])
def test_a_mask_is_checked_where_its_queries_stand(q_len: int, kv_len: int) -> None:
    case = planned(q_len=q_len, kv_len=kv_len)
    assert check_mask(case, case.mask_maker(CPU)()).passed


def test_a_random_mask_has_no_rule_to_be_checked_by(few: None) -> None:
    with pytest.raises(InvalidInput, match="'topk:2' is no rule of positions"):
        outcome_of(planned("topk:2"))


def test_the_table_shows_limits_and_what_a_mask_costs(make_record: Callable[..., records.Record]) -> None:
    case, documents = (row.case for row in (BENCH.suites["topk"][0], BENCH.suites["documents"][0]))
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    kept = {"kept": {"ms": {"median": 0.16, "min": 0.1, "max": 0.2, "rounds": 5}, "tflops": None}}
    new = make_record(case, peers=kept, ratio={"kept": 0.8}, **nulls)
    beside_flex = make_record(documents, peers={"flex": kept["kept"]}, ratio={"flex": 1.9}, **nulls)
    window = BENCH.suites["window"][0].case
    build = make_record(window, "mask.structured", peers=kept, ratio={"kept": 0.8}, **nulls)
    assert [records.faults(each) for each in (new, beside_flex, build)] == [[], [], []]
    lines = report.markdown([build, beside_flex, new], "fresh").splitlines()
    assert lines[0] == "| case | ms | over a kept mask | target | over FlexAttention |"
    assert lines[2] == "| 8K top 8 | 0.200 ± 0.030 | 0.80 | at most 1.35 of a kept mask, met: 1.25 |  |"
    assert "|  | at most 0.5 of FlexAttention, missed: 0.53 | 0.80 |" in lines[3]
    assert lines[5] == (
        "A mask, built and planned: 200 us, built alone 160 us (512K window 4096 + sinks 128; "
        "target at most 250 us, met)."
    )
