"""SparseK: block-sparse matrix products, layers and attention for NVIDIA Hopper, with the same API on a CPU.

    A = sk.BSR.from_dense(w, block=128, keep=0.125)     A @ B, B @ A, A.T @ B, A @ A2: sk.spmm, sk.spgemm
    y = sk.linear(x, A, bias, "gelu")                   sk.swiglu, sk.sddmm, sk.nn.BlockSparseLinear
    o = sk.attention(q, k, v, sk.BlockMask.causal(n))   sk.plan_spmm(A, B).explain(): what runs, and why

Products are differentiable; a gradient of a BSR has its pattern. Importing this touches no CUDA and loads no kernel.
"""

from sparsek import nn
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, Unsupported
from sparsek.files.io import load, save
from sparsek.mask.mask import BlockMask
from sparsek.mask.rule import MaskPolicy
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import ScaledTensor
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import Scaled, quantize
from sparsek.matrix.random import random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.ops.attention import attention, plan_attention, plan_attention_backward
from sparsek.ops.attention_varlen import attention_varlen
from sparsek.ops.choose import LinearPlan, plan_linear
from sparsek.ops.linear import linear, swiglu
from sparsek.ops.sddmm import plan_sddmm, sddmm
from sparsek.ops.spgemm import plan_spgemm, spgemm
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.plan.plan import Plan
from sparsek.reference.attention import merge

__version__ = "0.1.0"

__all__ = [
    "BSR",
    "BSR24",
    "BlockMask",
    "BlockPattern",
    "InvalidFile",
    "InvalidInput",
    "LinearPlan",
    "MaskPolicy",
    "Plan",
    "Scaled",
    "ScaledTensor",
    "Semi24",
    "SparseKError",
    "Unsupported",
    "attention",
    "attention_varlen",
    "linear",
    "load",
    "merge",
    "nn",
    "plan_attention",
    "plan_attention_backward",
    "plan_linear",
    "plan_sddmm",
    "plan_spgemm",
    "plan_spmm",
    "quantize",
    "random_bsr",
    "save",
    "sddmm",
    "spgemm",
    "spmm",
    "swiglu",
]
