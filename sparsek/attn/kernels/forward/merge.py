"""Merges attention over parts of the keys, for query tiles that hopper.attention_fwd has split.

    top = max lse[s];   w[s] = exp2(lse[s] - top);   out = sum w[s] o[s] / sum w[s];   lse = ln 2 (top + log2 sum w[s])

A slot is 128 rows of `o_part` and `lse_part`; the slots of a tile, one per part of its keys, are adjacent. A program
adds the slots of ROWS rows of one tile in order, so the bits repeat. Every byte is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.forward.score_args import Sinks
from sparsek.engine.launch.launch import launch

# Rows a program: [16, 256] in float32 are 32 registers of each thread, and a tile of 128 rows is 8 programs.
ROWS = 16
FIELDS = 5
NO_SINKS = Sinks()


@triton.jit(
    do_not_specialize=("q_len", "heads", "tile_rows", "sink_step"), do_not_specialize_on_alignment=("sinks",)
)
def _merge(
    o_part, lse_part, table, out, lse, sinks, sink_step,
    q_len, heads, tile_rows, so_b, so_h, so_m, so_d,
    SLOT: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = triton.next_power_of_2(DV)
    entry = table + tl.program_id(0) * FIELDS
    slot = tl.load(entry).to(tl.int64)
    slots = tl.load(entry + 1)
    b = tl.load(entry + 2).to(tl.int64)

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    h = tl.load(entry + 3) + row % GROUP
    query = tl.load(entry + 4) + row // GROUP
    live = (row < tile_rows) & (query < q_len) & (slots > 0)
    col = tl.arange(0, PADDED)

    acc = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    if sinks is not None:  # one more part, whose out is 0
        top = (
            tl.load(sinks + h * sink_step, mask=live, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        )
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    for s in range(slots):
        at = (slot + s) * SLOT + row
        part = tl.load(lse_part + at, mask=live, other=float("-inf"))
        seen = part != float("-inf")  # o_part of a row without any key is ignored
        o_at = o_part + (at[:, None] * DV + col[None, :])
        o = tl.load(o_at, mask=seen[:, None] & (col < DV)[None, :], other=0.0)
        now = tl.maximum(top, part)
        base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf is NaN
        shrink = tl.exp2(top - base)
        weight = tl.exp2(part - base)
        acc = acc * shrink[:, None] + o * weight[:, None]
        total = total * shrink + weight
        top = now

    total = tl.where(total == 0.0, 1.0, total)
    h = h.to(tl.int64)
    query = query.to(tl.int64)
    out += b * so_b + ((h * so_h + query * so_m)[:, None] + (col * so_d)[None, :])
    tl.store(out, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (col < DV)[None, :])
    if lse is not None:
        lse += (b * heads + h) * q_len + query
        tl.store(lse, (top + tl.log2(total)) * 0.6931471805599453, mask=live)


def merge_parts(
    o_part: Tensor,
    lse_part: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    group: int,
    rows: int,
    sinks: Sinks = NO_SINKS,
) -> None:
    """Writes the query tiles of `table` into `out` and `lse`, and nothing else. No sync.

    o_part: float32 [slots, 128, Dv], contiguous: attention over one part of a tile's keys, each row divided by its
    own sum. lse_part: float32 [slots, 128], contiguous: log2 of that sum of exponentials, -inf for a row without any
    key, whose o_part may hold anything. table: int32 [tiles, 5], contiguous: first slot, number of slots, batch item,
    head, first query. An entry of no slots is padding. Row r < `rows` of a tile is query first + r // group of head
    head + r % group; queries from S on are left out. out: bf16 or fp16 [B, Hq, S, Dv], any strides. lse: float32 [B,
    Hq, S], contiguous, natural logarithm. Rows without a key in any part get 0 and -inf, or their sink.
    """
    if len(table) == 0 or rows == 0:
        return
    with torch.cuda.device_of(out):
        launch(
            _merge, (len(table), -(-rows // ROWS)),
            o_part, lse_part, table, out, lse, *sinks, out.shape[2], out.shape[1], rows, *out.stride(),
            SLOT=o_part.shape[1], DV=out.shape[3], GROUP=group, ROWS=ROWS, FIELDS=FIELDS, num_warps=4,
        )  # fmt: skip
