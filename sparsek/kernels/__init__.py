"""The kernels in order of preference, one line each. A module is loaded on first use, so importing this is cheap.

A module holds its kernel as KERNEL, or several by name in KERNELS.
"""

from importlib import import_module
from typing import Any

from sparsek.core.errors import InvalidInput
from sparsek.matrix.storage import FP8

# Operation, name, module, and for spmm the storage that the kernel multiplies (`Storage.kind`); "fp8" stands for
# every FP8 storage. The kernel's `why_not` agrees with this column, which is read without loading the kernel.
KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("spmm", "hopper.spmm", "spmm.hopper", "bsr"),
    ("spmm", "hopper.spmm_paired", "spmm.hopper_paired", "bsr"),
    ("spmm", "portable.spmm", "spmm.portable", "bsr"),
    ("spmm", "portable.spmm_skinny", "spmm.portable_skinny", "bsr"),
    ("spmm", "vendor.dense", "spmm.vendor_dense", "bsr"),
    ("spmm", "cpu.spmm", "spmm.cpu", "bsr"),
    ("spmm", "reference.spmm", "spmm.reference", "bsr"),
    ("spmm", "hopper.semi24", "spmm.hopper_24", "semi24"),
    ("spmm", "hopper.semi24_skinny", "spmm.hopper_skinny_24", "semi24"),
    ("spmm", "portable.semi24", "spmm.portable_24", "semi24"),
    ("spmm", "vendor.cusparselt", "spmm.vendor_cusparselt", "semi24"),
    ("spmm", "cpu.semi24", "spmm.cpu_24", "semi24"),
    ("spmm", "reference.semi24", "spmm.reference", "semi24"),
    ("spmm", "hopper.bsr24", "spmm.hopper_bsr24", "bsr24"),
    ("spmm", "portable.bsr24", "spmm.portable_bsr24", "bsr24"),
    ("spmm", "cpu.bsr24", "spmm.cpu_bsr24", "bsr24"),
    ("spmm", "reference.bsr24", "spmm.reference", "bsr24"),
    ("spmm", "hopper.spmm_fp8", "spmm.hopper_fp8", "bsr_fp8"),
    ("spmm", "portable.spmm_fp8", "spmm.portable_fp8", "bsr_fp8"),
    ("spmm", "hopper.semi24_fp8", "spmm.hopper_24_fp8", "semi24_fp8"),
    ("spmm", "portable.semi24_fp8", "spmm.portable_24_fp8", "semi24_fp8"),
    ("spmm", "hopper.bsr24_fp8", "spmm.hopper_bsr24_fp8", "bsr24_fp8"),
    ("spmm", "portable.bsr24_fp8", "spmm.portable_bsr24_fp8", "bsr24_fp8"),
    ("spmm", "vendor.cublas_fp8", "spmm.vendor_cublas_fp8", "fp8"),
    ("spmm", "cpu.spmm_fp8", "spmm.cpu_fp8", "fp8"),
    ("spmm", "reference.spmm_fp8", "spmm.reference", "fp8"),
    ("sddmm", "hopper.sddmm", "sddmm.hopper", ""),
    ("sddmm", "portable.sddmm", "sddmm.portable", ""),
    ("sddmm", "vendor.sddmm", "sddmm.vendor", ""),
    ("sddmm", "cpu.sddmm", "sddmm.cpu", ""),
    ("sddmm", "reference.sddmm", "sddmm.reference", ""),
    ("spgemm", "hopper.spgemm", "spgemm.hopper", ""),
    ("spgemm", "portable.spgemm", "spgemm.portable", ""),
    ("spgemm", "vendor.spgemm", "spgemm.vendor", ""),
    ("spgemm", "cpu.spgemm", "spgemm.cpu", ""),
    ("spgemm", "reference.spgemm", "spgemm.reference", ""),
    ("attention", "hopper.attention_fwd", "attention.hopper_fwd", ""),
    ("attention", "portable.attention_fwd", "attention.portable_fwd", ""),
    ("attention", "cpu.attention", "attention.cpu_fwd", ""),
    ("attention", "reference.attention", "attention.reference", ""),
    ("attention_fp8", "hopper.attention_fp8", "attention.hopper_fp8", ""),
    ("attention_fp8", "reference.attention_fp8", "attention.reference", ""),
    ("attention_backward", "hopper.attention_bwd", "attention.hopper_bwd", ""),
    ("attention_backward", "hopper.attention_bwd_wide", "attention.hopper_bwd_wide", ""),
    ("attention_backward", "portable.attention_bwd", "attention.portable_bwd", ""),
    ("attention_backward", "cpu.attention_bwd", "attention.cpu_bwd", ""),
    ("attention_backward", "reference.attention_bwd", "attention.reference", ""),
    ("attention_paged", "hopper.attention_paged", "paged.hopper", ""),
    ("attention_paged", "portable.attention_paged", "paged.portable", ""),
    ("attention_paged", "cpu.attention_paged", "paged.cpu", ""),
    ("attention_paged", "reference.attention_paged", "paged.reference", ""),
)


def load(name: str) -> Any:
    """The kernel called `name` ("hopper.spmm"). Raises InvalidInput for a name that is not in the table."""
    module = next((module for _, known, module, _ in KERNELS if known == name), None)
    if module is None:
        raise InvalidInput(
            f"no kernel is called {name!r}; known: {', '.join(known for _, known, *_ in KERNELS)}"
        )
    found = import_module(f"sparsek.kernels.{module}")
    return found.KERNELS[name] if hasattr(found, "KERNELS") else found.KERNEL


def names_for(op: str, storage: str | None = None) -> tuple[str, ...]:
    """Names of the kernels of one operation, in order of preference; for spmm, those for one kind of storage."""
    wanted = {storage, "fp8" if storage in FP8 else storage}
    return tuple(
        name for each, name, _, kind in KERNELS if each == op and (storage is None or kind in wanted)
    )
