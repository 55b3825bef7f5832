"""Error budgets of attention and its gradients: twice the error of dense attention in the same precision, or what
rounding explains.

`testing/budget.py` defines errors, and what rounding explains of one sum. Attention is a sum over keys, or over
queries, of terms that are sums themselves. `_shift` is the error of a weight's logarithm, which scales a whole term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek.attn.mask.elements import stored_entries
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attend, attend_backward, check, met, places_of, seen_by
from sparsek.attn.reference.scores import PLAIN, Places, Scores, changed, distances
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import ROUNDED, Bound, Gate, Rounding, stored_variance, sum_variance, summing_unit

# Allowed error of lse, absolute and relative.
LSE_LOW, LSE_HIGH = 1e-3, 1e-5
TOGETHER = 128  # queries of small tiles whose gradients are expected together


@dataclass(frozen=True)
class AttentionGate(Gate):
    """A gate with its parts: the largest difference of any element of out and of lse, and whether rows of queries
    without any key hold 0 and -inf.
    """

    largest: float
    lse_largest: float
    empty_rows_hold: bool


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, out: Tensor, lse: Tensor | None = None, **options: Any
) -> AttentionGate:
    """Judges out [B, Hq, S, Dv], and lse [B, Hq, S] if given, as the attention of q, k and v under `mask`.

    The error is relative, in the Frobenius norm, against the reference in float64. Dense attention is torch's
    scaled_dot_product_attention (math) with a boolean mask on the same inputs; with changed `scores` the reference in
    float32. lse may be off by 1e-3 and 1e-3 of its
    value for 16-bit inputs, else 1e-5. Rows of queries without any key must be 0 and -inf, or their sink.

    Keys and values that no query of a tile sees may hold anything, NaN too. `options` are those of
    `expected_attention`. Raises InvalidInput for inputs that the reference refuses, and for results of another shape.
    """
    return expected_attention(q, k, v, mask, **options).judge(out, lse)


@dataclass(frozen=True)
class ExpectedAttention:
    """The expected attention, computed once for any number of results: for the queries `at`, in float64 and dense,
    with the variance of its sums and the sums of its terms' squares. `shape` is that of out.
    """

    shape: tuple[int, ...]
    at: Tensor
    exact: Tensor
    dense: Tensor
    lse: Tensor
    sums: Tensor
    squares: Tensor

    def judge(self, out: Tensor, lse: Tensor | None = None) -> AttentionGate:
        """The gate of a result, as of `check_attention`."""
        if out.shape != self.shape or (lse is not None and lse.shape != self.shape[:3]):
            found = f"out {list(out.shape)}" + ("" if lse is None else f", lse {list(lse.shape)}")
            raise InvalidInput(f"out must be {list(self.shape)} and lse {list(self.shape[:3])}, got {found}")
        with torch.no_grad(), dtypes.as_given(out.device):
            found = out[:, :, self.at], None if lse is None else lse[:, :, self.at]
            return judge_attention(*found, self, (self.exact == 0).all(-1), LSE_LOW)


def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    scores: Scores = PLAIN,
    rows: Sequence[int] | None = None,
) -> ExpectedAttention:
    """The expected result of `check_attention`, in the query tiles `rows`, all by default; work and memory are
    proportional to their number times T.
    """
    check(q, k, v, mask)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    tile = mask.block[0]
    chosen = range(mask.grid[0]) if rows is None else rows
    if not chosen or not all(0 <= i < mask.grid[0] for i in chosen):
        raise InvalidInput(f"rows must name tiles of queries, 0 to {mask.grid[0] - 1}, got {list(chosen)}")
    queries = [torch.arange(i * tile, min((i + 1) * tile, mask.q_len), device=q.device) for i in chosen]
    with torch.no_grad(), dtypes.as_given(q.device):
        tiles = zip(*(_tile(q, k, v, mask, at, factor, scores) for at in queries), strict=True)
        parts = (torch.cat(each, 2) for each in tiles)
        return ExpectedAttention((*q.shape[:3], v.shape[3]), torch.cat(queries), *parts)


@dataclass(frozen=True)
class AttentionGradGate(Gate):
    """A gate with its parts: errors and budgets of dq, dk and dv, and whether queries that see nothing and keys that
    none sees have gradients of 0. `error` and `budget` are those of the gradient nearest to its budget.
    """

    errors: tuple[float, ...]
    budgets: tuple[float, ...]
    unseen_hold: bool


def check_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    grad: Tensor,
    found: Sequence[Tensor],
    grad_lse: Tensor | None = None,
    **options: Any,
) -> AttentionGradGate:
    """Judges found = (dq, dk, dv) as the gradients of attention, given those of out and, unless it is None, of lse.

    Errors are relative, in the Frobenius norm, against the reference's formulas in float64, each gradient by itself.
    Dense attention on the same inputs is torch's scaled_dot_product_attention (math) with a boolean mask and
    autograd, or its fused kernels, whichever has the larger error. For 16-bit inputs both compute in float32 and
    round each gradient once. The fused ones read the rounded out, which matters where queries see few keys. Rounding
    also explains the noise of sums whose terms cancel, as for queries that see one key. Queries that see nothing and
    keys that none sees must have 0.

    Keys and values that no query of a tile sees may hold anything, NaN too. `options` are those of
    `expected_gradients`. Raises InvalidInput for inputs that the reference refuses, and for gradients of another shape.
    """
    return expected_gradients(q, k, v, mask, grad, grad_lse, **options).judge(found)


@dataclass(frozen=True)
class ExpectedGradients:
    """The expected dq, dk and dv, computed once for any number of results: those of these queries and keys."""

    shapes: list[list[int]]
    queries: Tensor
    keys: Tensor
    truth: _Truth

    def judge(self, found: Sequence[Tensor]) -> AttentionGradGate:
        """The gate of dq, dk and dv, as of `check_attention_backward`."""
        if [list(x.shape) for x in found] != self.shapes:
            raise InvalidInput(
                f"dq, dk and dv must have the shapes {self.shapes}, got {[list(x.shape) for x in found]}"
            )
        with torch.no_grad(), dtypes.as_given(self.keys.device):
            dq, dk, dv = found
            mine = dq[:, :, self.queries], dk[:, :, self.keys], dv[:, :, self.keys]
            return _judge_gradients(mine, self.truth)


def expected_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    grad: Tensor,
    grad_lse: Tensor | None = None,
    *,
    scale: float | None = None,
    scores: Scores = PLAIN,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
) -> ExpectedGradients:
    """The expected result of `check_attention_backward`: dq of the query tiles `rows`, dk and dv of the key blocks
    `columns`, all by default. Work is proportional to the visited blocks of `rows` and of all tiles that visit
    `columns`; memory to one tile, or to those of 128 queries.
    """
    check(q, k, v, mask)
    of_out = (*q.shape[:3], v.shape[3])
    if grad.shape != of_out:
        raise InvalidInput(f"dq, dk and dv need a grad {list(of_out)}, got {list(grad.shape)}")
    if grad_lse is not None and grad_lse.shape != of_out[:3]:
        raise InvalidInput(f"grad_lse must be {list(of_out[:3])}, got {list(grad_lse.shape)}")
    tiles = _chosen("rows", rows, mask.grid[0])
    blocks = _chosen("columns", columns, mask.grid[1])
    queries = _positions(tiles, mask.block[0], mask.q_len, q.device)
    keys = _positions(blocks, mask.block[1], mask.kv_len, q.device)
    with torch.no_grad(), dtypes.as_given(q.device):
        call = _BudgetCall(
            q, k, v, mask, grad, grad_lse, q.shape[-1] ** -0.5 if scale is None else scale, scores
        )
        truth = _gradients(call, set(tiles), keys, set(tiles) | _visiting(mask, blocks))
    return ExpectedGradients([list(x.shape) for x in (q, k, v)], queries, keys, truth)


class _BudgetCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    grad: Tensor
    grad_lse: Tensor | None
    scale: float
    scores: Scores


class _Truth(NamedTuple):
    """Of dq, dk and dv: float64, dense attention, its fused kernels, sums of their terms' squares, variances of the
    factors of these terms in units of that of one rounding, and the number of terms.
    """

    exact: list[Tensor]
    dense: list[Tensor]
    fused: list[Tensor]
    terms: list[Tensor]
    inner: list[Tensor]
    counts: list[Tensor]


def _gradients(call: _BudgetCall, tiles: set[int], keys: Tensor, needed: set[int]) -> _Truth:
    """dq of `tiles`, and dk and dv of `keys`, to which the tiles `needed` contribute."""
    q, k, v, mask = call[:4]
    place = torch.full((mask.kv_len,), -1, device=q.device)
    place[keys] = torch.arange(len(keys), device=q.device)

    def zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_zeros((*x.shape[:2], len(keys), x.shape[3]), dtype=dtype)

    wide = torch.promote_types(q.dtype, torch.float32)
    kinds = torch.float64, wide, wide, torch.float64, torch.float64
    sums = [[zeros(x, kind) for x in (k, v)] for kind in kinds]
    of_queries = [[q.new_zeros((*q.shape[:2], 0, q.shape[3]), dtype=kind)] for kind in kinds]
    seen_keys = torch.zeros(sums[0][0].shape[:3], dtype=torch.int64, device=q.device)
    seeing = [seen_keys.new_zeros((*q.shape[:2], 0))]
    for run in _runs(sorted(needed), max(1, TOGETHER // mask.block[0])):
        at = slice(run[0] * mask.block[0], min((run[-1] + 1) * mask.block[0], mask.q_len))
        own = _positions(
            [tile - run[0] for tile in run if tile in tiles], mask.block[0], at.stop - at.start, q.device
        )
        seen = seen_by(mask, at.start, at.stop, q.shape[1])
        met_keys = seen.flatten(0, 2).any(0).nonzero().flatten()
        seen = seen[..., met_keys].expand(q.shape[0], -1, -1, -1)
        there = place[met_keys] >= 0
        to = place[met_keys[there]]
        for kind, parts in enumerate(_grad_tile(call, at, met_keys, seen)):
            of_queries[kind].append(parts[0][:, :, own])
            for whole, part in zip(sums[kind], parts[1:], strict=True):
                whole.index_add_(2, to, part[:, :, there])
        seen_keys[:, :, to] += seen.sum(2).unflatten(1, (k.shape[1], -1)).sum(2)[..., there]
        seeing.append(seen.sum(-1)[:, :, own])
    exact, dense, fused, terms, inner = (
        [torch.cat(rows, 2), *more] for rows, more in zip(of_queries, sums, strict=True)
    )
    return _Truth(exact, dense, fused, terms, inner, [torch.cat(seeing, 2), seen_keys, seen_keys])


def _runs(tiles: Sequence[int], most: int) -> list[list[int]]:
    """The tiles, in order, those together that are neighbours, at most so many."""
    runs: list[list[int]] = []
    for tile in tiles:
        if runs and tile == runs[-1][-1] + 1 and len(runs[-1]) < most:
            runs[-1].append(tile)
        else:
            runs.append([tile])
    return runs


def _grad_tile(call: _BudgetCall, at: slice, keys: Tensor, seen: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """dq, dk and dv between the queries `at` and `keys`: in float64, of dense attention, of its fused kernels, their
    terms' squares, and the variances of the factors of these terms.
    """
    q, k, v, mask, grad, grad_lse, scale, scores = call
    places = places_of(mask, at.start, at.stop)
    places = places[0], places[1][keys]
    q, k, v, grad = q[:, :, at], k[:, :, keys], v[:, :, keys], grad[:, :, at]
    of_lse = None if grad_lse is None else grad_lse[:, :, at]
    empty = ~seen.any(-1, keepdim=True)
    heads = k.shape[1]

    def per_key_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads, -1)).sum(2)

    q64, k64, v64, grad64 = (x.double() for x in (q, k, v, grad))
    out, lse = attend(q64, k64, v64, seen, scale, scores, places)
    yield attend_backward(q64, k64, v64, seen, scale, out, lse, grad64, of_lse, scores, places)

    wide = torch.promote_types(q.dtype, torch.float32)
    leaves = [x.to(wide).detach().requires_grad_() for x in (q, met(k, seen), met(v, seen))]
    grads = [grad.to(wide).masked_fill(empty, 0)]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        attn_mask = seen | empty
        if scores.plain:
            dense = [functional.scaled_dot_product_attention(*leaves, attn_mask=attn_mask, scale=scale)]
            if of_lse is not None:
                s = (leaves[0] @ leaves[1].mT * scale).masked_fill(~attn_mask, -torch.inf)
                dense.append(s.logsumexp(-1))
        else:
            both = attend(leaves[0], leaves[1], leaves[2], attn_mask, scale, scores, places)
            dense = list(both[: 1 if of_lse is None else 2])
        if of_lse is not None:
            grads.append(of_lse.to(wide).masked_fill(empty.squeeze(-1), 0))
        dq, dk, dv = torch.autograd.grad(dense, leaves, grads)
    yield dq, per_key_head(dk), per_key_head(dv)
    rounded, low_lse = attend(q, k, v, seen, scale, scores, places)
    q_wide, k_wide, v_wide = (x.to(wide) for x in (q, k, v))
    yield attend_backward(
        q_wide, k_wide, v_wide, seen, scale, rounded, low_lse, grad.to(wide), of_lse, scores, places
    )

    k64, v64, grad64 = met(k64, seen), met(v64, seen), grad64.masked_fill(empty, 0)
    weights, shift = _weights(q64, k64, seen, scale, lse, scores, places)
    mean_key = weights @ k64
    weights = weights.square()
    # <grad, out> reads an out that is rounded, as were the weights that it is of. All keys of a query share that error.
    shared = (weights * (grad64 @ v64.mT).square()).sum(-1, keepdim=True)
    of_out = (grad64.square() * out.square()).sum(-1, keepdim=True) + shared
    # Weights and their gradients below the smallest normal number are rounded as if they were that.
    least = torch.finfo(q.dtype).tiny ** 2 * seen
    reach = grad64.square() @ v64.square().mT
    reach = reach + (weights * reach).sum(-1, keepdim=True)
    if of_lse is not None:
        reach = reach + of_lse.double().square().masked_fill(empty.squeeze(-1), 0).unsqueeze(-1)
    terms = weights * reach * scale**2
    # <grad, v> and <grad, out> are sums over v's dim; each step rounds at most their total magnitude.
    made = terms * (shift + 2 * v.shape[3])

    def squares(of_scores: Tensor, of_weights: Tensor) -> tuple[Tensor, ...]:
        of_keys = of_scores.mT @ q64.square(), of_weights.mT @ grad64.square()
        return of_scores @ k64.square(), *map(per_key_head, of_keys)

    of_q, of_k, of_v = squares(terms + least * scale**2, weights + least)
    of_q = of_q + of_out * (scale * mean_key).square()
    yield of_q, of_k + squares(weights * of_out * scale**2, weights)[1], of_v
    yield squares(made, weights * shift)


def _judge_gradients(found: Sequence[Tensor], truth: _Truth) -> AttentionGradGate:
    gates = []
    for mine, exact, dense, fused, terms, inner, counts in zip(found, *truth, strict=True):
        unit = summing_unit(mine.dtype)
        sums = sum_variance(exact, terms, counts.unsqueeze(-1), unit) + ROUNDED * unit**2 * inner
        rounding = rounding_of_terms(exact, sums, terms, mine.dtype)
        gates.append(Bound(exact, rounding, [x.to(mine.dtype) for x in (dense, fused)]).judge(mine))
    unseen_hold = not any(bool(x[n == 0].any()) for x, n in zip(found, truth.counts, strict=True))
    worst = max(gates, key=lambda gate: gate.error / gate.budget)
    errors, budgets = (tuple(getattr(gate, part) for gate in gates) for part in ("error", "budget"))
    passed = unseen_hold and all(gate.passed for gate in gates)
    return AttentionGradGate(worst.error, worst.budget, passed, errors, budgets, unseen_hold)


def _chosen(name: str, chosen: Sequence[int] | None, most: int) -> list[int]:
    """The indices in 0 to most - 1 to check, in order."""
    if chosen is None:
        return list(range(most))
    if not all(0 <= i < most for i in chosen):
        raise InvalidInput(f"{name} must name 0 to {most - 1}, got {list(chosen)}")
    return sorted(set(chosen))


def _positions(blocks: Sequence[int], size: int, length: int, device: torch.device) -> Tensor:
    """The positions of some blocks; the last block may be ragged."""
    at = torch.tensor(blocks, dtype=torch.int64, device=device)[:, None] * size + torch.arange(
        size, device=device
    )
    return at[at < length]


def _visiting(mask: BlockMask, columns: Sequence[int]) -> set[int]:
    """The query tiles that visit any of these key blocks."""
    if len(columns) == mask.grid[1]:
        return set(range(mask.grid[0]))
    wanted = torch.tensor(columns, dtype=torch.int64, device=mask.device)
    heads = torch.arange(mask.batch * mask.heads, device=mask.device) * mask.grid[1]
    tiles = set()
    for lists in mask.transposed[:2]:
        _, entries = stored_entries(lists, (heads[:, None] + wanted).flatten())
        tiles.update(lists.indices[entries].tolist())
    return tiles


def _weights(
    q: Tensor, k: Tensor, seen: Tensor, scale: float, lse: Tensor, changes: Scores, places: Places
) -> tuple[Tensor, Tensor]:
    """The weights [B, Hq, n, T] of keys k [B, Hq, T, D], and the variance of the error of their logarithms, in units
    of that of one rounding: of the score, which is a sum, of its scaling, cap and bias, and of the difference to lse.
    """
    scores = q @ k.mT * scale
    sizes = scores.square() + lse.masked_fill(lse == -torch.inf, 0).square().unsqueeze(-1)
    if changes.softcap:  # tanh is rounded to the last bit of 1
        sizes = sizes + changes.softcap**2
    if changes.alibi_slopes is not None:
        slopes = changes.slopes(*q.shape[:2]).double()
        sizes = sizes + (slopes[..., None, None] * distances(*places)).square()
    raw, (scores, _) = scores, changed(scores, changes, places)
    shift = sum_variance(raw, (q.square() @ k.square().mT) * scale**2, q.shape[3], ROUNDED**-0.5)
    weights = (scores - lse.unsqueeze(-1)).masked_fill(~seen, -torch.inf).exp()
    # An exponential adds three roundings, and so does the normalisation.
    return weights, (shift + 2 * sizes + 6).masked_fill(~seen, 0)


def rounding_of_terms(exact: Tensor, sums: Tensor, squares: Tensor, dtype: torch.dtype) -> Rounding:
    """Rounding errors of sums of terms, which may be rounded to `dtype` too. `squares` are sums of their squares.

    The elements of one query, or key, share their weights' errors: none is judged by less than their mean.
    """
    each = sums + stored_variance(exact.square() + squares, dtype)
    return Rounding(sums, torch.maximum(each, each.mean(-1, keepdim=True)), dtype)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, at: Tensor, scale: float, scores: Scores
) -> tuple[Tensor, ...]:
    """Of one tile of queries: out in float64, out of dense attention, lse in float64; the variance of out's sums, and
    the sum of its terms' squares.
    """
    seen = seen_by(mask, int(at[0]), int(at[-1]) + 1, q.shape[1])
    q, k, v = q[:, :, at], met(k, seen), met(v, seen)
    q64, k64, v64 = q.double(), k.double(), v.double()
    places = places_of(mask, int(at[0]), int(at[-1]) + 1)
    exact, lse = attend(q64, k64, v64, seen, scale, scores, places)
    if scores.plain:
        with sdpa_kernel(SDPBackend.MATH):
            dense = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    else:
        dense, _ = attend(q, k, v, seen, scale, scores, places)
    weights, shift = _weights(q64, k64, seen, scale, lse, scores, places)
    sums, squares = out_variance(weights, shift, v64, exact, seen, summing_unit(q.dtype))
    return exact, dense.masked_fill(~seen.any(-1, keepdim=True), 0), lse, sums, squares


def out_variance(
    weights: Tensor, shift: Tensor, v: Tensor, exact: Tensor, seen: Tensor, unit: float
) -> tuple[Tensor, Tensor]:
    """The variance of the sums of weights [..., n, T] times v [..., T, Dv], which are `exact`, and the sums of their
    terms' squares. `shift`: the variance of the error of the weights' logarithms, in units of that of one rounding.
    """
    count = seen.sum(-1, keepdim=True)
    squares = weights.square() @ v.square()
    # An error in a weight changes its term, and all others through the sum of weights, which is a long sum itself.
    moved = weights.square() * shift
    inner = moved @ v.square() + (moved.sum(-1, keepdim=True) + count / 3) * exact.square()
    return sum_variance(exact, squares, count, unit) + ROUNDED * unit**2 * inner, squares


def judge_attention(
    out: Tensor, lse: Tensor | None, expected: Any, blank: Tensor, low: float
) -> AttentionGate:
    """The gate of out [..., Dv] and lse [...], whose `exact`, `dense`, `sums`, `squares` and `lse` are expected.
    `blank`: rows that must be 0. lse may be off by `low` in 16 bits, absolute and relative.
    """
    rounding = rounding_of_terms(expected.exact, expected.sums, expected.squares, out.dtype)
    gate = Bound(expected.exact, rounding, [expected.dense]).judge(out)
    off, slack = (out.double() - expected.exact).abs(), low if out.dtype in dtypes.LOW else LSE_HIGH
    holds, lse_largest, lse_holds = bool((out[blank] == 0).all()), 0.0, True
    if lse is not None:
        empty = expected.lse == -torch.inf
        holds &= bool((lse[empty] == -torch.inf).all())
        wrong = (lse.double() - expected.lse)[~empty].abs()
        lse_holds = bool((wrong <= slack * (1 + expected.lse[~empty].abs())).all())
        lse_largest = float(wrong.max()) if wrong.numel() else 0.0
    largest = float(off.max()) if off.numel() else 0.0
    return AttentionGate(
        gate.error, gate.budget, gate.passed and holds and lse_holds, largest, lse_largest, holds
    )
