"""y = act(x @ W1.T) @ W2.T as a benchmark: a training step, and decoding in a CUDA graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.engine.plan.plan import Plan
from sparsek.products.formats.bsr import BSR
from sparsek.products.ops.linear import LinearCall
from sparsek.products.ops.mlp import mlp
from sparsek.products.ops.sddmm import plan_sddmm
from sparsek.products.ops.spmm import plan_spmm
from sparsek.products.reference.epilogue import ACTIVATIONS, PLAIN, Activation, Epilogue
from sparsek.testing.budget import Gate
from sparsek.testing.compare import near_dense, worst
from sparsek.testing.product_budget import stored
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Table
from sparsek_bench.engine.case import Case, Operands, block_name, rows, stored_name
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import Peer, ReadyPeer, dense, setting_up
from sparsek_bench.engine.tables import CASE, GBPS, MS, ROOF, SPEEDUP, USEFUL, faster_than
from sparsek_bench.engine.timed_call import Timed, several

MODES = ("eager", "compiled")


@dataclass(frozen=True)
class MlpOperands(Operands):
    """One of the rotating sets: its own x [tokens, width], W1 [hidden, width] and W2 [width, hidden].

    With `dy` [tokens, width], the gradient of y, it is one of a training step: forward, then the gradients of x, W1 and
    W2. `mode` is "eager", or "compiled" for torch.compile of the forward, whose backward is compiled with it.
    """

    x: Tensor
    w1: BSR
    w2: BSR
    activation: Activation
    dy: Tensor | None = None
    mode: str = "eager"

    @property
    def useful_flops(self) -> float:
        """Of a step: forward, gradients of the inputs, gradients of the weights, as many each."""
        passes = 2.0 if self.dy is None else 6.0
        return passes * self.x.shape[0] * (self.w1.values.numel() + self.w2.values.numel())

    @property
    def dense_forward(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The layer by torch: a function of x, W1 and W2, all dense."""
        activate = ACTIVATIONS[self.activation]
        return lambda x, w1, w2: functional.linear(activate(functional.linear(x, w1)), w2)

    @property
    def given(self) -> tuple[Tensor, BSR, BSR]:
        return self.x, self.w1, self.w2

    def _call(self, forward: Callable[..., Tensor], given: tuple[Any, ...]) -> Callable[[], Any]:
        """A call for y, or of a training step, for y and the gradients of what is given."""
        dy = self.dy
        if dy is None:
            return partial(forward, *given)
        wanted = [w.values if isinstance(w, BSR) else w for w in given]

        def step() -> tuple[Tensor, ...]:
            y = forward(*given)
            return (y, *torch.autograd.grad(y, wanted, dy.to(y.dtype)))

        return step

    def plan(self, kernel: str | None) -> Timed:
        """The planner chooses each of the kernels."""
        forward = (_forward if self.mode == "eager" else _compiled)(self.activation)
        return several(self.plans(), self._call(forward, self.given))

    def plans(self) -> dict[str, Plan]:
        """The plans of its products."""
        x, dy = self.x.detach(), self.dy
        w1, w2 = (BSR.unchecked(w.pattern, w.values.detach()) for w in (self.w1, self.w2))
        hidden = x.new_empty(x.shape[0], w1.shape[0])
        if dy is None:
            up = plan_spmm(x, w1.T, epilogue=Epilogue(activation=self.activation))
            return {"up": up, "down": plan_spmm(hidden, w2.T)}
        of_up = of_hidden = PLAIN
        if LinearCall(self.x, self.w1, activation=self.activation).writes_slope():
            of_up = Epilogue(activation=self.activation, slope=torch.empty_like(hidden))
            of_hidden = Epilogue(other=hidden, combine="mul")
        return {
            "up": plan_spmm(x, w1.T, epilogue=of_up),
            "down": plan_spmm(hidden, w2.T),
            "gradient of hidden": plan_spmm(dy, w2, epilogue=of_hidden),
            "gradient of W2": plan_sddmm(dy.mT, hidden, w2.pattern),
            "gradient of x": plan_spmm(hidden, w1),
            "gradient of W1": plan_sddmm(hidden.mT, x, w1.pattern),
        }

    def judge(self, out: Any) -> Gate:
        """Whether y, and each gradient, is no further from float64 than twice the dense layer's; the worst of them."""
        exact, rough = (self._dense_results(dtype) for dtype in (torch.float64, self.x.dtype))
        found = [out] if self.dy is None else out
        terms = sum(self.w1.shape)  # of the two products, which follow each other
        return worst([near_dense(*each, terms) for each in zip(found, exact, rough, strict=True)])

    def _dense_results(self, dtype: torch.dtype) -> list[Tensor]:
        """y and the gradients of the same layer in torch, those of the weights as the blocks that are stored."""
        dense = (self.x, self.w1.to_dense(), self.w2.to_dense())
        given = tuple(x.detach().to(dtype, copy=True).requires_grad_(self.dy is not None) for x in dense)
        made = self._call(self.dense_forward, given)()
        if self.dy is None:
            return [made]
        y, dx, dw1, dw2 = made
        return [y.detach(), dx, stored(dw1, self.w1.pattern), stored(dw2, self.w2.pattern)]

    def dense(self, seed: int, forward: Callable[..., Tensor] | None = None) -> Callable[[], Any]:
        """The call on dense random weights that keep the scale of x, by `dense_forward` or its compiled form."""
        draw = Draw(self.x.device, self.x.dtype, 2 * seed)
        weights = (draw.weight(*w.shape).requires_grad_(self.dy is not None) for w in (self.w1, self.w2))
        return self._call(forward or self.dense_forward, (self.x, *weights))


def _forward(activation: Activation) -> Callable[..., Tensor]:
    """The layer: a function of x, W1 and W2."""
    return lambda x, w1, w2: mlp(x, w1, w2, activation=activation)


@cache
def _compiled(activation: Activation) -> Callable[..., Tensor]:
    """torch.compile of the layer as one graph, the same for all sets."""
    return torch.compile(_forward(activation), fullgraph=True, dynamic=False)


@dataclass(frozen=True)
class MlpCase(Case):
    """x [tokens, width] through W1 [hidden, width], an activation, and W2 [width, hidden]; no biases.

    `density` of the blocks of both weights are stored.
    """

    tokens: int = options.size("Rows of x")
    width: int = options.size("Features in and out", "4096")
    hidden: int = options.size("Features between the two products", "16384")
    block: tuple[int, int] = options.block()
    density: float = options.share()
    activation: Activation = options.checked(
        lambda name, value: options.check_choice(name, value, [*filter(None, ACTIVATIONS)]), usual="gelu"
    )
    dtype: str = options.dtype()

    @property
    def name(self) -> str:
        """One short line: "4096 to 16384 to 4096 gelu, block 128 12.5 % bf16, 8192 tokens"."""
        layer = f"{self.width} to {self.hidden} to {self.width} {self.activation}"
        stored = stored_name(block_name(self.block), self.density, self.dtype)
        return f"{layer}, {stored}, {self.tokens} token{'s' if self.tokens > 1 else ''}"

    @property
    def dense_flops(self) -> float:
        return 4.0 * self.tokens * self.width * self.hidden

    def sets(self, draw: Draw) -> Callable[[Draw], Any]:
        w1, w2 = (
            draw.blocks(*sides, self.block, self.density)
            for sides in ((self.hidden, self.width), (self.width, self.hidden))
        )

        def one(draw: Draw) -> MlpOperands:
            x = draw.normal(self.tokens, self.width)
            return MlpOperands(x, draw.revalued(w1), draw.revalued(w2), self.activation)

        return one


@dataclass(frozen=True)
class MlpDecodeCase(MlpCase):
    """The forward of an MLP for a few tokens, inside a CUDA graph."""

    op: ClassVar[str] = "mlp_decode"
    in_graph: ClassVar[bool] = True


@dataclass(frozen=True)
class MlpTrainCase(MlpCase):
    """Forward and backward of an MLP: the gradients of x and of both weights. `mode`: "eager" or "compiled"."""

    op: ClassVar[str] = "mlp_train"

    mode: str = options.checked(lambda name, value: options.check_choice(name, value, MODES), usual="eager")

    @property
    def name(self) -> str:
        """As for other MLPs, and the mode unless it is eager."""
        return super().name + ("" if self.mode == "eager" else f", {self.mode}")

    @property
    def dense_flops(self) -> float:
        return 3.0 * super().dense_flops

    def sets(self, draw: Draw) -> Callable[[Draw], Any]:
        one = super().sets(draw)

        def trained(draw: Draw) -> MlpOperands:
            x, *weights = one(draw).given
            w1, w2 = (BSR.unchecked(w.pattern, w.values.requires_grad_()) for w in weights)
            return MlpOperands(x.requires_grad_(), w1, w2, self.activation, draw.normal(*x.shape), self.mode)

        return trained


@dataclass(frozen=True)
class CompiledDense(Peer):
    """torch.compile of the dense layer with its default options; the backward of a training step is compiled too."""

    def ready(self, case: MlpCase, sets: Sequence[MlpOperands], tried: Callable[[str], None]) -> ReadyPeer:
        with setting_up("torch.compile"):
            torch.compiler.reset()  # a compiled function stops compiling after 8 kinds of operands
            forward = torch.compile(sets[0].dense_forward, fullgraph=True, dynamic=False)
            calls = tuple(one.dense(1000 + index, forward) for index, one in enumerate(sets))
            calls[0]()
        return ReadyPeer(calls, flops=case.dense_flops)


LAYER = (4096, 16384, (128, 128), 0.125)
PUBLISHED = rows(
    "auto",
    *(MlpTrainCase(8192, *LAYER, mode=mode) for mode in MODES),
    *(MlpDecodeCase(tokens, *LAYER) for tokens in (1, 16, 64)),
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
)
DECODE_TABLE = replace(
    TRAIN_TABLE,
    op="mlp_decode",
    title="decoding through an MLP",
    columns=(CASE, MS, SPEEDUP, COMPILED, GBPS, ROOF),
    note=(
        "One CUDA graph holds enough MLPs, each with weights of its own, to exceed the L2 cache several times. The "
        "time is that of a replay divided by their number, for the dense MLP in torch too. The roofline is the sum of "
        "those of the two products."
    ),
)
BENCH = Bench(
    "mlp",
    suites={"published": PUBLISHED},
    kinds=(MlpTrainCase, MlpDecodeCase),
    measures={
        "train": MlpTrainCase,
        "compiled": partial(MlpTrainCase, mode="compiled"),
        "decode": MlpDecodeCase,
    },
    peers=(
        dense("torch_dense", "torch dense"),
        CompiledDense("torch_dense_compiled", "torch dense, compiled", "cuda"),
    ),
    tables=(TRAIN_TABLE, DECODE_TABLE),
    small="--tokens 64 --width 512 --hidden 512",
    kernels="",
    slowest=30.0,
)
