"""The gradients of attention as a benchmark, alone and in a training step: cases, their operands, suites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention, plan_attention, plan_attention_backward
from sparsek.attn.plan.attention_grad import AttentionGradPlan
from sparsek.core.memory import peak_bytes
from sparsek.engine import table as kernels
from sparsek.products.ops.gradients import same_family
from sparsek.testing.attention_budget import ExpectedGradients, expected_gradients
from sparsek.testing.budget import Gate
from sparsek.testing.compare import worst
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column
from sparsek_bench.engine.case import SuiteRow, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.heads import HeadGradients, expected_of_heads
from sparsek_bench.engine.sources import JOINED
from sparsek_bench.engine.timed_call import Timed, several
from sparsek_bench.peers.attention import GRAD_PEERS, step
from sparsek_bench.suites.attention import (
    EIGHTH,
    SMALL,
    TABLE,
    AttentionCase,
    AttentionOperands,
    sampled,
)


@dataclass(frozen=True)
class DifferentiableOperands(AttentionOperands):
    """A set with dO [B, Hq, S, Dv], the gradient of the output."""

    grad: Tensor
    deterministic: bool

    def eager(self, plan: Any) -> Callable[[], object]:
        return self.planned(plan)

    @cached_property
    def expected_gradients(self) -> ExpectedGradients | HeadGradients:
        """The reference for dq, dk and dv, of long sequences for parts of two heads; computed once for a case."""
        q, k, v = (x.detach() for x in (self.q, self.k, self.v))
        tiles = self.sample()
        if tiles is None:
            return expected_gradients(q, k, v, self.mask, self.grad)
        return expected_of_heads(q, k, v, self.mask, self.grad, tiles, sampled(self.mask.grid[1]))


@dataclass(frozen=True)
class GradOperands(DifferentiableOperands):
    """A set of a backward pass: also out and lse [B, Hq, S] as the forward pass gave them."""

    out: Tensor
    lse: Tensor

    @property
    def given(self) -> tuple[Any, ...]:
        return *super().given, self.out, self.lse, self.grad

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        return self.q.shape, self.k.shape, self.v.shape

    def plan(self, kernel: str | None) -> AttentionGradPlan:
        return plan_attention_backward(*self.given[:4], kernel=kernel, deterministic=self.deterministic)

    def anew(self, kernel: str) -> Callable[[], tuple[Tensor, ...]]:
        """A call that builds its mask, plans and runs."""

        def call() -> tuple[Tensor, ...]:
            one = replace(self, mask=self.make())
            return one.plan(kernel)(*one.given)

        return call

    def judge(self, out: Any) -> Gate:
        """Whether `out` holds dq, dk and dv of this set."""
        return self.expected_gradients.judge(out)


@dataclass(frozen=True)
class StepOperands(DifferentiableOperands):
    """A set of a training step, whose q, k and v require gradients."""

    def plan(self, kernel: str | None) -> Timed:
        """`kernel` is the forward pass's; the backward pass takes the one of its family, as `attention` does."""
        q, k, v = (x.detach() for x in (self.q, self.k, self.v))
        family, fixed = same_family(kernel, "attention_backward"), self.deterministic
        plans = {
            "forward": plan_attention(q, k, v, self.mask, kernel=kernel, return_lse=True),
            "backward": plan_attention_backward(q, k, v, self.mask, kernel=family, deterministic=fixed),
        }
        return several(plans, self._step(lambda: self.mask, kernel))

    def anew(self, kernel: str) -> Callable[[], tuple[Tensor, ...]]:
        """A step that builds its mask and plans, too, with the forward kernel among those of `kernel`."""
        (forward,) = set(kernel.split(JOINED)).intersection(kernels.names_for("attention"))
        return self._step(self.make, forward)

    def _step(self, mask: Callable[[], BlockMask], kernel: str | None) -> Callable[[], tuple[Tensor, ...]]:
        given = {"kernel": kernel, "deterministic": self.deterministic}
        return step(lambda q, k, v: attention(q, k, v, mask(), **given), (self.q, self.k, self.v), self.grad)

    def judge(self, out: Any) -> Gate:
        """Whether `out` holds the output, dq, dk and dv of this set; the worst of them."""
        return worst([self.expected.judge(out[0]), self.expected_gradients.judge(out[1:])])

    def peer_extra(self, call: Callable[[], object]) -> dict[str, Any]:
        """`peak_gb`: the most memory that a step holds at once, with its q, k, v and dO, in 1e9 bytes."""
        peak = peak_bytes(call, self.q.device)
        own = sum(x.nbytes for x in (self.q, self.k, self.v, self.grad))
        return {"peak_gb": None if peak is None else round((peak + own) / 1e9, 6)}


@dataclass(frozen=True)
class AttentionGradCase(AttentionCase):
    """dq, dk and dv of attention, from its out and lse. `deterministic`: the same bits every time."""

    op: ClassVar[str] = "attention_backward"
    passes: ClassVar[tuple[str, ...]] = ("backward",)
    products: ClassVar[tuple[int, int]] = (3, 2)

    deterministic: bool = options.field(
        True, "The same bits every time, or sums in any order.", off="any-order", usual=True
    )

    @property
    def name(self) -> str:
        """As the forward pass's, with a mark where sums may be in any order."""
        return super().name + ("" if self.deterministic else ", not deterministic")

    def one_set(self, draw: Draw, *parts: Any) -> DifferentiableOperands:
        """With dO, after its forward pass."""
        grad = draw.normal(*self.out_shape)
        out, lse = attention(*parts[:4], return_lse=True)
        return GradOperands(*parts, grad=grad, deterministic=self.deterministic, out=out, lse=lse)


@dataclass(frozen=True)
class AttentionTrainCase(AttentionGradCase):
    """A training step: attention, and dq, dk and dv by autograd. Its peak memory counts, too."""

    op: ClassVar[str] = "attention_train"
    extra: ClassVar[tuple[str, ...]] = ("peak_gb",)
    peer_extra: ClassVar[tuple[str, ...]] = ("peak_gb",)
    passes: ClassVar[tuple[str, ...]] = ("forward", "backward")
    products: ClassVar[tuple[int, int]] = (4, 3)

    def one_set(self, draw: Draw, *parts: Any) -> DifferentiableOperands:
        """With dO; its q, k and v require gradients."""
        for x in parts[:3]:
            x.requires_grad_()
        return StepOperands(*parts, grad=draw.normal(*self.out_shape), deterministic=self.deterministic)


_case = AttentionGradCase.square
BOTH = ("auto", "portable.attention_bwd")
PUBLISHED: tuple[SuiteRow, ...] = (
    *rows("auto", _case("full", 8), _case("full", 32), _case("causal", 8), _case("causal", 32)),
    *rows(BOTH, _case("window:2048", 32), _case(EIGHTH, 8)),
    *rows("auto", _case(EIGHTH, 32)),
    *rows("portable.attention_bwd", _case(EIGHTH, 8, 64), _case(EIGHTH, 32, 64)),
    *rows("auto", _case(EIGHTH, 32, dim=64), _case(EIGHTH, 32, dim=256)),
    *rows("auto", _case(EIGHTH, 32, deterministic=False), _case("causal", 32, deterministic=False)),
)
# One window over the length: time and memory must grow no faster.
TRAINING = rows(
    "auto",
    *(AttentionTrainCase.square("window:4096", kilo, heads=(8, 8)) for kilo in (64, 128, 256)),
)


PEAK = Column("peak GB", lambda record: "" if record["peak_gb"] is None else f"{record['peak_gb']:.3g}")
BACKWARD_TABLE = replace(
    TABLE,
    op="attention_backward",
    title="gradients of attention",
    note=(
        "dq, dk and dv, from out and lse. Useful TFLOPS count the pairs that the mask admits, five products "
        "each, 2.5 times the forward pass; the roofline whole blocks. Dense is cuDNN: causal where the mask is causal, "
        "else with every pair. Over a peer: 1.50 means 1.5 times as fast. SparseK gives the same bits every "
        "time, except in rows that are not deterministic. FlashAttention-4 and cuDNN use atomics; FlashAttention-4, "
        "ordered, is a mode with the same bits every time."
    ),
    beside=("fa4", "fa4_ordered", "cudnn_bsa"),
    kernels=("hopper.attention_bwd",),
)
TRAIN_TABLE = replace(
    TABLE,
    op="attention_train",
    title="training step of attention",
    columns=(*TABLE.columns, PEAK),
    note=(
        "A step is attention and the gradients of q, k and v, by autograd. Useful TFLOPS count the pairs that the mask "
        "admits, the roofline whole blocks. Dense is cuDNN, causal. Over a peer: 1.50 means 1.5 times as fast. Peak "
        "memory is the most that the first step on a mask allocates, with q, k, v and the gradient of the output."
    ),
    beside=("fa4", "flex"),
    usual=("block 128", "D 128", "bf16"),
    kernels=None,
)
BENCH = Bench(
    "attention-backward",
    suites={"published": PUBLISHED, "train": TRAINING},
    kinds=(AttentionGradCase, AttentionTrainCase),
    measures={"backward": AttentionGradCase, "train": AttentionTrainCase},
    peers=GRAD_PEERS,
    tables=(BACKWARD_TABLE, TRAIN_TABLE),
    small=SMALL,
    kernels="Kernels by name, of a step the forward pass's; auto is the planner's choice.",
    slowest=65.0,
)
