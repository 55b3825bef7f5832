"""Checks of the values of tables, lengths and lists of attention over paged keys, on the device, with one wait.

On a CPU every call makes those of values without a meaning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.paged_call import Paged
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import reads_values


@reads_values("page ids and lengths are read", "pass plain tensors")
def check_values(call: Paged, every: bool = True) -> None:
    """InvalidInput for page ids and lengths that do not fit, with their position. Waits for the device once.

    `every`: also for queries without a key of their own, which have a result: 0.
    """
    if captured(call.q):
        raise InvalidInput(
            "check=True waits for the device, which a CUDA graph cannot capture; call with check=True before it"
        )
    with torch.no_grad():
        found = [*_lengths(call, every), *_pages(call), *_lists(call)]
        if call.q.device.type == "cpu":
            for bad, message in found:
                if bad.any():
                    raise InvalidInput(message(int(bad.flatten().int().argmax())))
            return
        flat = [torch.nn.functional.pad(bad.flatten(), (0, 1)) for bad, _ in found]  # argmax needs an element
        wrong = torch.stack([torch.stack((bad.any().long(), bad.int().argmax())) for bad in flat])
    for (any_, at), (_, message) in zip(wrong.tolist(), found, strict=True):
        if any_:
            raise InvalidInput(message(at))


Found = list[tuple[Tensor, Callable[[int], str]]]


def _lengths(call: Paged, every: bool) -> Found:
    edges, lengths, tokens = call.cu_seqlens_q, call.seq_lens, call.q.shape[0]
    queries, most = edges.diff(), call.block_table.shape[1] * call.k.shape[2]

    def at(x: Tensor, i: int) -> int:
        return int(x[i])

    return [
        (edges[:1] != 0, lambda i: f"cu_seqlens_q starts with {at(edges, 0)}; it must start with 0"),
        (
            edges[-1:] > tokens,
            lambda i: (
                f"cu_seqlens_q ends with {at(edges, -1)}, and q has {tokens} rows; its last entry is at most that"
            ),
        ),
        (
            queries < 0,
            lambda i: (
                f"cu_seqlens_q falls from {at(edges, i)} to {at(edges, i + 1)} at request {i}; it must ascend"
            ),
        ),
        (
            queries > call.max_q,
            lambda i: (
                f"request {i} has {at(queries, i)} queries, and max_seqlen_q is {call.max_q}; give the largest"
            ),
        ),
        (
            (lengths < 0) | (lengths > most),
            lambda i: (
                f"seq_lens[{i}] is {at(lengths, i)}; block_table has room for 0 to {most} keys of a request "
                f"({call.block_table.shape[1]} pages of {call.k.shape[2]})"
            ),
        ),
        (
            # A query stands at one of the last keys, so these are those of its new tokens too.
            (queries > lengths) & (call.causal and every),
            lambda i: (
                f"seq_lens[{i}] is {at(lengths, i)}, and request {i} has {at(queries, i)} queries; with causal=True it "
                "counts the keys of the new tokens too, so it must be as large at least"
            ),
        ),
        (
            lengths > call.max_k,
            lambda i: (
                f"seq_lens[{i}] is {at(lengths, i)}, and max_seqlen_k is {call.max_k}; give the largest"
            ),
        ),
    ]


def _pages(call: Paged) -> Found:
    table, page, pages = call.block_table, call.k.shape[2], call.k.shape[0]
    width = table.shape[1]
    column = torch.arange(width, dtype=torch.int32, device=table.device)
    used = column * page < call.seq_lens[:, None]
    bad = used & ((table < 0) | (table >= pages))

    def message(i: int) -> str:
        r, j = divmod(i, max(width, 1))
        there = f"the cache pages 0 to {pages - 1}" if pages else "the cache has no pages"
        return f"block_table[{r}, {j}] is {int(table[r, j])}; request {r} has {int(call.seq_lens[r])} keys, and {there}"

    return [(bad, message)]


def _lists(call: Paged) -> Found:
    lists = call.lists
    if lists is None:
        return []
    bq = lists.block[0]
    needed = (call.cu_seqlens_q.diff() + bq - 1).div(bq, rounding_mode="floor").clamp(min=0).sum()
    found: Found = [
        (
            (needed > lists.tiles)[None],
            lambda i: (
                f"mask has {lists.tiles} tiles for each head; the requests have {int(needed)} of {bq} queries"
            ),
        )
    ]
    for name, (starts, counts, indices) in (("full", lists.full), ("partial", lists.partial)):
        size = indices.shape[0]
        bad = (
            (starts < 0)
            | (counts < 0)
            | ((counts > 0) & (starts.long() + counts > size))
            | (counts > lists.longest)
        )

        def message(
            i: int, name: str = name, starts: Tensor = starts, counts: Tensor = counts, size: int = size
        ) -> str:
            return (
                f"row {i} of mask.{name} has {int(counts[i])} entries from {int(starts[i])} on; there are {size} in "
                f"all, and at most {lists.longest} in a row"
            )

        found.append((bad, message))
    both = lists.full.counts.long() + lists.partial.counts
    found.append(
        (
            both > lists.longest,
            lambda i: (
                f"row {i} of mask has {int(both[i])} entries, full and partial together, and longest is {lists.longest}"
            ),
        )
    )
    return [*found, *_repeats(call, lists)]


def _repeats(call: Paged, lists: PageLists) -> Found:
    """Key blocks that occur twice in a row of `lists`, full and partial together."""
    bq, bk = lists.block
    device, rows = call.q.device, lists.heads * lists.tiles
    most = min(lists.longest, sum(x.indices.shape[0] for x in (lists.full, lists.partial)))
    entry = torch.arange(most, dtype=torch.int64, device=device)
    tiles = (call.cu_seqlens_q.diff().long() + bq - 1).div(bq, rounding_mode="floor").clamp(min=0).cumsum(0)
    tile = torch.arange(lists.tiles, dtype=torch.int64, device=device)
    request = torch.searchsorted(tiles, tile, right=True)
    lengths = torch.nn.functional.pad(call.seq_lens.long(), (0, 1))  # tiles after the last request: no keys
    blocks = ((lengths[request] + bk - 1) // bk).repeat(lists.heads)[:, None]
    parts = []
    for starts, counts, indices in (lists.full, lists.partial):
        if not indices.shape[0]:
            continue
        at = (starts.long()[:, None] + entry).clamp(0, indices.shape[0] - 1)
        found = indices[at].long()
        there = (entry < counts[:, None]) & (found >= 0) & (found < blocks)
        parts.append(torch.where(there, found, -1))
    if not parts or not rows:
        return []
    ordered = torch.cat(parts, 1).sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)

    def message(i: int) -> str:
        block = int(ordered[i, 1:][twice[i]][0])
        return f"row {i} of mask has key block {block} more than once; entries must be unique"

    return [(twice.any(1), message)]
