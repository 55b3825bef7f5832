"""Attention over paged keys in plain Triton: any CUDA GPU from sm_80, and Triton's interpreter.

    out[q] = sum over seen keys j of exp(s_j - lse[q]) v[j],   lse[q] = log(sum of exp(s_j) + exp(sink)),
    s_j = scale q.k_j, or softcap tanh(scale q.k_j / softcap)

A tile is up to tile_m rows of one request: (query, head) pairs of heads that share keys, so K and V are read once for
a group of heads. Its keys are walked in steps of tile_n, in float32 with a running maximum, and cut into parts:

    row of a tile        q0 h0 | q0 h1 | q0 h2 | q0 h3 | q1 h0 | ...                  tile_m of them, the rest idle
    steps of a tile      [ sinks ][ window, or all keys up to the last query ]        or blocks of its two lists
    parts of these       | part 0      | part 1      | part 2      | part 3  |        one work item each
    pages                table[first key // page], read a step ahead; of each key, where pages are shorter than a step

A part has at least PART keys, and a tile at most `most_parts(p, c)` of them, a number of the problem. So where a tile
is cut depends on its own keys alone, and the bits of a request do not depend on the others. Parts write float32 sums,
which a second launch adds in order (portable_parts.py); a tile of one part is written at once.

Work items are found on the device: every program walks the lengths of requests, 128 at a time, and takes every n-th
item. There are more programs than run at once, so an SM that is done sooner takes more of them. There is no schedule to
prepare, and nothing to update when lengths change. Page ids are clamped to the cache and keys to the table, so nothing
else is read whatever tables and lengths hold.

FP8: a pair of e4m3 values is loaded as one int16, and becomes an even and an odd fp16 (portable_steps.py). Both
products consist of an even and an odd one, so no value changes its place. Rows of q are scaled by powers of two into
fp16, without loss.

Bottleneck: with few queries the memory; many small programs on an SM keep loads in flight while others multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.paged import portable_parts
from sparsek.attn.kernels.paged.padding import clear_padding
from sparsek.attn.kernels.paged.portable_steps import FP16_OVER_E4M3, walk, within_fp16
from sparsek.attn.plan.kernels import PagedCall, PagedKernel
from sparsek.attn.plan.problems import PagedProblem
from sparsek.core import dtypes
from sparsek.engine.launch import tensors
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import at

LOG2E = 1.4426950408889634
PART = 512  # keys: the shortest part, unless a tile has fewer
WAVES = 4  # programs of a launch over those that run at once
CHUNK = 128  # requests whose lengths are read together
FURTHEST = 2**30 - 256  # keys of a request, and of a window: sums of two and a tile fit int32
PAGES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Config(KernelConfig):
    """Rows of a tile, keys of a step: powers of two from 16 up. `ctas`: programs an SM, where tiles are cut."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    ctas: int = 4

    SIDES = ("tile_m", "tile_n")
    KERNEL = "portable.attention_paged"


class Work(NamedTuple):
    """`programs` of the launch, for a list of work that has at most `parts` parts of a tile, and what `launch` needs of
    the problem.
    """

    pack: int
    parts: int
    most: int
    programs: int
    max_q: int
    max_k: int
    causal: bool
    window: int
    sinks: int
    native: bool


# New lengths, tables and lists compile nothing: Triton does not specialize for these values.
_NUMBERS = (
    "tokens", "requests", "pages", "row_entries", "max_q", "max_k", "window", "sinks", "list_tiles", "longest",
    "full_size", "partial_size", "out_end", "lse_end",
)  # fmt: skip
_INTS = (
    "table", "seq_lens", "cu_seqlens_q", "counts", "full_starts", "full_counts", "full_columns", "partial_starts",
    "partial_counts", "partial_columns",
)  # fmt: skip
_FLOATS = ("sink_logits", "k_scale", "v_scale", "lse", "lse_part")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=(*_INTS, *_FLOATS))
def _attention(
    q, k, v, table, seq_lens, cu_seqlens_q, sink_logits, k_scale, v_scale, out, lse, o_part, lse_part, counts,
    full_starts, full_counts, full_columns, partial_starts, partial_counts, partial_columns,
    scale, cap, tokens, requests, pages, row_entries, max_q, max_k, window, sinks, list_tiles, longest, full_size,
    partial_size, out_end, lse_end, sq_m, sq_h, sq_d, sk_p, sk_h, sk_d, sv_p, sv_h, sv_d, so_m, so_h, so_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, LIST_GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    TM: tl.constexpr, TN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """D and DV count elements of K and V: pairs, if FP8. BLOCK_KEYS is 0 without lists. WHOLE: steps whose every key is
    seen have a loop of their own, without tests.
    """
    LISTS: tl.constexpr = BLOCK_KEYS > 0
    POSITIONS: tl.constexpr = min(TM // PACK, BLOCK_Q) if LISTS else TM // PACK
    TILE_Q: tl.constexpr = BLOCK_Q if LISTS else POSITIONS  # queries of a row of the lists
    SUBS: tl.constexpr = (TILE_Q + POSITIONS - 1) // POSITIONS
    UNITS: tl.constexpr = HEADS // PACK
    BLOCK_STEPS: tl.constexpr = BLOCK_KEYS // TN
    KW: tl.constexpr = max(16, triton.next_power_of_2(D))
    VW: tl.constexpr = max(16, triton.next_power_of_2(DV))
    LOG2E: tl.constexpr = 1.4426950408889634

    clear_padding(
        out, lse, cu_seqlens_q, tokens, requests, out_end, lse_end, HEADS, 2 * DV if FP8 else DV, so_m, so_h, so_d,
        lse is not None,
    )  # fmt: skip
    index = tl.arange(0, CHUNK)
    following = tl.program_id(0)  # this program's next item, from the chunk's first one on
    list_before = 0
    for start in tl.range(0, requests, CHUNK):
        there = start + index < requests
        token_0 = tl.load(cu_seqlens_q + start + index, mask=there, other=0)
        many = tl.load(cu_seqlens_q + start + index + 1, mask=there, other=0) - token_0
        token_0 = tl.minimum(tl.maximum(token_0, 0), tokens)
        many = tl.maximum(tl.minimum(tl.minimum(many, max_q), tokens - token_0), 0)
        keys = tl.load(seq_lens + start + index, mask=there, other=0)
        keys = tl.minimum(tl.maximum(keys, 0), max_k)
        list_rows = (many + TILE_Q - 1) // TILE_Q
        if LISTS:
            most_steps = keys * 0 + longest * BLOCK_STEPS
        else:
            most_steps = (keys + TN - 1) // TN
            if WINDOWED:
                reach = (window if CAUSAL else 2 * window) + POSITIONS
                most_steps = tl.minimum(most_steps, (sinks + TN - 1) // TN + (reach + TN - 1) // TN + 1)
        parts = tl.maximum(tl.minimum((most_steps + SHORTEST - 1) // SHORTEST, MOST), 1)
        items = list_rows * SUBS * parts * UNITS
        ends = tl.cumsum(items, 0)
        in_chunk = tl.sum(items, 0)

        for item in tl.range(following, in_chunk, tl.num_programs(0)):
            r = tl.sum((ends <= item).to(tl.int32), 0)
            own = index == r
            n = tl.sum(tl.where(own, many, 0), 0)
            length = tl.sum(tl.where(own, keys, 0), 0)
            token = tl.sum(tl.where(own, token_0, 0), 0)
            of_tile = tl.sum(tl.where(own, parts, 0), 0)
            local = item - tl.sum(tl.where(index < r, items, 0), 0)
            unit = local % UNITS
            part = local // UNITS % of_tile
            list_row = (n + TILE_Q - 1) // TILE_Q
            tile = list_row * SUBS - 1 - local // UNITS // of_tile  # late queries may see more keys: first
            list_row = tile // SUBS
            begin_q = list_row * TILE_Q + tile % SUBS * POSITIONS
            end_q = tl.minimum(tl.minimum(begin_q + POSITIONS, list_row * TILE_Q + TILE_Q), n)

            # Keys that a query of the tile sees: `first_seen` to `end_seen`, and the sinks.
            first_position = length - n + begin_q
            last_position = length - n + end_q - 1
            end_seen = length
            first_seen = 0
            if CAUSAL:
                end_seen = tl.minimum(length, last_position + 1)
            if WINDOWED:
                first_seen = tl.maximum(first_position - window + 1, 0)
                if not CAUSAL:
                    end_seen = tl.minimum(length, tl.maximum(last_position + window, sinks))
            end_seen = tl.maximum(end_seen, 0)
            lists = (0, 0, 0, 0, 0, 0)
            if LISTS:
                line = list_before + tl.sum(tl.where(index < r, list_rows, 0), 0) + list_row
                given = line < list_tiles
                line += unit * PACK // LIST_GROUP * list_tiles
                full_start = tl.load(full_starts + line, mask=given, other=0)
                full_start = tl.minimum(tl.maximum(full_start, 0), full_size)
                full_count = tl.load(full_counts + line, mask=given, other=0)
                full_count = tl.minimum(tl.minimum(full_count, longest), full_size - full_start)
                full_count = tl.maximum(full_count, 0)
                partial_start = tl.load(partial_starts + line, mask=given, other=0)
                partial_start = tl.minimum(tl.maximum(partial_start, 0), partial_size)
                partial_count = tl.load(partial_counts + line, mask=given, other=0)
                partial_count = tl.minimum(
                    tl.minimum(partial_count, longest - full_count), partial_size - partial_start
                )
                partial_count = tl.maximum(partial_count, 0)
                lists = (full_columns, full_start, full_count, partial_columns, partial_start, partial_count)
                sink_steps = 0
                low_step = 0
                steps = (full_count + partial_count) * BLOCK_STEPS
                whole_from = 0
                whole_to = full_count * BLOCK_STEPS
            else:
                low_step = first_seen // TN
                end_step = tl.maximum((end_seen + TN - 1) // TN, low_step)
                sink_steps = 0
                whole_from = low_step
                whole_to = length
                if CAUSAL:
                    whole_to = tl.maximum(tl.minimum(first_position + 1, length), 0)
                if WINDOWED:
                    sink_steps = tl.minimum((tl.minimum(sinks, end_seen) + TN - 1) // TN, low_step)
                    whole_from = (tl.maximum(last_position - window + 1, 0) + TN - 1) // TN
                    if not CAUSAL:
                        whole_to = tl.maximum(tl.minimum(first_position + window, length), 0)
                whole_to = whole_to // TN
                steps = sink_steps + end_step - low_step
                whole_from += sink_steps - low_step
                whole_to += sink_steps - low_step
            if end_q <= begin_q:
                steps = 0

            part_steps = tl.maximum((steps + MOST - 1) // MOST, SHORTEST)
            number = tl.maximum((steps + part_steps - 1) // part_steps, 1)
            if part < number:
                begin = part * part_steps
                end = tl.minimum(begin + part_steps, steps)
                row = tl.arange(0, TM)
                query = begin_q + row // PACK
                live = query < end_q
                head = unit * PACK + row % PACK
                position = length - n + query
                kv_head = (unit * PACK // GROUP).to(tl.int64)
                queries = q + (token + query).to(tl.int64)[:, None] * sq_m + head.to(tl.int64)[:, None] * sq_h
                col = tl.arange(0, KW)
                inside = live[:, None] & (col < D)[None, :]
                factor = scale
                if k_scale is not None:
                    factor *= tl.load(k_scale + (kv_head if K_SCALES > 1 else 0))
                if FP8:
                    even = tl.load(queries + (at(2 * col, WIDE) * sq_d)[None, :], mask=inside, other=0.0)
                    odd = tl.load(queries + (at(2 * col + 1, WIDE) * sq_d)[None, :], mask=inside, other=0.0)
                    q_tile, q_odd, back = within_fp16(even, odd)
                    factor = back * (factor if NATIVE else factor * FP16_OVER_E4M3)
                else:
                    q_tile = tl.load(queries + (at(col, WIDE) * sq_d)[None, :], mask=inside, other=0.0)
                    q_odd = q_tile
                    if CAPPED:
                        factor = factor + tl.zeros((TM,), dtype=tl.float32)

                total = tl.zeros((TM,), dtype=tl.float32)
                top = tl.full((TM,), float("-inf"), dtype=tl.float32)
                acc = tl.zeros((TM, VW), dtype=tl.float32)
                acc_odd = tl.zeros((TM, VW), dtype=tl.float32) if FP8 else total
                sums = (acc, acc_odd, total, top)
                own_table = table + (start + r).to(tl.int64) * row_entries
                entries = (length + PAGE - 1) // PAGE
                spans = (sink_steps, low_step)
                bounds = (length, first_seen, end_seen, window, sinks)
                own_k = k + kv_head * sk_h
                own_v = v + kv_head * sv_h
                # Steps with a rule, then those whose every key is seen, then again some with a rule. Without WHOLE the
                # first walk takes all steps; without a window no step with a rule comes first. A walk without a step is
                # passed over where no list is: it would load a page, and begin and end a pipeline.
                edges = (begin, end, end, end)
                if WHOLE:
                    whole = tl.minimum(tl.maximum(whole_from, begin), end)
                    edges = (begin, whole, tl.minimum(tl.maximum(whole_to, whole), end), end)
                FIRST: tl.constexpr = 1 if WHOLE and not WINDOWED else 0
                LAST: tl.constexpr = 3 if WHOLE else 1
                for i in tl.static_range(FIRST, LAST):
                    if LISTS or not WHOLE or edges[i] < edges[i + 1]:
                        sums = walk(
                            sums, q_tile, q_odd, own_k, own_v, own_table, lists, spans, bounds, position, factor, cap,
                            edges[i], edges[i + 1], entries, pages,
                            sk_p, sk_d, sv_p, sv_d, SK_N, SV_N, PAGE, TN, D, DV, KW, VW, BLOCK_KEYS, BLOCK_STEPS,
                            2 if i != 1 else 1 if LISTS else 0, CAUSAL, WINDOWED, CAPPED, FP8, NATIVE, WIDE,
                        )  # fmt: skip
                acc, acc_odd, total, top = sums

                WIDTH: tl.constexpr = 2 * VW if FP8 else VW
                if FP8:
                    acc = tl.reshape(tl.join(acc, acc_odd), (TM, WIDTH))
                    if not NATIVE:
                        acc *= FP16_OVER_E4M3
                out_col = tl.arange(0, WIDTH)
                stored = live[:, None] & (out_col < (2 * DV if FP8 else DV))[None, :]
                place = (token + query).to(tl.int64) * HEADS + head
                if MOST > 1:
                    tl.store(counts + place, number, mask=live & (part == 0))
                    if number > 1:
                        # Keys and values stream through L2 and would take the place of these, which are read soon.
                        where = (tokens.to(tl.int64) * HEADS) * part + place
                        total = tl.where(total == 0.0, 1.0, total)
                        tl.store(
                            lse_part + where, top + tl.log2(total), mask=live, eviction_policy="evict_last"
                        )
                        to = o_part + where[:, None] * (2 * DV if FP8 else DV) + out_col[None, :]
                        tl.store(to, acc / total[:, None], mask=stored, eviction_policy="evict_last")
                if number == 1:
                    if sink_logits is not None:
                        sink = tl.load(sink_logits + head) * LOG2E
                        now = tl.maximum(top, sink)
                        base = tl.where(now == float("-inf"), 0.0, now)
                        shrink = tl.exp2(top - base)
                        acc *= shrink[:, None]
                        total = total * shrink + tl.exp2(sink - base)
                        top = now
                    # A query without any key has total 0 and top -inf: it gets 0 / 1, and -inf + 0.
                    total = tl.where(total == 0.0, 1.0, total)
                    acc = acc / total[:, None]
                    if v_scale is not None:
                        acc *= tl.load(v_scale + (kv_head if V_SCALES > 1 else 0))
                    to = (
                        out + (token + query).to(tl.int64)[:, None] * so_m + head.to(tl.int64)[:, None] * so_h
                    )
                    to += (at(out_col, WIDE) * so_d)[None, :]
                    tl.store(to, acc.to(out.dtype.element_ty), mask=stored)
                    if lse is not None:
                        to = lse + head.to(tl.int64) * tokens + (token + query)
                        tl.store(to, (top + tl.log2(total)) * 0.6931471805599453, mask=live)

        done = (tl.maximum(in_chunk - following, 0) + tl.num_programs(0) - 1) // tl.num_programs(0)
        following += done * tl.num_programs(0) - in_chunk
        if LISTS:
            list_before += tl.sum(list_rows, 0)


def padded(dim: int, fp8: bool) -> int:
    """Columns of a tile of K or V: a power of two, and enough for a product of pairs, or of single values."""
    return max(32 if fp8 else 16, 1 << (dim - 1).bit_length())


def pack(p: PagedProblem) -> int:
    """Heads of one tile: those that share keys, and lists of blocks, but at most 128."""
    shared = p.q_heads // max(p.kv_heads, p.list_heads)
    return max(n for n in range(1, min(shared, 128) + 1) if shared % n == 0)


def _positions(p: PagedProblem, c: Config) -> tuple[int, int]:
    """Queries of one tile, and of as many tiles as share a row of the lists."""
    positions = c.tile_m // pack(p)
    return (min(positions, p.list_block[0]), p.list_block[0]) if p.list_heads else (positions, positions)


def _tiles(p: PagedProblem, c: Config, requests: int, tokens: int) -> int:
    """The most tiles of so many requests with so many queries together."""
    positions, together = _positions(p, c)
    rows = min(tokens // together + min(requests, tokens), requests * -(-p.max_q // together))
    return rows * -(-together // positions) * (p.q_heads // pack(p))


def _steps(p: PagedProblem, c: Config) -> int:
    """The most steps of a tile."""
    if p.list_heads:
        return p.listed * (p.list_block[1] // c.tile_n)
    steps = -(-p.max_k // c.tile_n)
    if p.window:
        reach = p.window * (1 if p.causal else 2) + _positions(p, c)[0]
        steps = min(steps, -(-p.sinks // c.tile_n) - (-reach // c.tile_n) + 1)
    return steps


def _width(p: PagedProblem) -> int:
    """Columns of the wider tile, K's or V's."""
    return max(padded(d, p.kv_dtype == "e4m3") for d in (p.dim, p.v_dim))


def _converts(p: PagedProblem) -> bool:
    """Whether the card has an instruction that converts e4m3."""
    return p.card.capability >= (8, 9)


def most_parts(p: PagedProblem, c: Config) -> int:
    """The most parts of a tile: enough that one request occupies every SM. It does not depend on other requests."""
    alone = _tiles(p, c, 1, p.max_q)
    return max(1, min(portable_parts.MOST, max(portable_parts.MOST // p.max_q, -(-p.card.sm_count // alone))))


def parts(p: PagedProblem, c: Config) -> int:
    """The parts of the longest tile that the problem allows, at most."""
    return max(1, min(most_parts(p, c), -(-_steps(p, c) // (PART // c.tile_n))))


def _shared(p: PagedProblem, c: Config) -> int:
    """Bytes of shared memory: tiles of K and V in flight, q and P where products read them there."""
    fp8 = p.kv_dtype == "e4m3"
    d, dv = padded(p.dim, fp8), padded(p.v_dim, fp8)
    wgmma = p.card.capability[0] == 9 and c.tile_m >= 64 and c.num_warps % 4 == 0
    buffers = c.num_stages if wgmma else max(1, c.num_stages - 1)
    held = buffers * c.tile_n * (d + dv) * dtypes.itemsize(p.kv_dtype)
    other = c.tile_m * d + (c.tile_n * (d + dv) if fp8 and wgmma else 0) + c.tile_m * c.tile_n
    return held + 2 * other + 2048


# By tile_m: tile_n, warps, stages, programs an SM, for head dims up to 64, 128 and 256.
_Row = tuple[tuple[int, int, int, int], ...]
# fmt: off
TABLES: dict[int, tuple[_Row, _Row, _Row]] = {
    16: (((64, 1, 4, 4), (64, 2, 4, 4), (128, 4, 4, 2), (32, 1, 4, 8)),
         ((32, 1, 3, 6), (64, 4, 3, 3), (32, 2, 4, 4), (64, 4, 4, 2), (32, 1, 4, 4), (64, 2, 3, 3), (128, 4, 3, 1)),
         ((32, 2, 4, 2), (32, 4, 4, 2), (64, 4, 3, 1))),
    32: (((64, 2, 4, 4), (64, 4, 4, 4)),
         ((64, 4, 3, 3), (32, 2, 4, 4), (64, 4, 4, 2)),
         ((32, 4, 4, 2), (32, 4, 3, 2))),
    64: (((64, 4, 3, 3), (128, 8, 3, 2)),
         ((64, 4, 3, 2), (128, 8, 2, 1), (64, 4, 2, 2)),
         ((32, 8, 3, 1), (64, 8, 2, 1), (32, 8, 2, 2))),
    128: (((128, 8, 3, 1), (64, 8, 3, 2), (64, 8, 2, 2)),
          ((64, 8, 3, 1), (128, 8, 2, 1), (64, 8, 2, 1)),
          ((32, 8, 2, 1), (32, 8, 3, 1))),
}
# fmt: on
# The same for e4m3 pages, where it is not that of other pages: tile_m 16, heads up to 128.
FP8_DECODE: _Row = ((32, 1, 4, 8), (64, 2, 3, 5), (64, 2, 4, 4), (128, 4, 4, 2))
# The share of copy bandwidth that decoding reaches (H200, 2026-11-26: 0.96 to 0.97, lists of pages 0.85), and TFLOPS of
# tiles of 128 rows by padded head dim: 401 and 477 at 128, guessed at others.
READING = 0.94
RATES = (360.0, 450.0, 340.0)


class PortablePaged:
    """Attention over paged keys in plain Triton."""

    name = "portable.attention_paged"

    def why_not(self, p: PagedProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        why = tensors.why_not(p, ("bf16", "fp16"))
        if p.kv_dtype not in (p.dtype, "e4m3"):
            why.append(f"pages must be {p.dtype}, as q, or e4m3, not {p.kv_dtype}")
        elif p.kv_dtype == "e4m3" and not p.aligned:
            why.append(
                "e4m3 pages need a contiguous last dim, and pointers and strides that are multiples of 16 bytes"
            )
        if any(d % 8 or not 8 <= d <= 256 for d in (p.dim, p.v_dim)):
            why.append(f"head dims must be multiples of 8 up to 256; got {p.dim} and {p.v_dim}")
        if p.page not in PAGES:
            why.append(f"pages must have {', '.join(map(str, PAGES[:-1]))} or {PAGES[-1]} rows, not {p.page}")
        if p.list_heads not in (0, 1, p.kv_heads, p.q_heads):
            why.append(f"lists must be of 1, {p.kv_heads} or {p.q_heads} heads, not {p.list_heads}")
        if p.list_heads and (p.list_block[1] < 16 or p.list_block[1] & (p.list_block[1] - 1)):
            why.append(f"list blocks must have a power of two of keys, from 16 up, not {p.list_block[1]}")
        if max(p.max_k, p.tokens) > FURTHEST:
            why.append(f"lengths must be at most {FURTHEST}; got {p.tokens} queries and {p.max_k} keys")
        if not why and not any(True for _ in self.configs(p)):
            why.append(f"no tile fits into {p.card.smem_bytes} bytes of shared memory")
        if not why:
            c = self.default(p)
            if _tiles(p, c, max(p.requests, CHUNK), CHUNK * p.max_q) * parts(p, c) >= 2**31:
                why.append("more than 2147483647 parts of tiles")
        return why

    def _tile_m(self, p: PagedProblem) -> int:
        """The fewest rows that hold a request's queries, or one query with all its heads; 64 if wider heads spill."""
        wanted = pack(p) * min(p.max_q, p.list_block[0] if p.list_heads else p.max_q)
        most = 128 if _width(p) <= 128 else 64
        return next((m for m in (16, 32, 64) if m >= min(wanted, most) and m >= pack(p)), 128)

    def configs(self, p: PagedProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first, limited by pages, lists and the card's shared memory."""
        width = _width(p)
        rows = [m for m in (self._tile_m(p), 128, 64, 32, 16) if m >= pack(p)]
        for tile_m in dict.fromkeys(rows[:1] + [m for m in rows[1:] if m == rows[0] // 2]):
            table = TABLES[tile_m][0 if width <= 64 else 1 if width <= 128 else 2]
            if p.kv_dtype == "e4m3" and tile_m == 16 and 64 < width <= 128:
                table = FP8_DECODE
            for tile_n, warps, stages, ctas in table:
                n = min(tile_n, p.list_block[1]) if p.list_heads else tile_n
                if p.kv_dtype == "e4m3" and not _converts(
                    p
                ):  # by shifts, whose registers 64 keys would spill
                    n = min(n, 32)
                c = Config(tile_m, n, warps, stages, ctas)
                if p.on_cpu or _shared(p, c) <= p.card.smem_bytes:
                    yield c

    def default(self, p: PagedProblem) -> Config:
        """The first of `configs`."""
        return next(self.configs(p))

    def seconds(self, p: PagedProblem, c: Config) -> float:
        """Launches + the longest of: arithmetic with padding; the bytes of all bounds at READING of copy bandwidth, if
        there are enough programs; a tile's longest part on one SM. Its rates are guesses, but for FP8 pages under tiles
        of 16 rows, where unpacking bounds decoding (H200, 2026-11-26).
        """
        cut, tiles = parts(p, c), _tiles(p, c, p.requests, p.tokens)
        steps = min(_steps(p, c), -(-p.max_k // c.tile_n))
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * (cut + steps) * tiles
        fp8 = p.kv_dtype == "e4m3"
        width = padded(p.dim, fp8) + padded(p.v_dim, fp8)
        causal = 0.5 if p.causal and p.max_q >= p.max_k and not p.list_heads and not p.window else 1.0
        rate = (
            1e12 * RATES[0 if width <= 128 else 1 if width <= 256 else 2] * p.card.sustained(p.dtype) / 690.0
        )
        rate *= {16: 0.3, 32: 0.45, 64: 0.8, 128: 1.0}[c.tile_m] * (0.85 if fp8 else 1.0)
        tile = 2.0 * c.tile_m * c.tile_n * steps * width
        sums = 8.0 * cut * p.tokens * p.q_heads * p.v_dim if cut > 1 else 0.0
        read = (causal * p.compulsory_bytes + sums) / (READING * p.card.bandwidth)
        busy = min(1.0, tiles * cut / p.card.sm_count)
        arithmetic = causal * tile * tiles / (rate * busy)
        alone = 2e-6 + tile / cut / (rate / p.card.sm_count)
        launches = p.card.launch_seconds * (1.5 if cut > 1 else 1.0)
        return launches + max(arithmetic, read / busy, alone)

    def prepare(self, p: PagedProblem, c: Config, device: torch.device) -> Work:
        """Numbers of the problem only."""
        many = parts(p, c)
        items = max(1, _tiles(p, c, p.requests, p.tokens) * many)
        together = p.card.sm_count * c.ctas * (1 if p.on_cpu else WAVES)
        programs = items if many == 1 and not p.on_cpu else min(items, together)
        return Work(
            pack(p), many, most_parts(p, c), min(programs, 2**31 - 1), p.max_q, p.max_k, p.causal,
            min(p.window, FURTHEST), min(p.sinks, FURTHEST), _converts(p),
        )  # fmt: skip

    def launch(self, c: Config, work: Work, call: PagedCall) -> None:
        """Computes `out` and `lse`: one launch, and one that adds parts if there may be any. No sync."""
        q, out, lse, lists = call.q, call.out, call.lse, call.lists
        tokens, heads, _ = q.shape
        k, v = ((x.view(torch.int16) if x.element_size() == 1 else x) for x in (call.k, call.v))
        requests = len(call.seq_lens)
        o_part = lse_part = counts = None
        if work.parts > 1:
            shape = (work.parts, tokens, heads, out.shape[2])
            o_part = torch.empty(shape, dtype=torch.float32, device=q.device)
            lse_part = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
            counts = torch.empty(shape[1:3], dtype=torch.int32, device=q.device)
        listed: list[Any] = [None] * 6 if lists is None else [*lists.full, *lists.partial]
        numbers = (0, 0, 0, 0)
        if lists is not None:
            full, partial = len(lists.full.indices), len(lists.partial.indices)
            # Steps of a row fit int32, whatever bound the caller has given.
            longest = min(lists.longest, full + partial, 2**30 * c.tile_n // lists.block[1])
            numbers = (lists.tiles, longest, full, partial)
        scale, cap = call.scale * LOG2E, call.softcap * LOG2E
        if call.softcap:
            scale = 2.0 * scale / call.softcap
        with torch.cuda.device_of(q):
            launch(
                _attention, (work.programs,),
                q, k, v, call.block_table, call.seq_lens, call.cu_seqlens_q, call.sink_logits, call.k_scale,
                call.v_scale, out, lse, o_part, lse_part, counts, *listed,
                scale, cap, tokens, requests, k.shape[0], call.block_table.stride(0), work.max_q,
                min(work.max_k, call.block_table.shape[1] * k.shape[2]), work.window, work.sinks, *numbers,
                call.out_end, call.lse_end, *q.stride(), *k.stride()[:2], k.stride(3), *v.stride()[:2], v.stride(3),
                *out.stride(), **_constants(c, work, call, k, v), num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip
            if work.parts > 1:
                columns = -(-out.shape[2] // portable_parts.COLUMNS)
                most, rows = portable_parts.shape(work.parts)
                launch(
                    portable_parts.add_parts, (-(-tokens * heads // rows), columns),
                    o_part, lse_part, counts, call.cu_seqlens_q, call.sink_logits, call.v_scale, out, lse,
                    tokens, requests, work.parts, *out.stride(),
                    HEADS=heads, GROUP=heads // k.shape[1], DV=out.shape[2], V_SCALES=_scales(call.v_scale),
                    MOST=most, ROWS=rows, COLUMNS=portable_parts.COLUMNS, num_warps=portable_parts.WARPS,
                )  # fmt: skip


def _scales(scale: Tensor | None) -> int:
    return 0 if scale is None else len(scale)


def _constants(c: Config, work: Work, call: PagedCall, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Every constexpr of `_attention` for one launch."""
    heads, lists = call.q.shape[1], call.lists
    wide = any(
        max(256, c.tile_m) * x.stride(2) + x.shape[3] * x.stride(3) > 2**31 - 2048 for x in (k, v)
    ) or any(2 * x.shape[2] * x.stride(2) > 2**31 - 2048 for x in (call.q, call.out))
    return {
        "SK_N": k.stride(2), "SV_N": v.stride(2), "PAGE": k.shape[2],
        "HEADS": heads, "GROUP": heads // k.shape[1], "PACK": work.pack,
        "LIST_GROUP": heads // lists.heads if lists else 1,
        "BLOCK_Q": lists.block[0] if lists else 0, "BLOCK_KEYS": lists.block[1] if lists else 0,
        "TM": c.tile_m, "TN": c.tile_n, "D": k.shape[3], "DV": v.shape[3],
        "CAUSAL": work.causal, "WINDOWED": work.window > 0, "CAPPED": call.softcap > 0,
        "K_SCALES": _scales(call.k_scale), "V_SCALES": _scales(call.v_scale),
        "FP8": call.k.element_size() == 1, "NATIVE": work.native,
        "SHORTEST": PART // c.tile_n, "MOST": work.parts if work.parts == 1 else work.most,
        "WHOLE": c.tile_m >= 64 or (lists is None and not work.window), "CHUNK": CHUNK, "WIDE": wide,
    }  # fmt: skip


KERNEL: PagedKernel = PortablePaged()
