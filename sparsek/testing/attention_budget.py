"""How wrong attention may be: twice as wrong as dense attention in the same precision, and no more.

`testing/budget.py` says what an error is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.block_mask import BlockMask
from sparsek.reference.attention import attend, check, met, seen_by
from sparsek.testing.budget import FACTOR, FLOOR, Gate, error

# How far lse may be off, absolute and relative.
LSE_LOW, LSE_HIGH = 1e-3, 1e-5


@dataclass(frozen=True)
class AttentionGate(Gate):
    """A gate with its parts: the largest difference of any element of out and of lse, and whether rows of queries that
    see nothing hold 0 and -inf.
    """

    largest: float
    lse_largest: float
    empty_rows_hold: bool


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float | None = None,
    rows: Sequence[int] | None = None,
) -> AttentionGate:
    """Judges out [B, Hq, S, Dv], and lse [B, Hq, S] if given, as the attention of q, k and v under `mask`.

    The error is relative, in the Frobenius norm, against the reference in float64. It may be twice that of torch's
    scaled_dot_product_attention (math) with a boolean mask on the same inputs, 1e-12 at least. lse may be off by 1e-3
    and 1e-3 of its value for 16-bit inputs, else 1e-5. Rows of queries that see nothing must be 0 and -inf.

    Keys and values that no query of a tile sees may hold anything, NaN too. `rows` are the tiles of queries that are
    looked at, all unless given; work and memory are proportional to their number times T. Raises InvalidInput for
    inputs that the reference refuses, and for results of another shape.
    """
    check(q, k, v, mask)
    shape = (*q.shape[:3], v.shape[3])
    if out.shape != shape or (lse is not None and lse.shape != shape[:3]):
        found = f"out {list(out.shape)}" + ("" if lse is None else f", lse {list(lse.shape)}")
        raise InvalidInput(f"out must be {list(shape)} and lse {list(shape[:3])}, got {found}")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tile = mask.block[0]
    chosen = range(mask.grid[0]) if rows is None else rows
    if not chosen or not all(0 <= i < mask.grid[0] for i in chosen):
        raise InvalidInput(f"rows must name tiles of queries, 0 to {mask.grid[0] - 1}, got {list(chosen)}")
    queries = [torch.arange(i * tile, min((i + 1) * tile, mask.q_len), device=q.device) for i in chosen]
    with torch.no_grad(), dtypes.as_given(q.device):
        exact, dense, exact_lse = zip(*(_tile(q, k, v, mask, at, factor) for at in queries), strict=True)
        exact, dense, exact_lse = torch.cat(exact, 2), torch.cat(dense, 2), torch.cat(exact_lse, 2)
        at = torch.cat(queries)
        return _judge(out[:, :, at], None if lse is None else lse[:, :, at], exact, exact_lse, dense)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, at: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one tile of queries: out in float64, out of dense attention, lse in float64."""
    seen = seen_by(mask, int(at[0]), int(at[-1]) + 1, q.shape[1])
    q, k, v = q[:, :, at], met(k, seen), met(v, seen)
    exact, lse = attend(q.double(), k.double(), v.double(), seen, scale)
    with sdpa_kernel(SDPBackend.MATH):
        dense = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return exact, dense.masked_fill(~seen.any(-1, keepdim=True), 0), lse


def _judge(out: Tensor, lse: Tensor | None, exact: Tensor, exact_lse: Tensor, dense: Tensor) -> AttentionGate:
    allowed = max(FLOOR, FACTOR * error(dense, exact))
    found = error(out, exact)
    largest = float((out.double() - exact).abs().max())
    empty = exact_lse == -torch.inf
    empty_rows_hold = bool((out[empty] == 0).all())
    lse_largest, lse_holds = 0.0, True
    if lse is not None:
        empty_rows_hold &= bool((lse[empty] == -torch.inf).all())
        off = (lse.double() - exact_lse)[~empty].abs()
        slack = LSE_LOW if out.dtype in dtypes.LOW else LSE_HIGH
        lse_holds = bool((off <= slack * (1 + exact_lse[~empty].abs())).all())
        lse_largest = float(off.max()) if off.numel() else 0.0
    passed = found <= allowed and empty_rows_hold and lse_holds
    return AttentionGate(found, allowed, passed, largest, lse_largest, empty_rows_hold)
