"""Base classes that kernels share: configs, kernels with one config, and kernels for CPU tensors."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from sparsek.core.device import has_bf16_units
from sparsek.core.errors import InvalidInput


class KernelConfig:
    """Base of the configs of kernels, which are frozen dataclasses.

    The text of a config distinguishes it from all others: `explain()` prints it, `plan_*` takes it, and Triton caches
    compiled kernels by it. With repr=False it consists of `texts`. SIDES of a tile of KERNEL are powers of two.
    """

    SIDES: ClassVar[tuple[str, ...]] = ()
    KERNEL: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in self.SIDES:
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise InvalidInput(f"{name} of {self.KERNEL} must be a power of two from 16 up, not {size}")

    @property
    def texts(self) -> list[str]:
        """The parts of the text; empty ones are left out."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return ", ".join(filter(None, self.texts))

    def true_names(self, *names: str) -> list[str]:
        """Those that are true."""
        return [name for name in names if getattr(self, name)]

    def true_values(self, *names: str) -> list[str]:
        """Those that are true, with their values."""
        return [f"{name} {getattr(self, name)}" for name in self.true_names(*names)]


def source_of(*files: str | None) -> str:
    """A constant for Triton's cache key, which covers the text of device functions and of constants, but not what a
    config computes from its fields, or what builtins do: the sources of these files.
    """
    return sha256(b"".join(Path(str(each)).read_bytes() for each in files)).hexdigest()[:16]


@dataclass(frozen=True)
class Fixed:
    """A config without choices. `text` describes what the kernel does."""

    text: str

    def __repr__(self) -> str:
        return self.text


class FixedKernel:
    """A kernel with one config and no preparation: a reference, or a vendor library.

    `storages`: the storage kinds it multiplies; () outside spmm.
    """

    config: Fixed
    storages: tuple[str, ...] = ()

    def why_not(self, p: Any) -> list[str]:
        return p.a.unless(*self.storages) if self.storages else []

    def default(self, p: Any) -> Fixed:
        return self.config

    def configs(self, p: Any) -> list[Fixed]:
        return [self.config]

    def prepare(self, p: Any, c: Fixed, source: Any) -> Any:
        return None


def wide_size(p: Any) -> int:
    """Bytes of one element in float32, or in float64 for float64 problems."""
    return 8 if p.dtype == "fp64" else 4


def wide_seconds(p: Any, flops: float, moved: float, calls: float) -> float:
    """Predicted seconds of `flops` in float32 or float64, of the bytes moved and of the torch calls, one after
    another.
    """
    rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
    return flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds


@dataclass(frozen=True)
class CpuConfig:
    """`step_bytes`: the most bytes that one step gathers and packs. `wide`: multiply 16-bit inputs as float32."""

    step_bytes: int = 1 << 21
    wide: bool = False

    def __repr__(self) -> str:
        return f"steps of {self.step_bytes >> 10} KiB{', in float32' if self.wide else ''}"


class CpuKernel:
    """A kernel in batched torch that works in cache-sized steps. Never chosen for CUDA tensors.

    `storages`: the storage kinds it multiplies; () outside spmm.
    """

    storages: tuple[str, ...] = ()

    def why_not(self, p: Any) -> list[str]:
        foreign = p.a.unless(*self.storages) if self.storages else []
        return foreign or ([] if p.on_cpu else ["runs on CPU tensors only"])

    def default(self, p: Any) -> Any:
        return CpuConfig(wide=goes_wide(p))

    def configs(self, p: Any) -> list[Any]:
        widths = (False, True) if p.dtype in ("bf16", "fp16") else (False,)
        return [CpuConfig(1 << shift, each) for each in widths for shift in (19, 20, 21, 22)]


def goes_wide(p: Any) -> bool:
    """Whether this processor runs `p` faster in float32."""
    return p.dtype == "fp16" or (p.dtype == "bf16" and not has_bf16_units())
