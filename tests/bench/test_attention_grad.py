"""Gradients of attention and training steps as benchmarks: cases, suites, operands, gates, records."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention as attend
from sparsek.core.errors import InvalidInput
from sparsek.testing.attention_budget import ExpectedGradients
from sparsek.testing.budget import Gate
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import case as case_module
from sparsek_bench.engine import data, heads, records, run
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.heads import HeadGroup
from sparsek_bench.engine.peer import peers_named
from sparsek_bench.suites import attention, attention_grad
from sparsek_bench.suites.attention import AttentionCase, sampled
from sparsek_bench.suites.attention_grad import BENCH, GRAD_PEERS, AttentionGradCase, AttentionTrainCase

CPU = torch.device("cpu")
SMALL = AttentionGradCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
STEP = AttentionTrainCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
BOTH = pytest.mark.parametrize("case", [SMALL, STEP], ids=["backward", "step"])
KERNELS = {"attention_backward": "reference.attention_bwd", "attention_train": "reference.attention"}


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operand sets are enough here."""
    monkeypatch.setattr(data, "MAX_SETS", 2)


def measured(case: AttentionGradCase) -> run.Outcome:
    """The outcome of two rounds on the CPU, whose one record is well-formed."""
    outcome = run.measure(
        SuiteRow(case, (KERNELS[case.op],)),
        peers=peers_named(GRAD_PEERS, None, CPU),
        rounds=2,
        device=CPU,
        report=lambda text: None,
    )
    (record,) = outcome.records
    assert records.faults(record) == []
    assert list(record) == list(records.fields_of(case.op))
    assert (record["op"], record["case"]) == (case.op, case.as_record())
    return outcome


@pytest.mark.parametrize("name", BENCH.suites)
def test_every_suite_case_survives_a_record_and_has_a_name_of_its_own(name: str) -> None:
    entries = BENCH.suites[name]
    for entry in entries:
        again = type(entry.case).from_record(json.loads(json.dumps(entry.case.as_record())))
        assert again == entry.case
    assert len({entry.case.name for entry in entries}) == len(entries)


def test_the_suites_hold_every_row_of_the_speed_table() -> None:
    there = {
        (c.mask, c.q_len // 1024, c.block[0], c.dim, c.deterministic)
        for c in (entry.case for entry in BENCH.suites["published"])
    }
    eighth, fixed, free = "blocks:0.125", (128, 128, True), (128, 128, False)
    wanted = {(mask, s, *fixed) for mask in ("full", "causal") for s in (8, 32)} | {
        ("window:2048", 32, *fixed)
    }
    wanted |= {(eighth, s, block, 128, True) for s in (8, 32) for block in (64, 128)}
    wanted |= {(eighth, 32, 128, dim, True) for dim in (64, 256)}
    wanted |= {(eighth, 32, *free), ("causal", 32, *free)}
    assert there == wanted
    assert {(c.batch, c.heads, c.kv_heads, c.dtype) for c in (e.case for e in BENCH.suites["published"])} == {
        (1, 16, 16, "bf16")
    }
    steps = [entry.case for entry in BENCH.suites["train"]]
    assert [(c.q_len // 1024, c.mask, c.heads, c.op) for c in steps] == [
        (kilo, "window:4096", 8, "attention_train") for kilo in (64, 128, 256)
    ]
    assert {kernel for e in BENCH.suites["published"] for kernel in e.kernels} == {
        "auto",
        "portable.attention_bwd",
    }


def test_gradients_take_two_and_a_half_times_the_flops_of_the_forward_pass() -> None:
    forward = AttentionCase(2, 4, 2, 256, 256, 32, 32, "causal", (64, 64), "fp32")
    backward, step = (kind(**vars(forward)) for kind in (AttentionGradCase, AttentionTrainCase))
    for name in ("dense_flops", "causal_flops"):
        assert getattr(backward, name) == 2.5 * getattr(forward, name)
        assert getattr(step, name) == 3.5 * getattr(forward, name)
    useful = [case.operands(CPU)[0].useful_flops for case in (forward, backward, step)]
    assert useful == [useful[0], 2.5 * useful[0], 3.5 * useful[0]]
    assert useful[1] == backward.causal_flops
    narrow = replace(backward, v_dim=16)
    assert narrow.flops_per_pair == 2 * (3 * 32 + 2 * 16)
    assert narrow.operands(CPU)[0].useful_flops == narrow.causal_flops


def test_the_sets_of_a_backward_pass_hold_its_forward_pass() -> None:
    case = replace(SMALL, v_dim=16, deterministic=False)
    sets = case.operands(CPU)
    assert len(sets) == 2
    tensors = [x for one in sets for x in (one.q, one.k, one.v, one.grad, one.out, one.lse)]
    assert len({x.data_ptr() for x in tensors}) == len(tensors)
    assert not any(x.requires_grad for x in tensors)
    one = sets[1]
    out, lse = attend(one.q, one.k, one.v, one.mask, return_lse=True)
    assert torch.equal(one.out, out)
    assert torch.equal(one.lse, lse)
    assert one.grad.shape == (1, 2, 256, 16)
    assert [abs(float(one.grad.std()) - 1) < 0.1, torch.equal(one.grad, sets[0].grad)] == [True, False]
    assert not one.plan(None).problem.deterministic
    assert replace(one, deterministic=True).plan(None).problem.deterministic


def test_the_sets_of_a_step_want_gradients() -> None:
    for one in STEP.operands(CPU):
        assert all(x.requires_grad for x in (one.q, one.k, one.v))
        assert not one.grad.requires_grad


def test_a_backward_pass_is_recorded_with_the_dense_peer() -> None:
    outcome = measured(SMALL)
    (record,) = outcome.records
    assert record["kernel"] == "reference.attention_bwd"
    assert set(record["peers"]) == {"sdpa"}
    assert record["memory"] is record["peers"]["sdpa"]["memory"] is None
    useful = SMALL.operands(CPU)[0].useful_flops
    assert record["tflops"]["useful"] == pytest.approx(useful / record["ms"]["median"] / 1e9, rel=1e-3)
    dense = record["peers"]["sdpa"]
    assert dense["tflops"] == pytest.approx(SMALL.causal_flops / dense["ms"]["median"] / 1e9, rel=1e-3)


def test_a_step_is_recorded_under_both_kernels() -> None:
    (record,) = measured(STEP).records
    assert record["kernel"] == "reference.attention + reference.attention_bwd"
    assert set(record["config"]) == {"forward", "backward"}
    assert set(record["peers"]) == {"sdpa"}
    assert record["peak_gb"] is None
    assert records.is_fresh(record)


def test_the_plans_of_a_step_are_those_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = replace(STEP, deterministic=False).operands(CPU)
    plan = one.plan("reference.attention")
    forward, backward = plan.plans["forward"], plan.plans["backward"]
    assert forward.problem.lse
    assert not backward.problem.deterministic
    assert plan.bound_seconds == forward.bound_seconds + backward.bound_seconds
    asked: list[Any] = []
    real = attend

    def heard(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return real(*args, **options)

    monkeypatch.setattr(attention_grad, "attention", heard)
    out = plan.call()
    assert asked == [{"kernel": "reference.attention", "deterministic": False}]
    assert len(out) == 4
    assert not any(x.requires_grad for x in out)


@BOTH
def test_one_wrong_gradient_fails_the_gate(case: AttentionGradCase) -> None:
    (one, *_) = case.operands(CPU)
    out = list(one.planned(one.plan(KERNELS[case.op]))())
    assert len(out) == (4 if case is STEP else 3)
    assert one.judge(out).passed
    for place in range(len(out)):
        wrong = [x * 1.01 if index == place else x for index, x in enumerate(out)]
        gate = one.judge(wrong)
        assert not gate.passed
        assert gate.error > gate.budget


@BOTH
def test_results_begin_as_nan(monkeypatch: pytest.MonkeyPatch, case: AttentionGradCase) -> None:
    """A run right before the judged one leaves NaN in memory of every result's size."""
    (one, *_) = replace(case, v_dim=16).operands(CPU)
    spoilt: list[Any] = []
    real = case_module.spoil
    monkeypatch.setattr(case_module, "spoil", lambda results: (real(results), spoilt.extend(results)))
    plan = one.plan(KERNELS[case.op])
    assert one.gate(plan).passed
    assert [x.shape for x in spoilt] == [x.shape for x in one.planned(plan)()]
    assert all(x.isnan().all() for x in spoilt)


@BOTH
def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch, case: AttentionGradCase) -> None:
    wrong = Gate(1.0, 0.5, False)
    monkeypatch.setattr(ExpectedGradients, "judge", lambda *args: wrong)
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong kernel"))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        measured(case)


@BOTH
def test_a_call_from_scratch_builds_its_mask(case: AttentionGradCase) -> None:
    (one, *_) = case.operands(CPU)
    made: list[BlockMask] = []

    def make() -> BlockMask:
        made.append(one.make())
        return made[-1]

    call = replace(one, make=make).anew(KERNELS[case.op])
    first, second = call(), call()
    assert len({id(mask) for mask in made}) == 2
    assert one.judge(first).passed
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("mask", ["window:100+sinks:10", "blocks:0.5", "bigbird:64:64:1", "full"])
def test_a_group_of_heads_has_its_part_of_a_mask(mask: str, heads: tuple[int, int]) -> None:
    q_heads, kv_heads = heads
    case = AttentionGradCase(2, q_heads, kv_heads, 256, 320, 32, 32, mask, (64, 64), "fp32")
    whole = BlockMask.per_batch([case.mask_maker(CPU, seed)() for seed in (0, 1)])
    for group in (HeadGroup(0, 0), HeadGroup(1, kv_heads - 1)):
        for given in (whole, case.mask_maker(CPU)()):
            rows = given.dense_rows(0, 256).expand(2, -1, -1, -1)
            rows = rows.repeat_interleave(q_heads // rows.shape[1], 1)
            cut = group.mask(given, kv_heads)
            part = cut.dense_rows(0, 256)
            wanted = group.of(rows, kv_heads)
            assert torch.equal(part.expand_as(wanted), wanted)
            stored = part.unflatten(2, (-1, 64)).unflatten(4, (-1, 64)).any(5).any(3)
            visiting = cut.transposed.full.counts + cut.transposed.partial.counts
            assert torch.equal(visiting.flatten(), stored.sum(2, dtype=torch.int32).flatten())
            assert cut.sizes.stored == int(stored.sum())


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gates look at samples from 256 x 256 scores on. What each was asked: heads of q, rows and columns."""
    seen: list[Any] = []
    real = heads.expected_gradients

    def check(q: Any, *args: Any, rows: Any = None, columns: Any = None) -> ExpectedGradients:
        seen.append((q.shape[1], rows, columns))
        return real(q, *args, rows=rows, columns=columns)

    for module in (attention_grad, heads):
        monkeypatch.setattr(module, "expected_gradients", check)
    monkeypatch.setattr(attention, "GATED_WHOLE", 2**16)
    return seen


def test_long_sequences_are_gated_by_tiles_of_two_heads(looked_at: list[Any]) -> None:
    for length in (256, 2048):
        case = replace(SMALL, q_len=length, kv_len=length, heads=6, kv_heads=3, mask="blocks:0.1")
        (one, *_) = case.operands(CPU)
        assert one.gate(one.plan("reference.attention_bwd")).passed
    tiles = sampled(32)
    assert tiles is not None
    assert len(set(tiles)) == attention.GATED_TILES
    assert (tiles[0], tiles[-1]) == (0, 31)
    assert looked_at == [(6, None, None), *[(2, tiles, tiles)] * 2]


@pytest.mark.parametrize("place", range(3))
def test_a_fault_in_the_last_head_of_a_long_sequence_is_found(looked_at: list[Any], place: int) -> None:
    case = replace(SMALL, q_len=2048, kv_len=2048, heads=4, kv_heads=2, mask="window:200")
    (one, *_) = case.operands(CPU)
    out = [x.clone() for x in one.planned(one.plan("reference.attention_bwd"))()]
    assert one.judge(out).passed
    out[place][0, -1, -1] += 1.0
    assert not one.judge(out).passed
    assert looked_at


def test_memory_counts_what_a_call_takes_beyond_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def peak(call: Callable[[], Any], device: torch.device) -> int:
        called.append(call())
        return 10**6

    monkeypatch.setattr(attention, "peak_bytes", peak)
    monkeypatch.setattr(attention_grad, "peak_bytes", peak)
    (one, *_) = SMALL.operands(CPU)
    own = 4 * (2 + 1 + 1) * 256 * 32
    got = one.kernel_extra("reference.attention_bwd")
    assert got == {"memory": pytest.approx((10**6 - own) / (own + 4 * 2 * 256 * 32), rel=1e-3)}
    (step, *_) = STEP.operands(CPU)
    peak_gb = step.kernel_extra("reference.attention + reference.attention_bwd")["peak_gb"]
    assert peak_gb == pytest.approx((10**6 + own + 4 * 2 * 256 * 32) / 1e9, abs=1e-6)
    assert [len(out) for out in called] == [3, 4]


def test_a_product_of_lists_takes_every_combination() -> None:
    lists = {"batch": "1,2", "heads": "2:1", "seq": "64", "dim": "32", "mask": "full,causal", "block": "64"}
    cases = BENCHES["attention-backward"].cases
    made = cases(lists | {"measure": "backward,train", "dtype": "fp16", "deterministic": False})
    assert len(set(made)) == 8
    assert {type(case) for case in made} == {AttentionGradCase, AttentionTrainCase}
    assert not any(case.deterministic for case in made)
    with pytest.raises(InvalidInput, match="measure is one of backward, train, got 'forward'"):
        cases(lists | {"measure": "forward"})


def test_cases_that_differ_in_determinism_alone_stand_side_by_side() -> None:
    other = replace(SMALL, q_len=128, kv_len=128, deterministic=False)
    free = replace(SMALL, deterministic=False)
    assert sorted([free, SMALL, other], key=lambda case: case.order) == [other, SMALL, free]
    assert free.name == f"{SMALL.name}, not deterministic"


def test_peers_of_the_forward_pass_have_their_gradients_here() -> None:
    assert {peer.name for peer in attention.PEERS} <= {peer.name for peer in GRAD_PEERS}
