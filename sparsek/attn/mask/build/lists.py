"""Masks of blocks that the caller lists: by indices, by a map of booleans, or in compressed rows.

Values on a GPU are checked there, without a sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.selection import INTS, Selection, as_kv_lengths, joined_batch, place_of
from sparsek.attn.mask.build.selection_reference import chosen_mask
from sparsek.attn.mask.build.structured import every_key
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import (
    BlockLists,
    Frame,
    Place,
    Sizes,
    check_stored,
    exact_sizes,
    refuse_capture,
    upload,
)
from sparsek.attn.mask.readback import DeferredSizes, Fault, with_readbacks
from sparsek.attn.mask.recorded import of_options, repeated
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.products.formats.pattern import BlockPattern

if TYPE_CHECKING:
    from typing_extensions import Unpack


@repeated
@not_traced("a block mask")
def from_block_map(
    cls: type[Mask],
    block_map: Tensor,
    seq_len: int | None = None,
    *,
    causal: bool = False,
    kv_lengths: Tensor | None = None,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of the blocks that are True, on the map's device. Without a sync.

    Args:
        block_map: bool [Mb, Nb] or [1 or B, 1 or H, Mb, Nb], for Mb tiles of queries and Nb blocks of keys.
        seq_len: Queries and keys, in tokens, where there are as many of both.
        causal: Whether a query sees no keys after its own. Blocks after the tile are then dropped.
        kv_lengths: How many keys each block has, its first ones: int32 or int64 [Nb] or [1 or B, Nb], from 0 to bk.
            Blocks without keys are dropped. None: all of them, up to kv_len.
        **frame: `q_len` and `kv_len` where they differ, `block` and `q_offset`: see `Frame`.

    Returns:
        A mask of the batch items and heads of the map.

    Raises:
        InvalidInput: For a map or lengths of another shape, dtype or device. For wrong values of `kv_lengths` here on
            the CPU; on a GPU when the mask is next used, or in `verify`.

    Example:
        >>> import torch, sparsek as sk
        >>> chosen = torch.tensor([[True, False], [True, True]])
        >>> sk.BlockMask.from_block_map(chosen, 256, causal=True).summary
        '3 of 4 blocks, 75 %, 2 partial'
    """
    arguments.tensor("block_map", block_map, (torch.bool,))
    place = place_of("block_map is", block_map, seq_len, dict(frame))
    kept = _four_dims("block_map", block_map.detach(), place.grid, ("Mb", "Nb"))
    return _listed(cls, "map", place, causal, kept, kv_lengths, place.grid[1])


@repeated
@not_traced("a block mask")
def from_indices(
    cls: type[Mask],
    indices: Tensor,
    counts: Tensor | None = None,
    seq_len: int | None = None,
    *,
    causal: bool = False,
    kv_lengths: Tensor | None = None,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of the listed key blocks of each query tile, on the device of the lists. Without a sync.

    Args:
        indices: int32 or int64 [Mb, K] or [1 or B, 1 or H, Mb, K]: key blocks of each tile, in any order, none twice.
        counts: int32 or int64 [Mb] or [1 or B, 1 or H, Mb]: how many of the K entries count, the first ones. Without
            it, entries of -1 are absent and all others count.
        seq_len: Queries and keys, in tokens, where there are as many of both.
        causal: Whether a query sees no keys after its own. Blocks after the tile are then dropped.
        kv_lengths: How many keys each block has, its first ones: int32 or int64 [Nb] or [1 or B, Nb], from 0 to bk.
            Blocks without keys are dropped. None: all of them, up to kv_len.
        **frame: `q_len` and `kv_len` where they differ, `block` and `q_offset`: see `Frame`.

    Returns:
        A mask of the batch items and heads of the lists.

    Raises:
        InvalidInput: For lists of another shape, dtype or device. For entries that repeat or lie outside, counts below
            0 or over K, and wrong `kv_lengths`: here on the CPU; on a GPU when the mask is next used, or in `verify`.

    Example:
        >>> import torch, sparsek as sk
        >>> chosen = torch.tensor([[0, -1], [1, 0]])
        >>> sk.BlockMask.from_indices(chosen, seq_len=256).to_dense()[0, 0, ::128, ::128].int()
        tensor([[1, 0],
                [1, 1]], dtype=torch.int32)
    """
    arguments.tensor("indices", indices, INTS)
    place = place_of("indices is", indices, seq_len, dict(frame))
    given = _four_dims("indices", indices.detach(), place.grid[:1], ("Mb", "K"))
    held, names = None, {"indices": tuple(indices.shape)}
    if counts is not None:
        held, names["counts"] = _as_counts(counts, place, given), tuple(counts.shape)
    capacity = min(given.shape[-1], place.grid[1])
    return _listed(cls, "indices", place, causal, given, kv_lengths, capacity, held, names)


def _listed(
    cls: type[Mask],
    kind: str,
    place: Place,
    causal: bool,
    given: Tensor,
    kv_lengths: Any,
    capacity: int,
    counts: Tensor | None = None,
    names: dict[str, Any] | None = None,
) -> Mask:
    """The mask of a map or of indices [1 or B, 1 or H, Mb, n], checked but for kv_lengths and `causal`."""
    causal = arguments.flag("causal", causal)
    lengths = None if kv_lengths is None else as_kv_lengths(kv_lengths, place)
    names = {**(names or {}), "kv_lengths": () if kv_lengths is None else tuple(kv_lengths.shape)}
    given = given.expand(joined_batch(lengths, given.shape[0]), -1, -1, -1)
    label = ("block map" if kind == "map" else "indices") + (", causal" if causal else "")
    return chosen_mask(
        cls, Selection(kind, place, causal, given, lengths, capacity, label, counts=counts, names=names)
    )


def _four_dims(name: str, given: Tensor, right: Sequence[int], names: Sequence[str]) -> Tensor:
    """[1 or B, 1 or H, Mb, n] of [Mb, n] or of itself; `right` are the sizes after batch and heads that must be."""
    wide = given[None, None] if given.ndim == 2 else given
    if wide.ndim != 4 or tuple(wide.shape[2 : 2 + len(right)]) != tuple(right) or 0 in wide.shape[:2]:
        need = ", ".join(map(str, [*right, *names[len(right) :]]))
        raise InvalidInput(
            f"{name} is {list(given.shape)}; these lengths need [{need}] or [batch, heads, {need}]"
        )
    return wide


def _as_counts(counts: Any, place: Place, given: Tensor) -> Tensor:
    """Counts [batch, heads, Mb] for indices [batch, heads, Mb, K]."""
    arguments.tensor("counts", counts, INTS)
    arguments.one_device("counts is", counts.device, "indices is", place.device)
    wide = counts.detach()[None, None] if counts.ndim == 1 else counts.detach()
    batch, heads, tiles = given.shape[:3]
    if (
        wide.ndim != 3
        or any(a not in (1, b) for a, b in zip(wide.shape[:2], (batch, heads), strict=True))
        or wide.shape[2] != tiles
    ):
        raise InvalidInput(
            f"counts is {list(counts.shape)}; indices of {list(given.shape)} need [{tiles}] or {[batch, heads, tiles]}"
        )
    return wide


@of_options
@not_traced("a block mask")
def from_blocks(
    cls: type[Mask],
    indptr: Any,
    indices: Any,
    q_len: int,
    kv_len: int,
    block: int | tuple[int, int] = 128,
    batch: int = 1,
    heads: int = 1,
    device: str | torch.device | None = None,
) -> Mask:
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
    readbacks: list[Fault | DeferredSizes] = []
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
        readbacks.append(DeferredSizes())
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
    for each in readbacks:
        if isinstance(each, DeferredSizes):
            each.begin(mask)
    return with_readbacks(mask, readbacks)


def _as_list(values: Any, name: str) -> Tensor:
    """A 1-D tensor of ints, where it is."""
    made = values
    try:
        if not isinstance(values, Tensor):  # numpy sees no ints in an empty list
            made = torch.from_numpy(np.array(values, dtype=None if np.size(values) else np.int64))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
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
