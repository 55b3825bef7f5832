"""The elements of a mask, and its blocks seen from the keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsek.attn.mask.data import MaskData
from sparsek.attn.mask.lists import BY_INTERVAL, WORD, BlockLists, Members, TransposedLists
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import reads_values

DENSE_MOST = 2**31
NOT_STORED, WHOLE = -3, -2  # in a table of blocks, beside BY_INTERVAL and the numbers of bits
CHUNK = 2**24  # elements of partial blocks that are read in one step
ENTRIES = 2**22  # of the rows whose partial blocks are looked up together, at most: rows may share entries


@reads_values("rows and entries are read", "call it outside")
def checked_element_mask(mask: MaskData, rows: Tensor, entries: Tensor) -> Tensor:
    """Return the elements of partial blocks, bool [n, bq, bk]. Queries beyond q_len see nothing.

    Values of tensors on a GPU are not checked, because that would need a sync.

    Args:
        rows: int64 [n], rows of the mask, on its device.
        entries: int64 [n], positions in `partial.indices`: element i of the result is entry entries[i] of row rows[i].

    Raises:
        InvalidInput: For other dtypes, shapes and devices, and on the CPU for values out of range.
    """
    for name, part, end in (("rows", rows, mask.rows), ("entries", entries, mask.partial.indices.numel())):
        arguments.tensor(name, part, (torch.int64,), ndim=1)
        if part.shape != rows.shape or part.device != mask.device:
            raise InvalidInput(
                f"{name} is {list(part.shape)} on {part.device}, rows {list(rows.shape)} and the mask on {mask.device}"
            )
        if part.device.type == "cpu" and part.numel() and not 0 <= int(part.min()) <= int(part.max()) < end:
            raise InvalidInput(
                f"{name} holds {int(part.min())} to {int(part.max())}; they are 0 to {end - 1}"
            )
    return element_mask(mask, rows, entries)


def element_mask(mask: MaskData, rows: Tensor, entries: Tensor) -> Tensor:
    """As `checked_element_mask`, without its checks."""
    bq = mask.block[0]
    queries = (rows % max(mask.grid[0], 1) * bq)[:, None] + torch.arange(bq, device=mask.device)
    return (queries < mask.q_len)[:, :, None] & elements_of(mask, rows, entries, queries)


def elements_of(mask: MaskData, rows: Tensor, entries: Tensor, queries: Tensor) -> Tensor:
    """The elements of partial blocks, bool [n, m, bk], of these queries [n, m] of the rows; those beyond q_len may
    have any.
    """
    if mask.members is not None:
        return _by_members(mask, mask.members, rows, entries, queries)
    if mask.rules is None or mask.bits is None or not mask.bits.shape[0]:
        return _by_interval(mask, rows, entries, queries)
    (bq, bk), rules = mask.block, mask.rules[entries]
    column = torch.arange(bk, device=mask.device)
    words = mask.bits[rules.clamp(min=0)[:, None], queries % bq][:, :, column // WORD]
    by_bits = ((words >> (column % WORD).to(torch.int32)) & 1).bool()
    if mask.lo is None:
        return by_bits
    return torch.where((rules < 0)[:, None, None], _by_interval(mask, rows, entries, queries), by_bits)


def _by_interval(mask: MaskData, rows: Tensor, entries: Tensor, queries: Tensor) -> Tensor:
    keys, bounds = _keys_of(mask, entries), _bounds(mask, rows, queries)
    if bounds is None:
        return (keys < mask.kv_len).expand(-1, queries.shape[1], -1)
    return (bounds[0] <= keys) & (keys < bounds[1])


def _by_members(mask: MaskData, members: Members, rows: Tensor, entries: Tensor, queries: Tensor) -> Tensor:
    bq, words = mask.block[0], members.words(mask.block[0])
    row, keys, bounds = queries % bq // members.rows, _keys_of(mask, entries), _bounds(mask, rows, queries)
    if bounds is None or mask.rules is None:
        raise InvalidInput("a mask by members lacks rules, lo and hi")
    word = mask.rules[entries[:, None] * words + row // WORD]
    member, (lo, hi) = ((word >> (row % WORD).to(torch.int32)) & 1).bool()[:, :, None], bounds
    at_ends = (keys >= hi - members.window) | (keys < lo + members.sinks)
    return (lo <= keys) & (keys < hi) & (member | at_ends)


def _keys_of(mask: MaskData, entries: Tensor) -> Tensor:
    """The keys of partial blocks, int64 [n, 1, bk]."""
    bk = mask.block[1]
    first = mask.partial.indices[entries].long() * bk
    return first[:, None, None] + torch.arange(bk, device=mask.device)


def _bounds(mask: MaskData, rows: Tensor, queries: Tensor) -> tuple[Tensor, Tensor] | None:
    """lo and hi of the queries [n, m] of the rows, int64 [n, m, 1]."""
    if mask.lo is None or mask.hi is None:
        return None
    group = rows // max(mask.grid[0], 1) if mask.lo.shape[0] > 1 else torch.zeros_like(rows)
    at = (group[:, None], queries.clamp(max=mask.q_len - 1))
    return mask.lo[at].long()[:, :, None], mask.hi[at].long()[:, :, None]


def dense_rows(mask: MaskData, first: int, last: int) -> Tensor:
    """Return which keys the queries `first` to `last` - 1 see, bool [batch, heads, last - first, kv_len]. Syncs.

    Args:
        first: The first query.
        last: The query after the last, at most q_len.

    Raises:
        InvalidInput: For queries out of range.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.causal(100000).dense_rows(500, 502).sum(-1)
        tensor([[[501, 502]]])
    """
    first = arguments.integer("first", first, 0, mask.q_len)
    last = arguments.integer("last", last, first, mask.q_len)
    (bq, bk), (tiles, columns), device = mask.block, mask.grid, mask.device
    top, bottom = first // bq, -(-last // bq)
    groups = mask.batch * mask.heads
    rows = (
        torch.arange(groups, device=device)[:, None] * tiles + torch.arange(top, bottom, device=device)
    ).flatten()
    seen = torch.zeros((rows.numel(), columns, bq, bk), dtype=torch.bool, device=device)
    at, entries = stored_entries(mask.full, rows)
    seen[at, mask.full.indices[entries].long()] = True
    at, entries = stored_entries(mask.partial, rows)
    seen[at, mask.partial.indices[entries].long()] = element_mask(mask, rows[at], entries)
    whole = seen.view(mask.batch, mask.heads, bottom - top, columns, bq, bk).transpose(3, 4)
    whole = whole.reshape(mask.batch, mask.heads, (bottom - top) * bq, columns * bk)
    return whole[:, :, first - top * bq : last - top * bq, : mask.kv_len]


def to_dense(mask: MaskData) -> Tensor:
    """Return which keys every query sees, bool [batch, heads, q_len, kv_len]. Waits for the device.

    Raises:
        InvalidInput: Above 2^31 elements; `dense_rows` returns some of the queries.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.causal(3).to_dense()[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    size = mask.batch * mask.heads * mask.q_len * mask.kv_len
    if size > DENSE_MOST:
        raise InvalidInput(
            f"to_dense: {mask.batch} x {mask.heads} x {mask.q_len} x {mask.kv_len} are {size} elements; at most "
            f"{DENSE_MOST} are made at once. Use dense_rows(first, last) for some of the queries"
        )
    return dense_rows(mask, 0, mask.q_len)


def elements(mask: MaskData) -> int:
    """See BlockMask.elements."""
    mask.verify()
    (bq, bk), tiles = mask.block, mask.grid[0]
    rows = torch.arange(mask.rows, device=mask.device)
    queries = (mask.q_len - rows % max(tiles, 1) * bq).clamp(max=bq)
    seen = (mask.full.counts * queries).sum() * bk
    for at, entries in _chunks(mask, rows):
        seen += element_mask(mask, at, entries).sum()
    return int(seen)


def _chunks(mask: MaskData, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and entries of all partial blocks, in chunks of CHUNK elements."""
    step = CHUNK // (mask.block[0] * mask.block[1])
    for some in rows.split(max(ENTRIES // max(mask.sizes.longest, 1), 1)):
        at, entries = stored_entries(mask.partial, some)
        yield from zip(some[at].split(step), entries.split(step), strict=True)


@reads_values("the lists of a mask are read")
def stored_entries(lists: BlockLists, rows: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """For each entry of the rows: which of `rows` it belongs to, and its position in `indices`; int64.

    Syncs, unless the number of entries is given as `size`.
    """
    counts = lists.counts[rows].long()
    at = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), counts, output_size=size)
    before = counts.cumsum(0) - counts
    inside = torch.arange(at.numel(), device=rows.device) - before[at]
    return at, lists.starts[rows].long()[at] + inside


def stored_cells(mask: MaskData, rows: Tensor) -> Tensor:
    """row * Nb + column of every block that these rows store, int64, in any order; row is a place in `rows`. Syncs."""
    cells = []
    for lists in (mask.full, mask.partial):
        at, entries = stored_entries(lists, rows)
        cells.append(at * mask.grid[1] + lists.indices[entries])
    return torch.cat(cells)


def find(lists: BlockLists, rows: Tensor, column: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Whether a row holds a column, and at which entry: one binary search for all rows."""
    low = lists.starts[rows].long()
    end = high = low + lists.counts[rows]
    if not lists.indices.numel():
        return torch.zeros_like(low, dtype=torch.bool), low
    most = lists.indices.numel() - 1
    for _ in range(longest.bit_length()):
        middle = (low + high) // 2
        is_less = (low < high) & (lists.indices[middle.clamp(max=most)] < column)
        low, high = (
            torch.where(is_less, middle + 1, low),
            torch.where(is_less, high, torch.minimum(high, middle)),
        )
    return (low < end) & (lists.indices[low.clamp(max=most)] == column), low


def transposed(mask: MaskData) -> TransposedLists:
    """See BlockMask.transposed."""
    sizes = mask.sizes
    whole = sizes.stored - sizes.partial if sizes.exact else sizes.stored
    full, full_entries = _flipped(mask, mask.full, whole)
    partial, partial_entries = _flipped(mask, mask.partial, sizes.partial)
    return TransposedLists(full, partial, full_entries, partial_entries)


def _flipped(mask: MaskData, lists: BlockLists, most: int) -> tuple[BlockLists, Tensor]:
    """A stable sort by key block. If there are fewer than `most` entries, unused ones follow the last row."""
    (tiles, columns), device = mask.grid, mask.device
    rows_below = mask.batch * mask.heads * columns
    ends = lists.counts.cumsum(0)
    entry = torch.arange(most, device=device)
    row = torch.searchsorted(ends, entry, right=True).clamp(max=max(mask.rows - 1, 0))
    there = entry < (ends[-1:] if mask.rows else 0)
    position = torch.where(there, lists.starts[row] + entry - (ends - lists.counts)[row], 0)
    key = torch.where(there, row // max(tiles, 1) * columns + lists.indices[position], rows_below)
    key, order = torch.sort(key, stable=True)
    edges = torch.searchsorted(key, torch.arange(rows_below + 1, device=device), out_int32=True)
    tile, position = (row % max(tiles, 1))[order].to(torch.int32), position[order].to(torch.int32)
    return BlockLists(edges[:-1].contiguous(), edges.diff(), tile), position


def refuse_members(mask: MaskData, what: str) -> None:
    """InvalidInput for a mask by members, whose rules `what` does not read."""
    if mask.members is not None:
        raise InvalidInput(
            f"{what}: the mask has a bit for each query and block (members); pass one with the same elements, "
            "BlockMask.from_dense(mask.to_dense())"
        )


def table_of(mask: MaskData) -> Tensor:
    """The kind of each block, int32 [batch, heads, Mb, Nb].

    NOT_STORED, WHOLE, BY_INTERVAL or the index of its bits. Syncs only if the sizes are not exact.
    """
    table = torch.full((mask.rows, mask.grid[1]), NOT_STORED, dtype=torch.int32, device=mask.device)
    every, whole, cut = torch.arange(mask.rows, device=mask.device), None, None
    if mask.sizes.exact:
        whole, cut = mask.sizes.stored - mask.sizes.partial, mask.sizes.partial
    rows, entries = stored_entries(mask.full, every, whole)
    at = rows * mask.grid[1] + mask.full.indices[entries]
    table.view(-1).index_fill_(0, at, WHOLE)  # an assignment would wait for the device
    rows, entries = stored_entries(mask.partial, every, cut)
    rules = (
        torch.full_like(entries, BY_INTERVAL, dtype=torch.int32)
        if mask.rules is None
        else mask.rules[entries]
    )
    table[rows, mask.partial.indices[entries].long()] = rules
    return table.view(mask.batch, mask.heads, *mask.grid)
