"""cpu.attention against the reference in float64, on every case, dtype, layout and config; its memory and its speed."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sparsek.attn.kernels.forward.cpu_steps import CpuAttentionConfig
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.core.device import H200, has_bf16_units
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.attn.kernels.conformance import Forward
from tests.attn.kernels.forward.inputs import LARGE, SMALL, drawn_inputs, largest_product, normal
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem
from tests.engine.launch import timed
from tests.sampling import sampled

KERNEL = load("cpu.attention")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ONE_BLOCK = CpuAttentionConfig(step_bytes=1)


class TestCpu(Forward):
    kernel = KERNEL


class TestCpuInSteps(TestCpu):
    config = ONE_BLOCK


@pytest.mark.parametrize(
    ("case", "dtype"), sampled(list(itertools.product(ATTENTION_CASES, FLOATS)), 42), ids=str
)
def test_every_case_is_within_budget_in_every_dtype(case: AttentionCase, dtype: torch.dtype) -> None:
    q, k, v, mask = case.make(dtype=dtype)
    gate = check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask))
    assert gate.passed, gate


@pytest.mark.parametrize("case", sampled(ATTENTION_CASES, 21), ids=str)
def test_one_block_at_a_time_is_within_budget(case: AttentionCase) -> None:
    q, k, v, mask = case.make()
    gate = check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask, ONE_BLOCK))
    assert gate.passed, gate


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_every_query_sees_as_many_keys_as_its_mask_says(case: AttentionCase) -> None:
    """With q = 0, lse is the logarithm of the number of keys that a query sees: one key too many shows in any dtype."""
    q, k, v, mask = case.make()
    lse = attend(KERNEL, torch.zeros_like(q), k, v, mask)[1]
    counts = mask.to_dense().sum(-1).repeat_interleave(q.shape[1] // mask.heads, 1)
    assert torch.equal(lse.double().exp().round().long(), counts.expand_as(lse))


def test_every_config_is_within_budget() -> None:
    q, k, v, mask = normal(2, 4, 300, 32), normal(2, 2, 400, 32), normal(2, 2, 400, 64), None
    mask = random_bits("cpu", (300, 400), SMALL, heads=2, density=1.0)
    for config in KERNEL.configs(problem(q, k, v, mask)):
        gate = check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask, config))
        assert gate.passed, (config, gate)


@given(drawn_inputs(), st.sampled_from([1, 1 << 18, 1 << 22]))
def test_drawn_masks_are_within_budget(
    drawn: tuple[Tensor, Tensor, Tensor, BlockMask], step_bytes: int
) -> None:
    q, k, v, mask = drawn
    gate = check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask, CpuAttentionConfig(step_bytes)))
    assert gate.passed, gate


def test_queries_that_see_nothing_get_zero_with_or_without_blocks() -> None:
    """Of 400 queries over 150 keys the first 250 see nothing: whole tiles, and part of one that has a block."""
    mask = BlockMask.causal(q_len=400, kv_len=150, block=SMALL, device="cpu")
    q, k, v = normal(1, 2, 400, 16), normal(1, 2, 150, 16), normal(1, 2, 150, 16)
    for config in (CpuAttentionConfig(), ONE_BLOCK):
        out, lse = attend(KERNEL, q, k, v, mask, config)
        assert bool((out[:, :, :250] == 0).all())
        assert bool((lse[:, :, :250] == -torch.inf).all())
        assert bool(out[:, :, 250:].isfinite().all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_blocks_that_are_not_stored_never_reach_a_tile(bad: float) -> None:
    mask = BlockMask.sliding_window(512, 64, block=SMALL, device="cpu")
    q, k, v = (normal(1, 2, 512, 16, seed=i) for i in range(3))
    clean = attend(KERNEL, q, k, v, mask)
    k[:, :, 128:192] = v[:, :, 128:192] = bad
    dirty = attend(KERNEL, q, k, v, mask)
    untouched = torch.ones(512, dtype=torch.bool)
    untouched[128:256] = False
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one[:, :, untouched], other[:, :, untouched])
    assert bool(dirty[0][:, :, 128:192].isnan().all())


def test_inputs_that_need_gradients_are_taken() -> None:
    q = normal(1, 1, 64, 16).requires_grad_()
    assert not attend(KERNEL, q, q, q, BlockMask.causal(64, device="cpu"))[0].requires_grad


def test_memory_stays_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest operands of a product, with queries that visit 32 blocks each."""
    mask = BlockMask.full(2048, block=SMALL, device="cpu")
    q, k, v = (normal(1, 2, 2048, 32, seed=i) for i in range(3))
    largest = largest_product(monkeypatch)
    config = CpuAttentionConfig(step_bytes=1 << 18)
    assert check_attention(q, k, v, mask, *attend(KERNEL, q, k, v, mask, config)).passed
    assert 0 < largest[0] <= config.step_bytes


def test_it_says_that_it_is_for_cpu_tensors_and_what_it_shares() -> None:
    q, k, v, mask = ATTENTION_CASES[0].make()
    p = problem(q, k, v, mask)
    assert KERNEL.why_not(p) == []
    assert KERNEL.why_not(replace(p, card=H200)) == ["runs on CPU tensors only"]
    assert KERNEL.notes(p, KERNEL.default(p)) == []
    shared = replace(p, q_heads=8, kv_heads=2)
    assert KERNEL.notes(shared, KERNEL.default(p)) == ["4 query heads share a gathered block"]
    assert KERNEL.notes(replace(shared, mask_heads=8), KERNEL.default(p)) == []


def test_configs_read_well() -> None:
    assert str(CpuAttentionConfig(1 << 21)) == "steps of 2048 KiB"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [SMALL, LARGE], ids=str)
def test_an_eighth_of_the_blocks_takes_less_than_half_the_time_of_dense(
    dtype: torch.dtype, block: tuple[int, int]
) -> None:
    """Dense is torch's. A CPU that multiplies bf16 in units of its own (AMX) runs that ten times as fast as float32, in
    which cpu.attention computes; there it is held against itself with every block.
    """
    length, blocks = 2048, 2048 // block[1]
    scores = torch.rand(1, 2, 2048 // block[0], blocks, generator=torch.Generator().manual_seed(1))
    mask = BlockMask.topk(scores, blocks // 8, block=block, seq_len=length)
    q, k, v = (normal(1, 2, length, 64, seed=i, dtype=dtype) for i in range(3))
    out, p = torch.empty_like(q), problem(q, k, v, mask, lse=False)
    config = KERNEL.default(p)
    work = KERNEL.prepare(p, config, mask)
    calls: dict[str, Any] = {
        "cpu.attention": lambda: KERNEL.launch(config, work, AttentionCall(q, k, v, mask, 0.125, out, None)),
        "dense": lambda: functional.scaled_dot_product_attention(q, k, v),
    }
    if dtype == torch.bfloat16 and has_bf16_units():
        every = BlockMask.full(length, block=block, device="cpu")
        whole = KERNEL.prepare(problem(q, k, v, every, lse=False), config, every)
        calls["dense"] = lambda: KERNEL.launch(config, whole, AttentionCall(q, k, v, every, 0.125, out, None))
    timed.hold(calls, 0.5)
