"""What packing is held against. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparsek.bench.engine.peer import Peer, Ready
from sparsek.bench.suites.pack import PackCase, PackOperands


@dataclass(frozen=True)
class Copy(Peer):
    """torch's copy of w into memory that is there: read once and written once."""

    def ready(self, case: PackCase, sets: Sequence[PackOperands], tried: Callable[[str], None]) -> Ready:
        pairs = [(one.w, torch.empty_like(one.w)) for one in sets]
        calls = tuple(lambda w=w, to=to: to.copy_(w) for w, to in pairs)
        return Ready(calls, flops=2 * case.dense_bytes)


PEERS: tuple[Peer, ...] = (Copy("copy", "a copy"),)
