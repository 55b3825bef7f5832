"""cpu.attention_bwd, and the reference's kernel, against the reference in float64: cases, dtypes, layouts, configs;
memory and bits.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.kernels.forward.cpu_steps import CpuAttentionConfig
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention_backward
from sparsek.core.device import H200
from sparsek.engine.table import load
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import (
    MORE,
    cases,
    differentiate,
    hold,
    inputs,
    judged,
    poisoned_keys,
    problem,
)
from tests.attn.kernels.conformance import Backward
from tests.attn.kernels.forward.inputs import LARGE, SMALL, drawn_inputs, largest_product, normal
from tests.sampling import sampled

KERNEL = load("cpu.attention_bwd")
REFERENCE = load("reference.attention_bwd")
FLOATS = [torch.bfloat16, torch.float32, torch.float64]
IN_EVERY_DTYPE = sampled([*MORE, *ATTENTION_CASES[::5]], 5)
ONE_BLOCK = CpuAttentionConfig(step_bytes=1)


class TestCpu(Backward):
    kernel = KERNEL


class TestCpuInSteps(TestCpu):
    config = ONE_BLOCK


@pytest.mark.parametrize("case", sampled(cases(), 16), ids=str)
def test_every_case_is_within_budget_and_gives_the_same_bits_again(case: AttentionCase) -> None:
    hold(KERNEL, case)
    if case not in IN_EVERY_DTYPE:
        hold(KERNEL, case, dtype=torch.float32, with_lse=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", IN_EVERY_DTYPE, ids=str)
def test_every_dtype_is_within_budget(case: AttentionCase, dtype: torch.dtype) -> None:
    hold(KERNEL, case, dtype=dtype, with_lse=True)


@pytest.mark.parametrize("case", sampled(cases()[::3], 9), ids=str)
def test_one_block_at_a_time_is_within_budget(case: AttentionCase) -> None:
    hold(KERNEL, case, with_lse=True, config=ONE_BLOCK)


def test_every_config_is_within_budget() -> None:
    mask = random_bits("cpu", (300, 400), SMALL, heads=2, density=1.0)
    q, k, v = normal(2, 4, 300, 32), normal(2, 2, 400, 32), normal(2, 2, 400, 64)
    of = inputs(q, k, v, mask, with_lse=True)
    for config in KERNEL.configs(problem(q, k, v, mask)):
        gate = judged(of, differentiate(KERNEL, of, config))
        assert gate.passed, (config, gate)


@pytest.mark.parametrize("case", ATTENTION_CASES[::4], ids=str)
def test_the_references_kernel_gives_the_bits_of_the_reference(case: AttentionCase) -> None:
    of = inputs(*case.make(), with_lse=True)
    q, k, v, mask, scale, out, lse, grad, grad_lse, _ = of
    assert REFERENCE.why_not(problem(q, k, v, mask)) == []
    right = attention_backward(q, k, v, mask, out, lse, grad, grad_lse, scale=scale)
    for ours, exact in zip(differentiate(REFERENCE, of), right, strict=True):
        assert torch.equal(ours, exact)


@settings(max_examples=40)
@given(drawn_inputs(), st.sampled_from([1, 1 << 18, 1 << 22]), st.booleans())
def test_drawn_masks_are_within_budget(
    drawn: tuple[Tensor, Tensor, Tensor, BlockMask], step_bytes: int, with_lse: bool
) -> None:
    q, k, v, mask = drawn
    of = inputs(q, k, v, mask, with_lse=with_lse)
    gate = judged(of, differentiate(KERNEL, of, CpuAttentionConfig(step_bytes)))
    assert gate.passed, gate


@pytest.mark.parametrize("case", [*MORE[:2], *ATTENTION_CASES[::9]], ids=str)
def test_blocks_that_are_not_stored_never_reach_a_gradient(case: AttentionCase) -> None:
    q, k, v, mask = case.make()
    clean = differentiate(KERNEL, inputs(q, k, v, mask))
    dirty = differentiate(KERNEL, poisoned_keys(case))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_rows_that_see_nothing_may_have_any_gradient() -> None:
    mask = BlockMask.causal(q_len=192, kv_len=64, block=SMALL, device="cpu")
    of = inputs(
        normal(1, 2, 192, 16), normal(1, 2, 64, 16, seed=1), normal(1, 2, 64, 16, seed=2), mask, with_lse=True
    )
    clean = differentiate(KERNEL, of)
    of.grad[:, :, :128] = torch.nan
    assert of.grad_lse is not None
    of.grad_lse[:, :, :128] = torch.inf
    assert all(torch.equal(a, b) for a, b in zip(clean, differentiate(KERNEL, of), strict=True))


def test_memory_stays_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands and results of the products of a step, with queries that visit 32 blocks each."""
    mask = BlockMask.full(2048, block=SMALL, device="cpu")
    q, k, v = (normal(1, 2, 2048, 32, seed=i) for i in range(3))
    of = inputs(q, k, v, mask)
    largest = largest_product(monkeypatch)
    config = CpuAttentionConfig(step_bytes=1 << 19)
    assert judged(of, differentiate(KERNEL, of, config)).passed
    assert 0 < largest[0] <= config.step_bytes


def test_it_says_that_it_is_for_cpu_tensors_and_what_it_shares() -> None:
    q, k, v, mask = ATTENTION_CASES[0].make()
    p = problem(q, k, v, mask)
    assert KERNEL.why_not(p) == []
    assert KERNEL.why_not(replace(p, card=H200)) == ["runs on CPU tensors only"]
    assert KERNEL.notes(p, KERNEL.default(p)) == []
    shared = replace(p, q_heads=8, kv_heads=2)
    assert KERNEL.notes(shared, KERNEL.default(p)) == ["4 query heads share a gathered block"]


@pytest.mark.parametrize("length", [256, 4096, 65536])
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_it_is_predicted_faster_than_the_reference(length: int, density: float) -> None:
    q, k, v, mask = ATTENTION_CASES[0].make(dtype=torch.float32)
    stored = int(density * (length // 128) ** 2)
    p = replace(problem(q, k, v, mask), q_len=length, kv_len=length, block=LARGE, stored=stored, longest=8)
    assert REFERENCE.seconds(p, REFERENCE.default(p)) > KERNEL.seconds(p, KERNEL.default(p)) > 0
