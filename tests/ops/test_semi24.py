"""spmm and linear with Semi24 and BSR24: what they multiply eagerly, in how many plans, and what they refuse."""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.ops.linear import plan_layer
from sparsek.reference.epilogue import ACTIVATIONS, Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear

BF16 = torch.bfloat16
KINDS = ("semi24", "bsr24")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def matrix(kind: str, dtype: torch.dtype = BF16, device: str = "cpu", m: int = 128, k: int = 192) -> Any:
    """A random Semi24 or BSR24 [128, 192], the latter in blocks of 64 of which about half are stored."""
    dense = torch.randn(m, k, device=device).to(dtype)
    if kind == "semi24":
        return Semi24.from_dense(dense)
    mask = torch.rand(-(-m // 64), -(-k // 64), device=device) < 0.6
    mask[0, 0], mask[-1, -1] = True, True
    return BSR24.from_bsr(sk.BSR.from_dense(dense, 64, mask=mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_multiplies_on_both_sides(kind: str, dtype: torch.dtype, device: str):
    a = matrix(kind, dtype, device)
    b, x = torch.randn(192, 40, device=device).to(dtype), torch.randn(24, 128, device=device).to(dtype)
    c, y = a @ b, x @ a
    assert check_spmm(a, b, c).passed
    assert check_spmm(a, x.mT, y.mT, transposed=True).passed
    for again, first in (
        (sk.spmm(a, b), c),
        (sk.spmm(x, a), y),
        (torch.matmul(a, b), c),
        (torch.matmul(x, a), y),
    ):
        assert again.is_contiguous()
        assert torch.equal(again, first)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_the_dense_operand_multiply(kind: str, shape: tuple[int, ...], device: str):
    a = matrix(kind, device=device)
    b, x = (
        torch.randn(*shape, 192, 16, device=device).to(BF16),
        torch.randn(*shape, 8, 128, device=device).to(BF16),
    )
    c, y = a @ b, x @ a
    assert c.shape == (*shape, 128, 16)
    assert y.shape == (*shape, 8, 192)
    assert c.is_contiguous()
    assert y.is_contiguous()
    assert check_spmm(a, b, c).passed
    assert check_spmm(a, x.mT, y.mT, transposed=True).passed


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "col": lambda b: b.T.contiguous().T,
    "slice of rows": lambda b: torch.cat((b, b, b), 1)[:, 40:80],
    "slice of a col": lambda b: torch.cat((b, b), 0).T.contiguous().T[: b.shape[0]],
    "every second column": lambda b: b.repeat_interleave(2, 1)[:, ::2],
    "every fourth row": lambda b: b.repeat_interleave(4, 0)[::4],
    "one column for all": lambda b: b[:, :1].expand(-1, 40),
    "one matrix for all": lambda b: b.expand(3, -1, -1),
    "swapped batches": lambda b: torch.stack((b, -b, b + 1, b * 2, b, b)).view(2, 3, 192, 40).transpose(0, 1),
    "batches of cols": lambda b: torch.stack((b.T, -b.T)).mT,
    "batch innermost": lambda b: torch.stack((b, -b), 2).permute(2, 0, 1),
    "one column": lambda b: b[:, 7:8],
    "odd start": lambda b: torch.cat((b.flatten()[:1], b.flatten()))[1:].view(192, 40),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_operand_may_lie_in_memory_as_it_likes(kind: str, name: str, device: str):
    a = matrix(kind, device=device)
    b = LAYOUTS[name](torch.randn(192, 40, device=device).to(BF16))
    c = a @ b
    assert c.is_contiguous()
    assert check_spmm(a, b, c).passed
    y = sk.linear(b.mT, a)
    assert y.is_contiguous()
    assert check_linear(b.mT, a, y).passed


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.0), (1.0, 1.0), (-0.5, 0.25), (0.0, 2.0)])
@pytest.mark.parametrize("family", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_alpha_beta_and_out(kind: str, family: str, alpha: float, beta: float, side: str):
    a = matrix(kind)
    turned = side == "right"
    left, right = (torch.randn(2, 24, 128).to(BF16), a) if turned else (a, torch.randn(2, 192, 24).to(BF16))
    shape = (2, 24, 192) if turned else (2, 128, 24)
    start = torch.randn(shape).to(BF16) if beta else poisoned(shape, BF16)
    out = start.clone()
    assert sk.spmm(left, right, alpha=alpha, beta=beta, out=out, kernel=f"{family}.{kind}") is out
    dense, start, out = (left.mT, start.mT, out.mT) if turned else (right, start, out)
    epilogue = Epilogue(alpha=alpha, other=start if beta else None, beta=beta)
    gate = check_spmm(a, dense, out, epilogue, transposed=turned)
    assert gate.passed, gate


@pytest.mark.parametrize("kind", KINDS)
def test_out_may_be_part_of_a_larger_matrix(kind: str, device: str):
    a = matrix(kind, device=device)
    b, x = torch.randn(192, 40, device=device).to(BF16), torch.randn(2, 8, 128, device=device).to(BF16)
    for shape, call, turned, dense in (
        ((128, 40), lambda out: sk.spmm(a, b, out=out), False, b),
        ((2, 8, 192), lambda out: sk.spmm(x, a, out=out), True, x.mT),
    ):
        room = poisoned((*shape[:-1], shape[-1] + 11), BF16, device)
        out = room[..., 3 : shape[-1] + 3]
        assert call(out) is out
        assert check_spmm(a, dense, out.mT if turned else out, transposed=turned).passed
        assert room[..., :3].isnan().all()
        assert room[..., shape[-1] + 3 :].isnan().all()


@pytest.mark.parametrize("act", [None, *list(ACTIVATIONS)[1:]])
@pytest.mark.parametrize("parts", ["", "bias", "residual", "bias and residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_launch_within_the_error_budget(
    kind: str, parts: str, act: str | None, device: str, plans_made: list[str]
):
    w = matrix(kind, device=device)
    x, bias, rest = (torch.randn(s, device=device).to(BF16) for s in ((2, 20, 192), (128,), (2, 20, 128)))
    more = bias if "bias" in parts else None, act, rest if "residual" in parts else None
    y = sk.linear(x, w, *more)
    assert y.shape == (2, 20, 128)
    assert y.is_contiguous()
    gate = check_linear(x, w, y, *more)
    assert gate.passed, gate
    assert len(plans_made) == 1
    assert torch.equal(sk.linear(x.clone(), w, *more), y)
    assert len(plans_made) == 1


@pytest.mark.parametrize(
    "shape", [(192,), (1, 192), (64, 192), (2, 3, 4, 192), (0, 192), (2, 0, 192)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_leading_dims_are_tokens(kind: str, shape: tuple[int, ...], device: str):
    w, x = matrix(kind, device=device), torch.randn(shape, device=device).to(BF16)
    rest = torch.randn(*shape[:-1], 128, device=device).to(BF16)
    y = sk.linear(x, w, None, "silu", rest)
    assert y.shape == (*shape[:-1], 128)
    assert check_linear(x, w, y, None, "silu", rest).passed


@pytest.mark.parametrize("learns", [False, True], ids=["fused", "for training"])
def test_swiglu_takes_them(learns: bool, device: str):
    gate, up = matrix("semi24", torch.float32, device), matrix("bsr24", torch.float32, device)
    x = torch.randn(2, 5, 192, device=device, requires_grad=learns)
    y = sk.swiglu(x, gate, up)
    expected = torch.nn.functional.silu(x @ gate.to_dense().mT) * (x @ up.to_dense().mT)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_kernel_runs_or_says_why_not(kind: str):
    a, b = matrix(kind, torch.float32), torch.randn(192, 16)
    for family in ("cpu", "reference"):
        assert sk.plan_spmm(a, b, kernel=f"{family}.{kind}").kernel == f"{family}.{kind}"
        assert check_spmm(a, b, sk.spmm(a, b, kernel=f"{family}.{kind}")).passed
    with pytest.raises(
        Unsupported, match=rf"portable\.{kind} cannot run this; .*cpu\.{kind}, reference\.{kind} can"
    ):
        sk.spmm(a, b, kernel=f"portable.{kind}")
    with pytest.raises(Unsupported, match=r"cpu.spmm cannot run this; (.|\n)*cpu.spmm: multiplies BSR, not "):
        sk.linear(b.mT, a, kernel="cpu.spmm")
    with pytest.raises(
        InvalidInput, match=rf"no kernel of spmm is called 'cpu.other'; known: hopper\.{kind}"
    ):
        sk.linear(b.mT, a, kernel="cpu.other")


def test_a_plan_of_a_semi24_explains_itself_and_fits_others_of_its_shape():
    a, other = matrix("semi24"), matrix("semi24")
    b = torch.randn(192, 40).to(BF16)
    plan = sk.plan_spmm(a, b)
    text = plan.explain()
    assert text.startswith(
        "C = A @ B   A [128, 192] bf16, 2:4, B [192, 40] row-major, on cpu\n  kernel     cpu.semi24"
    )
    assert "not        vendor.cusparselt: " in text
    assert torch.equal(plan(a, b), a @ b)
    assert torch.equal(plan(other, b), other @ b)
    out = poisoned((128, 40), BF16)
    into = sk.plan_spmm(a, b, out=out)
    assert into(a, b, out) is out
    assert torch.equal(out, a @ b)
    assert torch.equal(sk.spmm(a, b, plan=plan), a @ b)


def test_a_plan_of_a_bsr24_belongs_to_its_pattern():
    a, other = matrix("bsr24"), matrix("bsr24")
    x = torch.randn(3, 8, 128).to(BF16)
    plan = sk.plan_spmm(x, a, kernel="reference.bsr24")
    blocks = f"2:4 in {a.nnzb} blocks of 64x64 ({100 * a.pattern.density:.3g} % stored)"
    assert plan.explain().startswith(
        f"C = B @ A   A [128, 192] bf16, {blocks}, B [24, 128] row-major, on cpu\n"
    )
    twin = BSR24.unchecked(a.pattern, -a.values, a.meta)
    assert torch.equal(plan(x, twin), -plan(x, a))
    with pytest.raises(
        InvalidInput,
        match=r"made for another pattern of blocks; .* multiplies A \[128, 192\] .*; got BSR24\(128x192",
    ):
        plan(x, other)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_for_a_card_that_is_not_there_predict(kind: str):
    a, b = matrix(kind), torch.randn(192, 64).to(BF16)
    plan = sk.plan_spmm(a, b, device="h200")
    assert plan.kernel == f"hopper.{kind}"
    assert plan.seconds > plan.bound_seconds > 0
    with pytest.raises(InvalidInput, match="this plan is a prediction for NVIDIA H200"):
        plan(a, b)
    back = sk.plan_spmm(b.mT.new_ones(64, 128), a, device="h200")
    assert back.kernel == f"portable.{kind}"
    assert back.problem.a.transposed


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_a_layer_is_that_of_linear(kind: str):
    w = matrix(kind)
    x, bias, rest = (torch.randn(s).to(BF16) for s in ((2, 5, 192), (128,), (2, 5, 128)))
    epilogue = Epilogue(bias=bias, activation="gelu", other=rest)
    plan = plan_layer(x, w, epilogue=epilogue)
    assert plan.explain().startswith("C = gelu(B @ A.T + bias) + beta * other   A [128, 192] bf16, 2:4")
    assert torch.equal(plan(x, w, epilogue=epilogue), sk.linear(x, w, bias, "gelu", rest))
    with pytest.raises(
        InvalidInput, match=r"made for C = gelu\(A @ B \+ bias\) \+ beta \* other; got A @ B\."
    ):
        plan(x, w)
    with pytest.raises(InvalidInput, match="makes its output; leave out= away"):
        plan(x, w, rest, epilogue=epilogue)
    with pytest.raises(InvalidInput, match="W must be a BSR, Semi24, BSR24 or Quantized, got Tensor"):
        plan(x, w.to_dense())


def test_plans_are_made_once_and_go_with_the_matrix(plans_made: list[str]):
    for kind in KINDS:
        a, b = matrix(kind), torch.randn(192, 40).to(BF16)
        before = len(plans_made)
        for _ in range(3):
            sk.spmm(a, b)
            sk.spmm(a, b.clone())
        assert len(plans_made) == before + 1
        sk.spmm(a, b[:, :16])
        assert len(plans_made) == before + 2
        same = type(a).unchecked(*((a.pattern,) if kind == "bsr24" else ()), a.values.clone(), a.meta)
        sk.spmm(same, b)
        assert len(plans_made) == before + 2
        kept = weakref.ref(a.meta)
        del a, same
        gc.collect()
        assert kept() is None


BAD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "no dense": (lambda a, b: a @ a, "B must be a dense torch.Tensor, got .*24; a .* dense matrices only"),
    "a list": (lambda a, b: sk.spmm(a, [1.0]), "B must be a dense torch.Tensor, got list"),
    "a BSR": (
        lambda a, b: sk.spmm(a, sk.random_bsr(192, 64, 64, 1.0)),
        "must be a dense torch.Tensor, got .*",
    ),
    "vector": (
        lambda a, b: sk.spmm(a, b[:, 0]),
        r"B must be \[K, N\] .* got 1-D; for a vector use B.unsqueeze\(-1\)",
    ),
    "vector left": (
        lambda a, b: sk.spmm(b[:128, 0], a),
        r"A must be \[M, K\] .* got 1-D; .* A.unsqueeze\(0\)",
    ),
    "rows": (lambda a, b: a @ b[:64], r"A is \[128, 192\] and B \[64, 40\]: B needs 192 rows"),
    "columns": (lambda a, b: sk.spmm(b, a), r"A is \[192, 40\] and B \[128, 192\]: A needs 128 columns"),
    "dtype": (lambda a, b: a @ b.double(), "A is torch.bfloat16 and B torch.float64; cast one of them"),
    "device": (lambda a, b: a @ b.to("meta"), "A is on cpu and B on meta; move one of them"),
    "sparse": (lambda a, b: a @ b.to_sparse(), "got layout torch.sparse_coo"),
    "transpose": (lambda a, b: b.T @ a.T, r"has no \.T.*sparsek.linear\(x, W\)"),
    "alpha": (lambda a, b: sk.spmm(a, b, alpha=True), "alpha is True; it must be a finite number"),
    "beta": (lambda a, b: sk.spmm(a, b, beta=2), "beta is 2 and there is no out="),
    "out shape": (lambda a, b: sk.spmm(a, b, out=b), r"out must be torch.bfloat16 \[128, 40\] on cpu"),
    "out shape left": (
        lambda a, b: sk.spmm(b.T.new_ones(4, 128), a, out=b),
        r"out must be torch.bfloat16 \[4, 192\]",
    ),
    "out strides": (
        lambda a, b: sk.spmm(a, b, out=b.new_ones(40, 128).T),
        r"out must have contiguous rows, got strides \(1, 128\)",
    ),
    "out is B": (
        lambda a, b: sk.spmm(a, b, out=b[:128]),
        "out overlaps the memory of B; C would be written where that is read",
    ),
    "other": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b)),
        r"other is torch.bfloat16 \[192, 40\] on cpu; this product needs torch.bfloat16 \[128, 40\]",
    ),
    "bias": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(40))),
        r"bias is torch.bfloat16 \[40\] on cpu; this product needs",
    ),
    "config": (lambda a, b: sk.plan_spmm(a, b, config=1), "config= belongs to one kernel"),
    "plan": (
        lambda a, b: sk.spmm(a, b, plan=object()),  # pyright: ignore[reportArgumentType]
        "plan must come from plan_spmm",
    ),
    "plan of a BSR": (
        lambda a, b: sk.spmm(
            a, b, plan=sk.plan_spmm(sk.random_bsr(128, 192, 64, 1.0, dtype=BF16, device="cpu"), b)
        ),
        "made for another matrix; call plan_spmm",
    ),
    "plan and kernel": (
        lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b), kernel="reference.semi24"),
        "kernel='reference.semi24' contradicts plan, which uses cpu",
    ),
    "plan of N": (
        lambda a, b: sk.plan_spmm(a, b)(a, b[:, :8]),
        r"multiplies bf16 B of 1 x \[192, 40\], row-major; got bf16 B of 1 x \[192, 8\]",
    ),
    "plan of a side": (
        lambda a, b: sk.plan_spmm(a, b)(b.new_ones(40, 128), a),
        r"made for a sparse matrix on the left; call plan_spmm\(A, B\) for this A",
    ),
    "linear x": (lambda a, b: sk.linear(b, a), r"x is \[192, 40\] and W \[N, K\] \[128, 192\]"),
    "linear bias": (lambda a, b: sk.linear(b.T, a, b.new_ones(192)), r"bias is \[192\]; it must be \[128\]"),
    "linear W": (
        lambda a, b: sk.linear(b.T, "w"),  # pyright: ignore[reportArgumentType]
        "W must be a BSR, a Semi24, a BSR24, a Quantized or a dense torch.Tensor, got str",
    ),
    "linear act": (lambda a, b: sk.linear(b.T, a, None, "tanh"), "activation is 'tanh'; use one of relu"),
    "values": (
        lambda a, b: sk.spmm(_learning(a), b),
        r"the values of a .*24 ask for a gradient, .* use A.detach\(\)\. Gradients reach the dense operand",
    ),
    "values of a layer": (lambda a, b: sk.linear(b.T, _learning(a)), "ask for a gradient"),
    "values and a plan": (lambda a, b: sk.plan_spmm(a, b)(_learning(a), b), "a plan has no gradient"),
    "gradient and out": (
        lambda a, b: sk.spmm(a, b.clone().requires_grad_(), out=b.new_empty(128, 40)),
        "out= takes no part in autograd",
    ),
}


def _learning(a: Any) -> Any:
    values = a.values.clone().requires_grad_()
    return (
        BSR24.unchecked(a.pattern, values, a.meta)
        if isinstance(a, BSR24)
        else Semi24.unchecked(values, a.meta)
    )


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(kind: str, name: str):
    run, text = BAD[name]
    with pytest.raises(InvalidInput) as caught:
        run(matrix(kind), torch.randn(192, 40).to(BF16))
    assert re.search(text, str(caught.value)), caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_ask_for_a_gradient_multiply_where_nobody_learns(kind: str):
    a, b = matrix(kind), torch.randn(192, 40).to(BF16)
    with torch.no_grad():
        assert torch.equal(_learning(a) @ b, a @ b)
    assert torch.equal(_learning(a).detach() @ b, a @ b)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_the_operands_and_nothing_inside_a_kernel(kind: str):
    a, x = matrix(kind, torch.float32), torch.randn(5, 192)
    low, plan = a.to(dtype=BF16), sk.plan_spmm(a, x.mT)
    right, product = sk.linear(x.to(BF16), low, None, "gelu"), low @ x.mT.to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(sk.linear(x, a, None, "gelu"), right)
        assert torch.equal(a @ x.mT, product)
        assert torch.equal(sk.spmm(a, x.mT), product)
        assert sk.spmm(a, x.mT, plan=plan).dtype == torch.float32


def test_an_aligned_plan_refuses_what_is_not():
    a = matrix("semi24")
    wide = torch.randn(192, 48).to(BF16)
    b, odd = wide[:, :40], wide[:, 3:43]
    plan = sk.plan_spmm(a, b)
    assert check_spmm(a, b, plan(a, b)).passed
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        plan(a, odd)
    with pytest.raises(InvalidInput, match="without gaps"):
        sk.plan_spmm(a, b.contiguous())(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_product_neither_syncs_nor_allocates_more_than_c(kind: str, no_sync: Any):
    a = matrix(kind, device="cuda", m=512, k=512)
    x, bias = torch.randn(256, 512, device="cuda").to(BF16), torch.randn(512, device="cuda").to(BF16)
    for run in (lambda: a @ x.mT, lambda: x @ a, lambda: sk.linear(x, a, bias, "gelu")):
        first = run()
        with no_sync():
            assert run() is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)
