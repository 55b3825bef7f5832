"""How much memory a call takes, running out of it, for which NumPy and torch have different errors, and sharing it."""

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from sparsek.core.errors import InvalidFile

# torch raises a plain RuntimeError when the CPU has no more memory: on Linux, and on Windows or macOS.
TORCH_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?(\d+) bytes", re.S
)

# Control groups of version 2 and 1: where they are, their controller, and the files of the limit and of what is used.
CGROUPS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)

SMALL = 2**20  # bytes
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


def check_free(where: object, what: str, takes: int, form: str = "") -> None:
    """Raise InvalidFile unless `takes` bytes are free. A megabyte always is: asking the system takes a millisecond."""
    if takes <= SMALL:
        return
    free = available_memory()
    if free is not None and takes > free:
        raise InvalidFile(
            f"{where}: {what} takes {takes / 1e9:.3g} GB{form}; {free / 1e9:.3g} GB of memory are free"
        )


def trim() -> None:
    """Give memory that is free in the heap back to the system, where the C library can: tensors of some megabytes are
    in there, and leave gaps.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int | None:
    """Return the memory in bytes that this process can still take: on macOS, which does not report it, all memory; on
    Windows None. Limits of a container, and of the process by RLIMIT_AS, count.
    """
    about = _read("/proc/meminfo")
    found = re.search(r"^MemAvailable: *(\d+) kB", about, re.MULTILINE)
    if not about:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return max(0, min([int(found[1]) * 1024] * bool(found) + list(_limits()))) if found else None


def _limits() -> Iterator[int]:
    """What the limits of this process leave: of its address space, and of its control groups and those above them."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _read("/proc/self/statm").split()
    if most != resource.RLIM_INFINITY and pages:
        yield most - int(pages[0]) * resource.getpagesize()
    own = [line.split(":", 2)[1:] for line in _read("/proc/self/cgroup").splitlines() if line.count(":") > 1]
    for root, controller, limit, used in CGROUPS:
        paths = [PurePosixPath(path) for names, path in own if controller in names.split(",")]
        above = [each for path in paths for each in path.parents]
        for group in dict.fromkeys([*paths, *above, PurePosixPath("/")]):
            folder = f"{root}{group}".rstrip("/")
            numbers = [_read(f"{folder}/{name}").strip() for name in (limit, used)]
            if all(each.isdigit() for each in numbers):  # "max": no limit
                kept = re.search(
                    r"^(?:total_)?inactive_file (\d+)", _read(f"{folder}/memory.stat"), re.MULTILINE
                )
                yield int(numbers[0]) - int(numbers[1]) + (int(kept[1]) if kept else 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def gigabytes(count: float) -> str:
    """12.8e9 -> "12.8 GB"."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether both have the same elements at the same addresses."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the spans of memory from the first to the last element of each meet."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(x: Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.element_size()
