"""What a user would pick instead of the gradients of `sk.attention`. One line per peer in PEERS, at the end.

Each peer runs its own forward pass when it is set up, on the same q, k, v and dO, and is timed by its backward pass
alone; of a training step both are timed. Its dq, dk and dv pass the same gate as a kernel's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsek.bench.engine.case import block_name
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted, elsewhere, setting_up
from sparsek.bench.peers.attention import (
    DENSE_MASKS,
    LOW,
    Attend,
    CudnnBlocks,
    DenseAttention,
    Flash4,
    Flex,
    even_lists,
    imported,
    ran,
)
from sparsek.bench.suites.attention import AttentionCase, length_name
from sparsek.bench.suites.attention_grad import (
    AttentionGradCase,
    AttentionTrainCase,
    GradOperands,
    StepOperands,
)

Sets = Sequence[GradOperands] | Sequence[StepOperands]
# A dense step beyond this length is not measured: its time grows with the square of the length.
LONGEST_DENSE_STEP = 2**16


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Inside, a graph of torch.compile can be gone back through more than once.

    torch gives such a graph its saved tensors as scratch memory, unless donated_buffer says no when it is compiled and
    when it runs. The setting is the thread's own, so the backward pass stays on this thread.
    """
    config = imported("torch._functorch.config")
    with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
        yield


class Differentiable(Peer, Protocol):
    """A peer of the forward pass that autograd goes through."""

    def attend(self, case: AttentionCase, one: Any, *, gradients: bool = False) -> Attend: ...

    def laid(self, x: Tensor) -> Tensor: ...

    def counted(self, case: AttentionCase) -> tuple[str, float | None]: ...

    def judged(self, case: AttentionCase) -> bool: ...


@dataclass(frozen=True)
class Autograd:
    """A peer of the forward pass, and its backward pass by autograd. `dense` masks only, if it says so."""

    forward: Differentiable
    dense: bool = False

    @property
    def name(self) -> str:
        return self.forward.name

    @property
    def title(self) -> str:
        return self.forward.title

    @property
    def device(self) -> str:
        return self.forward.device

    def why_not(self, case: AttentionGradCase, device: torch.device) -> list[str]:
        reasons = self.forward.why_not(case, device)
        if self.dense and case.mask not in DENSE_MASKS:
            reasons.append(f"is measured for masks that it computes as they are: {' and '.join(DENSE_MASKS)}")
        dense = self.forward.counted(case)[1] is not None
        if isinstance(case, AttentionTrainCase) and dense and case.kv_len > LONGEST_DENSE_STEP:
            longest = length_name(LONGEST_DENSE_STEP)
            reasons.append(f"takes time by the square of the length: not measured beyond {longest}")
        return reasons

    def ready(self, case: AttentionGradCase, sets: Sets, tried: Callable[[str], None]) -> Ready:
        step = isinstance(case, AttentionTrainCase)
        tracing, around = (_step, nullcontext) if step else (_backward, kept_graphs)
        with setting_up(), around():
            attend = self.forward.attend(case, sets[0], gradients=True)
            calls = tuple(tracing(attend, *self._operands(one)) for one in sets)
            results = [self.forward.laid(x) for x in ran(calls)]
            if self.forward.judged(case):
                accepted(sets[0].judge(results), "its result")
        return Ready(calls, *self.forward.counted(case))

    def _operands(self, one: GradOperands | StepOperands) -> list[Tensor]:
        """q, k and v, which want gradients, and dO, in the layout of the forward pass."""
        q, k, v, grad = (self.forward.laid(x.detach()).contiguous() for x in (one.q, one.k, one.v, one.grad))
        return [*(x.requires_grad_() for x in (q, k, v)), grad]


@dataclass(frozen=True)
class FlexAutograd(Autograd):
    """FlexAttention's gradients. Its backward pass drops tiles that are larger than blocks before it reads options."""

    def why_not(self, case: AttentionGradCase, device: torch.device) -> list[str]:
        reasons = super().why_not(case, device)
        if min(case.block) < 128 and 64 <= case.dim <= 128 and case.dtype in LOW:
            reasons.append(
                "the only tile of its backward pass for heads of 64 to 128 on Hopper, 64 x 128, needs blocks of 128, "
                f"not {block_name(case.block)}"
            )
        return reasons


def _backward(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """A call of the backward pass alone: dq, dk and dv. The forward pass runs now."""
    out = attend(q, k, v)

    def call() -> tuple[Tensor, ...]:
        with kept_graphs():
            return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return call


def _step(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call of both passes: out, dq, dk and dv."""

    def call() -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    return call


@dataclass(frozen=True)
class CudnnBlocksBackward:
    """The explicit backward pass of cuDNN frontend's block-sparse attention, on its own forward pass's out and lse."""

    name: str = "cudnn_bsa"
    title: str = "cuDNN block-sparse"
    device: str = "cuda"

    def why_not(self, case: AttentionGradCase, device: torch.device) -> list[str]:
        reasons = CudnnBlocks().why_not(case, device)
        if case.dtype != "bf16":
            reasons.append(f"its gradients are bf16, not {case.dtype}")
        if (case.dim, case.v_dim) != (128, 128):
            reasons.append(f"its gradients take heads of 128 on Hopper, not {case.dim} and {case.v_dim}")
        if case.heads != case.kv_heads:
            reasons.append(f"its gradients take no shared heads, not {case.heads} to {case.kv_heads}")
        return reasons

    def ready(self, case: AttentionGradCase, sets: Sets, tried: Callable[[str], None]) -> Ready:
        with setting_up():
            index = even_lists(sets[0])
            calls = tuple(self._call(case, one, index) for one in sets)
            accepted(sets[0].judge(ran(calls)), "its result")
        return Ready(calls)

    def _call(
        self, case: AttentionGradCase, one: GradOperands | StepOperands, index: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        module = imported("cudnn.block_sparse_attention")
        q, k, v = (x.detach() for x in (one.q, one.k, one.v))
        block = case.block[0]

        def forward() -> tuple[Tensor, Tensor]:
            made = module.block_sparse_attention_forward(q, k, v, index, sparse_block_size=block)
            return made["o_tensor"], made["lse_tensor"]

        def backward(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
            made = module.block_sparse_attention_backward(
                one.grad, q, k, v, out, lse, index, sparse_block_size=block
            )
            return made["dq_tensor"], made["dk_tensor"], made["dv_tensor"]

        def step() -> tuple[Tensor, ...]:
            out, lse = forward()
            return (out, *backward(out, lse))

        if isinstance(case, AttentionTrainCase):
            return step
        out, lse = forward()
        return lambda: backward(out, lse)


@dataclass(frozen=True)
class AnyOrder:
    """This library without its promise of the same bits: the planner's choice for deterministic=False."""

    name: str = "any_order"
    title: str = "deterministic=False"
    device: str = ""

    def why_not(self, case: AttentionGradCase, device: torch.device) -> list[str]:
        reasons = elsewhere(self, device)
        if isinstance(case, AttentionTrainCase):
            reasons.append("is measured for the backward pass alone")
        if not case.deterministic:
            reasons.append("the case itself is not deterministic")
        return reasons

    def ready(
        self, case: AttentionGradCase, sets: Sequence[GradOperands], tried: Callable[[str], None]
    ) -> Ready:
        fixed = sets[0].plan(None)
        free = [replace(one, deterministic=False) for one in sets]
        plans = [one.plan(None) for one in free]
        if (plans[0].kernel, plans[0].config) == (fixed.kernel, fixed.config):
            raise UnavailableError("the planner's choice is the same for both")
        calls = tuple(one.planned(plan) for one, plan in zip(free, plans, strict=True))
        accepted(sets[0].judge(ran(calls)), "its result")
        return Ready(calls, note=plans[0].kernel)


PEERS: tuple[Peer, ...] = (
    Autograd(DenseAttention("cudnn", "cuDNN dense", "cuda", "CUDNN_ATTENTION")),
    Autograd(DenseAttention("fa2", "FlashAttention-2 dense", "cuda", "FLASH_ATTENTION"), dense=True),
    Autograd(Flash4()),
    FlexAutograd(Flex()),
    CudnnBlocksBackward(),
    AnyOrder(),
    Autograd(DenseAttention("sdpa", "torch dense", "cpu")),
)
