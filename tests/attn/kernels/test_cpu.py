"""cpu.attention and cpu.attention_bwd against the reference in float64, on cases, dtypes, layouts and configs; memory,
bits and speed. The reference's own kernel of the gradients, too.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sparsek.attn.kernels.forward.cpu_steps import CpuAttentionConfig
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.reference.attention import attention_backward
from sparsek.core.device import H200, has_bf16_units
from sparsek.engine.table import load
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import cases, differentiate, hold, inputs, problem
from tests.attn.kernels.conformance import Backward, Forward, Pass, passes
from tests.attn.kernels.forward.inputs import LARGE, SMALL, drawn_inputs, largest_product, normal
from tests.attn.kernels.planned import attend, attention_problem
from tests.engine.launch import timed
from tests.sampling import sampled

PASSES = passes("cpu.attention", "cpu.attention_bwd")
FORWARD = PASSES["fwd"]
KERNEL, GRADIENTS, REFERENCE = (
    load(x) for x in ("cpu.attention", "cpu.attention_bwd", "reference.attention_bwd")
)
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ONE_BLOCK = CpuAttentionConfig(step_bytes=1)
STEPS = (None, ONE_BLOCK)
every_pass = pytest.mark.parametrize("of", PASSES.values(), ids=PASSES)


class TestForward(Forward):
    kernel = KERNEL


class TestForwardInSteps(TestForward):
    config = ONE_BLOCK


class TestBackward(Backward):
    kernel = GRADIENTS


class TestBackwardInSteps(TestBackward):
    config = ONE_BLOCK


@pytest.mark.parametrize(
    ("case", "dtype", "config"), sampled(product(ATTENTION_CASES, FLOATS, STEPS), 32), ids=str
)
def test_every_case_is_within_budget_in_every_dtype(
    case: AttentionCase, dtype: torch.dtype, config: CpuAttentionConfig | None
) -> None:
    """In steps of many blocks or of one."""
    FORWARD.check(case.make(dtype=dtype), case, config)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_every_query_sees_as_many_keys_as_its_mask_says(case: AttentionCase) -> None:
    """With q = 0, lse is the logarithm of the number of keys that a query sees: one key too many shows in any dtype."""
    q, k, v, mask = case.make()
    lse = attend(KERNEL, torch.zeros_like(q), k, v, mask)[1]
    counts = mask.to_dense().sum(-1).repeat_interleave(q.shape[1] // mask.heads, 1)
    assert torch.equal(lse.double().exp().round().long(), counts.expand_as(lse))


@pytest.mark.parametrize(
    ("case", "dtype", "config", "with_lse"),
    sampled(product(cases(), FLOATS, STEPS, (True, False)), 18),
    ids=str,
)
def test_gradients_of_every_case_are_within_budget_and_the_same_bits_again(
    case: AttentionCase, dtype: torch.dtype, config: CpuAttentionConfig | None, with_lse: bool
) -> None:
    hold(GRADIENTS, case, dtype=dtype, with_lse=with_lse, config=config)


@every_pass
def test_every_config_is_within_budget(of: Pass) -> None:
    mask = random_bits("cpu", (200, 300), SMALL, heads=2, density=1.0)
    q, k, v = normal(1, 4, 200, 32), normal(1, 2, 300, 32), normal(1, 2, 300, 64)
    for config in load(of.name).configs(of.problem(q, k, v, mask)):
        of.check(of.given(q, k, v, mask, with_lse=True), "every config", config)


@every_pass
@settings(max_examples=30)
@given(drawn_inputs(), st.sampled_from([1, 1 << 18, 1 << 22]), st.booleans())
def test_drawn_masks_are_within_budget(
    of: Pass, drawn: tuple[Tensor, Tensor, Tensor, BlockMask], step_bytes: int, with_lse: bool
) -> None:
    of.check(of.given(*drawn, with_lse=with_lse), "drawn", CpuAttentionConfig(step_bytes))


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


def test_rows_that_see_nothing_may_have_any_gradient() -> None:
    mask = BlockMask.causal(q_len=192, kv_len=64, block=SMALL, device="cpu")
    q, k, v = normal(1, 2, 192, 16), normal(1, 2, 64, 16, seed=1), normal(1, 2, 64, 16, seed=2)
    of = inputs(q, k, v, mask, with_lse=True)
    clean = differentiate(GRADIENTS, of)
    of.grad[:, :, :128] = torch.nan
    assert of.grad_lse is not None
    of.grad_lse[:, :, :128] = torch.inf
    assert all(torch.equal(a, b) for a, b in zip(clean, differentiate(GRADIENTS, of), strict=True))


def test_inputs_that_need_gradients_are_taken() -> None:
    q = normal(1, 1, 64, 16).requires_grad_()
    assert not attend(KERNEL, q, q, q, BlockMask.causal(64, device="cpu"))[0].requires_grad


@pytest.mark.parametrize(("name", "step"), [("fwd", 1 << 17), ("bwd", 1 << 18)])
def test_memory_stays_within_a_step(name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest operands and result of a product, with queries that visit 16 blocks each."""
    mask = BlockMask.full(1024, block=SMALL, device="cpu")
    of = PASSES[name].given(*(normal(1, 2, 1024, 32, seed=i) for i in range(3)), mask)
    largest = largest_product(monkeypatch)
    PASSES[name].check(of, "memory", CpuAttentionConfig(step_bytes=step))
    assert 0 < largest[0] <= step


@every_pass
def test_it_says_that_it_is_for_cpu_tensors_and_what_it_shares(of: Pass) -> None:
    kernel, p = load(of.name), of.problem(*ATTENTION_CASES[0].make())
    assert kernel.why_not(p) == []
    assert kernel.why_not(replace(p, card=H200)) == ["runs on CPU tensors only"]
    assert kernel.notes(p, kernel.default(p)) == []
    shared = replace(p, q_heads=8, kv_heads=2)
    assert kernel.notes(shared, kernel.default(p)) == ["4 query heads share a gathered block"]
    assert kernel.notes(replace(shared, mask_heads=8), kernel.default(p)) == []


def test_configs_read_well() -> None:
    assert str(CpuAttentionConfig(1 << 21)) == "steps of 2048 KiB"


@pytest.mark.parametrize("case", ATTENTION_CASES[::4], ids=str)
def test_the_references_kernel_gives_the_bits_of_the_reference(case: AttentionCase) -> None:
    of = inputs(*case.make(), with_lse=True)
    q, k, v, mask, scale, out, lse, grad, grad_lse, _ = of
    assert REFERENCE.why_not(problem(q, k, v, mask)) == []
    right = attention_backward(q, k, v, mask, out, lse, grad, grad_lse, scale=scale)
    for ours, exact in zip(differentiate(REFERENCE, of), right, strict=True):
        assert torch.equal(ours, exact)


@every_pass
@pytest.mark.parametrize("length", [256, 4096, 65536])
def test_it_is_predicted_faster_than_the_reference(of: Pass, length: int) -> None:
    kernel, reference = load(of.name), load(of.name.replace("cpu", "reference"))
    for density, dim in product((0.05, 1.0), (32, 128)):
        p = replace(
            of.problem(*ATTENTION_CASES[0].make(dtype=torch.float32)), q_len=length, kv_len=length, block=LARGE,
            stored=int(density * (length // 128) ** 2), longest=8, dim=dim, v_dim=dim,
        )  # fmt: skip
        assert reference.seconds(p, reference.default(p)) > kernel.seconds(p, kernel.default(p)) > 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("dtype", "block"), sampled(product((torch.float32, torch.bfloat16), (SMALL, LARGE)), 2), ids=str
)
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
    out, p = torch.empty_like(q), attention_problem(q, k, v, mask, lse=False)
    config = KERNEL.default(p)
    work = KERNEL.prepare(p, config, mask)
    calls: dict[str, Any] = {
        "cpu.attention": lambda: KERNEL.launch(config, work, AttentionCall(q, k, v, mask, 0.125, out, None)),
        "dense": lambda: functional.scaled_dot_product_attention(q, k, v),
    }
    if dtype == torch.bfloat16 and has_bf16_units():
        every = BlockMask.full(length, block=block, device="cpu")
        whole = KERNEL.prepare(attention_problem(q, k, v, every, lse=False), config, every)
        calls["dense"] = lambda: KERNEL.launch(config, whole, AttentionCall(q, k, v, every, 0.125, out, None))
    timed.hold(calls, 0.5)
