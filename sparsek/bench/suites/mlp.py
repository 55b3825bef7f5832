"""y = act(x @ W1.T) @ W2.T as a benchmark: a training step, and decoding in a CUDA graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.bench.engine.bench import Bench, Column, Table
from sparsek.bench.engine.case import Case, Operands, Schema, SuiteRow, check_case, check_choice
from sparsek.bench.engine.data import random_dense, random_weight, revalued, sets_of
from sparsek.bench.engine.names import block_name, stored_name
from sparsek.bench.engine.options import BLOCK, DENSITY, DTYPE, Option, by_measure
from sparsek.bench.engine.several import Several, worst
from sparsek.bench.engine.tables import CASE, GBPS, MS, ROOF, SPEEDUP, USEFUL, faster_than
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.ops.linear import linear
from sparsek.ops.sddmm import plan_sddmm
from sparsek.ops.spmm import plan_spmm
from sparsek.reference.epilogue import ACTIVATIONS, Activation, Epilogue
from sparsek.testing.budget import FACTOR, FLOOR, Gate, error, judge
from sparsek.testing.product_budget import stored

MODES = ("eager", "compiled")


@dataclass(frozen=True)
class MlpOperands(Operands):
    """One of the rotating sets: its own x [tokens, width], W1 [hidden, width] and W2 [width, hidden]."""

    x: Tensor
    w1: BSR
    w2: BSR
    activation: Activation

    @property
    def useful_flops(self) -> float:
        return 2.0 * self.x.shape[0] * (self.w1.values.numel() + self.w2.values.numel())

    def forward(self, x: Tensor, w1: BSR, w2: BSR) -> Tensor:
        return linear(linear(x, w1, None, self.activation), w2)

    @property
    def dense_forward(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The layer by torch: a function of x, W1 and W2, all dense."""
        activate = ACTIVATIONS[self.activation]
        return lambda x, w1, w2: functional.linear(activate(functional.linear(x, w1)), w2)

    @property
    def given(self) -> tuple[Tensor, BSR, BSR]:
        return self.x, self.w1, self.w2

    def eager(self) -> Callable[[], Any]:
        given = self.given
        return lambda: self.forward(*given)

    def planned(self, plan: Several) -> Callable[[], Any]:
        return plan.call

    def plan(self, kernel: str | None) -> Several:
        refuse_names(kernel)
        hidden = self.x.new_empty(self.x.shape[0], self.w1.shape[0])
        plans = {
            "up": plan_spmm(self.x, self.w1.T, epilogue=Epilogue(activation=self.activation)),
            "down": plan_spmm(hidden, self.w2.T),
        }
        return Several(plans, self.eager())

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the output of this set: no further from float64 than twice the dense layer is."""
        dense = (self.x, self.w1.to_dense(), self.w2.to_dense())
        with torch.no_grad():
            return judged(out, self.dense_forward(*(x.double() for x in dense)), self.dense_forward(*dense))

    def dense_weights(self, seed: int) -> tuple[Tensor, Tensor]:
        """Dense random weights of the same shapes, scaled for outputs of unit scale."""
        first, second = (
            random_weight(*w.shape, dtype=w.dtype, device=w.device, seed=seed + 500 * place)
            for place, w in enumerate((self.w1, self.w2))
        )
        return first, second

    def dense(self, seed: int) -> Callable[[], Any]:
        return self.dense_call(seed, self.dense_forward)

    def dense_call(self, seed: int, forward: Callable[..., Tensor]) -> Callable[[], Any]:
        """The call on dense weights, by `dense_forward` or by what was made of it."""
        weights = self.dense_weights(seed)
        return lambda: forward(self.x, *weights)


@dataclass(frozen=True)
class StepOperands(MlpOperands):
    """A set of a training step, with the gradient of y [tokens, width]: forward, then the gradients of x, W1 and W2.

    `mode` is "eager", or "compiled" for torch.compile of the forward, whose backward is compiled with it.
    """

    dy: Tensor
    mode: str

    @property
    def useful_flops(self) -> float:
        """Forward, gradients of the inputs, gradients of the weights: as many each."""
        return 3.0 * super().useful_flops

    def plan(self, kernel: str | None) -> Several:
        refuse_names(kernel)
        x, dy, w1, w2 = self.x.detach(), self.dy, _detached(self.w1), _detached(self.w2)
        hidden = x.new_empty(x.shape[0], w1.shape[0])
        plans = {
            "up": plan_spmm(x, w1.T),
            "down": plan_spmm(hidden, w2.T),
            "gradient of hidden": plan_spmm(dy, w2),
            "gradient of W2": plan_sddmm(dy.mT, hidden, w2.pattern),
            "gradient of x": plan_spmm(hidden, w1),
            "gradient of W1": plan_sddmm(hidden.mT, x, w1.pattern),
        }
        return Several(plans, self.eager())

    def eager(self) -> Callable[[], tuple[Tensor, ...]]:
        forward = self.forward if self.mode == "eager" else _compiled(self.activation)
        given, wanted = self.given, (self.x, self.w1.values, self.w2.values)
        return lambda: self.step(forward(*given), wanted)

    def step(self, y: Tensor, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """y, and the gradients of what is wanted."""
        return (y, *torch.autograd.grad(y, wanted, self.dy.to(y.dtype)))

    def dense_call(self, seed: int, forward: Callable[..., Tensor]) -> Callable[[], Any]:
        wanted = (self.x, *(w.requires_grad_() for w in self.dense_weights(seed)))
        return lambda: self.step(forward(*wanted), wanted)

    def judge(self, out: Any) -> Gate:
        """Whether y and each gradient is no further from float64 than twice the dense layer's; the worst of them."""
        dense = (self.x.detach(), self.w1.to_dense().detach(), self.w2.to_dense().detach())
        exact, rough = (
            self._dense_step([x.to(dtype) for x in dense]) for dtype in (torch.float64, self.x.dtype)
        )
        return worst([judged(*each) for each in zip(out, exact, rough, strict=True)])

    def _dense_step(self, operands: list[Tensor]) -> list[Tensor]:
        """y and the gradients, those of the weights as the blocks that are stored."""
        wanted = tuple(x.clone().requires_grad_() for x in operands)
        y, dx, dw1, dw2 = self.step(self.dense_forward(*wanted), wanted)
        return [y.detach(), dx, stored(dw1, self.w1.pattern), stored(dw2, self.w2.pattern)]


def refuse_names(kernel: str | None) -> None:
    """An MLP runs several kernels, and the planner chooses each."""
    if kernel is not None:
        raise InvalidInput(f"an MLP runs several kernels, which the planner chooses; leave out {kernel!r}")


def judged(out: Tensor, exact64: Tensor, dense: Tensor) -> Gate:
    """The gate of a result whose like was computed densely in the same dtype: twice that one's error is allowed."""
    return judge(out, exact64, max(FLOOR, FACTOR * error(dense, exact64)))


def _detached(w: BSR) -> BSR:
    return BSR.unchecked(w.pattern, w.values.detach())


@cache
def _compiled(activation: Activation) -> Callable[..., Tensor]:
    """torch.compile of the forward as one graph, the same for all sets."""

    def forward(x: Tensor, w1: BSR, w2: BSR) -> Tensor:
        return linear(linear(x, w1, None, activation), w2)

    return torch.compile(forward, fullgraph=True, dynamic=False)


@dataclass(frozen=True)
class MlpCase(Case):
    """x [tokens, width] through W1 [hidden, width], an activation, and W2 [width, hidden]; no biases.

    `density` of the blocks of both weights are stored.
    """

    tokens: int
    width: int
    hidden: int
    block: tuple[int, int]
    density: float
    activation: Activation = "gelu"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_case(self, "tokens", "width", "hidden")
        check_choice("an activation", self.activation, filter(None, ACTIVATIONS))

    @property
    def name(self) -> str:
        """One short line: "4096 to 16384 to 4096 gelu, block 128 12.5 % bf16, 8192 tokens"."""
        layer = f"{self.width} to {self.hidden} to {self.width} {self.activation}"
        stored = stored_name(block_name(self.block), self.density, self.dtype)
        return f"{layer}, {stored}, {self.tokens} token{'s' if self.tokens > 1 else ''}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by the layer, then by tokens."""
        size = self.width * self.hidden
        return size, self.block, -self.density, self.activation, self.dtype, self.tokens

    @property
    def dense_flops(self) -> float:
        return 4.0 * self.tokens * self.width * self.hidden

    def operands(self, device: torch.device, seed: int = 0) -> list[Any]:
        """Sets that share the patterns and no memory: 2 to 64, together several times the cache. N(0, 1) values."""
        dtype = dtypes.parse(self.dtype)
        options = {"dtype": dtype, "device": device}
        w1 = random_bsr(self.hidden, self.width, self.block, self.density, seed=seed, **options)
        w2 = random_bsr(self.width, self.hidden, self.block, self.density, seed=seed + 1, **options)
        dense = self.tokens * (2 * self.width + self.hidden)
        footprint = (w1.values.numel() + w2.values.numel() + dense) * dtype.itemsize

        def one(index: int) -> MlpOperands:
            start = seed + 10 * index
            x, dy = (random_dense(self.tokens, self.width, seed=start + place, **options) for place in (2, 3))
            up, down = (revalued(w, start) if index else w for w in (w1, w2))
            return self.one_set(x, up, down, dy)

        return sets_of(device, footprint, one)

    def one_set(self, x: Tensor, w1: BSR, w2: BSR, dy: Tensor) -> MlpOperands:
        """The operands made of these tensors."""
        return MlpOperands(x, w1, w2, self.activation)


@dataclass(frozen=True)
class MlpDecodeCase(MlpCase):
    """The forward of an MLP for a few tokens, inside a CUDA graph."""

    op: ClassVar[str] = "mlp_decode"
    in_graph: ClassVar[bool] = True


@dataclass(frozen=True)
class MlpTrainCase(MlpCase):
    """Forward and backward of an MLP: the gradients of x and of both weights. `mode`: "eager" or "compiled"."""

    op: ClassVar[str] = "mlp_train"

    mode: str = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("a mode", self.mode, MODES)

    @property
    def name(self) -> str:
        """As for other MLPs, and the mode unless it is eager."""
        return super().name + ("" if self.mode == "eager" else f", {self.mode}")

    @property
    def order(self) -> tuple[Any, ...]:
        return (*super().order, MODES.index(self.mode))

    @property
    def dense_flops(self) -> float:
        return 3.0 * super().dense_flops

    def one_set(self, x: Tensor, w1: BSR, w2: BSR, dy: Tensor) -> StepOperands:
        x.requires_grad_()
        w1, w2 = (BSR.unchecked(w.pattern, w.values.detach().requires_grad_()) for w in (w1, w2))
        return StepOperands(x, w1, w2, self.activation, dy, self.mode)


LAYER = (4096, 16384, (128, 128), 0.125)
PUBLISHED: tuple[SuiteRow, ...] = (
    *(SuiteRow(MlpTrainCase(8192, *LAYER, mode=mode)) for mode in MODES),
    *(SuiteRow(MlpDecodeCase(tokens, *LAYER)) for tokens in (1, 16, 64)),
)
MEASURES: Mapping[str, Callable[..., MlpCase]] = {
    "train": MlpTrainCase,
    "compiled": partial(MlpTrainCase, mode="compiled"),
    "decode": MlpDecodeCase,
}


OPTIONS: tuple[Option, ...] = (
    Option("measure", "train", f"{', '.join(MEASURES)}; comma lists give every combination."),
    Option("tokens", "8192", "Rows of x.", int),
    Option("width", "4096", "Features that come in and go out.", int),
    Option("hidden", "16384", "Features between the two products.", int),
    BLOCK,
    DENSITY,
    DTYPE,
)

COMPILED = Column("over dense, compiled", faster_than("torch_dense_compiled"))
TRAIN_TABLE = Table(
    op="mlp_train",
    dense=("torch_dense",),
    title="training step of an MLP",
    columns=(CASE, MS, SPEEDUP, COMPILED, USEFUL, ROOF),
    note=(
        "Useful TFLOPS count stored blocks only. A step is the forward pass and the gradients of x and of both "
        "weights, without an optimizer. Dense is the same MLP in torch, eager or compiled. The roofline is the sum of "
        "those of its six products."
    ),
    usual=("bf16",),
    shown=(SPEEDUP,),
)
DECODE_TABLE = Table(
    op="mlp_decode",
    dense=("torch_dense",),
    title="decoding through an MLP",
    columns=(CASE, MS, SPEEDUP, COMPILED, GBPS, ROOF),
    note=(
        "One CUDA graph holds enough MLPs, each with weights of its own, to exceed the L2 cache several times. The "
        "time is that of a replay divided by their number, for the dense MLP in torch too. The roofline is the sum of "
        "those of the two products."
    ),
    usual=("bf16",),
    shown=(SPEEDUP,),
)
BENCH = Bench(
    "mlp",
    suites={"published": PUBLISHED},
    schemas={"mlp_train": Schema(MlpTrainCase), "mlp_decode": Schema(MlpDecodeCase)},
    tables=(TRAIN_TABLE, DECODE_TABLE),
    options=OPTIONS,
    make=by_measure("an MLP", MEASURES),
    small="--tokens 64 --width 512 --hidden 512",
    kernels="",
    slowest=30.0,
)
