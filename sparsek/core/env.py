"""Every environment variable that SparseK reads, each in one function."""

import os


def bench_records_dir() -> str:
    """SPARSEK_RECORDS: folder for benchmark records; default benchmarks/results/<card> in the working folder."""
    return os.environ.get("SPARSEK_RECORDS", "benchmarks/results")


def interpreting() -> bool:
    """TRITON_INTERPRET=1: plain Triton kernels run on CPU tensors, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
