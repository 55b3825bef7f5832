"""y = act(x @ W.T + bias) + residual, and SwiGLU, for a block-sparse or dense W: the specification.

x @ W.T is (W @ x.T).T, so this is `reference.spmm` with an epilogue, on transposes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.reference.epilogue import Activation, Epilogue, check_epilogue
from sparsek.products.reference.spmm import spmm


def linear(
    x: Tensor,
    w: BSR | Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y = act(x @ W.T + bias) + residual, rounded once.

    `x` is [..., K], `w` a BSR or dense [N, K], `bias` [N], `residual` and y are [..., N], all of one dtype on one
    device; y is contiguous. `activation` is "relu", "gelu" (by erf), "gelu_tanh", "silu" or None. Sums in float64 for
    float64 inputs, otherwise in float32. Differentiable in x, the values of w, bias and residual. Raises InvalidInput
    for shapes, dtypes or devices that do not fit.

    For a BSR, NaN in features of x without a stored block never reaches y; any other NaN in x[t, :] stays in y[t, :].
    """
    columns = None if residual is None else _columns("residual", residual, x, w, 0)
    return _product(x, w, Epilogue(bias=bias, activation=activation or "", other=columns))


def swiglu(x: Tensor, w_gate: BSR | Tensor, w_up: BSR | Tensor) -> Tensor:
    """silu(x @ W_gate.T) * (x @ W_up.T), Shazeer 2020 (arXiv 2002.05202); the gate is rounded, then the product.

    Shapes, dtypes and errors as in `linear`; both matrices are [N, K].
    """
    gate = _product(x, w_gate, Epilogue(activation="silu"))
    columns = _columns("x @ W_gate.T", gate, x, w_up, 0)
    return _product(x, w_up, Epilogue(other=columns, combine="mul"))


def _product(x: Tensor, w: BSR | Tensor, epilogue: Epilogue) -> Tensor:
    b = _columns("x", x, x, w, 1)
    if isinstance(w, BSR):
        y = spmm(w, b, epilogue)
    else:
        y = _dense(w, b, epilogue)
    return y.mT.reshape(*x.shape[:-1], w.shape[0]).contiguous()


def _dense(w: Tensor, b: Tensor, epilogue: Epilogue) -> Tensor:
    """act(W @ b + ...) [N, T] for a dense W."""
    dtypes.name(w.dtype)
    if b.dtype != w.dtype or b.device != w.device:
        raise InvalidInput(f"W is {w.dtype} on {w.device} and x {b.dtype} on {b.device}; they must agree")
    check_epilogue(epilogue, (w.shape[0], b.shape[1]), b.dtype, b.device)
    sum_dtype = torch.promote_types(b.dtype, torch.float32)
    with dtypes.as_given(b.device):
        return epilogue.apply(w.to(sum_dtype) @ b.to(sum_dtype)).to(b.dtype)


def _columns(name: str, part: Tensor, x: Tensor, w: BSR | Tensor, side: int) -> Tensor:
    """`part` [..., S] as [S, tokens], where S is that side of w and the leading dims are those of x."""
    if not isinstance(w, (BSR, Tensor)) or len(w.shape) != 2:
        raise InvalidInput(f"W must be a BSR or a dense torch.Tensor [N, K], got {_describe(w)}")
    if not isinstance(part, Tensor) or not isinstance(x, Tensor):
        raise InvalidInput(f"x and {name} must be torch.Tensors, got {_describe(x)} and {_describe(part)}")
    wanted = (*x.shape[:-1], w.shape[side])
    if x.ndim == 0 or tuple(part.shape) != wanted:
        raise InvalidInput(
            f"{name} has shape {tuple(part.shape)}; x is {list(x.shape)} and W [N, K] {list(w.shape)}, so it needs "
            f"{list(wanted)}"
        )
    if part.dtype != x.dtype or part.device != x.device:
        raise InvalidInput(
            f"{name} is {part.dtype} on {part.device} and x {x.dtype} on {x.device}; they must agree"
        )
    return part.reshape(x.shape[:-1].numel(), wanted[-1]).mT


def _describe(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
