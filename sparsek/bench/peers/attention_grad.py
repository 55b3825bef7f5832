"""What a user would pick instead of the gradients of `sk.attention`. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted
from sparsek.bench.peers.attention import CUDNN, CUDNN_BLOCKS, FLASH4, FLEX, TORCH_DENSE, DenseAttention, ran
from sparsek.bench.suites.attention_grad import AttentionGradCase, AttentionTrainCase, GradOperands


@dataclass(frozen=True)
class AnyOrder(Peer):
    """This library without its promise of the same bits: the planner's choice for deterministic=False."""

    def why_not(self, case: AttentionGradCase, device: torch.device) -> list[str]:
        reasons = super().why_not(case, device)
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
    CUDNN,
    DenseAttention("fa2", "FlashAttention-2 dense", "cuda", "FLASH_ATTENTION", as_is=True),
    FLASH4,
    FLEX,
    CUDNN_BLOCKS,
    AnyOrder("any_order", "deterministic=False"),
    TORCH_DENSE,
)
