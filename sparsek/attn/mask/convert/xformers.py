"""Masks of the biases of xFormers (xformers.ops.fmha.attn_bias, 0.0.35), by the names and fields of their classes.

xFormers need not be installed. Its biases hold every length twice, on a device and as lists of the host; the lists are
read, so that nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.attn.mask.build.structured import full, of_window
from sparsek.attn.mask.convert.flex import from_mask_mod
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import Place, mask_length, upload
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced, untransformed

WHOLE, JOINED, GAPPED, PAGED = "whole", "joined", "gapped", "paged"
EVERY, CAUSAL, BACK, BOTH = "every key", "causal", "_window_size", "window_left and window_right"


class BiasKind(NamedTuple):
    """What a class of biases means.

    `keys`: one sequence of all queries and keys, sequences that adjoin, sequences with gaps between their keys, or
    sequences whose keys are in pages. `sees`: the keys that a query sees. `first`: whether the first query of a
    sequence stands at its first key; otherwise the last one stands at the last.
    """

    keys: str
    sees: str
    first: bool = False


KINDS = {
    "LowerTriangularMask": BiasKind(WHOLE, CAUSAL, first=True),
    "LowerTriangularFromBottomRightMask": BiasKind(WHOLE, CAUSAL),
    "LowerTriangularFromBottomRightLocalAttentionMask": BiasKind(WHOLE, BACK),
    "LocalAttentionFromBottomRightMask": BiasKind(WHOLE, BOTH),
    "BlockDiagonalMask": BiasKind(JOINED, EVERY),
    "BlockDiagonalCausalMask": BiasKind(JOINED, CAUSAL, first=True),
    "BlockDiagonalCausalFromBottomRightMask": BiasKind(JOINED, CAUSAL),
    "BlockDiagonalCausalLocalAttentionMask": BiasKind(JOINED, BACK, first=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": BiasKind(JOINED, BACK),
    "BlockDiagonalPaddedKeysMask": BiasKind(GAPPED, EVERY),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": BiasKind(GAPPED, CAUSAL),
    "BlockDiagonalLocalAttentionPaddedKeysMask": BiasKind(GAPPED, BOTH),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": BiasKind(GAPPED, BACK),
    "BlockDiagonalGappyKeysMask": BiasKind(GAPPED, EVERY),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": BiasKind(GAPPED, CAUSAL),
    "PagedBlockDiagonalPaddedKeysMask": BiasKind(PAGED, EVERY),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": BiasKind(PAGED, CAUSAL),
    "PagedBlockDiagonalGappyKeysMask": BiasKind(PAGED, EVERY),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": BiasKind(PAGED, CAUSAL),
}
GAPPY_PAGES = "PagedBlockDiagonalGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetGappyKeysMask"
TENSOR_BIAS = "LowerTriangularMaskWithTensorBias"
ADDED = (
    "a block mask adds nothing to scores: where it holds only 0 and -inf, pass `bias == 0` as the mask of "
    "sparsek.attention; for any other bias, call flex_attention with a score_mod"
)


class Sequences(NamedTuple):
    """The sequences of a bias, int64 arrays.

    Sequence i has the queries q_edges[i] to q_edges[i + 1] - 1 and the keys k_start[i] to k_end[i] - 1; of paged keys,
    as its row of pages counts them. `kv_len`: the rows of k, for pages those that the bias knows of.
    """

    name: str
    kind: BiasKind
    near: Window
    q_edges: np.ndarray
    k_start: np.ndarray
    k_end: np.ndarray
    kv_len: int

    @property
    def q_len(self) -> int:
        """All queries."""
        return int(self.q_edges[-1])

    @property
    def key(self) -> tuple[Any, ...]:
        """A key for equal sequences with the same window."""
        return (*self[:3], *(each.tobytes() for each in self[3:6]), self.kv_len)

    def shift(self, k_start: np.ndarray) -> np.ndarray:
        """What is added to a query for its position, where the keys of the sequences begin at these places."""
        if self.kind.first:
            return k_start - self.q_edges[:-1]
        return k_start + self.k_end - self.k_start - self.q_edges[1:]

    def layout(self) -> PackedLayout:
        """The documents of the keys where they are."""
        return self._layout(self.k_start, self.kv_len)

    def packed(self) -> PackedLayout:
        """The documents of keys that are put one sequence behind the other."""
        ends = np.cumsum(self.k_end - self.k_start)
        return self._layout(ends - (self.k_end - self.k_start), int(ends[-1]) if ends.size else 0)

    def _layout(self, k_start: np.ndarray, kv_len: int) -> PackedLayout:
        q_start, k_end = self.q_edges[:-1], k_start + self.k_end - self.k_start
        item = np.zeros_like(k_start)
        docs = Documents(item, q_start, self.q_edges[1:], k_start, k_end, self.shift(k_start), k_start)
        return PackedLayout(docs, self.q_len, kv_len)


@not_traced("a block mask")
def from_xformers(
    cls: type[Mask],
    bias: Any,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    block: int | tuple[int, int] = 128,
    device: str | torch.device | None = None,
) -> Mask:
    """Return the mask of a bias of xFormers, any class of xformers.ops.fmha.attn_bias 0.0.35 but those with a tensor.

    Classes are known by their names and fields, so xFormers need not be installed. Lengths are read from the lists on
    the host (`seqstart_py`, `seqlen_py`), and nothing waits for a GPU. Keys between padded or gappy sequences are seen
    by no query; like all keys inside a stored block they must be finite.

    A paged bias gives the mask of the rows of its pages, as its `materialize` does. Its `block_tables` are read with
    one wait, and every query and row is looked at, in O(q_len * kv_len); `sparsek.attention_paged` needs no mask.

    Args:
        bias: The bias, or None, which is the mask of all keys.
        q_len: Queries, in tokens. Only biases of one sequence need it; for others it is checked.
        kv_len: Keys, in tokens: the rows of k, gaps and pages included. Biases of one sequence and of pages need it.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.
        device: Where the mask is made. For None the device of the bias, and torch's default where it has none.

    Returns:
        A mask shared by all heads. A query that sees no key gets output 0; xFormers leaves its output undefined.

    Raises:
        InvalidInput: For a tensor, LowerTriangularMaskWithTensorBias and other objects; for lengths that are missing
            or are not those of the bias; for a page that a sequence has twice.

    Example:
        >>> import sparsek as sk
        >>> class LocalAttentionFromBottomRightMask:  # as in xformers.ops.fmha.attn_bias
        ...     window_left, window_right = 1, 2
        >>> sk.BlockMask.from_xformers(LocalAttentionFromBottomRightMask(), 4, 5).to_dense()[0, 0].int()
        tensor([[1, 1, 1, 1, 0],
                [0, 1, 1, 1, 1],
                [0, 0, 1, 1, 1],
                [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    if device is None:
        device = _device_of(bias)
    if bias is None:
        return full(cls, q_len=q_len, kv_len=kv_len, block=block, device=device)
    found = sequences_of(bias, q_len, kv_len)
    place = Place.of(q_len=found.q_len, kv_len=found.kv_len, block=block, device=device)
    if found.kind.keys == PAGED:
        return _of_pages(cls, bias, found, place)
    if found.kind.keys == WHOLE:
        if found.kind.first:
            place = Place.of(q_len=place.q_len, kv_len=place.kv_len, block=block, device=device, q_offset=0)
        return of_window(cls, place, found.near, found.name)
    label = f"{found.name}, {found.k_start.size} sequences"
    return documents_mask(cls, found.layout(), found.near, place.block, place.device, label)


def sequences_of(bias: Any, q_len: int | None = None, kv_len: int | None = None) -> Sequences:
    """The sequences of a bias, from its lists on the host. Given lengths must be those of the bias."""
    name = type(bias).__name__
    kind = KINDS.get(name)
    if kind is None:
        raise _unknown(bias, name)
    near = _near(bias, kind.sees)
    if kind.keys == WHOLE:
        if q_len is None or kv_len is None:
            raise InvalidInput(f"{name} has no lengths of its own; give q_len and kv_len")
        queries, keys = mask_length(q_len, "q_len", 1), mask_length(kv_len, "kv_len", 1)
        edges, start, end = (np.array(each, np.int64) for each in ([0, queries], [0], [keys]))
        return Sequences(name, kind, near, edges, start, end, keys)
    edges = _edges("q_seqinfo", _part(bias, "q_seqinfo"))
    _check_length(name, "q_len", q_len, int(edges[-1]))
    info = _part(bias, "k_seqinfo")
    if kind.keys == PAGED:
        start, end, rows = _of_rows(bias, info, edges.size - 1, name in GAPPY_PAGES)
        if kv_len is None:
            raise InvalidInput(f"kv_len is missing; {name} does not know how many rows the pages have")
        kv_len = mask_length(kv_len, "kv_len", 1)
    else:
        starts = _ints("k_seqinfo.seqstart_py", _part(info, "seqstart_py"), edges.size)
        start, end, rows = starts[:-1], starts[1:], int(starts[-1])
        if kind.keys == JOINED:
            starts = _edges("k_seqinfo", info)
        else:
            end = start + _ints("k_seqinfo.seqlen_py", _part(info, "seqlen_py"), edges.size - 1)
        _check_length(name, "kv_len", kv_len, rows)
        kv_len = rows
    wrong = np.flatnonzero((start < 0) | (end < start) | (end > rows))
    if wrong.size:
        i = int(wrong[0])
        raise InvalidInput(
            f"sequence {i} of {name} has keys {start[i]} to {end[i]}; they must be within 0 and {rows}"
        )
    return Sequences(name, kind, near, edges, start, end, kv_len)


def _unknown(bias: Any, name: str) -> InvalidInput:
    """The error for any other object."""
    if name == TENSOR_BIAS:
        return InvalidInput(f"bias is a {name}, whose tensor is added to the scores, and {ADDED}")
    if isinstance(bias, Tensor):
        cure = "sparsek.attention takes a bool tensor as its mask" if bias.dtype == torch.bool else ADDED
        return InvalidInput(f"bias is {arguments.shown(bias)}; {cure}")
    return InvalidInput(
        f"bias is {arguments.shown(bias)}; it must be an object of a class of xformers.ops.fmha.attn_bias 0.0.35, and "
        "not of a subclass with another name"
    )


def _near(bias: Any, sees: str) -> Window:
    """The keys around its position that a query sees."""
    if sees == EVERY:
        return Window()
    if sees == CAUSAL:
        return Window(None, 1)
    if sees == BACK:
        return Window(arguments.integer("_window_size", _part(bias, "_window_size"), 1), 1)
    left, right = (arguments.integer(name, _part(bias, name)) for name in ("window_left", "window_right"))
    return Window(left + 1, right + 1)


def _part(bias: Any, name: str) -> Any:
    try:
        return getattr(bias, name)
    except AttributeError:
        raise InvalidInput(
            f"a {type(bias).__name__} has no {name}; it must be as in xformers.ops.fmha.attn_bias 0.0.35"
        ) from None


def _ints(name: str, given: Any, size: int | None = None) -> np.ndarray:
    """A list of ints, int64 [size]."""
    if isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str):
        try:
            made = np.asarray(given) if len(given) else np.zeros(0, np.int64)
        except (TypeError, ValueError, RuntimeError):  # ragged, or tensors on a GPU
            made = np.zeros(())
        if made.ndim == 1 and made.dtype.kind in "iu" and size in (None, made.size):
            return made.astype(np.int64)
    right = "ints" if size is None else f"{size} ints"
    raise InvalidInput(f"{name} is {arguments.shown(given)}; it must be a list of {right}")


def _edges(name: str, info: Any) -> np.ndarray:
    """Where each sequence starts, and the end of the last."""
    edges = _ints(f"{name}.seqstart_py", _part(info, "seqstart_py"))
    if not edges.size or edges[0] or (np.diff(edges) < 0).any():
        raise InvalidInput(
            f"{name}.seqstart_py is {arguments.shown(edges.tolist())}; it must start with 0 and not decrease"
        )
    return edges


def _check_length(name: str, length: str, given: int | None, right: int) -> None:
    if given is not None and arguments.integer(length, given) != right:
        raise InvalidInput(f"{length} is {given}; the sequences of {name} end at {right}")


def _of_rows(bias: Any, info: Any, count: int, gappy: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """First keys and ends in rows of pages, and the keys that a row has room for."""
    table, page = _part(bias, "block_tables"), arguments.integer("page_size", _part(bias, "page_size"), 1)
    arguments.tensor("block_tables", table, (torch.int32, torch.int64), 2)
    if table.shape[0] != count:
        raise InvalidInput(f"block_tables has {table.shape[0]} rows; there are {count} sequences")
    end = _ints("k_seqinfo.seqlen_py", _part(info, "seqlen_py"), count)
    start = np.zeros_like(end)
    if gappy:  # with one more entry, which means nothing; `seqlen` is where the keys end
        start = _ints("k_seqinfo.seqstart_py", _part(info, "seqstart_py"))[:count]
        if start.size != count:
            raise InvalidInput(f"k_seqinfo.seqstart_py has {start.size} entries; there are {count} sequences")
    return start, end, table.shape[1] * page


def _device_of(bias: Any) -> torch.device | None:
    """The device that a bias names by its tensors."""
    found = getattr(getattr(bias, "q_seqinfo", None), "seqstart", None)
    return found.device if isinstance(found, Tensor) else None


def _of_pages(cls: type[Mask], bias: Any, found: Sequences, place: Place) -> Mask:
    """The mask of the rows of all pages, evaluated at every query and row."""
    page = int(bias.page_size)
    if found.kv_len % page:
        raise InvalidInput(f"kv_len is {found.kv_len}; it must be a multiple of page_size, {page}")
    pages = found.kv_len // page
    table = untransformed(lambda: bias.block_tables.detach().cpu().numpy())
    used = np.arange(table.shape[1]) < -(-found.k_end // page)[:, None]
    row, column = np.nonzero(used)
    entry = table[used]
    wrong = np.flatnonzero((entry < 0) | (entry >= pages))
    if wrong.size:
        i = int(wrong[0])
        raise InvalidInput(f"block_tables[{row[i]}, {column[i]}] is {entry[i]}; there are {pages} pages")
    place_of = np.full((table.shape[0], pages), -1, np.int64)
    place_of[row, entry] = column
    again = np.flatnonzero(place_of[row, entry] != column)
    if again.size:
        i = int(again[0])
        raise InvalidInput(
            f"block_tables[{row[i]}] has page {entry[i]} twice, and a mask can show a row once; call attention_paged"
        )
    # A row of pages counts its keys from 0, wherever those that are seen begin.
    numbers = place_of, found.k_start, found.k_end, found.shift(found.k_start)
    of_query = np.repeat(np.arange(table.shape[0]), np.diff(found.q_edges))
    of_query, places, start, end, shift = upload([of_query, *numbers], place.device)
    causal = found.near.ahead == 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        i = of_query[q]
        at = places[i, k // page]
        key = at * page + k % page
        seen = (at >= 0) & (key >= start[i]) & (key < end[i])
        return seen & (key <= q + shift[i]) if causal else seen

    made = from_mask_mod(
        cls, mask_mod, 1, 1, found.q_len, found.kv_len, block=place.block, device=place.device
    )
    object.__setattr__(made, "label", f"{found.name}, {found.k_start.size} sequences")
    return made
