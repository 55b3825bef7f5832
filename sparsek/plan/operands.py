"""What can be said of the tensors of one call without reading them: do they fit together, and how do they lie."""

from typing import Any

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR

NO_GRADIENT = (
    "spmm has no gradient yet; call it under torch.no_grad(), "
    "or use sparsek.reference.spmm.spmm, which has one"
)


def check_operands(a: Any, b: Any) -> None:
    """InvalidInput unless `a` is a BSR [M, K] and `b` a dense [..., K, N] of its dtype on its device."""
    if not isinstance(a, BSR):
        raise InvalidInput(f"A must be a BSR, got {type(a).__name__}; make one with BSR.from_dense")
    if not isinstance(b, Tensor):
        raise InvalidInput(f"B must be a dense torch.Tensor, got {type(b).__name__}")
    if b.layout != torch.strided:
        raise InvalidInput(f"B must be a dense torch.Tensor, got layout {b.layout}; call .to_dense()")
    if b.dim() < 2:
        raise InvalidInput(
            f"B must be [K, N] or [..., K, N], got {b.dim()}-D; for a vector use B.unsqueeze(-1)"
        )
    if b.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if b.dtype != a.dtype:
        raise InvalidInput(f"A is {a.dtype} and B {b.dtype}; cast one of them, SparseK does not")
    if b.device != a.device:
        raise InvalidInput(f"A is on {a.device} and B on {b.device}; move one of them, SparseK does not")
    if b.is_neg():
        raise InvalidInput("B is a lazily negated view, whose memory has the other sign; call .resolve_neg()")


def check_no_gradient(a: BSR, b: Tensor) -> None:
    """InvalidInput where autograd would expect a gradient."""
    if torch.is_grad_enabled() and (a.values.requires_grad or b.requires_grad):
        raise InvalidInput(NO_GRADIENT)


def check_out(a: BSR, b: Tensor, out: Any) -> None:
    """InvalidInput unless `out` is [..., M, N] of B's dtype, with contiguous rows and memory of its own."""
    wanted = (*b.shape[:-2], a.shape[0], b.shape[-1])
    if (
        not isinstance(out, Tensor)
        or tuple(out.shape) != wanted
        or out.dtype != b.dtype
        or out.device != b.device
        or out.layout != torch.strided
    ):
        raise InvalidInput(f"out must be {b.dtype} {list(wanted)} on {b.device}, got {_describe(out)}")
    if out.numel() == 0:
        return
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise InvalidInput(f"out must have contiguous rows, got strides {out.stride()}")
    if _meets_itself(out):
        raise InvalidInput(
            f"out must have every element in its own place, got shape {list(out.shape)}, strides {out.stride()}"
        )
    for name, other in (("B", b), ("A's values", a.values)):
        if _overlap(out, other):
            raise InvalidInput(f"out overlaps the memory of {name}; C would be written where that is read")


def layout(b: Tensor) -> str:
    """ "row" for contiguous rows, "col" for the transpose view of such a matrix, "strided" for anything else."""
    k, n = b.shape[-2:]
    if (b.stride(-1) == 1 or n == 1) and b.stride(-2) >= n:
        return "row"
    if (b.stride(-2) == 1 or k == 1) and b.stride(-1) >= k:
        return "col"
    return "strided"


def aligned(b: Tensor, out: Tensor | None) -> bool:
    """True if all pointers and leading strides of B and C are multiples of 16 bytes.

    Without `out`, C is a new contiguous tensor.
    """
    lead = b.stride(-1) if layout(b) == "col" else b.stride(-2)
    of_c = (b.shape[-1],) if out is None else out.stride()[:-1]
    unit = 16 // b.element_size()
    starts = b.data_ptr() if out is None else b.data_ptr() | out.data_ptr()
    return starts % 16 == 0 and all(stride % unit == 0 for stride in (lead, *b.stride()[:-2], *of_c))


def _meets_itself(x: Tensor) -> bool:
    """False if the dims nest, each with a stride beyond the reach of the smaller ones, so that no two elements meet."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(x: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _describe(x: Any) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    kind = "" if x.layout == torch.strided else f" in layout {x.layout}"
    return f"{x.dtype} {list(x.shape)} on {x.device}{kind}"
