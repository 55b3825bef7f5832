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
    from sparsek import distributed, nn
    from sparsek.attn import policies
    from sparsek.attn.mask.mask import BlockMask
    from sparsek.attn.mask.pages import PageLists
    from sparsek.attn.mask.quantized_heads import QuantizedHeads, quantize_heads
    from sparsek.attn.mask.rule import MaskPolicy
    from sparsek.attn.mask.token_lists import TokenLists
    from sparsek.attn.ops.attention import attention, plan_attention, plan_attention_backward
    from sparsek.attn.ops.attention_paged import attention_paged, plan_attention_paged
    from sparsek.attn.ops.attention_varlen import attention_varlen
    from sparsek.attn.reference.attention import merge_attention
    from sparsek.core.errors import (
        InvalidFile,
        InvalidInput,
        MeshError,
        SparseKError,
        SparseKWarning,
        Unsupported,
    )
    from sparsek.engine.plan.plan import Plan
    from sparsek.files.io import load, save
    from sparsek.models.checkpoint import load_model, save_model
    from sparsek.models.config import BlockSemiSparse, BlockSparse, Float8, SemiSparse
    from sparsek.models.prune import prune
    from sparsek.models.sparsify import densify_, sparsify_
    from sparsek.products.formats.bsr import BSR
    from sparsek.products.formats.bsr24 import BSR24
    from sparsek.products.formats.pattern import BlockPattern
    from sparsek.products.formats.quantized import Quantized, quantize
    from sparsek.products.formats.quantized_tensor import QuantizedTensor
    from sparsek.products.formats.random import random_bsr
    from sparsek.products.formats.semi24 import Semi24
    from sparsek.products.ops.choose import FormatChoice, choose_format
    from sparsek.products.ops.linear import linear, swiglu
    from sparsek.products.ops.mlp import mlp
    from sparsek.products.ops.sddmm import plan_sddmm, sddmm
    from sparsek.products.ops.spgemm import plan_spgemm, spgemm
    from sparsek.products.ops.spmm import plan_spmm, spmm

__version__ = "0.1.0"

doors.build("operations", "sparsek.products.ops", "sparsek.attn.ops")
doors.build("kernels", "sparsek.products.kernels", "sparsek.attn.kernels")
doors.build("commands", "sparsek.tools.cli", "sparsek_bench.commands")
doors.build("transformers", "sparsek.integrations.transformers_quantizer")
doors.build("torchao", "sparsek.models.torchao")

__all__ = [
    "BSR",
    "BSR24",
    "BlockMask",
    "BlockPattern",
    "BlockSemiSparse",
    "BlockSparse",
    "Float8",
    "FormatChoice",
    "InvalidFile",
    "InvalidInput",
    "MaskPolicy",
    "MeshError",
    "PageLists",
    "Plan",
    "Quantized",
    "QuantizedHeads",
    "QuantizedTensor",
    "Semi24",
    "SemiSparse",
    "SparseKError",
    "SparseKWarning",
    "TokenLists",
    "Unsupported",
    "attention",
    "attention_paged",
    "attention_varlen",
    "choose_format",
    "densify_",
    "distributed",
    "linear",
    "load",
    "load_model",
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
    "prune",
    "quantize",
    "quantize_heads",
    "random_bsr",
    "save",
    "save_model",
    "sddmm",
    "sparsify_",
    "spgemm",
    "spmm",
    "swiglu",
]

_HOMES = {
    "BSR": "sparsek.products.formats.bsr",
    "BSR24": "sparsek.products.formats.bsr24",
    "BlockMask": "sparsek.attn.mask.mask",
    "BlockPattern": "sparsek.products.formats.pattern",
    "BlockSemiSparse": "sparsek.models.config",
    "BlockSparse": "sparsek.models.config",
    "Float8": "sparsek.models.config",
    "SemiSparse": "sparsek.models.config",
    "InvalidFile": "sparsek.core.errors",
    "InvalidInput": "sparsek.core.errors",
    "MeshError": "sparsek.core.errors",
    "FormatChoice": "sparsek.products.ops.choose",
    "MaskPolicy": "sparsek.attn.mask.rule",
    "PageLists": "sparsek.attn.mask.pages",
    "Plan": "sparsek.engine.plan.plan",
    "Quantized": "sparsek.products.formats.quantized",
    "QuantizedHeads": "sparsek.attn.mask.quantized_heads",
    "QuantizedTensor": "sparsek.products.formats.quantized_tensor",
    "Semi24": "sparsek.products.formats.semi24",
    "SparseKError": "sparsek.core.errors",
    "SparseKWarning": "sparsek.core.errors",
    "TokenLists": "sparsek.attn.mask.token_lists",
    "Unsupported": "sparsek.core.errors",
    "attention": "sparsek.attn.ops.attention",
    "attention_paged": "sparsek.attn.ops.attention_paged",
    "attention_varlen": "sparsek.attn.ops.attention_varlen",
    "linear": "sparsek.products.ops.linear",
    "load": "sparsek.files.io",
    "load_model": "sparsek.models.checkpoint",
    "merge_attention": "sparsek.attn.reference.attention",
    "mlp": "sparsek.products.ops.mlp",
    "nn": "sparsek.nn",
    "policies": "sparsek.policies",
    "plan_attention": "sparsek.attn.ops.attention",
    "plan_attention_backward": "sparsek.attn.ops.attention",
    "plan_attention_paged": "sparsek.attn.ops.attention_paged",
    "distributed": "sparsek.distributed",
    "choose_format": "sparsek.products.ops.choose",
    "densify_": "sparsek.models.sparsify",
    "sparsify_": "sparsek.models.sparsify",
    "plan_sddmm": "sparsek.products.ops.sddmm",
    "plan_spgemm": "sparsek.products.ops.spgemm",
    "plan_spmm": "sparsek.products.ops.spmm",
    "prune": "sparsek.models.prune",
    "quantize": "sparsek.products.formats.quantized",
    "quantize_heads": "sparsek.attn.mask.quantized_heads",
    "random_bsr": "sparsek.products.formats.random",
    "save": "sparsek.files.io",
    "save_model": "sparsek.models.checkpoint",
    "sddmm": "sparsek.products.ops.sddmm",
    "spgemm": "sparsek.products.ops.spgemm",
    "spmm": "sparsek.products.ops.spmm",
    "swiglu": "sparsek.products.ops.linear",
}

aliases.install()
ROOMS = ("distributed", "nn", "policies")  # public names that are modules


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
