"""The kernels, in order of preference: one line each. A module loads on first use, so importing this costs nothing."""

from importlib import import_module
from typing import Any

from sparsek.core.errors import InvalidInput

KERNELS: tuple[tuple[str, str], ...] = (
    ("spmm", "hopper.spmm"),
    ("spmm", "portable.spmm"),
    ("spmm", "portable.spmm_skinny"),
    ("spmm", "vendor.dense"),
    ("spmm", "cpu.spmm"),
    ("spmm", "reference.spmm"),
    ("semi24", "hopper.semi24"),
    ("semi24", "portable.semi24"),
    ("semi24", "vendor.cusparselt"),
    ("semi24", "cpu.semi24"),
    ("semi24", "reference.semi24"),
    ("bsr24", "hopper.bsr24"),
    ("bsr24", "portable.bsr24"),
    ("bsr24", "cpu.bsr24"),
    ("bsr24", "reference.bsr24"),
    ("spmm_fp8", "hopper.spmm_fp8"),
    ("spmm_fp8", "portable.spmm_fp8"),
    ("spmm_fp8", "vendor.cublas_fp8"),
    ("spmm_fp8", "cpu.spmm_fp8"),
    ("spmm_fp8", "reference.spmm_fp8"),
    ("semi24_fp8", "hopper.semi24_fp8"),
    ("semi24_fp8", "portable.semi24_fp8"),
    ("semi24_fp8", "vendor.cublas_fp8"),
    ("semi24_fp8", "cpu.spmm_fp8"),
    ("semi24_fp8", "reference.spmm_fp8"),
    ("bsr24_fp8", "hopper.bsr24_fp8"),
    ("bsr24_fp8", "portable.bsr24_fp8"),
    ("bsr24_fp8", "vendor.cublas_fp8"),
    ("bsr24_fp8", "cpu.spmm_fp8"),
    ("bsr24_fp8", "reference.spmm_fp8"),
    ("sddmm", "hopper.sddmm"),
    ("sddmm", "portable.sddmm"),
    ("sddmm", "vendor.sddmm"),
    ("sddmm", "cpu.sddmm"),
    ("sddmm", "reference.sddmm"),
    ("spgemm", "hopper.spgemm"),
    ("spgemm", "portable.spgemm"),
    ("spgemm", "vendor.spgemm"),
    ("spgemm", "cpu.spgemm"),
    ("spgemm", "reference.spgemm"),
    ("attention", "hopper.attention_fwd"),
    ("attention", "portable.attention_fwd"),
    ("attention", "cpu.attention"),
    ("attention", "reference.attention"),
    ("attention_backward", "hopper.attention_bwd"),
    ("attention_backward", "portable.attention_bwd"),
    ("attention_backward", "cpu.attention_bwd"),
    ("attention_backward", "reference.attention_bwd"),
)


def load(name: str) -> Any:
    """The kernel called `name` ("hopper.spmm"). Raises InvalidInput for a name that is not in the table."""
    if name not in (known for _, known in KERNELS):
        raise InvalidInput(f"no kernel is called {name!r}; known: {', '.join(known for _, known in KERNELS)}")
    return import_module(f"sparsek.kernels.{name}").KERNEL


def names_for(op: str) -> tuple[str, ...]:
    """Names of the kernels of one operation, in order of preference."""
    return tuple(name for kind, name in KERNELS if kind == op)
