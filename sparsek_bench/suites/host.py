"""What calls cost the host, beside torch's, as cases: cached calls, layers in eager mode, first calls of a process."""

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from sparsek.core import env
from sparsek.core.clock import Times, wall_rounds
from sparsek.core.device import CPU
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.launch import shipped
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options, records
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Bar, Case, block_name, rows, shape_name, stored_name
from sparsek_bench.engine.run import GateError, Outcome, PeerResult, beside, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, case_name, judged, peer_ms
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.host_calls import CALLS, HEADED, LAYERS, PAGE, PAGED, PRODUCT, STORAGES, WHOLE

TORCH = "torch"
LAYER = "layer"
# What a first call finds on disk: no compiled kernel, or those of a process before.
CACHES = ("empty", "filled")
STORED = {"bsr": "", "semi24": "2:4", "bsr24": "2:4 in", "fp8": "FP8"}
# How names of cases say what is measured.
SIDES: Mapping[str, Callable[..., str]] = {
    PRODUCT: shape_name,
    LAYERS: lambda tokens, k, n: f"{tokens} token{'s' if tokens > 1 else ''}, {k} to {n},",
    HEADED: lambda heads, length, dim: f"{length} causal, {heads} heads, D {dim},",
    PAGED: lambda requests, heads, length, dim: f"decode {requests} x {length}, {heads} heads, D {dim},",
    WHOLE: "{}×{}".format,
}


def parse_sides(text: str) -> tuple[int, ...]:
    """ "64x1024x1024" -> (64, 1024, 1024)."""
    if re.fullmatch(r"\d+(x\d+)*", text.strip().lower()) is None:
        raise InvalidInput(f"sides are written as 64x1024x1024, got {text!r}")
    return tuple(int(part) for part in text.lower().split("x"))


@dataclass(frozen=True)
class HostCase(Case):
    """One call. `caches`: "" for a call whose plan is kept; else the first of a process, one of CACHES.

    Nothing is rated.
    """

    op: ClassVar[str] = "host"
    rated: ClassVar[bool] = False
    hosted: ClassVar[bool] = True
    dense_flops: ClassVar[float] = 0.0

    call: str = options.choice("Calls", CALLS)
    sides: tuple[int, ...] = options.field(
        "1024x1024x1024", f"By call: {'; '.join(sorted(SIDES))}, as 64x1024x1024.", parse_sides
    )
    storage: str = options.choice("Of a layer's weight", STORAGES, usual="bsr")
    block: tuple[int, int] = options.block(usual=(128, 128))
    density: float = options.share(default="0.25", usual=0.25)
    dtype: str = options.dtype()
    caches: str = options.field(
        "", f"The first call of a new process, caches {' or '.join(CACHES)}.", usual=""
    )

    def check(self) -> None:
        wanted = self.measured
        if len(self.sides) != wanted.count(" x ") + 1 or min(self.sides) < 1:
            raise InvalidInput(f"{self.call} measures {wanted}, got {'x'.join(map(str, self.sides))}")
        if self.storage != "bsr" and self.call not in ("linear", LAYER):
            raise InvalidInput(f"{self.call} is measured of blocks, not of {self.storage}")
        if self.caches not in ("", *CACHES):
            raise InvalidInput(f"caches are {' or '.join(CACHES)} before a first call, got {self.caches!r}")

    @property
    def measured(self) -> str:
        """What the sides are, one of SIDES."""
        return CALLS[self.call].sides

    @property
    def is_first(self) -> bool:
        """Whether it is the first call of a process."""
        return self.caches != ""

    @property
    def module(self) -> str:
        """What is called, as a module of sparsek: the kernel of its records."""
        return CALLS["linear" if self.call == LAYER and self.storage != "bsr" else self.call].module

    @property
    def name(self) -> str:
        """One short line: "linear + bias + gelu, 64 tokens, 1024 to 1024, block 128 25 % bf16"."""
        what = {"linear": "linear + bias + gelu"}.get(self.call, self.call)
        first = f"first call, {self.caches} caches: " if self.is_first else ""
        size, block = SIDES[self.measured](*self.sides), block_name(self.block)
        blocks = f"block {block}" if self.measured == HEADED else stored_name(block, self.density)
        blocks = f"pages of {PAGE}" if self.measured == PAGED else blocks
        stored = (STORED[self.storage], "" if self.storage == "semi24" else blocks)
        return " ".join(filter(None, (f"{first}{what},", size, *stored, self.dtype)))

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """After a gate, interleaved samples of this library's call and torch's. Raises GateError for a wrong result."""
        if self.is_first:
            if is_hopper(device) and shipped.store() is None:
                why = "there is no machine code of these sources, which an installed package has: make cubins"
                return Outcome(self, (), {self.module: [why]}, {})
            return _first_calls(self, device, min(rounds, FIRST_ROUNDS), report)
        report("operands")
        # Of layers and of first calls, times are from an idle GPU to an idle GPU.
        until_idle, trains = self.call == LAYER, self.call.endswith("backward")
        made = CALLS[self.call].make(self, device)
        with torch.set_grad_enabled(trains):
            try:
                gate = passed(self, self.module, made.judge(made.ours()))
            except Unsupported as error:
                return Outcome(self, (), {self.module: [str(error)]}, {})
            report("samples")
            gc.collect()
            seen = Sensors(device)
            times = wall_rounds(
                {"ours": made.ours, TORCH: made.torchs},
                device,
                rounds * SAMPLES,
                count=None if until_idle else (CALLS_BACKWARD if trains else CALLS_EACH),
                until_idle=until_idle,
                on_sample=seen.sample,
            )
            ran = executed_by(made.ours)
        return _outcome(self, gate, times["ours"], {TORCH: times[TORCH]}, device, seen, ran)

    @property
    def bar(self) -> Bar | None:
        """How long it may take: over torch's time, or, of a first call, in seconds."""
        return BARS.get((self.call, self.caches or self.storage))


FIRST: tuple[HostCase, ...] = tuple(
    HostCase(call, sides, caches=caches)
    for caches in CACHES
    for call, sides in (
        ("from_dense", (4096, 4096)),
        ("A @ B", (4096, 4096, 4096)),
        ("linear + backward", (4096, 4096, 4096)),
        ("attention + backward", (8, 4096, 128)),
    )
)
BARS: Mapping[tuple[str, str], Bar] = {
    ("A @ B", "bsr"): Bar(TORCH, 1.6, 1.1),
    ("plan of A @ B", "bsr"): Bar(TORCH, 1.6, 1.1),
    **{("linear", storage): Bar(TORCH, 1.6, 1.1) for storage in STORAGES},
    ("attention", "bsr"): Bar(TORCH, 1.3, 0.9),
    ("attention_paged", "bsr"): Bar(TORCH, 1.5, 1.0),
    ("linear + backward", "bsr"): Bar(TORCH, 2.0, 1.3),
    (LAYER, "bsr"): Bar(TORCH, 0.75, 0.45),
    (LAYER, "semi24"): Bar(TORCH, 0.75, 0.6),
    **{
        (each.call, each.caches): Bar("", 0.5, 0.2) if each.caches == "empty" else Bar("", 0.2, 0.05)
        for each in FIRST
    },
}
# Calls of a sample, so few that the launch queue of CUDA, about a thousand, never makes the host wait; a call with its
# backward pass may be ten launches.
CALLS_EACH = 80
CALLS_BACKWARD = 40
# Samples for each round: they are short, and the host's time scatters more than the GPU's.
SAMPLES = 3
FIRST_ROUNDS = 2
CHILD = "sparsek_bench.suites.host_calls"
CHILD_SECONDS = 120
# What first calls import at the most.
IMPORTS = """
import sympy, triton.experimental.gluon.nvidia.hopper
from sparsek.engine import table as kernels
for _, name, *_ in kernels.rows():
    kernels.load(name)
"""
# By call, the folder of caches that its last process left behind.
_FILLED: dict[HostCase, TemporaryDirectory[str]] = {}


def _outcome(
    case: HostCase,
    gate: Gate,
    took: Times,
    peers: dict[str, Times],
    device: torch.device,
    seen: Sensors,
    ran: list[str],
) -> Outcome:
    per_ms = {name: PeerResult(times, 1 / times.median, {}) for name, times in peers.items()}
    more = beside(1 / took.median, per_ms, rated=False) | {"ran": ran}
    return Outcome(case, (record_of(case, Timed(case.module), took, gate, device, seen, **more),), {}, {})


def is_hopper(device: torch.device) -> bool:
    """Whether machine code ships for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == shipped.CAPABILITY


def _first_calls(case: HostCase, device: torch.device, rounds: int, report: Callable[[str], None]) -> Outcome:
    """Each sample is a process of its own: with empty caches in a new folder each, else after one that filled them,
    which may be a sample of the same call with empty ones. Python's bytecode is there, as after an installation.
    """
    call, empty, samples = replace(case, caches=""), case.caches == "empty", []
    seen = Sensors(device)
    while len(samples) < rounds:
        report(f"process {len(samples) + 1} of {rounds}")
        fills = empty or call not in _FILLED
        if fills:
            _drop_caches(call)
            _FILLED[call] = TemporaryDirectory(ignore_cleanup_errors=True)
        sample = _in_a_process(case, device, Path(_FILLED[call].name))
        if empty or not fills:
            samples.append(sample)
            seen.sample()
    ran = _in_a_process(case, device, Path(_FILLED[call].name), "named")["ran"]
    if not empty:
        _drop_caches(call)
    worst = max(samples, key=lambda each: each["error"])
    right = all(each["passed"] for each in samples)
    gate = passed(case, case.module, Gate(worst["error"], worst["budget"], right))
    times = Times.of([each["seconds"] * 1e3 for each in samples])
    return _outcome(case, gate, times, {}, device, seen, ran)


def _drop_caches(call: HostCase) -> None:
    if call in _FILLED:
        _FILLED.pop(call).cleanup()


@cache
def _bytecode() -> TemporaryDirectory[str]:
    """Where a process has left the bytecode of what first calls import."""
    made = TemporaryDirectory(ignore_cleanup_errors=True)
    _child(["-c", IMPORTS], env.with_caches_in(Path(made.name), Path(made.name)))
    return made


def _child(given: Sequence[str], where: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command, most = [sys.executable, *given], CHILD_SECONDS
    return subprocess.run(command, capture_output=True, text=True, timeout=most, check=False, env=where)


def _in_a_process(case: HostCase, device: torch.device, folder: Path, *named: str) -> dict[str, Any]:
    """Seconds and gate of the call, the first of a process whose caches are in `folder`; `named`: and what it ran."""
    given = ["-m", CHILD, json.dumps(case.as_record()), str(device), *named]
    ran = _child(given, env.with_caches_in(folder, Path(_bytecode().name)))
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        raise GateError(f"{case.name}: the process failed: {last[:300]}")
    return json.loads(ran.stdout.splitlines()[-1])


def _cells(record: Record) -> tuple[str, str, str, str]:
    """The time, torch's, the one over the other, and its limit and whether it is met; of first calls, which have no
    torch beside, seconds and their limit. The limits are a GPU's: none on a CPU.
    """
    case, ms, torchs = records.case_of(record), record["ms"]["median"], peer_ms(record, TORCH)
    bar = None if record["env"]["gpu"] == CPU.name else case.bar
    if case.is_first:
        return f"{ms / 1e3:.3g} s", "", "", f"{bar.must:g} s, {bar.verdict(ms / 1e3)}" if bar else ""
    if torchs is None:
        return f"{ms * 1e3:.1f} us", "", "", ""
    verdict, ratio = judged(bar, ms / torchs) if bar else ("", f"{ms / torchs:.2f}")
    return f"{ms * 1e3:.1f} us", f"{torchs * 1e3:.1f} us", ratio, f"{bar.must:g}, {verdict}" if bar else ""


SMALL = (1024, 1024, 1024)
HOST = rows(
    "auto",
    HostCase("A @ B", SMALL, block=(64, 64)),
    HostCase("plan of A @ B", SMALL, block=(64, 64)),
    *(HostCase("linear", (64, 1024, 1024), storage) for storage in STORAGES),
    HostCase("attention", (8, 512, 128)),
    HostCase("attention_paged", (4, 32, 1024, 128)),
    HostCase("linear + backward", (256, 1024, 1024)),
    *(HostCase(LAYER, (tokens, 4096, 14336)) for tokens in (1, 16, 64)),
    HostCase(LAYER, (16, 8192, 8192), "semi24"),
    *FIRST,
)


# What a call costs the host of a card, for the planner and `advise`: the record of this case.
EAGER: HostCase = HOST[0].case


def host_table(found: Sequence[Record]) -> str:
    """What `engine/plan/host.py` reads, by card, from the records: the host's seconds of a cached `A @ B`.
    "" without any.
    """
    newest = records.newest(each for each in found if each["op"] == HostCase.op)
    table = {
        row["env"]["gpu"]: {
            "seconds": round(row["ms"]["median"] / 1e3, 9),
            "case": case_name(row),
            "date": row["date"],
        }
        for row in newest
        if records.case_of(row) == EAGER
    }
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n" if table else ""


TABLE = Table(
    op="host",
    title="host time",
    headings={TORCH: "torch"},
    dense=(TORCH,),
    columns=(
        CASE,
        *(
            Column(heading, lambda record, at=at: _cells(record)[at])
            for at, heading in enumerate(("time", "torch's time", "over torch's", "target, at most"))
        ),
    ),
    note=(
        "Wall time of cached eager calls: how long one call keeps the host busy, or, for `layer`, one of twenty calls "
        "until the GPU is idle. torch runs the dense counterpart with the same bias and activation, FP8 rows in bf16, "
        "in the same rounds. In rows of first calls: the first of a new process, after the import, from an idle GPU to "
        "an idle GPU; empty caches hold no compiled kernel of Triton or SparseK. A target limits the time over "
        "torch's, or seconds."
    ),
    ratios=False,
)
BENCH = Bench(
    "host",
    suites={"host": HOST},
    kinds=(HostCase,),
    tables=(TABLE,),
    small="--call linear --sides 16x64x64 --block 32 --dtype fp32",
    kernels="",
    whole="host",
    slowest=60.0,
    files={"sparsek/engine/plan/host.json": host_table},
)
