"""What `sk.linear` is held against. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sparsek.bench.engine.peer import Peer, Ready
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE, accepted
from sparsek.bench.suites.linear import LinearCase, LinearOperands
from sparsek.testing.product_budget import check_linear


@dataclass(frozen=True)
class Plain:
    """This library's x @ W.T, with nothing after it."""

    name: str = "plain"
    title: str = "the plain product"
    device: str = ""

    def why_not(self, case: LinearCase, device: torch.device) -> list[str]:
        return [] if case.epilogue else ["the case is the plain product itself"]

    def ready(self, case: LinearCase, sets: Sequence[LinearOperands], tried: Callable[[str], None]) -> Ready:
        plans, calls = zip(*(one.plain() for one in sets), strict=True)
        sets[0].out.fill_(torch.nan)
        calls[0]()
        accepted(check_linear(sets[0].x, sets[0].w, sets[0].out, tf32=plans[0].problem.tf32), "x @ W.T")
        return Ready(calls, plans[0].kernel)


PEERS: tuple[Peer, ...] = (replace(CUBLAS, title="cuBLAS and torch"), TORCH_DENSE, Plain())
