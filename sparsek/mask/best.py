"""The blocks of a mask with the highest scores: a mask of some blocks of another, each with its rule there."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.eager import eager
from sparsek.core.errors import InvalidInput
from sparsek.mask.lists import check_stored, exact_sizes
from sparsek.mask.mask import BY_INTERVAL, BlockMask
from sparsek.mask.parts import BlockLists, Sizes
from sparsek.mask.view import stored_entries

NOT_STORED, WHOLE = -3, -2  # in a table of blocks, beside BY_INTERVAL and the numbers of bits


@eager("a block mask")
def best_blocks(within: BlockMask, scores: Tensor, k: int, always: BlockMask | None = None) -> BlockMask:
    """For each query tile the `k` blocks of `within` with the highest scores, with the rules of `within`.

    scores: floating point [B, H, Mb, Nb] on the mask's device. within, always: one head, and 1 or B batch items. Blocks
    that `always` stores come first and count among the k; a tile that has more of them keeps all. -inf means never
    for others. Of equal scores any are kept, the same ones every time.

    No sync where the sizes of `within` and `always` are exact. O(B * H * Mb * Nb), as the scores are.
    """
    k, (tiles, columns) = arguments.integer("k", k, 1), within.grid
    _check(within, scores, always)
    codes = _codes(within)
    there = codes != NOT_STORED
    ranked = scores.detach().masked_fill(~there, -torch.inf)
    most = k
    if always is not None:
        ranked = ranked.masked_fill(there & (_codes(always) != NOT_STORED), torch.inf)
        most = max(k, always.sizes.longest)
    most = min(most, columns)
    best, chosen = torch.topk(ranked, most, dim=-1)
    slot = torch.arange(most, device=best.device)
    kept = (best != -torch.inf) & ((slot < k) | (best == torch.inf))
    batch, heads = scores.shape[:2]
    code = codes.expand(batch, heads, tiles, columns).gather(-1, chosen)
    whole = kept & (code == WHOLE)
    # Full blocks, then partial ones, then those that do not count; ascending.
    key, order = torch.where(kept, torch.where(whole, chosen, chosen + columns), 3 * columns).sort(-1)
    full, cut = (each.sum(-1, dtype=torch.int32).flatten() for each in (whole, kept & ~whole))
    rows = full.numel()
    check_stored(rows * most)
    starts = torch.arange(rows, dtype=torch.int32, device=best.device) * most
    indices = (key % max(columns, 1)).to(torch.int32).flatten()
    rules = None if within.rules is None else code.gather(-1, order).clamp(min=BY_INTERVAL).flatten()
    if best.device.type == "cpu":
        sizes = exact_sizes(full.numpy(), cut.numpy())
    else:
        times = batch * heads // within.batch
        bound = min(rows * most, times * within.sizes.stored)
        sizes = Sizes(bound, min(bound, times * within.sizes.partial), most, exact=False)
    lo, hi = (_of_each_head(each, batch, heads) for each in (within.lo, within.hi))
    return BlockMask.unchecked(
        q_len=within.q_len, kv_len=within.kv_len, block=within.block, batch=batch, heads=heads,
        full=BlockLists(starts, full, indices), partial=BlockLists(starts + full, cut, indices), lo=lo, hi=hi,
        rules=rules, bits=within.bits, sizes=sizes, pure=within.pure, label=f"{most} best of {within.label}",
    )  # fmt: skip


def _check(within: BlockMask, scores: Tensor, always: BlockMask | None) -> None:
    shape = ["B", "H", *within.grid]
    if scores.ndim != 4 or tuple(scores.shape[2:]) != within.grid or not scores.is_floating_point():
        raise InvalidInput(f"scores are {scores.dtype} {list(scores.shape)}; the mask needs floats {shape}")
    for name, mask in (("within", within), ("always", always)):
        if mask is None:
            continue
        if mask.heads != 1 or mask.batch not in (1, scores.shape[0]):
            raise InvalidInput(
                f"{name} has {mask.heads} heads and {mask.batch} batch items; it needs 1 head, and 1 or "
                f"{scores.shape[0]} batch items"
            )
        if (mask.grid, mask.block, mask.device) != (within.grid, within.block, scores.device):
            raise InvalidInput(f"{name} must have the blocks of within and be on the device of the scores")


def _codes(mask: BlockMask) -> Tensor:
    """What becomes of each block, int32 [batch, 1, Mb, Nb]: NOT_STORED, WHOLE, or the rule of a partial one."""
    table = torch.full((mask.rows, mask.grid[1]), NOT_STORED, dtype=torch.int32, device=mask.device)
    rows, entries = _entries(mask, mask.full, mask.sizes.stored - mask.sizes.partial)
    at = rows * mask.grid[1] + mask.full.indices[entries]
    table.view(-1).index_fill_(0, at, WHOLE)  # an assignment would wait for the device
    rows, entries = _entries(mask, mask.partial, mask.sizes.partial)
    rules = (
        torch.full_like(entries, BY_INTERVAL, dtype=torch.int32)
        if mask.rules is None
        else mask.rules[entries]
    )
    table[rows, mask.partial.indices[entries].long()] = rules
    return table.view(mask.batch, 1, *mask.grid)


def _entries(mask: BlockMask, lists: BlockLists, stored: int) -> tuple[Tensor, Tensor]:
    """Row and position of every entry, int64. Syncs only if the sizes are not exact."""
    every = torch.arange(mask.rows, device=mask.device)
    if not mask.sizes.exact:
        return stored_entries(lists, every)
    rows = torch.repeat_interleave(every, lists.counts, output_size=stored)
    before = lists.counts.cumsum(0) - lists.counts
    return rows, (lists.starts - before)[rows] + torch.arange(stored, device=mask.device)


def _of_each_head(bound: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """[1 or batch * heads, q_len] of [1 or batch, q_len]."""
    if bound is None or bound.shape[0] == 1:
        return bound
    return bound[:, None].expand(batch, heads, -1).flatten(0, 1)
