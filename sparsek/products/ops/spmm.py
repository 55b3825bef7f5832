"""`spmm`, C = A @ B with a sparse matrix on either side: checks, the torch.library op, plan and launch.

One op serves every storage. The product with the transpose of a 2:4 matrix, as in B @ A and in the gradient of B, needs
its own kernels: its pairs run along M, where sparse tensor cores cannot read them. unpacked.semi24 and unpacked.bsr24
unpack the matrix into a workspace first, cpu.bsr24 blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsek.core import arguments, dtypes, memory, tracing
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import SecondOrderInput, saved_tensors
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.autocast import autocasts, dtype_on, follow_autocast
from sparsek.engine.call.recorded_calls import Slot
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import check_plan
from sparsek.engine.planning import choose
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized, SparseMatrix
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops import gradients, library_args, recorded_products
from sparsek.products.ops.library_args import SpmmArgs
from sparsek.products.ops.sddmm import sampled
from sparsek.products.plan import operands
from sparsek.products.plan.sddmm import Sampled
from sparsek.products.plan.spmm import Product, SpmmPlan, dtype_of, new_rows, tokens
from sparsek.products.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue

SPMM = Operation(SpmmPlan, choose)
PLAIN_CALL = "spmm"  # the settings of a recorded call without options, as `A @ B` is; a text is hashed once

_compiling = torch.compiler.is_dynamo_compiling  # of other tracing a recorded call finds out itself

SparseOperand: TypeAlias = SparseMatrix
DenseOperand: TypeAlias = Tensor | QuantizedTensor


def spmm(
    A: SparseOperand | DenseOperand,
    B: SparseOperand | DenseOperand,
    *,
    out: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    plan: SpmmPlan | None = None,
    kernel: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute C = alpha * A @ B + beta * out, with one sparse and one dense operand. `A @ B` is spmm(A, B).

    Once planned, GPU kernels do not synchronize. They allocate only C, and a workspace for block rows that are split or
    for a 2:4 matrix that is unpacked. The same plan gives the same bits.

    Args:
        A: [M, K]. One of A and B is a BSR, Semi24, BSR24 or Quantized, the other dense. Transposed views of a BSR cost
            nothing: `A.T @ B` and `B @ A.T` read the values in place.
        B: [K, N]. A dense operand is [..., K, N] or [..., M, K], of the dtype of the sparse one, on its device,
            row-major or the transpose view of a row-major matrix, which is read in place. Beside a Quantized it is a
            QuantizedTensor, or a bf16, fp16 or fp32 tensor that is rounded to E4M3 with a scale for each column of B
            (each row of A).
        out: Written instead of a new tensor: [..., M, N], with contiguous rows, sharing no memory with A or B.
        alpha: A number, finite in float32. If it is 0, NaN and Inf in A and B do not reach C, as in torch.addmm.
        beta: A number, finite in float32. If it is not 0, `out` is read first. `hopper.spmm` also
            rounds before it adds.
        plan: From `plan_spmm`. By default a plan is made once, and cached with the pattern.
        kernel: The name of a kernel, for example "hopper.spmm". It runs or raises Unsupported. The backward pass uses
            kernels of the same family.
        dtype: The dtype of C for a Quantized: bf16, fp16 or fp32. By default that of a dense tensor, bf16 for a
            QuantizedTensor.

    Returns:
        C [..., M, N], row-major, in the dtype of the operands, accumulated in float32 (float64 for float64).

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable in the values of a BSR, Semi24 or BSR24, with a gradient of their shape, and in the dense operand.
    That of the values reads the leading dims of B joined with N, which copies B and the gradient of C unless their
    layout allows that; of a Semi24 it is the dense product dC @ B.T at the stored elements. A Quantized gets no
    gradient, and the dense operand beside it that of the dequantized matrix, straight through its own rounding: the
    backward pass dequantizes to the dtype of C, into a workspace. `out` and `plan` have no gradient.

    The transpose of a 2:4 matrix, as in X @ A and in the gradient of B, is unpacked into a workspace in each call on a
    GPU; `explain()` has its size. A Semi24 or BSR24 in FP8 must be A; for x @ A.T use `sparsek.linear(x, A)`.

    Rows of B under block columns without any block never reach C, NaN or not. A NaN under a stored block reaches the
    rows of that block; where the plan joins block rows, also those joined with it; with vendor.dense, all rows. Under
    torch.autocast operands are cast to its dtype, which is that of C; with `out` or `plan` they are not.

    Examples:
        >>> A = sk.random_bsr(256, 128, block=32, density=0.25)
        >>> B = torch.randn(128, 10)
        >>> torch.equal(sk.spmm(A, B), A @ B)
        True
    """
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    slot = recorded_calls.UNBOUND
    # Under torch.compile no call is recorded, and none of this is traced.
    if (
        not _compiling()
        and out is plan is None
        and alpha.__class__ is beta.__class__ is float
        and beta == 0
        and (dtype is None or dtype.__class__ is torch.dtype)
    ):
        plain = alpha == 1 and kernel is dtype is None
        slot = recorded_products.product(A, B, PLAIN_CALL if plain else ("spmm", alpha, kernel, dtype))
        if slot.__class__ is not Slot:
            return slot
    call = SpmmCall(A, B, out, alpha, beta, plan, kernel, dtype)
    return route(call, slot)


@dataclass(slots=True, eq=False)
class SpmmCall:
    """A call of `spmm`: its operands and options, each declared here."""

    a: Any
    b: Any
    out: Tensor | None = None
    alpha: float = 1.0
    beta: float = 0.0
    plan: SpmmPlan | None = None
    kernel: str | None = None
    dtype: torch.dtype | None = None

    @property
    def matrix(self) -> Any:
        """The sparse operand."""
        return self.a if operands.is_sparse(self.a) else self.b

    def epilogue(self) -> Epilogue:
        """alpha, beta and `out`, checked."""
        alpha, beta = self.alpha, self.beta
        if type(alpha) is not float or type(beta) is not float:
            alpha, beta = arguments.number("alpha", alpha), arguments.number("beta", beta)
        if beta == 0:
            return PLAIN if alpha == 1 else Epilogue(alpha=alpha)
        if self.out is None:
            raise InvalidInput(f"beta is {beta:g} and there is no out= to multiply with it")
        return Epilogue(alpha=alpha, other=self.out, beta=beta)

    def by_plan(self, plan: SpmmPlan, epilogue: Epilogue) -> Tensor:
        """The result by a plan of the caller."""
        a, b, dtype = self.a, self.b, self.dtype
        check_plan(plan, SpmmPlan, "plan_spmm", self.kernel)
        transforms.check(*(getattr(x, "values", x) if operands.is_sparse(x) else x for x in (a, b)), self.out)
        transforms.refuse("plan=")
        if dtype is not None:
            operands.check_operands(a, b)
            planned = plan.problem.c.dtype
            if dtypes.name(dtype_of(self.matrix, b if self.matrix is a else a, dtype)) != planned:
                raise InvalidInput(f"dtype={dtype} contradicts plan, whose result is {planned}")
        return plan(a, b, self.out, epilogue)


def route(call: SpmmCall, slot: Slot) -> Tensor:
    """The result of a call that no recorded one gives: by its plan, into `out`, with a gradient, or without one."""
    if autocasts() and call.out is call.plan is None:
        call.dtype, call.a, call.b = follow_autocast_fp8(call.dtype, call.a, call.b)
    epilogue, out, kernel = call.epilogue(), call.out, call.kernel
    if call.plan is not None:
        return call.by_plan(call.plan, epilogue)
    if out is not None:
        if torch.compiler.is_compiling():
            raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
        transforms.refuse("out=")
        multiply(Product.of(call.a, call.b, out, epilogue, call.dtype), kernel)
        return out
    product = Product.of(call.a, call.b, None, epilogue, call.dtype)

    def run() -> Tensor:
        return product.seen(multiply(product, kernel, slot), call.a)

    if slot.learns and isinstance(product.b, Tensor):
        rows, a = product.out_layout == "col", call.matrix
        how = How.of(a, call.b if a is call.a else call.a, rows, rows, epilogue.alpha, False, kernel)
        return slot.differentiate(LearnedProduct(how).differentiable, a, run)
    return slot.run(run)


def follow_autocast_fp8(dtype: torch.dtype | None, *operands: Any) -> tuple[Any, ...]:
    """`dtype` and the operands of a call that may multiply in FP8; `dtype` becomes that of autocast.

    If `dtype` is given, nothing is cast.
    """
    fp8 = next((x for x in operands if isinstance(x, Quantized | QuantizedTensor)), None)
    if fp8 is None or not autocasts():
        return dtype, *follow_autocast(*operands)
    if dtype is not None:
        return dtype, *operands
    return dtype_on(fp8.device), *follow_autocast(*operands)


def plan_spmm(
    A: SparseOperand | DenseOperand,
    B: SparseOperand | DenseOperand,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> SpmmPlan:
    """Return the plan that `spmm(A, B)` would use: frozen, callable, and explained by `.explain()`.

    The schedule is made on the host and copied to the device of A once, or made there for a pattern of
    `BlockPattern.unchecked`. Under torch.autocast the plan is for the
    operands as they are, and calls with `plan=` are not cast.

    Args:
        A: As in `spmm`.
        B: As in `spmm`.
        out: The `out` of the calls, if they have one.
        epilogue: A sparsek.products.reference.epilogue.Epilogue of the calls. `linear(x, W, bias, activation)` is
            `plan_spmm(x, W.T, epilogue=Epilogue(bias=bias, activation=activation))`.
        kernel: The name of a kernel to use.
        config: A config of that kernel, by its text or by some of its fields, as `sparsek tune` prints them.
        device: The name of a card, for example "h200", present or not: the plan predicts and explains for it, and
            cannot be called. The dense operand may then be on the meta device.
        dtype: The dtype of C, as in `spmm`, where an operand is in FP8.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Examples:
        >>> A = sk.random_bsr(1024, 1024, block=128, density=0.25, dtype=torch.bfloat16)
        >>> sk.plan_spmm(A, torch.randn(1024, 512).bfloat16(), device="h200").kernel
        'hopper.spmm'
    """
    transforms.refuse("plan_spmm")
    operands.check_given(epilogue)
    call = Product.of(A, B, out, epilogue, dtype, predicted=device is not None)
    return SPMM.plan(call, kernel, config, device)


def _by_plan(plan: SpmmPlan, a: Any, b: Any) -> Tensor:
    """plan(A, B), by a recorded call where there is one."""
    slot = recorded_products.product(a, b, "plan", plan=plan)
    # The checks may copy x, and a copy is no operand of the recorded call.
    return slot.run(lambda: plan.checked(a, b)) if slot.__class__ is Slot else slot


SpmmPlan.quick = _by_plan


def multiply(call: Product, kernel: str | None, slot: Slot = recorded_calls.UNBOUND) -> Tensor:
    """The product, row-major, as `SpmmPlan.run` returns it; by the torch.library op where the call is traced.

    `slot`: that of the call.
    """
    a, transposed, b, out, epilogue, out_layout, dtype = call
    bias, other, values = epilogue.bias, epilogue.other, a.values
    if isinstance(b, QuantizedTensor):
        transforms.refuse("products of a QuantizedTensor do not go")
    transforms.check(values, call.wide, bias, other, out)
    learns = tracing.wants_gradient(values, call.wide, bias, other, out)
    if out is not None:
        if learns or torch.compiler.is_compiling():
            raise InvalidInput(operands.OUT_HAS_NO_GRADIENT)
        return run(call, kernel)
    traced = transforms.traced()
    if not (learns or traced):
        return run(call, kernel, slot)
    if not isinstance(call.matrix, Semi24):
        transforms.check_untransformed(call.matrix.pattern.indptr)
    if not traced and transforms.are_plain(values, call.wide, bias, other):
        rows = out_layout == "col"
        dense, other = (x.mT if rows and x is not None else x for x in (call.wide, other))
        relu = epilogue.activation == "relu"
        how = How.of(a, dense, rows, transposed, epilogue.alpha, relu, kernel)
        with torch.no_grad():
            c = run(call, kernel, slot)
        return ProductFunction.apply(values, dense, bias, other, (a, how, c, None))
    dense = (b.values, b.scale) if isinstance(b, QuantizedTensor) else (b, None)
    settings = epilogue.alpha, bias, epilogue.activation, other, epilogue.combine, dtype, kernel
    return transforms.call("spmm", *library_args.parts(a, transposed), *dense, out_layout == "col", *settings)


def run(call: Product, kernel: str | None, slot: Slot = recorded_calls.UNBOUND) -> Tensor:
    """The product, row-major, without autograd, of checked operands; by a recorded call where there is one.

    `slot`: as in `multiply`.
    """
    if slot.calls is recorded_products.PASSING:
        return recorded_products.run(SPMM, call, kernel, slot)
    a, transposed, b, out, epilogue, *lies = call
    bias, other = epilogue.bias, epilogue.other
    in_place = out is not None and other is not None and memory.same_memory(out, other)
    parts = epilogue.alpha, epilogue.beta, bias is None, epilogue.activation, epilogue.combine
    settings = "run", transposed, *lies, kernel, *parts, out is None, other is None, in_place
    also = [x for x in (bias, None if in_place else other, out) if x is not None]
    own = c = recorded_products.product(a, b, settings, also)
    if own.__class__ is Slot:
        c = own.run(lambda: recorded_products.run(SPMM, call, kernel, own))
    if out is not None:  # kernels write by its address, which autograd does not see
        increment_version(out)
    return c


def _run_op(args: SpmmArgs) -> Tensor:
    a, transposed = library_args.whole(args.parts)
    b: Any = args.b
    if args.b_scale is not None:
        b = QuantizedTensor.unchecked(operands.readable(b), args.b_scale.contiguous(), True)
    epilogue, layout = _op_epilogue(args), "col" if args.by_columns else "row"
    return run(Product(a, transposed, b, None, epilogue, layout, args.dtype), args.kernel)


def _fake(args: SpmmArgs) -> Tensor:
    _op_epilogue(args)
    b = args.b if args.b_scale is None else args.b.mT
    return new_rows(b, library_args.shape_of(args.parts)[0], args.by_columns, args.dtype)


def _op_epilogue(args: SpmmArgs) -> Epilogue:
    """The epilogue of the arguments of an op, which may be fake. Raise InvalidInput for those that do not fit."""
    b, (m, k) = args.b.shape if args.b_scale is None else args.b.mT.shape, library_args.shape_of(args.parts)
    if args.scale is None:
        operands.check_dense("B", args.b, args.values, "A")
    if len(b) < 2 or b[-2] != k or (args.scale is None and args.dtype != args.b.dtype):
        raise InvalidInput(f"A of the product is {[m, k]} and B {list(b)} for a C in {args.dtype}")
    epilogue = Epilogue(args.alpha, args.bias, args.activation, args.other, args.combine)
    layout = "col" if args.by_columns else "row"
    operands.check_epilogue(epilogue, (*b[:-2], m, b[-1]), args.dtype, args.b.device, layout)
    return epilogue


def _at_once(size: int, in_dims: Any, given: Any) -> tuple[Tensor, int] | None:
    """All items of a vmap in one product, if they share A and the bias: tokens are joined, matrices form a batch."""
    args = SpmmArgs(*given)
    dims: Any = SpmmArgs(*in_dims)
    shared = dims.values is None and dims.meta is None and dims.bias is None
    if not shared or dims.b is None or (args.other is None) != (dims.other is None):
        return None
    b = args.b.movedim(dims.b, 0)
    other = None if args.other is None else args.other.movedim(dims.other, 0)
    joins, columns = args.by_columns and b.dim() == 3, b.shape[-1]
    if joins:
        b, other = _beside(b), None if other is None else _beside(other)
    elif operands.layout(b) == "strided":
        b = b.contiguous()
    c = transforms.call("spmm", *args._replace(b=b, other=other))
    return (c.unflatten(0, (size, columns)) if joins else c), 0


def _beside(x: Tensor) -> Tensor:
    """Column-major matrices [size, R, T] as one column-major [R, size * T]."""
    return x.mT.reshape(x.shape[0] * x.shape[2], x.shape[1]).mT


transforms.register("spmm", SpmmArgs, _run_op, _fake, gradients.of_spmm, gradients.save_spmm, _at_once)


class How(NamedTuple):
    """The product that `ProductFunction` computes of a matrix A and a dense operand.

    `rows`: X A^T, with X [..., T, K], or X A if also `turned`; otherwise A B, or A^T B. `by_columns`: the gradient of
    the dense operand is written so. `form`: that of A in its signature. `relu` follows the product. `slope`: the name
    of another activation that follows it, whose slope the product also returns.
    """

    rows: bool
    turned: bool
    by_columns: bool
    form: Hashable
    alpha: float
    relu: bool
    kernel: str | None
    slope: str = ""

    @classmethod
    def of(cls, a: SparseMatrix, dense: Tensor | None, rows: bool, turned: bool, *options: Any) -> How:
        """That of these operands. InvalidInput for an inference tensor that the backward pass reads."""
        _, form, own = a.signature()
        if dense is None:
            return cls(rows, turned, rows, form, *options)
        for x in (*(own if dense.requires_grad else ()), *((dense,) if a.values.requires_grad else ())):
            arguments.kept("an operand, a pattern or a mask", x)
        return cls(rows, turned, rows or gradients.lies_by_columns(dense), form, *options)


@dataclass(slots=True, eq=False)
class LearnedProduct:
    """A product of the operands of a recorded call whose gradient autograd needs; see `Slot.differentiate`.

    `act`: the activation that torch applies to it. `residual`: the last operand is added behind that, by torch if
    `apart`.
    """

    how: How
    biased: bool = False
    residual: bool = False
    apart: bool = False
    act: str = ""

    def differentiable(self, a: SparseMatrix, given: Sequence[Tensor], made: Any) -> Tensor:
        """The result that was `made` of the tensors of `a`, the dense operand, the bias and the residual."""
        own = len(given) - 1 - self.biased - self.residual  # tensors of the matrix
        other = given[-1] if self.residual else None
        bias = given[own + 1] if self.biased else None
        product = (a, self.how, *made) if made.__class__ is tuple else (a, self.how, made, None)
        y = _multiplied(a.values, given[own], bias, None if self.apart else other, product)
        return finished(y, self.act, other) if self.apart else y


def finished(y: Tensor, act: str, residual: Tensor | None) -> Tensor:
    """act(y) + residual, by torch."""
    with dtypes.as_given(y.device):
        y = ACTIVATIONS[act](y)
        return y if residual is None else y + residual


class ProductFunction(torch.autograd.Function):
    """A product with gradients for plain tensors; the torch.library op takes more host time.

    `product` is A, how, and the result: act(alpha * product + bias) + other, with the leading dims and the layout of
    `dense`; and with `how.slope` act' [T, N], by which the gradient is multiplied. In a tuple, because torch takes a
    tensor for an input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        dense: Tensor | None,
        bias: Tensor | None,
        other: Tensor | None,
        product: tuple[SparseMatrix, How, Tensor, Tensor | None],
    ) -> Tensor:
        of_values, of_b, of_bias, _, _ = ctx.needs_input_grad
        a, how, c, slope = product
        # Torch lets nobody change in place a view, as of leading dims, that a function returns.
        c = c.data if c._is_view() else c
        cut = c if how.relu and (of_values or of_b or of_bias) else None
        later = None
        if slope is not None:  # a second derivative computes the product again
            of_values, of_b, later = True, True, SecondOrderInput.of(bias)
        stored, scale, scaled = (a.matrix, a.scale, a.kind) if type(a) is Quantized else (a, None, "")
        saved = values if of_b else None, scale if of_b else None, dense if of_values else None
        fields = dict(stored.__dict__, values=None)  # which autograd keeps, and metadata
        ctx.save_for_backward(*saved, cut, slope, fields.get("meta"))
        ctx.product = stored.__class__, fields, scaled, a.plan_owner(), how, later
        return c

    @staticmethod
    @transforms.one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, scale, dense, out, slope, meta = saved_tensors(ctx)
        kind, fields, scaled, owner, how, later = ctx.product
        fields = fields if meta is None else {**fields, "meta": meta}
        rows, turned, by_columns, _, alpha, _, kernel, activation = how
        needs, again, none = ctx.needs_input_grad, torch.is_grad_enabled(), None
        two_four, dz = not issubclass(kind, BSR), grad
        if slope is not None and not again:
            dz = tokens(grad) * slope
        elif slope is not None:
            bias = None if later is None else later.read("bias").contiguous()  # as the product before had it
            w = kind.of_fields({**fields, "values": values})
            z = multiply(Product.layer(dense, w, Epilogue(bias=bias)), kernel)
            (dz,) = torch.autograd.grad(ACTIVATIONS[activation](z), z, tokens(grad), create_graph=True)
        elif out is not None:
            dz = gradients.through_relu(grad, out)

        def products() -> tuple[Tensor | None, Tensor | None]:
            """The gradients of the values and of the dense operand."""
            whole: Any = kind.of_fields({**fields, "values": values})
            if scale is not None:
                whole = Quantized.unchecked(whole, scale, scaled).dequantize(dz.dtype)
            view, named = not two_four and whole.order is not None, gradients.turning(kernel, two_four)

            def sample(x: Tensor, y: Tensor) -> Tensor:
                if kind is Semi24:
                    return gradients.of_pairs(gradients.dense_product(x, y), whole.meta)
                at = whole.pattern.T if view else whole.pattern
                of_blocks = sampled(Sampled(x, y, at), gradients.same_family(kernel, "sddmm"))
                return gradients.of_pairs(of_blocks, whole.meta if two_four else None)

            def turn(dz: Tensor) -> Tensor:
                if two_four or (by_columns and not rows):
                    flipped = whole if two_four or turned else whole.T
                    epilogue, lies = Epilogue(alpha=alpha), "col" if by_columns else "row"
                    call = Product(flipped, two_four and not turned, dz, None, epilogue, lies, dz.dtype)
                    c = multiply(call, named)
                    c = c.mT if by_columns and not rows else c
                elif rows:
                    c = spmm(dz.mT, whole.T if turned else whole, alpha=alpha, kernel=named)
                else:
                    c = spmm(whole if turned else whole.T, dz, alpha=alpha, kernel=named)
                return c.view(*grad.shape[:-1], c.shape[-1]) if rows and c.dim() != grad.dim() else c

            parts = (tokens(dz).mT, none if dense is None else tokens(dense).mT) if rows else (dz, dense)
            return gradients.of_factors(needs, *parts, view != turned, alpha, sample, turn)

        slot: Any = recorded_calls.UNBOUND
        if not again and not torch.compiler.is_compiling() and not recorded_products.shares(owner):
            given = [x for x in (dz, dense, values, scale, meta) if x is not None]
            settings = "backward", how, *needs[:2]
            slot = recorded_calls.repeat(owner.derived("calls", recorded_calls.Calls), settings, given)
        of_values, of_b = slot.run(products) if slot.__class__ is Slot else slot
        of_bias = gradients.of_bias(tokens(dz).mT if rows else dz) if needs[2] else None
        return of_values, of_b, of_bias, grad if needs[3] else None, None


_multiplied = recorded_calls.applied(ProductFunction)
