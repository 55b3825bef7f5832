"""`mlp`, y = act(x @ W_up.T + bias_up) @ W_down.T + bias_down, trained without an element-wise pass of its own.

forward     h, slope = act(z), act'(z)      z = x @ W_up.T + bias_up       one kernel
            y  = h @ W_down.T + bias_down
backward    dz = (dy @ W_down) * slope                                     one kernel
            dx = dz @ W_up      dW_up = dz.T @ x      dW_down = dy.T @ h    at the stored blocks

Two calls of `linear` compute the same, and read and write dz once more. torch.compile sees the forward pass as one op.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes, tracing
from sparsek.core.arguments import shown
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import SecondOrderInput, constant, save_for_backward, saved_tensors
from sparsek.engine.call.autocast import autocasts, follow_autocast
from sparsek.engine.call.transforms import one_by_one, register
from sparsek.engine.planning import same_family
from sparsek.products.formats.bsr import BSR
from sparsek.products.ops import gradients
from sparsek.products.ops.library_args import MlpArgs, fake, flat, matrix
from sparsek.products.ops.linear import (
    SLOPED,
    LinearCall,
    Weight,
    in_rows,
    linear,
)
from sparsek.products.ops.sddmm import sampled
from sparsek.products.ops.spmm import multiply, spmm
from sparsek.products.plan import operands
from sparsek.products.plan.sddmm import Sampled
from sparsek.products.plan.spmm import Product, tokens
from sparsek.products.reference.epilogue import ACTIVATIONS, Activation, Epilogue
from sparsek.products.reference.epilogue import slope as slope_of


def mlp(
    x: Tensor,
    W_up: Weight | Tensor,
    W_down: Weight | Tensor,
    bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    activation: Activation | None = "gelu",
    *,
    kernel: str | None = None,
) -> Tensor:
    """Compute act(x @ W_up.T + bias_up) @ W_down.T + bias_down: `linear`, twice.

    For training on Hopper, with weights in BSR and gelu, gelu_tanh or silu. One product writes the activation and its
    derivative, another multiplies with the derivative. No other kernel reads or writes the hidden features. Two calls
    of `linear` leave the multiplication with the derivative to torch.

    Args:
        x: [..., K]; see `linear`.
        W_up: [N, K]; see `linear`.
        W_down: [M, N]; see `linear`.
        bias_up: [N].
        bias_down: [M].
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu" or None.
        kernel: The name of a kernel for both products.

    Returns:
        y [..., M], contiguous. The hidden features are rounded, then y.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable as `linear`. Under torch.autocast as `linear`.

    Examples:
        >>> up, down = sk.random_bsr(256, 128, 32, 0.25), sk.random_bsr(128, 256, 32, 0.25)
        >>> sk.mlp(torch.randn(10, 128), up, down).shape
        torch.Size([10, 128])
    """
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    if not isinstance(activation, str):
        operands.check_activation(activation)
    if autocasts():
        x, W_up, W_down, bias_up, bias_down = follow_autocast(x, W_up, W_down, bias_up, bias_down)
    given = (each for each in (bias_up, bias_down) if each is not None)
    plain = all(isinstance(each, Tensor) for each in (x, *given))
    if plain and isinstance(W_up, BSR) and isinstance(W_down, BSR):
        act: Any = activation
        learns = tracing.wants_gradient(x, bias_up, bias_down, W_up.values, W_down.values)
        if learns and torch.compiler.is_compiling():
            if one_op(x.device, x.dtype, act, kernel):
                return _through_op(x, W_up, W_down, bias_up, bias_down, act, kernel)
        elif learns and LinearCall(x, W_up, bias_up, act, kernel=kernel).writes_slope():
            layers = Layers(W_up, W_down, act, kernel)
            return Mlp.apply(x, W_up.values, in_rows(bias_up), W_down.values, bias_down, layers)
    return linear(linear(x, W_up, bias_up, activation, kernel=kernel), W_down, bias_down, kernel=kernel)


@constant
def one_op(device: torch.device, dtype: torch.dtype, activation: Any, kernel: str | None) -> bool:
    """Whether torch.compile sees layers that learn as one op: where a kernel writes slopes. Elsewhere it fuses them."""
    if device.type != "cuda" or not isinstance(activation, str) or activation not in SLOPED:
        return False
    hopper = card_of(device).capability == (9, 0) and dtype in (torch.bfloat16, torch.float16)
    return hopper and (kernel is None or kernel == "hopper.spmm")


def _through_op(
    x: Tensor, up: BSR, down: BSR, bias_up: Tensor | None, bias_down: Tensor | None, act: str, kernel: Any
) -> Tensor:
    _check(x, up, down, bias_up, bias_down, act)
    args = MlpArgs(x, *flat(up), in_rows(bias_up), *flat(down), in_rows(bias_down), act, kernel)
    y, _, _ = torch.ops.sparsek.mlp(*args)
    return y


def _check(x: Tensor, up: BSR, down: BSR, bias_up: Any, bias_down: Any, act: str) -> None:
    if act not in SLOPED:
        raise InvalidInput(
            f"torch.ops.sparsek.mlp has {', '.join(SLOPED)}, not {shown(act)}; sparsek.mlp has all"
        )
    operands.check_linear(x, up, bias_up, act, None)
    hidden = x.new_empty((*x.shape[:-1], up.shape[0]))
    operands.check_linear(hidden, down, bias_down, None, None)


def _run_op(args: MlpArgs) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., M], h = act(z) [..., N] and act'(z) [T, N]."""
    x, act, kernel = args.x, args.activation, args.kernel
    up, down = (matrix(*each) for each in (args.up, args.down))
    _check(x, up, down, args.up_bias, args.down_bias, act)
    first = LinearCall(x, up, args.up_bias, act, kernel=kernel)
    if x.is_cuda and first.slope_pays():
        hidden, slope = first.with_slope()
    else:
        z = first.run()
        with dtypes.as_given(x.device):
            hidden, slope = ACTIVATIONS[act](z), slope_of(act, tokens(z))
    return LinearCall(hidden, down, args.down_bias, kernel=kernel).run(), hidden, slope


def _fake(args: MlpArgs) -> tuple[Tensor, Tensor, Tensor]:
    up, down = fake(*args.up), fake(*args.down)
    _check(args.x, up, down, args.up_bias, args.down_bias, args.activation)
    x, lead = args.x, args.x.shape[:-1]
    hidden = x.new_empty((*lead, up.shape[0]))
    return x.new_empty((*lead, down.shape[0])), hidden, x.new_empty((math.prod(lead), up.shape[0]))


register(
    "mlp", MlpArgs, _run_op, _fake, gradients.of_mlp, gradients.save_mlp, returns="(Tensor, Tensor, Tensor)"
)


class Layers(NamedTuple):
    """What `Mlp` computes with. In its backward pass both matrices have the values that it saved."""

    up: BSR
    down: BSR
    activation: Activation
    kernel: str | None

    def each(self, up: Any, down: Any) -> Layers:
        """The layers with these values."""
        return self._replace(up=self.up._each(lambda _: up), down=self.down._each(lambda _: down))


class Mlp(torch.autograd.Function):
    """`mlp` for plain tensors on a device whose kernels write slopes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        bias_up: Tensor | None,
        down: Tensor,
        bias_down: Tensor | None,
        layers: Layers,
    ) -> Tensor:
        hidden, slope = LinearCall(
            x, layers.up, bias_up, layers.activation, kernel=layers.kernel
        ).with_slope()
        y = linear(hidden, layers.down, bias_down, kernel=layers.kernel)
        save_for_backward(ctx, x, up, down, hidden, slope)
        ctx.layers, ctx.bias_up = layers.each(None, None), SecondOrderInput.of(bias_up)
        return y

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, up, down, hidden, slope = saved_tensors(ctx)
        needs, again = ctx.needs_input_grad, torch.is_grad_enabled()
        if again:  # a second derivative is wanted: that of the two layers
            bias_up = None if ctx.bias_up is None else ctx.bias_up.read("bias_up")
            # Aliases, at which the derivative stops, also where one tensor has two places or x comes of a weight.
            given: list[Any] = [
                None if each is None else each.view_as(each) for each in (x, up, bias_up, down)
            ]
            x, up, bias_up, down = given
            layers = ctx.layers.each(up, down)
            wanted = [each for each, needed in zip(given, needs, strict=False) if needed]
            found = iter(())
            if wanted:
                y = linear(linear(x, layers.up, bias_up, layers.activation), layers.down)
                found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
            of_four = [next(found) if needed else None for needed in needs[:4]]
            return *of_four, tokens(grad).sum(0) if needs[4] else None, None
        layers = ctx.layers.each(up, down)
        kernel = gradients.turning(layers.kernel, False)

        def through(dy: Tensor) -> Tensor:
            call = Product.of(dy.mT, layers.down, None, Epilogue(other=slope, combine="mul"))
            return multiply(call, kernel)

        of_up = _adjoint(layers.up, lambda dz: spmm(dz.mT, layers.up, kernel=kernel), layers.kernel)
        of_down = _adjoint(layers.down, through, layers.kernel)
        return *gradients.of_layers(needs, grad, x, hidden, of_up, of_down), None


def _adjoint(w: BSR, turn: Any, kernel: str | None) -> gradients.Adjoint:
    view = w.order is not None

    def sample(left: Tensor, right: Tensor) -> Tensor:
        return sampled(Sampled(left, right, w.pattern.T if view else w.pattern), same_family(kernel, "sddmm"))

    return gradients.Adjoint(view, sample, turn)
