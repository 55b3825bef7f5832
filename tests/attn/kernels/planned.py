"""Runs one kernel of any operation without the planner's choice: problem, config, work, a poisoned output."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.quantized_heads import QuantizedHeads
from sparsek.attn.plan import attention_operands
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_fp8 import AttendedFp8
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import PLAIN as PLAIN_SCORES
from sparsek.attn.reference.scores import Scores
from sparsek.core.device import card_of
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.matches import Matches, match
from sparsek.products.plan.operands import layout
from sparsek.products.plan.problems import SddmmProblem, SpgemmProblem, SpmmProblem
from sparsek.products.plan.sddmm import Sampled
from sparsek.products.plan.spgemm import Pair
from sparsek.products.plan.spmm import Product
from sparsek.products.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue
from sparsek.testing.budget import CORE, check_spmm
from sparsek.testing.poison import poisoned
from tests.products.cases import Case, judged_by
from tests.sampling import sampled


def problem(
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
        lies = "col" if out is not None and layout(out) == "col" else "row"
    dtype = _dtype(b) if out is None else out.dtype
    return Product(a, turned, b, out, epilogue, lies, dtype).problem(card_of(b.device))


def multiply(
    kernel: Any,
    a: Any,
    b: Any,
    epilogue: Epilogue = PLAIN,
    out: "Tensor | None" = None,
    *,
    turned: bool = False,
    config: Any = None,
    refused: bool = False,
) -> Tensor:
    """`out`, once `kernel` has written a @ b, or a.T @ b, with the epilogue into it; a new one starts full of NaN.

    The kernel must take the problem, or refuse it if it is `refused`, and is run all the same.
    """
    if out is None:
        out = poisoned((*b.shape[:-2], a.shape[1 if turned else 0], b.shape[-1]), _dtype(b), b.device)
    p = problem(a, b, out, epilogue, turned=turned)
    assert bool(kernel.why_not(p)) == refused
    c = kernel.default(p) if config is None else config
    kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    return out


def hold(
    kernel: Any,
    case: Case,
    dtype: "torch.dtype | None" = None,
    device: str = "cpu",
    seed: int = 0,
    config: Any = None,
    core: float = CORE,
    refused: bool = False,
) -> None:
    """The kernel's product is within the error budget, and the epilogue's other matrix is as it was."""
    a, b, epilogue, out = case.make(device, dtype, seed)
    judged = judged_by(epilogue)
    multiply(kernel, a, b, epilogue, out, turned=case.turned, config=config, refused=refused)
    if epilogue.other is not None and not case.in_place:
        assert judged.other is not None
        assert torch.equal(epilogue.other, judged.other), f"{case} wrote into its other matrix"
    gate = check_spmm(a, b, out, judged, transposed=case.turned, core=core)
    assert gate.passed, f"{case}: {gate}"


def sddmm_problem(x: Tensor, y: Tensor, pattern: BlockPattern) -> SddmmProblem:
    """The problem that X @ Y at `pattern` poses."""
    return Sampled(x, y, pattern).problem(card_of(x.device))


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
    return Pair(a, b, matches, dense_out).problem(card_of(a.device))


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


def attention_problem(
    q: Any, k: Any, v: Any, mask: BlockMask, *, lse: bool = True, scores: Scores = PLAIN_SCORES
) -> AttentionProblem:
    """The problem that attention of q, k and v, tensors or QuantizedHeads, under `mask` poses."""
    call: Any = AttendedFp8 if isinstance(q, QuantizedHeads) else Attended
    return call(q, k, v, mask, return_lse=lse, scores=scores).problem(card_of(q.device))


def attend(
    kernel: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: BlockMask,
    config: Any = None,
    scale: float | None = None,
    scores: Scores = PLAIN_SCORES,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `kernel`, written over NaN."""
    p = attention_problem(q, k, v, mask, scores=scores)
    c = kernel.default(p) if config is None else config
    if isinstance(q, QuantizedHeads):
        out = poisoned((*q.shape[:3], v.shape[3]), q.source_dtype, q.device)
    else:
        out = attention_operands.empty_out(q, v.shape[3]).fill_(float("nan"))
    lse = poisoned(q.shape[:3], attention_operands.lse_dtype(out.dtype), q.device)
    work = kernel.prepare(p, c, mask)
    factor = attention_operands.checked_scale(scale, q.shape[3])
    kernel.launch(c, work, AttentionCall(q, k, v, mask, factor, out, lse, scores))
    return out, lse


def _dtype(b: Any) -> torch.dtype:
    """C's, unless an output says another."""
    return b.dtype if isinstance(b, Tensor) else torch.float32


@st.composite
def semi24_cases(draw: Any) -> Case:
    """Any product of a 2:4 matrix."""
    rows, columns, view = draw(st.integers(0, 70)), 8 * draw(st.integers(0, 17)), draw(st.booleans())
    m, k = (columns, rows) if view else (rows, columns)
    row_or_col = st.sampled_from(["row", "col"])
    return Case(
        m,
        k,
        draw(st.integers(0, 40)),
        None,
        "any",
        view=view,
        alpha=draw(st.sampled_from([1.0, -0.5])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        combine=draw(st.sampled_from(["", "add", "mul"])),
        beta=0.5,
        layouts=draw(st.tuples(st.sampled_from(["row", "col", "strided", "wide"]), row_or_col, row_or_col)),
        batch=draw(st.sampled_from([(), (2,), (2, 1)])),
    )


def default_and(count: int, kernel: Any, p: Any, of: object = "") -> list[Any]:
    """The default config, and `count` of the others, in every run others: each takes seconds to compile."""
    default = kernel.default(p)
    return (
        [default]
        if count == 0
        else [default, *sampled([c for c in kernel.configs(p) if c != default], count, of=of)]
    )
