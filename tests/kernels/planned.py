"""Runs one kernel of the table without the planner: problem, config, work, a poisoned output."""

from typing import Any

from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.matrix.bsr import BSR
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.spmm import Product
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.testing.poison import poisoned
from tests.problems import spmm_problem


def problem(a: BSR, b: Tensor) -> SpmmProblem:
    """The problem that A @ B poses."""
    touched = int(a.pattern.indices.unique().numel())
    longest = int(a.pattern.row_lengths.max()) if a.grid[0] else 0
    return spmm_problem(
        m=a.shape[0],
        k=a.shape[1],
        n=b.shape[-1],
        block=a.block,
        nnzb=a.nnzb,
        dtype=dtypes.name(b.dtype),
        card=card_of(b.device),
        batch=b.shape[:-2].numel(),
        b_layout="row" if b.stride(-1) == 1 else "col",
        transposed=a.order is not None,
        row_max=longest,
        touches_all_columns=touched == a.grid[1],
    )


def posed(
    a: Any,
    b: Any,
    out: "Tensor | None" = None,
    epilogue: Epilogue = PLAIN,
    lies: str = "",
    *,
    turned: bool = False,
) -> SpmmProblem:
    """The problem that a @ b, or a.T @ b of a 2:4 matrix, poses. C lies as `out` or `lies` says."""
    if not lies:
        lies = "col" if out is not None and out.stride(-2) == 1 and out.stride(-1) != 1 else "row"
    dtype = b.dtype if out is None else out.dtype
    return Product(a, turned, b, out, epilogue, lies, dtype).problem(card_of(b.device))


def multiply(kernel: Any, a: BSR, b: Tensor, config: Any = None, out: "Tensor | None" = None) -> Tensor:
    """A @ B by `kernel`, into an output full of NaN."""
    p = problem(a, b)
    c = kernel.default(p) if config is None else config
    result = poisoned((*b.shape[:-2], a.shape[0], b.shape[-1]), b.dtype, b.device) if out is None else out
    kernel.launch(c, kernel.prepare(p, c, a), a, b, result)
    return result
