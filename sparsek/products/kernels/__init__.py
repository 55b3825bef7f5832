"""The kernels of matrix products in order of preference, one line each.

An operation, a name, a module of kernels, and for spmm the storage that the kernel multiplies (`Storage.kind`); "fp8"
stands for every FP8 storage. The kernel's `why_not` agrees with this column, which is read without loading the kernel.
A module holds its kernel as KERNEL, or several by name in KERNELS.
"""

KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("spmm", "hopper.spmm", "spmm.hopper", "bsr"),
    ("spmm", "hopper.spmm_paired", "spmm.hopper_paired", "bsr"),
    ("spmm", "hopper.spmm_mma", "spmm.hopper_mma", "bsr"),
    ("spmm", "portable.spmm", "spmm.portable", "bsr"),
    ("spmm", "portable.spmm_skinny", "spmm.portable_skinny", "bsr"),
    ("spmm", "vendor.dense", "spmm.vendor_dense", "bsr"),
    ("spmm", "cpu.spmm", "spmm.cpu", "bsr"),
    ("spmm", "reference.spmm", "spmm.reference", "bsr"),
    ("spmm", "hopper.semi24", "spmm.hopper_24", "semi24"),
    ("spmm", "hopper.semi24_skinny", "spmm.hopper_skinny_24", "semi24"),
    ("spmm", "unpacked.semi24", "spmm.unpacked", "semi24"),
    ("spmm", "reference.semi24", "spmm.reference", "semi24"),
    ("spmm", "hopper.bsr24", "spmm.hopper_bsr24", "bsr24"),
    ("spmm", "unpacked.bsr24", "spmm.unpacked", "bsr24"),
    ("spmm", "cpu.bsr24", "spmm.cpu_bsr24", "bsr24"),
    ("spmm", "reference.bsr24", "spmm.reference", "bsr24"),
    ("spmm", "hopper.spmm_fp8", "spmm.hopper_fp8", "bsr_fp8"),
    ("spmm", "portable.spmm_fp8", "spmm.portable_fp8", "bsr_fp8"),
    ("spmm", "portable.spmm_skinny_fp8", "spmm.portable_skinny_fp8", "bsr_fp8"),
    ("spmm", "hopper.semi24_fp8", "spmm.hopper_24", "semi24_fp8"),
    ("spmm", "unpacked.semi24_fp8", "spmm.unpacked", "semi24_fp8"),
    ("spmm", "hopper.bsr24_fp8", "spmm.hopper_bsr24", "bsr24_fp8"),
    ("spmm", "unpacked.bsr24_fp8", "spmm.unpacked", "bsr24_fp8"),
    ("spmm", "vendor.cublas_fp8", "spmm.vendor_cublas_fp8", "fp8"),
    ("spmm", "reference.spmm_fp8", "spmm.reference", "fp8"),
    ("sddmm", "hopper.sddmm", "sddmm.hopper", ""),
    ("sddmm", "portable.sddmm", "sddmm.portable", ""),
    ("sddmm", "vendor.sddmm", "sddmm.vendor", ""),
    ("sddmm", "reference.sddmm", "sddmm.reference", ""),
    ("spgemm", "hopper.spgemm", "spgemm.hopper", ""),
    ("spgemm", "portable.spgemm", "spgemm.portable", ""),
    ("spgemm", "vendor.spgemm", "spgemm.vendor", ""),
    ("spgemm", "reference.spgemm", "spgemm.reference", ""),
)

# Removed kernels, and the successor of each.
REMOVED = {
    "vendor.cusparselt": "hopper.semi24",
    "cpu.semi24": "reference.semi24",
    "cpu.spmm_fp8": "reference.spmm_fp8",
    "cpu.sddmm": "reference.sddmm",
    "cpu.spgemm": "reference.spgemm",
    **{f"portable.{each}": f"unpacked.{each}" for each in ("semi24", "bsr24", "semi24_fp8", "bsr24_fp8")},
}
