"""The kernels, in order of preference: one line each. A module loads on first use, so importing this costs nothing."""

from importlib import import_module
from typing import Any

from sparsek.core.errors import InvalidInput

# Operation, name, module.
KERNELS: tuple[tuple[str, str, str], ...] = (
    ("spmm", "hopper.spmm", "spmm.hopper"),
    ("spmm", "portable.spmm", "spmm.portable"),
    ("spmm", "portable.spmm_skinny", "spmm.portable_skinny"),
    ("spmm", "vendor.dense", "spmm.vendor_dense"),
    ("spmm", "cpu.spmm", "spmm.cpu"),
    ("spmm", "reference.spmm", "spmm.reference"),
    ("semi24", "hopper.semi24", "spmm.hopper_24"),
    ("semi24", "portable.semi24", "spmm.portable_24"),
    ("semi24", "vendor.cusparselt", "spmm.vendor_cusparselt"),
    ("semi24", "cpu.semi24", "spmm.cpu_24"),
    ("semi24", "reference.semi24", "spmm.reference_24"),
    ("bsr24", "hopper.bsr24", "spmm.hopper_bsr24"),
    ("bsr24", "portable.bsr24", "spmm.portable_bsr24"),
    ("bsr24", "cpu.bsr24", "spmm.cpu_bsr24"),
    ("bsr24", "reference.bsr24", "spmm.reference_bsr24"),
    ("spmm_fp8", "hopper.spmm_fp8", "spmm.hopper_fp8"),
    ("spmm_fp8", "portable.spmm_fp8", "spmm.portable_fp8"),
    ("spmm_fp8", "vendor.cublas_fp8", "spmm.vendor_cublas_fp8"),
    ("spmm_fp8", "cpu.spmm_fp8", "spmm.cpu_fp8"),
    ("spmm_fp8", "reference.spmm_fp8", "spmm.reference_fp8"),
    ("semi24_fp8", "hopper.semi24_fp8", "spmm.hopper_24_fp8"),
    ("semi24_fp8", "portable.semi24_fp8", "spmm.portable_24_fp8"),
    ("semi24_fp8", "vendor.cublas_fp8", "spmm.vendor_cublas_fp8"),
    ("semi24_fp8", "cpu.spmm_fp8", "spmm.cpu_fp8"),
    ("semi24_fp8", "reference.spmm_fp8", "spmm.reference_fp8"),
    ("bsr24_fp8", "hopper.bsr24_fp8", "spmm.hopper_bsr24_fp8"),
    ("bsr24_fp8", "portable.bsr24_fp8", "spmm.portable_bsr24_fp8"),
    ("bsr24_fp8", "vendor.cublas_fp8", "spmm.vendor_cublas_fp8"),
    ("bsr24_fp8", "cpu.spmm_fp8", "spmm.cpu_fp8"),
    ("bsr24_fp8", "reference.spmm_fp8", "spmm.reference_fp8"),
    ("sddmm", "hopper.sddmm", "sddmm.hopper"),
    ("sddmm", "portable.sddmm", "sddmm.portable"),
    ("sddmm", "vendor.sddmm", "sddmm.vendor"),
    ("sddmm", "cpu.sddmm", "sddmm.cpu"),
    ("sddmm", "reference.sddmm", "sddmm.reference"),
    ("spgemm", "hopper.spgemm", "spgemm.hopper"),
    ("spgemm", "portable.spgemm", "spgemm.portable"),
    ("spgemm", "vendor.spgemm", "spgemm.vendor"),
    ("spgemm", "cpu.spgemm", "spgemm.cpu"),
    ("spgemm", "reference.spgemm", "spgemm.reference"),
    ("attention", "hopper.attention_fwd", "attention.hopper_fwd"),
    ("attention", "portable.attention_fwd", "attention.portable_fwd"),
    ("attention", "cpu.attention", "attention.cpu_fwd"),
    ("attention", "reference.attention", "attention.reference_fwd"),
    ("attention_backward", "hopper.attention_bwd", "attention.hopper_bwd"),
    ("attention_backward", "portable.attention_bwd", "attention.portable_bwd"),
    ("attention_backward", "cpu.attention_bwd", "attention.cpu_bwd"),
    ("attention_backward", "reference.attention_bwd", "attention.reference_bwd"),
)


def load(name: str) -> Any:
    """The kernel called `name` ("hopper.spmm"). Raises InvalidInput for a name that is not in the table."""
    module = next((module for _, known, module in KERNELS if known == name), None)
    if module is None:
        raise InvalidInput(
            f"no kernel is called {name!r}; known: {', '.join(known for _, known, _ in KERNELS)}"
        )
    return import_module(f"sparsek.kernels.{module}").KERNEL


def names_for(op: str) -> tuple[str, ...]:
    """Names of the kernels of one operation, in order of preference."""
    return tuple(name for kind, name, _ in KERNELS if kind == op)
