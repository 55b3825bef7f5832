"""The pieces of a plan: which keys or queries come to this rank together, and the mask of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from sparsek.distributed.deal import Deal, entries_of, in_pairs, ranges
from sparsek.distributed.exchange import Exchange
from sparsek.distributed.plan import MeshPlan, once
from sparsek.distributed.submask import submask

# Parts of the gradients of so few keys may be rounded before they are added: that adds 2 * FEW of the square of one
# rounding's error to that of all, where keys are alike. Float32 takes twice the memory of the gradients, on every rank.
FEW = 1 / 8


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys or queries that arrive together: their exchange, the mask of them and of what is here, and their number.

    `shared`: of keys, whether parts of their gradients go between ranks in float32.
    """

    exchange: Exchange
    mask: BlockMask
    length: int
    shared: bool = False


def key_pieces(
    plan: MeshPlan, batch: int, kv_heads: int, device: torch.device, pieces: int, exact: bool = False
) -> list[Piece]:
    """The keys that this rank attends to: with one piece all of them in order, otherwise its own first.

    `exact`: one piece, and calls with its mask have the order of sums of calls with the whole mask. Masks by members
    with a window or sinks count keys from the ends of intervals, so these keys come first too.
    """
    pieces = 1 if exact else min(pieces, plan.ranks)

    def make() -> list[Piece]:
        ranks, needs = np.arange(plan.ranks), plan._needs(kv_heads)
        shift = (ranks[:, None] - ranks) % plan.ranks  # from rank s to rank r
        of = np.zeros_like(shift)
        if pieces > 1:
            of = np.where(shift == 0, 0, 1 + (shift - 1) * (pieces - 1) // max(plan.ranks - 1, 1))
        of = of[:, plan._parts.keys.owners(plan.mask.block[1])][:, None]  # of each block
        if pieces > 1 and at_ends(plan.mask):
            of = np.where(_end_blocks(plan, needs.shape[1]), 0, of)
        met = [needs & (of == piece) for piece in range(pieces)]
        shared = float((needs.sum(0) > 1).sum()) > FEW * float(needs.any(0).sum())
        made = [_keys_of(plan, each, batch, kv_heads, device, exact, at == 0) for at, each in enumerate(met)]
        return [replace(each, shared=shared) for each in made]

    return once(plan._kept, ("keys", batch, kv_heads, device, pieces, exact), make)


def _end_blocks(plan: MeshPlan, groups: int) -> np.ndarray:
    """The blocks of windows and sinks of the queries of each rank, bool [ranks, groups, blocks]."""
    mask, members = plan.mask, plan.mask.members
    host: Any = mask.host
    assert members is not None
    deal, side, rows = plan._parts.queries, mask.block[1], host.lo.shape[0]
    owner = np.repeat(deal.owner, deal.unit_tokens)
    edges = np.zeros((plan.ranks, rows, mask.grid[1] + 1), np.int64)
    for row, (lo, hi) in enumerate(zip(host.lo.astype(np.int64), host.hi.astype(np.int64), strict=True)):
        window, sinks = np.maximum(hi - members.window, lo), np.minimum(lo + members.sinks, hi)
        for start, end in ((window, hi), (lo, sinks)):
            some = start < end
            first: Any = owner[some], row, start[some] // side
            behind: Any = owner[some], row, (end[some] - 1) // side + 1
            np.add.at(edges, first, 1)
            np.add.at(edges, behind, -1)
    found = np.cumsum(edges, 2)[:, :, :-1] > 0
    whole = np.broadcast_to(found, (plan.ranks, mask.batch * mask.heads, mask.grid[1]))
    return np.any(whole.reshape(plan.ranks, groups, -1, mask.grid[1]), 2)


def _keys_of(
    plan: MeshPlan,
    needs: np.ndarray,
    batch: int,
    kv_heads: int,
    device: torch.device,
    exact: bool,
    ends: bool,
) -> Piece:
    """The keys of a piece, bool [ranks, groups, blocks]. `ends`: whether windows and sinks are among them."""
    mask, rank, parts = plan.mask, plan._here, plan._parts
    places = needs
    if exact and in_pairs(mask):  # a block that is not needed has a place beside one that is
        pairs = np.pad(needs, ((0, 0), (0, 0), (0, needs.shape[2] % 2))).reshape(*needs.shape[:2], -1, 2)
        places = np.repeat(pairs.any(3), 2, axis=2)[:, :, : needs.shape[2]]
    exchange, length = _gathered(
        plan, needs, parts.keys, mask.block[1], (batch, kv_heads), device, "keys and values", places
    )
    rows = mask.batch * mask.heads
    share = rows // needs.shape[1]  # heads of the mask that read one head of k
    kept = [np.flatnonzero(places[rank, row // share]) for row in range(rows)]
    tiles = [parts.queries.parts(rank, mask.block[0])] * rows
    q_len = int(parts.queries.tokens[rank])
    return Piece(exchange, submask(mask, tiles, kept, q_len, length, device, exact, ends=ends), length)


def query_piece(plan: MeshPlan, batch: int, q_heads: int, device: torch.device) -> Piece:
    """The queries that see keys of this rank, and their mask with its keys."""
    refuse_ends(plan.mask, at_ends(plan.mask))

    def make() -> Piece:
        mask, rank, keys = plan.mask, plan._here, plan._parts.keys
        rows, tiles = mask.batch * mask.heads, max(mask.grid[0], 1)
        seeing = np.zeros((plan.ranks, rows, mask.grid[0]), bool)
        owner = keys.owners(mask.block[1])
        for row, column in entries_of(mask):
            seeing[owner[column], row // tiles, row % tiles] = True
        exchange, length = _gathered(
            plan,
            seeing,
            plan._parts.queries,
            mask.block[0],
            (batch, q_heads),
            device,
            "queries and gradients",
        )
        seen = [np.flatnonzero(seeing[rank, row]) for row in range(rows)]
        blocks = [keys.parts(rank, mask.block[1])] * rows
        part = submask(mask, seen, blocks, length, int(keys.tokens[rank]), device, exact=True, dq=False)
        return Piece(exchange, part, length)

    return once(plan._kept, ("queries", batch, q_heads, device), make)


def at_ends(mask: BlockMask) -> bool:
    """Whether queries see keys by their distance to the end of an interval, which must then be whole."""
    return mask.members is not None and mask.members.at_ends


def refuse_ends(mask: Any, ends: bool) -> None:
    """InvalidInput for a mask, or lists, with such queries, which exact=True does not take."""
    if ends:
        raise InvalidInput(
            f"exact=True with {mask.label}: its window and sinks are counted from the ends of all keys, and the owner "
            'of keys has not all of them; plan with how="heads", or leave exact out'
        )


def _gathered(
    plan: MeshPlan,
    needs: np.ndarray,
    deal: Deal,
    side: int,
    heads: tuple[int, int],
    device: torch.device,
    what: str,
    places: np.ndarray | None = None,
) -> tuple[Exchange, int]:
    """How blocks of `side` tokens come to the ranks that need them, bool [ranks, groups, blocks].

    Tensors have heads [batch, heads]; each of them has the blocks of its group, in ascending order and filled up with
    zeros to the length that is returned. `places`: those that it has a place for, which is zeros where nothing comes;
    the ones it needs without.
    """
    places = needs if places is None else places
    rank, (ranks, groups, count), batch = plan._here, needs.shape, plan.mask.batch
    owner = deal.owners(side)
    own, length = int(deal.tokens[rank]), int(places[rank].sum(1).max(initial=0)) * side
    tokens = np.minimum(np.arange(1, count + 1) * side, deal.length) - np.arange(count) * side
    mine = owner == rank
    first = np.where(mine, np.cumsum(mine) - 1, 0) * side  # of a block of this rank, in its shard
    at = np.arange(heads[0] * heads[1])
    item, head = at // heads[1] if batch > 1 else 0, at % heads[1]
    group = item * (groups // batch) + head * (groups // batch) // heads[1]
    column = np.cumsum(places[rank], 1) - 1  # of each kept block
    send, place = [], []
    for other in range(ranks):
        out, to = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for each, of in zip(at, group, strict=True):
            blocks = np.flatnonzero(needs[other, of] & mine)
            out.append(each * own + ranges(first[blocks], tokens[blocks]))
            blocks = np.flatnonzero(needs[rank, of] & (owner == other))
            to.append(each * length + ranges(column[of, blocks] * side, tokens[blocks]))
        send.append(np.concatenate(out))
        place.append(np.concatenate(to))
    return Exchange.of(
        rank, send, place, (at.size * own, at.size * length), plan._parts.group, device, what
    ), length
