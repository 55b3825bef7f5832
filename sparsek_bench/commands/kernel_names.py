"""Which benchmark measures a kernel, and with which options the kernel runs."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sparsek.engine.table import refuse_removed, rows

# The operation of a benchmark's kernels in their table, and how their storage ends.
OF_BENCH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "spmm": ("spmm", ("bsr",)),
    "semi24": ("spmm", ("24",)),
    "fp8": ("spmm", ("fp8",)),
    "linear": ("spmm", ("bsr",)),
    "sddmm": ("sddmm", ("",)),
    "spgemm": ("spgemm", ("",)),
    "attention": ("attention", ("",)),
    "attention-fp8": ("attention_fp8", ("",)),
    "attention-backward": ("attention_backward", ("",)),
    "serving": ("attention_paged", ("",)),
}
# What a kernel's storage needs beside the defaults of its benchmark.
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "bsr24": {"block": "128", "density": "0.125"},
    "semi24_fp8": {"stored": "semi24"},
    "bsr24_fp8": {"stored": "bsr24"},
}


class KernelDefaults(NamedTuple):
    """A kernel: the benchmark that measures it, and other defaults of its options."""

    bench: str
    defaults: Mapping[str, str]


def kernels_of(bench: str) -> dict[str, KernelDefaults]:
    """The kernels that a benchmark measures, by name."""
    return {name: KernelDefaults(bench, DEFAULTS.get(kind, {})) for name, kind in _rows(bench)}


def kernel_named(name: str, known: tuple[str, ...] = ()) -> KernelDefaults | None:
    """The kernel of that name; None for others. Raises Unsupported for a removed one, with one of `known` instead."""
    refuse_removed(name, known)
    return next((found[name] for bench in OF_BENCH if name in (found := kernels_of(bench))), None)


def _rows(bench: str) -> Iterator[tuple[str, str]]:
    op, ends = OF_BENCH.get(bench, ("", ()))
    return ((name, kind) for each, name, _, kind in rows() if each == op and kind.endswith(ends))
