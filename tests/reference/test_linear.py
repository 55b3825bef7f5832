"""The reference of linear and swiglu: against torch's own, their gradients, and what they refuse."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.reference.linear import linear, swiglu
from tests.refusals import refused

ACTIVATIONS = {
    None: lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(seed: int = 2, kind: str = "BSR") -> "BSR | Tensor":
    """W [40, 35], as a BSR, a transposed view, or dense."""
    w = random_bsr(40, 35, 16, 0.5, dtype=torch.float64, device="cpu", seed=seed)
    return {"BSR": w, "view": BSR.from_dense(w.to_dense().T, 16, threshold=0.0).T, "dense": w.to_dense()}[
        kind
    ]


def dense(w: "BSR | Tensor") -> Tensor:
    return w.to_dense() if isinstance(w, BSR) else w


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS), ids=str)
@pytest.mark.parametrize("kind", ["BSR", "view", "dense"])
def test_it_is_torch_linear_activation_and_residual(lead, activation, kind: str):
    w, x, bias, residual = weight(kind=kind), normal(*lead, 35), normal(40), normal(*lead, 40, seed=9)
    y = linear(x, w, bias, activation, residual)
    right = ACTIVATIONS[activation](functional.linear(x, dense(w), bias)) + residual
    assert y.is_contiguous()
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(linear(x, w), functional.linear(x, dense(w)))


@pytest.mark.parametrize("kind", ["BSR", "dense"])
def test_swiglu_is_the_gated_product(kind: str):
    gate, up, x = weight(2, kind), weight(3, kind), normal(4, 2, 35)
    right = functional.silu(x @ dense(gate).T) * (x @ dense(up).T)
    torch.testing.assert_close(swiglu(x, gate, up), right)


@pytest.mark.parametrize("kind", ["BSR", "dense"])
def test_y_is_rounded_once(kind: str):
    eye = torch.eye(16, dtype=torch.bfloat16)
    x, ones = torch.full((1, 16), 2.0**-12, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    w = BSR.from_dense(eye, 16, threshold=0) if kind == "BSR" else eye
    assert (linear(x, w, ones, None, -ones[None]) == 2.0**-12).all()


@pytest.mark.parametrize("activation", list(ACTIVATIONS), ids=str)
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["BSR", "dense"])
def test_gradients_are_right(activation, lead, kind: str):
    w = weight(kind=kind)
    values = (w.values if isinstance(w, BSR) else w).requires_grad_()

    def layer(values: Tensor, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        seen = BSR.unchecked(w.pattern, values) if isinstance(w, BSR) else values
        return linear(x, seen, bias, activation, residual)

    parts = [normal(*lead, 35), normal(40), normal(*lead, 40, seed=9)]
    parts = (values, *(part.requires_grad_() for part in parts))
    assert torch.autograd.gradcheck(layer, parts, fast_mode=True)


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_gradients_of_swiglu_are_right(lead):
    gate, up = weight(2), weight(3)
    assert isinstance(gate, BSR)
    assert isinstance(up, BSR)

    def layer(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
        return swiglu(x, BSR.unchecked(gate.pattern, left), BSR.unchecked(up.pattern, right))

    parts = tuple(part.requires_grad_() for part in (gate.values, up.values, normal(*lead, 35)))
    assert torch.autograd.gradcheck(layer, parts, fast_mode=True)


def test_nan_in_features_without_blocks_never_reaches_y():
    cells = torch.tensor([[True, False, False], [True, False, True], [False, False, False]])
    w = BSR.from_dense(normal(40, 35), 16, mask=cells)
    x = normal(5, 35)
    clean = linear(x, w, activation="gelu")
    x[:, 16:32] = torch.nan
    assert torch.equal(linear(x, w, activation="gelu"), clean)
    x[3, 0] = torch.nan
    assert linear(x, w).isnan().any(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("kind", ["BSR", "dense"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": normal(5, 34)}, r"x has shape \(5, 34\); .* W \[N, K\] \[40, 35\], so it needs \[5, 35\]"),
        ({"x": torch.tensor(1.0)}, "x has shape"),
        ({"x": [1.0]}, "must be torch.Tensors, got list"),
        ({"x": normal(5, 35, dtype=torch.float32)}, "they must agree"),
        (
            {"bias": normal(35)},
            r"bias is torch.float64 \[35\] on cpu; this product needs torch.float64 \[40\]",
        ),
        ({"activation": "tanh"}, "use one of relu, gelu, gelu_tanh, silu"),
        ({"residual": normal(5, 35)}, r"residual has shape \(5, 35\); .* so it needs \[5, 40\]"),
        (
            {"residual": normal(5, 40, dtype=torch.float32)},
            "residual is torch.float32 on cpu and x torch.float64",
        ),
        ({"w": [1.0]}, r"W must be a BSR or a dense torch.Tensor \[N, K\], got list"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, change, message: str):
    refused(message, linear, **{"x": normal(5, 35), "w": weight(kind=kind), **change})
