"""The checks of BlockMask's constructor. Every fault is an InvalidInput that gives its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from sparsek.attn.mask.data import MaskData
from sparsek.attn.mask.elements import find
from sparsek.attn.mask.lists import (
    BY_INTERVAL,
    WORD,
    BlockLists,
    HostMask,
    Members,
    Sizes,
    check_stored,
    exact_sizes,
    mask_block,
    mask_length,
    token_block,
)
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.pictures.masks import PictureRows

ENTRIES = 1 << 22  # partial blocks that are checked at a time: rows may share entries, so a file may be small


@not_traced("a block mask")
def plain(mask: MaskData) -> dict[str, Any]:
    """Lengths, block, batch and heads as plain ints, `pure`, and the label."""
    members = _plain_members(mask)
    block = mask_block(mask.block) if members is None else token_block(mask.block)
    for name in ("full", "partial"):
        if not isinstance(getattr(mask, name), BlockLists):
            raise InvalidInput(f"{name} is {arguments.shown(getattr(mask, name))}; it must be BlockLists")
    return {
        "block": block,
        "q_len": mask_length(mask.q_len, "q_len", block[0]),
        "kv_len": mask_length(mask.kv_len, "kv_len", block[1]),
        "batch": arguments.integer("batch", mask.batch, 1),
        "heads": arguments.integer("heads", mask.heads, 1),
        "pure": arguments.flag("pure", mask.pure),
        "label": arguments.text("label", mask.label),
        "members": members,
    }


def _plain_members(mask: MaskData) -> Members | None:
    """The members as plain ints."""
    members = mask.members
    if members is None:
        return None
    if not isinstance(members, Members):
        raise InvalidInput(f"members is {arguments.shown(members)}; it must be Members")
    rows = arguments.integer("members.rows", members.rows, 1, 1)
    window = arguments.integer("members.window", members.window, 0, INT32_MAX)
    return Members(rows, window, arguments.integer("members.sinks", members.sinks, 0, INT32_MAX))


@not_traced("a block mask")
def check(mask: MaskData) -> Sizes:
    """Check the tensors of a mask whose other fields are checked; return the true sizes. Waits for the device once."""
    _check_tensors(mask)
    host = mask.host
    _check_rows(mask, "full", host.full)
    _check_rows(mask, "partial", host.partial)
    sizes = exact_sizes(host.full.counts, host.partial.counts)
    check_stored(sizes.stored)
    for rows in _in_steps(host):
        _check_apart(mask, host, rows)
    if mask.members is None:
        _check_rules(mask, host)
    elif host.lo is not None and host.hi is not None:
        _check_interval(mask, host.lo, host.hi)
    if mask.pure:
        _check_pure(mask, host)
    return sizes


def _check_tensors(mask: MaskData) -> None:
    """All that can be checked without a sync."""
    arguments.tensor("full.starts", mask.full.starts)
    (bq, bk), groups = mask.block, mask.batch * mask.heads
    both = f"{groups} x {mask.q_len}" if groups == 1 else f"1 x {mask.q_len} or {groups} x {mask.q_len}"
    for kind, lists in (("full", mask.full), ("partial", mask.partial)):
        for name, part in zip(lists._fields, lists, strict=True):
            _check_tensor(f"{kind}.{name}", part, 1, mask.device)
            if name != "indices" and part.numel() != mask.rows:
                raise InvalidInput(
                    f"{kind}.{name} has {part.numel()} entries; batch {mask.batch} x heads {mask.heads} x "
                    f"{mask.grid[0]} query tiles are {mask.rows} rows"
                )
    if (mask.lo is None) != (mask.hi is None):
        raise InvalidInput("lo or hi is missing; give both or none")
    for name, part in (("lo", mask.lo), ("hi", mask.hi)):
        if part is not None:
            _check_tensor(name, part, 2, mask.device)
            if part.shape[0] not in (1, groups) or part.shape[1] != mask.q_len:
                raise InvalidInput(f"{name} is {list(part.shape)}; it must be {both} (batch * heads, q_len)")
    if mask.lo is not None and mask.hi is not None and mask.lo.shape != mask.hi.shape:
        raise InvalidInput(f"lo is {list(mask.lo.shape)} and hi is {list(mask.hi.shape)}; they must be alike")
    if mask.members is not None:
        _check_words(mask, mask.members.words(bq))
    elif mask.rules is not None:
        _check_tensor("rules", mask.rules, 1, mask.device)
        if mask.rules.shape != mask.partial.indices.shape:
            raise InvalidInput(
                f"rules has {mask.rules.numel()} entries and partial.indices {mask.partial.indices.numel()}; "
                "they are parallel"
            )
    if mask.bits is not None:
        _check_tensor("bits", mask.bits, 3, mask.device)
        if tuple(mask.bits.shape[1:]) != (bq, bk // WORD):
            raise InvalidInput(
                f"bits is {list(mask.bits.shape)}; blocks of {bq} x {bk} need [n, {bq}, {bk // WORD}]"
            )


def _check_words(mask: MaskData, words: int) -> None:
    """The tensors of a mask by members."""
    if mask.bits is not None or mask.lo is None or mask.hi is None or mask.rules is None:
        raise InvalidInput("a mask by members has rules, lo and hi, and no bits")
    _check_tensor("rules", mask.rules, 1, mask.device)
    entries = mask.partial.indices.numel()
    if mask.rules.numel() != entries * words:
        raise InvalidInput(
            f"rules has {mask.rules.numel()} words and partial.indices {entries} entries; by members it has {words} "
            "for each entry"
        )


def _check_tensor(name: str, part: Any, dimensions: int, device: torch.device) -> None:
    arguments.tensor(name, part, (torch.int32,), dimensions)
    if not part.is_contiguous():
        raise InvalidInput(f"{name} must be contiguous, got stride {part.stride()}; call .contiguous()")
    if part.device != device:
        raise InvalidInput(f"{name} is on {part.device} and full.starts on {device}; use one device")


def _check_rows(mask: MaskData, kind: str, lists: PictureRows) -> None:
    """Rows lie in the list, and their columns in the mask, ascending."""
    starts, ends = lists.starts.astype(np.int64), lists.starts.astype(np.int64) + lists.counts
    columns = mask.grid[1]
    outside = np.flatnonzero(
        (lists.counts < 0) | ((lists.counts > 0) & ((starts < 0) | (ends > lists.indices.size)))
    )
    if outside.size:
        row = int(outside[0])
        raise InvalidInput(
            f"{kind} blocks of {_where(mask, row)} are entries {starts[row]} to {ends[row]} (start and count "
            f"{lists.counts[row]}); {kind}.indices has {lists.indices.size}"
        )
    held = np.flatnonzero(lists.counts)
    stuck = np.cumsum(np.diff(lists.indices, prepend=INT32_MAX) <= 0)
    unsorted = held[stuck[ends[held] - 1] > stuck[starts[held]]]
    if unsorted.size:
        row = int(unsorted[0])
        raise InvalidInput(
            f"{kind} blocks of {_where(mask, row)} are {_some(lists.indices[starts[row] : ends[row]])}; "
            "they must ascend and not repeat"
        )
    least, most = lists.indices[starts[held]], lists.indices[ends[held] - 1]
    wrong = held[(least < 0) | (most >= columns)]
    if wrong.size:
        row = int(wrong[0])
        raise InvalidInput(
            f"{kind} blocks of {_where(mask, row)} are {_some(lists.indices[starts[row] : ends[row]])}; "
            f"key blocks are 0 to {columns - 1}"
        )
    if kind == "full" and mask.kv_len % mask.block[1]:
        beyond = held[most == columns - 1]
        if beyond.size:
            raise InvalidInput(
                f"full blocks of {_where(mask, int(beyond[0]))} reach beyond kv_len {mask.kv_len}; the last block of "
                f"{mask.block[1]} keys is cut and must be partial"
            )


def _in_steps(host: HostMask) -> Iterator[np.ndarray]:
    """The rows with full and with partial blocks, in steps; of rows with equal lists the first.

    A step has about ENTRIES partial blocks, or is one row that has more.
    """
    rows = np.flatnonzero((host.full.counts > 0) & (host.partial.counts > 0))
    runs = np.stack([part[rows] for part in (*host.full[:2], *host.partial[:2])], axis=1)
    rows = rows[np.sort(np.unique(runs, axis=0, return_index=True)[1])]
    ends = np.cumsum(host.partial.counts[rows], dtype=np.int64)
    edges = np.searchsorted(ends, np.arange(ENTRIES, ends[-1] if ends.size else 0, ENTRIES))
    return iter(np.split(rows, np.unique(edges)))


def _check_apart(mask: MaskData, host: HostMask, rows: np.ndarray) -> None:
    """No block is full and partial: each partial one is searched among the full ones of its row."""
    counts = host.partial.counts[rows].astype(np.int64)
    row, before = np.repeat(rows, counts), np.repeat(np.cumsum(counts) - counts, counts)
    column = host.partial.indices[host.partial.starts[row] + np.arange(row.size) - before]
    full = BlockLists(*map(torch.from_numpy, host.full))
    longest = int(host.full.counts[rows].max(initial=0))
    held, _ = find(full, torch.from_numpy(row), torch.from_numpy(column), longest)
    twice = np.flatnonzero(held)
    if twice.size:
        at = twice[0]
        raise InvalidInput(
            f"key block {column[at]} is full and partial in {_where(mask, int(row[at]))}; it must be one of them"
        )


def _held_entries(lists: PictureRows) -> np.ndarray:
    """Positions in `indices` that some row has, int64, ascending, each once."""
    starts, counts = (part[lists.counts > 0].astype(np.int64) for part in (lists.starts, lists.counts))
    size = lists.indices.size + 1
    opened = np.bincount(starts, minlength=size) - np.bincount(starts + counts, minlength=size)
    return np.flatnonzero(np.cumsum(opened) > 0)


def _check_rules(mask: MaskData, host: HostMask) -> None:
    """Rules exist where they point, and admit no key past the end."""
    entries = _held_entries(host.partial)
    rules = np.full(entries.shape, BY_INTERVAL) if host.rules is None else host.rules[entries]
    if host.bits is not None and host.rules is None:
        raise InvalidInput("the mask has bits and no rules; rules say which partial blocks they are for")
    known = 0 if host.bits is None else host.bits.shape[0]
    wrong = np.flatnonzero((rules < BY_INTERVAL) | (rules >= known))
    if wrong.size:
        entry = int(entries[wrong[0]])
        raise InvalidInput(
            f"rules[{entry}], {_first_with(mask, host, entry)}, is {rules[wrong[0]]}; {BY_INTERVAL} means by interval, "
            f"and bits has {known} entries"
        )
    if host.lo is None or host.hi is None:
        by_interval = entries[rules == BY_INTERVAL]
        if by_interval.size:
            where = _first_with(mask, host, int(by_interval[0]))
            raise InvalidInput(f"a partial block of {where} is by interval; the mask has no lo and hi")
    else:
        _check_interval(mask, host.lo, host.hi)
    spare = mask.grid[1] * mask.block[1] - mask.kv_len
    last = np.flatnonzero((rules >= 0) & (host.partial.indices[entries] == mask.grid[1] - 1))
    if host.bits is not None and spare and last.size:
        used, first = np.unique(rules[last], return_index=True)
        seen = np.unpackbits(host.bits[used].astype("<i4").view(np.uint8), axis=-1, bitorder="little")
        beyond = np.flatnonzero(seen[:, :, mask.block[1] - spare :].any((1, 2)))
        if beyond.size:
            where = _first_with(mask, host, int(entries[last[first[beyond[0]]]]))
            raise InvalidInput(f"bits[{used[beyond[0]]}], {where}, admits keys beyond kv_len {mask.kv_len}")


def _check_interval(mask: MaskData, lo: np.ndarray, hi: np.ndarray) -> None:
    """No interval reaches past the last key."""
    for name, part, least, most in (("lo", lo, 0, INT32_MAX), ("hi", hi, 0, mask.kv_len)):
        far = np.argwhere((part < least) | (part > most))
        if far.size:
            at = tuple(far[0].tolist())
            raise InvalidInput(
                f"{name}[{at[0]}, {at[1]}] is {part[at]}; keys are 0 to kv_len = {mask.kv_len}"
            )


def _check_pure(mask: MaskData, host: HostMask) -> None:
    """Everything by interval, and full blocks inside the interval of each of their queries."""
    if mask.members is not None:
        raise InvalidInput("pure is True, but partial blocks are by members; a pure mask has intervals only")
    if host.rules is not None and (host.rules[_held_entries(host.partial)] != BY_INTERVAL).any():
        raise InvalidInput("pure is True, but some rules are bits; a pure mask has intervals only")
    held = np.flatnonzero(host.full.counts)
    if host.lo is None or host.hi is None or not held.size:
        return
    (bq, bk), tiles = mask.block, mask.grid[0]
    edges = np.arange(tiles) * bq
    lo, hi = np.maximum.reduceat(host.lo, edges, axis=1), np.minimum.reduceat(host.hi, edges, axis=1)
    group = held // tiles if lo.shape[0] > 1 else np.zeros_like(held)
    first = host.full.indices[host.full.starts[held]]
    last = host.full.indices[host.full.starts[held] + host.full.counts[held] - 1]
    beyond = held[(first * bk < lo[group, held % tiles]) | ((last + 1) * bk > hi[group, held % tiles])]
    if beyond.size:
        raise InvalidInput(
            f"pure is True, but full blocks of {_where(mask, int(beyond[0]))} lie outside lo and hi"
        )


def _where(mask: MaskData, row: int) -> str:
    """A row in words."""
    tiles = mask.grid[0]
    place = f"query tile {row % tiles}"
    if mask.heads > 1:
        place += f" of head {row // tiles % mask.heads}"
    if mask.batch > 1:
        place += f" of batch item {row // tiles // mask.heads}"
    return place


def _first_with(mask: MaskData, host: HostMask, entry: int) -> str:
    """The first row that has an entry of partial.indices, in words."""
    starts, counts = host.partial.starts.astype(np.int64), host.partial.counts
    return _where(mask, int(np.argmax((starts <= entry) & (entry < starts + counts))))


def _some(values: np.ndarray) -> str:
    """The first few."""
    return ", ".join(map(str, values[:8].tolist())) + (", ..." if values.size > 8 else "")
