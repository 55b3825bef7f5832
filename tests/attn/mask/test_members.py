"""Masks by members: a bit for each token and block."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import sparsek as sk
from sparsek.attn.mask.lists import Members
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention_args import flat_mask, mask_of
from sparsek.attn.ops.attention_op import through_op
from sparsek.attn.plan.attention import Attended
from tests.attn.mask.masks import check_mask, in_one_buffer
from tests.attn.mask.members import drawn
from tests.refusals import refused

FORMS: dict[str, Any] = {
    "causal": {"q_len": 100, "kv_len": 300, "block": (8, 64)},
    "all keys": {"q_len": 70, "kv_len": 300, "block": (32, 64), "causal": False},
    "window and sinks": {"q_len": 300, "kv_len": 300, "block": (16, 128), "window": 70, "sinks": 3},
    "window": {"q_len": 200, "kv_len": 333, "block": (128, 64), "window": 20, "heads": 2, "batch": 2},
    "sinks": {"q_len": 40, "kv_len": 150, "block": (2, 64), "sinks": 65, "chosen": 0},
    "two words": {"q_len": 130, "kv_len": 130, "block": (64, 64), "chosen": 1},
    "turned": {"q_len": 100, "kv_len": 200, "block": (16, 64), "turned": True, "sinks": 5},
    "one block": {"q_len": 30, "kv_len": 50, "block": (4, 128)},
    "fewer keys": {"q_len": 90, "kv_len": 50, "block": (8, 64), "window": 4},
}


@pytest.mark.parametrize("name", FORMS)
def test_the_elements_are_those_of_the_definition(name: str) -> None:
    mask, seen = drawn(**FORMS[name])
    assert torch.equal(check_mask(mask), seen)
    assert torch.equal(mask.dense_rows(7, 29), seen[:, :, 7:29])


@pytest.mark.parametrize("name", FORMS)
def test_members_are_kept(name: str, tmp_path: Path) -> None:
    mask, seen = drawn(**FORMS[name])
    sk.save(mask, tmp_path / "m.safetensors")
    leaves, spec = _pytree.tree_flatten(mask)
    others: Any = (
        in_one_buffer(mask), deepcopy(mask), sk.load(tmp_path / "m.safetensors"),
        mask_of(*flat_mask(mask)), mask_of(*flat_mask(in_one_buffer(mask))), _pytree.tree_unflatten(leaves, spec),
        BlockMask(**mask._parts()), type(mask)(*mask.__reduce__()[1]),
    )  # fmt: skip
    for other in others:
        assert other.members == mask.members
        assert torch.equal(other.to_dense(), seen)


def test_masks_by_members_join_along_heads_and_batch() -> None:
    found = [drawn(**FORMS["causal"], seed=seed) for seed in range(3)]
    masks, seen = [each.mask for each in found], [each.seen for each in found]
    by_head = BlockMask.per_head([*masks, masks[0]])
    assert torch.equal(check_mask(by_head), torch.cat([*seen, seen[0]], 1))
    assert torch.equal(check_mask(BlockMask.per_batch(masks)), torch.cat(seen))
    other = drawn(**FORMS["causal"], window=3).mask
    refused("per_head: members of mask 1", BlockMask.per_head, [masks[0], other])


def test_what_does_not_read_members_refuses_them() -> None:
    mask, seen = drawn(40, 150, (8, 64))
    cure = BlockMask.from_dense(mask.to_dense())
    for call in (
        lambda: mask & mask, lambda: mask | mask, lambda: mask & cure, lambda: cure | mask,
        mask.to_flex, mask.to_fa4, mask.to_pattern,
    ):  # fmt: skip
        refused(re.escape("BlockMask.from_dense(mask.to_dense())"), call)
    assert torch.equal((cure & cure).to_dense(), seen)
    refused("partial blocks by members", sk.PageLists.of_masks, [mask])


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("members is 3; it must be Members", {"members": 3}),
        ("members.rows is 2", {"members": Members(2)}),
        ("members.window is -1", {"members": Members(1, -1)}),
        ("block is (48, 64); a mask by members has blocks", {"block": (48, 64)}),
        ("block is (8, 64); masks have blocks of 64 or 128", {"members": None}),
        ("a mask by members has rules, lo and hi, and no bits", {"rules": None}),
        ("a mask by members has rules, lo and hi, and no bits", {"lo": None, "hi": None}),
        ("by members it has 1 for each entry", {"rules": torch.zeros(3, dtype=torch.int32)}),
        ("hi[0, 0] is 151; keys are 0 to kv_len = 150", {"hi": torch.full((1, 40), 151, dtype=torch.int32)}),
        ("pure is True, but partial blocks are by members", {"pure": True}),
    ],
)
def test_faults_of_members_are_found(message: str, fields: dict[str, Any]) -> None:
    mask = drawn(40, 150, (8, 64)).mask
    refused(re.escape(message), lambda: replace(mask, **fields))


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, where every token sees a key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)
    s = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", [None, "reference.attention"])
def test_attention_and_its_gradients_are_those_of_the_definition(heads: int, kernel: str | None) -> None:
    mask, seen = drawn(37, 150, (16, 64), window=3, sinks=2, heads=heads, batch=2)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    given = normal(2, 8, 37, 16), normal(2, 2, 150, 16), normal(2, 2, 150, 24)
    grads = normal(2, 8, 37, 24), normal(2, 8, 37)
    found = []

    def op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = Attended(q, k, v, mask, return_lse=True, kernel=kernel)
        return through_op(call)

    def by_verb(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return sk.attention(q, k, v, mask, return_lse=True, kernel=kernel)

    def defined(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return plain(q, k, v, seen)

    runs: Any = defined, by_verb, op
    for run in runs:
        x = [each.clone().requires_grad_() for each in given]
        out = run(*x)
        found.append([*out, *torch.autograd.grad(out, x, grads)])
    found.append([*runs[1](*given), *torch.func.vjp(by_verb, *given)[1](grads)])
    for each in found[1:]:
        for a, b in zip(found[0], each, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_plans_name_the_rule_and_the_packed_heads() -> None:
    mask = drawn(37, 150, (16, 64), window=3).mask
    q, k = torch.zeros(1, 8, 37, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 150, 64, dtype=torch.bfloat16)
    for plan, kernel, size in (
        (sk.plan_attention, "fwd", "0.07578"),
        (sk.plan_attention_backward, "bwd", "0.1516"),
    ):
        text = plan(q, k, k, mask, device="h200", kernel=f"portable.attention_{kernel}").explain()
        assert "partial by members" in text
        assert f"8 heads of a token are rows of one tile: q and results are copied, {size} MB a call" in text
    wide = torch.zeros(1, 16, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 150, 64, dtype=torch.bfloat16)
    text = sk.plan_attention_backward(
        wide[0], wide[1], wide[1], drawn(64, 150, (8, 128)).mask, device="h200", kernel="hopper.attention_bwd"
    ).explain()
    assert "16 heads of a token are rows of one tile\n" in text
    p = sk.plan_attention(q, k, k, mask).problem
    assert (p.members, p.member_ends, p.pack) == (1, True, 8)
    assert (p.packed.members, p.packed.block, p.packed.q_heads, p.packed.q_len) == (8, (128, 64), 1, 37 * 8)
    assert p.packed.useful_flops == p.useful_flops
