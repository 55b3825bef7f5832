"""Gradients of one product by kernels, by dense torch in float64, and by that in its dtype, held against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.reference.epilogue import ACTIVATION_NAMES, ACTIVATIONS, Activation
from tests.ops.chain_budget import chain_bounds
from tests.ops.storages import matrix

Run = Callable[..., Tensor]
linear, silu = torch.nn.functional.linear, torch.nn.functional.silu


@dataclass(frozen=True)
class Form:
    """One way to call an operation: by kernels, and densely.

    `blocks` are the sizes of its sparse operands, (rows, columns) as numbers of M, K, N ("mk"); `dense` those of its
    dense tensors. The functions take matrices first, then tensors; `mine` takes the kernel's name too.
    """

    blocks: str
    dense: str
    op: str
    mine: Run
    plain: Run


def _linear(act: Activation | None, residual: bool) -> Form:
    def plain(w: Tensor, x: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        y = ACTIVATIONS[act or ""](linear(x, w, bias))
        return y + rest[0] if rest else y

    def mine(w: Any, x: Tensor, bias: Tensor, *rest: Tensor, kernel: str | None) -> Tensor:
        return sk.linear(x, w, bias, act, *rest, kernel=kernel)

    return Form("mk", "2nk m 2nm" if residual else "nk m", "spmm", mine, plain)


def _mlp(act: Activation) -> Form:
    return Form(
        "mk nm",
        "2nk m n",
        "spmm",
        lambda up, down, x, b, c, kernel: sk.mlp(x, up, down, b, c, act, kernel=kernel),
        lambda up, down, x, b, c: linear(ACTIVATIONS[act](linear(x, up, b)), down, c),
    )


def _spmm(blocks: str, dense: str, mine: Run, plain: Run) -> Form:
    return Form(blocks, dense, "spmm", mine, plain)


def _sddmm(dense: str, turned: Callable[[Tensor], Tensor]) -> Form:
    """At a pattern, of both operands `turned`."""

    def mine(*given: Tensor, kernel: str | None) -> Tensor:
        x, y = map(turned, given)
        return sk.sddmm(x, y, pattern_for(x, y), kernel=kernel).to_dense()

    def plain(*given: Tensor) -> Tensor:
        x, y = map(turned, given)
        return (x @ y) * _ones(pattern_for(x, y), x)

    return Form("", dense, "sddmm", mine, plain)


def _spgemm(blocks: str, mine: Run, plain: Run) -> Form:
    return Form(blocks, "", "spgemm", mine, plain)


FORMS: dict[str, Form] = {
    "A @ B": _spmm("mk", "kn", lambda a, b, kernel: sk.spmm(a, b, kernel=kernel), torch.matmul),
    "batch of A.T @ B": _spmm(
        "km", "2kn", lambda a, b, kernel: sk.spmm(a.T, b, kernel=kernel), lambda a, b: a.mT @ b
    ),
    "B @ A": _spmm("km", "nk", lambda a, b, kernel: sk.spmm(b, a, kernel=kernel), lambda a, b: b @ a),
    "batch of alpha B @ A.T": _spmm(
        "mk",
        "2nk",
        lambda a, b, kernel: sk.spmm(b, a.T, alpha=2.0, kernel=kernel),
        lambda a, b: 2 * (b @ a.mT),
    ),
    **{f"linear {act}": _linear(act, residual=False) for act in (None, *ACTIVATION_NAMES)},
    "linear with a residual": _linear(None, residual=True),
    "linear relu with a residual": _linear("relu", residual=True),
    **{f"mlp {act}": _mlp(act) for act in ("relu", "gelu", "silu")},
    "swiglu": _spmm(
        "mk mk",
        "nk",
        lambda gate, up, x, kernel: sk.swiglu(x, gate, up, kernel=kernel),
        lambda gate, up, x: silu(x @ gate.mT) * (x @ up.mT),
    ),
    "sddmm": _sddmm("mk kn", lambda x: x),
    "sddmm of transposes": _sddmm("km nk", lambda x: x.mT),
    "A @ A2, dense": _spgemm("mk kn", lambda a, b, kernel: sk.spgemm(a, b, kernel=kernel), torch.matmul),
    "A @ A2": _spgemm(
        "mk kn", lambda a, b, kernel: sk.spgemm(a, b, "bsr", kernel=kernel).to_dense(), torch.matmul
    ),
    "A.T @ A2.T at a pattern": _spgemm(
        "km nk",
        lambda a, b, kernel: sk.spgemm(a.T, b.T, pattern_for(a.T, b.T), kernel=kernel).to_dense(),
        lambda a, b: (a.mT @ b.mT) * _ones(pattern_for(a.mT, b.mT), a),
    ),
    "A.T @ A2, dense": _spgemm(
        "km kn", lambda a, b, kernel: sk.spgemm(a.T, b, kernel=kernel), lambda a, b: a.mT @ b
    ),
}
# Of 2:4 matrices, which have no transposed views.
FORMS_24: dict[str, Form] = {
    **{
        name: form
        for name, form in FORMS.items()
        if name in ("A @ B", "B @ A", "swiglu") or name.startswith("linear")
    },
    "batch of alpha A @ B": _spmm(
        "mk", "23kn", lambda a, b, kernel: sk.spmm(a, b, alpha=-2.0, kernel=kernel), lambda d, b: -2 * (d @ b)
    ),
    "A @ B by columns": _spmm(
        "mk", "nk", lambda a, x, kernel: sk.spmm(a, x.mT, kernel=kernel), lambda d, x: d @ x.mT
    ),
    "batch of B @ A": _spmm(
        "km", "23k", lambda a, x, kernel: sk.spmm(x, a, kernel=kernel), lambda d, x: x @ d
    ),
    "swapped batch of B @ A": _spmm(
        "km",
        "52k",
        lambda a, x, kernel: sk.spmm(x.transpose(0, 1), a, kernel=kernel),
        lambda d, x: x.transpose(0, 1) @ d,
    ),
}
SIZES_24 = {"m": 128, "k": 192, "n": 24}
BLOCK = {"m": 32, "k": 16, "n": 48}
_PATTERNS: dict[Any, BlockPattern] = {}


def pattern_for(x: BSR | Tensor, y: BSR | Tensor) -> BlockPattern:
    """One pattern for every product of this shape on this device."""
    key = x.shape[0], y.shape[1], x.device
    if key not in _PATTERNS:
        sides = BLOCK["m"], BLOCK["n"]
        _PATTERNS[key] = random_bsr(x.shape[0], y.shape[1], sides, 0.5, device=x.device, seed=9).pattern
    return _PATTERNS[key]


def _ones(pattern: BlockPattern, like: Tensor) -> Tensor:
    ones = torch.ones(pattern.nnzb, *pattern.block, dtype=like.dtype, device=like.device)
    return BSR.unchecked(pattern, ones).to_dense()


def inputs_of(
    form: Form,
    sizes: dict[str, int],
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    storage: str = "bsr",
) -> tuple[list[Any], list[Tensor]]:
    """Random operands. Sizes of a BSR need not be multiples of the blocks."""
    how: dict[str, Any] = {"pattern": "powerlaw", "dtype": dtype, "device": device}
    made = [
        matrix(storage, dtype, device, sizes[rows], sizes[columns])
        if storage != "bsr"
        else random_bsr(
            sizes[rows], sizes[columns], (BLOCK[rows], BLOCK[columns]), 0.6, seed=seed + at, **how
        )
        for at, (rows, columns) in enumerate(form.blocks.split())
    ]
    draw = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn([int(c) if c.isdigit() else sizes[c] for c in dims], generator=draw).to(device, dtype)
        for dims in form.dense.split()
    ]
    return made, tensors


def hold(form: Form, matrices: list[Any], tensors: list[Tensor], kernel: str | None) -> None:
    """Every gradient is as near to that in float64 as `testing/chain_budget.py` wants it."""
    wide = [a.to(dtype=torch.float64) for a in matrices], [x.double() for x in tensors]
    values = [a.values.detach().clone().requires_grad_() for a in matrices]
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    mine = [with_values(a, x) for a, x in zip(matrices, values, strict=True)]
    found = _back(form.mine(*mine, *inputs, kernel=kernel), [*values, *inputs])

    def in_float64() -> list[Tensor]:
        return _densely(form, *wide)

    exact = in_float64()
    bounds = chain_bounds(in_float64, exact, _densely(form, matrices, tensors), found[0].dtype)
    for each, right, of, bound in zip(found, exact, [*values, *inputs], bounds, strict=True):
        assert (each.shape, each.dtype) == (right.shape, of.dtype)
        if each.numel():
            gate = bound.judge(each)
            assert gate.passed, gate


def _densely(form: Form, matrices: list[Any], tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of the dense operation, those of matrices at their stored blocks."""
    dense = [a.to_dense().detach().clone().requires_grad_() for a in matrices]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    made = _back(form.plain(*dense, *leaves), [*dense, *leaves])
    return [*map(at_values, made[: len(matrices)], matrices), *made[len(matrices) :]]


def with_values(a: Any, values: Tensor) -> Any:
    """The matrix with other values."""
    return a._each(lambda _: values)


def at_values(dense: Tensor, a: Any) -> Tensor:
    """The elements of a dense matrix where `a` stores its values; 0 outside the matrix."""
    numbers = torch.arange(1, a.values.numel() + 1, device=dense.device)
    places = with_values(a, numbers.view(a.values.shape)).to_dense()
    found = dense.new_zeros(a.values.numel() + 1)
    found[places.flatten()] = dense.flatten()
    return found[1:].view(a.values.shape)


def _back(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=draw).to(out.device, torch.bfloat16).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, cotangent))
