"""Runs one kernel of SDDMM or of BSR x BSR without the planner: problem, config, work, a poisoned output."""

from typing import Any

from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.matches import Matches, match
from sparsek.plan.operands import layout
from sparsek.plan.problem import SddmmProblem, SpgemmProblem
from sparsek.testing.poison import poisoned


def sddmm_problem(x: Tensor, y: Tensor, pattern: BlockPattern) -> SddmmProblem:
    """The problem that X @ Y at `pattern` poses."""
    lengths = pattern.row_lengths
    return SddmmProblem(
        m=x.shape[0],
        k=x.shape[1],
        n=y.shape[1],
        block=pattern.block,
        nnzb=pattern.nnzb,
        dtype=dtypes.name(x.dtype),
        card=card_of(x.device),
        x_layout=layout(x),
        y_layout=layout(y),
        aligned=False,
        row_max=int(lengths.max()) if lengths.numel() else 0,
    )


def sample(kernel: Any, x: Tensor, y: Tensor, pattern: BlockPattern, config: Any = None) -> BSR:
    """X @ Y at `pattern` by `kernel`, into values full of NaN."""
    p = sddmm_problem(x, y, pattern)
    assert kernel.why_not(p) == []
    c = kernel.default(p) if config is None else config
    values = poisoned((pattern.nnzb, *pattern.block), x.dtype, x.device)
    kernel.launch(c, kernel.prepare(p, c, pattern), x, y, pattern, values)
    return BSR.unchecked(pattern, values)


def spgemm_problem(a: BSR, b: BSR, matches: Matches, dense_out: bool) -> SpgemmProblem:
    """The problem that A @ B poses with these matches."""
    return SpgemmProblem(
        m=a.shape[0],
        k=a.shape[1],
        n=b.shape[1],
        a_block=a.block,
        b_block=b.block,
        nnzb_a=a.nnzb,
        nnzb_b=b.nnzb,
        nnzb_out=matches.pattern.nnzb,
        pairs=matches.pairs,
        pairs_max=matches.longest,
        dtype=dtypes.name(a.dtype),
        card=card_of(a.device),
        dense_out=dense_out,
        a_transposed=a.order is not None,
        b_transposed=b.order is not None,
    )


def join(
    kernel: Any, a: BSR, b: BSR, wanted: BlockPattern | None = None, *, dense_out: bool, config: Any = None
) -> "Tensor | BSR":
    """A @ B by `kernel`, into an output full of NaN: dense, or a BSR of the wanted pattern."""
    matches = match(a.pattern, b.pattern, wanted)
    p = spgemm_problem(a, b, matches, dense_out)
    assert kernel.why_not(p) == []
    c = kernel.default(p) if config is None else config
    shape = (p.m, p.n) if dense_out else (matches.pattern.nnzb, *p.block)
    out = poisoned(shape, a.dtype, a.device)
    kernel.launch(c, kernel.prepare(p, c, matches), a, b, matches, out)
    return out if dense_out else BSR.unchecked(matches.pattern, out)
