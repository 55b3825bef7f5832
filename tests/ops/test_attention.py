"""attention: how its result lies in memory, and which plans it makes; test_attention_gradients.py has its values."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.mask import cache as masks
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.core.errors import Unsupported
from sparsek.engine.plan import cache
from tests.ops.tensors import LAYOUTS, check, qkv, window


@pytest.mark.parametrize(
    ("name", "order"), [("bhsd", (0, 1, 2, 3)), ("bshd", (0, 2, 1, 3)), ("sbhd", (0, 2, 1, 3))]
)
def test_out_lies_in_memory_as_q_does_and_has_no_gaps(name: str, order: tuple[int, ...]):
    q, k, v = qkv(dims=(32, 48))
    out, lse = sk.attention(LAYOUTS[name](q), k, v, window(), return_lse=True)
    assert out.shape == (2, 4, 192, 48)
    assert out.permute(order).is_contiguous()
    assert lse.is_contiguous()


def test_a_single_head_or_query_gives_a_contiguous_out():
    for q_len, heads in ((1, (4, 2)), (64, (1, 1))):
        q, k, v = qkv(q_len, 64, heads)
        assert sk.attention(LAYOUTS["bshd"](q), k, v).is_contiguous()


def test_a_plan_gives_what_attention_gives(device: str):
    tensors, mask = qkv(dims=(64, 64), dtype=torch.float16, device=device), window(device=device)
    out, lse = sk.attention(*tensors, mask, return_lse=True)
    plan = sk.plan_attention(*tensors, mask)
    assert torch.equal(plan(*tensors, mask), out)
    assert torch.equal(sk.attention(*tensors, mask, plan=plan, kernel=plan.kernel), out)
    with_lse = sk.plan_attention(*tensors, mask, return_lse=True)
    for got in (with_lse(*tensors, mask), sk.attention(*tensors, mask, return_lse=True, plan=with_lse)):
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)
    sharper = plan(*tensors, mask, scale=1.0)
    assert torch.equal(sharper, sk.attention(*tensors, mask, scale=1.0))


def test_a_plan_without_a_mask_is_called_without_one_however_many_others_follow():
    tensors = qkv(64)
    plan = sk.plan_attention(*tensors)
    for length in range(1, 40):
        sk.attention(*qkv(length, batch=1))
    assert torch.equal(plan(*tensors), sk.attention(*tensors))


def test_a_named_kernel_that_cannot_run_says_why_and_which_can():
    with pytest.raises(
        Unsupported, match=r"portable.attention_fwd cannot run this; .*cpu.attention, reference.attention can"
    ) as caught:
        sk.attention(*qkv(), window(), kernel="portable.attention_fwd")
    assert caught.value.reasons["portable.attention_fwd"]


def test_without_a_mask_plans_are_kept_too(plans_made: list[str]):
    masks._MASKS.clear()
    for _ in range(3):
        sk.attention(*qkv(77))
    assert len(plans_made) == 1


def test_another_shape_alignment_lse_mask_or_kernel_makes_another_plan(plans_made: list[str]):
    q, k, v = qkv()
    mask, other = window(), window(width=9)
    calls: list[Callable[[], Any]] = [
        lambda: sk.attention(q, k, v, mask),
        lambda: sk.attention(q[:1], k[:1], v[:1], mask),
        lambda: sk.attention(q[:, :2], k, v, mask),
        lambda: sk.attention(q, k[:, :1], v[:, :1], mask),
        lambda: sk.attention(q[..., :16], k[..., :16], v, mask),
        lambda: sk.attention(q, k, v[..., :16], mask),
        lambda: sk.attention(q.double(), k.double(), v.double(), mask),
        lambda: sk.attention(LAYOUTS["odd start"](q), k, v, mask),
        lambda: sk.attention(LAYOUTS["dims by rows"](q), k, v, mask),
        lambda: sk.attention(q, k, v, mask, return_lse=True),
        lambda: sk.attention(q, k, v, mask, kernel="reference.attention"),
        lambda: sk.attention(q, k, v, other),
    ]
    for round_ in range(2):
        for count, call in enumerate(calls, start=1):
            call()
            assert len(plans_made) == (count if round_ == 0 else len(calls))


def test_layouts_that_are_aligned_alike_share_a_plan_for_any_scale(plans_made: list[str]):
    (q, k, v), mask = qkv(), window()
    for name in ("bhsd", "bshd", "sbhd", "slice of packed heads"):
        sk.attention(LAYOUTS[name](q), LAYOUTS[name](k), LAYOUTS[name](v), mask, scale=0.5)
    sk.attention(q, k, v, mask)
    assert len(plans_made) == 1


def test_a_mask_keeps_no_more_plans_than_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "LIMIT", 5)
    mask = window(64, 8)
    for batch in range(1, 9):
        sk.attention(*qkv(64, heads=(1, 1), dims=(1, 1), batch=batch), mask)
    assert len(mask.derived(AttentionPlan, cache.PlanCache)) == 5


def test_a_new_mask_that_poses_a_known_problem_asks_no_kernel_again(monkeypatch: pytest.MonkeyPatch):
    tensors = qkv()
    first = sk.plan_attention(*tensors, window())
    kernel = type(first.implementation)
    monkeypatch.setattr(kernel, "why_not", lambda self, p: pytest.fail("asked again"))
    again = sk.plan_attention(*tensors, window())
    assert again.choice is first.choice
    mask = window()
    check(tensors, mask, sk.attention(*tensors, mask))


def test_a_mask_that_is_let_go_takes_its_plans_along():
    tensors, mask = qkv(), window()
    plan = sk.plan_attention(*tensors, mask)
    sk.attention(*tensors, mask)
    gone = weakref.ref(mask)
    gc.collect()
    gc.disable()
    try:
        del mask
        assert gone() is None, "a plan keeps no mask alive, not even in a cycle"
    finally:
        gc.enable()
    assert plan.mask() is None
    assert "mask 0" not in plan.explain()


def test_autocast_casts_the_operands_and_nothing_inside_a_kernel():
    tensors, mask = qkv(), window()
    q, k, v = tensors
    low = q.bfloat16(), k.bfloat16(), v.bfloat16()
    plan, full, alone = (
        sk.plan_attention(*tensors, mask),
        sk.attention(*tensors, mask),
        sk.attention(*low, mask),
    )
    with torch.autocast("cpu", torch.bfloat16):
        for kernel in (None, "cpu.attention", "reference.attention"):
            check(low, mask, sk.attention(*tensors, mask, kernel=kernel))
        assert torch.equal(sk.attention(*tensors, mask), alone)
        assert torch.equal(sk.attention(q, low[1], low[2], mask), alone)
        assert torch.equal(sk.attention(*tensors, mask, plan=plan), full)
        assert sk.attention(q.double(), k.double(), v.double(), mask).dtype == torch.float64
