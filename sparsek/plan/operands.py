"""What can be said of the tensors of one call without reading them: do they fit together, and how do they lie.

A product has one form for its kernels, C = A @ B with A in BSR. B @ A is (A.T @ B.mT).mT in that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import told
from sparsek.core.errors import InvalidInput
from sparsek.matrix.base import ALIGNMENT
from sparsek.matrix.bsr import BSR, check_stored
from sparsek.matrix.pattern import BlockPattern
from sparsek.reference import epilogue as reference
from sparsek.reference.epilogue import ACTIVATION_NAMES, PLAIN, Epilogue

PLAN_HAS_NO_GRADIENT = (
    "a plan has no gradient; call it under torch.no_grad(), or call sparsek.{op} without plan=, which has one"
)
OUT_HAS_NO_GRADIENT = "out= takes no part in autograd; call it under torch.no_grad(), or leave out= away"


def check_operands(a: Any, b: Any) -> None:
    """InvalidInput unless one operand is a BSR and the other a dense [..., K, N] or [..., M, K] that fits it."""
    if isinstance(b, BSR) and not isinstance(a, BSR):
        check_right(a, b)
    else:
        check_left(a, b)


def check_left(a: Any, b: Any) -> None:
    """InvalidInput unless `a` is a BSR [M, K] and `b` a dense [..., K, N] of its dtype on its device."""
    if not isinstance(a, BSR):
        raise InvalidInput(
            f"A must be a BSR, got {type(a).__name__}; make one with BSR.from_dense, or let B be one"
        )
    if isinstance(b, BSR):
        raise InvalidInput(
            "B must be a dense torch.Tensor, got BSR; sparsek.spgemm(A, B) multiplies two of them"
        )
    check_stored(a)
    check_dense("B", b, a.values, "A")
    if b.dim() < 2:
        raise InvalidInput(
            f"B must be [K, N] or [..., K, N], got {b.dim()}-D; for a vector use B.unsqueeze(-1)"
        )
    if b.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")


def check_right(a: Any, b: Any) -> None:
    """InvalidInput unless `b` is a BSR [K, N] and `a` a dense [..., M, K] of its dtype on its device."""
    if not isinstance(b, BSR):
        raise InvalidInput(f"B must be a BSR, got {type(b).__name__}; make one with BSR.from_dense")
    check_stored(b)
    check_dense("A", a, b.values, "B")
    if a.dim() < 2:
        raise InvalidInput(
            f"A must be [M, K] or [..., M, K], got {a.dim()}-D; for a vector use A.unsqueeze(0)"
        )
    if a.shape[-1] != b.shape[0]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: A needs {b.shape[0]} columns")


def check_dense(name: str, x: Any, like: Any = None, other: str = "") -> None:
    """InvalidInput unless `x`, called `name`, is dense, and of the dtype of `like`, called `other`, on its device."""
    arguments.dense(name, x)
    if like is None:
        dtypes.name(x.dtype)
        return
    if x.dtype != like.dtype:
        raise InvalidInput(
            f"{other} is {like.dtype} and {name} {x.dtype}; cast one of them, SparseK does not"
        )
    if x.device != like.device:
        raise InvalidInput(
            f"{other} is on {like.device} and {name} on {x.device}; move one of them, SparseK does not"
        )


def check_given(epilogue: Any) -> None:
    """InvalidInput unless a caller's `epilogue` is one, whose other matrix is dense and has rows and columns."""
    if epilogue is PLAIN:
        return
    if not isinstance(epilogue, Epilogue):
        raise InvalidInput(f"epilogue is {told(epilogue)}; it must be an Epilogue")
    if epilogue.other is not None and arguments.dense("other", epilogue.other).dim() < 2:
        raise InvalidInput(f"other is {list(epilogue.other.shape)}; it must have the shape of the product")


def check_epilogue(m: int, b: Tensor, epilogue: Epilogue, out_layout: str) -> None:
    """InvalidInput unless `epilogue` fits C [..., m, N] = A @ B, with another matrix that lies as C does."""
    if epilogue.is_plain:
        return
    reference.check_epilogue(epilogue, (*b.shape[:-2], m, b.shape[-1]), b.dtype, b.device)
    if epilogue.bias is not None:
        _check_bias(epilogue.bias, m)
    other = epilogue.other
    if other is not None:
        along = -1 if out_layout == "row" else -2
        if other.stride(along) != 1 and other.shape[along] > 1:
            raise InvalidInput(
                f"the matrix that is joined with the product must have contiguous rows, got strides {other.stride()}"
                "; call .contiguous()"
            )


def check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """InvalidInput unless `x`, the bias [N] or the residual [..., N] of x @ W.T [..., N], has this shape."""
    if x.shape != shape:
        why = "a number for every output feature" if name == "bias" else "as x @ W.T"
        raise InvalidInput(f"{name} is {list(x.shape)}; it must be {list(shape)}, {why}")


def _check_bias(bias: Tensor, count: int, *, contiguous: bool = True) -> None:
    check_shape("bias", bias, (count,))
    if contiguous and bias.stride(0) != 1 and count > 1:
        raise InvalidInput(f"bias must be contiguous, got stride {bias.stride(0)}; call .contiguous()")


def check_linear(x: Any, w: Any, bias: Any, activation: Any, residual: Any) -> None:
    """InvalidInput unless the operands of act(x @ W.T + bias) + residual fit together."""
    if isinstance(w, BSR):
        check_stored(w)
    check_dense("x", x, w, "W")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise InvalidInput(
            f"x is {list(x.shape)} and W [N, K] {list(w.shape)}: the last dim of x must be {w.shape[1]}"
        )
    check_activation(activation)
    if bias is not None:
        check_dense("bias", bias, w, "W")
        _check_bias(bias, w.shape[0], contiguous=False)
    if residual is not None:
        check_dense("residual", residual, w, "W")
        check_shape("residual", residual, (*x.shape[:-1], w.shape[0]))


def check_activation(activation: Any) -> None:
    """InvalidInput unless it is None or the name of an activation."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATION_NAMES):
        raise InvalidInput(
            f"activation is {told(activation)}; use one of {', '.join(ACTIVATION_NAMES)}, or None"
        )


def check_sddmm(x: Any, y: Any, pattern: Any) -> None:
    """InvalidInput unless `x` [M, K] and `y` [K, N] are dense, alike, and fit `pattern`, which is M x N."""
    if not isinstance(pattern, BlockPattern):
        hint = "; hand over its .pattern" if isinstance(pattern, BSR) else ""
        raise InvalidInput(f"pattern must be a BlockPattern, got {type(pattern).__name__}{hint}")
    check_dense("X", x)
    check_dense("Y", y, x, "X")
    for name, each, dims in (("X", x, "[M, K]"), ("Y", y, "[K, N]")):
        if each.dim() != 2:
            raise InvalidInput(
                f"{name} must be {dims}, got {each.dim()}-D; to sum over leading dims join them with K"
            )
    if x.shape[1] != y.shape[0]:
        raise InvalidInput(f"X is {list(x.shape)} and Y {list(y.shape)}: Y needs {x.shape[1]} rows")
    if (x.shape[0], y.shape[1]) != pattern.shape:
        raise InvalidInput(
            f"X @ Y is {[x.shape[0], y.shape[1]]} and the pattern {list(pattern.shape)}; they must agree"
        )
    if pattern.device != x.device:
        raise InvalidInput(
            f"X is on {x.device} and the pattern on {pattern.device}; call pattern.to({str(x.device)!r})"
        )


def check_spgemm(a: Any, b: Any, out: Any) -> None:
    """InvalidInput unless `a` and `b` are BSR that fit together, and `out` says what C should be."""
    for name, each, other in (("A", a, b), ("B", b, a)):
        if not isinstance(each, BSR):
            hint = (
                "sparsek.spmm(A, B) multiplies it with a BSR"
                if isinstance(other, BSR)
                else "use BSR.from_dense"
            )
            raise InvalidInput(f"{name} must be a BSR, got {type(each).__name__}; {hint}")
        check_stored(each)
    if a.shape[1] != b.shape[0]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if a.block[1] != b.block[0]:
        raise InvalidInput(
            f"blocks of A are {a.block[0]}x{a.block[1]} and of B {b.block[0]}x{b.block[1]}: "
            f"those of B need {a.block[1]} rows"
        )
    if a.dtype != b.dtype:
        raise InvalidInput(f"A is {a.dtype} and B {b.dtype}; cast one of them, SparseK does not")
    if a.device != b.device:
        raise InvalidInput(f"A is on {a.device} and B on {b.device}; move one of them, SparseK does not")
    check_wanted(out)
    if isinstance(out, BlockPattern):
        _check_pattern(a, b, out)


def check_wanted(out: Any) -> None:
    """InvalidInput unless `out` says what a product of two BSR should be."""
    if not isinstance(out, BlockPattern) and not (isinstance(out, str) and out in ("dense", "bsr")):
        hint = "; hand over its .pattern" if isinstance(out, BSR) else ""
        said = told(out) if isinstance(out, str) else type(out).__name__
        raise InvalidInput(f'out must be "dense", "bsr" or a BlockPattern, got {said}{hint}')


def _check_pattern(a: BSR, b: BSR, wanted: BlockPattern) -> None:
    shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
    if (wanted.shape, wanted.block) != (shape, block):
        raise InvalidInput(
            f"A @ B is {shape[0]}x{shape[1]} in blocks of {block[0]}x{block[1]}; the pattern is "
            f"{wanted.shape[0]}x{wanted.shape[1]} in blocks of {wanted.block[0]}x{wanted.block[1]}"
        )
    if wanted.device != a.device:
        raise InvalidInput(
            f"A is on {a.device} and the pattern on {wanted.device}; call pattern.to({str(a.device)!r})"
        )


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would expect a gradient for one of these."""
    if torch.is_grad_enabled():
        for x in tensors:  # a loop: any() of a generator takes twice as long, and every call comes by here
            if x is not None and x.requires_grad:
                return True
    return False


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is on where `x` is."""
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


def check_out(
    a: Any, b: Any, out: Any, epilogue: Epilogue = PLAIN, also: Mapping[str, Tensor] | None = None
) -> None:
    """InvalidInput unless `out` has the shape, dtype and device of a @ b, contiguous rows, and memory of its own.

    The matrix that the epilogue joins with the product may be `out` itself. `also` is read too.
    """
    if not isinstance(a, Tensor):
        like, shape = b, (*b.shape[:-2], a.shape[0], b.shape[-1])
        read = {"B": b, "A's values": a.values}
    else:
        like, shape = a, (*a.shape[:-1], b.shape[1])
        read = {"A": a, "B's values": b.values}
    arguments.dense("out", out)
    if (tuple(out.shape), out.dtype, out.device) != (shape, like.dtype, like.device):
        found = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise InvalidInput(f"out must be {like.dtype} {list(shape)} on {like.device}, got {found}")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            "out was made in inference mode, outside of which nothing may write to it; clone it"
        )
    if out.numel() == 0:
        return
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise InvalidInput(f"out must have contiguous rows, got strides {out.stride()}")
    if not out.is_contiguous() and _meets_itself(out):
        raise InvalidInput(
            f"out must have every element in its own place, got shape {list(out.shape)}, strides {out.stride()}"
        )
    if epilogue.bias is not None:
        read["the bias"] = epilogue.bias
    if epilogue.other is not None and not same_memory(out, epilogue.other):
        read["the matrix that is joined with the product"] = epilogue.other
    for name, other in {**read, **(also or {})}.items():
        if _overlap(out, other):
            raise InvalidInput(f"out overlaps the memory of {name}; C would be written where that is read")


def same_memory(x: Tensor, y: Tensor) -> bool:
    """True if both have the same elements in the same places."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def layout(b: Tensor) -> str:
    """ "row" for contiguous rows, "col" for the transpose view of such a matrix, "strided" for anything else.

    One column that is a row of some matrix, as one token of `linear` is, counts as "col": the other stride is real.
    """
    k, n = b.shape[-2:]
    row = (b.stride(-1) == 1 or n == 1) and b.stride(-2) >= n
    col = (b.stride(-2) == 1 or k == 1) and b.stride(-1) >= k
    if col and (n == 1 or not row):
        return "col"
    return "row" if row else "strided"


def aligned(*tensors: Tensor | None) -> bool:
    """True if all pointers and leading strides are multiples of 16 bytes."""
    return all(x is None or _is_aligned(x) for x in tensors)


def _is_aligned(x: Tensor) -> bool:
    lead = x.stride(-1) if layout(x) == "col" else x.stride(-2)
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in (lead, *x.stride()[:-2]))


def readable(x: Tensor) -> Tensor:
    """`x`, copied if it is not contiguous or not aligned."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def is_readable(x: Tensor) -> bool:
    """Whether `x` is contiguous and begins at a multiple of 16 bytes."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


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
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.element_size()
