"""y = act(x @ W.T + bias) + residual, and SwiGLU: the products of a network's layers, each in one launch.

x @ W.T is (W @ x.T).T: spmm with an epilogue, whose C is written by columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import told
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import ScaledTensor
from sparsek.matrix.quantized import Scaled
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import flat, scaled, semi24, transforms
from sparsek.ops.autocast import autocasts, follow_autocast_fp8
from sparsek.ops.semi24 import TWO_FOUR
from sparsek.ops.spmm import multiply
from sparsek.plan import operands
from sparsek.plan.scaled import check_layer
from sparsek.plan.semi24 import Product24
from sparsek.plan.spmm import Product
from sparsek.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue

Weight = BSR | Semi24 | BSR24


def linear(
    x: Tensor | ScaledTensor,
    W: Weight | Scaled | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    *,
    kernel: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = act(x @ W.T + bias) + residual, in one kernel.

    x: [..., K], fastest with the last dim contiguous, or as the transpose view of such a matrix. Its leading dims
    become one: a view where they lie so, as those of a contiguous x do, otherwise a copy, and the same for residual.
    W: BSR [N, K] of x's dtype on its device; a `.T` view costs nothing. Or a Semi24 or BSR24 [N, K]. Or a dense tensor
    [N, K]: torch multiplies. Or a Scaled [N, K], an FP8 matrix (docs/fp8.md): x is then a ScaledTensor, or a bf16, fp16
    or fp32 tensor that is rounded to E4M3 with a scale for each token; bias and residual have y's dtype.
    bias: [N]. activation: "relu", "gelu" (by erf), "gelu_tanh", "silu" or None. residual: [..., N]. A bias that is not
    contiguous, and a residual whose rows are not, are copied first.
    kernel: a name of the kernels' table of spmm, semi24 or bsr24, after what W is; not for a dense one.
    dtype: of y, bf16, fp16 or fp32, for a W in FP8 only; without it that of a tensor x, bf16 for a ScaledTensor.

    Returns y [..., N], contiguous, summed in float32 (float64 for float64) and rounded once; by hopper.spmm also before
    an activation or a residual, as by torch: in fp16 a sum over 65504 is inf there.
    Differentiable in x, the values of W (not those of a 2:4 one), bias and residual. Where a gradient is wanted and
    the activation is gelu, gelu_tanh or silu, torch applies it to the rounded x @ W.T + bias, which the backward pass
    needs; a residual after any activation is added by torch too.
    Under torch.autocast x, W, bias and residual are cast to its dtype, which is y's; in FP8 with dtype= they are not.
    Once planned, no sync and no allocation but y.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.

    GELU: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    if autocasts():
        dtype, x, W, bias, residual = follow_autocast_fp8(dtype, x, W, bias, residual)
    if kernel is not None:
        arguments.text("kernel", kernel)
    if isinstance(x, ScaledTensor) or isinstance(W, Scaled):
        return _in_fp8(x, W, bias, activation, residual, kernel, dtype)
    if dtype is not None:
        raise InvalidInput("dtype= is for a W in FP8; other products have the dtype of their operands")
    if not isinstance(W, BSR) and not isinstance(W, TWO_FOUR):
        return _dense(x, W, bias, activation, residual, kernel)
    operands.check_linear(x, W, bias, activation, residual)
    bias, residual = _in_rows(bias), _in_rows(residual)
    rows, act = _tokens(x), activation or ""
    joined = None if residual is None else _tokens(residual)
    wanted = act != "" and _wanted(x, W.values, bias, residual)
    cut, apart = wanted and act != "relu", wanted
    other = None if joined is None or apart else joined.mT
    y = _product(rows, W, Epilogue(bias=bias, activation="" if cut else act, other=other), kernel)
    with dtypes.as_given(x.device):
        if cut:
            y = ACTIVATIONS[act](y)
        if joined is not None and apart:
            y = y + joined
    return y if x.dim() == 2 else y.view(*x.shape[:-1], W.shape[0])


def swiglu(
    x: Tensor | ScaledTensor, W_gate: Weight | Scaled, W_up: Weight | Scaled, *, kernel: str | None = None
) -> Tensor:
    """silu(x @ W_gate.T) * (x @ W_up.T), in two kernels: the second multiplies what the first has left in y.

    x: [..., K] as in `linear`. W_gate, W_up: BSR, Semi24 or BSR24 [N, K] of x's dtype on its device, of one kind where
    kernel= is given; each with its own pattern. Or both in FP8, a Scaled: x as in `linear`, rounded once for both.
    Returns y [..., N], contiguous. The gate is rounded, then the product.
    Differentiable in x and in the values; where a gradient is wanted torch applies silu and multiplies, and both
    products stay for the backward pass. Under torch.autocast as `linear`.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.

    Source: Shazeer, arXiv:2002.05202.
    """
    if autocasts():
        dtype, x, W_gate, W_up = follow_autocast_fp8(None, x, W_gate, W_up)
    else:
        dtype = None
    if kernel is not None:
        arguments.text("kernel", kernel)
    if isinstance(x, ScaledTensor) or isinstance(W_gate, Scaled) or isinstance(W_up, Scaled):
        return scaled.swiglu(x, W_gate, W_up, kernel, dtype)
    for name, w in (("W_gate", W_gate), ("W_up", W_up)):
        if not isinstance(w, BSR) and not isinstance(w, TWO_FOUR):
            raise InvalidInput(f"{name} must be a BSR, got {type(w).__name__}; make one with BSR.from_dense")
        operands.check_linear(x, w, None, None, None)
    if W_gate.shape != W_up.shape:
        raise InvalidInput(f"W_gate is {list(W_gate.shape)} and W_up {list(W_up.shape)}; they must agree")
    rows = _tokens(x)
    if _wanted(x, W_gate.values, W_up.values):
        gate, up = _product(rows, W_gate, PLAIN, kernel), _product(rows, W_up, PLAIN, kernel)
        with dtypes.as_given(x.device):
            y = functional.silu(gate) * up
    else:
        gate = _product(rows, W_gate, Epilogue(activation="silu"), kernel)
        epilogue = Epilogue(other=gate.mT, combine="mul")
        y = _product(rows, W_up, epilogue, kernel, None if flat.traced() else gate)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], W_up.shape[0])


def _product(
    x: Tensor, w: Weight, epilogue: Epilogue, kernel: str | None, out: Tensor | None = None
) -> Tensor:
    """x [T, K] times W.T, written to `out` [T, N] if there is one; the epilogue is that of (x @ W.T).T."""
    columns = None if out is None else out.mT
    if isinstance(w, BSR):
        return multiply(Product(w, x.mT, columns, epilogue, "col"), kernel)
    return semi24.multiply(Product24(w, False, x.mT, columns, epilogue, "col"), kernel)


def _wanted(*tensors: Tensor | None) -> bool:
    """A gradient is wanted, or may be: vmap hides whether what it stands in wants one."""
    return operands.wants_gradient(*tensors) or transforms.active()


def _in_rows(x: Tensor | None) -> Tensor | None:
    """A bias or a residual, copied unless its last dim is contiguous, as the kernels' epilogues read it."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _tokens(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]: a view where x lies so."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _in_fp8(
    x: Any,
    w: Any,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    kernel: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    operands.check_activation(activation)
    if not isinstance(w, Scaled):
        raise InvalidInput(
            f"x is a ScaledTensor, so W must be a Scaled, got {type(w).__name__}; or x.dequantize()"
        )
    if residual is not None:
        check_layer(x, w)
        operands.check_dense("residual", residual)
        operands.check_shape("residual", residual, (*x.shape[:-1], w.shape[0]))
    if bias is not None:
        arguments.dense("bias", bias)
    epilogue = Epilogue(bias=_in_rows(bias), activation=activation or "", other=_in_rows(residual))
    return scaled.linear(x, w, epilogue, kernel, dtype)


def _dense(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    kernel: str | None,
) -> Tensor:
    if not isinstance(w, Tensor):
        raise InvalidInput(
            f"W must be a BSR, a Semi24, a BSR24 or a dense torch.Tensor, got {type(w).__name__}"
        )
    operands.check_dense("W", w)
    if kernel is not None:
        raise InvalidInput(
            f"kernel={told(kernel)} multiplies a sparse W; W is dense, and torch multiplies it"
        )
    operands.check_activation(activation)
    operands.check_dense("x", x, w, "W")
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise InvalidInput(
            f"x is {list(x.shape)} and W {list(w.shape)}: W must be [N, K] and the last dim of x K"
        )
    if bias is not None:
        operands.check_dense("bias", bias, w, "W")
        operands.check_shape("bias", bias, (w.shape[0],))
    if residual is not None:
        operands.check_dense("residual", residual, w, "W")
        operands.check_shape("residual", residual, (*x.shape[:-1], w.shape[0]))
    if operands.wants_gradient(x, w):
        arguments.kept("x", x)
        arguments.kept("W", w)
    with dtypes.as_given(x.device):
        y = ACTIVATIONS[activation or ""](functional.linear(x, w, bias))
        return y if residual is None else y + residual
