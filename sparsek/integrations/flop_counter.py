"""FLOP of SparseK's products for torch.utils.flop_counter.FlopCounterMode. Importing this module registers them.

    import sparsek.integrations.flop_counter
    with FlopCounterMode() as counter:
        model(x).sum().backward()

2 FLOP for each stored value and column: blocks that are not stored count nothing, and 2:4 is half. Layers, `linear`,
`swiglu`, `spmm`, `mlp` and `sddmm` count, with their gradients; `spgemm` and attention do not, whose FLOP depend on the
contents of patterns and masks. Not imported by itself: torch's module imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from sparsek.products.ops import mlp, sddmm, spmm  # define the ops
from sparsek.products.ops.library_args import MlpArgs, SddmmArgs, SpmmArgs, shape_of

OPS: Any = torch.ops.sparsek


def of_spmm(*given: Any, out_val: Tensor) -> int:
    """Those of C = A @ B."""
    args = SpmmArgs(*given)
    rows, _ = shape_of(args.parts)
    return 2 * args.values.numel() * (out_val.numel() // max(1, rows))


def of_mlp(*given: Any, out_val: Any) -> int:
    """Those of both layers."""
    args = MlpArgs(*given)
    stored = args.up_values.numel() + args.down_values.numel()
    return 2 * stored * (args.x.numel() // max(1, args.x.shape[-1]))


def of_sddmm(*given: Any, out_val: Tensor) -> int:
    """Those of X @ Y at the stored blocks."""
    return 2 * SddmmArgs(*given).x.shape[-1] * out_val.numel()


FORMULAS = {spmm: of_spmm, mlp: of_mlp, sddmm: of_sddmm}
for module, formula in FORMULAS.items():
    op = getattr(OPS, module.__name__.rpartition(".")[2])
    if op not in flop_registry:
        register_flop_formula(op, get_raw=True)(formula)
