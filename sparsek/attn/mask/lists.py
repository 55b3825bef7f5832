"""The lists of blocks that a mask consists of, on the device, on the host and transposed; and how builders write them.

The host computes a few numbers per row, the device writes the entries. A row of a structured mask is a few *runs* of
block columns with a fixed step. Their firsts, steps and counts come from closed forms (numpy, [rows]), go to the device
in one copy, and are expanded there. The host has every size without a sync, and the work follows the stored
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_has_values, untransformed
from sparsek.pictures.masks import PictureRows
from sparsek.products.formats.pattern import int_or_pair

BLOCK_SIZES = (64, 128)
CHOSEN_SIZES = (*BLOCK_SIZES, 256)  # in which blocks are chosen; of 256, a mask stores the halves
TOKEN_SIZES = tuple(1 << shift for shift in range(8))  # queries of a tile by members
BY_INTERVAL = -1
WORD = 32  # bits of one int32 of `bits`
ALIGNED = 4  # int32 words in 16 bytes: Triton compiles anew for pointers that are not aligned to that


class BlockLists(NamedTuple):
    """Rows of block columns, int32: row r holds indices[starts[r] : starts[r] + counts[r]], ascending and unique.

    `starts` and `counts` are [rows]. Rows may share entries of `indices`, and `indices` may hold entries of no row.
    """

    starts: Tensor
    counts: Tensor
    indices: Tensor


class Members(NamedTuple):
    """The rule of partial blocks by members: each entry has a bit for every token of its tile.

    A query sees the keys of its interval in blocks for which its token has the bit, and without it the last `window`
    keys and the first `sinks` keys of its interval. `rows`: of a token, in packed masks one for each of several heads;
    1 in others.
    """

    rows: int = 1
    window: int = 0
    sinks: int = 0

    @property
    def at_ends(self) -> bool:
        """Whether queries see keys without a bit."""
        return self.window > 0 or self.sinks > 0

    def words(self, bq: int) -> int:
        """int32 words of an entry, for tiles of `bq` queries."""
        return -(-bq // (self.rows * WORD))


class TransposedLists(NamedTuple):
    """The query tiles that visit each key block. Row (b * heads + h) * Nb + j describes key block j.

    `full.indices` and `partial.indices` are query tiles, ascending in each row. Entry e of them is entry
    `full_entries[e]` of the mask's own `full.indices` (`partial_entries[e]` of `partial.indices`), int32.
    Where the mask's sizes are bounds, entries of no row follow the last row.
    """

    full: BlockLists
    partial: BlockLists
    full_entries: Tensor
    partial_entries: Tensor


class HostMask(NamedTuple):
    """The tensors of a mask as numpy arrays. Do not write to them."""

    full: PictureRows
    partial: PictureRows
    lo: np.ndarray | None
    hi: np.ndarray | None
    rules: np.ndarray | None
    bits: np.ndarray | None


class Sizes(NamedTuple):
    """The sizes that the host has without a sync, summed over rows: stored blocks, partial blocks among them, and the
    blocks of the longest row. Upper bounds unless `exact`.
    """

    stored: int
    partial: int
    longest: int
    exact: bool


class Frame(TypedDict, total=False):
    """The options that most builders of masks take beside `seq_len`, by keyword.

    Attributes:
        q_len: Queries, in tokens; with `kv_len` in place of `seq_len`.
        kv_len: Keys, in tokens.
        block: The block in tokens: 64, 128 (the default), or a pair (queries, keys) of them. Builders of chosen
            blocks (`topk`, `cumulative`, `from_block_map`, `from_indices`) take 256 too, and store halves of 128.
        device: Where the mask is made; torch's default device if left out.
        q_offset: Query q stands at key position q + q_offset. kv_len - q_len if left out: the last query stands at the
            last key.
    """

    q_len: int | None
    kv_len: int | None
    block: int | tuple[int, int]
    device: str | torch.device | None
    q_offset: int | None


@dataclass(frozen=True)
class Place:
    """The checked lengths, block, device and offset of a mask in the making."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    device: torch.device
    q_offset: int

    @classmethod
    def of(
        cls,
        seq_len: int | None = None,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        block: Any = 128,
        device: Any = None,
        q_offset: int | None = None,
        sides_of: tuple[int, ...] = BLOCK_SIZES,
        **unknown: Any,
    ) -> Place:
        """From the arguments of a builder: see `Frame`; blocks have the sides `sides_of`."""
        if unknown:
            names = ", ".join(unknown)
            raise InvalidInput(
                f"this mask has no option {names}; beside its own, masks take seq_len or q_len and kv_len, block, "
                "device and q_offset"
            )
        if seq_len is not None:
            if q_len is not None or kv_len is not None:
                raise InvalidInput(
                    "seq_len and q_len, kv_len are given; use seq_len alone where both are equal"
                )
            q_len = kv_len = seq_len
        elif q_len is None or kv_len is None:
            raise InvalidInput("a length is missing; give seq_len, or both q_len and kv_len")
        sides = mask_block(block, sides_of)
        names = ("q_len", "kv_len") if seq_len is None else ("seq_len", "seq_len")
        q_len, kv_len = mask_length(q_len, names[0], sides[0]), mask_length(kv_len, names[1], sides[1])
        offset = kv_len - q_len
        if q_offset is not None:
            offset = arguments.integer("q_offset", q_offset, -INT32_MAX)
        if abs(offset) + q_len > INT32_MAX:
            raise InvalidInput(f"q_offset is {offset}; the positions of queries must fit int32")
        return cls(q_len, kv_len, sides, as_device(device), offset)

    @cached_property
    def stored(self) -> Place:
        """The place with the blocks that masks store: 128 for 256."""
        bq, bk = (min(side, max(BLOCK_SIZES)) for side in self.block)
        return self if (bq, bk) == self.block else replace(self, block=(bq, bk))

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks (Mb, Nb)."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def first(self) -> np.ndarray:
        """The position of each tile's first query, int64 [Mb]."""
        return np.arange(self.grid[0]) * self.block[0] + self.q_offset

    @property
    def last(self) -> np.ndarray:
        """The position of each tile's last query, int64 [Mb]."""
        return np.minimum(self.first + self.block[0], self.q_len + self.q_offset) - 1

    @property
    def reach(self) -> int:
        """More keys than lie between any query and any key."""
        return self.q_len + self.kv_len + abs(self.q_offset) + 1

    def blocks(self, keys: int) -> int:
        """A number of keys in blocks, rounded up; bounded by `reach`."""
        return -(-min(keys, self.reach) // self.block[1])

    def positions(self, shift: int) -> Tensor:
        """Position + shift of each query, within 0 and kv_len: int32 [1, q_len]."""
        start = self.q_offset + shift
        here = torch.arange(start, start + self.q_len, dtype=torch.int64, device=self.device)
        return here.clamp_(0, self.kv_len).to(torch.int32)[None]


def as_device(device: str | torch.device | None) -> torch.device:
    """A checked device; torch's default one for None."""
    return arguments.device("device", torch.get_default_device() if device is None else device)


def token_block(block: Any) -> tuple[int, int]:
    """(bq, bk) of a mask by members, from a pair: a tile has 128 rows, which are tokens times heads."""
    sides = int_or_pair(block)
    if sides is not None and sides[0] in TOKEN_SIZES and sides[1] in BLOCK_SIZES:
        return sides
    raise InvalidInput(
        f"block is {arguments.shown(block)}; a mask by members has blocks (bq, bk) of a power of two of queries up to "
        f"{TOKEN_SIZES[-1]}, and {BLOCK_SIZES[0]} or {BLOCK_SIZES[1]} keys"
    )


def mask_block(block: Any, sides_of: tuple[int, ...] = BLOCK_SIZES) -> tuple[int, int]:
    """(bq, bk) from a pair, or from one int for square blocks; each one of `sides_of`."""
    sides = int_or_pair(block)
    if sides is not None and all(side in sides_of for side in sides):
        return sides
    *some, last = sides_of
    raise InvalidInput(
        f"block is {arguments.shown(block)}; masks have blocks of {', '.join(map(str, some))} or {last}, or a pair "
        "(bq, bk) of these"
    )


def mask_length(value: Any, name: str, side: int) -> int:
    """A length as a plain int that, rounded up to blocks, fits int32."""
    length = arguments.integer(name, value)
    if -(-length // side) * side > INT32_MAX:
        raise InvalidInput(f"{name} is {length}; in whole blocks of {side} it must fit int32 ({INT32_MAX})")
    return length


def as_lengths(lengths: Any) -> list[np.ndarray]:
    """Rows of document lengths, int64, from one row or several. InvalidInput for anything but ints from 0."""
    if isinstance(lengths, Tensor) and arguments.tensor("lengths", lengths).device.type != "cpu":
        raise InvalidInput(f"lengths are on {lengths.device}, and the host needs them; use a list or .cpu()")
    try:
        rows = [np.asarray(row) for row in (lengths if np.ndim(lengths[0]) else [lengths])]
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        given = arguments.shown(lengths)
        raise InvalidInput(
            f"lengths is {given}; it must hold the length of each document, or a row of lengths for each batch item"
        ) from error
    for at, row in enumerate(rows):
        if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
            raise InvalidInput(
                f"lengths of batch item {at} are {row.dtype} {list(row.shape)}; give a row of ints"
            )
        if row.min() < 0 or row.max() > INT32_MAX:
            far = row.min() if row.min() < 0 else row.max()
            raise InvalidInput(
                f"lengths of batch item {at} hold {far}; a document has 0 to {INT32_MAX} tokens"
            )
    return [row.astype(np.int64) for row in rows]


def read_edges(cu_seqlens: Any, name: str) -> np.ndarray:
    """Where each document starts and the last one ends, int64 [n + 1]. Waits for a tensor on a GPU."""
    arguments.tensor(name, cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise InvalidInput(
            f"{name} is {list(cu_seqlens.shape)}; it must be [documents + 1]: each start, then the last end"
        )
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            f"{name} is read while a CUDA graph is captured; call once with this tensor before, or pass a BlockMask"
        )
    check_has_values(f"{name} is read", "pass a BlockMask", cu_seqlens)
    at = untransformed(lambda: cu_seqlens.detach().cpu().numpy().astype(np.int64))
    if at[0] != 0:
        raise InvalidInput(f"{name} starts with {at[0]}; it must start with 0")
    falls = np.flatnonzero(np.diff(at) < 0)
    if falls.size:
        i = int(falls[0])
        raise InvalidInput(f"{name} falls from {at[i]} to {at[i + 1]} at document {i}; it must not decrease")
    return at


class Runs(NamedTuple):
    """The block columns of each row: a piece is `count` columns from `first` on, `step` apart. int64 [pieces, rows].

    The pieces of a row ascend. Without `step` a row is one piece of adjacent columns. Steps may be [pieces, 1].
    """

    first: np.ndarray
    count: np.ndarray
    step: np.ndarray | None = None

    @classmethod
    def between(cls, first: np.ndarray, end: np.ndarray) -> Runs:
        """Adjacent columns; none where end <= first. Both [rows]."""
        return cls(first[None], np.maximum(end - first, 0)[None])

    @classmethod
    def progression(cls, first: np.ndarray, count: np.ndarray, step: int) -> Runs:
        """Columns with a step; none where count <= 0. Both [rows]."""
        return cls(first[None], np.maximum(count, 0)[None], np.full((1, 1), step))

    @classmethod
    def single(cls, column: np.ndarray, there: np.ndarray) -> Runs:
        """Single columns [pieces, rows], where `there` is true."""
        return cls(column, there.astype(np.int64), np.ones((len(column), 1), np.int64))

    def then(self, more: Runs) -> Runs:
        """These pieces, then those of `more`, row by row."""
        steps = [np.ones((1, 1), np.int64) if each.step is None else each.step for each in (self, more)]
        firsts, counts = (self.first, more.first), (self.count, more.count)
        return Runs(*(np.concatenate(each) for each in (firsts, counts, steps)))

    def before(self, edge: np.ndarray) -> Runs:
        """The columns before each row's edge."""
        return self._replace(count=np.minimum(self.count, self._to(edge)))

    def behind(self, edge: np.ndarray) -> Runs:
        """The columns from each row's edge on."""
        skipped = np.minimum(self.count, self._to(edge))
        step = 1 if self.step is None else self.step
        return self._replace(first=self.first + skipped * step, count=self.count - skipped)

    def _to(self, edge: np.ndarray) -> np.ndarray:
        """How many columns precede the edge, if pieces had no end."""
        gap = edge - self.first
        return np.maximum(gap if self.step is None else -(-gap // self.step), 0)


def refuse_capture() -> None:
    """InvalidInput while a CUDA graph is captured on this stream."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            "a mask is made while a CUDA graph is captured, which replays device work only; make it before. "
            "topk may be captured if it ran before with the same lengths and options"
        )


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 tensors of the same shapes, by one copy without a sync."""
    if device.type == "cpu":
        return [torch.from_numpy(each.astype(np.int32)) for each in arrays]
    refuse_capture()
    spans = [-(-each.size // ALIGNED) * ALIGNED for each in arrays]
    staging = torch.empty(sum(spans), dtype=torch.int32, device="cpu", pin_memory=True)
    words, start = staging.numpy(), 0
    for each, span in zip(arrays, spans, strict=True):
        words[start : start + each.size].reshape(each.shape)[...] = each
        start += span
    there = staging.to(device, non_blocking=True).split(spans)
    return [part[: each.size].view(each.shape) for part, each in zip(there, arrays, strict=True)]


def table_of_runs(runs: Runs, counts: np.ndarray) -> list[np.ndarray]:
    """The numbers from which `lists_of_runs` makes the lists.

    Of rows of one piece: starts and counts, because they share the list of all columns. Of others: starts, counts, and
    of each piece int32 [4, pieces, rows]: its count, first column and step, and the entries before it. Where the count
    is 0 the other numbers are arbitrary.
    """
    if runs.step is None:
        return [np.where(counts > 0, runs.first[0], 0), counts]
    starts = np.cumsum(counts) - counts
    pieces = np.empty((4, *runs.count.shape), np.int32)
    for at, column in enumerate((runs.count, runs.first, runs.step, starts)):
        pieces[at] = column
    for piece in range(1, len(runs.count)):
        pieces[3, piece] = pieces[3, piece - 1] + pieces[0, piece - 1]
    return [starts, counts, pieces]


def lists_of_runs(table: Sequence[Tensor], every: Tensor, stored: int) -> BlockLists:
    """The lists, from a table on the device."""
    starts, counts = table[:2]
    if len(table) == 2:
        return BlockLists(starts, counts, every)
    pieces = table[2].permute(2, 1, 0).flatten(0, 1)
    of = torch.repeat_interleave(pieces[:, 1:], pieces[:, 0], dim=0, output_size=stored)
    inside = torch.arange(stored, dtype=torch.int32, device=every.device) - of[:, 2]
    return BlockLists(starts, counts, torch.addcmul(of[:, 0], inside, of[:, 1]))


def exact_sizes(full: np.ndarray, partial: np.ndarray) -> Sizes:
    """From how many full and partial blocks each row has."""
    both = full.astype(np.int64) + partial
    return Sizes(int(both.sum()), int(partial.sum()), int(both.max(initial=0)), exact=True)


def heavy_blocks(full: np.ndarray, partial: np.ndarray) -> int:
    """The blocks of rows that are more than twice as long as the mean."""
    both = full.astype(np.int64) + partial
    return int(both[both * both.size > 2 * both.sum()].sum())


def check_stored(stored: int) -> None:
    """InvalidInput if the positions of entries do not fit int32."""
    if stored > INT32_MAX:
        raise InvalidInput(f"the mask has {stored} blocks; at most {INT32_MAX} (int32) can be indexed")
