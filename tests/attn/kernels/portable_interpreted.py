"""portable.attention_fwd and portable.attention_bwd in Triton's interpreter: what both do."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.backward import bwd_walks
from sparsek.attn.kernels.backward.portable_bwd import Config, Tile
from sparsek.attn.kernels.forward import portable_fwd
from sparsek.attn.kernels.forward.portable_tiles import DIMS
from sparsek.attn.mask.mask import BlockMask
from sparsek.engine.table import load
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import cases
from tests.attn.kernels.conformance import Backward, Forward, Pass, passes
from tests.attn.kernels.forward.inputs import LARGE, SMALL
from tests.attn.kernels.forward.inputs import normal as of_any_dtype
from tests.engine.launch.covering import once
from tests.sampling import sampled

HALF = torch.float16
PASSES = passes("portable.attention_fwd", "portable.attention_bwd")
FORWARD, BACKWARD = PASSES.values()
every_pass = pytest.mark.parametrize("of", PASSES.values(), ids=PASSES)
# As many of a block as its smallest side has: fewest steps.
FEW = Config(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
APART = replace(FEW, apart=True)
OF_HALF: dict[str, Any] = {"dtype": HALF, "dims": (32, 32), "lengths": (70, 100), "heads": (2, 1)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return of_any_dtype(*shape, seed=seed, dtype=HALF)


def operands(
    mask: BlockMask, heads: tuple[int, int] = (1, 1), dims: tuple[int, int] = (32, 32)
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for `mask`, whose batch they have."""
    (hq, hkv), (d, dv) = heads, dims
    sides = ((hq, mask.q_len, d), (hkv, mask.kv_len, d), (hkv, mask.kv_len, dv))
    q, k, v = (normal(mask.batch, *side, seed=at) for at, side in enumerate(sides))
    return q, k, v


class TestForward(Forward):
    kernel, narrow, lse_step = load(FORWARD.name), portable_fwd.Config(64, 32, 4, 1), 1
    dtype, dims, lengths, heads = OF_HALF.values()


class TestBackward(Backward):
    kernel, narrow = load(BACKWARD.name), APART
    dtype, dims, lengths, heads = OF_HALF.values()


def small(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
    """The case, with one head where all heads do the same: a block of 128 takes the interpreter 50 ms."""
    q, k, v, mask = case.make()
    if mask.heads == 1 and q.shape[1] == k.shape[1]:
        q, k, v = q[:, :1], k[:, :1], v[:, :1]
    return q, k, v, mask


def quick(of: Pass, case: AttentionCase) -> bool:
    """Under half a second; the others are left to the GPU."""
    return case.dtype == "fp16" and of.problem(*small(case)).useful_flops < (6e7 if of is FORWARD else 1.5e8)


@pytest.mark.parametrize(
    ("of", "case"),
    [
        (of, case)
        for of, known, count in ((FORWARD, ATTENTION_CASES, 12), (BACKWARD, cases(), 5))
        for case in sampled([case for case in known if quick(of, case)], count, of=of.name)
    ],
    ids=str,
)
def test_quick_cases_are_within_budget(of: Pass, case: AttentionCase) -> None:
    given = small(case)
    assert load(of.name).why_not(of.problem(*given)) == []
    config = portable_fwd.Config(*given[3].block, 4, 1) if of is FORWARD else None
    of.check(of.given(*given, with_lse=len(str(case)) % 2 == 0), case, config)


SMALLER: tuple[tuple[Pass, tuple[int, int], Any], ...] = (
    (FORWARD, LARGE, portable_fwd.Config(64, 32, 4, 2)),
    (FORWARD, (128, 64), portable_fwd.Config(32, 64, 4, 2)),
    (FORWARD, (64, 128), portable_fwd.Config(64, 16, 4, 2)),
    (BACKWARD, LARGE, Config(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))),
    (BACKWARD, (128, 64), Config(Tile(32, 64, 4, 2), Tile(128, 16, 4, 2), True)),
    (BACKWARD, (64, 128), Config(Tile(16, 64, 4, 2), Tile(16, 128, 4, 2))),
)


@pytest.mark.parametrize(
    ("sizes", "rules"), once(product(SMALLER, ("interval", "bits", "both", "none"))), ids=str
)
def test_tiles_smaller_than_blocks_are_within_budget(
    sizes: tuple[Pass, tuple[int, int], Any], rules: str
) -> None:
    """Several to a block either way, and with fewer keys than a word has bits."""
    of, block, config = sizes
    window = BlockMask.sliding_window(q_len=150, kv_len=170, window=50, block=block, device="cpu")
    bits = random_bits("cpu", (150, 170), block, density=1.5)
    whole = BlockMask.full(q_len=150, kv_len=256, block=block, device="cpu")
    mask = {"interval": window, "bits": bits, "both": window | bits, "none": whole}[rules]
    of.check(of.given(*operands(mask), mask), rules, config)


@every_pass
@pytest.mark.parametrize("dim", sampled(DIMS, 2))
def test_every_pair_of_head_dims_is_within_budget(of: Pass, dim: int) -> None:
    mask = BlockMask.causal(90, block=SMALL, device="cpu")
    for v_dim, config in ((32, FEW), (96, APART), (256, FEW)):
        given = of.given(*operands(mask, dims=(dim, v_dim)), mask)
        of.check(given, (dim, v_dim), config if of is BACKWARD else None)


@every_pass
@pytest.mark.parametrize(("batch", "heads", "part"), sampled(product((1, 2), (1, 2, 4), (2, 1000)), 2))
def test_lists_and_parts_may_differ_by_item_and_by_head_of_keys_or_queries(
    of: Pass, batch: int, heads: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`part`: of the walks of gradients."""

    def window(b: int, h: int) -> BlockMask:
        return BlockMask.sliding_window(150, 20 + 70 * b + 20 * h, block=SMALL, device="cpu")

    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    mask = BlockMask.per_batch(
        [BlockMask.per_head([window(b, h) for h in range(heads)]) for b in range(batch)]
    )
    assert (mask.batch, mask.heads) == (batch, heads)
    q, k, v = normal(2, 4, 150, 32), normal(2, 2, 150, 32, seed=1), normal(2, 2, 150, 32, seed=2)
    if of is BACKWARD:
        p = of.problem(q, k, v, mask)
        work: Any = load(of.name).prepare(p, FEW, mask)
        assert (work.keys.slots > 0, work.queries.slots > 0) == (part < 1000, part < p.longest)
    of.check(of.given(q, k, v, mask), part, None if of is FORWARD else APART if heads == 2 else FEW)


@every_pass
def test_offsets_of_64_bits_give_the_same_bits(of: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockMask.sliding_window(150, 40, block=SMALL, device="cpu")
    given = of.given(*operands(mask, (2, 1)), mask)
    narrow = of.run(load(of.name), given)
    assert not portable_fwd.common.is_wide(64, *given[:3])
    monkeypatch.setattr(portable_fwd.common, "is_wide", lambda *given: True)
    assert all(torch.equal(a, b) for a, b in zip(narrow, of.run(load(of.name), given), strict=True))


@every_pass
def test_bf16_is_refused_in_the_interpreter(of: Pass) -> None:
    mask = BlockMask.causal(64, block=SMALL, device="cpu")
    (reason, *_) = load(of.name).why_not(of.problem(*(x.bfloat16() for x in operands(mask)), mask))
    assert "bf16 is wrong in Triton's interpreter" in reason
