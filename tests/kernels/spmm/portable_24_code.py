"""portable.semi24 and portable.bsr24 compiled for cards that are not there, as `launch` specialises them."""

from typing import Any

from sparsek.kernels.spmm import portable_24 as semi24
from sparsek.kernels.spmm import portable_bsr24 as bsr24
from sparsek.kernels.spmm import unpack_24
from sparsek.kernels.spmm.unpack_24 import Config
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import Epilogue
from tests.kernels.lang.portable_code import Code, compiled
from tests.kernels.products.portable_code import NAMES, meta, ones


def _shared(p: SpmmProblem) -> tuple[Any, Any, Epilogue, dict[str, Any], dict[str, str]]:
    b, out = meta(p.k, p.n, p.b.layout, p.dtype), meta(p.m, p.n, p.c.layout, p.dtype)
    other = meta(p.m, p.n, p.c.layout, p.dtype) if p.combine else None
    epilogue = Epilogue(2.0 if p.has_alpha else 1.0, None, p.activation, other, p.combine or "add")
    constants = ones("sb", b, "kn") | ones("sc", out, "mn")
    constants |= {"other": None} if other is None else ones("so", other, "mn")
    constants |= {} if p.bias else {"bias": None}
    types = dict.fromkeys(("values", "b", "c", "bias", "other"), NAMES[p.dtype])
    return b, out, epilogue, constants, types | {"meta": "*u8", "alpha": "fp32", "beta": "fp32"}


def semi24_code(p: SpmmProblem, c: Config) -> Code:
    b, out, epilogue, constants, types = _shared(p)
    shape = (p.k, p.m) if p.a.transposed else (p.m, p.k)
    constants |= semi24._own(c, shape, p.a.transposed) | unpack_24.constants(c, b, out, p.tf32, epilogue)
    return compiled(semi24._semi24, types, constants, p.card, c.num_warps, c.num_stages)


def bsr24_code(p: SpmmProblem, c: Config) -> Code:
    b, out, epilogue, constants, types = _shared(p)
    bm, bk = p.block[::-1] if p.a.transposed else p.block
    constants |= bsr24._own(c, (bm, bk), p.a.transposed, p.k)
    constants |= unpack_24.constants(c, b, out, p.tf32, epilogue)
    types |= dict.fromkeys(("indices", "order", "rows"), "*i32")
    return compiled(bsr24._bsr24, types, constants, p.card, c.num_warps, c.num_stages)
