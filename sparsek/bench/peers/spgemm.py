"""What a user would pick instead of `sk.spgemm`. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparsek.bench.engine.peer import Peer, Ready, accepted, setting_up
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE
from sparsek.bench.suites.spgemm import SpgemmCase, SpgemmOperands

# cuSPARSE's buffers hold every product of two elements: 12 bytes each.
MOST_PRODUCTS = 2e9


@dataclass(frozen=True)
class TorchCsr(Peer):
    """torch's product of two CSR matrices of all elements of the blocks: cuSPARSE on a GPU, MKL on a CPU.

    It is told of no pattern: every call finds it anew.
    """

    def why_not(self, case: SpgemmCase, device: torch.device) -> list[str]:
        products = case.dense_flops / 2 * case.density**2
        reasons = [] if case.out == "bsr" else ["gives a sparse matrix, the case wants a dense one"]
        if products > MOST_PRODUCTS:
            reasons.append(f"would keep {products:.2g} products of elements, 12 bytes each")
        return reasons

    def ready(self, case: SpgemmCase, sets: Sequence[SpgemmOperands], tried: Callable[[str], None]) -> Ready:
        with setting_up("torch.sparse CSR @ CSR"):
            matrices = [(one.a.to_dense().to_sparse_csr(), one.b.to_dense().to_sparse_csr()) for one in sets]
            calls = tuple(lambda pair=pair: torch.matmul(*pair) for pair in matrices)
            accepted(sets[0].judge(calls[0]().to_dense()), "torch.sparse CSR @ CSR")
        return Ready(calls)


PEERS: tuple[Peer, ...] = (CUBLAS, TorchCsr("torch_csr", "torch.sparse CSR"), TORCH_DENSE)
