"""The epilogue of the reference: its formula, its gradients, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.reference.epilogue import (
    ACTIVATIONS,
    PLAIN,
    Activation,
    Combine,
    Epilogue,
    EpilogueActivation,
)
from sparsek.products.reference.spmm import spmm
from tests.refusals import refused


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def matrix() -> BSR:
    return random_bsr(40, 35, 16, 0.5, pattern="powerlaw", dtype=torch.float64, device="cpu", seed=2)


@pytest.mark.parametrize("batch", [(), (3,), (2, 0)])
def test_every_part_is_applied_in_this_order(matrix: BSR, batch: tuple[int, ...]):
    b, bias, other = normal(*batch, 35, 6), normal(40), normal(*batch, 40, 6, seed=8)
    z = 0.5 * (matrix.to_dense() @ b) + bias[:, None]
    added = spmm(matrix, b, Epilogue(0.5, bias, "gelu", other, "add", -2.0))
    torch.testing.assert_close(added, functional.gelu(z) - 2 * other)
    multiplied = spmm(matrix, b, Epilogue(0.5, bias, "silu", other, "mul"))
    torch.testing.assert_close(multiplied, functional.silu(z) * other)
    assert added.is_contiguous()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("", lambda z: z),
        ("relu", lambda z: z.clamp(min=0)),
        ("gelu", lambda z: 0.5 * z * (1 + torch.erf(z / 2**0.5))),
        ("gelu_tanh", lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))),
        ("silu", lambda z: z / (1 + torch.exp(-z))),
    ],
)
def test_activations_are_the_published_formulas(matrix: BSR, name: EpilogueActivation, right):
    b = normal(35, 6)
    torch.testing.assert_close(spmm(matrix, b, Epilogue(activation=name)), right(matrix.to_dense() @ b))


def test_the_formulas_above_are_all_there_are():
    assert set(ACTIVATIONS) == {"", "relu", "gelu", "gelu_tanh", "silu"}


def test_rows_without_blocks_are_the_epilogue_of_zero():
    a = random_bsr(32, 32, 16, 0.0, dtype=torch.float64, device="cpu", seed=0)
    bias, other = normal(32), normal(32, 3)
    c = spmm(a, normal(32, 3, seed=9), Epilogue(2.0, bias, "gelu", other, beta=0.5))
    torch.testing.assert_close(c, functional.gelu(bias)[:, None] + 0.5 * other)


def test_c_is_rounded_once():
    """1 + 2^-12 is 1 in bf16: were the product or the bias' sum rounded, the difference would be 0."""
    a = BSR.from_dense(torch.eye(16, dtype=torch.bfloat16), 16, threshold=0)
    b = torch.full((16, 1), 2.0**-12, dtype=torch.bfloat16)
    bias, other = torch.ones(16, dtype=torch.bfloat16), torch.full((16, 1), -1.0, dtype=torch.bfloat16)
    assert (spmm(a, b, Epilogue(bias=bias, other=other)) == 2.0**-12).all()


def test_the_other_matrix_is_not_written_to(matrix: BSR):
    b, other = normal(35, 6), normal(40, 6)
    before = other.clone()
    spmm(matrix, b, Epilogue(other=other, beta=3.0))
    assert torch.equal(other, before)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("combine", ["add", "mul"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_are_right(activation: Activation, combine: Combine, batch: tuple[int, ...]):
    a = random_bsr(20, 35, 16, 0.6, dtype=torch.float64, device="cpu", seed=3).T
    b, bias, other = normal(*batch, 20, 2), normal(35), normal(*batch, 35, 2, seed=8)

    def product(values: Tensor, *rest: Tensor) -> Tensor:
        epilogue = Epilogue(0.7, rest[1], activation, rest[2], combine, -1.5)
        return spmm(BSR.unchecked(a.pattern, values, a.order), rest[0], epilogue)

    parts = tuple(part.requires_grad_() for part in (a.values, b, bias, other))
    assert torch.autograd.gradcheck(product, parts, fast_mode=True)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_second_gradients_are_right(activation: Activation):
    a = random_bsr(20, 20, 16, 0.6, dtype=torch.float64, device="cpu", seed=3)

    def product(values: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return spmm(BSR.unchecked(a.pattern, values), b, Epilogue(bias=bias, activation=activation))

    parts = tuple(part.requires_grad_() for part in (a.values, normal(20, 2), normal(20)))
    assert torch.autograd.gradgradcheck(product, parts, fast_mode=True)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_a_slope_is_the_derivative_of_the_activation(matrix: BSR, activation: EpilogueActivation):
    b, bias, slopes = normal(35, 6), normal(40), torch.full((40, 6), torch.nan, dtype=torch.float64)
    z = (0.5 * (matrix.to_dense() @ b) + bias[:, None]).requires_grad_()
    c = spmm(matrix, b, Epilogue(0.5, bias, activation, slope=slopes))
    torch.testing.assert_close(c, ACTIVATIONS[activation](z).detach())
    torch.testing.assert_close(slopes, torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)[0])


def test_plain_is_plain():
    assert PLAIN.is_plain
    others = (
        Epilogue(2.0),
        Epilogue(bias=normal(3)),
        Epilogue(activation="relu"),
        Epilogue(other=normal(3, 3)),
    )
    assert not any(each.is_plain for each in others)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"activation": "tanh"}, "activation is 'tanh'; use one of relu, gelu, gelu_tanh, silu"),
        ({"other": normal(40, 6), "combine": "sub"}, "combine is 'sub'; use one of add, mul"),
        ({"bias": normal(6)}, r"bias is torch.float64 \[6\] on cpu; this product needs .* \[40\] on cpu"),
        ({"bias": normal(40, dtype=torch.float32)}, "bias is torch.float32"),
        ({"other": normal(6, 40)}, r"other is torch.float64 \[6, 40\] on cpu; .* \[40, 6\]"),
        ({"bias": [1.0] * 40}, "bias must be a dense torch.Tensor, got list"),
        ({"alpha": 10**39}, "alpha is 1000.*; it must be a finite number from -3.4"),
        ({"beta": float("nan")}, "beta is nan; it must be a finite number"),
        ({"slope": normal(40, 6)}, "a slope is that of an activation"),
        (
            {"slope": normal(6, 40), "activation": "gelu"},
            r"slope is torch.float64 \[6, 40\] on cpu; .* \[40, 6\]",
        ),
        ({"activation": ["relu"]}, r"activation is \['relu'\]; use one of"),
    ],
)
def test_what_does_not_fit_is_refused(matrix: BSR, parts: dict[str, Any], message: str):
    refused(message, lambda: spmm(matrix, normal(35, 6), Epilogue(**parts)))
