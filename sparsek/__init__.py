"""SparseK: block-sparse matrix products and attention for NVIDIA Hopper, with the same API on a CPU.

Importing this touches no CUDA and loads no kernel.
"""

from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, Unsupported
from sparsek.formats.block_mask import BlockMask
from sparsek.formats.bsr import BSR
from sparsek.formats.io import load, save
from sparsek.formats.pattern import BlockPattern
from sparsek.formats.random import random_bsr
from sparsek.ops.attention import attention, plan_attention
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.plan.plan import Plan
from sparsek.reference.attention import merge

__version__ = "0.1.0"

__all__ = [
    "BSR",
    "BlockMask",
    "BlockPattern",
    "InvalidFile",
    "InvalidInput",
    "Plan",
    "SparseKError",
    "Unsupported",
    "attention",
    "load",
    "merge",
    "plan_attention",
    "plan_spmm",
    "random_bsr",
    "save",
    "spmm",
]
