"""Masks of blocks that the caller chooses: by scores or by lists. Values on a GPU are checked there, without a sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, wait_for
from sparsek.core.tracing import not_traced
from sparsek.mask.lists import (
    BY_INTERVAL,
    BlockLists,
    Frame,
    Place,
    Sizes,
    check_stored,
    exact_sizes,
    refuse_capture,
    upload,
)
from sparsek.mask.structured import every_key, up_to_itself, visible
from sparsek.mask.view import NOT_STORED, WHOLE, table_of
from sparsek.matrix.pattern import INT32_MAX, BlockPattern

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparsek.mask.mask import BlockMask


class Readback:
    """An asynchronous device-to-host copy of a few int64 values."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.arrived = numbers, None
        if numbers.device.type == "cuda":
            self.numbers = torch.empty(numbers.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(numbers.device))

    def read(self, wait: bool) -> Any:
        """The values as an int or a list; None while they have not arrived, unless `wait`."""
        if self.arrived is not None:
            if torch.cuda.is_current_stream_capturing():  # asking would end the capture of a CUDA graph
                return None
            if wait:
                self.arrived.synchronize()
            elif not self.arrived.query():
                return None
            self.arrived = None
        return self.numbers.tolist()


class Fault(Readback):
    """The position of a fault in what a mask was made from; negative if there is none."""

    def __init__(self, at: Tensor, explain: Callable[[int], str]) -> None:
        super().__init__(at)
        self.explain = explain

    def apply(self, mask: BlockMask, wait: bool) -> None:
        """Raise InvalidInput if there is a fault. Does nothing while that is unknown."""
        at = self.read(wait)
        if at is not None and at >= 0:
            raise InvalidInput(self.explain(at))


class TrueSizes(Readback):
    """The sizes of lists on a device. They replace the bounds in a mask's `sizes`, and later plans use them."""

    def __init__(self, full: Tensor, partial: Tensor) -> None:
        both = (full + partial).long()  # a longest row times the rows is more than int32 holds
        heavy = torch.where(both * both.numel() > 2 * both.sum(), both, 0).sum()
        longest = both.max() if both.numel() else both.sum()
        super().__init__(torch.stack((both.sum(), partial.sum(), longest, heavy)))

    def apply(self, mask: BlockMask, wait: bool) -> None:
        """Set the sizes of the mask, once they have arrived."""
        numbers = self.read(wait)
        if numbers is not None and not mask.sizes.exact:
            *sizes, heavy = numbers
            object.__setattr__(mask, "sizes", Sizes(*sizes, exact=True))
            mask._memo["heavy"] = heavy


def _faults(found: Tensor, explain: Callable[[int], str]) -> list[Fault]:
    """A readback of whether any element is True. None in a captured CUDA graph, whose replays have no host code."""
    if found.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return []
    return [Fault(_first(found), explain)]


@lru_cache(maxsize=64)
def _sent(rows_of: Callable[..., Sequence[np.ndarray]], place: Place, *args: Any) -> tuple[Any, ...]:
    """Numbers of each row, int32 [Mb, 1] on the device, and when they arrive. Cached: one upload serves every step."""
    parts = upload([each[:, None] for each in rows_of(place, *args)], place.device)
    return parts, Ready.here(place.device)


def _on_device(rows_of: Callable[..., Sequence[np.ndarray]], place: Place, *args: Any) -> list[Tensor]:
    """rows_of(place, *args) for each row, on the device, for the current stream.

    A CUDA graph cannot upload, but it may capture what was sent before: torch.cuda.graph waits for the device first.
    """
    parts, ready = _sent(rows_of, place, *args)
    if ready is not None and not torch.cuda.is_current_stream_capturing():
        wait_for(ready, parts)
    return parts


def _first(found: Tensor) -> Tensor:
    """The flat position of the first True, int64; -1 if there is none."""
    if not found.numel():
        return found.new_full((), -1, dtype=torch.int64)
    flat = found.flatten()
    return torch.where(flat.any(), flat.to(torch.uint8).argmax(), -1)


def _with_readbacks(mask: BlockMask, readbacks: Sequence[Fault | TrueSizes]) -> BlockMask:
    """The mask, whose `verify` applies these readbacks. On the CPU they are applied here."""
    if mask.device.type == "cpu":
        for each in readbacks:
            each.apply(mask, wait=True)
    else:
        mask._memo["readbacks"] = tuple(readbacks)
    return mask


@not_traced("a block mask")
def topk(
    cls: type[BlockMask],
    scores: Tensor,
    k: int,
    causal: bool = False,
    always: Tensor | tuple[int, int] | None = None,
    seq_len: int | None = None,
    **frame: Unpack[Frame],
) -> BlockMask:
    """Return the mask of the `k` key blocks with the highest scores for each query tile, on the scores' device.

    Neither the mask nor its plan waits for a GPU, and a CUDA graph may capture both. Equal scores are ranked the same
    way every time. The choice has no gradient.

    Args:
        scores: Floating point [1 or B, 1 or H, Mb, Nb] or [Mb, Nb], for Mb tiles of queries and Nb blocks of keys. -inf
            excludes a block.
        k: Blocks of each tile. A tile with fewer blocks to choose from keeps all of them.
        causal: Whether a query sees no keys after its own. Blocks after the tile are then not chosen.
        always: Blocks that are kept whatever their score, and count among the k: bool [Mb, Nb] or [H, Mb, Nb], or a
            pair (sinks, local) in blocks: the first `sinks` blocks, and `local` blocks up to the tile's own, if not
            causal also from there on.
        seq_len: Queries and keys, in tokens, where there are as many of both.
        **frame: `q_len` and `kv_len` where they differ, `block` and `q_offset`: see `Frame`.

    Returns:
        A mask of the batch items and heads of the scores.

    Raises:
        InvalidInput: For scores or `always` of another shape, dtype or device, and for a NaN score or more than k
            `always` blocks in a tile: here on the CPU; on a GPU when the mask is next used, or in `verify`.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 4, 1024, 64), torch.randn(1, 4, 1024, 64)
        >>> q_mean, k_mean = (x.unflatten(2, (-1, 128)).mean(3) for x in (q, k))  # [B, H, blocks, D]
        >>> mask = sk.BlockMask.topk(q_mean @ k_mean.mT, k=4, causal=True, always=(1, 2), seq_len=1024)
        >>> mask.summary
        '104 of 256 blocks, 40.6 %, 32 partial'
    """
    scores, place = _as_scores(scores, seq_len, dict(frame))
    causal = arguments.flag("causal", causal)
    (batch, heads), columns = scores.shape[:2], place.grid[1]
    k = min(arguments.integer("k", k, 1), columns)
    edge, end = visible(place, causal)
    edges, ends = _on_device(visible, place, causal)
    column = torch.arange(columns, dtype=torch.int32, device=place.device)
    there = column < ends
    nan, shape = scores.isnan() & there, tuple(scores.shape)
    faults = _faults(nan, lambda at: f"scores{_index(at, shape)} is NaN; -inf means never")
    ranked = scores.masked_fill(nan | ~there, -torch.inf)
    kept = _as_always(always, place, causal, shape, k)
    if kept is not None:
        kept = kept & there
        rows_kept = tuple(kept.shape[:-1])
        faults += _faults(
            kept.sum(-1) > k,
            lambda at: (
                f"always{_index(at, rows_kept)} keeps more than k = {k} blocks; they count among the k"
            ),
        )
        ranked = ranked.clamp_(max=torch.finfo(scores.dtype).max).masked_fill_(kept, torch.inf)
    best = _best(ranked, k, k, lambda chosen: chosen < edges)
    lo, hi = (up_to_itself(place) if causal else every_key(place)) or (None, None)
    most, most_partial, groups = np.minimum(k, end), np.minimum(k, end - edge), batch * heads
    bounds = groups * int(most.sum()), groups * int(most_partial.sum()), int(most.max(initial=0))
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=batch, heads=heads,
        full=best.full, partial=best.partial, lo=lo, hi=hi, sizes=best.sizes(bounds), pure=True,
        label=f"topk({k}{', causal' if causal else ''})",
    )  # fmt: skip
    return _with_readbacks(mask, faults)


class Best(NamedTuple):
    """The chosen blocks, int32 [batch, heads, Mb, k]: full ones, then partial ones, then unused entries."""

    chosen: Tensor
    full: BlockLists
    partial: BlockLists

    def sizes(self, bounds: tuple[int, int, int]) -> Sizes:
        """The sizes of the lists; on a GPU, where counting would need a sync, these bounds."""
        if self.chosen.device.type != "cpu":
            return Sizes(*bounds, exact=False)
        return exact_sizes(self.full.counts.numpy(), self.partial.counts.numpy())


def _best(ranked: Tensor, k: int, most: int, is_whole: Callable[[Tensor], Tensor]) -> Best:
    """For each row of scores [batch, heads, Mb, Nb] the k highest, and up to `most` that are inf; never -inf.

    `is_whole` marks which blocks of [batch, heads, Mb, most] are full. Rows have room for `most` entries; partial
    blocks follow the full ones, so both lists share the entries.
    """
    columns = ranked.shape[-1]
    score, chosen = torch.topk(ranked, most, dim=-1, sorted=most > k)
    kept = score != -torch.inf
    if most > k:
        kept &= (torch.arange(most, device=score.device) < k) | (score == torch.inf)
    whole = kept & is_whole(chosen)
    key = torch.where(kept, torch.where(whole, chosen, chosen + columns), 2 * columns)
    chosen = key.to(torch.int32).sort(-1).values % max(columns, 1)
    full, cut = (each.sum(-1, dtype=torch.int32).flatten() for each in (whole, kept & ~whole))
    check_stored(full.numel() * most)
    starts = torch.arange(full.numel(), dtype=torch.int32, device=score.device) * most
    indices = chosen.flatten()
    return Best(chosen, BlockLists(starts, full, indices), BlockLists(starts + full, cut, indices))


def _as_scores(scores: Any, seq_len: int | None, frame: dict[str, Any]) -> tuple[Tensor, Place]:
    """Scores [batch, heads, Mb, Nb] without a gradient, and lengths and block of the mask."""
    if arguments.tensor("scores", scores, dtypes.FLOATS).ndim not in (2, 4):
        raise InvalidInput(
            f"scores are {list(scores.shape)}; they must be [batch, heads, Mb, Nb] or [Mb, Nb]"
        )
    device = frame.get("device")
    if device is not None and arguments.device("device", device) != scores.device:
        raise InvalidInput(
            f"scores are on {scores.device} and device is {device}; masks are made where the scores are"
        )
    place = Place.of(seq_len, **{**frame, "device": scores.device})
    scores = scores.detach().view(1, 1, *scores.shape) if scores.ndim == 2 else scores.detach()
    if tuple(scores.shape[2:]) != place.grid or 0 in scores.shape[:2]:
        raise InvalidInput(
            f"scores are {list(scores.shape)}; {place.q_len} queries in tiles of {place.block[0]} and {place.kv_len} "
            f"keys in blocks of {place.block[1]} need [batch, heads, {place.grid[0]}, {place.grid[1]}]"
        )
    return scores, place


def _as_always(always: Any, place: Place, causal: bool, shape: tuple[int, ...], k: int) -> Tensor | None:
    """The blocks that are always kept, bool, of a shape that broadcasts to that of the scores."""
    if always is None:
        return None
    if isinstance(always, (tuple, list)):
        return _near_blocks(always, place, causal, k)
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


def _near_blocks(always: Any, place: Place, causal: bool, k: int) -> Tensor:
    """The first `sinks` blocks and `local` ones up to the tile's own, if not causal also after it: bool [Mb, Nb]."""
    sinks, local = (min(each, place.reach) for each in arguments.pair("always", always))
    end = visible(place, causal)[1]
    left, right = _near(place, causal, local)
    held = np.minimum(sinks, end) + np.maximum(right - np.maximum(left, np.minimum(sinks, end)), 0)
    if (held > k).any():
        at = int(held.argmax())
        raise InvalidInput(f"always keeps {held[at]} blocks in query tile {at}; they count among the k = {k}")
    lefts, rights = _on_device(_near, place, causal, local)
    column = torch.arange(place.grid[1], dtype=torch.int32, device=place.device)
    return (column < sinks) | ((lefts <= column) & (column < rights))


def _near(place: Place, causal: bool, local: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 of the blocks near each tile's own."""
    end, bk = visible(place, causal)[1], place.block[1]
    left = np.clip(place.first // bk - local + 1, 0, end)
    right = np.clip(place.last // bk + (1 if causal else local), left, end) if local else left
    return left, right


def _index(at: int, shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(each) for each in np.unravel_index(at, shape))}]"


@not_traced("a block mask")
def from_blocks(
    cls: type[BlockMask],
    indptr: Any,
    indices: Any,
    q_len: int,
    kv_len: int,
    block: int | tuple[int, int] = 128,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device | None = None,
) -> BlockMask:
    """Return the mask in which a query sees every key of the listed blocks.

    Lists on the host are checked here. Lists on a GPU are checked and counted there, without a sync: `sizes` are bounds
    until the counts have arrived.

    Args:
        indptr: Ints [batch * heads * Mb + 1], as in `BlockPattern`: row r = (b * heads + h) * Mb + i, which is query
            tile i, has the entries indptr[r] to indptr[r + 1] of `indices`. A sequence, an array or an int tensor.
        indices: Ints [stored blocks]: key blocks, ascending and unique in each row.
        q_len: Queries, in tokens.
        kv_len: Keys, in tokens.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.
        batch: Batch items with lists of their own; 1 if all share them.
        heads: Heads with lists of their own; 1 if all share them.
        device: Where the mask is made; that of lists on a GPU, else torch's default device.

    Raises:
        InvalidInput: For lists of another length, and for a fault in them: on the host here; on a GPU when the mask is
            next used, or in `verify`.

    Example:
        >>> import sparsek as sk
        >>> mask = sk.BlockMask.from_blocks([0, 1, 3], [0, 0, 1], q_len=256, kv_len=256)
        >>> mask & sk.BlockMask.causal(256)
        BlockMask(blocks & causal, 256 x 256, block 128x128, batch 1, heads 1, 3 of 4 blocks, 75 %, 2 partial, cpu)
    """
    # A block that reaches beyond kv_len ends its row, so both lists share the entries.
    indptr, indices = _as_list(indptr, "indptr"), _as_list(indices, "indices")
    here = indptr.device
    if indices.device != here:
        raise InvalidInput(f"indptr is on {here} and indices on {indices.device}; use one device")
    on_gpu = here.type == "cuda"
    if on_gpu and device is not None and arguments.device("device", device) != here:
        raise InvalidInput(f"indptr is on {here} and device is {device}; lists on a GPU make masks there")
    place = Place.of(q_len=q_len, kv_len=kv_len, block=block, device=here if on_gpu else device)
    batch, heads = arguments.integer("batch", batch, 1), arguments.integer("heads", heads, 1)
    (tiles, columns), rows = place.grid, batch * heads * place.grid[0]
    if indptr.numel() != rows + 1:
        raise InvalidInput(
            f"indptr has {indptr.numel()} entries; batch {batch} x heads {heads} x {tiles} query tiles are {rows} rows "
            f"and need {rows + 1}"
        )
    if indices.numel() > rows * columns:
        raise InvalidInput(
            f"indices has {indices.numel()} entries; {rows} rows of {columns} blocks hold no more"
        )
    check_stored(indices.numel())
    readbacks: list[Fault | TrueSizes] = []
    if on_gpu:
        refuse_capture()
        wrong = _wrong(indptr, indices, columns)
        readbacks = [
            Fault(torch.where(wrong, 0, -1), lambda _: _explained(indptr.cpu(), indices.cpu(), place, rows))
        ]
        parts = list(_split(torch.where(wrong, 0, indptr), torch.where(wrong, 0, indices), place))
        most = indices.numel()
        sizes = Sizes(
            most, min(most, rows) if place.kv_len % place.block[1] else 0, min(most, columns), exact=False
        )
        readbacks.append(TrueSizes(parts[1], parts[3]))
    else:
        _check_lists(indptr, indices, place, rows)
        arrays = [part.numpy() for part in _split(indptr, indices, place)]
        sizes = exact_sizes(arrays[1], arrays[3])
        parts = upload(arrays, place.device)
    starts, whole, cut_starts, cut, columns_of = parts
    lo, hi = every_key(place) or (None, None)
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=batch, heads=heads,
        full=BlockLists(starts, whole, columns_of), partial=BlockLists(cut_starts, cut, columns_of),
        lo=lo, hi=hi, sizes=sizes, pure=True, label="blocks",
    )  # fmt: skip
    return _with_readbacks(mask, readbacks)


def _as_list(values: Any, name: str) -> Tensor:
    """A 1-D tensor of ints, where it is."""
    made = values
    try:
        if not isinstance(values, Tensor):  # numpy sees no ints in an empty list
            made = torch.from_numpy(np.array(values, dtype=None if np.size(values) else np.int64))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name} is no row of ints: {error}") from error
    return arguments.tensor(name, made, (torch.int32, torch.int64), ndim=1).detach().contiguous()


def _split(indptr: Tensor, indices: Tensor, place: Place) -> tuple[Tensor, ...]:
    """int32: starts and counts of the full blocks, of the partial ones (at most one in a row), and the indices."""
    indptr, indices = indptr.to(torch.int32), indices.to(torch.int32)
    starts, ends = indptr[:-1].contiguous(), indptr[1:]
    cut = torch.zeros_like(starts)
    if place.kv_len % place.block[1] and indices.numel():
        last = indices[(ends - 1).clamp(min=0)]
        cut = ((ends > starts) & (last == place.grid[1] - 1)).to(torch.int32)
    return starts, ends - starts - cut, ends - cut, cut, indices


def _wrong(indptr: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Whether lists on the device have a fault. No sync; nothing is read out of bounds."""
    stored = indices.numel()
    wrong = (indptr[0] != 0) | (indptr[-1] != stored) | (indptr.diff() < 0).any()
    row_starts = torch.zeros(stored + 1, dtype=torch.bool, device=indptr.device)
    row_starts.index_fill_(0, indptr.clamp(0, stored).long(), True)  # an assignment would wait for the device
    stuck = (indices.diff() <= 0) & ~row_starts[1:-1]
    return wrong | ((indices < 0) | (indices >= columns)).any() | stuck.any()


def _check_lists(indptr: Tensor, indices: Tensor, place: Place, rows: int) -> None:
    """The checks of BlockPattern, for lists on the host."""
    for name, part in (("indptr", indptr), ("indices", indices)):
        far = torch.nonzero(part.abs() > INT32_MAX)
        if far.numel():
            raise InvalidInput(f"{name}[{int(far[0])}] is {int(part[far[0]])}; it must fit int32")
    shape = (rows * place.block[0], place.kv_len)
    BlockPattern(shape, place.block, indptr.to(torch.int32), indices.to(torch.int32))


def _explained(indptr: Tensor, indices: Tensor, place: Place, rows: int) -> str:
    try:
        _check_lists(indptr, indices, place, rows)
    except InvalidInput as error:
        return str(error)
    return "the lists were wrong when the mask was made, and have been written to since"


@not_traced("a block mask")
def best_blocks(within: BlockMask, scores: Tensor, k: int, always: BlockMask | None = None) -> BlockMask:
    """For each query tile the `k` blocks of `within` with the highest scores, with the rules of `within`.

    scores: floating point [B, H, Mb, Nb] on the mask's device. within, always: one head, and 1 or B batch items. Blocks
    that `always` stores come first and count among the k; a tile that has more of them keeps all. -inf excludes other
    blocks. Equal scores are ranked the same way every time.

    No sync where the sizes of `within` and `always` are exact. O(B * H * Mb * Nb), as the scores are.
    """
    k, (tiles, columns) = arguments.integer("k", k, 1), within.grid
    _check(within, scores, always)
    codes = table_of(within)
    there = codes != NOT_STORED
    ranked = scores.detach().masked_fill(~there, -torch.inf)
    most = k
    if always is not None:
        ranked = ranked.masked_fill(there & (table_of(always) != NOT_STORED), torch.inf)
        most = max(k, always.sizes.longest)
    most, (batch, heads) = min(most, columns), scores.shape[:2]
    codes = codes.expand(batch, heads, tiles, columns)
    best = _best(ranked, k, most, lambda chosen: codes.gather(-1, chosen) == WHOLE)
    rules = None
    if within.rules is not None:
        rules = codes.gather(-1, best.chosen.long()).clamp(min=BY_INTERVAL).flatten()
    times = batch * heads // within.batch
    bound = min(batch * heads * tiles * most, times * within.sizes.stored)
    lo, hi = (_of_each_head(each, batch, heads) for each in (within.lo, within.hi))
    return within.unchecked(
        q_len=within.q_len, kv_len=within.kv_len, block=within.block, batch=batch, heads=heads,
        full=best.full, partial=best.partial, lo=lo, hi=hi, rules=rules, bits=within.bits,
        sizes=best.sizes((bound, min(bound, times * within.sizes.partial), most)), pure=within.pure,
        label=f"{most} best of {within.label}",
    )  # fmt: skip


def _check(within: BlockMask, scores: Tensor, always: BlockMask | None) -> None:
    shape = ["B", "H", *within.grid]
    if scores.ndim != 4 or tuple(scores.shape[2:]) != within.grid or not scores.is_floating_point():
        raise InvalidInput(f"scores are {scores.dtype} {list(scores.shape)}; the mask needs floats {shape}")
    for name, mask in (("within", within), ("always", always)):
        if mask is None:
            continue
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
