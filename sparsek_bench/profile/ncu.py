"""Hardware counters of one call by Nsight Compute: its command line, its CSV, and what bounds the call.

ncu prints `--page raw --csv` as a row of names, a row of units, and a row for each launch
(https://docs.nvidia.com/nsight-compute/NsightComputeCli). `--profile-from-start off` leaves out everything before
`torch.cuda.profiler.start()`, `--clock-control none` leaves the clocks as they are in use. ncu flushes the caches
before each launch.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsek.core.device import Card
from sparsek.engine.plan.plan import time_text

SECONDS = "gpu__time_duration.sum"
L2_TO_SM = "l1tex__m_xbar2l1tex_read_bytes.sum"
L2 = "lts__t_bytes.sum"
DRAM = "dram__bytes.sum"
# The first that a card has. Hopper counts wgmma in both.
TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
)
METRICS = (SECONDS, *TENSOR, L2_TO_SM, L2, DRAM)
# Holds the stalls below by the names that the card has.
SECTION = "WarpStateStats"
STALL = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
NO_STALL = ("selected", "not_selected")
UNITS = {
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "%": 0.01,
}
# Below this share of its peak a unit does not bound a kernel.
BUSY = 0.5


def command(program: str, log: Path, child: Sequence[str], without: Iterable[str] = ()) -> list[str]:
    """ncu on a child process. `without`: metrics that ncu has refused."""
    wanted = ",".join(name for name in METRICS if name not in set(without))
    options = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    options += ["--clock-control", "none", "--profile-from-start", "off"]
    options += ["--section", SECTION, "--metrics", wanted]
    return [program, *options, *child]


@dataclass(frozen=True)
class LaunchCounters:
    """The counters of one launch, in seconds, bytes, and shares from 0 to 1."""

    kernel: str
    counters: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.counters.get(SECONDS, 0.0)

    @property
    def tensor(self) -> float | None:
        """The share of cycles in which the tensor pipe was active."""
        return next((self.counters[name] for name in TENSOR if name in self.counters), None)

    @property
    def stalls(self) -> dict[str, float]:
        """Mean number of warps that wait for a reason at each issue, by reason."""
        before, after = STALL
        found = {
            name[len(before) : -len(after)]: value
            for name, value in self.counters.items()
            if name.startswith(before) and name.endswith(after)
        }
        return {reason: value for reason, value in found.items() if reason not in NO_STALL}


def parse(text: str) -> list[LaunchCounters]:
    """The launches of ncu's CSV. Lines of ncu itself, "==PROF== ...", and of the program are passed over."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    if len(rows) < 3:
        return []
    names, units, *launches = rows
    at_name = names.index("Kernel Name")
    found = []
    for row in launches:
        values = {
            name: value * UNITS.get(unit, 1.0)
            for name, unit, cell in zip(names, units, row, strict=False)
            if "__" in name and (value := _number(cell)) is not None
        }
        found.append(LaunchCounters(row[at_name], values))
    return found


def _number(cell: str) -> float | None:
    """ "1,234.5" -> 1234.5; None for "n/a"."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def refusal(text: str) -> str:
    """The first error that ncu printed; "" without one."""
    marks = "==ERROR== "
    return next((line[len(marks) :].strip() for line in text.splitlines() if line.startswith(marks)), "")


@dataclass(frozen=True)
class CallCounters:
    """The counters of a call, over all its launches.

    `seconds` under ncu, with cold caches. `tensor`: share of cycles in which the tensor pipe was active. Bytes moved
    from L2 to the SMs, through L2, and to and from DRAM. `stalls`: mean warps that wait at each issue, by reason. Means
    are weighted by time. None: the card has no such counter.
    """

    seconds: float
    tensor: float | None
    l2_to_sm: float | None
    l2: float | None
    dram: float | None
    stalls: Mapping[str, float]
    launches: tuple[LaunchCounters, ...]

    @classmethod
    def of(cls, launches: Sequence[LaunchCounters]) -> "CallCounters":
        seconds = sum(each.seconds for each in launches) or 1e-12
        tensor = [each for each in launches if each.tensor is not None]
        reasons = dict.fromkeys(reason for each in launches for reason in each.stalls)
        return cls(
            seconds,
            sum((each.tensor or 0.0) * each.seconds for each in tensor) / seconds if tensor else None,
            _total(launches, L2_TO_SM),
            _total(launches, L2),
            _total(launches, DRAM),
            {
                reason: sum(each.stalls.get(reason, 0.0) * each.seconds for each in launches) / seconds
                for reason in reasons
            },
            tuple(launches),
        )

    def shares(self, card: Card) -> dict[str, float]:
        """How busy each unit was, from 0 to 1: of its peak, or of the rate that plans assume for the card."""
        found: dict[str, float] = {}
        if self.tensor is not None:
            found["the tensor pipe"] = self.tensor
        if self.l2_to_sm is not None:
            found["L2 to SM"] = self.l2_to_sm / self.seconds / card.fabric
        if self.dram is not None:
            found["DRAM"] = self.dram / self.seconds / card.bandwidth
        return found

    def bound_by(self, card: Card) -> str:
        """The busiest unit, or "latency" where none is half busy."""
        shares = self.shares(card)
        busiest = max(shares, key=lambda name: shares[name], default="")
        return busiest if busiest and shares[busiest] >= BUSY else "latency"

    def sentence(self, card: Card) -> str:
        """What the counters say, in words."""
        parts = []
        shares = self.shares(card)
        if self.tensor is not None:
            parts.append(f"the tensor pipe is active in {self.tensor * 100:.0f} % of the cycles")
        for name, moved in (("L2 to SM", self.l2_to_sm), ("DRAM", self.dram)):
            if moved is not None:
                parts.append(
                    f"{name} moves {moved / 1e6:.4g} MB at {moved / self.seconds / 1e12:.3g} TB/s "
                    f"({shares[name] * 100:.0f} % of the card's rate)"
                )
        worst = sorted(self.stalls, key=lambda reason: -self.stalls[reason])[:3]
        stalls = ", ".join(f"{reason.replace('_', ' ')} {self.stalls[reason]:.2f}" for reason in worst)
        waits = f" Warps that wait at each issue: {stalls}." if stalls else ""
        return (
            f"Counters: {time_text(self.seconds)} with cold caches; {'; '.join(parts)}.{waits} "
            f"Bound by {self.bound_by(card)}."
        )

    def as_json(self, card: Card) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tensor_pipe": self.tensor,
            "l2_to_sm_bytes": self.l2_to_sm,
            "l2_bytes": self.l2,
            "dram_bytes": self.dram,
            "stalls": self.stalls,
            "bound_by": self.bound_by(card),
            "launches": [{"kernel": each.kernel, **each.counters} for each in self.launches],
        }


def _total(launches: Sequence[LaunchCounters], name: str) -> float | None:
    found = [each.counters[name] for each in launches if name in each.counters]
    return sum(found) if found else None
