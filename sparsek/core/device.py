"""Facts about the device of a problem. The only module that queries torch.cuda about hardware.

The H200's bandwidth and its fp8, bf16 and fp16 rates are measured (docs/notes/cards.md). Those of other Hopper cards
are from NVIDIA's data sheets, dense and at boost clocks; their bandwidths are what a copy reaches if it reaches the
share of the peak that it does on an H200. Cards without a data sheet here get rates derived from their SMs, clocks and
memory bus. `Card.measured` and `Card.source` give the origin.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput


@dataclass(frozen=True)
class Card:
    """One kind of device. Bandwidths in bytes per second, rates in 1e12 dense FLOP per second, memory in bytes.

    `bandwidth` is that of a copy, read and written; `fabric` that from L2 to shared memory.

    `measured` names the dtypes whose rates were measured on the card; if any, the bandwidth was measured too.
    `source`: origin of the other rates; "" for guesses. `watts`: the power limit; 0 if unknown.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    fabric: float
    tflops: Mapping[str, float] = field(hash=False)
    launch_seconds: float = 4e-6
    measured: frozenset[str] = frozenset()
    source: str = ""
    watts: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tflops", MappingProxyType(dict(self.tflops)))

    def __reduce__(self) -> tuple[Any, ...]:
        """By its fields; Python cannot pickle or copy a read-only mapping."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return Card, tuple({**parts, "tflops": dict(self.tflops)}.values())

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def caveat(self, rate: str) -> str:
        """A caveat about times that were predicted with the rate of this name; "" if it was measured."""
        if rate in self.measured:
            return ""
        origin = f"from {self.source}" if self.source else "guessed for this card and dtype"
        return f"{origin}, not measured: rely on the ranking of kernels, not on the times"

    def sustained(self, rate: str) -> float:
        """The rate that a long dense product sustains, in 1e12 FLOP per second, for the models of kernels.

        Measured, or guessed. For a peak rate it is the share that the H200 sustains of its own peak.
        """
        peak = self.tflops[rate]
        return peak * H200.tflops[rate] / H200_PEAKS[rate] if self.source else peak

    @property
    def pace(self) -> float:
        """The bf16 rate of an SM over that of an H200, to which the models of Hopper kernels are fitted."""
        peak = self.sm_count * H200_PEAKS["bf16"] / H200.sm_count
        return self.tflops["bf16"] / peak if self.source else 1.0


# bandwidth: device-to-device copy, read + written. fabric: L2 to shared memory, fitted to hopper.spmm on blocks of 16
# to 128 (2026-11-20). tflops: cuBLAS 8192^3 at the power limit, fp8 with sums in float32.
H200 = Card(
    name="NVIDIA H200",
    capability=(9, 0),
    sm_count=132,
    smem_bytes=232448,
    l2_bytes=60 << 20,
    memory_bytes=139 << 30,
    bandwidth=4.28e12,
    fabric=10.8e12,
    tflops={"fp8": 1200.0, "bf16": 690.0, "fp16": 680.0, "tf32": 350.0, "fp32": 50.0, "fp64": 60.0},
    measured=frozenset(("fp8", "bf16", "fp16")),
    watts=700,
)
SHEET = "NVIDIA's data sheet"
REPORTED = "the SMs, clocks and memory bus that the driver reports"
# Of the data sheet's bandwidth, what a copy reaches.
COPY_SHARE = H200.bandwidth / 4.8e12
# That of the H100 SXM, which has the same chip.
H200_PEAKS = {"fp8": 1978.9, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}


# Of the H200's rate from L2 to shared memory, that of a chip with 50 of the 60 MB of L2: fitted to the 50 layers
# "models" of op planner (H100, 2026-11-26).
FEWER_SLICES = 0.92


def fabric_of(sm_count: int, l2_bytes: int) -> float:
    """Bytes per second from L2 to shared memory, which no data sheet gives: by the SMs, or the slices of L2."""
    slices = 1.0 if l2_bytes >= H200.l2_bytes else FEWER_SLICES
    return H200.fabric * min(sm_count / H200.sm_count, slices)


def _by_data_sheet(
    name: str, sm_count: int, memory: int, l2: int, bandwidth: float, watts: int, **tflops: float
) -> Card:
    """A Hopper card. `memory` in GiB as torch reports it, `l2` in MiB, `bandwidth` in TB/s. Omitted rates are an
    H200's peaks.
    """
    return Card(
        name=name,
        capability=(9, 0),
        sm_count=sm_count,
        smem_bytes=H200.smem_bytes,
        l2_bytes=l2 << 20,
        memory_bytes=memory << 30,
        bandwidth=COPY_SHARE * bandwidth * 1e12,
        fabric=fabric_of(sm_count, l2 << 20),
        tflops={**H200_PEAKS, **tflops},
        source=SHEET,
        watts=watts,
    )


# Names as torch reports them. A GH200's watts are the module's, with its CPU.
H100 = _by_data_sheet("NVIDIA H100 80GB HBM3", 132, 79, 50, 3.35, 700)
H100_PCIE = _by_data_sheet(
    "NVIDIA H100 PCIe", 114, 79, 50, 2.0, 350, fp8=1513, bf16=756, fp16=756, tf32=378, fp32=51, fp64=51
)
NVL_PEAKS = {"fp8": 1670.5, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0}
H100_NVL = _by_data_sheet("NVIDIA H100 NVL", 132, 93, 50, 3.9, 400, **NVL_PEAKS)
H200_NVL = _by_data_sheet("NVIDIA H200 NVL", 132, 139, 60, 4.8, 600, **NVL_PEAKS)
GH200 = _by_data_sheet("NVIDIA GH200 480GB", 132, 95, 60, 4.0, 1000)
GH200_144GB = _by_data_sheet("NVIDIA GH200 144G HBM3e", 132, 139, 60, 4.9, 1000)
H800 = _by_data_sheet("NVIDIA H800", 132, 79, 50, 3.35, 700, fp64=1)
H20 = _by_data_sheet(
    "NVIDIA H20", 78, 95, 60, 4.0, 400, fp8=296, bf16=148, fp16=148, tf32=74, fp32=44, fp64=1
)


def has_bf16_units() -> bool:
    """Whether this processor multiplies bf16 by instructions of its own."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# How much faster AVX-512 BF16 is than float32: measured on an EPYC core, 2026-11-21. AMX on two cores of a Xeon: 6 to
# 10 times, 2026-11-23.
UNITS_OVER_FP32 = 4
CPU_TFLOPS = 0.1
# Two laptop cores: orders of magnitude only, used to rank the CPU kernels against each other. They multiply fp16 and
# fp8 in float32, and bf16 too without units for it.
CPU = Card(
    name="cpu",
    capability=(0, 0),
    sm_count=1,
    smem_bytes=0,
    l2_bytes=1 << 20,
    memory_bytes=8 << 30,
    bandwidth=2e10,
    fabric=2e10,
    tflops={
        **dict.fromkeys(("fp8", "fp16", "tf32", "fp32"), CPU_TFLOPS),
        "bf16": CPU_TFLOPS * (UNITS_OVER_FP32 if has_bf16_units() else 1),
        "fp64": CPU_TFLOPS / 2,
    },
    launch_seconds=2e-5,
)
CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "h200": H200,
        "h200-nvl": H200_NVL,
        "h100": H100,
        "h100-pcie": H100_PCIE,
        "h100-nvl": H100_NVL,
        "gh200": GH200,
        "gh200-144gb": GH200_144GB,
        "h800": H800,
        "h20": H20,
        "cpu": CPU,
    }
)
GPUS = tuple(name for name in CARDS if name != "cpu")  # their short names
# Dense bf16 FLOPs of an SM's tensor cores per cycle, by compute capability; otherwise by its major number alone.
TENSOR_FLOPS = {(8, 0): 2048, (8,): 1024, (9,): 4096, (10,): 8192}
OLDER_FLOPS = 512
CLOCK, MEMORY_CLOCK, BUS = 1.5e9, 1e9, 2048  # Hz and bits, where the driver reports none


def card_named(name: str | torch.device) -> Card:
    """The card of a short name ("h200", "h100-pcie"). Raises InvalidInput for a name without facts."""
    name = str(name) if isinstance(name, torch.device) else name
    key = name.lower() if isinstance(name, str) else ""
    if key not in CARDS:
        why = f"no facts about a card named {shown(name)}; known: {', '.join(CARDS)}"
        if key.startswith("cuda"):
            why += ". To plan for this machine's GPU, pass operands on it and omit device"
            why += "" if torch.cuda.is_available() else ". There is no GPU here"
        raise InvalidInput(why)
    return CARDS[key]


def card_of(device: torch.device) -> Card:
    """The card of a torch device. A card without facts here, or a MIG slice of one, gets rates derived from what the
    driver reports.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise InvalidInput(f"device {device} is not supported; use a CUDA device or the CPU")
    return _cuda_card(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_card(index: int) -> Card:
    facts = torch.cuda.get_device_properties(index)
    if facts.name == GH200.name and facts.total_memory > GH200_144GB.memory_bytes * 0.9:
        return GH200_144GB
    identity = facts.name, facts.multi_processor_count
    known = (card for card in CARDS.values() if (card.name, card.sm_count) == identity)
    return next(known, None) or _reported(facts)


def _reported(facts: Any) -> Card:
    """A card known only from the driver's report: peaks at its highest clocks, rates of other dtypes relative to bf16
    as on an H200. A MIG slice has its own SMs, but reports the bus of the whole card.
    """
    sms, capability = facts.multi_processor_count, (facts.major, facts.minor)
    clock = 1e3 * getattr(facts, "clock_rate", 0) or CLOCK
    per_cycle = TENSOR_FLOPS.get(capability) or TENSOR_FLOPS.get(capability[:1], OLDER_FLOPS)
    bf16 = sms * per_cycle * clock / 1e12
    # Two transfers per cycle.
    memory = 2e3 * getattr(facts, "memory_clock_rate", 0) or 2 * MEMORY_CLOCK
    return Card(
        name=facts.name,
        capability=capability,
        sm_count=sms,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", 101376),
        l2_bytes=facts.L2_cache_size,
        memory_bytes=facts.total_memory,
        bandwidth=COPY_SHARE * memory * (getattr(facts, "memory_bus_width", 0) or BUS) / 8,
        fabric=fabric_of(sms, facts.L2_cache_size),
        tflops={name: bf16 * peak / H200_PEAKS["bf16"] for name, peak in H200_PEAKS.items()},
        source=REPORTED,
    )
