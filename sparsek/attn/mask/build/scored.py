"""Masks of the blocks with the highest scores: a number of them, or as many as hold a share of the mass.

Values on a GPU are checked there, without a sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsek.attn.mask.build.selection import (
    INTS,
    LocalBlocks,
    Selection,
    as_kv_lengths,
    held,
    joined_batch,
    place_of,
)
from sparsek.attn.mask.build.selection_reference import chosen_mask, highest, rows_of
from sparsek.attn.mask.data import Mask, MaskData
from sparsek.attn.mask.elements import NOT_STORED, WHOLE, refuse_members, table_of
from sparsek.attn.mask.lists import BY_INTERVAL, Frame, Place
from sparsek.attn.mask.recorded import repeated
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


@repeated
@not_traced("a block mask")
def topk(
    cls: type[Mask],
    scores: Tensor,
    k: int | Tensor,
    causal: bool = False,
    always: Tensor | tuple[int, int] | None = None,
    seq_len: int | None = None,
    *,
    most: int | None = None,
    kv_lengths: Tensor | None = None,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of the `k` key blocks with the highest scores for each query tile, on the scores' device.

    Neither the mask nor its plan waits for a GPU, and a CUDA graph may capture both. Of equal scores the block with the
    lower column is kept. The choice has no gradient.

    Args:
        scores: Floating point [1 or B, 1 or H, Mb, Nb] or [Mb, Nb], for Mb tiles of queries and Nb blocks of keys. -inf
            excludes a block.
        k: Blocks of each tile: an int, or a budget per head as int32 or int64 [H] or [B, H] on the scores' device. A
            tile with fewer blocks to choose from keeps all of them.
        causal: Whether a query sees no keys after its own. Blocks after the tile are then not chosen.
        always: Blocks that are kept whatever their score, and count among the k: bool [Mb, Nb] or [H, Mb, Nb], or a
            pair (sinks, local) in blocks: the first `sinks` blocks, and `local` blocks up to the tile's own, if not
            causal also from there on.
        seq_len: Queries and keys, in tokens, where there are as many of both.
        most: The most blocks that a tile keeps, whatever its budget; all by default. With a tensor k the lists have
            room for so many.
        kv_lengths: How many keys each block has, its first ones: int32 or int64 [Nb] or [1 or B, Nb], from 0 to bk.
            Blocks without keys are not chosen. None: all of them, up to kv_len.
        **frame: `q_len` and `kv_len` where they differ, `block` and `q_offset`: see `Frame`.

    Returns:
        A mask of the batch items and heads of the scores.

    Raises:
        InvalidInput: For arguments of another shape, dtype or device. For a NaN score, a budget below 1, more than k
            `always` blocks in a tile, and wrong `kv_lengths`: here on the CPU; on a GPU when the mask is next used, or
            in `verify`.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 4, 1024, 64), torch.randn(1, 4, 1024, 64)
        >>> q_mean, k_mean = (x.unflatten(2, (-1, 128)).mean(3) for x in (q, k))  # [B, H, blocks, D]
        >>> mask = sk.BlockMask.topk(q_mean @ k_mean.mT, k=4, causal=True, always=(1, 2), seq_len=1024)
        >>> mask.summary
        '104 of 256 blocks, 40.6 %, 32 partial'
        >>> budgets = torch.tensor([1, 2, 4, 8])
        >>> sk.BlockMask.topk(q_mean @ k_mean.mT, budgets, seq_len=1024).stored_blocks
        120
    """
    scores, place = _as_scores(scores, seq_len, dict(frame))
    causal, columns = arguments.flag("causal", causal), place.grid[1]
    capacity = columns if most is None else min(arguments.integer("most", most, 1), columns)
    names: dict[str, Any] = {"room": "k" if most is None else "k or most"}
    limit: Any = k
    if isinstance(k, Tensor):
        limit, each = _of_heads("k", k, INTS, scores), "per head"
        names["limit"] = tuple(k.shape)
    else:
        each = arguments.integer("k", k, 1)
        limit = capacity = min(each, capacity)
        names["room"] = f"k = {capacity}"
    first = _as_always(always, place, causal, tuple(scores.shape), capacity)
    scores, lengths = _joined(scores, limit, kv_lengths, place, names)
    label = f"topk({each}{', causal' if causal else ''})"
    return chosen_mask(
        cls,
        Selection("topk", place, causal, scores, lengths, capacity, label, limit, always=first, names=names),
    )


@repeated
@not_traced("a block mask")
def cumulative(
    cls: type[Mask],
    scores: Tensor,
    threshold: float | Tensor,
    causal: bool = False,
    always: Tensor | tuple[int, int] | None = None,
    seq_len: int | None = None,
    *,
    least: int = 1,
    most: int | None = None,
    kv_lengths: Tensor | None = None,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of the fewest key blocks that hold a share of each query tile's mass, the highest first.

    A tile keeps its `always` blocks, then the block with the highest mass of the rest, and so on, until the sum reaches
    `threshold` times the sum of all blocks that the tile may see. Of equal masses the block with the lower column comes
    first. Neither the mask nor its plan waits for a GPU, and a CUDA graph may capture both.

    Sums are exact, so they depend on no order: each mass counts as a multiple of 2^-30 of the least power of two above
    the row's highest mass, rounded down. The sum that is to be reached is the product in float64, rounded up.

    Args:
        scores: Mass of each block, from 0, such as a softmax: floating point [1 or B, 1 or H, Mb, Nb] or [Mb, Nb].
        threshold: The share, over 0 and at most 1: a float, or a share per head as float32 [H] or [B, H] on the scores'
            device.
        causal: Whether a query sees no keys after its own. Blocks after the tile then neither count nor are chosen.
        always: Blocks that are kept whatever their mass, as in `topk`.
        seq_len: Queries and keys, in tokens, where there are as many of both.
        least: Blocks that a tile keeps at least, if it has so many.
        most: Blocks that a tile keeps at most; all by default.
        kv_lengths: How many keys each block has, its first ones: int32 or int64 [Nb] or [1 or B, Nb], from 0 to bk.
            Blocks without keys neither count nor are chosen. None: all of them, up to kv_len.
        **frame: `q_len` and `kv_len` where they differ, `block` and `q_offset`: see `Frame`.

    Returns:
        A mask of the batch items and heads of the scores.

    Raises:
        InvalidInput: For arguments of another shape, dtype or device. For a mass that is negative, infinite or NaN, a
            share outside of 0 to 1, more than `most` `always` blocks in a tile, and wrong `kv_lengths`: here on the
            CPU; on a GPU when the mask is next used, or in `verify`.

    Sources: FlexPrefill, Lai et al., arXiv:2502.20766; XAttention, Xu et al., arXiv:2503.16428.

    Example:
        >>> import torch, sparsek as sk
        >>> mass = torch.tensor([[0.6, 0.3, 0.1, 0.0]])
        >>> mask = sk.BlockMask.cumulative(mass, 0.8, q_len=128, kv_len=512)
        >>> mask.host.full.indices[:2].tolist(), mask.stored_blocks
        ([0, 1], 2)
    """
    scores, place = _as_scores(scores, seq_len, dict(frame))
    causal, columns = arguments.flag("causal", causal), place.grid[1]
    least = arguments.integer("least", least)
    capacity = columns if most is None else min(arguments.integer("most", most, 1), columns)
    if most is not None and least > most:
        raise InvalidInput(
            f"least is {least} and most is {most}; a tile keeps at least `least` and at most `most`"
        )
    names: dict[str, Any] = {"room": f"most = {capacity}"}
    share: Any = threshold
    if isinstance(threshold, Tensor):
        share, each = _of_heads("threshold", threshold, (torch.float32,), scores), "per head"
        names["limit"] = tuple(threshold.shape)
    else:
        share = arguments.number("threshold", threshold, 0, 1)
        each = f"{share:g}"
        if share == 0:
            raise InvalidInput("threshold is 0; it must be over 0 and at most 1")
    first = _as_always(always, place, causal, tuple(scores.shape), capacity)
    scores, lengths = _joined(scores, share, kv_lengths, place, names)
    label, least = f"cumulative({each}{', causal' if causal else ''})", min(least, capacity)
    return chosen_mask(
        cls,
        Selection("mass", place, causal, scores, lengths, capacity, label, share, least, first, names=names),
    )


def _of_heads(name: str, given: Tensor, choices: tuple[torch.dtype, ...], scores: Tensor) -> Tensor:
    """[1 or B, H, 1, 1] of a number per head, [H] or [B, H]."""
    arguments.tensor(name, given, choices)
    arguments.one_device(f"{name} is", given.device, "the scores are", scores.device)
    batch, heads = scores.shape[:2]
    wide = given.detach() if given.ndim == 2 else given.detach()[None]
    one = f", one number: pass it as {name}.item()" if given.numel() == 1 else ""
    if given.ndim not in (1, 2) or any(
        a == 0 or (a != b and 1 not in (a, b)) for a, b in zip(wide.shape, (batch, heads), strict=True)
    ):
        raise InvalidInput(
            f"{name} is {list(given.shape)}{one}; scores of {batch} batch items and {heads} heads need [{heads}] or "
            f"[{batch}, {heads}]"
        )
    return wide[:, :, None, None]


def _joined(
    scores: Tensor, each: Any, kv_lengths: Any, place: Place, names: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The scores of every batch item and head that scores, numbers per head and kv_lengths have; and the lengths."""
    lengths = None if kv_lengths is None else as_kv_lengths(kv_lengths, place)
    names["kv_lengths"] = () if kv_lengths is None else tuple(kv_lengths.shape)
    batch, heads = scores.shape[:2]
    if isinstance(each, Tensor):
        batch, heads = max(batch, each.shape[0]), max(heads, each.shape[1])
    return scores.expand(joined_batch(lengths, batch), heads, -1, -1), lengths


def _as_scores(scores: Any, seq_len: int | None, frame: dict[str, Any]) -> tuple[Tensor, Place]:
    """Scores [batch, heads, Mb, Nb] without a gradient, and lengths and block of the mask."""
    if arguments.tensor("scores", scores, dtypes.FLOATS).ndim not in (2, 4):
        raise InvalidInput(
            f"scores are {list(scores.shape)}; they must be [batch, heads, Mb, Nb] or [Mb, Nb]"
        )
    place = place_of("scores are", scores, seq_len, frame)
    scores = scores.detach().view(1, 1, *scores.shape) if scores.ndim == 2 else scores.detach()
    if tuple(scores.shape[2:]) != place.grid or 0 in scores.shape[:2]:
        raise InvalidInput(
            f"scores are {list(scores.shape)}; {place.q_len} queries in tiles of {place.block[0]} and {place.kv_len} "
            f"keys in blocks of {place.block[1]} need [batch, heads, {place.grid[0]}, {place.grid[1]}]"
        )
    return scores, place


def _as_always(always: Any, place: Place, causal: bool, shape: tuple[int, ...], k: int) -> Any:
    """The blocks that are always kept: bool, of a shape that broadcasts to that of the scores, or near ones."""
    if always is None:
        return None
    if isinstance(always, (tuple, list)):
        return _as_near(always, place, causal, k)
    if arguments.tensor("always", always, (torch.bool,)).device != place.device:
        raise InvalidInput(
            f"always is on {always.device} and the scores are on {place.device}; use one device"
        )
    wide = (1,) * (4 - always.ndim) + tuple(always.shape)
    if (
        always.ndim < 2
        or len(wide) > 4
        or wide[2:] != shape[2:]
        or any(a not in (1, b) for a, b in zip(wide, shape, strict=True))
    ):
        raise InvalidInput(
            f"always is {list(always.shape)}; scores of {list(shape)} need {list(shape[2:])} or {list(shape[1:])}"
        )
    return always.view(wide)


def _as_near(always: Any, place: Place, causal: bool, k: int) -> LocalBlocks:
    """The first `sinks` blocks and `local` ones up to the tile's own, if not causal also after it."""
    sinks, local = (min(each, place.reach) for each in arguments.pair("always", always))
    keys = (min(local, place.blocks(place.reach)) - 1) * place.block[1]
    near = LocalBlocks(min(sinks, place.grid[1]), keys if local else None, 0 if causal else keys)
    kept = held(place, causal, near)
    if (kept > k).any():
        at = int(kept.argmax())
        raise InvalidInput(f"always keeps {kept[at]} blocks in query tile {at}; they count among the k = {k}")
    return near


@not_traced("a block mask")
def best_near(
    cls: type[Mask], scores: Tensor, place: Place, causal: bool, k: int, near: LocalBlocks, label: str
) -> Mask:
    """The mask of the `k` blocks with the highest scores in each tile, and of all near ones, which count among the k.

    scores: floating point [B, H, Mb, Nb] on the place's device; -inf and NaN exclude a block. As `best_blocks` of a
    causal or full mask. No sync.
    """
    scores = scores.detach()
    capacity = min(max(k, int(held(place, causal, near).max(initial=0))), place.grid[1])
    made = f"{capacity} best of {label}"
    return chosen_mask(
        cls, Selection("topk", place, causal, scores, None, capacity, made, k, always=near, every=True)
    )


@not_traced("a block mask")
def best_blocks(within: Mask, scores: Tensor, k: int, always: MaskData | None = None) -> Mask:
    """For each query tile the `k` blocks of `within` with the highest scores, with the rules of `within`.

    scores: floating point [B, H, Mb, Nb] on the mask's device. within, always: one head, and 1 or B batch items. Blocks
    that `always` stores come first and count among the k; a tile that has more of them keeps all. -inf and NaN
    exclude other blocks. Equal scores are ranked the same way every time.

    No sync where the sizes of `within` and `always` are exact. O(B * H * Mb * Nb), as the scores are.
    """
    k, (tiles, columns) = arguments.integer("k", k, 1), within.grid
    _check(within, scores, always)
    codes = table_of(within)
    there = codes != NOT_STORED
    ranked = scores.detach().masked_fill(~there | scores.isnan(), -torch.inf)
    most, first = k, None
    if always is not None:
        first = (there & (table_of(always) != NOT_STORED)).expand(ranked.shape)
        most = max(k, always.sizes.longest)
    most, (batch, heads) = min(most, columns), scores.shape[:2]
    kept = (highest(ranked, first) < k) & (ranked != -torch.inf)
    kept = kept if first is None else kept | first
    codes = codes.expand(batch, heads, tiles, columns)
    best = rows_of(kept & (codes == WHOLE), kept & (codes != WHOLE), most)
    rules = None
    if within.rules is not None:
        rules = codes.gather(-1, best.columns.long()).clamp(min=BY_INTERVAL).flatten()
    times = batch * heads // within.batch
    bound = min(batch * heads * tiles * most, times * within.sizes.stored)
    lo, hi = (_of_each_head(each, batch, heads) for each in (within.lo, within.hi))
    return within.unchecked(
        q_len=within.q_len, kv_len=within.kv_len, block=within.block, batch=batch, heads=heads,
        full=best.full, partial=best.partial, lo=lo, hi=hi, rules=rules, bits=within.bits,
        sizes=best.sizes((bound, min(bound, times * within.sizes.partial), most)), pure=within.pure,
        label=f"{most} best of {within.label}",
    )  # fmt: skip


def _check(within: MaskData, scores: Tensor, always: MaskData | None) -> None:
    shape = ["B", "H", *within.grid]
    if scores.ndim != 4 or tuple(scores.shape[2:]) != within.grid or not scores.is_floating_point():
        raise InvalidInput(f"scores are {scores.dtype} {list(scores.shape)}; the mask needs floats {shape}")
    for name, mask in (("within", within), ("always", always)):
        if mask is None:
            continue
        refuse_members(mask, name)
        if mask.heads != 1 or mask.batch not in (1, scores.shape[0]):
            raise InvalidInput(
                f"{name} has {mask.heads} heads and {mask.batch} batch items; it needs 1 head, and 1 or "
                f"{scores.shape[0]} batch items"
            )
        if (mask.grid, mask.block, mask.device) != (within.grid, within.block, scores.device):
            raise InvalidInput(f"{name} must have the blocks of within and be on the device of the scores")


def _of_each_head(bound: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """[1 or batch * heads, q_len] of [1 or batch, q_len]."""
    if bound is None or bound.shape[0] == 1:
        return bound
    return bound[:, None].expand(batch, heads, -1).flatten(0, 1)
