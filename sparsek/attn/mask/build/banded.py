"""Masks of closed form as a few numbers: what a kernel needs to write them, and their sizes without making them.

On a GPU the lists of these masks are written by one kernel (kernels/mask), and the host counts the blocks of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.layout import ABSENT, Counted, MaskLayout, Room
from sparsek.attn.mask.lists import Place, Runs, Sizes, check_stored
from sparsek.attn.mask.readback import made_in
from sparsek.core import operations
from sparsek.core.arguments import INT32_MAX, faking

NO_SINKS, SINKS, SINKS_AHEAD = 0, 1, 2


class Band(NamedTuple):
    """Query q sees keys q + low <= k < q + high, and with sinks those before sink_end.

    Both are within -q_len and kv_len, beyond which nothing changes, so that they fit int32. `sinks`: SINKS_AHEAD if
    queries before the end of the sinks see all of them.
    """

    low: int
    high: int
    sink_end: int = 0
    sinks: int = NO_SINKS

    @classmethod
    def of(
        cls, place: Place, back: int | None, ahead: int | None, sinks: int = 0, sinks_ahead: bool = False
    ) -> Band:
        """From a window: see `Window` in attn/mask/build/documents.py."""
        shift, least, most = place.q_offset, -place.q_len, place.kv_len
        low = least if back is None else min(max(shift + 1 - back, least), most)
        high = most if ahead is None else min(max(shift + ahead, least), most)
        if not sinks:
            return cls(low, high)
        kind = SINKS_AHEAD if ahead not in (None, 1) or sinks_ahead else SINKS
        return cls(low, high, min(sinks, most), kind)

    def bounds(self, query: Any, kv_len: int) -> tuple[Any, Any]:
        """lo and hi of queries, numpy."""
        lo = np.minimum(np.maximum(query + self.low, 0), kv_len)
        hi = np.minimum(np.maximum(query + self.high, 0), kv_len)
        if self.sinks:
            lo = lo * (lo > self.sink_end)
        return lo, np.maximum(hi, self.sink_end) if self.sinks == SINKS_AHEAD else hi

    def splits(self, place: Place) -> bool:
        """Whether a query sees sinks apart from its window. The last one does if any does."""
        return self.sink_end > 0 and min(place.q_len - 1 + self.low, place.kv_len) > self.sink_end

    def capacities(self, place: Place) -> tuple[int, int]:
        """The most entries of a row that its lists of full and of partial blocks hold, except shared ones."""
        bq, bk = place.block
        edge = (bq - 1) // bk + 2
        if not self.sinks:
            return 0, 2 * edge
        near = max(self.high - self.low, 0) // bk + 1
        return min(self.sink_end // bk + near, place.grid[1]), edge + (2 * bq - 1) // bk + 3

    def split(self, place: Place) -> tuple[int, int, int]:
        """The first row and the number of rows with bits of their own, and the entries of bits for each.

        All are 0 if no block needs bits: the sinks are whole blocks, and every query that sees them apart from its
        window sees all of them. In a row with bits of its own the window of some query reaches down to the sinks, or
        to the block where they end.
        """
        (bq, bk), tiles = place.block, place.grid[0]
        if not self.splits(place):
            return 0, 0, 0
        columns = -(-self.sink_end // bk)
        # Row r has query r * bq + bq - 1 (the last row: q_len - 1) beyond the sinks by its window.
        first = max(0, -(-(self.sink_end - self.low + 2 - bq) // bq))
        first = min(first, tiles - 1)
        seen = first * bq + self.high
        if self.sinks == SINKS_AHEAD:
            seen = max(seen, self.sink_end)
        if self.sink_end % bk == 0 and seen >= self.sink_end:
            return 0, 0, 0
        end = -(-(max(columns * bk, self.sink_end + 1) - self.low) // bq)
        return first, min(max(end, first + 1), tiles) - first, bq // bk + 2

    def room(self, place: Place) -> Room:
        """The room of a mask of this window."""
        (rows, columns), (full, most) = place.grid, self.capacities(place)
        _, split_rows, slots = self.split(place)
        return Room(rows * most, columns + rows * full, 1, 1 + split_rows * slots if slots else ABSENT)

    def row_counts(self, row: np.ndarray, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """How many full and how many partial blocks these rows have."""
        bq, bk = place.block
        first = row * bq
        last = np.minimum(first + bq, place.q_len) - 1
        first_lo, first_hi = self.bounds(first, place.kv_len)
        last_lo, last_hi = self.bounds(last, place.kv_len)
        start = first_lo // bk
        end = np.where(first_lo < last_hi, -(-last_hi // bk), start)
        whole = np.minimum(np.maximum(-(-last_lo // bk), start), end)
        cut = np.minimum(np.maximum(first_hi // bk, whole), end)
        if not self.splits(place):
            return cut - whole, end - start - cut + whole
        split = last_lo > self.sink_end
        right = np.minimum(self.sink_end, first_hi) // bk * split
        sinks = np.maximum(right, -(-self.sink_end // bk) * (first_lo > self.sink_end))
        begin = np.maximum(start, sinks)
        end_left = np.maximum(whole, begin)
        begin_right = np.maximum(cut, end_left)
        partial = sinks - right + end_left - begin + np.maximum(end, begin_right) - begin_right
        return right + cut - whole, partial


class Steps(NamedTuple):
    """The blocks of `strided` and `dilated`, in blocks of keys: see `_steps` in attn/kernels/mask/forms.py.

    A tile that stands in blocks p to p'. Strided: those between p - near and p' + near, and every step-th block from
    p - gap down. Dilated: p to p', and `more` blocks before, `step` apart. `both_ways`: after p' likewise.
    """

    near: int
    step: int
    gap: int
    more: int
    kind: int
    both_ways: bool

    @classmethod
    def strided(cls, place: Place, step: int, near: int, both_ways: bool) -> Steps:
        """From a step and a window in blocks. No step is longer than from any query to any key."""
        step = min(step, place.reach // place.block[1] + 2)
        return cls(near, step, -(-near // step) * step, 0, 1, both_ways)

    @classmethod
    def dilated(cls, place: Place, step: int, near: int, both_ways: bool) -> Steps:
        """From a step and a window in blocks."""
        return cls(0, min(step, place.reach // place.block[1] + 2), 0, near - 1, 2, both_ways)

    def capacity(self, place: Place) -> int:
        """The most blocks of a row."""
        (bq, bk), columns = place.block, place.grid[1]
        across = (bq - 1) // bk + 2
        if self.kind == 1:
            most = across + 2 * self.near + columns // self.step + 2
        else:
            most = across + self.more * (1 + self.both_ways)
        return max(min(most, columns), 1)

    def runs(self, place: Place) -> Runs:
        """The blocks of each tile; some may not exist."""
        top, bottom = place.first // place.block[1], place.last // place.block[1]
        if self.kind == 1:
            left = top % self.step
            runs = Runs.progression(left, (top - self.gap - left) // self.step + 1, self.step)
            runs = runs.then(Runs.between(top - self.near + 1, bottom + self.near))
            after, more = bottom + self.gap, np.full_like(bottom, place.reach)
        else:
            more = np.full_like(top, self.more)
            runs = Runs.progression(top - more * self.step, more, self.step).then(
                Runs.between(top, bottom + 1)
            )
            after = bottom + self.step
        return runs.then(Runs.progression(after, more, self.step)) if self.both_ways else runs


def visible(place: Place, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many leading blocks all queries of a tile see whole, and how many some of them see; int64 [Mb]."""
    first = last = np.full(place.grid[0], place.kv_len)
    if causal:
        first, last = (np.clip(p + 1, 0, place.kv_len) for p in (place.first, place.last))
    return first // place.block[1], -(-last // place.block[1])


def full_and_partial(stored: Runs, place: Place, causal: bool, heads: int = 1) -> tuple[Runs, Runs]:
    """The blocks that all queries of a tile see whole, and those that some see in part, of those that exist."""
    edge, end = (np.tile(each, heads) for each in visible(place, causal))
    stored = stored.behind(np.zeros_like(edge)).before(end)
    return stored.before(edge), stored.behind(edge)


@lru_cache(maxsize=256)
def counted_band(place: Place, band: Band) -> Counted:
    """The sizes of a window, from the count of every row."""
    return summed_rows(*band.row_counts(np.arange(place.grid[0]), place))


@lru_cache(maxsize=256)
def counted_steps(place: Place, steps: Steps, causal: bool) -> Counted:
    """The sizes of a mask of blocks with a step, from the count of every row."""
    return summed_rows(*(each.count.sum(0) for each in full_and_partial(steps.runs(place), place, causal)))


def bounded_band(place: Place, band: Band) -> Counted:
    """Bounds of the sizes of a mask in which queries see some of the keys of a window."""
    stored, _, longest, _ = counted_band(place, band).sizes
    return Counted(Sizes(stored, stored, longest, exact=False), stored)


def room_of_blocks(place: Place, steps: Steps | None, causal: bool) -> Room:
    """The room of a mask of every block, or of blocks with a step."""
    entries = place.grid[1] if steps is None else place.grid[0] * steps.capacity(place)
    return Room(entries, bounds=1 if causal or place.kv_len % place.block[1] else 0)


def room_of_documents(place: Place, band: Band, by_kernel: bool, batch: int = 1) -> Room:
    """The room of a mask of packed documents of any lengths, as attn/kernels/mask/documents.py fills it or torch."""
    rows, columns = batch * place.grid[0], place.grid[1]
    if by_kernel:
        return Room(columns + rows * band.capacities(place)[1], bounds=batch)
    entries = max(batch * bounded_band(place, band).sizes.stored, columns)
    return Room(entries, entries, bounds=batch)


def counted_documents(place: Place, edges: np.ndarray, band: Band, batch: int) -> Counted:
    """The sizes of a mask of documents that adjoin: `edges` int64, of batch items one behind the other."""
    (bq, bk), length = place.block, place.q_len
    first = np.arange(place.grid[0]) * bq
    last = np.minimum(first + (bq - 1), length - 1)
    if batch > 1:
        bases = (np.arange(batch) * length)[:, None]
        first, last = (first + bases).ravel(), (last + bases).ravel()
    document, other = edges.searchsorted(first, "right"), edges.searchsorted(last, "right")
    alone = document == other
    start, end = edges[document - 1], edges[document]
    first_lo, first_hi = np.maximum(first + band.low, start), np.minimum(first + band.high, end)
    last_hi = np.minimum(last + band.high, edges[other])
    last_lo = np.maximum(last + band.low, edges[other - 1])
    if batch > 1:
        base = first // length * length
        first_lo, first_hi, last_lo, last_hi = (
            each - base for each in (first_lo, first_hi, last_lo, last_hi)
        )
    # A query sees itself, so no tile is without blocks.
    begin, end = first_lo // bk, -(-last_hi // bk)
    left = np.minimum(-(-last_lo // bk), end)
    whole = np.maximum(first_hi // bk - left, 0) * alone
    return summed_rows(whole, end - begin - whole)


def summed_rows(whole: np.ndarray, cut: np.ndarray, times: int = 1) -> Counted:
    """From the full and the partial blocks of every row, of all heads or `times` the same rows."""
    both = whole + cut
    stored = int(both.sum())
    check_stored(stored * times)
    longest = int(both.max(initial=0))
    heavy = int(both[both * both.size > 2 * stored].sum()) if longest * both.size > 2 * stored else 0
    return Counted(Sizes(stored * times, int(cut.sum()) * times, longest, exact=True), heavy * times)


def has_kernels(device: torch.device) -> bool:
    """Whether kernels make masks on this device."""
    return device.type == "cuda" and not faking()


def on_gpu(
    cls: type[Mask], place: Place, name: str, given: tuple[Any, ...], count: Callable[[], Counted],
    room: Callable[[], Room], label: str, *, explain: Callable[[int], str] = str, **more: Any,
) -> Mask | None:  # fmt: skip
    """The mask that a kernel of kernels/mask makes on a GPU; None if none does. No sync; it may be captured.

    `given`: the arguments of the kernel beside the tensors and the place. `more`: batch, heads and `pure`, as
    `MaskLayout.of` takes them.
    """
    if not has_kernels(place.device) or max(found := room()) > INT32_MAX:
        return None
    layout = MaskLayout.of(place, count(), found, label, **more)
    base = layout.base(place.device)
    words = operations.by_kernel(name, layout.pieces(base), place, *given)
    if words is None:
        return None
    return made_in(cls, layout, base, words, (explain,) * len(words), not layout.fields["sizes"].exact)
