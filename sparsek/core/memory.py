"""How much memory a call takes, running out of it, for which NumPy and torch have different errors, and sharing it."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# torch raises a plain RuntimeError when the CPU has no more memory: on Linux, and on Windows or macOS.
TORCH_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?(\d+) bytes", re.S
)

WORDS = 4  # int32 in 16 bytes: Triton compiles anew for pointers that are not aligned to that


def carved(shapes: Sequence[int | tuple[int, ...] | None], device: torch.device) -> tuple[Tensor, list[Any]]:
    """One int32 allocation, and contiguous views of it in these shapes, aligned to 16 bytes; a number is a shape [n].

    None stays None. The memory is not cleared. One allocation and one operator make all of one dim, which saves the
    host some microseconds for each, and a recorded call may contain them.
    """
    spans = []
    for shape in shapes:
        size = shape if isinstance(shape, int) else math.prod(shape) if shape is not None else 0
        spans += (size, -size % WORDS)
    spans += () if any(spans) else (0, WORDS)  # so that there is an address
    base = torch.empty(sum(spans), dtype=torch.int32, device=device)
    views = [
        piece if isinstance(shape, int) else None if shape is None else piece.view(shape)
        for shape, piece in zip(shapes, base.split_with_sizes(spans)[::2], strict=False)
    ]
    return base, views


def out_of_memory(error: BaseException) -> str | None:
    """One line with the memory that was missing and where, or None if `error` is another."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory on the GPU: " + text.split(". GPU ")[0].splitlines()[0]
    if isinstance(error, MemoryError):
        return f"out of memory: {text.splitlines()[0]}" if text else "out of memory"
    found = TORCH_CPU.search(text) if isinstance(error, RuntimeError) else None
    return f"out of memory: tried to allocate {gigabytes(int(found[1]))}" if found else None


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that torch held at once during one call, beyond what it held before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def gigabytes(count: float) -> str:
    """12.8e9 -> "12.8 GB"."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
