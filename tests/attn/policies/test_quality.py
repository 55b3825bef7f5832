"""What policies keep at given sparsities, and the generators of q and k."""

import math

import pytest
import torch

import sparsek as sk
from sparsek.attn.policies.mass import true_mass
from sparsek.testing.attention_data import GENERATORS, HeadSizes, frame_numbers, needle, smooth, white
from sparsek_bench.suites.quality import (
    at_sparsity,
    dials,
    measured,
    qualities,
    visible_blocks,
)

policies = sk.policies
SHAPE, SIZES = (4, 16, 16), HeadSizes(2, 4, 2, 32)


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_give_the_same_numbers_for_a_seed(name: str) -> None:
    a, b, c = (GENERATORS[name](SHAPE, SIZES, seed) for seed in (0, 0, 1))
    assert a.q.shape == (2, 4, 1024, 32)
    assert a.k.shape == (2, 2, 1024, 32)
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.k, b.k)
    assert not torch.equal(a.k, c.k)
    assert a.q.isfinite().all()


def test_near_tokens_of_a_smooth_video_are_alike() -> None:
    q, k, _ = smooth(SHAPE, HeadSizes(1, 1, 1, 64), noise=0.0, strength=10.0)
    logits = (q @ k.mT)[0, 0] / 8
    assert logits.diagonal().mean() == pytest.approx(10, rel=1e-4)
    order = frame_numbers(SHAPE, (4, 4, 4), "cpu").argsort()
    raster = logits[order][:, order].view(4, 16, 16, 4, 16, 16)
    near = [float(raster[1, 4, 4, 1, 4, 4 + d]) for d in (0, 1, 3)]
    assert near == sorted(near, reverse=True)
    assert near[1] > 2 * logits.mean()


def test_needles_are_where_the_mass_is() -> None:
    q, k, _ = needle(SHAPE, HeadSizes(1, 2, 1, 64), wide=32, needles=4)
    weights = (q @ k.mT / 8).softmax(-1)
    asking = weights.topk(32).values.sum(-1) > 0.6
    assert 0.1 < asking.float().mean() < 0.15  # an eighth
    q, k, _ = white(SHAPE)
    assert (q @ k.mT / 8).softmax(-1).topk(32).values.sum(-1).max() < 0.6


def test_a_dial_is_turned_to_the_sparsity() -> None:
    q, k, _ = white(SHAPE, HeadSizes(1, 2, 1, 32))
    for name, dial in dials(SHAPE).items():
        policy, mask = at_sparsity(dial, q, k, 0.5)
        if name not in ("SlidingTile", "Radial"):  # whose steps are coarse
            kept = mask.stored_blocks / (mask.heads * visible_blocks(mask, policy.causal))
            assert kept == pytest.approx(0.5, abs=0.09)


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_keeps_the_most_that_as_many_blocks_can(causal: bool) -> None:
    q, k, _ = smooth(SHAPE, HeadSizes(1, 2, 1, 32))
    policy = policies.MeanTopK(topk=3, block=64, causal=causal, always=(0, 0))
    mask, mass = policy.mask(q, k), true_mass(q, k, (64, 64), causal=causal)
    kept, recall, worst, oracle = measured(mask, mass, visible_blocks(mask, causal))
    best = sk.BlockMask.topk(mass, 3, causal, seq_len=1024, block=64)
    assert oracle == pytest.approx(measured(best, mass, 1)[1], rel=1e-5)
    assert worst <= recall <= oracle <= 1
    assert recall == pytest.approx(
        policies.recall(mask, q, k, samples=1024, causal=causal).mean().item(), rel=1e-4
    )
    assert kept == pytest.approx((3 * 14 + 3) / 136 if causal else 3 / 16)


def test_policies_are_measured_at_every_sparsity() -> None:
    named = {name: dial for name, dial in dials(SHAPE).items() if name in ("SubBlock", "Radial", "Nabla")}
    of = {}
    for data in GENERATORS:
        q, k, _ = GENERATORS[data](SHAPE, HeadSizes(1, 1, 1, 16), 0, "cpu")
        for name, dial in named.items():
            of[data, name] = qualities(name, dial, q, k, SHAPE, (0.5, 0.75))
            assert len(of[data, name]) == 2
    rows = [row for each in of.values() for row in each]
    assert all(0 <= row.worst <= row.recall <= row.oracle + 1e-6 <= 1 + 1e-5 for row in rows)
    assert of["smooth", "SubBlock"][1].recall > of["white", "SubBlock"][1].recall + 0.2
    assert not any(math.isnan(value) for row in rows for value in row)
