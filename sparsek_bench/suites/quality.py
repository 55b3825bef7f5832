"""How much softmax mass policies keep at given sparsities, beside the most that as many blocks could."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.maps import block_map
from sparsek.attn.policies.mass import true_mass
from sparsek.attn.policies.nabla import Nabla
from sparsek.attn.policies.policy import Policy
from sparsek.attn.policies.static import Streaming
from sparsek.attn.policies.top import MeanTopK, SubBlock
from sparsek.attn.policies.video import Radial, SlidingTile
from sparsek.testing.attention_data import frame_numbers

SPARSITIES = (0.5, 0.75, 0.9)
TILE = (4, 4, 4)
IN_FRAMES = (
    "Radial",
)  # policies for tokens in the order of frames; those of other policies are in that of tiles
QUERIES = 16  # of each tile, whose softmax is computed
STEPS = 9  # of the search for the option that gives a sparsity

# A policy from a number over 0, up to 1: the more, the more blocks.
Dial = Callable[[float], Policy]


class Quality(NamedTuple):
    """What a policy keeps of q and k.

    kept: the share of the blocks, of those that any query may see. recall: the share of the softmax mass in them, a
    mean over heads and tiles; worst: of the worst head. oracle: the share in as many blocks of each tile, those with
    the most mass.
    """

    kept: float
    recall: float
    worst: float
    oracle: float


def dials(shape: tuple[int, int, int], block: int = 64) -> dict[str, Dial]:
    """The policies of this room at every sparsity, for a video of this shape in tiles of (4, 4, 4)."""
    tokens = shape[0] * shape[1] * shape[2]
    counts = [size // side for size, side in zip(shape, TILE, strict=True)]

    def window(share: float) -> SlidingTile:
        t, h, w = (2 * round((share ** (1 / 3) * 2 * count - 1) / 2) + 1 for count in counts)
        return SlidingTile(shape, (max(t, 1), max(h, 1), max(w, 1)), TILE, block)

    return {
        "MeanTopK": lambda share: MeanTopK(density=share, block=block, causal=False, always=(0, 0)),
        "SubBlock": lambda share: SubBlock(density=share, block=block),
        "Nabla": lambda share: Nabla(threshold=share, block=block),
        "SlidingTile": window,
        "Radial": lambda share: Radial(shape[0], tokens // shape[0], decay=2 * share, block=block),
        "Streaming": lambda share: Streaming(
            window=max(int(share * tokens / 2), 1), sinks=block, block=block, causal=False
        ),
        "MeanTopK, causal": lambda share: MeanTopK(density=share, block=block),
        "Streaming, causal": lambda share: Streaming(
            window=max(int(share * tokens), 1), sinks=block, block=block
        ),
    }


def qualities(
    policy: str,
    dial: Dial,
    q: Tensor,
    k: Tensor,
    shape: tuple[int, int, int],
    sparsities: Iterable[float] = SPARSITIES,
) -> list[Quality]:
    """Measure a policy on the q and k of a video of this shape, in the order of tiles, at each sparsity. Syncs.

    Args:
        policy: Its name.
        dial: The policy from one number that sets its sparsity.
        q: [B, Hq, S, D].
        k: [B, Hkv, S, D].
        shape: The video in tokens, multiples of 4.
        sparsities: Shares of the blocks, of those that any query may see, that are left out.
    """
    if policy in IN_FRAMES:
        order = frame_numbers(shape, TILE, str(q.device)).argsort()
        q, k = q[:, :, order], k[:, :, order]
    found, masses = [], {}
    for sparsity in sparsities:
        made, mask = at_sparsity(dial, q, k, sparsity)
        key = made.sides, made.causal
        if key not in masses:
            masses[key] = true_mass(q, k, made.sides, causal=made.causal, queries=QUERIES)
        found.append(measured(mask, masses[key], visible_blocks(mask, made.causal)))
    return found


def at_sparsity(dial: Dial, q: Tensor, k: Tensor, sparsity: float) -> tuple[Policy, BlockMask]:
    """The policy of a dial that keeps 1 - sparsity of the visible blocks of q and k, as nearly as STEPS bisections
    find, and its mask.
    """
    low, high, best = 0.0, 1.0, None
    for _ in range(STEPS):
        middle = (low + high) / 2
        policy = dial(middle)
        mask = policy.mask(q, k)
        kept = mask.stored_blocks / max(visible_blocks(mask, policy.causal) * mask.batch * mask.heads, 1)
        distance = abs(kept - (1 - sparsity))
        if best is None or distance < best[0]:
            best = distance, policy, mask
        low, high = (middle, high) if kept < 1 - sparsity else (low, middle)
    assert best is not None
    return best[1], best[2]


def visible_blocks(mask: BlockMask, causal: bool) -> int:
    """The blocks that any query of one head may see, with the last query at the last key."""
    (tiles, columns), (bq, bk) = mask.grid, mask.block
    if not causal:
        return tiles * columns
    offset = mask.kv_len - mask.q_len
    ends = (min((i + 1) * bq, mask.q_len) - 1 + offset for i in range(tiles))
    return sum(min(max(end // bk + 1, 0), columns) for end in ends)


def measured(mask: BlockMask, mass: Tensor, visible: int) -> Quality:
    """The quality of a mask, from the true mass of every block [B, Hq, Mb, Nb]. The queries of a
    head may see `visible` blocks.
    """
    stored = block_map(mask)
    stored = stored.repeat_interleave(mass.shape[1] // mask.heads, 1).expand(mass.shape)
    held = (mass * stored).sum(-1).mean(-1)
    ranked = torch.nn.functional.pad(mass.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    most = ranked.gather(-1, stored.sum(-1, keepdim=True)).mean()
    kept = float(stored.sum()) / max(visible * mass.shape[0] * mass.shape[1], 1)
    return Quality(kept, float(held.mean()), float(held.min()), float(most))
