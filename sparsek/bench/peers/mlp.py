"""What a user would pick instead of a block-sparse MLP. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparsek.bench.engine.peer import Peer, Ready, setting_up
from sparsek.bench.peers.product import Dense
from sparsek.bench.suites.mlp import MlpCase, MlpOperands


@dataclass(frozen=True)
class CompiledDense(Peer):
    """torch.compile of the dense layer with its default options; the backward of a training step is compiled too."""

    def ready(self, case: MlpCase, sets: Sequence[MlpOperands], tried: Callable[[str], None]) -> Ready:
        with setting_up("torch.compile"):
            torch.compiler.reset()  # a compiled function stops compiling after 8 kinds of operands
            forward = torch.compile(sets[0].dense_forward, fullgraph=True, dynamic=False)
            calls = tuple(one.dense_call(1000 + index, forward) for index, one in enumerate(sets))
            calls[0]()
        return Ready(calls, flops=case.dense_flops)


PEERS: tuple[Peer, ...] = (
    Dense("torch_dense", "torch dense"),
    CompiledDense("torch_dense_compiled", "torch dense, compiled", "cuda"),
)
