"""XAttention: the blocks that it keeps, against the specification's mass."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsek as sk
from sparsek.attn.reference import antidiagonals
from tests.attn.policies.drawn import chosen, lengths_of, normal
from tests.refusals import refused

XAttention = sk.policies.XAttention


@given(st.data())
@settings(max_examples=10)
def test_it_keeps_the_fewest_blocks_that_hold_the_share(data: st.DataObject):
    q_len, kv_len = (data.draw(st.integers(1, 500)) for _ in range(2))
    policy = XAttention(
        threshold=data.draw(st.sampled_from((0.3, 0.8, 1.0))),
        stride=data.draw(st.sampled_from((8, 16))),
        block=data.draw(st.sampled_from((64, (64, 128)))),
        causal=data.draw(st.booleans()),
        precision=data.draw(st.sampled_from(("fp8", "full"))),
    )
    offset = data.draw(st.sampled_from((None, 0, 100, -30)))
    q, k = normal(2, 4, q_len, 16) * 3, normal(2, 2, kv_len, 16, seed=1)
    lengths = None
    bq, bk = policy.sides
    if data.draw(st.booleans()):
        lengths = lengths_of(-(-kv_len // bk), bk, 1, q_len)
    kept = chosen(policy.mask(q, k, q_offset=offset, kv_lengths=lengths))
    offset = kv_len - q_len if offset is None else offset
    mass = antidiagonals.block_mass(
        q, k, stride=policy.stride, block=policy.sides, causal=policy.causal, q_offset=offset, kv_lengths=lengths,
        fp8=policy.precision == "fp8",
    )  # fmt: skip
    total = mass.sum(-1)
    held = (mass * kept).sum(-1)
    assert (held >= policy.threshold * total - 1e-4 * total).all()
    # Without the least block that is not kept for its place, the share is not reached.
    first = torch.arange(q_len, dtype=torch.int64)[::bq] + offset
    last = (first + bq).clamp(max=q_len + offset) - 1
    column = torch.arange(kept.shape[-1])
    near = (column >= first[:, None] // bk) & (column <= last[:, None] // bk) | (column == 0)
    free = kept & ~near
    least = mass.masked_fill(~free, torch.inf).amin(-1)
    assert (held - least < policy.threshold * total + 1e-4 * total)[free.any(-1)].all()
    assert not (free & (mass <= 0)).any() or policy.threshold == 1.0


def recall(kept: torch.Tensor, q: torch.Tensor, k: torch.Tensor, block: int) -> torch.Tensor:
    """The mean softmax mass on blocks, causal."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(
        torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf
    )
    p = s.softmax(-1).unflatten(3, (-1, block)).sum(4).unflatten(2, (-1, block)).mean(3)
    return (p * kept).sum(-1).mean()


@pytest.mark.parametrize("kind", ["needle", "smooth"])
def test_it_finds_more_mass_than_random_blocks_do(kind: str):
    """A needle: one group of keys that all later queries look for. Smooth: neighbours are alike."""
    length, block, dim = 2048, 64, 32
    q, k = normal(1, 2, length, dim), normal(1, 1, length, dim, seed=1)
    if kind == "needle":
        k[:, :, 640:672] += 3 * normal(dim, seed=2)
        q[:, :, 700:] += 3 * normal(dim, seed=2)
    else:
        walk = normal(1, 1, length // 32, dim, seed=3).repeat_interleave(32, 2)
        q, k = q * 0.3 + 3 * walk, k * 0.3 + 3 * walk
    mask = XAttention(threshold=0.6, block=block).mask(q, k)
    kept = chosen(mask)
    causal = torch.ones(*mask.grid).tril().bool()
    share = kept.sum() / (causal.sum() * 2)
    random = (normal(1, 2, *mask.grid, seed=4).argsort(-1).argsort(-1) < share * mask.grid[1]) & causal
    assert share < 0.75
    assert recall(kept, q, k, block) > recall(random, q, k, block) + 0.15


def test_chunks_of_a_prompt_keep_what_the_whole_prompt_keeps():
    q, k = normal(1, 2, 640, 32), normal(1, 1, 640, 32, seed=1)
    policy = XAttention(threshold=0.7, block=64)
    whole = chosen(policy.mask(q, k))
    chunk = chosen(policy.mask(q[:, :, 256:448], k, q_offset=256))
    assert torch.equal(chunk, whole[:, :, 4:7])
    grown = chosen(policy.mask(q[:, :, 256:448], k[:, :, :448]))
    assert torch.equal(grown, whole[:, :, 4:7, :7])


def test_a_threshold_of_numpy_is_kept_as_a_number():
    policy = XAttention(threshold=np.float64(0.5), stride=cast(Any, np.int64(8)))
    assert (type(policy.threshold), type(policy.stride)) == (float, int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold is 0; it must be over 0"),
        ({"threshold": 1.5}, "threshold is 1.5; it must be a finite number from 0 to 1"),
        ({"stride": 4}, "stride is 4; use 8 or 16"),
        ({"precision": "int8"}, "precision is 'int8'; use one of fp8, full"),
        ({"block": 32}, "block is 32"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str):
    refused(message, XAttention, **options)
