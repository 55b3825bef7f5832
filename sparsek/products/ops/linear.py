"""`linear`, y = act(x @ W.T + bias) + residual, and `swiglu`: products of layers with a fused epilogue.

x @ W.T is (W @ x.T).T: spmm with an epilogue, and C written column-major.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

_compiling = torch.compiler.is_dynamo_compiling  # of other tracing a recorded call finds out itself


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

    Differentiable in x, the values of a BSR, Semi24 or BSR24, bias and residual, with gradients as those of `spmm`;
    double backward works. If a gradient is needed, torch
    applies gelu, gelu_tanh or silu to the rounded x @ W.T + bias, which the backward pass reads. For a BSR that learns
    `hopper.spmm` writes the activation and its derivative instead, except under torch.compile and torch.func. Torch
    adds a residual that follows an activation. Under torch.autocast all operands are cast to its dtype, which is that
    of y; with `dtype` they are not.

    Examples:
        >>> W = sk.random_bsr(256, 128, block=32, density=0.25)
        >>> sk.linear(torch.randn(2, 10, 128), W, torch.zeros(256), activation="gelu").shape
        torch.Size([2, 10, 256])
    """
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    slot = None
    # Under torch.compile no call is recorded, and none of this is traced.
    if (
        not _compiling()
        and (activation is None or activation.__class__ is str)
        and (dtype is None or dtype.__class__ is torch.dtype)
    ):
        also = () if bias is None else (bias,)
        also = also if residual is None else (*also, residual)
        sloped = activation in SLOPED and isinstance(W, BSR) and W.values.requires_grad  # see `writes_slope`
        settings = "linear", bias is None, residual is None, activation, kernel, dtype, sloped
        slot = recorded_products.product(W, x, settings, also)
        if slot.__class__ is not Slot:
            return slot
    call = LinearCall(x, W, bias, activation, residual, kernel, dtype, slot)
    return route(call, slot or recorded_calls.UNBOUND)


@dataclass(slots=True, eq=False)
class LinearCall:
    """A call of `linear`, or of a layer inside `swiglu` or `mlp`: its operands and options."""

    x: Any
    w: Any
    bias: Tensor | None = None
    activation: Any = None
    residual: Tensor | None = None
    kernel: str | None = None
    dtype: torch.dtype | None = None
    slot: Slot | None = None  # of the recorded call; Dynamo of torch 2.11 cannot pass one on

    def check(self) -> None:
        """InvalidInput for operands that do not fit together."""
        operands.check_linear(self.x, self.w, self.bias, self.activation, self.residual)

    def run(self, activation: Any = "", other: Tensor | None = None) -> Tensor:
        """act(x @ w.T + bias) + other by one kernel, of operands as they are, also under torch.autocast.

        Leading dims that do not join are copied here: a copy is no operand of the recorded call.
        """
        epilogue = Epilogue(bias=self.bias, activation=activation, other=other)
        call = Product.layer(self.x, self.w, epilogue, self.dtype)
        return self.seen(multiply(call, self.kernel, self.slot or recorded_calls.UNBOUND))

    def seen(self, y: Tensor) -> Tensor:
        """The result [T, N] with the leading dims of x."""
        return y if self.x.ndim == 2 else y.view(*self.x.shape[:-1], self.w.shape[0])

    def writes_slope(self) -> bool:
        """Whether one kernel that writes act(z) and act'(z) is predicted to be faster than a product, and torch on z.

        Only for a weight that learns, because a second derivative reads x too.
        """
        x, w = self.x, self.w
        sloped = self.activation in SLOPED and isinstance(x, Tensor) and x.is_cuda
        learns = sloped and isinstance(w, BSR) and w.values.requires_grad
        return learns and transforms.untraced(x, w.values, self.bias) and self.slope_pays()

    def slope_pays(self) -> bool:
        """`writes_slope` of operands for which it is possible."""
        x, w = self.x, self.w
        known: dict[Any, bool] = w.plan_owner().derived("writes slope", dict)
        facts = x.shape, x.stride(), x.dtype, x.data_ptr() % 16, w.values.data_ptr() % 16, w.order is None
        key = *facts, self.bias is None, self.activation, self.kernel
        found = known.get(key)
        if found is None:
            found = known[key] = self._predicts_slope()
        return found

    def _predicts_slope(self) -> bool:
        self.check()
        p = Product.layer(self.x, self.w, Epilogue(bias=self.bias)).problem(card_of(self.x.device))
        try:
            whole, product = (
                SPMM.choose(each, self.kernel, None)
                for each in (replace(p, activation=self.activation, slope=True), p)
            )
        except Unsupported:
            return False
        return whole.seconds < product.seconds + activation_seconds(p)

    def with_slope(self) -> tuple[Tensor, Tensor]:
        """act(z) [..., N] and act'(z) [T, N] of z = x @ w.T + bias, by one kernel; no gradient."""
        x, w, bias, slot = self.x, self.w, self.bias, self.slot or recorded_calls.UNBOUND

        def run() -> tuple[Tensor, Tensor]:
            self.check()
            slope = x.new_empty(x.shape[:-1].numel(), w.shape[0])
            epilogue = Epilogue(bias=bias, activation=self.activation, slope=slope)
            call = Product.layer(x, w, epilogue)
            return self.seen(recorded_products.run(SPMM, call, self.kernel, slot)), slope

        if slot.calls is recorded_products.PASSING:
            return run()
        settings = "slope", bias is None, self.activation, self.kernel
        slot = recorded_products.product(w, x, settings, () if bias is None else (bias,))
        return slot.run(run) if slot.__class__ is Slot else slot


def route(call: LinearCall, slot: Slot) -> Tensor:
    """The result of a call that no recorded one gives: by torch, by a kernel, or by a kernel and torch behind it."""
    if autocasts():
        given = follow_autocast_fp8(call.dtype, call.x, call.w, call.bias, call.residual)
        call.dtype, call.x, call.w, call.bias, call.residual = given
    call.check()
    if isinstance(call.w, Tensor):
        return _dense(call)
    rows = in_rows(call.bias), in_rows(call.residual)
    if rows[0] is not call.bias or rows[1] is not call.residual:
        # In a recorded call, a copy made before the launch would be a constant.
        slot = slot._replace(key=None)
    call.bias, call.residual = rows
    act, residual = call.activation or "", call.residual
    # torch computes the gradients of an epilogue, and so applies what needs one.
    x = call.x if isinstance(call.x, Tensor) else None
    apart = act != "" and _wanted(x, call.w.values, call.bias, residual)
    cut = apart and act != "relu"
    slope = cut and call.writes_slope()
    inside, after = ("", "" if slope else act) if cut else (act, "")
    run: Any = call.with_slope if slope else lambda: call.run(inside, None if apart else residual)
    if slope or (slot.learns and x is not None):
        if not slot.learns:
            slot = slot._replace(operands=(call.w.values, x, *(t for t in rows if t is not None)))
        how = How.of(call.w, x, True, False, 1.0, inside == "relu", call.kernel, act if slope else "")
        learned = LearnedProduct(how, call.bias is not None, residual is not None, apart, after)
        return slot.differentiate(learned.differentiable, call.w, run)
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

    Differentiable in x and the values of weights that are not in FP8. If a gradient is needed, torch applies silu and
    multiplies, and both products are saved for the backward pass. Under torch.autocast as `linear`.

    Examples:
        >>> gate, up = (sk.random_bsr(256, 128, block=32, density=0.25, seed=seed) for seed in (0, 1))
        >>> sk.swiglu(torch.randn(10, 128), gate, up).shape
        torch.Size([10, 256])
    """
    return gated(x, W_gate, W_up, "silu", kernel)


def gated(
    x: Tensor | QuantizedTensor,
    W_gate: Weight,
    W_up: Weight,
    activation: Activation,
    kernel: str | None = None,
) -> Tensor:
    """act(x @ W_gate.T) * (x @ W_up.T); see `swiglu`, which is that of silu."""
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    records = _records_gated(x, W_gate, W_up, activation)
    gate = up = recorded_calls.UNBOUND
    if records:
        gate = recorded_products.product(W_gate, x, ("gate", activation, kernel))
        if gate.__class__ is not Slot:
            up = recorded_products.product(W_up, x, ("up", kernel), (gate,))
            if up.__class__ is not Slot:
                return up if x.ndim == 2 else up.view(*x.shape[:-1], W_up.shape[0])
    dtype = None
    if autocasts():
        dtype, x, W_gate, W_up = follow_autocast_fp8(None, x, W_gate, W_up)
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
    learns = isinstance(x, Tensor) and _wanted(x, W_gate.values, W_up.values)
    if isinstance(W_gate, Quantized) and isinstance(x, Tensor) and not learns:
        x = quantize_dense(x, E4M3, "row", check=False)
    if learns:
        gate, up = (multiply(Product.layer(x, w, dtype=dtype), kernel) for w in (W_gate, W_up))
        with dtypes.as_given(x.device):
            y = ACTIVATIONS[activation](gate) * up
    else:
        if isinstance(gate, Slot):
            first = Product.layer(x, W_gate, Epilogue(activation=activation), dtype)
            gate = gate.run(lambda: multiply(first, kernel))
            up = recorded_products.product(W_up, x, ("up", kernel), (gate,)) if records else up
        call = Product.layer(x, W_up, Epilogue(other=gate, combine="mul"), dtype)
        if dtype is None and not transforms.traced():
            call = call._replace(out=gate.mT)
        y = up.run(lambda: multiply(call, kernel)) if isinstance(up, Slot) else up
    return y if x.ndim == 2 else y.view(*x.shape[:-1], W_up.shape[0])


def _records_gated(x: Any, gate: Any, up: Any, activation: Any) -> bool:
    """Whether both products of `gated` are recorded with all of its checks before them.

    Those that learn are recorded without, and patterns that pass soon share calls.
    """
    if _compiling() or activation.__class__ is not str or not isinstance(x, Tensor) or autocasts():
        return False
    if any(w.__class__ is not BSR or "passing" in w.pattern._memo for w in (gate, up)):
        return False
    return not _wanted(x, gate.values, up.values)


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
    return replace(SPMM.plan(Product.layer(x, W, epilogue, dtype), kernel, config, device), layer=True)


def _wanted(*tensors: Any) -> bool:
    """Whether a gradient is needed, or may be: vmap hides that."""
    return tracing.wants_gradient(*tensors) or transforms.active()


def in_rows(x: Tensor | None) -> Tensor | None:
    """A bias or a residual, copied unless its last dim is contiguous, as epilogues read it."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _dense(call: LinearCall) -> Tensor:
    """The layer of a dense W, by torch."""
    x, w = call.x, call.w
    if call.dtype is not None:
        raise InvalidInput("dtype= is for a W in FP8; other products have the dtype of their operands")
    if call.kernel is not None:
        raise InvalidInput(
            f"kernel={shown(call.kernel)} multiplies a sparse W; W is dense, and torch multiplies it"
        )
    if tracing.wants_gradient(x, w):
        arguments.kept("x", x)
        arguments.kept("W", w)
    with dtypes.as_given(x.device):
        return finished(functional.linear(x, w, call.bias), call.activation or "", call.residual)


Matrix.register_linear(linear)
