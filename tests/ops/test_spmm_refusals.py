"""spmm: what it refuses, and in which words."""

from collections.abc import Callable
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
from tests.ops.operands import BF16, pair


def test_plans_and_out_refuse_gradients_with_a_hint():
    a, b = pair(dtype=torch.float32)
    plan = sk.plan_spmm(a, b)
    learning = BSR(a.pattern, a.values.clone().requires_grad_())
    for matrix, dense in ((a, b.clone().requires_grad_()), (learning, b)):
        with pytest.raises(
            InvalidInput, match=r"a plan has no gradient; call it under torch.no_grad\(\), or call"
        ):
            plan(matrix, dense)
        with pytest.raises(
            InvalidInput, match=r"out= takes no part in autograd; call it under torch.no_grad\(\)"
        ):
            sk.spmm(matrix, dense, out=torch.empty(128, 40))
    with pytest.raises(InvalidInput, match="out= takes no part in autograd"):
        sk.spmm(a, b, out=torch.empty(128, 40, requires_grad=True))
    with torch.no_grad():
        assert torch.equal(plan(learning, b), a @ b)
        assert torch.equal(sk.spmm(learning, b, out=torch.empty(128, 40)), a @ b)
    assert sk.plan_spmm(learning, b, device="h200").seconds > 0


def test_other_functions_refuse_a_bsr():
    a, b = pair(dtype=torch.float32)
    with pytest.raises(TypeError):
        torch.dot(a, b)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        torch.matmul(a, b, out=torch.empty(128, 40))  # pyright: ignore[reportArgumentType]


BAD_OPERANDS: dict[str, tuple[Callable[[BSR, Tensor], Any], str]] = {
    "A dense": (
        lambda a, b: sk.spmm(a.to_dense(), b),
        "A or B must be a BSR, Semi24, BSR24 or Quantized, got Tensor and Tensor; BSR.from_dense",
    ),
    "B numpy": (lambda a, b: a @ np.zeros((96, 4)), "B must be a dense torch.Tensor, got ndarray"),
    "B a BSR": (lambda a, b: sk.spmm(a, a), r"must be a dense torch.Tensor, got BSR; sparsek.spgemm\(A, B\)"),
    "A numpy": (lambda a, b: np.zeros((4, 128)) @ a, "A must be a dense torch.Tensor, got ndarray"),
    "A sparse": (lambda a, b: torch.zeros(4, 128).to_sparse() @ a, r"A must be .* torch.sparse_coo"),
    "A 1-D": (
        lambda a, b: sk.spmm(b.new_ones(128), a),
        r"\[M, K\] or .*, got 1-D; for a vector use A.unsqueeze\(0\)",
    ),
    "A shape": (lambda a, b: b @ a, r"A is \[96, 40\] and B \[128, 96\]: A needs 128 columns"),
    "A dtype": (lambda a, b: b.new_ones(4, 128).double() @ a, "B is torch.float32 and A torch.float64; cast"),
    "A device": (lambda a, b: torch.ones(4, 128, device="meta") @ a, "B is on cpu and A on meta; move"),
    "alpha": (
        lambda a, b: sk.spmm(a, b, alpha=b[0, 0]),  # pyright: ignore[reportArgumentType]
        r"alpha is a torch.Tensor, torch.float32 \[\]; it must be a finite number; write float",
    ),
    "beta": (lambda a, b: sk.spmm(a, b, beta=True), "beta is True; it must be a finite number"),
    "beta alone": (lambda a, b: sk.spmm(a, b, beta=2), "beta is 2 and there is no out= to multiply with it"),
    "out of the right": (
        lambda a, b: sk.spmm(b.new_ones(2, 3, 128), a, out=b.new_ones(3, 2, 96)),
        r"out must be torch.float32 \[2, 3, 96\] on cpu, got torch.float32 \[3, 2, 96\]",
    ),
    "out is A": (
        lambda a, b: sk.spmm(x := b.new_ones(3, 96), pair(96, 96, dtype=b.dtype)[0], out=x),
        "out overlaps the memory of A",
    ),
    "other": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b)),
        r"other is torch.float32 \[96, 40\] on cpu; this product needs torch.float32 \[128, 40\]",
    ),
    "other by columns": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(other=b.new_ones(40, 128).T)),
        r"other matrix of the epilogue must have contiguous rows, got strides \(1, 128\); call .contiguous",
    ),
    "bias": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(40))),
        r"bias is torch.float32 \[40\] on cpu; this product needs torch.float32 \[128\]",
    ),
    "bias strides": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(bias=b.new_ones(256)[::2])),
        "bias must be contiguous, got stride 2",
    ),
    "activation": (
        lambda a, b: sk.plan_spmm(a, b, epilogue=Epilogue(activation=cast(Any, "tanh"))),
        "activation is 'tanh'; use one of relu, gelu, gelu_tanh, silu",
    ),
    "B sparse": (lambda a, b: a @ b.to_sparse(), r"got layout torch.sparse_coo; call .to_dense\(\)"),
    "B 1-D": (
        lambda a, b: sk.spmm(a, b[:, 0]),
        r"must be \[K, N\] or \[..., K, N\], got 1-D; .*B.unsqueeze\(-1\)",
    ),
    "B shape": (lambda a, b: a @ b[:64], r"A is \[128, 96\] and B \[64, 40\]: B needs 96 rows"),
    "B dtype": (lambda a, b: a @ b.double(), "A is torch.float32 and B torch.float64; cast one"),
    "B device": (lambda a, b: a @ b.to("meta"), "A is on cpu and B on meta; move one"),
    "B negated": (
        lambda a, b: a @ torch._neg_view(b),
        r"memory has the other sign; call .resolve_neg\(\)",
    ),
    "out shape": (
        lambda a, b: sk.spmm(a, b, out=b.new_empty(128, 41)),
        r"out must be torch.float32 \[128, 40\] on cpu, got torch.float32 \[128, 41\] on cpu",
    ),
    "out dtype": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, dtype=BF16)),
        r"out must be torch.float32 .* got torch.bfloat16",
    ),
    "out device": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, device="meta")),
        "out must be .* on cpu, got .* on meta",
    ),
    "out no tensor": (
        lambda a, b: sk.spmm(a, b, out=[]),  # pyright: ignore[reportArgumentType]
        r"out must be a dense torch.Tensor, got list",
    ),
    "out sparse": (
        lambda a, b: sk.spmm(a, b, out=torch.zeros(128, 40).to_sparse()),
        "out must be a dense torch.Tensor, got layout torch.sparse_coo",
    ),
    "out by columns": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(40, 128).T),
        r"out must have contiguous rows, got strides \(1, 128\)",
    ),
    "out rows meet": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(8000).as_strided((128, 40), (39, 1))),
        r"every element in its own place, got shape \[128, 40\], strides \(39, 1\)",
    ),
    "out batches meet": (
        lambda a, b: sk.spmm(a, b.expand(2, 96, 40), out=torch.empty(128, 40).expand(2, 128, 40)),
        r"every element in its own place, got shape \[2, 128, 40\], strides \(0, 40, 1\)",
    ),
    "out is B": (
        lambda a, b: sk.spmm(pair(96, 96, dtype=b.dtype)[0], b, out=b),
        "out overlaps the memory of B",
    ),
    "out meets values": (
        lambda a, b: sk.spmm(a, b, out=a.values.flatten()[-128 * 40 :].view(128, 40)),
        "out overlaps the memory of A's values",
    ),
    "kernel": (
        lambda a, b: sk.spmm(a, b, kernel="hopper"),
        "no kernel of spmm is called 'hopper'; known: hopper.spmm, hopper.spmm_paired, portable.spmm, .*cpu.spmm, ref",
    ),
    "kernel and plan": (
        lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b, kernel="cpu.spmm"), kernel="vendor.dense"),
        "kernel='vendor.dense' contradicts plan, which uses cpu.spmm",
    ),
    "plan": (
        lambda a, b: sk.spmm(a, b, plan="fast"),  # pyright: ignore[reportArgumentType]
        "plan must come from plan_spmm, got str",
    ),
    "config": (
        lambda a, b: sk.plan_spmm(a, b, config=3),
        "config= belongs to one kernel; name it with kernel=",
    ),
    "config of another": (
        lambda a, b: sk.plan_spmm(a, b, kernel="cpu.spmm", config=3),
        "3 is no config of cpu.spmm for this problem; its default is steps of",
    ),
    "card": (
        lambda a, b: sk.plan_spmm(a, b, device="b200"),
        "no facts about a card named 'b200'; known: h200, .*, cpu",
    ),
    "card as a device": (
        lambda a, b: sk.plan_spmm(a, b, device=torch.device("cuda")),  # pyright: ignore[reportArgumentType]
        "no facts about a card named 'cuda'; known: h200, .*, cpu. To plan for this machine's GPU, pass operands "
        "on it and omit device" + ("" if torch.cuda.is_available() else ". There is no GPU here"),
    ),
}


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_bad_operands_are_told_what_where_and_what_would_be_right(name: str):
    call, text = BAD_OPERANDS[name]
    a, b = pair(dtype=torch.float32)
    with pytest.raises(InvalidInput, match=text):
        call(a, b)


def pattern(indptr: list[int], indices: list[int], shape: Any = (64, 96)) -> BlockPattern:
    """Blocks of 32."""
    return BlockPattern(
        shape, (32, 32), torch.tensor(indptr, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
    )


def values(*shape: int) -> Tensor:
    return torch.randn(shape)


BAD_MATRICES: dict[str, tuple[Callable[[], Any], str]] = {
    "falling indptr": (
        lambda: pattern([0, 2, 1], [0]),
        "falls from 2 to 1 at block row 1; it must never fall",
    ),
    "indptr start": (lambda: pattern([1, 2, 2], [0, 1]), r"indptr\[0\] is 1; it must be 0"),
    "indptr end": (
        lambda: pattern([0, 1, 2], [0]),
        r"indptr\[-1\] is 2; it must be the number of indices, 1",
    ),
    "indptr length": (lambda: pattern([0, 1], [0]), "has 2 entries; 64 rows in blocks of 32 .* need 3"),
    "unsorted": (
        lambda: pattern([0, 2, 2], [1, 0]),
        r"indices\[1\] is 0, entry 1 of block row 0, and is smaller",
    ),
    "duplicate": (
        lambda: pattern([0, 0, 2], [1, 1]),
        r"indices\[1\] is 1, entry 1 of block row 1, and repeats",
    ),
    "too large": (lambda: pattern([0, 1, 1], [3]), r"indices\[0\] is 3, .*; block columns are 0 to 2"),
    "negative": (lambda: pattern([0, 1, 1], [-1]), r"indices\[0\] is -1, .*; block columns are 0 to 2"),
    "negative side": (
        lambda: pattern([0], [], (-32, 96)),
        r"shape\[0\] is -32; it must be an int of at least 0",
    ),
    "overflow": (lambda: pattern([0], [], (2**31, 96)), "M in whole blocks must fit int32"),
    "values shape": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(2, 32, 32)),
        r"values have shape \(2, 32, 32\); the pattern needs \(1, 32, 32\)",
    ),
    "values strides": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 64)[:, :, ::2]),
        r"values must be contiguous; call .contiguous\(\)",
    ),
    "values start": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1025)[1:].view(1, 32, 32)),
        r"start 4 bytes past a multiple of 16 bytes.*; call .clone\(\)",
    ),
    "values dtype": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 32).int()),
        "dtype of values is torch.int32; use one of torch.bfloat16",
    ),
    "values device": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 32).to("meta")),
        "values is on meta, which is not supported; use a CUDA device or the CPU",
    ),
}


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_bad_matrices_are_told_what_where_and_what_would_be_right(name: str):
    make, text = BAD_MATRICES[name]
    with pytest.raises(InvalidInput, match=text):
        make()
