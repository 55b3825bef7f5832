"""What `sk.linear` is held against. One line per peer in PEERS, at the end."""

from dataclasses import replace

from sparsek.bench.engine.peer import Peer
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE, Own
from sparsek.bench.suites.linear import LinearCase, LinearOperands


def plain(case: LinearCase, one: LinearOperands, index: int) -> LinearOperands:
    """x @ W.T, with nothing after it, into the same output."""
    return replace(one, bias=None, activation=None, residual=None)


PEERS: tuple[Peer, ...] = (
    replace(CUBLAS, title="cuBLAS and torch"),
    TORCH_DENSE,
    Own(
        "plain",
        "the plain product",
        other=plain,
        unless=lambda case: [] if case.epilogue else ["the case is the plain product itself"],
    ),
)
