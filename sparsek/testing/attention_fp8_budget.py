"""The error budget of attention in FP8: twice the error of dense attention with weights in e4m3, and what the sums of
tensor cores lose.

A kernel rounds weights to e4m3 as operands of a product, and tensor cores sum FP8 products in about 14 bits, without
rounding to nearest (`CORE`). Dense attention in the same precision is computed here in plain torch: scores and sums in
float32, weights times 2^8 over the largest of their row rounded to e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.quantized_heads import E4M3, QuantizedHeads
from sparsek.attn.reference.attention import attend, met, seen_by
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.testing.attention_budget import LSE_LOW, AttentionGate
from sparsek.testing.budget import CORE, FACTOR, rounding_unit

PEAK = 256.0


def check_attention_fp8(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: BlockMask,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float | None = None,
    rows: Sequence[int] | None = None,
) -> AttentionGate:
    """Judges out [B, Hq, S, Dv], and lse [B, Hq, S] if given, as the attention of scale * values under `mask`.

    The error is relative, in the Frobenius norm, against the reference in float64. Its budget is twice that of dense
    attention with weights in e4m3, plus one rounding to the dtype of out, plus CORE of all terms' magnitudes, and of
    the magnitudes of the terms of their scores. lse may be off by 1e-3, 1e-3 of its value, and CORE of these. Rows of
    queries without any key must be 0 and -inf. `rows` are the query tiles to check, all by default.
    """
    shape = (*q.shape[:3], v.shape[3])
    if out.shape != shape or (lse is not None and lse.shape != shape[:3]):
        raise InvalidInput(f"out must be {list(shape)} and lse {list(shape[:3])}, got {list(out.shape)}")
    factor = q.shape[3] ** -0.5 if scale is None else scale
    with torch.no_grad(), dtypes.as_given(out.device):
        wide = [x.dequantize(torch.float64) for x in (q, k, v)]
        tiles = range(mask.grid[0]) if rows is None else rows
        parts = [_tile(wide, mask, i * mask.block[0], factor, out, lse) for i in tiles]
    wrong, dense, lost, size = (sum(x[at] for x in parts) ** 0.5 for at in range(4))
    budget = FACTOR * dense + lost + rounding_unit(out.dtype) * size
    largest, off, excess = (max((x[at] for x in parts), default=0.0) for at in range(4, 7))
    holds = all(x[7] for x in parts)
    relative = (wrong / size, budget / size) if size else (wrong, budget)
    passed = wrong <= budget and excess <= 1.0 and holds
    return AttentionGate(*relative, passed, largest, off, holds)


def _tile(
    wide: list[Tensor], mask: BlockMask, first: int, factor: float, out: Tensor, lse: Tensor | None
) -> tuple[float, ...]:
    """Of one tile: squares of the norms of error, dense error, losses and result; the largest error of out and of lse,
    the largest error of lse over the allowed one, and whether empty rows hold.
    """
    last = min(first + mask.block[0], mask.q_len)
    q, k, v = wide[0][:, :, first:last], *wide[1:]
    seen = seen_by(mask, first, last, q.shape[1])
    exact, exact_lse = attend(q, k, v, seen, factor)
    k, v = met(k, seen), met(v, seen)
    scores = (q @ k.mT * factor).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1)
    dense = ((weights * PEAK).float().to(E4M3).double() / PEAK) @ v / total
    terms = (q.abs() @ k.abs().mT * factor).masked_fill(~seen, 0)
    lost = CORE * (weights * (1 + terms)) @ v.abs() / total
    found = out[:, :, first:last].double()
    empty = ~seen.any(-1).expand(exact.shape[:3])
    holds = not bool(found[empty].any())
    off, excess = 0.0, 0.0
    if lse is not None:
        sums = lse[:, :, first:last].double()
        holds = holds and bool((sums[empty] == -torch.inf).all())
        wrong = (sums - exact_lse)[~empty].abs()
        allowed = (LSE_LOW + LSE_LOW * exact_lse.abs() + CORE * terms.amax(-1))[~empty]
        if wrong.numel():
            off, excess = float(wrong.max()), float((wrong / allowed).nan_to_num(torch.inf).max())
    difference = (found - exact).nan_to_num(torch.inf)
    squares = (difference, dense - exact, lost, exact)
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    return *(float(x.square().sum()) for x in squares), largest, off, excess, holds
