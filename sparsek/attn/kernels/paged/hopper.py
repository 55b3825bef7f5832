"""Attention of a ragged batch over keys and values in pages, on Hopper (pipeline: attention/pipeline.py).

    one tile: 128 rows of [query, head]      a step loads into shared memory, from pages that the block table names
    .------- v_dim -------.
    |    warpgroup 0      | 64               K [keys, dim]       boxes of at most a page
    |---------------------|                  V [keys, v_dim]
    |    warpgroup 1      | 64
    '---------------------'

The kernel is persistent: a CTA walks the tiles of the schedule (schedule.py), longest first, in alternating
directions. One producer warp loads Q, then for each step of keys reads the block table and loads K and V by TMA. Each
consumer warpgroup owns 64 rows and runs the online softmax, as in hopper.attention_fwd. A row is one query
of one head; `pack` query heads that share a head of keys lie side by side, so that requests of few queries fill tiles.

Steps whose keys some query does not see come first. Words of bits say which of their keys a row sees: those from
`lo` to `hi`, and the first sinks. Where the keys of a request end, its page holds anything, NaN too, and 0 times NaN
is NaN: the producer clears such rows of V in shared memory before it passes them on. Pages that no key of a step lies
in, or none that a window or the sinks reach, are not read: TMA reads zeros outside a tensor.

Where every query has its own list, a tile visits the blocks that any of its queries lists (unions.py), and a
warpgroup passes over those that none of its own lists.

Tiles of a request's last queries also hold rows of the next request; they are computed but not stored: a warpgroup
whose 64 rows all belong to the request stores by TMA, another one row by row.

Bottleneck: that of hopper.attention_fwd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import e, log2
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from sparsek.attn.kernels.forward import pipeline
from sparsek.attn.kernels.forward.pipeline import (
    LN2,
    LOG2E,
    Pipeline,
    attended,
    attended_by_some,
    fitted,
    rings,
    room_of_o,
    step_seconds,
    stored,
)
from sparsek.attn.kernels.forward.rules import bits_of, by_members
from sparsek.attn.kernels.forward.softmax import capped, with_sink
from sparsek.attn.kernels.paged.padding import clear
from sparsek.attn.kernels.paged.producer import load
from sparsek.attn.kernels.paged.schedule import FAR, Shape, capacity, schedule
from sparsek.attn.kernels.paged.steps import RECORD, allowed, masked_key, tile_at, tile_number, within
from sparsek.attn.kernels.paged.unions import MOST, entries_of, join
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.kernels import PagedCall, PagedKernel, padded_heads, padding_notes, unless_heads
from sparsek.attn.plan.problems import PagedProblem
from sparsek.engine.launch.gluon import Described, describe_heads, launch_on, tma_store, tma_store_wait
from sparsek.engine.launch.kinds import source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper


@dataclass(frozen=True, repr=False)
class Config(Pipeline):
    """A pipeline for keys in pages of `page` rows.

    `causal`, `window`, `sinks`: which keys a query sees; `list_block`: its tile's lists name them, in blocks (queries,
    keys), (0, 0) without lists. `softcap`, `sink_logits`: there is one. `lse`: write the logarithms of the sums.
    """

    dim: int
    v_dim: int
    page: int
    groups: int
    keys: int
    stages: int
    q_slots: int
    pack: int = 1
    causal: bool = True
    window: bool = False
    sinks: bool = False
    list_block: tuple[int, int] = (0, 0)
    softcap: bool = False
    sink_logits: bool = False
    lse: bool = False

    own_barriers: ClassVar[int] = 1  # for V whose last rows the producer clears
    member_ends: ClassVar[bool] = False

    @property
    def texts(self) -> list[str]:
        flags = self.true_names("causal", "window", "sinks", "softcap", "sink_logits", "lse")
        listed = f"lists of {self.list_block[0]}x{self.list_block[1]}"
        return [*self.pipeline_texts(f"pages of {self.page}"), *flags, listed]

    @property
    def lists(self) -> bool:
        return self.list_block[1] > 0

    @property
    def members(self) -> int:
        """1 if each query of a tile has a bit for each of its blocks."""
        return int(self.list_block[0] == 1)

    @property
    def words(self) -> int:
        """Words of 32 bits of an entry."""
        return -(-self.positions // 32) if self.members else 0

    @property
    def box(self) -> int:
        """Keys that one copy loads: they lie in one page."""
        return min(self.page, self.keys)

    @property
    def k_box(self) -> tuple[int, int]:
        """Rows and columns of a copy of K: whole rows, or 128 bytes of each where a step has several boxes."""
        return self.box, self.dim if self.box == self.keys else 64

    @property
    def v_box(self) -> tuple[int, int]:
        return self.box, self.v_dim if self.box == self.keys else 64


SOURCE = source_of(__file__, pipeline.__file__)
UNION_BLOCKS = (
    1.3  # those of a tile over those of a query: 1.15 to 1.5 where neighbours mostly agree (a guess)
)


@gluon.jit
def changed(T: gl.constexpr, s, i, masked, tile):
    """Scores after the softcap."""
    if T.softcap:
        s = capped(s, tile[3])
    return s


@gluon.jit
def no_rule(T: gl.constexpr, MASKED: gl.constexpr, i, masked, tile):
    """Nothing: `seen` finds the rule of a step itself."""
    return 0


@gluon.jit
def seen(T: gl.constexpr, MASKED: gl.constexpr, s, rule, i, masked, tile):
    """Scores of the keys of step i that a row sees, -inf elsewhere."""
    of_tile, bounds, lists, bend, member = tile
    lo, hi, sunk = bounds
    if MASKED:
        key = masked_key(T, of_tile[0], lists, i)
        if T.members > 0:
            words, row, inner = member
            SUB: gl.constexpr = T.list_block[1] // T.keys
            words += gl.maximum(of_tile[0][0] + i // SUB, 0) * T.words
            s = by_members(T, s, key, words, row, lo, hi, inner, 0)
        else:
            s = allowed(T, s, key, lo, hi, sunk)
    else:
        s = within(T, s, of_tile, lists, i - masked, lo, hi, sunk)
    return s


@gluon.jit
def sees(T: gl.constexpr, i, masked, tile):
    """The bits of a warpgroup's queries in masked step i; 0 from step `masked` on."""
    SUB: gl.constexpr = T.list_block[1] // T.keys
    words, row, inner = tile[4]
    begin = tile[0][0][0]
    return bits_of(T, words + (begin + i // SUB) * T.words, row // T.pack, (i < masked) & (begin >= 0))


@gluon.jit
def attend(
    T: gl.constexpr, WG: gl.constexpr, o_desc, tiles, count, lists, words, outs, scales, rules, sizes, q_s, k_s, v_s,
    o_s, bars
):  # fmt: skip
    """Consumer warpgroup WG: computes its 64 rows of every tile."""
    DTYPE: gl.constexpr = o_desc.dtype
    VDIM: gl.constexpr = T.v_dim
    POSITIONS: gl.constexpr = 64 // T.pack
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    out_ptr, lse_ptr, sink_ptr, whole_rows = outs
    window, sinks = rules
    units, tokens, v_len, out_row, out_head = sizes
    scale, bend = scales
    r = WG * 64 + gl.arange(0, 64, ROW)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    for t in range(gl.program_id(0), gl.load(count) * units, gl.num_programs(0)):
        total = gl.load(count) * units
        number = tile_number(t, total)
        record = tiles + RECORD * (number // units)
        h = number % units * T.pack
        row_0 = gl.load(record)
        live = gl.load(record + 3)
        length = gl.load(record + 4)
        masked, steps, where = tile_at(T, record, h, lists)
        blocks = gl.load(record + 13)
        at = gl.load(record + 2) + r // T.pack  # the row's position among the keys
        lo = at * 0
        hi = at * 0 + length
        if T.window:
            lo = at - window + 1
        if T.causal:
            hi = gl.minimum(hi, at + 1)
        sunk = gl.minimum(hi, sinks)
        if T.window and not T.causal:
            hi = gl.minimum(hi, at + window)
        member = 0
        if T.members > 0:
            most = length
            if T.causal:
                most = gl.minimum(length, gl.load(record + 2) + WG * POSITIONS + 1)
            member = (words, WG * 64, (0, most))
        tile = ((where, masked, blocks, length), (lo, hi, sunk), lists, bend, member)
        if T.members > 0:
            acc, m, l, slot, phase = attended_by_some(
                T, changed, no_rule, seen, sees, WG, DTYPE, masked, steps, tile, scale, (q_slot, q_phase),
                (slot, phase), q_s, k_s, v_s, bars,
            )  # fmt: skip
        else:
            acc, m, l, slot, phase = attended(
                T, changed, no_rule, seen, WG, DTYPE, masked, steps, tile, scale, (q_slot, q_phase), (slot, phase),
                q_s, k_s, v_s, bars,
            )  # fmt: skip
        kept = 1.0
        if T.sink_logits:
            m, l, kept = with_sink(m, l, gl.load(sink_ptr + h + r % T.pack) * LOG2E)
        some = l != 0
        factor = gl.where(some, kept / l, 0.0)
        lse = gl.where(some, m + gl.log2(l), float("-inf"))
        acc = acc * gl.expand_dims(gl.convert_layout(factor, O_ROW), 1)
        if T.lse:
            row = (h + r % T.pack).to(gl.int64) * tokens + row_0 + r // T.pack
            gl.store(lse_ptr + row, lse * LN2, mask=r // T.pack < live)
        o = room_of_o(T, WG, q_slot, q_s, o_s)
        if (whole_rows > 0) & (live >= (WG + 1) * POSITIONS):
            o.reshape((64, VDIM)).store(acc.to(DTYPE))
            fence_async_shared()
            tma_store(o_desc, [h // T.pack, row_0 + WG * POSITIONS, 0, 0], o)
        else:
            own = WG * 64 + gl.arange(0, 64, O_ROW)
            column = gl.arange(0, VDIM, gl.SliceLayout(0, O_LAYOUT))
            base = (row_0 + own // T.pack).to(gl.int64) * out_row + (h + own % T.pack).to(gl.int64) * out_head
            there = gl.expand_dims(own // T.pack < live, 1) & gl.expand_dims(column < v_len, 0)
            gl.store(out_ptr + gl.expand_dims(base, 1) + gl.expand_dims(column, 0), acc.to(DTYPE), mask=there)
        q_slot, q_phase = stored(T, WG, (q_slot, q_phase), bars)
    tma_store_wait(0)  # shared memory must outlive the copies that read it


NUMBERS = [
    "p_size", "f_size", "list_rows", "of_list", "longest", "whole_rows", "window", "sinks", "units", "group", "pages",
    "table_row", "table_step", "tokens", "v_len", "out_row", "out_head",
]  # fmt: skip
# Compiled code is found by config and dtype, so it must be right for any address.
POINTERS = [
    "out", "table", "p_starts", "p_counts", "partial", "f_starts", "f_counts", "full", "sink_logits", "lse", "words",
]  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def attention_paged_kernel(
    q_desc, k_desc, v_desc, o_desc, out, tiles, count, table, p_starts, p_counts, partial, f_starts, f_counts, full,
    sink_logits, lse, scale, bend, p_size, f_size, list_rows, of_list, longest, whole_rows, window, sinks, units,
    group, pages, table_row, table_step, tokens, v_len, out_row, out_head, words, T: gl.constexpr,
    SOURCE: gl.constexpr,
):  # fmt: skip
    """The records of the schedule are described in schedule.py. Each stands for `units` tiles, of `pack` heads each.

    Without softcap `scale` is the softmax scale times log2(e). With it `scale` is softcap times log2(e), and `bend`
    twice the softmax scale times log2(e) over softcap. `whole_rows`: rows of out may be stored by TMA. Strides of out
    and of the table are in elements. `words`: those of joined lists (unions.py), or None. SOURCE only enters the cache
    key.
    """
    GROUPS: gl.constexpr = T.groups
    q_s, k_s, v_s, o_s, bars = rings(T, q_desc, o_desc)
    # fmt: off
    lists = (p_starts, p_counts, partial, p_size, f_starts, f_counts, full, f_size, list_rows, of_list, longest)
    # fmt: on
    outs = (out, lse, sink_logits, whole_rows)
    of_load = (units, group, pages, table_row, table_step, window, sinks)
    of_attend = (units, tokens, v_len, out_row, out_head)
    producer = (q_desc, k_desc, v_desc, tiles, count, lists, table, of_load, q_s, k_s, v_s, bars)
    consumer = (
        o_desc, tiles, count, lists, words if T.members > 0 else 0, outs, (scale, bend), (window, sinks), of_attend,
        q_s, k_s, v_s, o_s, bars
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize([(attend, (T, 0) + consumer), (load, (T,) + producer)], [1], [40])
    else:
        gl.warp_specialize(
            [(attend, (T, 0) + consumer), (attend, (T, 1) + consumer), (load, (T,) + producer)],
            [4, 1],
            [240, 24],
        )


class Work(NamedTuple):
    """The problem's facts that a launch needs: the rules of the schedule, most CTAs, and blocks of a list."""

    shape: Shape
    ctas: int
    longest: int


class HopperPaged:
    """Implements the Kernel protocol for the device code above."""

    name = "hopper.attention_paged"

    def why_not(self, p: PagedProblem) -> list[str]:
        reasons = unless_hopper(p)
        if p.kv_dtype != p.dtype:
            reasons.append(f"multiplies pages of q's dtype, {p.dtype}, not {p.kv_dtype}")
        reasons += unless_heads(p, "registers hold heads of at most 256", 256)
        reasons += unless_aligned(p, "strides of q and the pages")
        if p.page < 16 or p.page & (p.page - 1):
            reasons.append(
                f"a copy lies in one page, so pages must be powers of two from 16 on, not {p.page}"
            )
        if max(p.tokens, p.max_k) >= FAR:
            reasons.append("positions are 32 bits: there may be 2^30 queries, and as many keys of a request")
        if p.list_heads and not list(_tiles(p)):
            reasons.append(
                f"a tile of 64 or 128 rows lies in one tile of the lists, or joins {MOST} blocks at most of its "
                "queries' lists and under 2^31 words in all, for each head of k or for all; and a step lies in one "
                f"block, of 64 keys or more: not {p.list_block}, with {p.listed} blocks in lists of {p.list_heads} "
                f"heads for {p.tokens} queries"
            )
        return reasons

    def default(self, p: PagedProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: PagedProblem) -> Iterable[Config]:
        rules = {
            "causal": p.causal, "window": p.window > 0, "sinks": p.window > 0 and p.sinks > 0, "softcap": p.softcap,
            "list_block": p.list_block if p.list_heads else (0, 0), "sink_logits": p.sink_logits, "lse": p.lse,
        }  # fmt: skip
        found: dict[Config, None] = {}
        for groups, keys, pack in _tiles(p):
            c = Config(*padded_heads(p, 64), p.page, groups, keys, 2, 2, pack, **rules)
            found[fitted(c, p.card.smem_bytes)] = None
        return list(found)

    def seconds(self, p: PagedProblem, c: Config) -> float:
        """Steps of all tiles over SMs, and begin and end of every tile; or the memory traffic, if that is longer.

        A step takes 4 % more with packed heads (H100 and H200: 1 to 4 %), and 15 % more where lists choose the keys (8
        to 28 % at 64K and 128K). Every request has `max_q` queries and `max_k` keys, as far as there are tokens.
        """
        requests = max(1, min(p.requests, -(-p.tokens // max(1, p.max_q))))
        tiles = requests * -(-p.tokens // (requests * c.positions)) * (p.q_heads // c.pack)
        sms = p.card.sm_count
        seen = min(p.seen, p.max_k - min(p.max_q, p.max_k) // 2) if p.causal else p.seen
        per_tile = max(1.0, seen / c.keys)
        if p.window and not p.list_heads:
            per_tile += c.positions / c.keys
        if c.members and min(c.positions, p.max_q) > 1:
            per_tile *= UNION_BLOCKS
        slower = (1.04 if c.pack > 1 else 1.0) * (1.15 if p.list_heads else 1.0)
        step = step_seconds(c, p.card, 3.0 if c.softcap else 1.0) * slower
        tile = per_tile * step + 1.2e-6 * c.rows / 128
        compute = max(tiles * tile / sms, tile * c.ctas_per_sm)
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return max(compute, moved) + (2 + c.members) * p.card.launch_seconds

    def notes(self, p: PagedProblem, c: Config) -> list[str]:
        shared = f"{c.pack} query heads share a tile: its rows are {c.positions} queries of each"
        return [shared] * (c.pack > 1) + padding_notes(p, c)

    def prepare(self, p: PagedProblem, c: Config, device: torch.device) -> Work:
        bound = FAR
        if p.list_heads:
            bound = p.listed * p.list_block[1]
        elif p.window:
            bound = p.window + p.sinks + c.positions
        # No key is further, and sums with positions fit int32.
        window, sinks = min(p.window, FAR), min(p.sinks, FAR)
        shape = Shape(c.positions, c.keys, p.causal, window, sinks, c.list_block[0], min(bound, FAR))
        return Work(shape, p.card.sm_count * c.ctas_per_sm, p.listed)

    def launch(self, c: Config, work: Work, call: PagedCall) -> None:
        q, k, v, table, out = call.q, call.k, call.v, call.block_table, call.out
        if 0 in q.shape or call.seq_lens.shape[0] == 0:
            return
        clear(call)
        tiles, count = schedule(call, work.shape)
        units = q.shape[1] // c.pack
        # TMA stores whole rows of an aligned `out`; otherwise its description is not used, and q's is as good.
        whole_rows = out.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in out.stride()[:2])
        bend, scale = 0.0, call.scale * log2(e)
        if c.softcap:
            bend, scale = 2 * scale / call.softcap, call.softcap * log2(e)
        lists, words = _lists(call.lists, tiles), None
        described = (
            _rows(q, c.pack, c.dim), describe_heads(k, *c.k_box), describe_heads(v, *c.v_box),
            _rows(out if whole_rows else q, c.pack, c.v_dim),
        )  # fmt: skip
        optional = (tiles if x is None else x for x in (call.sink_logits, call.lse))
        of_lists = (0, 0, 0, 1, 0)
        if call.lists:
            # Steps of a row fit int32, whatever bound and counts the caller has given.
            p_size, f_size = call.lists.partial.indices.numel(), call.lists.full.indices.numel()
            longest = min(work.longest, p_size + f_size, 1 << 24)
            of_lists = (p_size, f_size, call.lists.tiles, q.shape[1] // call.lists.heads, longest)
            if c.members:
                most_keys = table.shape[1] * k.shape[2]
                made = join(tiles, count, call.lists, longest, c.positions, c.causal, most_keys)
                lists, words, size = made.lists, made.words, made.lists[2].numel()
                of_lists = (size, size, made.tiles, of_lists[3], made.longest)
        sizes = (
            *of_lists, int(whole_rows), work.shape.window, work.shape.sinks, units,
            q.shape[1] // k.shape[1], k.shape[0], *table.stride(), q.shape[0], out.shape[2],
            *out.stride()[:2],
        )  # fmt: skip
        args = (
            *described,
            out,
            tiles,
            count,
            table,
            *lists,
            *optional,
            scale,
            bend,
            *sizes,
            words,
            c,
            SOURCE,
        )
        ctas = min(work.ctas, capacity(q.shape[0], call.seq_lens.shape[0], c.positions) * units)
        launch_on(out.device, attention_paged_kernel, ctas, args, c.options)


def _tiles(p: PagedProblem) -> Iterable[tuple[int, int, int]]:
    """Warpgroups, keys of a step and packed heads that suit `p`, in order of preference."""
    widest = 64 if max(p.dim, p.v_dim) > 128 else 128
    per_list = p.group if p.list_heads in (0, 1, p.kv_heads) else 1
    packs = [pack for pack in (64, 32, 16, 8, 4, 2, 1) if per_list % pack == 0]
    for groups in (2, 1):
        for keys in (128, 64):
            if keys > widest or (groups == 1 and keys == 128 and max(p.dim, p.v_dim) > 64):
                continue
            for pack in (packs[0], 1) if packs[0] > 1 and not p.list_heads else packs:
                if p.list_heads and p.list_block[1] % keys:
                    continue
                if p.list_block[0] == 1:  # the tile of most heads, which has the fewest lists to join
                    positions = 64 * groups // pack
                    rows = p.list_heads * capacity(p.tokens, p.requests, positions)
                    words = rows * positions * p.listed * -(-positions // 32)
                    many = positions * entries_of(p.listed) > MOST or words >= 2**31
                    if pack != packs[0] or p.list_heads not in (1, p.kv_heads) or many:
                        continue
                elif p.list_heads and p.list_block[0] % (64 * groups // pack):
                    continue
                yield groups, keys, pack


def _rows(x: Tensor, pack: int, dim: int) -> Described:
    """TMA description of q or out [tokens, heads, D]: 64 rows of [query, head of the pack]."""
    (tokens, h, d), (row, head, _) = x.shape, x.stride()
    return Described(x, (h // pack, tokens, pack, d), (head * pack, row, head, 1), (1, 64 // pack, pack, dim))


def _lists(lists: PageLists | None, none: Tensor) -> tuple[Tensor, ...]:
    """Starts, counts and entries of both lists; `none` for a list without entries."""
    if lists is None:
        return (none,) * 6
    return tuple(none if x.numel() == 0 else x for x in (*lists.partial, *lists.full))


KERNEL: PagedKernel = HopperPaged()
