"""spmm and linear of a matrix in every storage under torch.compile, and the torch.library op behind them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from tests.ops.operands import calls
from tests.ops.operands import op_args as args
from tests.ops.storages import F16, F32, IN_FP8, TWO_FOUR, WIDE, matrix
from tests.sampling import sampled
from tests.sums import apart

OP = torch.ops.sparsek.spmm
LEFT: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "A @ B": (lambda a, b: a @ b, (192, 40)),
    "spmm(A, B)": (lambda a, b: sk.spmm(a, b, alpha=0.5), (2, 192, 8)),
    "linear": (lambda a, x: sk.linear(x, a, None, "gelu"), (2, 5, 192)),
}
RIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "X @ A": (lambda a, x: x @ a, (40, 128)),
    "spmm(X, A)": (lambda a, x: sk.spmm(x, a), (2, 5, 128)),
}
ROUNDED: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "rounded before": (lambda a, x: sk.linear(sk.quantize(x, check=False), a, dtype=F16), (5, 192))
}
COMPILED = [
    pytest.param(storage, *call, id=f"{storage}-{name}")
    for storages, named in ((WIDE, LEFT | RIGHT), (IN_FP8, LEFT | ROUNDED))
    for storage in storages
    for name, call in sampled(list(named.items()), 2 if storage != "bsr" else len(named), of=storage)
]


@pytest.mark.parametrize(("storage", "run", "shape"), COMPILED)
def test_compiled_it_is_one_node_of_one_graph(storage: str, run: Any, shape: tuple[int, ...], recorder: Any):
    a, b = matrix(storage, F32), torch.randn(shape)
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    assert torch.equal(compiled(a, b), run(a, b))
    assert torch.equal(compiled(a, -2 * b), run(a, -2 * b))
    (graph,) = map(calls, recorder.fw_graphs or recorder.graphs)
    assert ["sparsek" in call for call in graph].count(True) == 1
    if storage in WIDE:
        assert all(call.split(".")[0] in ("aten", "sparsek") for call in graph)
        assert not any("clone" in call or "copy" in call for call in graph)


@pytest.mark.parametrize("storage", TWO_FOUR)
def test_compiled_a_layer_learns_as_eagerly(storage: str):
    torch._dynamo.reset()
    a = matrix(storage, F32)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((6, 192), (128,), (6, 128))]

    def run(x: Tensor, bias: Tensor, rest: Tensor) -> Tensor:
        return sk.linear(x, a, bias, "relu", rest)

    eager, compiled = run(*leaves), torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(eager, compiled)
    expected = torch.autograd.grad(eager.square().sum(), leaves)
    for mine, right in zip(torch.autograd.grad(compiled.square().sum(), leaves), expected, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("storage", WIDE)
def test_compiled_once_for_every_n(storage: str, recorder: Any):
    a = matrix(storage, F32)
    compiled = torch.compile(lambda x: sk.linear(x, a), fullgraph=True, backend=recorder)
    for n in (40, 56, 200):
        x = torch.randn(n, 192)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), sk.linear(x, a))
    assert len(recorder.fw_graphs) == 1


def of_others(b: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Calls of the plans of other products."""
    a = matrix("bsr", F32)
    at = (a.T @ a).pattern
    of_sddmm, of_spgemm = sk.plan_sddmm(b, b.mT, at), sk.plan_spgemm(a, a.T)
    return [lambda b: of_sddmm(b, b.mT, at), lambda b: of_spgemm(a, a.T)]


@pytest.mark.parametrize("storage", WIDE)
def test_compiled_what_cannot_be_is_told(storage: str):
    a, b = matrix(storage, F32), torch.randn(192, 40)
    plan = sk.plan_spmm(a, b)
    for run, text in (
        (lambda b: sk.spmm(a, b, out=torch.empty(128, 40)), "do not go through torch.compile"),
        *((run, "plans do not go through torch.compile") for run in (lambda b: plan(a, b), *of_others(b))),
        (lambda b: a @ b[:100], r"B needs 192 rows"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(run, fullgraph=True, backend="aot_eager")(b)


@pytest.mark.parametrize(
    ("shape", "turned"), [((40,), False), ((2, 7), True), ((0,), False), ((40,), True)], ids=str
)
@pytest.mark.parametrize("storage", TWO_FOUR)
def test_the_op_passes_torchs_own_checks(storage: str, shape: tuple[int, ...], turned: bool):
    a = matrix(storage, F32)
    b = torch.randn(*shape[:-1], 128 if turned else 192, shape[-1])
    by_columns = turned or len(shape) > 1
    b = b.mT.contiguous().mT if by_columns else b
    given = tuple(args(a, b.requires_grad_(), turned=turned, alpha=2.0, by_columns=by_columns))
    # Eagerly and compiled, sums may run in two orders. Against float64 both were right where they were 1.7 of torch's
    # tolerance apart (2026-11-28).
    torch.library.opcheck(OP.default, given, rtol=1.3e-6, atol=apart(F32, 192, 2 * 192**0.5))


@pytest.mark.parametrize(
    ("storage", "by_columns", "act"), sampled(list(product(WIDE, (False, True), ("", "relu"))), 2 * len(WIDE))
)
def test_the_op_with_an_epilogue_passes_torchs_own_checks(storage: str, by_columns: bool, act: str):
    a = matrix(storage, F32)
    b = torch.randn(24, 192).T if by_columns else torch.randn(192, 24)
    other = torch.randn(24, 128).T if by_columns else torch.randn(128, 24)
    epilogue = {"bias": torch.randn(128).requires_grad_(), "act": act, "by_columns": by_columns}
    if not act:
        epilogue["other"] = other.detach().requires_grad_()
    torch.library.opcheck(OP.default, tuple(args(a, b.detach().requires_grad_(), **epilogue)))
    if act:
        return
    fused: dict[str, Any] = {"act": "silu", "other": other, "combine": "mul", "by_columns": by_columns}
    torch.library.opcheck(OP.default, tuple(args(a, b, **fused)))


@pytest.mark.parametrize("storage", TWO_FOUR)
def test_the_op_copies_parts_that_no_kernel_reads(storage: str):
    a, b = matrix(storage, F32), torch.randn(192, 8)
    values, meta = a.values, a.meta
    odd = torch.cat((values.new_zeros(1), values.flatten()))[1:].view(values.shape)
    apart = meta.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(OP(*args(a, b)._replace(values=odd, meta=apart)), a @ b)


@pytest.mark.parametrize("storage", WIDE)
def test_the_op_checks_what_it_is_given(storage: str):
    a, b = matrix(storage, F32), torch.randn(192, 8)
    for wrong, text in (
        (b[:95], r"A of the product is \[128, 192\] and B \[95, 8\]"),
        (b.double(), "cast one of them"),
        (b[:, 0], r"and B \[192\]"),
    ):
        with pytest.raises(InvalidInput, match=text):
            OP(*args(a, wrong))
    with pytest.raises(InvalidInput, match="this product needs"):
        OP(*args(a, b, bias=torch.randn(192)))
    torch.testing.assert_close(OP(*args(a, torch._neg_view(b))), -(a @ b))
