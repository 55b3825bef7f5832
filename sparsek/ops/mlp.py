"""`mlp`, y = act(x @ W_up.T + bias_up) @ W_down.T + bias_down, trained without an element-wise pass of its own.

forward     h, slope = act(z), act'(z)      z = x @ W_up.T + bias_up       one kernel
            y  = h @ W_down.T + bias_down
backward    dz = (dy @ W_down) * slope                                     one kernel
            dx = dz @ W_up      dW_up = dz.T @ x      dW_down = dy.T @ h    at the stored blocks

Two calls of `linear` compute the same, and read and write dz once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.tracing import Later, save_for_backward
from sparsek.matrix.bsr import BSR
from sparsek.ops import gradients
from sparsek.ops.autocast import autocasts, follow_autocast
from sparsek.ops.linear import Weight, in_rows, linear, with_slope, writes_slope
from sparsek.ops.planning import same_family
from sparsek.ops.sddmm import sampled
from sparsek.ops.spmm import multiply, spmm
from sparsek.ops.transforms import one_by_one
from sparsek.plan import operands
from sparsek.plan.spmm import Product, tokens
from sparsek.reference.epilogue import Activation, Epilogue


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
        arguments.text("kernel", kernel)
    if autocasts():
        x, W_up, W_down, bias_up, bias_down = follow_autocast(x, W_up, W_down, bias_up, bias_down)
    given = (each for each in (bias_up, bias_down) if each is not None)
    plain = all(isinstance(each, Tensor) for each in (x, *given))
    if plain and isinstance(W_up, BSR) and isinstance(W_down, BSR):
        act: Any = activation
        learns = operands.wants_gradient(x, bias_up, bias_down, W_up.values, W_down.values)
        if learns and writes_slope(x, W_up, bias_up, act, kernel):
            layers = Layers(W_up, W_down, act, kernel)
            return Mlp.apply(x, W_up.values, in_rows(bias_up), W_down.values, bias_down, layers)
    return linear(linear(x, W_up, bias_up, activation, kernel=kernel), W_down, bias_down, kernel=kernel)


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
        hidden, slope = with_slope(x, layers.up, bias_up, layers.activation, layers.kernel)
        y = linear(hidden, layers.down, bias_down, kernel=layers.kernel)
        save_for_backward(ctx, x, up, down, hidden, slope)
        ctx.layers, ctx.bias_up = layers.each(None, None), Later.of(bias_up)
        return y

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, up, down, hidden, slope = ctx.saved_tensors
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
        dy, rows, kernel = tokens(grad), tokens(x), gradients.turning(layers.kernel, False)

        def through(dy: Tensor) -> Tensor:
            call = Product.of(dy.mT, layers.down, None, Epilogue(other=slope, combine="mul"))
            return multiply(call, kernel)

        of_down, dz, of_bias_down = _layer(
            (needs[3], True, needs[4]), dy, tokens(hidden), layers.down, through, layers.kernel
        )
        of_up, dx, of_bias_up = _layer(
            (needs[1], needs[0], needs[2]), dz, rows, layers.up,
            lambda dz: spmm(dz.mT, layers.up, kernel=kernel), layers.kernel,
        )  # fmt: skip
        return None if dx is None else dx.view(x.shape), of_up, of_bias_up, of_down, of_bias_down, None


def _layer(
    needs: tuple[bool, bool, bool], grad: Any, x: Tensor, w: BSR, turn: Any, kernel: str | None
) -> tuple[Any, ...]:
    """The gradients of the values, of x [T, K] and of the bias in x @ w.T + bias, as far as `needs` is true.

    `grad` [T, N] is that of the result; turn(grad.mT): the gradient of x.
    """
    view = w.order is not None

    def sample(left: Tensor, right: Tensor) -> Tensor:
        return sampled(left, right, w.pattern.T if view else w.pattern, same_family(kernel, "sddmm"))

    return gradients.of_product((*needs, False), grad.mT, x.mT, None, view, 1.0, sample, turn)[:3]
