"""`linear`, y = act(x @ W.T + bias) + residual, and `swiglu`: products of layers with a fused epilogue.

x @ W.T is (W @ x.T).T: spmm with an epilogue, and C written column-major.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes, tracing
from sparsek.core.arguments import shown
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.autocast import autocasts
from sparsek.engine.call.recorded_calls import Slot
from sparsek.products.formats.base import Matrix
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized, SparseMatrix
from sparsek.products.formats.quantized_tensor import QuantizedTensor, quantize_dense
from sparsek.products.ops import recorded_products
from sparsek.products.ops.spmm import SPMM, How, LearnedProduct, finished, follow_autocast_fp8, multiply
from sparsek.products.plan import operands
from sparsek.products.plan.kernels import activation_seconds
from sparsek.products.plan.spmm import E4M3, Product, SpmmPlan, dtype_of
from sparsek.products.reference.epilogue import ACTIVATIONS, PLAIN, Activation, Epilogue

Weight: TypeAlias = SparseMatrix
# The activations whose derivative is not known from their result.
SLOPED = ("gelu", "gelu_tanh", "silu")


def linear(
    x: Tensor | QuantizedTensor,
    W: Weight | Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    *,
    kernel: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute y = act(x @ W.T + bias) + residual in one kernel, for a sparse or dense W.

    Like torch.nn.functional.linear with a sparse weight and a fused epilogue. Once planned, a call does not synchronize
    and allocates only y.

    Args:
        x: [..., K] of the dtype of `W`, on its device; fastest with the last dim contiguous, or as the transpose view
            of a row-major matrix. Leading dims are joined: without a copy where their layout allows, as for a
            contiguous x.
        W: A BSR, Semi24 or BSR24 [N, K]; a `.T` view of a BSR costs nothing. Or a Quantized [N, K]: x is then a
            QuantizedTensor, or a bf16, fp16 or fp32 tensor that is rounded to E4M3 with a scale for each token. Or a
            dense tensor [N, K], which torch multiplies.
        bias: [N]. Copied first if it is not contiguous.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu" or None. GELU: Hendrycks and Gimpel, arXiv:1606.08415.
        residual: [..., N], added after the activation. Copied first if its rows are not contiguous.
        kernel: The name of a kernel for this kind of W, for example "hopper.spmm". It runs or raises Unsupported.
        dtype: The dtype of y for a W in FP8: bf16, fp16 or fp32. By default that of a tensor x, bf16 for a
            QuantizedTensor. Bias and residual have it too.

    Returns:
        y [..., N], contiguous, accumulated in float32 (float64 for float64) and rounded to the output dtype once.
        `hopper.spmm` also rounds before an activation or a residual, as torch does: in fp16, sums over 65504 become
        inf there.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable in x, the values of a BSR, bias and residual; double backward works. If a gradient is needed, torch
    applies gelu, gelu_tanh or silu to the rounded x @ W.T + bias, which the backward pass reads. For a BSR that learns
    `hopper.spmm` writes the activation and its derivative instead, except under torch.compile and torch.func. Torch
    adds a residual that follows an activation. Under torch.autocast all operands are cast to its dtype, which is that
    of y; with `dtype` they are not.

    Examples:
        >>> W = sk.random_bsr(256, 128, block=32, density=0.25)
        >>> sk.linear(torch.randn(2, 10, 128), W, torch.zeros(256), activation="gelu").shape
        torch.Size([2, 10, 256])
    """
    if autocasts():
        dtype, x, W, bias, residual = follow_autocast_fp8(dtype, x, W, bias, residual)
    if kernel is not None:
        arguments.text("kernel", kernel)
    slot = recorded_calls.UNBOUND
    # Under torch.compile no call is recorded, and none of this is traced.
    if (
        not torch.compiler.is_compiling()
        and (activation is None or activation.__class__ is str)
        and (dtype is None or dtype.__class__ is torch.dtype)
    ):
        also = () if bias is None and residual is None else [t for t in (bias, residual) if t is not None]
        sloped = activation in SLOPED and isinstance(W, BSR) and W.values.requires_grad  # see `writes_slope`
        settings = "linear", bias is None, residual is None, activation, kernel, dtype, sloped
        slot = recorded_products.product(W, x, settings, also)
        if slot.__class__ is not Slot:
            return slot
    operands.check_linear(x, W, bias, activation, residual)
    if isinstance(W, Tensor):
        return _dense(x, W, bias, activation, residual, kernel, dtype)
    rows = in_rows(bias), in_rows(residual)
    if rows[0] is not bias or rows[1] is not residual:
        # In a recorded call, a copy made before the launch would be a constant.
        slot = slot._replace(key=None)
    bias, residual = rows
    act = activation or ""
    # torch computes the gradients of an epilogue, and so applies what needs one.
    apart = act != "" and not isinstance(W, Quantized) and _wanted(x, W.values, bias, residual)
    cut = apart and act != "relu"
    inside, beside = (None if cut else activation), (None if apart else residual)

    def run() -> (
        Tensor
    ):  # includes the copy of leading dims that do not join: a copy is no operand of the recorded call
        return fused(x, W, Epilogue(bias=bias, activation=inside or "", other=beside), kernel, dtype)

    slope = cut and writes_slope(x, W, bias, act, kernel)
    after = act if cut and not slope else ""
    if slope or (slot.learns and isinstance(x, Tensor) and not isinstance(W, Quantized)):
        if not slot.learns:
            slot = slot._replace(operands=(W.values, x, *(t for t in rows if t is not None)))
        how = How(True, False, 1.0, inside == "relu", kernel, act if slope else "")
        again = LearnedProduct(how, bias is not None, residual is not None, apart, after)
        both: Any = functools.partial(with_slope, x, W, bias, act, kernel) if slope else run
        return slot.differentiate(again, W, both)
    y = slot.run(run)
    return finished(y, after, residual) if apart else y


def swiglu(x: Tensor | QuantizedTensor, W_gate: Weight, W_up: Weight, *, kernel: str | None = None) -> Tensor:
    """Compute silu(x @ W_gate.T) * (x @ W_up.T), in two kernels; the second multiplies into the output of the first.

    Source: Shazeer, arXiv:2002.05202.

    Args:
        x: [..., K]; see `linear`.
        W_gate: A BSR, Semi24 or BSR24 [N, K] of the dtype of x, on its device, or a Quantized.
        W_up: The same, with a pattern of its own; quantized if and only if `W_gate` is. x is then rounded once for
            both.
        kernel: The name of a kernel; both weights then have one format.

    Returns:
        y [..., N], contiguous. The gate is rounded, then the product.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable in x and the values of BSR weights. If a gradient is needed, torch applies silu and multiplies, and
    both products are saved for the backward pass. Under torch.autocast as `linear`.

    Examples:
        >>> gate, up = (sk.random_bsr(256, 128, block=32, density=0.25, seed=seed) for seed in (0, 1))
        >>> sk.swiglu(torch.randn(10, 128), gate, up).shape
        torch.Size([10, 256])
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
            if tracing.wants_gradient(x):
                raise InvalidInput(operands.FP8_HAS_NO_GRADIENT)
            x = quantize_dense(x, E4M3, "row", check=False)
    if dtype is None and _wanted(x, W_gate.values, W_up.values):
        gate, up = (multiply(_layer(x, w, PLAIN), kernel) for w in (W_gate, W_up))
        with dtypes.as_given(x.device):
            y = functional.silu(gate) * up
    else:
        gate = multiply(_layer(x, W_gate, Epilogue(activation="silu"), dtype), kernel)
        call = _layer(x, W_up, Epilogue(other=gate, combine="mul"), dtype)
        in_place = dtype is None and not transforms.traced()
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
    """Return the plan that `linear(x, W)` uses for a sparse W; call it as `plan(x, W, epilogue=...)`.

    epilogue: with a bias [N], an activation, and a residual [..., N] as `other`, in the dtype of y. The other arguments
    are those of `plan_spmm`.
    """
    operands.check_given(epilogue)
    operands.check_layer(x, W, predicted=device is not None)
    return replace(SPMM.plan(_layer(x, W, epilogue, dtype), kernel, config, device), layer=True)


def _layer(
    x: Tensor | QuantizedTensor, w: Weight, epilogue: Epilogue, dtype: torch.dtype | None = None
) -> Product:
    """The product x @ W.T as [T, N], checked. The tensors of `epilogue` are [..., N]."""
    call = Product.layer(x, w, epilogue, dtype)
    call.check_epilogue()
    return call


def fused(
    x: Tensor | QuantizedTensor,
    w: Weight,
    epilogue: Epilogue,
    kernel: str | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The layer [..., N] by one kernel, of operands that are taken as they are, also under torch.autocast."""
    y = multiply(_layer(x, w, epilogue, dtype), kernel)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], w.shape[0])


def _wanted(*tensors: Any) -> bool:
    """Whether a gradient is needed, or may be: vmap hides that."""
    return tracing.wants_gradient(*tensors) or transforms.active()


def writes_slope(x: Any, w: Any, bias: Tensor | None, activation: Any, kernel: str | None) -> bool:
    """Whether one kernel that writes act(z) and act'(z) is predicted to be faster than a product, and torch on z.

    Only for a weight that learns, because a second derivative reads x too.
    """
    if activation not in SLOPED or not isinstance(x, Tensor) or not x.is_cuda or not isinstance(w, BSR):
        return False
    if not w.values.requires_grad or not transforms.untraced(x, w.values, bias):
        return False
    return slope_pays(x, w, bias, activation, kernel)


def slope_pays(x: Tensor, w: BSR, bias: Tensor | None, activation: Any, kernel: str | None) -> bool:
    """`writes_slope` of operands for which it is possible."""
    known: dict[Any, bool] = w.plan_owner().derived("writes slope", dict)
    facts = x.shape, x.stride(), x.dtype, x.data_ptr() % 16, w.values.data_ptr() % 16, w.order is None
    key = *facts, bias is None, activation, kernel
    found = known.get(key)
    if found is None:
        found = known[key] = _predicts_slope(x, w, bias, activation, kernel)
    return found


def _predicts_slope(x: Tensor, w: BSR, bias: Tensor | None, activation: Any, kernel: str | None) -> bool:
    operands.check_linear(x, w, bias, activation, None)
    call = _layer(x, w, Epilogue(bias=bias))
    p = call.problem(card_of(x.device))
    try:
        whole, product = (
            SPMM.choose(each, kernel, None) for each in (replace(p, activation=activation, slope=True), p)
        )
    except Unsupported:
        return False
    return whole.seconds < product.seconds + activation_seconds(p)


def with_slope(
    x: Any, w: Any, bias: Tensor | None, activation: Any, kernel: str | None
) -> tuple[Tensor, Tensor]:
    """act(z) [..., N] and act'(z) [T, N] of z = x @ w.T + bias, by one kernel; no gradient."""
    settings = "slope", bias is None, activation, kernel
    slot = recorded_products.product(w, x, settings, () if bias is None else (bias,))
    if slot.__class__ is not Slot:
        return slot

    def run() -> tuple[Tensor, Tensor]:
        operands.check_linear(x, w, bias, activation, None)
        slope = x.new_empty(x.shape[:-1].numel(), w.shape[0])
        call = _layer(x, w, Epilogue(bias=bias, activation=activation, slope=slope))
        y = SPMM.run(call, kernel)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], w.shape[0]), slope

    return slot.run(run)


def in_rows(x: Tensor | None) -> Tensor | None:
    """A bias or a residual, copied unless its last dim is contiguous, as epilogues read it."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _dense(
    x: Any,
    w: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
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
    if tracing.wants_gradient(x, w):
        arguments.kept("x", x)
        arguments.kept("W", w)
    with dtypes.as_given(x.device):
        y = ACTIVATIONS[activation or ""](functional.linear(x, w, bias))
        return y if residual is None else y + residual


Matrix.register_linear(linear)
