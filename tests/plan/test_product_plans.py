"""Plans of products: their words, the form in which kernels see a call, and what they refuse to be called with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.linear import plan_layer
from sparsek.products.plan import operands
from sparsek.products.plan.kernels import rounding_seconds
from sparsek.products.plan.spgemm import MatchCache
from sparsek.products.plan.spmm import Product, formula
from sparsek.products.reference.epilogue import PLAIN, Epilogue

BF16 = torch.bfloat16
Given = tuple[Tensor, BSR]


def right() -> Given:
    """x [2, 40, 96] and A [96, 128]."""
    return torch.randn(2, 40, 96), random_bsr(96, 128, 32, 0.5, seed=0)


def test_a_product_takes_the_form_of_the_kernels_by_views_alone():
    x, a = right()
    out, other, bias = torch.empty(2, 40, 128), torch.empty(2, 40, 128), torch.empty(128)
    call = Product.of(x, a, out, Epilogue(bias=bias, other=other))
    assert call.a.values is a.values
    assert call.a.shape == (128, 96)
    assert isinstance(call.b, torch.Tensor)
    assert (call.b.shape, call.b.data_ptr()) == ((96, 80), x.data_ptr())
    assert call.out is not None
    assert (call.out.shape, call.out.data_ptr(), call.out_layout) == ((128, 80), out.data_ptr(), "col")
    assert call.epilogue.other is not None
    assert (call.epilogue.other.shape, call.epilogue.other.data_ptr()) == ((128, 80), other.data_ptr())
    assert call.epilogue.bias is bias
    assert call.seen(call.out.mT, x).shape == out.shape
    left = Product.of(turned := a.T, x.mT)
    assert (left.a, left.out, left.epilogue, left.out_layout) == (turned, None, PLAIN, "row")
    assert isinstance(left.b, torch.Tensor)
    assert left.b.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "apart", [lambda x: x.transpose(0, 1), lambda x: torch.cat((x, x), 1)[:, :40]], ids=["swapped", "cut"]
)
def test_leading_dims_stay_a_batch_where_one_matrix_does_not_lie_as_rows(apart: Any):
    x, a = right()
    x = apart(x)
    assert Product.of(x, a).b.ndim == 3
    whole = x.contiguous()
    assert Product.of(whole, a).b.ndim == 2
    assert Product.of(whole, a, torch.empty(*x.shape[1::-1], 128).transpose(0, 1)).b.ndim == 3
    assert Product.of(whole, a, None, Epilogue(other=torch.empty(*x.shape[:-1], 256)[..., :128])).b.ndim == 2


FORMULAS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "A @ B"),
    "scaled": ({"alpha": 2.0}, "alpha * A @ B"),
    "bias": ({"bias": True, "activation": "relu"}, "relu(A @ B + bias)"),
    "add": ({"other": True, "beta": 2.0}, "A @ B + beta * other"),
    "mul": ({"bias": True, "other": True, "combine": "mul"}, "(A @ B + bias) * other"),
    "all": (
        {"alpha": 3.0, "bias": True, "activation": "silu", "other": True, "combine": "mul"},
        "silu(alpha * A @ B + bias) * other",
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_plan_says_what_becomes_of_the_product(name: str):
    parts, words = FORMULAS[name]
    made = {**parts}
    if "bias" in made:
        made["bias"] = torch.zeros(128)
    if "other" in made:
        made["other"] = torch.zeros(128, 40)
    a, b = random_bsr(128, 96, 32, 0.5, seed=0), torch.randn(96, 40)
    epilogue = Epilogue(**made)
    plan = sk.plan_spmm(a, b, epilogue=epilogue, device="h200")
    assert plan.explain().startswith(f"C = {words}   A [128, 96] fp32")
    assert formula(plan.problem, "B @ A") == words.replace("A @ B", "B @ A")


def test_a_plan_that_adds_to_c_itself_says_so():
    a, b, out = random_bsr(128, 96, 32, 0.5, seed=0), torch.randn(96, 40), torch.zeros(128, 40)
    epilogue = Epilogue(other=out, beta=0.5)
    plan = sk.plan_spmm(a, b, out=out, epilogue=epilogue)
    assert plan.problem.in_place
    assert plan.headline()[0].startswith("C = A @ B + beta * C   ")
    with pytest.raises(InvalidInput, match=r"made for C = A @ B \+ beta \* C; got A @ B \+ beta \* other"):
        plan(a, b, torch.empty(128, 40), epilogue)
    torch.testing.assert_close(plan(a, b, out, epilogue), a @ b)


WRONG: dict[str, tuple[Callable[[Tensor, BSR], tuple[Any, ...]], str]] = {
    "sides": (lambda x, a: (a, x.mT), "made for a sparse matrix on the right"),
    "pattern": (lambda x, a: (x, random_bsr(96, 128, 32, 0.5, seed=1)), "made for another pattern of blocks"),
    "stored": (
        lambda x, a: (x, BSR(a.pattern.T, a.T.logical_values()).T),
        "made for another pattern of blocks",
    ),
    "rows": (
        lambda x, a: (x[:1], a),
        r"fp32 A of 1 x \[80, 96\], row-major; got fp32 A of 1 x \[40, 96\], row",
    ),
    "columns": (
        lambda x, a: (x[0].repeat(2, 1).T.contiguous().T, a),
        r"row-major; got .* \[80, 96\], col-major",
    ),
    "dtype": (lambda x, a: (x.bfloat16(), a.to(dtype=BF16)), "multiplies fp32 A .* got bf16"),
    "start": (lambda x, a: (torch.randn(7681)[1:].view(2, 40, 96), a), "multiples of 16 bytes"),
    "out": (lambda x, a: (x, a, torch.empty(2, 40, 96)), r"out must be torch.float32 \[2, 40, 128\] on cpu"),
    "bias": (
        lambda x, a: (x, a, None, Epilogue(bias=torch.ones(128))),
        r"made for C = A @ B; got A @ B \+ bias",
    ),
    "other": (
        lambda x, a: (x, a, None, Epilogue(other=torch.ones(40, 2, 128).transpose(0, 1))),
        r"multiplies fp32 A of 1 x|made for C = A @ B; got",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_of_a_right_product_refuses_other_operands(name: str):
    make, text = WRONG[name]
    x, a = right()
    plan = sk.plan_spmm(x, a)
    with pytest.raises(InvalidInput, match=text):
        plan(*make(x, a))
    product = plan(x, a)  # what this call was told must not let the next one pass
    with pytest.raises(InvalidInput, match=text):
        plan(*make(x, a))
    assert torch.equal(plan(x, a), product)


def test_layouts_of_thin_matrices():
    x = torch.randn(96, 8)
    assert operands.layout(x) == "row"
    assert operands.layout(x.T) == "col"
    assert operands.layout(x[:, ::2]) == "strided"
    assert operands.layout(x[:1].T) == "col", "one token of a layer: its row is what a kernel may step by"
    assert operands.layout(x[:, :1]) == "row"
    assert operands.layout(x[:, :1].contiguous()) == "row"
    assert operands.aligned(x[:1].T)
    assert not operands.aligned(x[1:, 1:].T)


def patterns() -> tuple[BlockPattern, BlockPattern]:
    return random_bsr(96, 96, 32, 0.5, seed=0).pattern, random_bsr(96, 96, 32, 0.5, seed=1).pattern


def test_matches_of_a_captured_graph_stay_when_the_pattern_is_gone():
    a, b = patterns()
    cache = MatchCache()
    kept = cache.get(a, b, None, False)
    assert cache.get(a, b, None, True) is kept
    assert cache.get(a, b, kept.matches.pattern, False).matches is kept.matches
    assert list(cache._captured.values()) == [kept]
    del b
    cache.get(a, patterns()[1], None, False)
    assert list(cache._captured.values()) == [kept]


def test_matches_of_one_pattern_are_not_taken_for_those_of_another_at_the_same_address():
    a, b = patterns()
    cache = MatchCache()
    kept, other = cache.get(a, b, None, False), patterns()[1]
    cache._kept[id(other), None] = kept  # as if `other` had come to lie where b was
    assert cache.get(a, other, None, False) is not kept


@pytest.mark.parametrize("device", [None, "h200"])
def test_a_plan_is_written_as_its_kernel_and_the_problem_in_a_line(device: str | None):
    x, a = right()
    w, q, mask = sk.Semi24.from_dense(x[0]), torch.randn(1, 2, 64, 32), sk.BlockMask.causal(64)
    plans = [
        sk.plan_spmm(x, a, device=device),
        sk.plan_spmm(w, torch.randn(96, 8), device=device),
        sk.plan_spmm(sk.quantize(a), torch.randn(128, 8), device=device),
        sk.plan_sddmm(x[0], x[1].T, random_bsr(40, 40, 16, 0.5).pattern, device=device),
        sk.plan_spgemm(a, a.T, device=device),
        sk.plan_attention(q, q, q, mask, device=device),
    ]
    assert len({type(plan) for plan in plans}) == 4
    for plan in plans:
        name, said = type(plan).__name__, repr(plan)
        assert said.startswith(f"{name}({plan.kernel}, {plan.headline()[0].split('   ')[0].rstrip()}: ")
        assert said.endswith(f"on {'cpu' if device is None else 'NVIDIA H200, predicts only'})")
        assert len(said) < 240
        assert "\n" not in said


PREDICTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "A @ B": lambda x: sk.plan_spmm(random_bsr(128, 128, 64, 0.5), x.mT, device="h200"),
    "B @ A": lambda x: sk.plan_spmm(x, random_bsr(128, 128, 64, 0.5), device="h200"),
    "2:4": lambda x: sk.plan_spmm(sk.Semi24.from_dense(torch.ones(128, 128)), x.mT, device="h200"),
    "fp8": lambda x: sk.plan_spmm(sk.quantize(random_bsr(128, 128, 64, 0.5)), x.mT, device="h200"),
    "layer": lambda x: plan_layer(x, random_bsr(128, 128, 64, 0.5), device="h200"),
    "sddmm": lambda x: sk.plan_sddmm(x.mT, x, random_bsr(128, 128, 64, 0.5).pattern, device="h200"),
}


@pytest.mark.parametrize("plan", PREDICTED.values(), ids=PREDICTED)
def test_a_prediction_takes_dense_operands_on_the_meta_device(plan: Callable[[torch.Tensor], Any]):
    x = torch.randn(4, 128)
    assert plan(x.to("meta")).explain() == plan(x).explain()
    with pytest.raises(sk.InvalidInput, match="cast one of them"):
        sk.plan_spmm(random_bsr(128, 128, 64, 0.5), x.mT.half().to("meta"), device="h200")
    with pytest.raises(sk.InvalidInput, match="A is on cpu and B on meta"):
        sk.plan_spmm(random_bsr(128, 128, 64, 0.5), x.mT.to("meta"))


@pytest.mark.parametrize("n", [1, 4])
def test_a_given_c_is_predicted_with_the_launch_that_rounds_b_before(n: int):
    """portable.spmm_skinny_fp8 rounds B itself, but not where C may lie in the memory of B."""
    a, name = sk.quantize(random_bsr(4096, 4096, 128, 0.25, dtype=BF16)), "portable.spmm_skinny_fp8"
    b, out = (torch.zeros(4096, n, dtype=BF16) for _ in range(2))
    new, given = (sk.plan_spmm(a, b, out=each, kernel=name, device="h200") for each in (None, out))
    rounded = sk.plan_spmm(a, sk.quantize(b.mT.contiguous()).mT, kernel=name, device="h200")
    spent = rounding_seconds(given.problem)
    assert spent > 0
    assert given.seconds == pytest.approx(rounded.seconds + spent, rel=0.01)
    assert given.seconds > new.seconds
    more = (given.seconds - new.seconds) * 1e6
    assert (
        f"the kernel rounds B from bf16 to e4m3; with out= a launch before it does, {more:.1f} us more"
        in (new.explain())
    )
    assert f"{spent * 1e6:.1f} us of it to round B from bf16 to e4m3\n" in given.explain()
    wide = sk.plan_spmm(a, b, out=out, kernel="portable.spmm_fp8", device="h200")
    assert wide.seconds == sk.plan_spmm(a, b, kernel="portable.spmm_fp8", device="h200").seconds


def test_a_given_c_is_planned_as_it_lies():
    """A plan reads of `out` what kernels depend on, and nothing else is different: the others write to any strides."""
    a, (b, whole) = random_bsr(256, 256, 64, 0.5, dtype=BF16), torch.empty(2, 256, 256, dtype=BF16)

    def facts(*given: Any, **more: Any) -> Any:
        return sk.plan_spmm(*given, **more, device="h200").problem

    plain, wide = facts(a, b), torch.empty(256, 272, dtype=BF16)
    assert facts(a, b, out=whole) == facts(a, b, out=wide[:, :256]) == plain
    assert not facts(a, b, out=wide[:, 1:257]).aligned
    assert not facts(a, b, out=torch.empty(256, 257, dtype=BF16)[:, :256]).aligned
    assert facts(a, b, out=whole, epilogue=Epilogue(other=whole)).in_place
    assert not facts(a, b, out=whole, epilogue=Epilogue(other=wide[:, :256])).in_place
    assert not facts(
        a, b, out=whole, epilogue=Epilogue(other=torch.empty(256, 257, dtype=BF16)[:, :256])
    ).aligned
    for columns in (whole.mT, torch.empty(256, 512, dtype=BF16)[:, ::2]):
        with pytest.raises(InvalidInput, match="out must have contiguous rows"):
            facts(a, b, out=columns)
