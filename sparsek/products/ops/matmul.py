"""`A @ B` of sparse matrices: `spmm` with a dense operand, `spgemm` of two BSR."""

from __future__ import annotations

from typing import Any

import torch

from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import Slot
from sparsek.products.formats.base import Multiplied, is_vector
from sparsek.products.formats.bsr import BSR
from sparsek.products.ops import recorded_products
from sparsek.products.ops.spgemm import spgemm
from sparsek.products.ops.spmm import PLAIN_CALL, SpmmCall, route

_compiling = torch.compiler.is_dynamo_compiling  # of other tracing a recorded call finds out itself


def matmul(a: Any, b: Any) -> Any:
    """`a @ b`: `spgemm(a, b, "bsr")` of two BSR, otherwise `spmm(a, b)`, whose recorded calls it finds itself.

    A vector is a matrix of one column, or of one row.
    """
    if a.__class__ is b.__class__ is BSR:
        return spgemm(a, b, "bsr")
    slot = recorded_calls.UNBOUND
    if not _compiling():
        slot = recorded_products.product(a, b, PLAIN_CALL)
        if slot.__class__ is not Slot:
            return slot
    if is_vector(b):
        return matmul(a, b.unsqueeze(1)).squeeze(1)
    if is_vector(a):
        return matmul(a.unsqueeze(1).mT, b).squeeze(0)
    return route(SpmmCall(a, b), slot)


Multiplied.register_matmul(matmul)
