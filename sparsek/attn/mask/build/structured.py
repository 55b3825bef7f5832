"""Masks in closed form: causal, strided, dilated. Windows and documents are made by `documents`.

On a GPU a kernel writes them (banded.py, kernels/mask). What follows here in numpy makes them on the CPU, where no
kernel is, and is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build import banded
from sparsek.attn.mask.build.banded import (
    Band,
    Steps,
    bounded_band,
    counted_band,
    counted_steps,
    full_and_partial,
    on_gpu,
    room_of_blocks,
    room_of_documents,
)
from sparsek.attn.mask.build.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.lists import (
    Frame,
    Place,
    Runs,
    as_lengths,
    check_stored,
    exact_sizes,
    heavy_blocks,
    lists_of_runs,
    read_edges,
    table_of_runs,
    upload,
)
from sparsek.attn.mask.recorded import of_options, repeated
from sparsek.core import arguments
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


def every_key(place: Place) -> tuple[Tensor, Tensor] | None:
    """lo and hi that admit every key; None where no block reaches beyond kv_len, which needs none."""
    if place.kv_len % place.block[1] == 0:
        return None
    hi = torch.full((1, place.q_len), place.kv_len, dtype=torch.int32, device=place.device)
    return torch.zeros_like(hi), hi


def up_to_itself(place: Place) -> tuple[Tensor, Tensor]:
    """lo and hi that admit the keys up to the position of the query."""
    hi = place.positions(1)
    return torch.zeros_like(hi), hi


@of_options
@not_traced("a block mask")
def full(cls: type[Mask], seq_len: int | None = None, **frame: Unpack[Frame]) -> Mask:
    """The mask in which every query sees every key: see `BlockMask.full`."""
    return _of_steps(cls, Place.of(seq_len, **frame), None, False, "full")


@of_options
@not_traced("a block mask")
def causal(cls: type[Mask], seq_len: int | None = None, **frame: Unpack[Frame]) -> Mask:
    """Return the mask in which every query sees the keys up to its own position.

    The last query stands at the last key, so that a query sees all earlier keys of a cache. With q_offset=0 the first
    query stands at the first key, as in scaled_dot_product_attention(is_causal=True).

    Args:
        seq_len: Queries and keys, in tokens, where there are as many of both.
        **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

    Returns:
        A mask shared by all batch items and heads. Made without a host sync.

    Raises:
        InvalidInput: For lengths, blocks or devices that no mask has.

    Example:
        >>> import sparsek as sk
        >>> mask = sk.BlockMask.causal(1000)
        >>> mask
        BlockMask(causal, 1000 x 1000, block 128x128, batch 1, heads 1, 36 of 64 blocks, 56.2 %, 8 partial, cpu)
        >>> sk.BlockMask.causal(q_len=2, kv_len=4).to_dense()[0, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    return _of_steps(cls, Place.of(seq_len, **frame), None, True, "causal")


@of_options
@not_traced("a block mask")
def sliding_window(
    cls: type[Mask],
    seq_len: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of a window of keys around each query, and of the first keys (attention sinks).

    A query at position p sees the keys k with p - window < k <= p, or |p - k| < window if not causal, and the first
    `sinks` keys, if causal only those up to p.

    Args:
        seq_len: Queries and keys, in tokens, where there are as many of both.
        window: Keys on one side of the query, its own included; at least 1.
        sinks: First keys that every query sees; 0 by default.
        causal: Whether a query sees no keys after its own.
        **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

    Returns:
        A mask shared by all batch items and heads, exact for every element. Made without a host sync.

    Raises:
        InvalidInput: For a window below 1, sinks below 0, and lengths, blocks or devices that no mask has.

    Sources: Longformer, Beltagy et al., arXiv:2004.05150; sinks: StreamingLLM, Xiao et al., arXiv:2309.17453.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.sliding_window(32768, window=2048, sinks=128).summary
        '4455 of 65536 blocks, 6.8 %, 495 partial'
        >>> sk.BlockMask.sliding_window(5, window=2, sinks=1).to_dense()[0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 0, 1, 1, 0],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    place = Place.of(seq_len, **frame)
    window, sinks = arguments.integer("window", window, 1), arguments.integer("sinks", sinks)
    causal = arguments.flag("causal", causal)
    label = f"sliding_window({window}{f', sinks={sinks}' if sinks else ''}{_both_ways(causal)})"
    near = Window(window, 1 if causal else window, sinks, sinks_ahead=not causal)
    return of_window(cls, place, near, label)


def of_window(cls: type[Mask], place: Place, near: Window, label: str) -> Mask:
    """The mask in which each query sees the keys that `near` admits."""
    band = Band.of(place, *near)
    count, room = partial(counted_band, place, band), partial(band.room, place)
    made = on_gpu(cls, place, "mask_of_band", (band,), count, room, label, pure=not band.splits(place))
    if made is not None:
        return made
    return documents_mask(cls, PackedLayout.of(place), near, place.block, place.device, label)


@of_options
@not_traced("a block mask")
def strided(
    cls: type[Mask],
    seq_len: int | None = None,
    stride: int | None = None,
    window: int | None = None,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of the blocks near the diagonal and of every (stride / bk)-th block from there.

    A tile whose queries stand in key blocks p to p' sees the blocks j with p - w < j < p' + w, where w is `window` in
    blocks, rounded up, and beyond these the blocks j with (p - j) or (j - p') a multiple of stride / bk. If causal, a
    query sees only keys up to its own.

    Args:
        seq_len: Queries and keys, in tokens, where there are as many of both.
        stride: Distance of the blocks in tokens, a multiple of the block's bk keys.
        window: Keys near the query, in tokens; counted in blocks.
        causal: Whether a query sees no keys after its own.
        **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

    Returns:
        A mask shared by all batch items and heads. Made without a host sync.

    Raises:
        InvalidInput: For a stride that is no multiple of bk, and lengths, blocks or devices that no mask has.

    Source: in blocks, Sparse Transformers, Child et al., arXiv:1904.10509.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.strided(512, stride=192, window=64, block=64)
        BlockMask(strided(192, 64), 512 x 512, block 64x64, batch 1, heads 1, 15 of 64 blocks, 23.4 %, 8 partial, cpu)
    """
    place = Place.of(seq_len, **frame)
    stride, window = arguments.integer("stride", stride, 1), arguments.integer("window", window, 1)
    causal, bk = arguments.flag("causal", causal), place.block[1]
    if stride % bk:
        raise InvalidInput(f"stride is {stride}; it must be a multiple of the block's {bk} keys")
    step, near = min(stride // bk, place.reach), place.blocks(window)
    label = f"strided({stride}, {window}{_both_ways(causal)})"
    return _of_steps(cls, place, Steps.strided(place, step, near, not causal), causal, label)


@of_options
@not_traced("a block mask")
def dilated(
    cls: type[Mask],
    seq_len: int | None = None,
    window: int | None = None,
    dilation: int = 1,
    causal: bool = True,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of every `dilation`-th block within `window` tokens on either side.

    A tile whose queries stand in key blocks p to p' sees these, and for 0 < t < w the blocks p - t * dilation and
    p' + t * dilation, where w is `window` in blocks, rounded up. If causal, a query sees only keys up to its own. With
    `dilation` 1 it is a window of whole blocks.

    Args:
        seq_len: Queries and keys, in tokens, where there are as many of both.
        window: Seen keys on one side, in tokens; counted in blocks. They reach dilation times as far.
        dilation: Distance of the seen blocks, in blocks.
        causal: Whether a query sees no keys after its own.
        **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

    Returns:
        A mask shared by all batch items and heads. Made without a host sync.

    Raises:
        InvalidInput: For a window or dilation below 1, and lengths, blocks or devices that no mask has.

    Source: in blocks, Longformer, Beltagy et al., arXiv:2004.05150.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.dilated(512, window=128, dilation=3, block=64)
        BlockMask(dilated(128, 3), 512 x 512, block 64x64, batch 1, heads 1, 13 of 64 blocks, 20.3 %, 8 partial, cpu)
    """
    place = Place.of(seq_len, **frame)
    window, dilation = arguments.integer("window", window, 1), arguments.integer("dilation", dilation, 1)
    causal = arguments.flag("causal", causal)
    step, near = min(dilation, place.reach), place.blocks(window)
    label = f"dilated({window}, {dilation}{_both_ways(causal)})"
    return _of_steps(cls, place, Steps.dilated(place, step, near, not causal), causal, label)


def _both_ways(causal: bool) -> str:
    return "" if causal else ", causal=False"


def _of_steps(cls: type[Mask], place: Place, steps: Steps | None, causal: bool, label: str) -> Mask:
    """The mask of the blocks that `steps` names, of all for None."""
    band, room = Band.of(place, None, 1 if causal else None), partial(room_of_blocks, place, steps, causal)
    every = partial(counted_band, place, band)
    count = every if steps is None else partial(counted_steps, place, steps, causal)
    made = on_gpu(cls, place, "mask_of_blocks", (band, steps, causal), count, room, label)
    if made is not None:
        return made
    tiles, columns = place.grid
    all_blocks = Runs.between(np.zeros(tiles, np.int64), np.full(tiles, columns))
    return of_blocks(cls, place, all_blocks if steps is None else steps.runs(place), causal, label)


def of_blocks(cls: type[Mask], place: Place, stored: Runs, causal: bool, label: str, heads: int = 1) -> Mask:
    """The mask of these blocks of each tile, as far as they exist; if causal, of their keys up to the query."""
    interval = up_to_itself(place) if causal else every_key(place)
    return _of_runs(cls, place, *full_and_partial(stored, place, causal, heads), interval, label, heads)


def _of_runs(
    cls: type[Mask],
    place: Place,
    full: Runs,
    cut: Runs,
    interval: Sequence[Tensor] | None,
    label: str,
    heads: int = 1,
) -> Mask:
    """The mask of these full and partial blocks; `interval`: lo and hi, or None."""
    counts = full.count.sum(0), cut.count.sum(0)
    sizes = exact_sizes(*counts)
    check_stored(sizes.stored)
    tables = table_of_runs(full, counts[0]), table_of_runs(cut, counts[1])
    sent = upload([*tables[0], *tables[1]], place.device)
    every = torch.arange(place.grid[1], dtype=torch.int32, device=place.device)
    split = len(tables[0])
    lo, hi = interval or (None, None)
    mask = cls.unchecked(
        q_len=place.q_len, kv_len=place.kv_len, block=place.block, batch=1, heads=heads,
        full=lists_of_runs(sent[:split], every, sizes.stored - sizes.partial),
        partial=lists_of_runs(sent[split:], every, sizes.partial), lo=lo, hi=hi, sizes=sizes, pure=True, label=label,
    )  # fmt: skip
    mask._memo["heavy"] = heavy_blocks(*counts)
    return mask


@not_traced("a block mask")
def of_intervals(cls: type[Mask], place: Place, lo: np.ndarray, hi: np.ndarray, label: str) -> Mask:
    """The mask in which query q sees keys lo[q] to hi[q] - 1, int64 [q_len]. Both ascend, and lo <= hi."""
    bq, bk = place.block
    one = np.arange(0, place.q_len, bq)
    last = np.minimum(one + bq, place.q_len) - 1
    begin, end = lo[one] // bk, -(-hi[last] // bk)
    end = np.where(lo[one] < hi[last], end, begin)
    whole = np.clip(-(-lo[last] // bk), begin, end)
    cut = np.clip(hi[one] // bk, whole, end)
    full, rest = Runs.between(whole, cut), Runs.between(begin, whole).then(Runs.between(cut, end))
    return _of_runs(cls, place, full, rest, upload([lo[None], hi[None]], place.device), label)


@of_options
@not_traced("a block mask")
def block_diagonal(
    cls: type[Mask],
    lengths: Any,
    causal: bool = True,
    seq_len: int | None = None,
    block: int | tuple[int, int] = 128,
    device: str | torch.device | None = None,
) -> Mask:
    """Return the mask of packed documents, in which a query sees the keys of its own document.

    Args:
        lengths: The length of each document in tokens, as a sequence, an array or a tensor on the CPU; or one such row
            for each batch item. A document may be empty. All rows have one sum.
        causal: Whether a query sees no keys after its own.
        seq_len: The sum of each row, for a check; not needed.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.
        device: Where the mask is made; torch's default device for None.

    Returns:
        A mask of one batch item for each row, shared by all heads. Made without a host sync.

    Raises:
        InvalidInput: For lengths that are no ints of at least 0 or whose sums differ, and blocks or devices that no
            mask has.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.block_diagonal([300, 17, 195]).summary
        '8 of 16 blocks, 50 %, 7 partial'
        >>> sk.BlockMask.block_diagonal([[300, 212], [512]]).batch
        2
    """
    rows, causal = as_lengths(lengths), arguments.flag("causal", causal)
    total = int(rows[0].sum()) if seq_len is None else arguments.integer("seq_len", seq_len)
    for at, row in enumerate(rows):
        if row.sum() != total:
            right = f"those of batch item 0 to {total}" if seq_len is None else f"seq_len is {total}"
            raise InvalidInput(f"lengths of batch item {at} sum up to {row.sum()}; {right}")
    place = Place.of(total, block=block, device=device, q_offset=0)
    item = np.repeat(np.arange(len(rows)), [row.size for row in rows])
    ends, of_all = np.concatenate([np.cumsum(row) for row in rows]), np.concatenate(rows)
    starts, none = ends - of_all, np.zeros_like(ends)
    layout = PackedLayout(Documents(item, starts, ends, starts, ends, none, starts), total, total, len(rows))
    near = Window(None, 1 if causal else None)
    label = f"block_diagonal({of_all.size} documents{_both_ways(causal)})"
    return documents_mask(cls, layout, near, place.block, place.device, label)


@repeated
@not_traced("a block mask")
def documents(
    cls: type[Mask],
    cu_seqlens: Tensor,
    seq_len: int | None = None,
    *,
    window: int | None = None,
    causal: bool = True,
    max_seqlen: int | None = None,
    block: int | tuple[int, int] = 128,
) -> Mask:
    """Return the mask of packed documents from `cu_seqlens`, in which a query sees the keys of its own document.

    On a GPU with `seq_len` given nothing is read back, so a CUDA graph may capture it, and a replay makes the mask of
    the documents of that moment. `sizes` are bounds there; `max_seqlen` or a window makes them tight.

    Args:
        cu_seqlens: int32 or int64 [documents + 1]: 0, then the end of each document in tokens. The mask is made on its
            device. On a GPU with `seq_len` it is checked there: a fault is raised when the mask is next used, or in
            `verify`.
        seq_len: Queries and keys in tokens, at least the end of the last document; queries after it see nothing. That
            end by default, for which the host waits for a GPU.
        window: A query sees keys less than so many tokens before it, and after it if not causal. None: all.
        causal: Whether a query sees no keys after its own.
        max_seqlen: The longest document, in tokens. Keys so far from a query are not seen.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.

    Returns:
        A mask of one batch item, shared by all heads.

    Raises:
        InvalidInput: For cu_seqlens of another shape or dtype, or that do not ascend from 0 to at most `seq_len`; where
            they are read, for a document longer than `max_seqlen`; for blocks that no mask has.

    Example:
        >>> import torch, sparsek as sk
        >>> sk.BlockMask.documents(torch.tensor([0, 300, 317, 512]), 640).summary
        '8 of 25 blocks, 32 %, 7 partial'
    """
    arguments.tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), ndim=1)
    causal = arguments.flag("causal", causal)
    reach = [arguments.integer("window", window, 1)] if window is not None else []
    count = max(cu_seqlens.numel() - 1, 0)
    label = f"documents({count}{f', window={window}' if reach else ''}{_both_ways(causal)})"
    if max_seqlen is not None:
        reach.append(arguments.integer("max_seqlen", max_seqlen, 1))
    back = min(reach, default=None)
    near = Window(back, 1 if causal else back)
    if is_fake(cu_seqlens):
        return _fake_documents(cls, cu_seqlens, seq_len, block, near, label)
    if seq_len is not None and count and banded.has_kernels(cu_seqlens.device):
        place = Place.of(seq_len, block=block, device=cu_seqlens.device, q_offset=0)
        band, explain = Band.of(place, *near), partial(_wrong_edges, place.q_len)
        given = cu_seqlens.detach().contiguous(), band, 1, True
        bound, room = partial(bounded_band, place, band), partial(room_of_documents, place, band, True)
        made = on_gpu(cls, place, "mask_of_documents", given, bound, room, label, explain=explain)
        if made is not None:
            return made
    edges = read_edges(cu_seqlens, "cu_seqlens")
    total = int(edges[-1]) if seq_len is None else arguments.integer("seq_len", seq_len)
    longest = int(np.diff(edges).max(initial=0))
    if edges[-1] > total:
        raise InvalidInput(f"cu_seqlens ends at {edges[-1]}; there are {total} tokens")
    if max_seqlen is not None and longest > max_seqlen:
        raise InvalidInput(f"max_seqlen is {max_seqlen}; a document has {longest} tokens")
    place = Place.of(total, block=block, device=cu_seqlens.device, q_offset=0)
    layout = PackedLayout(Documents.packed(edges, edges), total, total)
    return documents_mask(cls, layout, near, place.block, place.device, label)


def _fake_documents(
    cls: type[Mask], cu_seqlens: Tensor, seq_len: int | None, block: Any, near: Window, label: str
) -> Mask:
    """A mask without values that has room for any documents: for torch.compile, see attn/mask/traced.py."""
    if seq_len is None:
        raise InvalidInput("seq_len is missing; inside torch.compile no cu_seqlens are read, so give it")
    place = Place.of(seq_len, block=block, device=cu_seqlens.device, q_offset=0)
    band = Band.of(place, *near)
    room = room_of_documents(place, band, cu_seqlens.is_cuda)
    layout = MaskLayout.of(place, bounded_band(place, band), room, label)
    return cls.of_layout(layout, layout.base(place.device))


def _wrong_edges(total: int, document: int) -> str:
    return f"cu_seqlens is wrong at document {document}: it must start with 0, not decrease, and end at most at {total}"
