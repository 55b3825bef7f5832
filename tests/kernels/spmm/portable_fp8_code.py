"""portable.spmm_fp8 and the rounding of B, compiled for cards that are not there, as `launch` specialises them."""

from types import SimpleNamespace
from typing import Any

import torch

from sparsek.core.device import Card
from sparsek.kernels.pack import to_fp8 as round_fp8
from sparsek.kernels.spmm import portable_fp8 as spmm_fp8
from sparsek.kernels.spmm import tiles_fp8
from sparsek.kernels.spmm.tiles_fp8 import Config
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import Epilogue
from tests.kernels.lang.portable_code import Code, compiled
from tests.kernels.products.portable_code import NAMES, meta, ones

FP8 = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _shared(p: Any, c: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """The constants and the types that all three have."""
    b = torch.empty((1, p.n, p.k), dtype=DTYPES[p.b.dtype], device="meta")
    out = meta(p.m, p.n, p.c.layout, p.c.dtype)
    other = meta(p.m, p.n, p.c.layout, p.c.dtype) if p.combine else None
    epilogue = Epilogue(2.0 if p.has_alpha else 1.0, None, p.activation, other, p.combine or "add")
    constants = ones("sc", out, "mn") | ({"other": None} if other is None else ones("so", other, "mn"))
    constants |= {} if p.bias else {"bias": None}
    types = {"values": FP8[p.dtype], "b": FP8[p.b.dtype], "a_scale": "*fp32", "b_scale": "*fp32"}
    types |= dict.fromkeys(("c", "bias", "other"), NAMES[p.c.dtype]) | {"alpha": "fp32", "beta": "fp32"}
    b_kind = "row" if p.b.scale == "column" else "tensor"
    return constants | tiles_fp8.constants(c, b, out, epilogue, p.a.scale, b_kind), types


def spmm_fp8_code(p: SpmmProblem, c: Config) -> Code:
    constants, types = _shared(p, c)
    values = torch.empty((p.nnzb, *p.block), dtype=DTYPES[p.dtype], device="meta")
    a = SimpleNamespace(block=p.block, shape=(p.m, p.k), order=values if p.a.transposed else None)
    constants |= spmm_fp8._own(a)
    types |= dict.fromkeys(("indices", "order", "rows"), "*i32")
    return compiled(spmm_fp8._spmm_fp8, types, constants, p.card, c.num_warps, c.num_stages)


def round_code(rows: int, k: int, turned: bool, dtype: str, card: Card) -> Code:
    """The rounding of x [rows, k], or of the transpose of a [k, rows]."""
    x = meta(rows, k, "col" if turned else "row", dtype)
    values, warps = round_fp8._constants(x, DTYPES["e4m3"])
    kernel = round_fp8._round_rows
    constants = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    types = {"x": NAMES[dtype], "values": FP8["e4m3"], "scale": "*fp32"}
    return compiled(kernel, types, constants, card, warps, 1)
