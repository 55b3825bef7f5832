"""Another CPU: sums in another order, tensors at odd addresses, other unwritten memory, for a whole run of the tests.

    SPARSEK_TEST_CPU=sums,addresses pytest tests/ops ...

A BLAS adds the terms of a product in an order of its own, which depends on shapes, strides, alignment, threads and the
CPU that it finds. With `sums` every product and sum of torch on a CPU adds in an order that is drawn for its operands'
layouts, so that two calls have equal bits only where those are equal, or the sums exact. Functions like exp have their
last bit drawn likewise: torch takes other code for strided tensors and for the ends of others. Copies are made on the
way, which a test that counts memory sees.
With `addresses` what `torch.randn` and its kind make begins 16 bytes behind a multiple of 64.
With `memory` what `torch.empty` and its kind make holds NaN and the largest integers until it is written.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Each operand of a product with the dimension of its sum.
PRODUCTS = {
    **{key: {0: 1, 1: 0} for key in ["mm", "mm.out", "mv", "mv.out"]},
    **{key: {0: 2, 1: 1} for key in ["bmm", "bmm.out"]},
    **{key: {0: 0, 1: 0} for key in ["dot", "vdot"]},
    **{key: {1: 1, 2: 0} for key in ["addmm", "addmm.out", "addmm_", "addmv", "addmv.out", "addmv_"]},
    **{key: {1: 2, 2: 1} for key in ["baddbmm", "baddbmm.out", "baddbmm_"]},
    "_scaled_dot_product_flash_attention_for_cpu": {0: 3, 1: 3},
}
SUMS = [
    "sum.dim_IntList",
    "sum.IntList_out",
    "mean.dim",
    "mean.out",
    "linalg_vector_norm",
    "linalg_vector_norm.out",
]
CURVES = [
    "exp",
    "exp2",
    "log",
    "log2",
    "sigmoid",
    "tanh",
    "erf",
    "gelu",
    "silu",
    "exp.out",
    "gelu.out",
    "silu.out",
]
NORMALIZED = ["_softmax", "_softmax.out", "_log_softmax"]
UNWRITTEN = ["empty.memory_format", "empty_strided"]
MADE = ["randn", "rand", "randn_like", "rand_like"]


def _drawn(name: str, *operands: Tensor) -> random.Random:
    layouts = [(x.shape, x.stride(), x.data_ptr() % 64, x.dtype) for x in operands]
    return random.Random(f"{name} {layouts} {torch.get_num_threads()}")


def _order(drawn: random.Random, length: int) -> Tensor:
    return torch.tensor(drawn.sample(range(length), length), dtype=torch.int64)


def _product(name: str, kernel: Any) -> Callable[..., Any]:
    sums = PRODUCTS[name]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = [args[at] for at in sums]
        length = given[0].shape[sums[next(iter(sums))]]
        if given[0].is_floating_point() and length > 1:
            order = _order(_drawn(name, *given), length)
            args = tuple(x.index_select(sums[at], order) if at in sums else x for at, x in enumerate(args))
        return kernel.call_boxed(keys, *args, **kwargs)

    return run


def _sum(name: str, kernel: Any) -> Callable[..., Any]:
    at = 2 if "norm" in name else 1

    def run(keys: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dims = args[at - 1] if len(args) >= at else kwargs.get("dim")
        given, drawn = x, _drawn(name, x)
        if x.is_floating_point():
            for dim in dims if dims else range(x.ndim):
                given = given.index_select(dim, _order(drawn, x.shape[dim])) if x.ndim else given
        return kernel.call_boxed(keys, given, *args, **kwargs)

    return run


def _normalized(name: str, kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        if not x.ndim or not x.is_floating_point() or x.shape[dim] < 2:
            return kernel.call_boxed(keys, x, dim, *args, **kwargs)
        order = _order(_drawn(name, x), x.shape[dim])
        out = kernel.call_boxed(keys, x.index_select(dim, order), dim, *args, **kwargs)
        moved = out.index_select(dim, order.argsort())
        return out.copy_(moved) if "out" in name else moved

    return run


def _curve(name: str, kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seed = _drawn(name, x).getrandbits(31)
        exact = ~x.isfinite() | (x == 0) | ((x == 1) if name.startswith("log") else False)
        out = kernel.call_boxed(keys, x, *args, **kwargs)
        if not out.is_floating_point() or out.dtype.itemsize < 4:
            return out
        odd = torch.arange(out.numel()).mul_(seed | 1).bitwise_right_shift_(7).bitwise_and_(1).bool()
        less = torch.nextafter(out.detach(), out.new_zeros(()))
        return out.copy_(torch.where(odd.view(out.shape) & ~exact, less, out))

    return run


def _unwritten(name: str, kernel: Any) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        made = kernel.call_boxed(keys, *args, **kwargs)
        if made.dtype.is_floating_point or made.dtype.is_complex:
            return made.fill_(torch.nan)
        return made.fill_(torch.iinfo(made.dtype).max if made.dtype != torch.bool else True)

    return run


def _at_odd_address(make: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if "out" in kwargs or made.device.type != "cpu" or torch.compiler.is_compiling() or not made.numel():
            return made
        if type(made) is not Tensor or not made.is_contiguous():
            return made
        with torch.no_grad():
            ahead = 16 // made.element_size()
            wide = made.new_empty(made.numel() + ahead)
            moved = wide[ahead:].view(made.shape).copy_(made)
        return moved.detach().requires_grad_() if made.requires_grad else moved.detach()

    return run


WRAPPED = (
    ("sums", PRODUCTS, _product),
    ("sums", SUMS, _sum),
    ("sums", CURVES, _curve),
    ("sums", NORMALIZED, _normalized),
    ("memory", UNWRITTEN, _unwritten),
)


@contextmanager
def asked_for(named: str) -> Iterator[None]:
    """Every kind that `named` has, with commas between."""
    kinds = set(named.split(","))
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        for name in MADE if "addresses" in kinds else ():
            stack.enter_context(mock.patch.object(torch, name, _at_odd_address(getattr(torch, name))))
        with warnings.catch_warnings():  # that torch's own are overridden
            warnings.simplefilter("ignore")
            for kind, names, wrapped in WRAPPED:
                for name in names if kind in kinds else ():
                    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                    library.impl(name, wrapped(name, kernel), "CPU", with_keyset=True, allow_override=True)
        stack.callback(library._destroy)
        yield
