"""Ops under torch.func: grad, vjp, jacrev and vmap transform products; forward mode is refused, not ignored.

torch.func does not transform torch.library ops with gradients, and takes their tangents for 0. It does transform an
autograd.Function with a separate setup_context. So each op has one here, which runs the op on the unwrapped tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_dynamic_layer_stack_depth,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from sparsek.core import dtypes, operations
from sparsek.core.arguments import TENSORS
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import alive, check_no_tangent
from sparsek.engine.call.recorded_calls import applied
from sparsek.engine.launch.recorder import recorder

NO_TANGENT = (
    "products have no forward-mode derivative (jvp, jacfwd, hessian): torch.autograd.functional.jvp finds the same by "
    "reverse mode, and torch.func.jacrev a Jacobian; or sparsek.products.reference has products of plain torch, which "
    "are slow"
)

Made = TypeVar("Made")
Gradients = tuple[Any, ...]
Backward = Callable[..., Gradients]
Vmap = Callable[[Any, Any, Any], tuple[Tensor, int] | None]

_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}
_DIRECT: dict[str, Callable[..., Tensor]] = {}
_LEARNED: dict[str, Callable[..., Tensor]] = {}


def active() -> bool:
    """Whether torch.func transforms this call, and torch.compile does not trace it."""
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def check_rules() -> None:
    """InvalidInput for transforms of torch.func that have no rule for ops with gradients.

    They are functionalize, and under torch.compile all. Without fullgraph=True torch then runs the function uncompiled.
    In inference mode they are also those that differentiate, where torch itself gives 0.
    """
    if not torch._C._are_functorch_transforms_active():
        return
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "torch.compile(fullgraph=True) cannot trace this call inside a function that torch.func transforms; leave "
            "fullgraph away, or compute gradients by .backward()"
        )
    kinds = [each.key() for each in get_interpreter_stack() or ()]
    if torch.is_inference_mode_enabled() and TransformType.Grad in kinds and not _learns_in_inference_mode():
        raise InvalidInput(
            f"torch.func of torch {torch.__version__} has no gradients in torch.inference_mode; use torch.no_grad there"
        )
    if TransformType.Functionalize in kinds:
        raise InvalidInput(
            "torch.func.functionalize does not transform calls of sparsek; make them outside of it, or use "
            "torch.compile, which needs no functionalize"
        )


@functools.cache
def _learns_in_inference_mode() -> bool:
    """Whether torch.func differentiates in inference mode, which is on: gradients of torch 2.11 are 0 there."""
    with _disable_current_modes():
        return bool(torch.func.grad(torch.sum)(torch.ones((), dtype=torch.float32, device="cpu")))


def _maps_alone() -> bool:
    """Whether torch.compile traces one vmap, which calls an op with one output for each item."""
    return get_dynamic_layer_stack_depth() == 1 and (
        retrieve_current_functorch_interpreter().key() == TransformType.Vmap
    )


def traced() -> bool:
    """Whether calls are traced op by op: by torch.compile, torch.func, or a TorchDispatchMode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > (recorder() is not None)
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether none of these is of a tensor subclass, which may trace calls too."""
    return all(x is None or type(x) in TENSORS for x in tensors)


def function_of(module: str, name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """A function of a module of kernels; None, for a fallback to torch or numpy, without Triton or if calls with these
    tensors are traced."""
    if traced() or not are_plain(*tensors):
        return None
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return None


def kernel_of(module: str, name: str) -> Callable[..., Any]:
    """`function_of` as a function of its arguments, the tensors among them looked at; the module loads on the first
    call."""

    def run(*given: Any) -> Any:
        kernel = function_of(module, name, *(x for x in given if isinstance(x, Tensor)))
        return None if kernel is None else kernel(*given)

    return run


def untraced(*tensors: Any) -> bool:
    """Whether autograd alone differentiates this call, by reverse mode, and nothing traces it."""
    return forward_ad._current_level < 0 and not traced() and are_plain(*tensors)


def check(*tensors: Any) -> None:
    """Raise InvalidInput if forward-mode differentiation expects a tangent; under torch.func the jvp rule raises it."""
    if forward_ad._current_level >= 0 and not active():
        check_no_tangent(NO_TANGENT, *tensors)


def check_untransformed(*indices: Tensor) -> None:
    """Raise InvalidInput for indices of a pattern that torch.func has wrapped."""
    if active() and any(map(is_functorch_wrapped_tensor, indices)):
        raise InvalidInput(
            "this pattern was made inside a function that torch.func transforms; make it outside, and take a view "
            ".T that is needed there once outside as well"
        )


def refuse(what: str) -> None:
    """Raise InvalidInput inside torch.func, for a call or argument `what` that it cannot transform."""
    if active():
        raise InvalidInput(f"{what} inside a function that torch.func transforms; leave it away there")


def call(name: str, *args: Any) -> Tensor:
    """Call the op `sparsek::name`: its function, in a torch.autograd.Function where gradients are recorded.

    Only where something traces the call is it the op of torch.library: torch's dispatcher takes more host time than the
    product, and its first call imports torch._dynamo.
    """
    if active():
        check_rules()
        return _FUNCTIONS[name].apply(*args)
    if torch._C._are_functorch_transforms_active() and not _maps_alone():
        check_rules()
    if traced() or not are_plain(*(x for x in args if isinstance(x, Tensor))):
        return getattr(torch.ops.sparsek, name)(*args)
    return (_LEARNED if torch.is_grad_enabled() else _DIRECT)[name](*args)


def one_by_one(backward: Backward) -> Backward:
    """`backward(ctx, *grads)`, called for each item where torch.autograd.grad(..., is_grads_batched=True) hands over
    gradients of many items as one tensor without storage."""

    @functools.wraps(backward)
    def whole(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        for x in grads:
            if x is not None and (is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)):
                break
        else:
            return backward(ctx, *grads)
        grads = tuple(map(alive, grads))
        batched = [x is not None and _is_of_many(x) for x in grads]
        if True not in batched:
            return backward(ctx, *grads)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        # torch reads the size, 1, only for a tensor without a batch dim.
        joined = [
            torch._remove_batch_dim(x, level, 1, 0) if it else x for x, it in zip(grads, batched, strict=True)
        ]
        items = [
            backward(ctx, *(x[i] if it else x for x, it in zip(joined, batched, strict=True)))
            for i in range(len(joined[batched.index(True)]))
        ]
        return tuple(
            torch._add_batch_dim(_stacked(each), 0, level) if isinstance(each[0], Tensor) else each[0]
            for each in zip(*items, strict=True)
        )

    return whole


def _is_of_many(x: Any) -> bool:
    """Whether x has the gradients of many items, maybe inside torch.vmap, whose wrapper is then around them."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return is_legacy_batchedtensor(x)


def register(
    name: str,
    kind: Any,
    run: Any,
    fake: Any,
    gradient: Any,
    save: Any,
    at_once: Vmap | None = None,
    **schema: Any,
) -> None:
    """Register the torch.library op `sparsek::name`, for autograd, torch.compile and torch.func.

    `kind` makes the named arguments that `run`, outside autograd, and `fake`, of fake tensors, take. `schema`: further
    arguments of `operations.schema_of`. at_once(size, in_dims, args): the result for all items of a vmap, and its dim,
    if one call can compute it; otherwise None, and each item is a call.
    """
    described = {"schema": operations.schema_of(**{"args": kind, **schema}), "tags": operations.TAGS}

    @torch.library.custom_op(f"sparsek::{name}", mutates_args=(), **described)
    @torch.no_grad()
    def op(*given: Any) -> Any:
        return run(kind(*given))

    op.register_fake(lambda *given: fake(kind(*given)))
    gradient = one_by_one(gradient)
    op.register_autograd(gradient, setup_context=save)
    _DIRECT[name] = lambda *given: run(kind(*given))
    _FUNCTIONS[name] = _function(name, op._opoverload, gradient, _uncompiled(save), at_once)
    _LEARNED[name] = applied(_function(name, _DIRECT[name], gradient, save, at_once))


def _uncompiled(run: Callable[..., None]) -> Callable[..., None]:
    """`run` as Python too where torch.compile leaves a transform to Python: it then compiles each function below, and
    torch 2.11 fails over tuples with names.
    """
    disabled: list[Any] = []

    @functools.wraps(run)
    def made(*args: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            return run(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(run))
        return disabled[0](*args)

    return made


def _function(name: str, forward: Any, gradient: Any, save: Any, at_once: Vmap | None) -> Any:
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        made = at_once(info.batch_size, in_dims, args) if at_once else None
        return made or _one_by_one(made_function.apply, info.batch_size, in_dims, args)

    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise InvalidInput(NO_TANGENT)

    of_class = {"forward": forward, "setup_context": save, "backward": gradient, "jvp": jvp, "vmap": vmap}
    statics = {key: staticmethod(each) for key, each in of_class.items()}
    made_function: Any = type(f"Transformed_{name}", (torch.autograd.Function,), statics)
    return made_function


def _one_by_one(run: Callable[..., Tensor], size: int, in_dims: Any, args: Any) -> tuple[Tensor, int]:
    if not size:
        raise InvalidInput("vmap over a dim of size 0: there is nothing to multiply")
    each = [
        run(
            *(
                x if dim is None or not isinstance(x, Tensor) else _item(x, dim, i)
                for x, dim in zip(args, in_dims, strict=True)
            )
        )
        for i in range(size)
    ]
    if each[0].stride(-1) == 1:
        return _stacked(each), 0
    return _stacked([x.mT for x in each]).mT, 0  # stays column-major, as callers expect


def _stacked(items: Sequence[Tensor]) -> Tensor:
    with dtypes.as_given(items[0].device):
        return torch.stack(list(items))


def _item(x: Tensor, dim: int, i: int) -> Tensor:
    """Item i; a copy if neither its rows nor its columns are contiguous."""
    found = x.select(dim, i)
    return found if 1 in found.stride()[-2:] else found.contiguous()
