"""Gradients of attention and training steps as benchmarks: cases, suites, operands, gates, records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention as attend
from sparsek.testing.attention_budget import ExpectedGradients
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import heads
from sparsek_bench.engine.heads import HeadGroup
from sparsek_bench.suites import attention, attention_grad
from sparsek_bench.suites.attention import AttentionCase, sampled
from sparsek_bench.suites.attention_grad import GRAD_PEERS, AttentionGradCase, AttentionTrainCase
from sparsek_bench.suites.tokens import TokensGradCase
from tests.bench.runs import measured
from tests.refusals import refused

CPU = torch.device("cpu")
SMALL = AttentionGradCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
STEP = AttentionTrainCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
BOTH = pytest.mark.parametrize("case", [SMALL, STEP], ids=["backward", "step"])
KERNELS = {
    "attention": "reference.attention",
    "attention_backward": "reference.attention_bwd",
    "attention_train": "reference.attention",
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


def test_a_step_is_recorded_under_both_kernels() -> None:
    (record,) = measured(STEP, KERNELS[STEP.op]).records
    assert set(record["config"]) == {"forward", "backward"}


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


@pytest.mark.parametrize(
    "case",
    [AttentionCase(1, 2, 1, 256, 256, 32, 32, "causal", (64, 64), "fp32"), SMALL, STEP],
    ids=lambda case: case.op,
)
def test_a_call_from_scratch_builds_its_mask(case: AttentionCase) -> None:
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


@pytest.mark.parametrize("block", [64, 128])
def test_a_sample_of_lists_of_tokens_is_held_to_the_right_gradients(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(attention, "GATED_WHOLE", 256)
    case = TokensGradCase(1, 8, 2, 1024, 1024, 16, 16, "tokens:4:15", (block, block), "fp32")
    (one, *_) = case.operands(CPU)
    assert one.sample()
    found = one.plan(None)(*one.given)
    assert one.judge(found).passed
    assert not one.judge([x * 1.01 for x in found]).passed


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
    monkeypatch.setattr(attention, "GATED_TILES", 8)
    return seen


def test_long_sequences_are_gated_by_tiles_of_two_heads(looked_at: list[Any]) -> None:
    for length in (256, 1024):
        case = replace(SMALL, q_len=length, kv_len=length, heads=6, kv_heads=3, mask="blocks:0.1")
        (one, *_) = case.operands(CPU)
        assert one.gate(one.plan("reference.attention_bwd")).passed
    tiles = sampled(16)
    assert tiles is not None
    assert len(set(tiles)) == 8
    assert (tiles[0], tiles[-1]) == (0, 15)
    assert looked_at == [(6, None, None), *[(2, tiles, tiles)] * 2]


def test_a_fault_in_the_last_head_of_a_long_sequence_is_found(looked_at: list[Any]) -> None:
    case = replace(SMALL, q_len=1024, kv_len=1024, heads=4, kv_heads=2, mask="window:200")
    (one, *_) = case.operands(CPU)
    out = [x.clone() for x in one.planned(one.plan("reference.attention_bwd"))()]
    assert one.judge(out).passed
    for place in range(3):
        wrong = [x.clone() for x in out]
        wrong[place][0, -1, -1] += 1.0
        assert not one.judge(wrong).passed
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
    refused("measure is one of backward, train, got 'forward'", cases, lists | {"measure": "forward"})


def test_cases_that_differ_in_determinism_alone_stand_side_by_side() -> None:
    other = replace(SMALL, q_len=128, kv_len=128, deterministic=False)
    free = replace(SMALL, deterministic=False)
    assert sorted([free, SMALL, other], key=lambda case: case.order) == [other, SMALL, free]
    assert free.name == f"{SMALL.name}, not deterministic"


def test_peers_of_the_forward_pass_have_their_gradients_here() -> None:
    assert {peer.name for peer in attention.PEERS} <= {peer.name for peer in GRAD_PEERS}
