"""Checks of the operands of one call that read no values: shapes, dtypes, devices and layouts.

Kernels compute one form of product, C = A @ B with a sparse A. B @ A is (A.T @ B.mT).mT in that form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import MOVE, check_real, shown
from sparsek.core.errors import InvalidInput
from sparsek.core.memory import overlap, same_memory
from sparsek.products.formats.base import ALIGNMENT
from sparsek.products.formats.bsr import BSR, check_stored
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import SPARSE, Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.reference import epilogue as reference
from sparsek.products.reference.epilogue import ACTIVATION_NAMES, PLAIN, Epilogue

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of C in FP8 products, and of operands that these round."""

PLAN_HAS_NO_GRADIENT = (
    "a plan has no gradient; call it under torch.no_grad(), or call sparsek.{op} without plan=, which has one"
)
OUT_HAS_NO_GRADIENT = "out= takes no part in autograd; call it under torch.no_grad(), or omit out="


def work_key(kernel: Any, config: Any, p: Any, indptr: Tensor) -> tuple[Any, ...]:
    """Where a pattern that passes soon keeps the work of a plan, for the current stream."""
    stream = torch._C._cuda_getCurrentRawStream(indptr.device.index) if indptr.is_cuda else 0
    return "work", kernel.name, config, p, stream


def is_sparse(x: Any) -> bool:
    """Whether `x` is a sparse matrix that products accept."""
    return isinstance(x, SPARSE)


def check_operands(a: Any, b: Any, predicted: bool = False) -> None:
    """InvalidInput unless one operand is sparse and the other a dense [..., K, N] or [..., M, K] that fits it.

    `predicted`: the product is not computed, so the dense one may be on the meta device.
    """
    on_left = is_sparse(a)
    if not on_left and not is_sparse(b):
        fp8 = "sparsek.quantize makes one of a BSR, Semi24 or BSR24, and .dequantize() a tensor of a QuantizedTensor"
        hint = fp8 if QuantizedTensor in (type(a), type(b)) else "BSR.from_dense makes one of a dense matrix"
        raise InvalidInput(
            f"A or B must be a BSR, Semi24, BSR24 or Quantized, got {type(a).__name__} and {type(b).__name__}; {hint}"
        )
    name, sparse, other, dense = ("A", a, "B", b) if on_left else ("B", b, "A", a)
    if is_sparse(dense):
        both = isinstance(a, BSR) and isinstance(b, BSR)
        hint = (
            "sparsek.spgemm(A, B) multiplies two of them"
            if both
            else f"a {type(sparse).__name__} is multiplied with dense matrices only"
        )
        raise InvalidInput(f"{other} must be a dense torch.Tensor, got {type(dense).__name__}; {hint}")
    if not on_left and isinstance(sparse, Quantized) and not isinstance(sparse.matrix, BSR):
        raise InvalidInput(
            f"a {type(sparse.matrix).__name__} in FP8 must be the left operand, or the W of sparsek.linear(x, W)"
        )
    _check_beside(other, dense, sparse, name, predicted)
    if dense.ndim < 2:
        sides, how = ("[K, N] or [..., K, N]", "-1") if on_left else ("[M, K] or [..., M, K]", "0")
        raise InvalidInput(
            f"{other} must be {sides}, got {dense.ndim}-D; for a vector use {other}.unsqueeze({how})"
        )
    if on_left and dense.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if not on_left and dense.shape[-1] != b.shape[0]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: A needs {b.shape[0]} columns")
    if isinstance(dense, QuantizedTensor) and dense.turned != on_left:
        how = "sparsek.quantize(B.mT).mT" if on_left else "sparsek.quantize(A)"
        raise InvalidInput(
            f"{other} is scaled along the wrong side; both operands must be contiguous along K: {how}"
        )


def check_layer(x: Any, w: Any, predicted: bool = False) -> None:
    """InvalidInput unless w [N, K] is sparse and x [..., K] dense, and they fit each other; see `check_operands`."""
    if not is_sparse(w):
        raise InvalidInput(f"W must be a BSR, Semi24, BSR24 or Quantized, got {type(w).__name__}")
    _check_beside("x", x, w, "W", predicted)
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise InvalidInput(
            f"x is {list(x.shape)} and W [N, K] {list(w.shape)}: the last dim of x must be {w.shape[1]}"
        )
    if isinstance(x, QuantizedTensor) and x.turned:
        raise InvalidInput("x is a transposed view, scaled along the wrong side; use sparsek.quantize(x)")


def _check_beside(name: str, x: Any, sparse: Any, other: str, predicted: bool) -> None:
    """InvalidInput unless `x`, called `name`, is a dense operand for `sparse`, called `other`: on its device, and of
    a compatible dtype.
    """
    if isinstance(sparse, BSR):
        check_stored(sparse)
    anywhere = predicted and isinstance(x, Tensor) and x.is_meta
    if not torch.compiler.is_compiling() and not anywhere:
        arguments.living(f"the values of {other}", sparse.values)
        check_real(name, x, f"the values of {other}", sparse.values)
        if isinstance(sparse, BSR | BSR24):
            check_real(name, x, f"the pattern of {other}", sparse.pattern.indptr)
    if not isinstance(sparse, Quantized):
        _refuse_fp8(name, x, sparse, other)
        check_dense(name, x, sparse, other, here=not anywhere)
        return
    if isinstance(x, Tensor) and x.dtype not in OUT_DTYPES:
        raise InvalidInput(
            f"{name} is {x.dtype}; FP8 products round {', '.join(map(str, OUT_DTYPES))}, or take "
            f"sparsek.quantize({name}), which has FP8 values and scales"
        )
    device = x.device if isinstance(x, QuantizedTensor) else arguments.dense(name, x).device
    if not anywhere:
        arguments.one_device(f"{other} is", sparse.device, name, device, MOVE)


def _refuse_fp8(name: str, x: Any, w: Any, other: str) -> None:
    if isinstance(x, QuantizedTensor):
        raise InvalidInput(
            f"{name} is a QuantizedTensor, so {other} must be a Quantized, got {type(w).__name__}; sparsek.quantize "
            f"makes one of a sparse matrix, and {name}.dequantize() is a tensor"
        )


def check_dense(name: str, x: Any, like: Any = None, other: str = "", here: bool = True) -> None:
    """InvalidInput unless `x`, called `name`, is dense, and has the dtype and, if `here`, the device of `like`, called
    `other`.
    """
    arguments.dense(name, x)
    if like is None:
        dtypes.name(x.dtype)
        return
    if x.dtype != like.dtype:
        raise InvalidInput(
            f"{other} is {like.dtype} and {name} {x.dtype}; cast one of them, SparseK does not"
        )
    if here:
        arguments.one_device(f"{other} is", like.device, name, x.device, MOVE)
    check_real(other, like, name, x)


def check_given(epilogue: Any) -> None:
    """InvalidInput unless a caller's `epilogue` is an Epilogue, whose other matrix is dense and at least 2-D."""
    if epilogue is PLAIN:
        return
    if not isinstance(epilogue, Epilogue):
        raise InvalidInput(f"epilogue is {shown(epilogue)}; it must be an Epilogue")
    if epilogue.other is not None and arguments.dense("other", epilogue.other).dim() < 2:
        raise InvalidInput(f"other is {list(epilogue.other.shape)}; it must have the shape of the product")


def check_epilogue(
    epilogue: Epilogue, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, out_layout: str
) -> None:
    """InvalidInput unless `epilogue` fits a C [..., M, N] of that shape and dtype, its other matrix in C's layout."""
    if epilogue.is_plain:
        return
    reference.check_epilogue(epilogue, shape, dtype, device)
    if epilogue.bias is not None:
        _check_bias(epilogue.bias, shape[-2])
    along = -1 if out_layout == "row" else -2
    for name, part in (("other matrix", epilogue.other), ("slope", epilogue.slope)):
        if part is not None and part.stride(along) != 1 and part.shape[along] > 1:
            raise InvalidInput(
                f"the {name} of the epilogue must have contiguous rows, got strides {part.stride()}"
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
    check_activation(activation)
    if is_sparse(w):
        check_layer(x, w)
    elif isinstance(w, Tensor):
        _refuse_fp8("x", x, w, "W")
        check_dense("W", w)
        check_dense("x", x, w, "W")
        if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
            raise InvalidInput(
                f"x is {list(x.shape)} and W {list(w.shape)}: W must be [N, K] and the last dim of x K"
            )
    else:
        raise InvalidInput(
            f"W must be a BSR, a Semi24, a BSR24, a Quantized or a dense torch.Tensor, got {type(w).__name__}"
        )
    like = None if isinstance(w, Quantized) else w
    if bias is not None:
        check_dense("bias", bias, like, "W")
        check_real("W", w.values if is_sparse(w) else w, "bias", bias)
        _check_bias(bias, w.shape[0], contiguous=False)
    if residual is not None:
        check_dense("residual", residual, like, "W")
        check_real("W", w.values if is_sparse(w) else w, "residual", residual)
        check_shape("residual", residual, (*x.shape[:-1], w.shape[0]))
        if residual.device != w.device:
            raise InvalidInput(f"residual is on {residual.device} and W on {w.device}; use one device")


def check_activation(activation: Any) -> None:
    """InvalidInput unless it is None or the name of an activation."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATION_NAMES):
        raise InvalidInput(
            f"activation is {shown(activation)}; use one of {', '.join(ACTIVATION_NAMES)}, or None"
        )


def check_sddmm(x: Any, y: Any, pattern: Any, predicted: bool = False) -> None:
    """InvalidInput unless `x` [M, K] and `y` [K, N] are dense, of one dtype and device, and fit the M x N `pattern`.

    `predicted`: the product is not computed, so both may be on the meta device.
    """
    if not isinstance(pattern, BlockPattern):
        hint = "; pass its .pattern" if isinstance(pattern, BSR) else ""
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
    if predicted and x.is_meta:
        return
    if pattern.device != x.device:
        raise InvalidInput(
            f"X is on {x.device} and the pattern on {pattern.device}; call pattern.to({str(x.device)!r})"
        )
    check_real("X", x, "Y", y)
    check_real("X", x, "the pattern", pattern.indptr)


def check_spgemm(a: Any, b: Any, out: Any) -> None:
    """InvalidInput unless `a` and `b` are BSR that fit together, and `out` describes a C."""
    for name, each, other in (("A", a, b), ("B", b, a)):
        if not isinstance(each, BSR):
            hint = (
                "sparsek.spmm(A, B) multiplies it with a BSR"
                if isinstance(other, BSR)
                else "use BSR.from_dense"
            )
            raise InvalidInput(f"{name} must be a BSR, got {type(each).__name__}; {hint}")
        check_stored(each)
        if not torch.compiler.is_compiling():
            arguments.living(f"the values of {name}", each.values)
            check_real(f"the pattern of {name}", each.pattern.indptr, f"the values of {name}", each.values)
    check_real("A", a.values, "B", b.values)
    if a.shape[1] != b.shape[0]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if a.block[1] != b.block[0]:
        raise InvalidInput(
            f"blocks of A are {a.block[0]}x{a.block[1]} and of B {b.block[0]}x{b.block[1]}: "
            f"those of B need {a.block[1]} rows"
        )
    check_dense("B", b.values, a, "A")
    check_wanted(out)
    if isinstance(out, BlockPattern):
        _check_pattern(a, b, out)


def check_wanted(out: Any) -> None:
    """InvalidInput unless `out` describes a product of two BSR."""
    if not isinstance(out, BlockPattern) and not (isinstance(out, str) and out in ("dense", "bsr")):
        hint = "; pass its .pattern" if isinstance(out, BSR) else ""
        said = shown(out) if isinstance(out, str) else type(out).__name__
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


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether torch may multiply these as TF32. Reads the newer setting: it follows the older ones, whose getters raise
    once the newer one was set.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def check_out(a: Any, b: Any, out: Any, epilogue: Epilogue = PLAIN) -> None:
    """InvalidInput unless `out` has the shape of a @ b, a dtype of C, contiguous rows, and memory of its own.

    The other matrix of the epilogue may be `out` itself. `out` may overlap a dense operand that is rounded to FP8
    before anything is written.
    """
    name, sparse, other, dense = ("A", a, "B", b) if is_sparse(a) else ("B", b, "A", a)
    dtype = arguments.dense("out", out).dtype
    read = {f"{name}'s values": sparse.values}
    if isinstance(sparse, Quantized):
        arguments.dtype("the dtype of out", dtype, OUT_DTYPES)
        read[f"{name}'s scales"] = sparse.scale
        if isinstance(dense, QuantizedTensor):
            read |= {f"{other}'s values": dense.values, f"{other}'s scales": dense.scale}
    else:
        dtype = dense.dtype
        read[other] = dense
    shape = (*dense.shape[:-2], a.shape[-2], b.shape[-1])
    if (tuple(out.shape), out.dtype, out.device) != (shape, dtype, dense.device):
        found = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise InvalidInput(f"out must be {dtype} {list(shape)} on {dense.device}, got {found}")
    check_real(f"the values of {name}", sparse.values, "out", out)
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            "out is an inference tensor, which cannot be written to outside inference mode; clone it"
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
        read["the other matrix of the epilogue"] = epilogue.other
    for each, held in read.items():
        if overlap(out, held):
            raise InvalidInput(f"out overlaps the memory of {each}; C would be written where that is read")


def layout(b: Tensor) -> str:
    """ "row" for contiguous rows, "col" for the transpose view of a row-major matrix, "strided" for anything else.

    A single column that is a row of another matrix, such as one token of `linear`, counts as "col": its other stride
    is real.
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
    """False if the dims nest, each with a stride beyond the extent of the smaller ones: no two elements overlap."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
