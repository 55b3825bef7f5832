"""SparseK: block-sparse and 2:4 matrix products, layers and attention for PyTorch, with fast kernels for NVIDIA Hopper.

    A = sk.BSR.from_dense(w, block=128, keep=0.125)     A @ B, B @ A, A.T @ B, A @ A2: sk.spmm, sk.spgemm
    y = sk.linear(x, A, bias, "gelu")                   sk.swiglu, sk.sddmm, sk.nn.BlockSparseLinear
    o = sk.attention(q, k, v, sk.BlockMask.causal(n))   sk.plan_spmm(A, B).explain(): the kernel, and why it was chosen

The same API runs on a CPU. Products are differentiable; the gradient of a BSR has its pattern. `import sparsek` takes
milliseconds: a name imports its module, and torch, on first use. Importing touches no CUDA and loads no kernel.
`torch.ops.sparsek.*` and the pytree nodes of matrices and masks are registered with the first name that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsek.core import aliases, doors

if TYPE_CHECKING:
    from sparsek import nn, policies
    from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, SparseKWarning, Unsupported
    from sparsek.files.io import load, save
    from sparsek.mask.heads8 import QuantizedHeads, quantize_heads
    from sparsek.mask.mask import BlockMask
    from sparsek.mask.pages import PageLists
    from sparsek.mask.rule import MaskPolicy
    from sparsek.matrix.bsr import BSR
    from sparsek.matrix.bsr24 import BSR24
    from sparsek.matrix.dense8 import QuantizedTensor
    from sparsek.matrix.pattern import BlockPattern
    from sparsek.matrix.quantized import Quantized, quantize
    from sparsek.matrix.random import random_bsr
    from sparsek.matrix.semi24 import Semi24
    from sparsek.ops.attention import attention, plan_attention, plan_attention_backward
    from sparsek.ops.attention_paged import attention_paged, plan_attention_paged
    from sparsek.ops.attention_varlen import attention_varlen
    from sparsek.ops.choose import FormatChoice, choose_format
    from sparsek.ops.linear import linear, swiglu
    from sparsek.ops.mlp import mlp
    from sparsek.ops.sddmm import plan_sddmm, sddmm
    from sparsek.ops.spgemm import plan_spgemm, spgemm
    from sparsek.ops.spmm import plan_spmm, spmm
    from sparsek.plan.plan import Plan
    from sparsek.reference.attention import merge_attention

__version__ = "0.1.0"

doors.build("operations", "sparsek.ops")
doors.build("kernels", "sparsek.kernels.product_table", "sparsek.kernels.attention_table")
doors.build("benches", "sparsek.bench.benches")

__all__ = [
    "BSR",
    "BSR24",
    "BlockMask",
    "BlockPattern",
    "FormatChoice",
    "InvalidFile",
    "InvalidInput",
    "MaskPolicy",
    "PageLists",
    "Plan",
    "Quantized",
    "QuantizedHeads",
    "QuantizedTensor",
    "Semi24",
    "SparseKError",
    "SparseKWarning",
    "Unsupported",
    "attention",
    "attention_paged",
    "attention_varlen",
    "choose_format",
    "linear",
    "load",
    "merge_attention",
    "mlp",
    "nn",
    "plan_attention",
    "plan_attention_backward",
    "plan_attention_paged",
    "plan_sddmm",
    "plan_spgemm",
    "plan_spmm",
    "policies",
    "quantize",
    "quantize_heads",
    "random_bsr",
    "save",
    "sddmm",
    "spgemm",
    "spmm",
    "swiglu",
]

_HOMES = {
    "BSR": "sparsek.matrix.bsr",
    "BSR24": "sparsek.matrix.bsr24",
    "BlockMask": "sparsek.mask.mask",
    "BlockPattern": "sparsek.matrix.pattern",
    "InvalidFile": "sparsek.core.errors",
    "InvalidInput": "sparsek.core.errors",
    "FormatChoice": "sparsek.ops.choose",
    "MaskPolicy": "sparsek.mask.rule",
    "PageLists": "sparsek.mask.pages",
    "Plan": "sparsek.plan.plan",
    "Quantized": "sparsek.matrix.quantized",
    "QuantizedHeads": "sparsek.mask.heads8",
    "QuantizedTensor": "sparsek.matrix.dense8",
    "Semi24": "sparsek.matrix.semi24",
    "SparseKError": "sparsek.core.errors",
    "SparseKWarning": "sparsek.core.errors",
    "Unsupported": "sparsek.core.errors",
    "attention": "sparsek.ops.attention",
    "attention_paged": "sparsek.ops.attention_paged",
    "attention_varlen": "sparsek.ops.attention_varlen",
    "linear": "sparsek.ops.linear",
    "load": "sparsek.files.io",
    "merge_attention": "sparsek.reference.attention",
    "mlp": "sparsek.ops.mlp",
    "nn": "sparsek.nn",
    "policies": "sparsek.policies",
    "plan_attention": "sparsek.ops.attention",
    "plan_attention_backward": "sparsek.ops.attention",
    "plan_attention_paged": "sparsek.ops.attention_paged",
    "choose_format": "sparsek.ops.choose",
    "plan_sddmm": "sparsek.ops.sddmm",
    "plan_spgemm": "sparsek.ops.spgemm",
    "plan_spmm": "sparsek.ops.spmm",
    "quantize": "sparsek.matrix.quantized",
    "quantize_heads": "sparsek.mask.heads8",
    "random_bsr": "sparsek.matrix.random",
    "save": "sparsek.files.io",
    "sddmm": "sparsek.ops.sddmm",
    "spgemm": "sparsek.ops.spgemm",
    "spmm": "sparsek.ops.spmm",
    "swiglu": "sparsek.ops.linear",
}

aliases.install()
ROOMS = ("nn", "policies")  # public names that are modules


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] != "sparsek.core.errors":
        doors.enter("operations")  # matrices call the operations, and these each other in backward passes
    home = import_module(_HOMES[name])
    globals()[name] = found = home if name in ROOMS else getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
