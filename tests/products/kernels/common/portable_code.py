"""The portable kernels of spmm, sddmm and spgemm compiled for cards that are not there."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch import tensors
from sparsek.products.kernels.sddmm import portable as sddmm
from sparsek.products.kernels.spgemm import portable as spgemm
from sparsek.products.kernels.spmm import portable as spmm
from sparsek.products.kernels.spmm import portable_skinny as spmm_skinny
from sparsek.products.plan.problems import SddmmProblem, SpgemmProblem, SpmmProblem
from sparsek.products.reference.epilogue import Epilogue
from tests.engine.launch.portable_code import Code, compiled

NAMES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
DTYPES = {name: dtype for dtype, name in dtypes.FP8.items()} | {
    name: dtypes.parse(name) for name in ("bf16", "fp16", "fp32")
}


def meta(rows: int, columns: int, layout: str, dtype: str) -> Tensor:
    kind = DTYPES[dtype]
    if layout == "row":
        return torch.empty((1, rows, columns), dtype=kind, device="meta")
    return torch.empty((1, columns, rows), dtype=kind, device="meta").mT


def matrix(shape: tuple[int, int], block: tuple[int, int], nnzb: int, view: bool, dtype: str) -> Any:
    values = torch.empty((nnzb, *block), dtype=DTYPES[dtype], device="meta")
    return SimpleNamespace(block=block, shape=shape, values=values, order=values if view else None)


def ones(name: str, x: Tensor, dims: str) -> dict[str, int]:
    """The stride arguments of x [1, rows, columns] that are 1, which Triton makes constant."""
    found = zip(dims, tensors.strides(x)[1:], strict=True)
    return {f"{name}_{dim}": stride for dim, stride in found if stride == 1}


def spmm_code(p: SpmmProblem, c: spmm.Config, rounds: bool = False) -> Code:
    """The kernel of portable.py, of any of its names, for contiguous tensors that begin at 16 bytes.

    `rounds`: it rounds B.
    """
    of_b = p.b.rounds if rounds else p.b.dtype
    b, out = meta(p.k, p.n, p.b.layout, of_b), meta(p.m, p.n, p.c.layout, p.c.dtype)
    other = meta(p.m, p.n, p.c.layout, p.c.dtype) if p.combine else None
    a = matrix((p.m, p.k), p.block, p.nnzb, p.a.transposed, p.dtype)
    slots, fields = spmm_skinny._counts(p, c)[1] if c.part else 0, spmm_skinny.FIELDS if c.group == 1 else 3
    rows = torch.empty(p.grid[0], fields, device="meta")
    work: Any = SimpleNamespace(rows=rows, slots=slots, tf32=p.tf32)
    epilogue = Epilogue(2.0 if p.has_alpha else 1.0, None, p.activation, other, p.combine or "add")
    scales = (p.a.scale, "found" if rounds else "row" if p.b.scale == "column" else p.b.scale)
    constants = spmm._constants(c, work, a, b, out, epilogue, scales)
    constants |= ones("sb", b, "kn") | ones("sc", out, "mn")
    constants |= {"other": None} if other is None else ones("so", other, "mn")
    constants |= {} if p.bias else {"bias": None}
    constants |= {} if p.a.quantized else {"a_scale": None}
    constants |= {} if p.a.quantized and not rounds else {"b_scale": None}
    constants |= {} if work.slots else {"sums": None, "arrivals": None}
    constants |= {"n": 1} if p.n == 1 else {}
    constants |= {"column_tiles": 1, "batch_tiles": 1} if p.n <= c.tile_n else {}
    types = {"values": NAMES[p.dtype], "b": NAMES[of_b]}
    types |= dict.fromkeys(("c", "bias", "other"), NAMES[p.c.dtype])
    types |= dict.fromkeys(("indices", "order", "rows", "arrivals"), "*i32")
    types |= dict.fromkeys(("sums", "a_scale", "b_scale"), "*fp32")
    pointers = set(types) - set(constants)
    types |= {"alpha": "fp32", "beta": "fp32"}
    return compiled(spmm._spmm, types, constants, p.card, c.num_warps, c.num_stages, aligned=pointers)


def sddmm_code(p: SddmmProblem, c: sddmm.Config) -> Code:
    x, y = meta(p.m, p.k, p.x_layout, p.dtype), meta(p.k, p.n, p.y_layout, p.dtype)
    constants = sddmm._constants(c, p.block, x[0], y[0], p.tf32, tensors.SIZE_LIMIT)
    constants |= ones("sx", x, "mk") | ones("sy", y, "kn")
    kind = NAMES[p.dtype]
    types = {"x": kind, "y": kind, "values": kind, "indices": "*i32", "tiles": "*i32"}
    return compiled(sddmm._sddmm, types, constants, p.card, c.num_warps, c.num_stages)


def spgemm_code(p: SpgemmProblem, c: spgemm.Config) -> Code:
    a = matrix((p.m, p.k), p.a_block, p.nnzb_a, p.a_transposed, p.dtype)
    b = matrix((p.k, p.n), p.b_block, p.nnzb_b, p.b_transposed, p.dtype)
    out = meta(p.m, p.n, "row", p.dtype)[0]
    work: Any = SimpleNamespace(dense=p.dense_out, tf32=p.tf32)
    constants = spgemm._constants(c, a, b, out, work, tensors.SIZE_LIMIT)
    constants |= {"sc_n": 1} if p.dense_out else {}
    constants |= {} if p.a_transposed else {"a_order": None}
    constants |= {} if p.b_transposed else {"b_order": None}
    types: dict[str, str] = dict.fromkeys(("a_values", "b_values", "c"), NAMES[p.dtype])
    types |= dict.fromkeys(("a_order", "b_order", "left", "right", "targets", "places"), "*i32")
    return compiled(spgemm._spgemm, types, constants, p.card, c.num_warps, c.num_stages)
