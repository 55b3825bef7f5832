"""y = act(x @ W.T + bias) + residual, and SwiGLU: the products of a network's layers, each in one launch.

x @ W.T is (W @ x.T).T: spmm with an epilogue, whose C is written by columns.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor, quantize_dense
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import bound, library_args, transforms
from sparsek.ops.autocast import autocasts, follow_autocast_fp8
from sparsek.ops.bound import Slot
from sparsek.ops.spmm import SPMM, How, Multiplied, multiply
from sparsek.plan import operands
from sparsek.plan.spmm import E4M3, Product, SpmmPlan, dtype_of
from sparsek.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue

Weight = BSR | Semi24 | BSR24 | Quantized


def linear(
    x: Tensor | QuantizedTensor,
    W: Weight | Tensor,
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
    [N, K]: torch multiplies. Or a Quantized [N, K], an FP8 matrix (docs/fp8.md): x is then a QuantizedTensor, or a
    bf16, fp16 or fp32 tensor that is rounded to E4M3 with a scale for each token; bias and residual have y's dtype.
    bias: [N]. activation: "relu", "gelu" (by erf), "gelu_tanh", "silu" or None. residual: [..., N]. A bias that is not
    contiguous, and a residual whose rows are not, are copied first.
    kernel: a name of the kernels' table, one that multiplies such a W; not for a dense one.
    dtype: of y, bf16, fp16 or fp32, for a W in FP8 only; without it that of a tensor x, bf16 for a QuantizedTensor.

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
    slot = bound.UNBOUND
    # Under torch.compile nothing is bound, and nothing of this is traced.
    if (
        not torch.compiler.is_compiling()
        and activation.__class__ in (str, type(None))
        and (dtype is None or dtype.__class__ is torch.dtype)
    ):
        also = () if bias is None and residual is None else [t for t in (bias, residual) if t is not None]
        more = "linear", bias is None, residual is None, activation, kernel, dtype
        slot = bound.product(W, x, more, also)
        if slot.__class__ is not Slot:
            return slot
    # Where a gradient is wanted the product checks its operands; the activation, and what follows it, may be torch's.
    if (
        slot is bound.UNBOUND
        or not slot.learns
        or (activation and (activation not in ACTIVATIONS or residual is not None))
    ):
        operands.check_linear(x, W, bias, activation, residual)
    if isinstance(W, Tensor):
        return _dense(x, W, bias, activation, residual, kernel, dtype)
    rows = _in_rows(bias), _in_rows(residual)
    if not slot.learns and (rows[0] is not bias or rows[1] is not residual):
        # Recorded, a copy that was made before the launch would be a constant of the call.
        slot = bound.UNBOUND
    bias, residual = rows
    act = activation or ""
    # Gradients of an epilogue are torch's: it applies what they do not go through.
    apart = act != "" and not isinstance(W, Quantized) and _wanted(x, W.values, bias, residual)
    cut = apart and act != "relu"
    inside, beside = (None if cut else activation), (None if apart else residual)
    if slot.learns and isinstance(x, Tensor) and not isinstance(W, Quantized):
        how = How(True, False, 1.0, inside == "relu", kernel)
        again = functools.partial(linear, x, W, bias, inside, beside, kernel=kernel, dtype=dtype)
        y = Multiplied.apply(W.values, x, bias, beside, W, how, again)
    else:

        def run() -> (
            Tensor
        ):  # all of it, for leading dims that do not join are copied, and a copy is no operand
            call = _layer(x, W, Epilogue(bias=bias, activation=inside or "", other=beside), dtype)
            y = multiply(call, kernel)
            return y if x.ndim == 2 else y.view(*x.shape[:-1], W.shape[0])

        y = slot.run(run)
    if apart:
        with dtypes.as_given(x.device):
            y = ACTIVATIONS[act](y) if cut else y
            y = y if residual is None else y + residual
    return y


def swiglu(x: Tensor | QuantizedTensor, W_gate: Weight, W_up: Weight, *, kernel: str | None = None) -> Tensor:
    """silu(x @ W_gate.T) * (x @ W_up.T), in two kernels: the second multiplies what the first has left in y.

    x: [..., K] as in `linear`. W_gate, W_up: BSR, Semi24 or BSR24 [N, K] of x's dtype on its device, of one kind where
    kernel= is given; each with its own pattern. Or both in FP8, a Quantized: x as in `linear`, rounded once for both.
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
    for name, w in (("W_gate", W_gate), ("W_up", W_up)):
        if not operands.is_sparse(w):
            raise InvalidInput(f"{name} must be a BSR, got {type(w).__name__}; make one with BSR.from_dense")
        operands.check_layer(x, w)
    if W_gate.shape != W_up.shape:
        raise InvalidInput(f"W_gate is {list(W_gate.shape)} and W_up {list(W_up.shape)}; they must agree")
    if isinstance(W_gate, Quantized) or isinstance(W_up, Quantized):
        if not (isinstance(W_gate, Quantized) and isinstance(W_up, Quantized)):
            raise InvalidInput("W_gate and W_up must both be a Quantized, or none of them")
        dtype = dtype_of(W_gate, x, dtype)
        if isinstance(x, Tensor):
            if operands.wants_gradient(x):
                raise InvalidInput(operands.FP8_HAS_NO_GRADIENT)
            x = quantize_dense(x, E4M3, "row", check=False)
    if dtype is None and _wanted(x, W_gate.values, W_up.values):
        gate, up = (multiply(_layer(x, w, PLAIN), kernel) for w in (W_gate, W_up))
        with dtypes.as_given(x.device):
            y = functional.silu(gate) * up
    else:
        gate = multiply(_layer(x, W_gate, Epilogue(activation="silu"), dtype), kernel)
        call = _layer(x, W_up, Epilogue(other=gate, combine="mul"), dtype)
        in_place = dtype is None and not library_args.traced()
        y = multiply(call._replace(out=gate.mT) if in_place else call, kernel)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], W_up.shape[0])


def plan_layer(
    x: Tensor | QuantizedTensor,
    W: Weight,
    *,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> SpmmPlan:
    """The plan that `linear(x, W)` uses for a sparse W; call it as `plan(x, W, epilogue=...)`.

    epilogue: of bias [N], an activation and a residual [..., N] as `other`, in y's dtype. Otherwise as `plan_spmm`.
    """
    operands.check_given(epilogue)
    operands.check_layer(x, W)
    return replace(SPMM.plan(_layer(x, W, epilogue, dtype), kernel, config, device), layer=True)


def _layer(
    x: Tensor | QuantizedTensor, w: Weight, epilogue: Epilogue, dtype: torch.dtype | None = None
) -> Product:
    """x @ W.T as [T, N], checked. `epilogue` is about [..., N]."""
    call = Product.layer(x, w, epilogue, dtype)
    call.check_epilogue()
    return call


def _wanted(*tensors: Any) -> bool:
    """A gradient is wanted, or may be: vmap hides whether what it stands in wants one."""
    return operands.wants_gradient(*tensors) or transforms.active()


def _in_rows(x: Tensor | None) -> Tensor | None:
    """A bias or a residual, copied unless its last dim is contiguous, as the kernels' epilogues read it."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _dense(
    x: Any,
    w: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    kernel: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    if dtype is not None:
        raise InvalidInput("dtype= is for a W in FP8; other products have the dtype of their operands")
    if kernel is not None:
        raise InvalidInput(
            f"kernel={shown(kernel)} multiplies a sparse W; W is dense, and torch multiplies it"
        )
    if operands.wants_gradient(x, w):
        arguments.kept("x", x)
        arguments.kept("W", w)
    with dtypes.as_given(x.device):
        y = ACTIVATIONS[activation or ""](functional.linear(x, w, bias))
        return y if residual is None else y + residual


for kind in (BSR, Semi24, BSR24, Quantized):
    kind.register_linear(linear)
