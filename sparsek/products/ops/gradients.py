"""The adjoints of the operations. The backward pass of a product consists of products, which have gradients too.

    C = act(alpha A B + bias) + other      dA = alpha (dZ B^T) at A's blocks      dB = alpha A^T dZ      dZ = act' dC
                                           dbias = sums of dZ's rows              dother = dC
    S = (X Y) at P                         dX = dS Y^T                            dY = X^T dS
    C = A B at P                           dA = (dC B^T) at A's blocks            dB = (A^T dC) at B's blocks
    C = A B, dense                         the same, dC read at the blocks that C can have
    C = A B, or A^T B, A 2:4               dA = alpha (dZ B^T) at A's pairs; the rest as above
    C = A B, A in FP8                      no dA; dB = alpha A^T dZ, A dequantized to the dtype of dZ
    y = mlp(x, A, B), h = act(z)           dz = (dy B) * act'(z), then those of y = h B^T and of z = x A^T

A gradient of values has their shape and order, [nnzb, bm, bk] as stored, for a transposed view too: for A = V^T, dV is
B dZ^T at the blocks of V. So no gradient is larger than its operand.

The kernels of a backward pass are chosen as in any call. If the forward pass named its kernel, they are of the same
family where it has one: hopper.spmm leads to hopper.sddmm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import save_for_backward, saved_tensors
from sparsek.engine.call import transforms
from sparsek.engine.call.transforms import Gradients
from sparsek.engine.planning import same_family
from sparsek.products.formats import two_four
from sparsek.products.formats.padding import zero_outside
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.storage import Parts
from sparsek.products.ops.library_args import (
    FlatMatrix,
    MlpArgs,
    SampledArgs,
    SddmmArgs,
    SpgemmArgs,
    SpmmArgs,
    dequantized,
)
from sparsek.products.plan.spmm import tokens

# Families whose 2:4 kernels also multiply the transpose. For another family the planner chooses among these.
TURNING = ("unpacked", "cpu", "reference")


def save_spmm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Save what the gradients of spmm read: the values of A for B, B for the values of A, and C for relu."""
    args, needs = SpmmArgs(*inputs), _needs(ctx, SpmmArgs)
    ctx.without = args.activation not in ("", "relu") or (
        args.other is not None and bool(args.activation or args.combine == "mul")
    )
    ctx.b_by_columns = lies_by_columns(args.b)
    learns = needs.values or needs.b or (args.bias is not None and needs.bias)
    none: Any = None
    if not needs.values:
        args = args._replace(b=none)
    if not needs.b:
        args = args._replace(values=none, scale=none)
    _save(
        ctx,
        args._replace(b_scale=none, bias=none, other=none),
        output if args.activation == "relu" and learns else None,
    )


def of_spmm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of values, B, bias and other; `grad` has the layout of the output of the op."""
    if ctx.without:
        raise InvalidInput(
            "torch.ops.sparsek.spmm has no gradient with this epilogue; sparsek.linear and sparsek.swiglu have one"
        )
    args, out = _saved(ctx, SpmmArgs)
    needs = _needs(ctx, SpmmArgs)

    def sample(x: Tensor, y: Tensor) -> Tensor:
        lists = args.indptr, args.indices, args.sizes
        if args.indptr is None:
            return of_pairs(dense_product(x, y), args.meta)
        return of_pairs(transforms.call("sddmm", x, y, *lists, same_family(args.kernel, "sddmm")), args.meta)

    def turn(dz: Tensor) -> Tensor:
        flipped = dequantized(args.parts, dz.dtype)._replace(transposed=not args.transposed)
        return _spmm(flipped, dz, ctx.b_by_columns, args.kernel, args.alpha)

    if args.by_columns:
        grad, out = grad.mT, None if out is None else out.mT
    wanted = needs.values, needs.b, needs.bias, needs.other
    found = of_product(wanted, grad, args.b, out, args.transposed, args.alpha, sample, turn)
    return _named(SpmmArgs, **dict(zip(("values", "b", "bias", "other"), found, strict=True)))


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
    """The gradients of values, B, bias and other in C = act(alpha A B + bias) + other, as far as `needs` is true.

    `out`: C after relu, with the layout of `grad`. `transposed`: A is the transpose of what is stored.
    sample(X, Y): the values of X Y at the stored blocks of A. turn(dZ): alpha A^T dZ, in the layout of the caller.
    """
    dz = grad if out is None else through_relu(grad, out)
    both = of_factors(needs, dz, b, transposed, alpha, sample, turn)
    return *both, of_bias(dz) if needs[2] else None, grad if needs[3] else None


def dense_product(x: Tensor, y: Tensor) -> Tensor:
    """X Y by torch, in their dtype under torch.autocast too."""
    with dtypes.as_given(x.device):
        return x @ y


def of_pairs(dense: Tensor, meta: Tensor | None) -> Tensor:
    """The elements of `dense` that 2:4 metadata stores; all of them without metadata."""
    return dense if meta is None else two_four.stored(dense, meta)


def through_relu(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient of what relu made `out` of, by the kernel of torch's own relu."""
    return torch.ops.aten.threshold_backward.default(grad, out, 0)


def of_bias(dz: Tensor) -> Tensor:
    """The sums of the rows of dZ [..., M, N]."""
    return dz.sum(1 if dz.ndim == 2 else [dim for dim in range(dz.ndim) if dim != dz.ndim - 2])


def of_factors(
    needs: Sequence[Any],
    dz: Tensor,
    b: Tensor | None,
    transposed: bool,
    alpha: float,
    sample: Callable[[Tensor, Tensor], Tensor],
    turn: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of values and B: see `of_product`."""
    of_values = of_b = None
    if needs[0]:
        assert b is not None
        left, right = (_joined(b), _joined(dz)) if transposed else (_joined(dz), _joined(b))
        of_values = sample(left, right.mT)
        if alpha != 1:
            of_values = of_values * alpha if alpha else torch.zeros_like(of_values)
    if needs[1]:
        of_b = turn(dz)
    return of_values, of_b


def save_sddmm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Save X for the gradient of Y and Y for that of X."""
    args, needs, none = SddmmArgs(*inputs), _needs(ctx, SddmmArgs), cast(Any, None)
    ctx.by_columns = lies_by_columns(args.x), lies_by_columns(args.y)
    _save(ctx, args._replace(x=args.x if needs.y else none, y=args.y if needs.x else none))


def of_sddmm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of X and Y."""
    (args,) = _saved(ctx, SddmmArgs)
    lists = args.indptr, args.indices, args.sizes
    a = Parts(inside(grad, *lists), None, None, *lists, "", False, False)
    of_x = of_y = None
    if args.y is not None:
        of_x = _spmm(a, args.y.mT, ctx.by_columns[0], args.kernel)
    if args.x is not None:
        of_y = _spmm(a._replace(transposed=True), args.x, not ctx.by_columns[1], args.kernel).mT
    return _named(SddmmArgs, x=of_x, y=of_y)


def save_spgemm(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Save the values of A for the gradient of those of B, and vice versa, and the three patterns."""
    dense = len(inputs) < len(SpgemmArgs._fields)
    args, none = (SpgemmArgs.dense if dense else SpgemmArgs)(*inputs), cast(Any, None)
    of_a, of_b = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
    a_values, b_values = args.a_values if of_b else none, args.b_values if of_a else none
    _save(ctx, args._replace(a_values=a_values, b_values=b_values))


def of_spgemm(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of the values of A and of B, for a C in BSR or a dense C."""
    (args,) = _saved(ctx, SpgemmArgs)
    a, b, kernel = args.a, args.b, args.kernel
    of_a = of_b = None
    if args.form == "dense":
        of_a = None if b.values is None else _dense_at(grad, b.flip(), a, kernel)
        of_b = None if a.values is None else _dense_at(grad.mT, a, b.flip(), kernel)
        return of_a, *[None] * 4, of_b, *[None] * 5
    lists = args.c_indptr, args.c_indices, args.c_sizes
    c = FlatMatrix(inside(grad, *lists), *lists, False)
    of_a = None if b.values is None else _at(c, b.flip(), a, kernel)
    of_b = None if a.values is None else _at(a.flip(), c, b, kernel)
    return _named(SpgemmArgs, a_values=of_a, b_values=of_b)


class Adjoint(NamedTuple):
    """What the backward pass of x A^T computes with A: see `of_product`."""

    transposed: bool
    sample: Callable[[Tensor, Tensor], Tensor]
    turn: Callable[[Tensor], Tensor]


def of_layers(
    needs: Sequence[Any], grad: Tensor, x: Tensor, hidden: Tensor, up: Adjoint, down: Adjoint
) -> Gradients:
    """The gradients of x, of the values of A and its bias, of those of B and its bias, as far as `needs` is true, in
    y = h B^T + bias with h = act(z) and z = x A^T + bias.

    down.turn(dy^T) is dz = (dy B) * act'(z), [T, N]; up.turn(dz^T) is dx, [T, K].
    """

    def layer(wanted: Sequence[Any], dz: Tensor, x: Tensor, by: Adjoint) -> Any:
        given = dz.mT, tokens(x).mT, None, by.transposed, 1.0, by.sample, by.turn
        return of_product((*wanted, False), *given)[:3]

    of_down, dz, of_down_bias = layer((needs[3], any(needs[:3]), needs[4]), tokens(grad), hidden, down)
    of_up, dx, of_up_bias = (
        layer((needs[1], needs[0], needs[2]), dz, x, up) if any(needs[:3]) else (None,) * 3
    )
    return None if dx is None else dx.view(x.shape), of_up, of_up_bias, of_down, of_down_bias


def save_mlp(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Save x, the values of both matrices, the hidden features and their slope, which have no gradients themselves."""
    ctx.set_materialize_grads(False)
    _save(ctx, MlpArgs(*inputs)._replace(up_bias=None, down_bias=None), *output[1:])


def of_mlp(ctx: Any, grad: Tensor | None, *more: Tensor | None) -> Gradients:
    """The gradients of x, of the values of both matrices and of both biases."""
    if grad is None or more != (None, None):
        raise InvalidInput(
            "torch.ops.sparsek.mlp has no second gradient; call sparsek.mlp outside of torch.compile, where it has one"
        )
    args, hidden, slope = _saved(ctx, MlpArgs)
    needs, named = _needs(ctx, MlpArgs), args.kernel

    def adjoint(a: FlatMatrix, other: Tensor | None) -> Adjoint:
        def sample(left: Tensor, right: Tensor) -> Tensor:
            return transforms.call("sddmm", left, right, *a[1:4], same_family(named, "sddmm"))

        def turn(dz: Tensor) -> Tensor:
            parts = Parts(a.values, None, None, *a[1:4], "", False, not a.transposed)
            more = None, "", other, "add" if other is None else "mul", dz.dtype, turning(named, False)
            return transforms.call("spmm", *SpmmArgs(*parts, dz, None, True, 1.0, *more))

        return Adjoint(a.transposed, sample, turn)

    names = "x", "up_values", "up_bias", "down_values", "down_bias"
    wanted = [getattr(needs, name) for name in names]
    by = adjoint(args.up, None), adjoint(args.down, slope.mT)
    found = of_layers(wanted, grad, args.x, hidden, *by)
    return _named(MlpArgs, **dict(zip(names, found, strict=True)))


def save_sampled(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Save X for the gradient of the values of A, these for that of X, and both patterns."""
    args, needs, none = SampledArgs(*inputs), _needs(ctx, SampledArgs), cast(Any, None)
    x, values = args.x if needs.values else none, args.values if needs.x else none
    _save(ctx, args._replace(x=x, values=values))


def of_sampled(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients of X, dense, and of the values of A, for S = (X A) at P with A in BSR."""
    (args,) = _saved(ctx, SampledArgs)
    lists = args.p_indptr, args.p_indices, args.p_sizes
    s = FlatMatrix(inside(grad, *lists), *lists, args.p_transposed)
    of_x = of_values = None
    if args.values is not None:
        of_x = transforms.call("spgemm_dense", *s, *args.a.flip(), args.kernel)
    if args.x is not None:
        of_values = _dense_at(args.x.mT, s, args.a, args.kernel)
    return _named(SampledArgs, x=of_x, values=of_values)


def _spmm(a: Parts, b: Tensor, by_columns: bool, kernel: str | None, alpha: float = 1.0) -> Tensor:
    """alpha * A @ B as an op; C is written column-major or row-major."""
    kernel = turning(kernel, a.meta is not None)
    args = SpmmArgs(*a, b, None, by_columns, alpha, None, "", None, "add", b.dtype, kernel)
    c = transforms.call("spmm", *args)
    return c.mT if by_columns else c


def turning(kernel: str | None, two_four: bool) -> str | None:
    """The kernel that multiplies by the transpose, if `kernel` was named for the product."""
    kernel = None if kernel is None else kernel.removesuffix("_fp8")
    if not two_four:
        return same_family(kernel, "spmm")
    return kernel if kernel is None or kernel.split(".")[0] in TURNING else None


def _at(x: FlatMatrix, y: FlatMatrix, p: FlatMatrix, kernel: str | None) -> Tensor:
    """X Y of two BSR at the blocks of P, in the order in which the values of P are stored."""
    if p.transposed:  # V^T = X Y at P, so V = Y^T X^T
        x, y = y.flip(), x.flip()
    return transforms.call("spgemm", *x, *y, p.indptr, p.indices, kernel)


def _dense_at(x: Tensor, a: FlatMatrix, p: FlatMatrix, kernel: str | None) -> Tensor:
    """X A, with a dense X and A in BSR, at the blocks of P, in the order in which the values of P are stored."""
    return transforms.call("sampled", x, *a, *p[1:], kernel)


Args = TypeVar("Args", bound=tuple[Any, ...])


def _save(ctx: Any, args: tuple[Any, ...], *more: Tensor | None) -> None:
    """Save the arguments of an op, and more tensors, for `_saved`."""
    save_for_backward(ctx, *[x if isinstance(x, Tensor) else None for x in args], *more)
    ctx.rest = [None if isinstance(x, Tensor) else x for x in args]


def _saved(ctx: Any, kind: type[Args]) -> tuple[Any, ...]:
    """The arguments of an op, as `kind`, and the other tensors that were saved."""
    saved, rest = saved_tensors(ctx), ctx.rest
    both = [x if tensor is None else tensor for tensor, x in zip(saved, rest, strict=False)]
    return kind(*both), *saved[len(rest) :]


def _needs(ctx: Any, kind: type[Args]) -> Args:
    """Which arguments of an op need a gradient."""
    return kind(*ctx.needs_input_grad[: len(kind._fields)])  # pyright: ignore[reportAttributeAccessIssue]


def _named(kind: Any, **found: Tensor | None) -> Gradients:
    """The gradients of an op from those named; the others are None."""
    return tuple(found.get(name) for name in kind._fields)


def inside(values: Tensor, indptr: Tensor, indices: Tensor, sizes: Any) -> Tensor:
    """Values [nnzb, bm, bn] with 0 outside the matrix, where the incoming gradient may be anything."""
    rows, columns, bm, bn = sizes
    if not rows % bm and not columns % bn:
        return values
    return zero_outside(BlockPattern.unchecked((rows, columns), (bm, bn), indptr, indices), values)


def lies_by_columns(x: Tensor) -> bool:
    """Whether this is the transpose view of a matrix with contiguous rows; its gradient is then one too."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _joined(x: Tensor) -> Tensor:
    """[..., R, C] as [R, all other dims]: a view of a matrix, and of a batch whose layout allows it."""
    return x if x.ndim == 2 else x.movedim(-2, 0).flatten(1)
