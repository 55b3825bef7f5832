"""Which operation is the adjoint of which. Backward passes of products are products, which have gradients themselves.

    C = act(alpha A B + bias) + other      dA = alpha (dZ B^T) at A's blocks      dB = alpha A^T dZ      dZ = act' dC
                                           dbias = sums of dZ's rows              dother = dC
    S = (X Y) at P                         dX = dS Y^T                            dY = X^T dS
    C = A B at P                           dA = (dC B^T) at A's blocks            dB = (A^T dC) at B's blocks
    C = A B, dense                         the same, dC read at the blocks that C can have
    C = A B, A 2:4, or A^T B               no dA; dB = alpha A^T dZ, or alpha A dZ; dbias, dother as above
    out, lse = attention(q, k, v)          attention_backward, which has no gradient itself

A gradient of values has their shape and order, [nnzb, bm, bk] as they are stored, also where A was a transposed view:
for A = V^T dV is B dZ^T at V's blocks. So nothing is ever as large as a dense matrix that was not dense before.

The kernels of a backward pass are chosen as in any call. Where the forward pass named its kernel, they are those of the
same family: cpu.spmm leads to cpu.sddmm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsek.core.eager import save_for_backward
from sparsek.core.errors import InvalidInput
from sparsek.matrix.storage import Parts
from sparsek.ops import transforms
from sparsek.ops.flat import SpmmArgs
from sparsek.ops.planning import same_family
from sparsek.plan.attention_operands import NO_SECOND_GRADIENT
from sparsek.plan.operands import FP8_HAS_NO_GRADIENT, VALUES_HAVE_NO_GRADIENT

Gradients = tuple[Any, ...]

# Families whose 2:4 kernels multiply the transpose too. After another one the planner chooses among these.
TURNING = ("portable", "cpu", "reference")


def save_spmm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Keeps what the gradients of spmm read: A's values for B's, B for those of A, C where relu has cut. Refuses values
    that ask for a gradient and have none."""
    args, needs = SpmmArgs(*inputs), SpmmArgs(*ctx.needs_input_grad[: len(SpmmArgs._fields)])
    if args.scale is not None:
        raise InvalidInput(FP8_HAS_NO_GRADIENT)
    if needs.values and args.meta is not None:
        kind = "Semi24" if args.indptr is None else "BSR24"
        raise InvalidInput(VALUES_HAVE_NO_GRADIENT.format(kind=kind))
    learns = needs.values or needs.b or (args.bias is not None and needs.bias)
    cut = output if args.activation == "relu" and learns else None
    matrix = (args.values, args.meta) if needs.b else (None, None)
    save_for_backward(ctx, *matrix, args.indptr, args.indices, args.b if needs.values else None, cut)
    none: Any = None
    ctx.call = args._replace(values=none, meta=None, indptr=None, indices=None, b=none, bias=None, other=None)
    ctx.b_by_columns = lies_by_columns(args.b)
    ctx.without = args.activation not in ("", "relu") or (
        args.other is not None and bool(args.activation or args.combine == "mul")
    )


def of_spmm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of values, B, bias and other; `grad` lies as the op's output does."""
    if ctx.without:
        raise InvalidInput(
            "torch.ops.sparsek.spmm has no gradient with this epilogue; sparsek.linear and sparsek.swiglu have one"
        )
    values, meta, indptr, indices, b, out = ctx.saved_tensors
    args: SpmmArgs = ctx.call
    needs = SpmmArgs(*ctx.needs_input_grad[: len(SpmmArgs._fields)])

    def sample(x: Tensor, y: Tensor) -> Tensor:
        return transforms.call("sddmm", x, y, indptr, indices, args.sizes, same_family(args.kernel, "sddmm"))

    def turn(dz: Tensor) -> Tensor:
        flipped = args.parts._replace(
            values=values, meta=meta, indptr=indptr, indices=indices, transposed=not args.transposed
        )
        return _spmm(flipped, dz, ctx.b_by_columns, args.kernel, args.alpha)

    if args.by_columns:
        grad, out = grad.mT, None if out is None else out.mT
    wanted = needs.values, needs.b, needs.bias, needs.other
    of_values, of_b, of_bias, of_other = of_product(
        wanted, grad, b, out, args.transposed, args.alpha, sample, turn
    )
    found: dict[str, Any] = dict.fromkeys(SpmmArgs._fields)
    return tuple((found | {"values": of_values, "b": of_b, "bias": of_bias, "other": of_other}).values())


def of_product(
    needs: Sequence[Any],
    grad: Tensor,
    b: Tensor | None,
    out: Tensor | None,
    transposed: bool,
    alpha: float,
    sample: Callable[[Tensor, Tensor], Tensor],
    turn: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of values, B, bias and other in C = act(alpha A B + bias) + other, those that it `needs`.

    `out`: C, where relu has cut; it lies as `grad` does. `transposed`: A is the transpose of what is stored.
    sample(X, Y): the values of X Y at A's stored blocks. turn(dZ): alpha A^T dZ, as the caller wants it.
    """
    of_values = of_b = of_bias = None
    dz = grad if out is None else torch.where(out <= 0, 0, grad)
    if needs[0]:
        assert b is not None
        left, right = (_joined(b), _joined(dz)) if transposed else (_joined(dz), _joined(b))
        of_values = sample(left, right.mT)
        of_values = of_values if alpha == 1 else of_values * alpha
    if needs[1]:
        of_b = turn(dz)
    if needs[2]:
        of_bias = dz.sum(1 if dz.ndim == 2 else [dim for dim in range(dz.ndim) if dim != dz.ndim - 2])
    return of_values, of_b, of_bias, grad if needs[3] else None


def save_sddmm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Keeps X for the gradient of Y and Y for that of X."""
    x, y, indptr, indices, sizes, kernel = inputs
    of_x, of_y, *_ = ctx.needs_input_grad
    save_for_backward(ctx, indptr, indices, x if of_y else None, y if of_x else None)
    ctx.call = sizes, kernel
    ctx.by_columns = lies_by_columns(x), lies_by_columns(y)


def of_sddmm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of X and Y."""
    indptr, indices, x, y = ctx.saved_tensors
    sizes, kernel = ctx.call
    x_by_columns, y_by_columns = ctx.by_columns
    grad = inside(grad, indptr, indices, sizes)
    of_x = of_y = None
    if y is not None:
        a = Parts(grad, None, None, indptr, indices, sizes, "", False, False)
        of_x = _spmm(a, y.mT, x_by_columns, kernel)
    if x is not None:
        a = Parts(grad, None, None, indptr, indices, sizes, "", False, True)
        of_y = _spmm(a, x, not y_by_columns, kernel).mT
    return of_x, of_y, *[None] * 4


def save_spgemm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Keeps A's values for the gradient of B's and the other way round, and the three patterns."""
    a, b, c, kernel = inputs[:5], inputs[5:10], inputs[10:12], inputs[12]
    _save_two(ctx, a, b, c)
    ctx.call = a[3], a[4], b[3], b[4], kernel


def of_spgemm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of the values of A and of B."""
    *two, c_indptr, c_indices = ctx.saved_tensors
    a_sizes, a_transposed, b_sizes, b_transposed, kernel = ctx.call
    a, b = (*two[:3], a_sizes, a_transposed), (*two[3:], b_sizes, b_transposed)
    c_sizes = _sizes_of_product(a, b)
    c = inside(grad, c_indptr, c_indices, c_sizes), c_indptr, c_indices, c_sizes, False
    of_a = of_b = None
    if b[0] is not None:
        of_a = _at(c, _flip(b), a[1:], kernel)
    if a[0] is not None:
        of_b = _at(_flip(a), c, b[1:], kernel)
    return of_a, *[None] * 4, of_b, *[None] * 7


def save_spgemm_dense(ctx: Any, inputs: Any, output: Tensor) -> None:
    """As `save_spgemm`."""
    a, b, kernel = inputs[:5], inputs[5:10], inputs[10]
    _save_two(ctx, a, b, ())
    ctx.call = a[3], a[4], b[3], b[4], kernel


def of_spgemm_dense(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of the values of A and of B, from a dense gradient of C."""
    two = ctx.saved_tensors
    a_sizes, a_transposed, b_sizes, b_transposed, kernel = ctx.call
    a, b = (*two[:3], a_sizes, a_transposed), (*two[3:], b_sizes, b_transposed)
    of_a = of_b = None
    if b[0] is not None:
        of_a = _dense_at(grad, _flip(b), a[1:], kernel)
    if a[0] is not None:
        of_b = _dense_at(grad.mT, a, _flip(b)[1:], kernel)
    return of_a, *[None] * 4, of_b, *[None] * 5


def save_sampled(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Keeps X for the gradient of A's values and these for that of X, and both patterns."""
    x, a, p, kernel = inputs[0], inputs[1:6], inputs[6:10], inputs[10]
    of_x, of_a = ctx.needs_input_grad[:2]
    save_for_backward(ctx, x if of_a else None, a[0] if of_x else None, *a[1:3], *p[:2])
    ctx.call = a[3], a[4], p[2], p[3], kernel


def of_sampled(ctx: Any, grad: Tensor) -> Gradients:
    """S = (X A) at P, with A in BSR and X read where it matters: the gradients of X, dense, and of A's values."""
    x, values, a_indptr, a_indices, p_indptr, p_indices = ctx.saved_tensors
    a_sizes, a_transposed, p_sizes, p_transposed, kernel = ctx.call
    s = inside(grad, p_indptr, p_indices, p_sizes), p_indptr, p_indices, p_sizes, p_transposed
    a = values, a_indptr, a_indices, a_sizes, a_transposed
    of_x = of_a = None
    if values is not None:
        of_x = transforms.call("spgemm_dense", *s, *_flip(a), kernel)
    if x is not None:
        of_a = _dense_at(x.mT, s, a[1:], kernel)
    return of_x, of_a, *[None] * 9


def save_attention(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    """Keeps q, k, v, the mask's tensors, and out and lse, from which the weights are computed again."""
    q, k, v, mask, numbers, scale, return_lse, kernel, deterministic = inputs
    save_for_backward(ctx, q, k, v, *output, *mask)
    ctx.set_materialize_grads(False)
    ctx.call = numbers, scale, deterministic, kernel, return_lse


def of_attention(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    """The gradients of q, k and v. One that is not wanted costs no less, since they share their products."""
    numbers, scale, deterministic, kernel, with_lse = ctx.call
    if not with_lse:
        raise InvalidInput("gradients need lse; call torch.ops.sparsek.attention with return_lse=True")
    q, k, v, out, lse, *mask = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    args = mask, numbers, scale, deterministic, same_family(kernel, "attention_backward")
    found = torch.ops.sparsek.attention_backward(q, k, v, out, lse, grad, grad_lse, *args)
    wanted = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)]
    # torch wants the structure of the inputs, where a list of tensors has elements and any other list has none.
    listed = all(isinstance(x, Tensor) for x in mask)
    return *wanted, [None] * len(mask) if listed else None, None if numbers else [], *[None] * 4


def of_attention_backward(ctx: Any, *grads: Tensor) -> Gradients:
    """There are none."""
    raise InvalidInput(NO_SECOND_GRADIENT)


def _spmm(a: Parts, b: Tensor, by_columns: bool, kernel: str | None, alpha: float = 1.0) -> Tensor:
    """alpha * A @ B as an op, C written by columns or by rows."""
    kernel = turning(kernel, a.meta is not None)
    args = SpmmArgs(*a, b, None, by_columns, alpha, None, "", None, "add", b.dtype, kernel)
    c = transforms.call("spmm", *args)
    return c.mT if by_columns else c


def turning(kernel: str | None, two_four: bool) -> str | None:
    """The kernel that multiplies by the transpose, where `kernel` was named for the product."""
    if not two_four:
        return same_family(kernel, "spmm")
    return kernel if kernel is None or kernel.split(".")[0] in TURNING else None


def _at(x: Any, y: Any, p: Any, kernel: str | None) -> Tensor:
    """X Y, both BSR, at the blocks of P, in the order in which P's values are stored."""
    indptr, indices, _, transposed = p
    if transposed:  # V^T = X Y at P, so V = Y^T X^T
        x, y = _flip(y), _flip(x)
    return transforms.call("spgemm", *x, *y, indptr, indices, kernel)


def _dense_at(x: Tensor, a: Any, p: Any, kernel: str | None) -> Tensor:
    """X A, X dense and A in BSR, at the blocks of P, in the order in which P's values are stored."""
    return transforms.call("sampled", x, *a, *p, kernel)


def _save_two(ctx: Any, a: Any, b: Any, more: Any) -> None:
    of_a, of_b = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
    save_for_backward(ctx, a[0] if of_b else None, *a[1:3], b[0] if of_a else None, *b[1:3], *more)


def _flip(a: Any) -> Any:
    *parts, transposed = a
    return (*parts, not transposed)


def _sizes_of_product(a: Any, b: Any) -> list[int]:
    """Shape and block of A B."""
    (rows, bm), (columns, bn) = _sides(a, 0), _sides(b, 1)
    return [rows, columns, bm, bn]


def _sides(a: Any, side: int) -> tuple[int, int]:
    sizes, transposed = a[3:]
    side = 1 - side if transposed else side
    return sizes[side], sizes[2 + side]


def inside(values: Tensor, indptr: Tensor, indices: Tensor, sizes: Any) -> Tensor:
    """Values [nnzb, bm, bn] with 0 outside the matrix. Those are no outputs, but their gradient may be anything."""
    rows, columns, bm, bn = sizes
    if rows % bm:
        place = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)
        last = torch.searchsorted(indptr, place, right=True) == -(-rows // bm)
        beyond = torch.arange(bm, device=indices.device) >= rows % bm
        values = values.masked_fill((last[:, None] & beyond)[:, :, None], 0)
    if columns % bn:
        last = indices == columns // bn
        beyond = torch.arange(bn, device=indices.device) >= columns % bn
        values = values.masked_fill((last[:, None] & beyond)[:, None, :], 0)
    return values


def lies_by_columns(x: Tensor) -> bool:
    """True for the transpose view of a matrix with contiguous rows; a gradient then lies so too."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _joined(x: Tensor) -> Tensor:
    """[..., R, C] as [R, all the others]: a view of a matrix, and of a batch whose memory allows it."""
    return x if x.ndim == 2 else x.movedim(-2, 0).flatten(1)
