"""Masks by members in tiles whose rows are `pack` heads of each token, for kernels whose rows are queries of one head.

    q [B, Hq, S, D]       [B, Hq / pack, S * pack, D]    row i * pack + r of packed head g: token i of head g * pack + r
    mask block (T, bk)    block (T * pack, bk)           the same lists, lo and hi of every row, members.rows = pack

`PackedRows(kernel)` is a kernel for all masks: of one by members it plans the packed problem, copies the rows of q, out
and their gradients, launches, and copies results back. Without `copies` the kernel reads and writes them in place, in
tiles of half as many tokens where that leaves out steps (`halves_tiles`), and takes key blocks of 64 in pairs. k and v
stay. Scores that change by the head do so by the row: row r % pack of packed head g has the slope and the sink of head
g * pack + r % pack, and token r // pack its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.mask.data import PART, MaskPart
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionGradCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core import dtypes
from sparsek.engine.launch.launch import launch, launch_unspecialized

ELEMENTS, WARPS = 4096, 4  # of a program
ENTRIES = 32  # of a row of a mask, read together
PAIR = 128  # keys of two blocks of 64
# What a kernel reads and writes that has a row for each query.
READ, WRITTEN = {
    AttentionCall: ("q",), AttentionGradCall: ("q", "out", "lse", "grad", "grad_lse"),
}, {
    AttentionCall: ("out", "lse"), AttentionGradCall: ("dq",),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class PackedWork:
    """The work of a kernel for packed rows. `mask()` has them, and `lists`, which the mask of the call lacks."""

    mask: Callable[[], Any]
    work: Any
    lists: tuple[Tensor, ...]

    @property
    def imbalance(self) -> Any:
        """That of the kernel."""
        return getattr(self.work, "imbalance", None)


class PackedRows:
    """A kernel of attention, or of its gradients, that takes masks by members too."""

    def __init__(self, kernel: Any, *, copies: bool = True) -> None:
        self.kernel, self.name, self.copies = kernel, kernel.name, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["kernel"], name)

    def packed(self, p: AttentionProblem) -> AttentionProblem:
        """The problem of the kernel."""
        packed = p.packed
        if self.copies or not halves_tiles(p):
            return packed
        return halved_problem(packed)

    def why_not(self, p: AttentionProblem) -> list[str]:
        return self.kernel.why_not(self.packed(p))

    def default(self, p: AttentionProblem) -> Any:
        return self.kernel.default(self.packed(p))

    def configs(self, p: AttentionProblem) -> Iterable[Any]:
        return self.kernel.configs(self.packed(p))

    def seconds(self, p: AttentionProblem, c: Any) -> float:
        """Those of the kernel, and of the copies: a launch and two passes for each."""
        seconds = self.kernel.seconds(self.packed(p), c)
        if p.pack == 1 or not self.copies:
            return seconds
        call = AttentionCall if p.op == "attention" else AttentionGradCall
        launches = len(READ[call]) + len(WRITTEN[call])
        return seconds + launches * p.card.launch_seconds + 2 * copied_bytes(p) / (0.8 * p.card.bandwidth)

    def notes(self, p: AttentionProblem, c: Any) -> list[str]:
        """Those of the kernel, and how many heads are packed."""
        own = getattr(self.kernel, "notes", None)
        copied = f": q and results are copied, {copied_bytes(p) / 1e6:.4g} MB a call" if self.copies else ""
        packed = [f"{p.pack} heads of a token are rows of one tile{copied}"]
        return (packed if p.pack > 1 else []) + (own(self.packed(p), c) if own else [])

    def prepare(self, p: AttentionProblem, c: Any, mask: BlockMask) -> Any:
        if p.pack == 1:
            return self.kernel.prepare(p, c, mask)
        packed = packed_mask(mask, p.pack)
        kept = packed.lo, packed.hi
        if self.packed(p).block[0] < packed.block[0]:
            packed = halved_tiles(packed)
            kept = *kept, *packed.partial, *packed.full[:2], packed.rules
        return PackedWork(lambda: packed, self.kernel.prepare(self.packed(p), c, packed), kept)

    def launch(self, c: Any, work: Any, call: Any) -> None:
        if not isinstance(work, PackedWork):
            return self.kernel.launch(c, work, call)
        mask: Any = work.mask()
        if not self.copies:
            return self.kernel.launch(c, work.work, call._replace(mask=mask))
        rows, given, results = mask.members.rows, {}, {}
        for name in READ[type(call)]:
            x = getattr(call, name)
            given[name] = None if x is None else packed_rows(x, rows)
        for name in WRITTEN[type(call)]:
            x = getattr(call, name)
            if x is not None:
                results[name] = x, x.new_empty(packed_shape(x, rows))
            given[name] = None if x is None else results[name][1]
        self.kernel.launch(c, work.work, call._replace(mask=mask, **given))
        for x, packed in results.values():
            tokens = of_tokens(x, rows)
            copy(packed.view(tokens.shape), tokens)
        return None


def halved_problem(p: AttentionProblem) -> AttentionProblem:
    """The problem of `halved_tiles`."""
    (bq, bk), whole = p.block, p.whole and halved_problem(p.whole)
    paired = bk == PAIR // 2
    sizes = {"stored": 2 * p.stored, "partial": 2 * (p.stored if paired else p.partial), "exact": False}
    return replace(p, block=(bq // 2, PAIR), paired=paired, whole=whole, **sizes)


def copied_bytes(p: AttentionProblem) -> int:
    """Of the packed copies of a call: q and out, and their gradients in a backward pass."""
    rows = (1 if p.op == "attention" else 2) * p.batch * p.q_heads * p.q_len
    return rows * (p.dim + p.v_dim) * dtypes.itemsize(p.dtype)


def packed_mask(mask: BlockMask, pack: int) -> BlockMask:
    """The mask of a mask by members for rows of `pack` heads of each token. No sync."""
    lo, hi = (
        packed_rows(x[:, None, :, None].expand(-1, pack, -1, 1), pack).view(len(x), -1)
        for x in (mask.lo, mask.hi)
        if x is not None
    )
    members: Any = mask.members
    packed = mask.unchecked(
        q_len=mask.q_len * pack, kv_len=mask.kv_len, block=(mask.block[0] * pack, mask.block[1]), batch=mask.batch,
        heads=mask.heads, full=mask.full, partial=mask.partial, lo=lo, hi=hi, rules=mask.rules, sizes=mask.sizes,
        label=mask.label, members=members._replace(rows=members.rows * pack),
    )  # fmt: skip
    packed._memo["heavy"] = mask.heavy_blocks
    if (part := MaskPart.of(mask)) is not None:
        packed._memo[PART] = replace(part, whole=packed_mask(part.whole, pack))
    return packed


def halves_tiles(p: AttentionProblem) -> bool:
    """Whether steps of 64 rows are left out where none of their tokens has a block that others of its tile have.

    Without window and sinks no query sees a block without its bit. Heads of at most 64 columns take 128 queries a step.
    """
    return p.pack >= 4 and p.packed.block[0] == 128 and not p.member_ends and max(p.dim, p.v_dim) > 64


def halved_tiles(mask: BlockMask) -> BlockMask:
    """A packed mask of one word an entry, without window and sinks, in tiles of half as many tokens. No sync.

    Row 2 i + s of a head has the partial blocks of row i with bits of its half s, and its full blocks. Blocks of 64
    keys become pairs, all partial: bits of the second one come after those of the first. Rows may share entries; the
    halves of each have places of their own, on a GPU others in every run.
    """
    (bq, bk), members, device = mask.block, mask.members, mask.device
    assert members is not None
    assert mask.rules is not None
    bits, tiles, paired = bq // 2 // members.rows, -(-2 * mask.q_len // bq), bk == PAIR // 2
    partial = mask.sizes.stored if paired else mask.sizes.partial
    rows, room = mask.batch * mask.heads * tiles, max(1, 2 * partial)
    starts, counts, full_starts, full_counts = torch.empty(
        (4, rows), dtype=torch.int32, device=device
    ).unbind()
    indices, words = torch.empty((2, room), dtype=torch.int32, device=device).unbind()
    made = starts, counts, indices, words, full_starts, full_counts
    (launched_halves if device.type == "cuda" else halves)(mask, bits, tiles, made)
    sizes = mask.sizes
    halved = mask.unchecked(
        q_len=mask.q_len, kv_len=mask.kv_len, block=(bq // 2, PAIR), batch=mask.batch, heads=mask.heads,
        full=BlockLists(full_starts, full_counts, mask.full.indices), partial=BlockLists(starts, counts, indices),
        lo=mask.lo, hi=mask.hi, rules=words, label=mask.label, members=members,
        sizes=sizes._replace(stored=2 * sizes.stored, partial=2 * partial, exact=False),
    )  # fmt: skip
    if (part := MaskPart.of(mask)) is not None:
        whole, of, blocks = halved_tiles(part.whole), part.tiles, part.blocks
        if of is not None:
            half = torch.arange(2, device=device)
            of = torch.where(of[..., None] < 0, -1, 2 * of[..., None] + half).flatten(1)[:, : whole.grid[0]]
        if blocks is not None and paired:  # a part keeps pairs, or the first of one alone
            blocks = torch.where(blocks[:, ::2] < 0, -1, blocks[:, ::2] // 2)
        halved._memo[PART] = replace(part, whole=whole, tiles=of, blocks=blocks)
    return halved


def halves(mask: BlockMask, bits: int, tiles: int, made: tuple[Tensor, ...]) -> None:
    """The lists of `halved_tiles`."""
    starts, counts, indices, words, full_starts, full_counts = made
    words.zero_()
    rules: Any = mask.rules
    before, device, paired = mask.grid[0], starts.device, mask.block[1] == PAIR // 2
    number = torch.arange(len(starts), device=device)
    row, half = number // tiles * before + number % tiles // 2, number % tiles % 2
    full_starts.copy_(mask.full.starts[row])
    full_counts.copy_(torch.zeros_like(row) if paired else mask.full.counts[row])
    found, room = [], torch.zeros(mask.rows, dtype=torch.int64, device=device)
    for lists, words_of in ((mask.partial, rules), (mask.full, None))[: 1 + paired]:
        first, n = lists.starts[row].long(), lists.counts[row].long()
        each = torch.repeat_interleave(number, n)
        entry = first[each] + torch.arange(len(each), device=device) - (n.cumsum(0) - n)[each]
        own = torch.full_like(each, -1) if words_of is None else words_of[entry].long()
        own = own >> (half[each] * bits) & ((1 << bits) - 1)
        found.append((each, lists.indices[entry].long(), own))
        room += lists.counts
    each, column, own = (torch.cat(parts) for parts in zip(*found, strict=True))
    if paired:  # the bits of both blocks of a pair, which have no place in common, are added
        columns = mask.grid[1] // 2 + 1
        pair, own = each * columns + column // 2, own << (column % 2 * bits)
        pair, at = pair.unique(return_inverse=True)
        own = torch.zeros_like(pair).index_add_(0, at, own)
        each, column = pair // columns, pair % columns
    starts.copy_(2 * (room.cumsum(0) - room)[row] + half * room[row])
    there = own != 0
    counts.copy_(torch.bincount(each[there], minlength=len(number)))
    ends = counts.cumsum(0)
    each, column, own = each[there], column[there], own[there]
    at = starts[each] + torch.arange(len(each), device=device) - (ends - counts)[each]
    indices[at] = column.int()
    words[at] = own.int()


def launched_halves(mask: BlockMask, bits: int, tiles: int, made: tuple[Tensor, ...]) -> None:
    """As `halves`, by a launch."""
    taken = torch.zeros(1, dtype=torch.int32, device=mask.device)
    args = (
        *mask.partial, *mask.full, mask.rules, *made, taken, len(mask.partial.indices), len(mask.full.indices),
        len(made[2]), mask.sizes.longest, mask.grid[0], tiles, mask.grid[1].bit_length(),
    )  # fmt: skip
    constants = bits, mask.block[1] == PAIR // 2, ENTRIES
    launch_unspecialized(_halve, mask.device, mask.rows, args, constants, WARPS)


@triton.jit
def _place(indices, first, n, column, steps):
    """Places of columns among the n ascending ones from `first` on, and whether they are there."""
    low = column * 0
    high = low + n
    for _ in range(steps):
        open = low < high
        middle = (low + high) // 2
        before = open & (tl.load(indices + first + middle, mask=open, other=0) < column)
        high = tl.where(open & ~before, middle, high)
        low = tl.where(before, middle + 1, low)
    return low, (low < n) & (tl.load(indices + first + low, mask=low < n, other=-1) == column)


@triton.jit
def _merged(indices, first, n, other_indices, other_first, other_n, at, steps):
    """Of places in the ascending order of both lists: how many entries of this one come before, and whether the entry
    there is one of it.
    """
    low = tl.maximum(at - other_n, 0)
    high = tl.minimum(at, n)
    for _ in range(steps):
        open = low < high
        middle = (low + high) // 2
        own = tl.load(indices + first + middle, mask=open, other=0)
        other = tl.load(other_indices + other_first + at - middle - 1, mask=open, other=0)
        before = open & (own < other)
        high = tl.where(open & ~before, middle, high)
        low = tl.where(before, middle + 1, low)
    own = tl.load(indices + first + low, mask=low < n, other=0)
    left = at - low < other_n
    other = tl.load(other_indices + other_first + at - low, mask=left, other=0)
    return low, (low < n) & (~left | (own < other))


@triton.jit
def _pair(
    indices, first, n, other_indices, other_first, other_n, rules, rule_first, e, half, steps, LEADS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Of entries `e` of a list: their pairs of blocks, and the bits of those that they stand for in this half of the
    tile. LEADS: the list is that of partial blocks, whose words are `rules` from `rule_first` on; it stands for pairs
    of both lists. Full blocks have every bit.
    """
    ALL: tl.constexpr = (1 << BITS) - 1
    there = e < n
    column = tl.load(indices + first + e, mask=there, other=0)
    second = column % 2
    beside = e + 1 - 2 * second
    near = there & (beside >= 0) & (beside < n)
    near = near & (tl.load(indices + first + beside, mask=near, other=-1) == column + 1 - 2 * second)
    at, far = _place(other_indices, other_first, other_n, column + 1 - 2 * second, steps)
    if LEADS:
        own = tl.load(rules + rule_first + e, mask=there, other=0) >> (half * BITS) & ALL
        of_near = tl.load(rules + rule_first + beside, mask=near, other=0) >> (half * BITS) & ALL
        partner = tl.where(near, of_near, tl.where(far, ALL, 0))
    else:
        own = tl.where(there, ALL, 0)
        partner = tl.where(near, ALL, 0)
        there = there & ~far
    first_word = tl.where(second == 1, partner, own)
    second_word = tl.where(second == 1, own, partner)
    return column // 2, tl.where(there & ~(near & (second == 1)), first_word | second_word << BITS, 0)


@triton.jit
def _kept(indices, words, column, word, begin, found, room):
    """Stores the entries with bits behind those found before; how many there are then."""
    there = word != 0
    at = begin + found + tl.cumsum(there.to(tl.int32), 0) - 1
    fits = there & (at < room)  # a mask with a fault may have more
    tl.store(indices + at, column, mask=fits)
    tl.store(words + at, word, mask=fits)
    return found + tl.sum(there.to(tl.int32), 0)


@triton.jit(
    do_not_specialize=("p_size", "f_size", "room", "longest", "grid_rows", "tiles", "steps"),
    do_not_specialize_on_alignment=(
        "p_starts", "p_counts", "p_indices", "f_starts", "f_counts", "f_indices", "rules", "starts", "counts",
        "indices", "words", "full_starts", "full_counts", "taken",
    ),
)  # fmt: skip
def _halve(
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices, rules, starts, counts, indices, words, full_starts,
    full_counts, taken, p_size, f_size, room, longest, grid_rows, tiles, steps, BITS: tl.constexpr,
    PAIRED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.minimum(tl.maximum(tl.load(p_starts + row), 0), p_size)
    n = tl.maximum(tl.minimum(tl.minimum(tl.load(p_counts + row), longest), p_size - first), 0)
    f_first, f = tl.load(f_starts + row), tl.load(f_counts + row)
    most = n
    if PAIRED:
        f_first = tl.minimum(tl.maximum(f_first, 0), f_size)
        f = tl.maximum(tl.minimum(tl.minimum(f, longest), f_size - f_first), 0)
        most += f
    base = 2 * tl.atomic_add(taken, most, sem="relaxed")
    for half in tl.static_range(2):
        begin = base + half * most
        found = 0
        for start in range(0, most, ENTRIES):
            e = start + tl.arange(0, ENTRIES)
            if PAIRED:
                before, leads = _merged(p_indices, first, n, f_indices, f_first, f, e, steps)
                of_partial, word = _pair(
                    p_indices, first, n, f_indices, f_first, f, rules, first, tl.where(leads, before, n), half,
                    steps, True, BITS,
                )  # fmt: skip
                of_full, other = _pair(
                    f_indices, f_first, f, p_indices, first, n, rules, first, tl.where(leads, f, e - before), half,
                    steps, False, BITS,
                )  # fmt: skip
                column = tl.where(leads, of_partial, of_full)
                word = tl.where(leads, word, other)
            else:
                column = tl.load(p_indices + first + e, mask=e < n, other=0)
                word = tl.load(rules + first + e, mask=e < n, other=0) >> (half * BITS) & ((1 << BITS) - 1)
            found = _kept(indices, words, column, word, begin, found, room)
        tile = row % grid_rows * 2 + half
        out = row // grid_rows * tiles + tile
        tl.store(starts + out, begin, mask=tile < tiles)
        tl.store(counts + out, found, mask=tile < tiles)
        tl.store(full_starts + out, f_first, mask=tile < tiles)
        tl.store(full_counts + out, 0 if PAIRED else f, mask=tile < tiles)


def packed_shape(x: Tensor, pack: int) -> tuple[int, ...]:
    """Of [B, H, S, ...]: [B, H / pack, S * pack, ...]."""
    batch, heads, length, *more = x.shape
    return batch, heads // pack, length * pack, *more


def of_tokens(x: Tensor, pack: int) -> Tensor:
    """A view of [B, H, S, E], or [B, H, S], as [B, H / pack, S, pack, E]; E is 1 without."""
    x = x.unsqueeze(-1) if x.dim() == 3 else x
    return x.unflatten(1, (x.shape[1] // pack, pack)).transpose(2, 3)


def packed_rows(x: Tensor, pack: int) -> Tensor:
    """The rows of [B, H, S, ...] as [B, H / pack, S * pack, ...], contiguous. No sync."""
    tokens = of_tokens(x, pack)
    made = x.new_empty(packed_shape(x, pack))
    copy(tokens, made.view(tokens.shape))
    return made


def copy(x: Tensor, y: Tensor) -> None:
    """Copies x [B, G, S, pack, E] to y, of any strides; on a GPU by a launch, which recorded calls repeat."""
    if x.is_cuda:
        launched_copy(x, y)
    else:
        y.copy_(x)


def launched_copy(x: Tensor, y: Tensor) -> None:
    """As `copy`, by a launch."""
    batch, groups, tokens, pack, width = x.shape
    rows = max(1, ELEMENTS // triton.next_power_of_2(width))
    chunks = triton.cdiv(tokens * pack, rows)
    with torch.cuda.device_of(x):
        launch(
            _copy, (batch * groups * chunks,),
            x, y, groups, tokens, chunks, *x.stride(), *y.stride(),
            PACK=pack, WIDTH=width, ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=("groups", "tokens", "chunks"))
def _copy(
    x, y, groups, tokens, chunks, sx_b, sx_g, sx_s, sx_r, sx_e, sy_b, sy_g, sy_s, sy_r, sy_e,
    PACK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) // chunks
    row = tl.program_id(0) % chunks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(WIDTH)).to(tl.int64)[None, :]
    b = (group // groups).to(tl.int64)
    g = (group % groups).to(tl.int64)
    token = (row // PACK).to(tl.int64)
    r = (row % PACK).to(tl.int64)
    there = (token < tokens)[:, None] & (column < WIDTH)
    of_x = x + b * sx_b + g * sx_g + (token * sx_s + r * sx_r)[:, None] + column * sx_e
    of_y = y + b * sy_b + g * sy_g + (token * sy_s + r * sy_r)[:, None] + column * sy_e
    tl.store(of_y, tl.load(of_x, mask=there), mask=there)
