"""Runs one kernel of 2:4 products without the planner: problem, config, work, the output it was given."""

from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue
from sparsek.testing.budget24 import check_24
from sparsek.testing.cases24 import Case24
from sparsek.testing.poison import poisoned
from tests.kernels.planned import posed

# What hypothesis draws for a Case24: layouts of B, C and the epilogue's matrix; alpha, bias, activation, combine.
LAYOUTS = st.tuples(
    st.sampled_from(["row", "col", "strided", "wide"]),
    st.sampled_from(["row", "col"]),
    st.sampled_from(["row", "col"]),
)
EPILOGUES = st.tuples(
    st.sampled_from([1.0, -0.5]),
    st.booleans(),
    st.sampled_from(list(ACTIVATIONS)),
    st.sampled_from(["", "add", "mul"]),
)


def problem(
    a: Semi24 | BSR24, b: Tensor, epilogue: Epilogue = PLAIN, out: Tensor | None = None, turned: bool = False
) -> SpmmProblem:
    """The problem that a @ b, or a.T @ b, poses, C lying as `out` does."""
    return posed(a, b, out, epilogue, turned=turned)


def multiply(
    kernel: Any,
    a: Semi24 | BSR24,
    b: Tensor,
    epilogue: Epilogue = PLAIN,
    out: Tensor | None = None,
    *,
    turned: bool = False,
    config: Any = None,
) -> Tensor:
    """`out`, once `kernel` has written a @ b, or a.T @ b, with the epilogue into it; a new one starts full of NaN."""
    if out is None:
        m = a.shape[1] if turned else a.shape[0]
        out = poisoned((*b.shape[:-2], m, b.shape[-1]), b.dtype, b.device)
    p = problem(a, b, epilogue, out, turned)
    assert kernel.why_not(p) == []
    c = kernel.default(p) if config is None else config
    kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    return out


def hold(
    kernel: Any, case: Case24, dtype: Any, device: str = "cpu", seed: int = 0, config: Any = None
) -> None:
    """The kernel's product is within the error budget."""
    a, b, epilogue, out = case.make(device, dtype, seed)
    multiply(kernel, a, b, epilogue, out, turned=case.transposed, config=config)
    gate = check_24(a, b, out, epilogue, transposed=case.transposed)
    assert gate.passed, f"{case}: {gate}"
