"""Facts about the device a problem runs on. The only module that asks torch.cuda about hardware.

The H200's bandwidth and its fp8, bf16 and fp16 rates are measured (docs/lab-notes.md); `Card.measured` says which
rates are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from sparsek.core.arguments import told
from sparsek.core.errors import InvalidInput


@dataclass(frozen=True)
class Card:
    """One kind of device. Bandwidths in bytes per second, rates in 1e12 FLOP per second, memory in bytes.

    `measured` names the dtypes whose rates were measured on the card. The others are guesses: for cards other than the
    H200 its rates, scaled by the number of SMs.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "tflops", MappingProxyType(dict(self.tflops)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its fields; Python pickles and copies no mapping that is read-only."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return Card, tuple({**parts, "tflops": dict(self.tflops)}.values())

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


# bandwidth: device-to-device copy, read + written. fabric: L2 to shared memory, fitted to hopper.spmm on blocks of
# 16 to 128 (2026-11-20). tflops: cuBLAS 8192^3 once power limits bite,
# fp8 with sums in float32.
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
)
# Two laptop cores: orders of magnitude only, used to rank the CPU kernels against each other.
CPU = Card(
    name="cpu",
    capability=(0, 0),
    sm_count=1,
    smem_bytes=0,
    l2_bytes=1 << 20,
    memory_bytes=8 << 30,
    bandwidth=2e10,
    fabric=2e10,
    tflops={"fp8": 0.05, "bf16": 0.05, "fp16": 0.05, "tf32": 0.1, "fp32": 0.1, "fp64": 0.05},
    launch_seconds=2e-5,
)
CARDS: Mapping[str, Card] = MappingProxyType({"h200": H200, "cpu": CPU})


def card_named(name: str | torch.device) -> Card:
    """The card of a short name ("h200"). Raises InvalidInput for a name without measured facts."""
    name = str(name) if isinstance(name, torch.device) else name
    key = name.lower() if isinstance(name, str) else ""
    if key not in CARDS:
        why = f"no measured facts for a card named {told(name)}; known: {', '.join(CARDS)}"
        if key.startswith("cuda"):
            why += ". A plan for a GPU that is there follows from operands on it; leave the device out"
            why += "" if torch.cuda.is_available() else ". There is no GPU here"
        raise InvalidInput(why)
    return CARDS[key]


def card_of(device: torch.device) -> Card:
    """The card behind a torch device. Cards without measured facts get the H200's, scaled by SM count."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise InvalidInput(f"device {device} is not supported; use a CUDA device or the CPU")
    return _cuda_card(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_card(index: int) -> Card:
    facts = torch.cuda.get_device_properties(index)
    if facts.name == H200.name:
        return H200
    share = facts.multi_processor_count / H200.sm_count
    return replace(
        H200,
        name=facts.name,
        capability=(facts.major, facts.minor),
        sm_count=facts.multi_processor_count,
        smem_bytes=getattr(facts, "shared_memory_per_block_optin", 101376),
        l2_bytes=facts.L2_cache_size,
        memory_bytes=facts.total_memory,
        bandwidth=H200.bandwidth * share,
        fabric=H200.fabric * share,
        tflops={name: rate * share for name, rate in H200.tflops.items()},
        measured=frozenset(),
    )
