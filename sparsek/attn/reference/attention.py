"""Block-sparse attention in plain torch, float64 too: the specification of every kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.scores import PLAIN, Places, Scores, changed
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of softmax(scale * q k^T) v over the pairs that a BlockMask admits.

    out[b, h, i] = sum_j exp(s_ij - lse[b, h, i]) v[b, h', j] and lse[b, h, i] = log sum_j exp(s_ij), where
    s_ij = scale * <q[b, h, i], k[b, h', j]>, j runs over the keys that query i of head h sees, and h' = h // (Hq /
    Hkv). `scores` changes s_ij and adds sinks to the sum.

    A query that sees no key gets out = 0 and lse = -inf, or its sink, and no gradient but the sink's. A key or value
    that no query of a tile (mask.block[0] queries of one head) sees never reaches that tile, whatever it holds; what
    some query of the tile sees must be finite. Differentiable in q, k, v and the sinks, any number of times.

    Args:
        q: [B, Hq, S, D].
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, Dv]. All three of one dtype, on the mask's device, with any strides.
        mask: For S queries and T keys, with 1 or B batch items and 1, Hkv or Hq heads.
        scale: D**-0.5 by default.
        scores: What changes the scores.

    Returns:
        out [B, Hq, S, Dv] in the dtype of q, and lse [B, Hq, S]. Sums and lse are float32, or float64 for float64.

    Raises:
        InvalidInput: For shapes, dtypes or devices that do not fit together.
    """
    check(q, k, v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tile = mask.block[0]
    with dtypes.as_given(q.device):
        tiles = []
        for first in range(0, max(1, q.shape[2]), tile):
            seen = seen_by(mask, first, first + tile, q.shape[1])
            places = places_of(mask, first, first + tile)
            tiles.append(attend(q[:, :, first : first + tile], k, v, seen, factor, scores, places))
    out, lse = zip(*tiles, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def seen_by(mask: BlockMask, first: int, last: int, q_heads: int) -> Tensor:
    """Which keys queries first to last - 1 see, bool [mask.batch, q_heads, n, kv_len]. `last` may lie beyond q_len."""
    seen = mask.dense_rows(first, min(last, mask.q_len))
    return seen.repeat_interleave(q_heads // mask.heads, 1)


def places_of(mask: BlockMask, first: int, last: int) -> Places:
    """The positions of queries first to last - 1 and of all keys. `last` may lie beyond q_len."""
    queries = torch.arange(first, min(last, mask.q_len), dtype=torch.int64, device=mask.device)
    keys = torch.arange(mask.kv_len, dtype=torch.int64, device=mask.device)
    return queries + (mask.kv_len - mask.q_len), keys


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    scores: Scores = PLAIN,
    places: Places | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one tile of queries q [B, Hq, n, D] over the keys that `seen`, bool [B or 1, Hq, n, T], admits.

    `places`: their positions, for ALiBi.
    """
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = met(k, seen).to(sum_dtype), met(v, seen).to(sum_dtype)
    s, _ = changed(q.to(sum_dtype) @ k.mT * scale, scores, places)
    s = s.masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    if scores.sink_logits is not None:
        sinks = scores.sink_logits.to(sum_dtype)[:, None, None].expand(*s.shape[:3], 1)
        empty = empty & (sinks == -torch.inf)  # -inf alone has no gradient
        s, v = torch.cat((s, sinks.masked_fill(empty, -torch.inf)), -1), functional.pad(v, (0, 0, 0, 1))
    weights = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return (weights @ v).to(q.dtype), s.logsumexp(-1)


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    *,
    scale: float | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `attention` for the gradients `grad` of out and `grad_lse` of lse, by formulas.

    With P_ij = exp(s_ij - lse_i) where query i sees key j, and delta_i = <grad_i, out_i> - grad_lse_i:
    dv_j = sum_i P_ij grad_i, dS_ij = P_ij (<grad_i, v_j> - delta_i), dq_i = scale sum_j dS_ij k_j and
    dk_j = scale sum_i dS_ij q_i. dk and dv are summed over the heads of q that share a head of k. dS_ij is
    multiplied by the derivative of `changed`. lse has the sinks, whose gradient `sink_gradients` gives.

    Shapes and dtypes as in `attention`, whose autograd gives the same. Queries that see nothing contribute nothing.
    """
    check(q, k, v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    sum_dtype, tile = torch.promote_types(q.dtype, torch.float32), mask.block[0]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=sum_dtype) for x in (k, v))
    with dtypes.as_given(q.device):
        for first in range(0, q.shape[2], tile):
            at = slice(first, first + tile)
            seen = seen_by(mask, first, first + tile, q.shape[1])
            of_lse = None if grad_lse is None else grad_lse[:, :, at]
            rows = out[:, :, at], lse[:, :, at], grad[:, :, at], of_lse
            places = places_of(mask, first, first + tile)
            found = attend_backward(q[:, :, at], k, v, seen, factor, *rows, scores, places)
            dq[:, :, at], more_dk, more_dv = found
            dk += more_dk
            dv += more_dv
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    scores: Scores = PLAIN,
    places: Places | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of one tile of queries in `attention_backward`: dq, dk, dv in float32, or float64 for float64."""
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    heads = k.shape[1]
    q, k, v = q.to(sum_dtype), met(k, seen).to(sum_dtype), met(v, seen).to(sum_dtype)
    empty = ~seen.any(-1, keepdim=True)
    grad = grad.to(sum_dtype).masked_fill(empty, 0)
    delta = (grad * out.to(sum_dtype)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1).to(sum_dtype)
    s, slope = changed(q @ k.mT * scale, scores, places)
    s = s.masked_fill(~seen, -torch.inf)
    weights = (s - lse.unsqueeze(-1).to(sum_dtype)).masked_fill(empty, -torch.inf).exp()
    of_scores = weights * (grad @ v.mT - delta.masked_fill(empty, 0)) * scale
    if slope is not None:
        of_scores = of_scores * slope
    dk, dv = of_scores.mT @ q, weights.mT @ grad
    return of_scores @ k, _per_key_head(dk, heads), _per_key_head(dv, heads)


def _per_key_head(x: Tensor, heads: int) -> Tensor:
    """[B, Hq, T, E], summed over the query heads that share a head of keys."""
    return x.unflatten(1, (heads, -1)).sum(2)


def met(x: Tensor, seen: Tensor) -> Tensor:
    """k or v [B, Hkv, T, E] for every query head: [B, Hq, T, E], 0 where no query of the tile sees the key."""
    per_query_head = x.repeat_interleave(seen.shape[1] // x.shape[1], 1)
    return per_query_head.masked_fill(~seen.any(-2).unsqueeze(-1), 0)


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention over two disjoint sets of keys, from the results for each.

    lse = log(exp(lse1) + exp(lse2)) and o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2, summed in float32, or in float64
    if an operand is. Differentiable. Swapping the parts gives the same bits.

    Args:
        o1: [..., Dv], the output for the first set of keys.
        lse1: [...], float32 or float64, as `attention(..., return_lse=True)` returns it. Where it is -inf, the part
            is empty and does not count, whatever its o1. +inf means the same: FlashAttention-2 and
            Block-Sparse-Attention write it for a query without keys. An lse over finite scores is never +inf.
        o2: [..., Dv], the output for the second set.
        lse2: [...], like lse1.

    Returns:
        o [..., Dv] in the dtype of o1 and lse [...] in that of lse1: 0 and -inf where both parts are empty.

    Raises:
        InvalidInput: For shapes, dtypes or devices that do not fit together.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(3, 1, 4, 256, 64).unbind()
        >>> parts = [sk.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(100), slice(100, 256))]
        >>> out, lse = sk.merge_attention(*parts[0], *parts[1])
        >>> torch.allclose(out, sk.attention(q, k, v), atol=1e-5)
        True
    """
    _check_parts(o1, lse1, o2, lse2)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (o1, lse1, o2, lse2)):
        for name, x in (("o1", o1), ("lse1", lse1), ("o2", o2), ("lse2", lse2)):
            arguments.kept(name, x)
    sum_dtype = torch.promote_types(o1.dtype, lse1.dtype)
    lse = torch.stack((lse1, lse2)).to(sum_dtype)
    empty = lse.isinf()
    neither = empty.all(0)
    lse = lse.masked_fill(empty, -torch.inf).masked_fill(neither, 0)
    first, second = (
        o.to(sum_dtype).masked_fill(gone.unsqueeze(-1), 0) * weight.unsqueeze(-1)
        for o, gone, weight in zip((o1, o2), empty, lse.softmax(0), strict=True)
    )
    return (first + second).to(o1.dtype), lse.logsumexp(0).masked_fill(neither, -torch.inf).to(lse1.dtype)


def check(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> None:
    """InvalidInput unless q, k, v and the mask fit together, as `attention` requires."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise InvalidInput(f"{name} must be a tensor [batch, heads, length, dim], got {_describe(x)}")
    if not isinstance(mask, BlockMask):
        raise InvalidInput(f"mask must be a BlockMask, got {type(mask).__name__}")
    dtypes.name(q.dtype)
    if {k.dtype, v.dtype} != {q.dtype} or {k.device, v.device, mask.device} != {q.device}:
        raise InvalidInput(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device} and the mask on "
            f"{mask.device}; they must agree"
        )
    batch, q_heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if k.shape != (batch, kv_heads, kv_len, dim) or v.shape[:3] != k.shape[:3]:
        raise InvalidInput(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; "
            "k must be [B, Hkv, T, D] and v [B, Hkv, T, Dv] for q [B, Hq, S, D]"
        )
    if not kv_heads or not q_heads or q_heads % kv_heads:
        raise InvalidInput(
            f"{kv_heads} heads of k and v cannot serve {q_heads} heads of q; they must divide them"
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise InvalidInput(
            f"the mask is for {mask.q_len} queries and {mask.kv_len} keys, got {q_len} queries and {kv_len} keys"
        )
    if mask.batch not in (1, batch) or mask.heads not in (1, kv_heads, q_heads):
        raise InvalidInput(
            f"the mask has batch {mask.batch} and {mask.heads} heads; batch must be 1 or {batch}, "
            f"heads 1, {kv_heads} or {q_heads}"
        )


def _check_parts(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> None:
    parts = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    for name, x in parts.items():
        arguments.dense_beside(name, x, "o1", o1)
    dtypes.name(o1.dtype)
    kinds = {(x.dtype, x.device) for x in (o1, o2)}, {(x.dtype, x.device) for x in (lse1, lse2)}
    fits = o1.ndim > 0 and o1.shape == o2.shape and lse1.shape == lse2.shape == o1.shape[:-1]
    if not fits or any(len(kind) > 1 for kind in kinds) or o1.device != lse1.device:
        found = ", ".join(f"{name} {_describe(x)}" for name, x in parts.items())
        raise InvalidInput(f"merge_attention needs o [..., Dv] and lse [...] of one kind each, got {found}")
    if lse1.dtype not in (torch.float32, torch.float64):
        raise InvalidInput(f"lse must be float32 or float64, got {lse1.dtype}")


def _describe(x: object) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
