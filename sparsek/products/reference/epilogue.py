"""The epilogue of a product: scaled, biased, activated, combined with another matrix, before it is stored.

    C = act(alpha * (A @ B) + bias[:, None])  + beta * other        (combine "add")
                                              * other               (combine "mul")

With a slope, act'(alpha * (A @ B) + bias[:, None]) is written too: a backward pass multiplies with it.

The bias has one number per row of A, which is an output feature of `linear` (x @ W.T is (W @ x.T).T).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

# "" is no activation. GELU: Hendrycks and Gimpel 2016, by erf and by its tanh approximation. SiLU: x * sigmoid(x).
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
# By the gradient of their result, and their input. Torch's own, so also where autograd does not look, as in an op.
DERIVATIVES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}
Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu"]
EpilogueActivation: TypeAlias = Literal["", "relu", "gelu", "gelu_tanh", "silu"]
Combine: TypeAlias = Literal["add", "mul"]
ACTIVATION_NAMES = get_args(Activation)
COMBINES = get_args(Combine)
LARGEST = torch.finfo(torch.float32).max  # of alpha and beta: kernels take them in float32


@dataclass(frozen=True, eq=False)
class Epilogue:
    """`bias` is [M] and `other` [..., M, N], both in C's dtype on its device. `other` may be C itself.

    `slope` [..., M, N] is written, and belongs to an activation. `activation` is a key of ACTIVATIONS; `combine` is
    "add" or "mul" and has no effect without `other`. `beta` belongs to "add". An alpha of 0 takes A @ B out of C, and a
    beta of 0 `other`, NaN and Inf included, as in torch.addmm. Raises InvalidInput for an alpha or beta
    that is not finite in float32, for unknown names, and for a slope without an activation.
    """

    alpha: float = 1.0
    bias: Tensor | None = None
    activation: EpilogueActivation = ""
    other: Tensor | None = None
    combine: Combine = "add"
    beta: float = 1.0
    slope: Tensor | None = None

    def __post_init__(self) -> None:
        # Every call of a layer passes here: the common case needs no function call.
        alpha, beta, activation = self.alpha, self.beta, self.activation
        if type(alpha) is not float or not -LARGEST <= alpha <= LARGEST:
            object.__setattr__(self, "alpha", arguments.number("alpha", alpha, -LARGEST, LARGEST))
        if type(beta) is not float or not -LARGEST <= beta <= LARGEST:
            object.__setattr__(self, "beta", arguments.number("beta", beta, -LARGEST, LARGEST))
        if type(activation) is not str or activation not in ACTIVATIONS:
            arguments.one_of("activation", activation, ACTIVATION_NAMES)
        if type(self.combine) is not str or self.combine not in COMBINES:
            arguments.one_of("combine", self.combine, COMBINES)
        if self.slope is not None and not activation:
            raise InvalidInput("a slope is that of an activation; this epilogue has none")

    @property
    def is_plain(self) -> bool:
        """Whether C is A @ B and nothing else."""
        return self.alpha == 1 and self.bias is None and not self.activation and self.other is None

    def apply(self, z: Tensor) -> Tensor:
        """Applies the epilogue to z = A @ B [..., M, N] in the accumulation dtype. Differentiable, without `slope`."""
        if self.alpha == 0:
            z = z.masked_fill(torch.ones_like(z, dtype=torch.bool), 0)
        elif self.alpha != 1:
            z = z * self.alpha
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)[..., None]
        if self.slope is not None:
            self.slope.copy_(slope(self.activation, z))
        z = ACTIVATIONS[self.activation](z)
        if self.other is None or (self.combine == "add" and self.beta == 0):
            return z
        other = self.other.to(z.dtype)
        return z * other if self.combine == "mul" else z + self.beta * other


PLAIN = Epilogue()


def slope(activation: str, z: Tensor) -> Tensor:
    """The derivative of the activation of that name at z."""
    return DERIVATIVES[activation](torch.ones_like(z), z.detach())


def in_float64(epilogue: Epilogue) -> Epilogue:
    """The same epilogue with its tensors in float64."""
    bias, other = (None if x is None else x.double() for x in (epilogue.bias, epilogue.other))
    return replace(epilogue, bias=bias, other=other)


def check_epilogue(
    epilogue: Epilogue, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """InvalidInput unless the tensors of `epilogue` fit a C [..., M, N] of that shape, dtype and device."""
    parts = (("bias", epilogue.bias, shape[-2:-1]), ("other", epilogue.other, shape))
    for name, part, wanted in (*parts, ("slope", epilogue.slope, shape)):
        if part is None:
            continue
        arguments.dense(name, part)
        if (tuple(part.shape), part.dtype, part.device) != (tuple(wanted), dtype, device):
            raise InvalidInput(
                f"{name} is {part.dtype} {list(part.shape)} on {part.device}; this product needs {dtype} "
                f"{list(wanted)} on {device}"
            )
