"""Every benchmark: its command, which names its file of records too, its suites, and its peers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsek.bench.peers import attention as attention_peers
from sparsek.bench.peers import attention_grad as attention_grad_peers
from sparsek.bench.peers import fp8 as fp8_peers
from sparsek.bench.peers import linear as linear_peers
from sparsek.bench.peers import mlp as mlp_peers
from sparsek.bench.peers import sddmm as sddmm_peers
from sparsek.bench.peers import semi24 as semi24_peers
from sparsek.bench.peers import spgemm as spgemm_peers
from sparsek.bench.peers import spmm as spmm_peers
from sparsek.bench.peers.peer import Peer
from sparsek.bench.suites import (
    attention,
    attention_grad,
    fp8,
    host,
    linear,
    mlp,
    pack,
    planner,
    sddmm,
    semi24,
    spgemm,
    spmm,
    story,
)
from sparsek.bench.suites.case import Entry


@dataclass(frozen=True)
class Bench:
    """One benchmark. `name`: of its command, "attention-backward"."""

    name: str
    suites: Mapping[str, tuple[Entry, ...]]
    peers: tuple[Peer, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file of records."""
        return f"{self.name.replace('-', '_')}.jsonl"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of all suites: each case once, with all the kernels that any suite measures on it."""
        kernels: dict[tuple[str, Any], dict[str, None]] = {}
        for entry in (each for suite in self.suites.values() for each in suite):
            kernels.setdefault((entry.op, entry.case), {}).update(dict.fromkeys(entry.kernels))
        return tuple(Entry(case, tuple(names), op) for (op, case), names in kernels.items())


BENCHES: Mapping[str, Bench] = {
    bench.name: bench
    for bench in (
        Bench("spmm", spmm.SUITES, spmm_peers.PEERS),
        Bench("sddmm", sddmm.SUITES, sddmm_peers.PEERS),
        Bench("spgemm", spgemm.SUITES, spgemm_peers.PEERS),
        Bench("linear", linear.SUITES, linear_peers.PEERS),
        Bench("mlp", mlp.SUITES, mlp_peers.PEERS),
        Bench("semi24", {**semi24.SUITES, **story.SUITES}, semi24_peers.PEERS),
        Bench("fp8", fp8.SUITES, fp8_peers.PEERS),
        Bench("pack", pack.SUITES, pack.PEERS),
        Bench("attention", attention.SUITES, attention_peers.PEERS),
        Bench("attention-backward", attention_grad.SUITES, attention_grad_peers.PEERS),
        Bench("host", host.SUITES),
        Bench("planner", planner.SUITES),
    )
}
