"""Which of many masses are kept: the threshold at which a share of their sum, and a number of them, is reached.

    code = leading bits of a float32, 18 of them from 2^-30 on          the codes of a row are searched two bits at a
    kept: code >= c, for the largest c that keeps enough                time: nine passes, three sums and counts each

A program has a row. Its masses are read nine times and come from L2 or L1. `attn/reference/lines.py` is the
specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.reference.lines import CODES, DROPPED, LEAST
from sparsek.engine.launch.launch import launch

CHUNK, COUNTED, WARPS = 4096, 16384, 16  # masses at a time, with sums and with counts alone
FORCED = tl.constexpr(
    2.0**20
)  # the mass of what is kept before all others; masses of softmaxes are at most 128
DROPPED_BITS, LEAST_CODE, TOP_CODE = (tl.constexpr(each) for each in (DROPPED, LEAST, CODES - 1))
HALF_BITS = (CODES.bit_length() - 1) // 2
PASSES, FIRST_UNIT = tl.constexpr(HALF_BITS), tl.constexpr(4 ** (HALF_BITS - 1))

_NUMBERS = ("n", "stride", "share", "least", "forced", "heads", "rows_each")


@triton.jit
def codes(mass):
    """int32, 0 for masses below 2^-30 and NaN: see `codes` in attn/reference/lines.py."""
    bits = (mass.to(tl.int32, bitcast=True) >> DROPPED_BITS) - LEAST_CODE + 1
    return tl.where(mass >= 0, tl.minimum(tl.maximum(bits, 0), TOP_CODE), 0)


@triton.jit
def quanta(mass):
    """int64: a mass in steps of 2^-30, rounded down, so that sums are exact; 0 for NaN."""
    return tl.where(codes(mass) > 0, mass * 1073741824.0, 0.0).to(tl.int64)


@triton.jit
def _row(mass, at, n, forced):
    """Masses of a row at some places, those forced above all others; 0 after the last."""
    found = tl.load(mass + at, mask=at < n, other=0.0)
    return tl.where((at < forced) & (at < n), FORCED, found)


@triton.jit(do_not_specialize=_NUMBERS)
def _cut(
    mass, budgets, counts, cuts, live, n, stride, share, least, forced, heads, rows_each,
    CHUNK: tl.constexpr, BY_SHARE: tl.constexpr,
):  # fmt: skip
    """mass [rows, stride], n of them count; cuts int32 [rows]; counts int32 [rows, n + 1]: how many before each place
    are kept. `budgets` int32 [heads] in place of `least`: a head has `rows_each` rows. Rows that are not `live` are not
    written.
    """
    row = tl.program_id(0)
    there = True
    if live is not None:
        there = tl.load(live + row) != 0
    if there:
        mass += row.to(tl.int64) * stride
        if budgets is not None:
            least = tl.load(budgets + row // rows_each % heads)
        lane = tl.arange(0, CHUNK)
        need = tl.zeros((), tl.float64)
        if BY_SHARE:
            sums = tl.zeros((CHUNK,), tl.int64)
            for start in range(0, n, CHUNK):
                sums += quanta(_row(mass, start + lane, n, forced))
            need = tl.sum(sums).to(tl.float64) * (tl.zeros((), tl.float32) + share).to(tl.float64)
        found = tl.zeros((), tl.int32)
        unit = tl.zeros((), tl.int32) + FIRST_UNIT
        for _ in range(PASSES):
            count = tl.zeros((CHUNK,), tl.int32)  # three counts of ten bits, of at most 1023 chunks
            s1 = tl.zeros((CHUNK,), tl.int64)
            s2 = tl.zeros((CHUNK,), tl.int64)
            s3 = tl.zeros((CHUNK,), tl.int64)
            for start in range(0, n, CHUNK):
                x = _row(mass, start + lane, n, forced)
                code = codes(x)
                first, second, third = (
                    code >= found + unit,
                    code >= found + 2 * unit,
                    code >= found + 3 * unit,
                )
                count += tl.where(first, 1, 0) + tl.where(second, 1 << 10, 0) + tl.where(third, 1 << 20, 0)
                if BY_SHARE:
                    part = quanta(x)
                    s1 += tl.where(first, part, 0)
                    s2 += tl.where(second, part, 0)
                    s3 += tl.where(third, part, 0)
            enough1 = (tl.sum(count & 1023) >= least) & (tl.sum(s1).to(tl.float64) >= need)
            enough2 = (tl.sum(count >> 10 & 1023) >= least) & (tl.sum(s2).to(tl.float64) >= need)
            enough3 = (tl.sum(count >> 20) >= least) & (tl.sum(s3).to(tl.float64) >= need)
            found += unit * tl.where(enough3, 3, tl.where(enough2, 2, tl.where(enough1, 1, 0)))
            unit = unit // 4
        found = tl.maximum(found, 1)
        tl.store(cuts + row, found)
        if counts is not None:
            counts += row.to(tl.int64) * (n + 1)
            before = 0
            for start in range(0, n, CHUNK):
                at = start + lane
                kept = ((codes(_row(mass, at, n, forced)) >= found) & (at < n)).to(tl.int32)
                tl.store(counts + at, before + tl.cumsum(kept, 0) - kept, mask=at < n)
                before += tl.sum(kept)
            tl.store(counts + n, before)


def cut(
    mass: Tensor,
    share: float = 0.0,
    least: int = 0,
    *,
    budgets: Tensor | None = None,
    forced: int = 0,
    live: Tensor | None = None,
    counted: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The cut of each row of mass [.., n], contiguous float32: int32 [rows] as a code, and counts [rows, n + 1] of kept
    masses before each place.

    `budgets` int32 [H] for mass [B, H, .., n] replaces `least`. The first `forced` masses of a row are the highest.
    Rows where `live`, int32 [rows], is 0 are not written.
    """
    n = mass.shape[-1]
    rows = mass.numel() // max(1, n)
    cuts = torch.empty(rows, dtype=torch.int32, device=mass.device)
    counts = torch.empty(rows, n + 1, dtype=torch.int32, device=mass.device) if counted else None
    most = max(CHUNK if share else COUNTED, triton.next_power_of_2(-(-n // 1023)))
    chunk = min(most, max(256, triton.next_power_of_2(n)))
    heads = 1 if budgets is None else len(budgets)
    each = max(1, rows // (len(mass) * heads)) if budgets is not None else 1
    with torch.cuda.device_of(mass):
        launch(
            _cut, (rows,), mass, budgets, counts, cuts, live, n, n, float(share), least, forced, heads, each,
            CHUNK=chunk, BY_SHARE=share > 0, num_warps=max(1, min(WARPS, chunk // 256)),
        )  # fmt: skip
    return cuts, counts
