"""Masks of packed documents in one launch, from where each document begins: on the device, read by nobody else.

    edges        0            300  317                        512
    queries      |  first     | 2nd |  third                    |
    tiles        |      |      |  2 and 3   |      |      |

A query finds its document by bisection. A tile of one document has full blocks and, left and right of them, partial
ones. A tile of several has one run of partial blocks, from the first key that its first query sees to the last key of
its last one, because documents adjoin. So do the entries of a row: those of one run are a part of the list of all
columns, two runs have a fixed room.

Edges that only the device knows are checked there: a fault is written to a word of the host. Whatever they are, no
column is outside of the mask, and no query sees keys beyond its window: sizes that the host derives from the window
hold.

Bottleneck: the host, with one launch and one allocation. Each query looks up about log2(documents) edges.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.mask.runs import within, write_all_columns, write_runs
from sparsek.attn.mask.build.banded import Band
from sparsek.attn.mask.lists import Place
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.engine.launch.recorder import fault_word

ROWS, ENTRIES, LANES, WARPS = 32, 16, 512, 4
_LISTS = ("edges", "fault", "full_starts", "full_counts", "starts", "counts", "indices", "lo", "hi")
_SIZES = ("documents", "rows", "tiles", "columns", "length", "queries", "low", "high", "capacity")


@triton.jit
def _of_document(edges, documents, query, base, low, high, length):
    """The document of each query and its lo and hi; base is the query's batch item times the length."""
    left = tl.zeros_like(query)
    right = left + documents
    span = documents
    while span > 0:
        middle = (left + right) // 2
        here = middle < right
        before = here & (tl.load(edges + middle, mask=here, other=0) <= query)
        left, right = tl.where(before, middle + 1, left), tl.where(before, right, middle)
        span = span // 2
    document = tl.maximum(left - 1, 0)
    start = within(tl.load(edges + document).to(tl.int64) - base, 0, length)
    end = within(tl.load(edges + document + 1).to(tl.int64) - base, start, length)
    position = query - base
    lo, hi = within(position + low, start, end), within(position + high, start, end)
    sees = (start <= position) & (position < end)
    return document, tl.where(sees, lo, 0), tl.where(sees, hi, 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_LISTS)
def _documents(
    edges, fault, full_starts, full_counts, starts, counts, indices, lo, hi,
    documents, rows, tiles, columns, length, queries, low, high, capacity,
    BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`fault`: a word for 1 + the document of a fault; None if the edges are known to be right."""
    pid, row_programs, column_programs = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, LANES)
    query_programs = tl.cdiv(queries, LANES)
    if pid < row_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        live = row < rows
        base = (row // tiles).to(tl.int64) * length
        first = base + (row % tiles).to(tl.int64) * BQ
        last = tl.minimum(first + BQ, base + length) - 1
        # Queries after the last document see nothing: a tile that ends with them ends with the last one before.
        seen = within(tl.load(edges + documents).to(tl.int64) - 1, first, last)
        document, first_lo, first_hi = _of_document(edges, documents, first, base, low, high, length)
        other, last_lo, last_hi = _of_document(edges, documents, seen, base, low, high, length)
        alone = (document == other) & (seen == last)
        # A tile may begin with queries of no document if the edges are wrong: the sizes hold for the window only.
        start = tl.maximum(first_lo, within(first - base + low, 0, length)) // BK
        end = tl.maximum(start, tl.where(first_lo < last_hi, (last_hi + BK - 1) // BK, start))
        whole = within((last_lo + BK - 1) // BK, start, end)
        cut = within(first_hi // BK, whole, end)
        cut = tl.where(alone, cut, whole)
        left = whole - start
        one_run = (alone == 0) | (cut == whole) | (left == 0) | (end == cut)
        begin = tl.where(
            one_run, tl.where(alone & (left == 0), cut, start), columns + row.to(tl.int64) * capacity
        )
        tl.store(full_starts + row, whole.to(tl.int32), mask=live)
        tl.store(full_counts + row, (cut - whole).to(tl.int32), mask=live)
        tl.store(starts + row, begin.to(tl.int32), mask=live)
        tl.store(counts + row, (end - start - cut + whole).to(tl.int32), mask=live)
        none = tl.zeros_like(row)
        right = tl.where(one_run, 0, end - cut).to(tl.int32)
        write_runs(
            indices + columns, row, live, capacity, start.to(tl.int32), tl.where(one_run, 0, left).to(tl.int32), 1,
            cut.to(tl.int32), right, none, none, 1, ENTRIES,
        )  # fmt: skip
    elif pid < row_programs + column_programs:
        write_all_columns(indices, columns, pid - row_programs, LANES)
    elif pid < row_programs + column_programs + query_programs:
        query = ((pid - row_programs - column_programs) * LANES + tl.arange(0, LANES)).to(tl.int64)
        base = query // length * length
        at = tl.minimum(query, queries - 1)
        _, from_key, to_key = _of_document(edges, documents, at, base, low, high, length)
        tl.store(lo + query, from_key.to(tl.int32), mask=query < queries)
        tl.store(hi + query, to_key.to(tl.int32), mask=query < queries)
    elif fault is not None:
        document = (pid - row_programs - column_programs - query_programs) * LANES + tl.arange(0, LANES)
        there = document < documents
        start = tl.load(edges + document, mask=there, other=0)
        end = tl.load(edges + document + 1, mask=there, other=0)
        wrong = (end < start) | (end > length) | ((document == 0) & (start != 0))
        found = tl.min(tl.where(there & wrong, document, documents), 0)
        if found < documents:
            tl.store(fault, (found + 1).to(tl.int64))


def documents(
    given: Sequence[Any], place: Place, edges: Tensor, band: Band, batch: int, checked: bool = False
) -> tuple[Tensor, ...]:
    """Writes a mask of packed documents of as many queries as keys. No sync; it may be captured.

    Args:
        given: The tensors of its layout.
        place: The lengths of one batch item.
        edges: int32 or int64 [documents + 1] on the device: where each document begins, and the end of the last, with
            batch items one behind the other.
        band: The window, without sinks.
        batch: Batch items.
        checked: Whether to look for faults in the edges, which then are those of one batch item.

    Returns:
        The word of a fault, if `checked`.
    """
    (tiles, columns), (bq, bk), length = place.grid, place.block, place.q_len
    rows, capacity, queries = batch * tiles, band.capacities(place)[1], batch * place.q_len
    full_starts, full_counts, _, *others = given[:8]
    tensors = full_starts, full_counts, *others
    sizes = edges.numel() - 1, rows, tiles, columns, length, queries, band.low, band.high, capacity
    constants = bq, bk, ROWS, ENTRIES, LANES
    programs = sum(-(-size // each) for size, each in ((rows, ROWS), (columns, LANES), (queries, LANES)))
    word = fault_word(place.device) if checked else None
    if checked:
        programs += -(-sizes[0] // LANES)
    if programs:
        launch_unspecialized(
            _documents, place.device, programs, (edges, word, *tensors, *sizes), constants, WARPS
        )
    return () if word is None else (word,)
