"""Every benchmark: its command and file of records, its suites, its peers, and the options of its cases."""

from collections.abc import Callable, Iterable, Mapping
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
from sparsek.bench.suites.case import Option, Schema, SuiteRow, combined

# Sizes that a CPU multiplies in a second or two.
SMALL = "--m 512 --k 512 --n 64"
SMALL_ATTENTION = "--seq 1K --heads 2 --dim 64 --dtype fp32"
KERNELS = "Kernels by name; auto is the planner's choice."


@dataclass(frozen=True)
class Bench:
    """One benchmark, and all that its command needs to know.

    `name`: of its command, "attention-backward". `schemas`: what its records hold, by their `op`. `make`: the case with
    the fields that `options` give. `small`: options of sizes for a CPU, which suites and sizes by default would keep
    busy for hours; "" where these are small. `kernels`: what --kernel names; "" where nothing can be named. `whole`:
    the suite that is measured where nothing is given; "" for the case of the options' defaults. `slowest`: seconds that
    a row took at most on an H200 with empty caches. `by_hand`: suites that `bench all` leaves out.
    """

    name: str
    help: str
    suites: Mapping[str, tuple[SuiteRow, ...]]
    schemas: Mapping[str, Schema]
    peers: tuple[Peer, ...]
    options: tuple[Option, ...]
    make: Callable[..., Any]
    small: str = SMALL
    kernels: str = KERNELS
    whole: str = ""
    rounds: int = 7
    slowest: float = 20.0
    by_hand: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file of records."""
        return f"{self.name.replace('-', '_')}.jsonl"

    @property
    def rows(self) -> tuple[SuiteRow, ...]:
        """The rows of all suites: each case once, with all the kernels that any suite measures on it."""
        return self._rows(self.suites)

    @property
    def published(self) -> tuple[SuiteRow, ...]:
        """Those of the suites whose records are published."""
        return self._rows(name for name in self.suites if name not in self.by_hand)

    def _rows(self, suites: Iterable[str]) -> tuple[SuiteRow, ...]:
        kernels: dict[tuple[str, Any], dict[str, None]] = {}
        for row in (each for name in suites for each in self.suites[name]):
            kernels.setdefault((row.op, row.case), {}).update(dict.fromkeys(row.kernels))
        return tuple(SuiteRow(case, tuple(names), op) for (op, case), names in kernels.items())

    def cases(self, given: Mapping[str, str | bool]) -> tuple[Any, ...]:
        """The cases of every combination of what was given for the options."""
        return combined(self.make, self.options, given)


ALL = (
    Bench(
        "spmm",
        "BSR and dense against its peers: N(0, 1) data, rotating buffers, interleaved rounds, median, spread.",
        spmm.SUITES,
        spmm.SCHEMAS,
        spmm_peers.PEERS,
        spmm.OPTIONS,
        spmm.SpmmCase,
    ),
    Bench(
        "attention",
        "Attention over the blocks of a mask against its peers: N(0, 1) data, rotating buffers, interleaved rounds.",
        attention.SUITES,
        attention.SCHEMAS,
        attention_peers.PEERS,
        attention.OPTIONS,
        attention.AttentionCase,
        SMALL_ATTENTION,
        slowest=90.0,
        by_hand=("sweep",),
    ),
    Bench(
        "attention-backward",
        "The gradients of attention against their peers, alone or with the forward pass of a training step.",
        attention_grad.SUITES,
        attention_grad.SCHEMAS,
        attention_grad_peers.PEERS,
        attention_grad.OPTIONS,
        attention_grad.make,
        SMALL_ATTENTION,
        "Kernels by name, of a step the forward pass's; auto is the planner's choice.",
        slowest=65.0,
    ),
    Bench(
        "sddmm",
        "X @ Y at the stored blocks of a pattern, against its peers.",
        sddmm.SUITES,
        sddmm.SCHEMAS,
        sddmm_peers.PEERS,
        sddmm.OPTIONS,
        sddmm.SddmmCase,
    ),
    Bench(
        "spgemm",
        "BSR x BSR against its peers, and what finding out which blocks meet takes of a first call.",
        spgemm.SUITES,
        spgemm.SCHEMAS,
        spgemm_peers.PEERS,
        spgemm.OPTIONS,
        spgemm.SpgemmCase,
    ),
    Bench(
        "linear",
        "act(x @ W.T + bias) + residual, against torch and against this library's plain product.",
        linear.SUITES,
        linear.SCHEMAS,
        linear_peers.PEERS,
        linear.OPTIONS,
        linear.LinearCase,
        "--tokens 64 --k 512 --n 512",
    ),
    Bench(
        "mlp",
        "An MLP with gelu against torch's: a training step, eager or compiled, or decoding in a CUDA graph.",
        mlp.SUITES,
        mlp.SCHEMAS,
        mlp_peers.PEERS,
        mlp.OPTIONS,
        mlp.make,
        "--tokens 64 --width 512 --hidden 512",
        "",
        slowest=30.0,
    ),
    Bench(
        "semi24",
        "2:4 matrices, whole or in stored blocks, against cuSPARSELt, cuBLAS and this library's BSR.",
        {**semi24.SUITES, **story.SUITES},
        {**semi24.SCHEMAS, **story.SCHEMAS},
        semi24_peers.PEERS,
        semi24.OPTIONS,
        semi24.make,
    ),
    Bench(
        "fp8",
        "FP8 matrices in blocks or in 2:4 against cuBLAS, cuSPARSELt and the same in bf16.",
        fp8.SUITES,
        fp8.SCHEMAS,
        fp8_peers.PEERS,
        fp8.OPTIONS,
        fp8.make,
    ),
    Bench(
        "pack",
        "Dense matrices packed into Semi24 or BSR, against a copy of the same matrix.",
        pack.SUITES,
        pack.SCHEMAS,
        pack.PEERS,
        pack.OPTIONS,
        pack.make,
        "",
        "",
    ),
    Bench(
        "planner",
        "Every way to store a layer's weight, checked and timed; the one that predictions choose against the fastest.",
        planner.SUITES,
        planner.SCHEMAS,
        (),
        planner.OPTIONS,
        planner.PlannerCase,
        "--layers few --dtype fp32",
        "",
        rounds=5,
        slowest=150.0,
    ),
    Bench(
        "host",
        "The host's time of calls as users write them, each over torch's: the suite, or the calls given by hand.",
        host.SUITES,
        host.SCHEMAS,
        (),
        host.OPTIONS,
        host.HostCase,
        "--call linear --sides 16x64x64 --block 32 --dtype fp32",
        "",
        "host",
        slowest=60.0,
    ),
)
BENCHES: Mapping[str, Bench] = {bench.name: bench for bench in ALL}
