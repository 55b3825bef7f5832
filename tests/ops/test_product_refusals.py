"""Products, layers and their plans, with a matrix in every storage: what they refuse, and in which words."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.reference.epilogue import Epilogue
from tests.ops.operands import pair
from tests.ops.storages import BF16, F32, IN_FP8, STORAGES, TWO_FOUR, WIDE, learning, matrix
from tests.ops.test_sddmm import LAYOUTS, given
from tests.ops.test_spgemm import two, wanted

BSR_ = ("bsr",)
ROWS = ("bsr_fp8",)


@dataclass(frozen=True)
class Refused:
    """A call with A [128, 192] of one of these storages and B [192, 40], both of float32, and the error it gets."""

    name: str
    storages: tuple[str, ...]
    call: Callable[[Any, Any], Any]
    text: str


R = Refused
REFUSED = (
    # A matrix and a dense operand.
    R("A dense", BSR_, lambda a, b: sk.spmm(a.to_dense(), b),
      "A or B must be a BSR, Semi24, BSR24 or Quantized, got Tensor and Tensor; BSR.from_dense"),
    R("B numpy", STORAGES, lambda a, b: a @ np.zeros((192, 4)), "B must be a dense torch.Tensor, got ndarray"),
    R("B a list", STORAGES, lambda a, b: sk.spmm(a, cast(Any, [1.0])), "B must be a dense torch.Tensor, got list"),
    R("two BSR", BSR_, lambda a, b: sk.spmm(a, a), r"must be a dense torch.Tensor, got BSR; sparsek.spgemm\(A, B\)"),
    R("two of 2:4", TWO_FOUR, lambda a, b: a @ a, "B must be a dense torch.Tensor, got .*24; a .* dense matrices only"),
    R("two in FP8", IN_FP8, lambda a, b: a @ a, "B must be a dense torch.Tensor, got Quantized"),
    R("a BSR on the right", TWO_FOUR, lambda a, b: sk.spmm(a, sk.random_bsr(192, 64, 64, 1.0)),
      "must be a dense torch.Tensor, got .*"),
    R("A numpy", WIDE, lambda a, b: np.zeros((4, 128)) @ a, "A must be a dense torch.Tensor, got ndarray"),
    R("A sparse", WIDE, lambda a, b: torch.zeros(4, 128).to_sparse() @ a, r"A must be .* torch.sparse_coo"),
    R("B sparse", WIDE, lambda a, b: a @ b.to_sparse(), r"got layout torch.sparse_coo; call .to_dense\(\)"),
    R("B negated", BSR_, lambda a, b: a @ torch._neg_view(b), r"memory has the other sign; call .resolve_neg\(\)"),
    R("vector", STORAGES, lambda a, b: sk.spmm(a, b[:, 0]),
      r"B must be \[K, N\] or \[..., K, N\], got 1-D; for a vector use B.unsqueeze\(-1\)"),
    R("vector on the left", WIDE, lambda a, b: sk.spmm(b[:128, 0], a),
      r"A must be \[M, K\] or .*, got 1-D; for a vector use A.unsqueeze\(0\)"),
    R("rows", STORAGES, lambda a, b: a @ b[:64], r"A is \[128, 192\] and B \[64, 40\]: B needs 192 rows"),
    R("columns", WIDE, lambda a, b: sk.spmm(b, a), r"A is \[192, 40\] and B \[128, 192\]: A needs 128 columns"),
    R("columns in FP8", ROWS, lambda a, b: b @ matrix("bsr_fp8 block"),
      r"A is \[192, 40\] and B \[128, 192\]: A needs 128 columns"),
    R("dtype", WIDE, lambda a, b: a @ b.double(), "A is torch.float32 and B torch.float64; cast one of them"),
    R("dtype on the left", WIDE, lambda a, b: b.new_ones(4, 128).double() @ a,
      "B is torch.float32 and A torch.float64; cast"),
    R("dtype in FP8", IN_FP8, lambda a, b: a @ b.double(), "B is torch.float64; FP8 products round torch.bfloat16"),
    R("integers", IN_FP8, lambda a, b: a @ b.int(), "B is torch.int32; FP8 products round torch.bfloat16"),
    R("FP8 without scales", IN_FP8, lambda a, b: a @ b.to(torch.float8_e4m3fn),
      r"B is torch.float8_e4m3fn; .* sparsek.quantize\(B\), which has FP8 values and scales"),
    R("device", STORAGES, lambda a, b: a @ b.to("meta"), "A is on cpu and B on meta; move one of them"),
    R("device on the left", WIDE, lambda a, b: torch.ones(4, 128, device="meta") @ a, "B is on cpu and A on meta"),
    R("transpose", TWO_FOUR, lambda a, b: b.T @ a.T, r"has no \.T.*sparsek.linear\(x, W\)"),
    R("rows on the right", ROWS, lambda a, b: b.mT[:, :128] @ a, r"has no \.T: there it would be one for each column"),
    R("2:4 in FP8 on the right", ("semi24_fp8",), lambda a, b: b.mT[:, :128] @ a,
      "a Semi24 in FP8 must be the left operand"),
    R("no Quantized", ROWS, lambda a, b: sk.spmm(sk.quantize(b), b),
      r"got QuantizedTensor and Tensor; sparsek.quantize makes one .* \.dequantize\(\) a tensor"),
    R("scaled along N", IN_FP8, lambda a, b: a @ sk.quantize(b), r"the wrong side; .* sparsek.quantize\(B.mT\).mT"),
    # alpha, beta and out.
    R("alpha a tensor", STORAGES, lambda a, b: sk.spmm(a, b, alpha=b[0, 0]),
      r"alpha is a torch.Tensor, torch.float32 \[\]; it must be a finite number; write float"),
    R("alpha", STORAGES, lambda a, b: sk.spmm(a, b, alpha=True), "alpha is True; it must be a finite number"),
    R("beta", STORAGES, lambda a, b: sk.spmm(a, b, beta=True), "beta is True; it must be a finite number"),
    R("beta alone", STORAGES, lambda a, b: sk.spmm(a, b, beta=2), "beta is 2 and there is no out= to multiply with it"),
    R("out shape", STORAGES, lambda a, b: sk.spmm(a, b, out=b.new_empty(128, 41)),
      r"out must be torch.float32 \[128, 40\] on cpu, got torch.float32 \[128, 41\] on cpu"),
    R("out of the right", WIDE, lambda a, b: sk.spmm(b.new_ones(2, 3, 128), a, out=b.new_ones(3, 2, 192)),
      r"out must be torch.float32 \[2, 3, 192\] on cpu, got torch.float32 \[3, 2, 192\]"),
    R("out dtype", WIDE, lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, dtype=BF16)),
      r"out must be torch.float32 .* got torch.bfloat16"),
    R("out device", WIDE, lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, device="meta")),
      "out must be .* on cpu, got .* on meta"),
    R("out a list", STORAGES, lambda a, b: sk.spmm(a, b, out=cast(Any, [])),
      r"out must be a dense torch.Tensor, got list"),
    R("out sparse", STORAGES, lambda a, b: sk.spmm(a, b, out=torch.zeros(128, 40).to_sparse()),
      "out must be a dense torch.Tensor, got layout torch.sparse_coo"),
    R("out by columns", STORAGES, lambda a, b: sk.spmm(a, b, out=torch.empty(40, 128).T),
      r"out must have contiguous rows, got strides \(1, 128\)"),
    R("out rows meet", STORAGES, lambda a, b: sk.spmm(a, b, out=torch.empty(8000).as_strided((128, 40), (39, 1))),
      r"every element in its own place, got shape \[128, 40\], strides \(39, 1\)"),
    R("out batches meet", STORAGES,
      lambda a, b: sk.spmm(a, b.expand(2, 192, 40), out=torch.empty(128, 40).expand(2, 128, 40)),
      r"every element in its own place, got shape \[2, 128, 40\], strides \(0, 40, 1\)"),
    R("out is B", WIDE, lambda a, b: sk.spmm(a, b, out=b[:128]),
      "out overlaps the memory of B; C would be written where that is read"),
    R("out is A", BSR_, lambda a, b: sk.spmm(x := b.new_ones(3, 96), pair(96, 96, dtype=b.dtype)[0], out=x),
      "out overlaps the memory of A"),
    R("out meets values", BSR_, lambda a, b: sk.spmm(a, b, out=a.values.flatten()[-128 * 40 :].view(128, 40)),
      "out overlaps the memory of A's values"),
    R("two dtypes", IN_FP8, lambda a, b: sk.spmm(a, b, out=b.new_empty(128, 40), dtype=BF16), "leave one of them away"),
    R("dtype of others", IN_FP8, lambda a, b: sk.spmm(a.dequantize(), b, dtype=BF16), "dtype= is for products of FP8"),
    # Plans.
    R("other", WIDE, lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b)),
      r"other is torch.float32 \[192, 40\] on cpu; this product needs torch.float32 \[128, 40\]"),
    R("other by columns", WIDE, lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b.new_ones(40, 128).T)),
      r"other matrix of the epilogue must have contiguous rows, got strides \(1, 128\); call .contiguous"),
    R("bias of a plan", WIDE, lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(40))),
      r"bias is torch.float32 \[40\] on cpu; this product needs torch.float32 \[128\]"),
    R("bias strides", WIDE, lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(256)[::2])),
      "bias must be contiguous, got stride 2"),
    R("activation of a plan", WIDE, lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(activation=cast(Any, "tanh"))),
      "activation is 'tanh'; use one of relu, gelu, gelu_tanh, silu"),
    R("kernel", BSR_, lambda a, b: sk.spmm(a, b, kernel="hopper"),
      "no kernel of spmm is called 'hopper'; known: hopper.spmm, hopper.spmm_paired, .*cpu.spmm, ref"),
    R("kernel and plan", BSR_,
      lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b, kernel="cpu.spmm"), kernel="vendor.dense"),
      "kernel='vendor.dense' contradicts plan, which uses cpu.spmm"),
    R("plan and kernel", TWO_FOUR, lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b), kernel="hopper.semi24"),
      "kernel='hopper.semi24' contradicts plan, which uses "),
    R("plan and kernel in FP8", IN_FP8, lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b), kernel="cpu.spmm"),
      "contradicts plan, which uses reference.spmm_fp8"),
    R("plan a text", STORAGES, lambda a, b: sk.spmm(a, b, plan=cast(Any, "fast")),
      "plan must come from plan_spmm, got str"),
    R("plan of a BSR", (*TWO_FOUR, *IN_FP8),
      lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(sk.random_bsr(128, 192, 64, 1.0, dtype=F32, device="cpu"), b)),
      "made for another matrix; call plan_spmm"),
    R("plan of the dequantized", IN_FP8, lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a.dequantize(), b)),
      "made for another matrix; call plan_spmm"),
    R("plan of N", WIDE, lambda a, b: sk.plan_spmm(a, b)(a, b[:, :8]),
      r"multiplies fp32 B of 1 x \[192, 40\], row-major; got fp32 B of 1 x \[192, 8\]"),
    R("plan of a side", WIDE, lambda a, b: sk.plan_spmm(a, b)(b.new_ones(40, 128), a),
      r"made for a sparse matrix on the left; call plan_spmm\(A, B\) for this A"),
    R("config", STORAGES, lambda a, b: sk.plan_spmm(a, b, config=1),
      "config= belongs to one kernel; name it with kernel="),
    R("config of another", BSR_, lambda a, b: sk.plan_spmm(a, b, kernel="cpu.spmm", config=3),
      "3 is no config of cpu.spmm for this problem; its default is steps of"),
    R("card", STORAGES, lambda a, b: sk.plan_spmm(a, b, device="b200"),
      "no facts about a card named 'b200'; known: h200, .*, cpu"),
    R("card as a device", BSR_, lambda a, b: sk.plan_spmm(a, b, device=cast(Any, torch.device("cuda"))),
      "no facts about a card named 'cuda'; known: h200, .*, cpu. To plan for this machine's GPU, pass operands "
      "on it and omit device" + ("" if torch.cuda.is_available() else ". There is no GPU here")),
    # Gradients.
    R("values and a plan", WIDE, lambda a, b: sk.plan_spmm(a, b)(learning(a), b), "a plan has no gradient"),
    R("values and out", WIDE, lambda a, b: sk.spmm(learning(a), b, out=b.new_empty(128, 40)),
      r"out= takes no part in autograd; call it under torch.no_grad\(\)"),
    R("gradient and a plan", STORAGES, lambda a, b: sk.plan_spmm(a, b)(a, b.requires_grad_()),
      r"a plan has no gradient; call it under torch.no_grad\(\), or call"),
    R("gradient and out", STORAGES, lambda a, b: sk.spmm(a, b.requires_grad_(), out=b.new_empty(128, 40)),
      r"out= takes no part in autograd; call it under torch.no_grad\(\)"),
    R("out learns", WIDE, lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, requires_grad=True)),
      "out= takes no part in autograd"),
    R("out of a plan learns", WIDE,
      lambda a, b: sk.plan_spmm(a, b)(a, b, out=torch.empty(128, 40, requires_grad=True) * 2),
      r"out= takes no part in autograd; call it under torch.no_grad\(\)"),
    R("torch.func in FP8", IN_FP8,
      lambda a, b: torch.func.vmap(lambda s: sk.linear(sk.quantize(b.mT), a) * s)(torch.ones(2)),
      "torch.func transforms"),
    # Layers: x is b.mT.
    R("x numpy", STORAGES, lambda a, b: sk.linear(cast(Any, np.ones(192)), a),
      "x must be a dense torch.Tensor, got ndarray"),
    R("x a matrix", WIDE, lambda a, b: sk.linear(a, a), "x must be a dense torch.Tensor, got "),
    R("x shape", STORAGES, lambda a, b: sk.linear(b, a),
      r"x is \[192, 40\] and W \[N, K\] \[128, 192\]: the last dim of x must be 192"),
    R("x dtype", WIDE, lambda a, b: sk.linear(b.mT.double(), a), "W is torch.float32 and x torch.float64; cast one"),
    R("x device", WIDE, lambda a, b: sk.linear(b.mT.to("meta"), a), "W is on cpu and x on meta; move one"),
    R("x sparse", STORAGES, lambda a, b: sk.linear(b.mT.to_sparse(), a), "x must be a dense torch.Tensor, got layout"),
    R("x negated", BSR_, lambda a, b: sk.linear(torch._neg_view(b.mT), a), "x is a lazily negated view"),
    R("x along N", IN_FP8, lambda a, b: sk.linear(sk.quantize(b).mT, a),
      "x is a transposed view, scaled along the wrong"),
    R("x in FP8 alone", IN_FP8, lambda a, b: sk.linear(sk.quantize(b.mT), b.mT), "W must be a Quantized, got Tensor"),
    *(R(f"W {got}", BSR_, lambda a, b, w=w: sk.linear(b.mT, w),
        f"W must be a BSR, a Semi24, a BSR24, a Quantized or a dense torch.Tensor, got {got}")
      for got, w in (("NoneType", cast(Any, None)), ("str", cast(Any, "w")))),
    R("bias", STORAGES, lambda a, b: sk.linear(b.mT, a, b.new_ones(192)),
      r"bias is \[192\]; it must be \[128\], a number for every output feature"),
    R("bias dtype", WIDE, lambda a, b: sk.linear(b.mT, a, b.new_ones(128).double()),
      "W is torch.float32 and bias torch.float64"),
    R("bias dtype in FP8", IN_FP8, lambda a, b: sk.linear(b.mT, a, torch.ones(128).half()), "bias is torch.float16"),
    R("activation", STORAGES, lambda a, b: sk.linear(b.mT, a, None, cast(Any, "tanh")),
      "activation is 'tanh'; use one of relu, gelu, gelu_tanh, silu, or None"),
    R("residual", STORAGES, lambda a, b: sk.linear(b.mT, a, None, None, b),
      r"residual is \[192, 40\]; it must be \[40, 128\], as x @ W.T"),
    R("result", IN_FP8, lambda a, b: sk.linear(b.mT, a, dtype=torch.float64), "dtype is torch.float64; use one of"),
    R("dtype of a layer", IN_FP8, lambda a, b: sk.linear(b.mT, a.dequantize(), dtype=BF16),
      "dtype= is for products of FP8"),
    R("kernel of a layer", STORAGES, lambda a, b: sk.linear(b.mT, a, kernel="fast"),
      "no kernel of spmm is called 'fast'"),
    R("kernel of a dense W", BSR_, lambda a, b: sk.linear(b.mT, a.to_dense(), kernel="cpu.spmm"),
      "kernel='cpu.spmm' multiplies a sparse W; W is dense, and torch multiplies it"),
    R("dense W", BSR_, lambda a, b: sk.linear(b, a.to_dense()),
      r"x is \[192, 40\] and W \[128, 192\]: W must be \[N, K\] and the last dim of x K"),
    R("residual of a dense W", BSR_, lambda a, b: sk.linear(b.mT[None], a.to_dense(), None, None, b.new_ones(40, 128)),
      r"residual is \[40, 128\]; it must be \[1, 40, 128\], as x @ W.T"),
    R("bias of a dense W", BSR_, lambda a, b: sk.linear(b.mT, a.to_dense(), b.new_ones(128).double()),
      "W is torch.float32 and bias"),
    R("activation of a dense W", BSR_, lambda a, b: sk.linear(b.mT, a.to_dense(), None, cast(Any, "tanh")),
      "activation is 'tanh'"),
    R("W_up", BSR_, lambda a, b: sk.swiglu(b.mT, a, a.to_dense()), "W_up must be a BSR, got Tensor"),
    R("W_gate", BSR_, lambda a, b: sk.swiglu(b.mT, sk.random_bsr(64, 192, 32, 0.5), a),
      r"W_gate is \[64, 192\] and W_up \[128, 192\]; they must agree"),
    R("swiglu of two kinds", IN_FP8, lambda a, b: sk.swiglu(b.mT, a, a.dequantize()),
      "W_gate and W_up must both be a Quantized"),
    R("swiglu of two sizes", ROWS, lambda a, b: sk.swiglu(b.mT, a, matrix("bsr_fp8", m=64)), "they must agree"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("storage", "refused"),
    [
        pytest.param(storage, each, id=f"{storage}-{each.name}")
        for each in REFUSED
        for storage in each.storages
    ],
)
def test_bad_operands_are_told_what_where_and_what_would_be_right(storage: str, refused: Refused):
    with pytest.raises(InvalidInput) as caught:
        refused.call(matrix(storage, F32), torch.randn(192, 40))
    assert re.search(refused.text, str(caught.value)), caught.value


@pytest.mark.parametrize("storage", WIDE)
def test_what_would_learn_multiplies_where_nobody_learns(storage: str):
    a, b = matrix(storage, F32), torch.randn(192, 40)
    plan = sk.plan_spmm(a, b)
    with torch.no_grad():
        assert torch.equal(learning(a) @ b, a @ b)
        assert torch.equal(plan(learning(a), b), a @ b)
        assert torch.equal(sk.spmm(learning(a), b, out=torch.empty(128, 40)), a @ b)
    assert torch.equal(learning(a).detach() @ b, a @ b)
    if storage == "bsr":
        assert sk.plan_spmm(learning(a), b, device="h200").seconds > 0


def test_other_functions_refuse_a_bsr():
    a, b = pair(dtype=torch.float32)
    with pytest.raises(TypeError):
        torch.dot(a, b)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        torch.matmul(a, b, out=torch.empty(128, 40))  # pyright: ignore[reportArgumentType]


def pattern(indptr: list[int], indices: list[int], shape: Any = (64, 96)) -> BlockPattern:
    """Blocks of 32."""
    return BlockPattern(
        shape, (32, 32), torch.tensor(indptr, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
    )


def of(values: Tensor) -> BSR:
    return BSR(pattern([0, 1, 1], [0]), values)


BAD_MATRICES: dict[str, tuple[Callable[[], Any], str]] = {
    "falling indptr": (lambda: pattern([0, 2, 1], [0]), "falls from 2 to 1 at block row 1; it must never fall"),
    "indptr start": (lambda: pattern([1, 2, 2], [0, 1]), r"indptr\[0\] is 1; it must be 0"),
    "indptr end": (lambda: pattern([0, 1, 2], [0]), r"indptr\[-1\] is 2; it must be the number of indices, 1"),
    "indptr length": (lambda: pattern([0, 1], [0]), "has 2 entries; 64 rows in blocks of 32 .* need 3"),
    "unsorted": (lambda: pattern([0, 2, 2], [1, 0]), r"indices\[1\] is 0, entry 1 of block row 0, and is smaller"),
    "duplicate": (lambda: pattern([0, 0, 2], [1, 1]), r"indices\[1\] is 1, entry 1 of block row 1, and repeats"),
    "too large": (lambda: pattern([0, 1, 1], [3]), r"indices\[0\] is 3, .*; block columns are 0 to 2"),
    "negative": (lambda: pattern([0, 1, 1], [-1]), r"indices\[0\] is -1, .*; block columns are 0 to 2"),
    "negative side": (lambda: pattern([0], [], (-32, 96)), r"shape\[0\] is -32; it must be an int of at least 0"),
    "overflow": (lambda: pattern([0], [], (2**31, 96)), "M in whole blocks must fit int32"),
    "values shape": (
        lambda: of(torch.randn(2, 32, 32)), r"values have shape \(2, 32, 32\); the pattern needs \(1, 32, 32\)"),
    "values strides": (
        lambda: of(torch.randn(1, 32, 64)[:, :, ::2]), r"values must be contiguous; call .contiguous\(\)"),
    "values start": (
        lambda: of(torch.randn(1025)[1:].view(1, 32, 32)),
        r"start 4 bytes past a multiple of 16 bytes.*; call .clone\(\)"),
    "values dtype": (
        lambda: of(torch.randn(1, 32, 32).int()), "dtype of values is torch.int32; use one of torch.bfloat16"),
    "values device": (
        lambda: of(torch.randn(1, 32, 32).to("meta")),
        "values is on meta, which is not supported; use a CUDA device or the CPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_bad_matrices_are_told_what_where_and_what_would_be_right(name: str):
    make, text = BAD_MATRICES[name]
    with pytest.raises(InvalidInput, match=text):
        make()


SDDMM, SPGEMM = cast(Any, sk.sddmm), cast(Any, sk.spgemm)
OF_SDDMM: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("pattern", lambda g: SDDMM(g[0], g[1], pair(dtype=g[0].dtype)[0]),
     "pattern must be a BlockPattern, got BSR; pass its .pattern"),
    ("no pattern", lambda g: SDDMM(g[0], g[1], None), "pattern must be a BlockPattern, got NoneType"),
    ("X numpy", lambda g: SDDMM(np.ones(9), g[1], g[2]), "X must be a dense torch.Tensor, got ndarray"),
    ("X sparse", lambda g: SDDMM(g[0].to_sparse(), g[1], g[2]), r"X must be .* call .to_dense\(\)"),
    ("X 3-D", lambda g: SDDMM(g[0][None], g[1], g[2]), r"X must be \[M, K\], got 3-D; .* join them with K"),
    ("Y 1-D", lambda g: SDDMM(g[0], g[1][0], g[2]), r"Y must be \[K, N\], got 1-D"),
    ("X int", lambda g: SDDMM(g[0].int(), g[1].int(), g[2]), "dtype torch.int32 is not supported; use one of"),
    ("Y dtype", lambda g: SDDMM(g[0], g[1].double(), g[2]), "X is torch.float32 and Y torch.float64; cast"),
    ("Y device", lambda g: SDDMM(g[0], g[1].to("meta"), g[2]), "X is on cpu and Y on meta; move one"),
    ("pattern's device", lambda g: SDDMM(g[0].to("meta"), g[1].to("meta"), g[2]),
     r"X is on meta and the pattern on cpu; call pattern.to\('meta'\)"),
    ("Y negated", lambda g: SDDMM(g[0], torch._neg_view(g[1]), g[2]), "Y is a lazily negated view"),
    ("K", lambda g: SDDMM(g[0], g[1][:8], g[2]), r"X is \[128, 40\] and Y \[8, 96\]: Y needs 40 rows"),
    ("shape", lambda g: SDDMM(g[0], g[1], g[2].T),
     r"X @ Y is \[128, 96\] and the pattern \[96, 128\]; they must agree"),
    ("kernel", lambda g: SDDMM(*g, kernel="cpu.spmm"), "no kernel of sddmm is called 'cpu.spmm'; known: "),
    ("plan", lambda g: SDDMM(*g, plan="fast"), "plan must come from plan_sddmm, got str"),
    ("kernel and plan", lambda g: SDDMM(*g, plan=sk.plan_sddmm(*g, kernel="vendor.sddmm"), kernel="reference.sddmm"),
     "kernel='reference.sddmm' contradicts plan, which uses vendor.sddmm"),
    ("config", lambda g: sk.plan_sddmm(*g, config=3), "config= belongs to one kernel; name it with kernel="),
    ("plan's gradient", lambda g: sk.plan_sddmm(*g)(g[0].clone().requires_grad_(), *g[1:]),
     "a plan has no gradient; .* call sparsek.sddmm without plan="),
    ("plan's pattern", lambda g: sk.plan_sddmm(*g)(g[0], g[1], given(dtype=g[0].dtype)[2]),
     "made for another pattern of blocks; call plan_sddmm"),
    ("plan's K", lambda g: sk.plan_sddmm(*g)(g[0][:, :8], g[1][:8], g[2]),
     r"this plan takes fp32 X \[128, 40\] row-major .* got torch.float32 \[128, 8\] row-major"),
    ("plan's alignment", lambda g: sk.plan_sddmm(*g)(LAYOUTS["odd start"](g[0]), g[1], g[2]),
     "needs pointers and leading strides of X and Y that are multiples of 16 bytes"),
)  # fmt: skip
OF_SPGEMM: tuple[tuple[str, Callable[[Any, Any], Any], str], ...] = (
    ("A dense", lambda a, b: SPGEMM(a.to_dense(), b), r"A must be a BSR, got Tensor; sparsek.spmm\(A, B\)"),
    ("B dense", lambda a, b: SPGEMM(a, b.to_dense()), r"B must be a BSR, got Tensor; sparsek.spmm\(A, B\)"),
    ("no BSR", lambda a, b: SPGEMM(3, 4), "A must be a BSR, got int; use BSR.from_dense"),
    ("K", lambda a, b: a @ b.T, r"A is \[96, 112\] and B \[80, 112\]: B needs 112 rows"),
    ("blocks", lambda a, b: a @ sk.random_bsr(112, 80, 32, 0.5),
     "blocks of A are 32x16 and of B 32x32: those of B need 16 rows"),
    ("dtype", lambda a, b: a @ b.to(dtype=BF16), "A is torch.float32 and B torch.bfloat16; cast one of them"),
    ("out", lambda a, b: SPGEMM(a, b, "csr"), r'out must be "dense", "bsr" or a BlockPattern, got \'csr\''),
    ("out a BSR", lambda a, b: SPGEMM(a, b, a @ b), "got BSR; pass its .pattern"),
    ("out's shape", lambda a, b: SPGEMM(a, b, a.pattern),
     "A @ B is 96x80 in blocks of 32x48; the pattern is 96x112 in blocks of 32x16"),
    ("kernel", lambda a, b: SPGEMM(a, b, kernel="cpu.spmm"), "no kernel of spgemm is called 'cpu.spmm'"),
    ("plan", lambda a, b: SPGEMM(a, b, plan="fast"), "plan must come from plan_spgemm, got str"),
    ("kernel and plan",
     lambda a, b: SPGEMM(a, b, plan=sk.plan_spgemm(a, b, kernel="vendor.spgemm"), kernel="reference.spgemm"),
     "kernel='reference.spgemm' contradicts plan, which uses vendor.spgemm"),
    ("out and plan", lambda a, b: SPGEMM(a, b, wanted(a, b), plan=sk.plan_spgemm(a, b)),
     r"out contradicts plan, .*; plan_spgemm\(A, B, out\) for this one"),
    ("config", lambda a, b: sk.plan_spgemm(a, b, config=3), "config= belongs to one kernel; name it with kernel="),
    ("plan's A", lambda a, b: sk.plan_spgemm(a, b)(two()[0], b), "another pattern of blocks of A; call plan_spgemm"),
    ("plan's B", lambda a, b: sk.plan_spgemm(a, b)(a, two()[1]), "another pattern of blocks of B; call plan_spgemm"),
    ("plan's dtype", lambda a, b: sk.plan_spgemm(a, b)(a.to(dtype=BF16), b.to(dtype=BF16)),
     "this plan multiplies fp32 stored A and stored B; got torch.bfloat16"),
    ("plan's gradient", lambda a, b: sk.plan_spgemm(a, b)(a.requires_grad_(), b),
     "a plan has no gradient; .* call sparsek.spgemm without plan="),
)  # fmt: skip


@pytest.mark.parametrize(("call", "text"), [pytest.param(*row, id=name) for name, *row in OF_SDDMM])
def test_sddmm_refuses_bad_operands(call: Callable[[Any], Any], text: str):
    with pytest.raises(InvalidInput, match=text):
        call(given(dtype=F32))


@pytest.mark.parametrize(("call", "text"), [pytest.param(*row, id=name) for name, *row in OF_SPGEMM])
def test_spgemm_refuses_bad_operands(call: Callable[[Any, Any], Any], text: str):
    with pytest.raises(InvalidInput, match=text):
        call(*two())
