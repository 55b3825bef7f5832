"""Gradients of one product by kernels, by the reference in float64, and by dense torch, held against each other."""

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
from sparsek.products.reference import linear as reference_linear
from sparsek.products.reference import sddmm as reference_sddmm
from sparsek.products.reference import spgemm as reference_spgemm
from sparsek.products.reference import spmm as reference_spmm
from sparsek.products.reference.epilogue import ACTIVATIONS, Activation
from sparsek.testing.chain_budget import chain_bounds
from sparsek.testing.product_budget import stored

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Form:
    """One way to call an operation: by kernels, by the reference, and densely.

    `blocks` are the sizes of its BSR operands, (rows, columns) as numbers of M, K, N ("mk"); `dense` those of its dense
    tensors. The functions take matrices first, then tensors; `mine` takes the kernel's name too.
    """

    blocks: tuple[str, ...]
    dense: tuple[str, ...]
    op: str
    mine: Callable[..., Tensor]
    exact: Run
    plain: Run


def _right(x: Tensor, a: BSR) -> Tensor:
    return reference_spmm.spmm(a.T, x.mT).mT


def _linear(act: Activation | None, residual: bool) -> Form:
    def plain(w: Tensor, x: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        y = ACTIVATIONS[act or ""](torch.nn.functional.linear(x, w, bias))
        return y + rest[0] if rest else y

    return Form(
        ("mk",),
        ("nk", "m", "nm") if residual else ("nk", "m"),
        "spmm",
        lambda w, x, bias, *rest, kernel: sk.linear(x, w, bias, act, *rest, kernel=kernel),
        lambda w, x, bias, *rest: reference_linear.linear(x, w, bias, act, *rest),
        plain,
    )


def _mlp(act: Activation) -> Form:
    def exact(up: BSR, down: BSR, x: Tensor, *biases: Tensor) -> Tensor:
        return reference_linear.linear(reference_linear.linear(x, up, biases[0], act), down, biases[1])

    def plain(up: Tensor, down: Tensor, x: Tensor, *biases: Tensor) -> Tensor:
        hidden = ACTIVATIONS[act](torch.nn.functional.linear(x, up, biases[0]))
        return torch.nn.functional.linear(hidden, down, biases[1])

    return Form(
        ("mk", "nm"),
        ("2nk", "m", "n"),
        "spmm",
        lambda up, down, x, b, c, kernel: sk.mlp(x, up, down, b, c, act, kernel=kernel),
        exact,
        plain,
    )


def _swiglu_plain(gate: Tensor, up: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)


FORMS: dict[str, Form] = {
    "A @ B": Form(
        ("mk",),
        ("kn",),
        "spmm",
        lambda a, b, kernel: sk.spmm(a, b, kernel=kernel),
        reference_spmm.spmm,
        torch.matmul,
    ),
    "batch of A.T @ B": Form(
        ("km",),
        ("2kn",),
        "spmm",
        lambda a, b, kernel: sk.spmm(a.T, b, kernel=kernel),
        lambda a, b: reference_spmm.spmm(a.T, b),
        lambda a, b: a.mT @ b,
    ),
    "B @ A": Form(
        ("km",),
        ("nk",),
        "spmm",
        lambda a, b, kernel: sk.spmm(b, a, kernel=kernel),
        lambda a, b: _right(b, a),
        lambda a, b: b @ a,
    ),
    "batch of alpha B @ A.T": Form(
        ("mk",),
        ("2nk",),
        "spmm",
        lambda a, b, kernel: sk.spmm(b, a.T, alpha=2.0, kernel=kernel),
        lambda a, b: 2 * _right(b, a.T),
        lambda a, b: 2 * (b @ a.mT),
    ),
    **{f"linear {act}": _linear(act, residual=False) for act in (None, "relu", "gelu", "gelu_tanh", "silu")},
    "linear with a residual": _linear(None, residual=True),
    "linear relu with a residual": _linear("relu", residual=True),
    **{f"mlp {act}": _mlp(act) for act in ("relu", "gelu", "silu")},
    "swiglu": Form(
        ("mk", "mk"),
        ("nk",),
        "spmm",
        lambda gate, up, x, kernel: sk.swiglu(x, gate, up, kernel=kernel),
        lambda gate, up, x: reference_linear.swiglu(x, gate, up),
        _swiglu_plain,
    ),
    "sddmm": Form(
        (),
        ("mk", "kn"),
        "sddmm",
        lambda x, y, kernel: sk.sddmm(x, y, pattern_for(x, y), kernel=kernel).to_dense(),
        lambda x, y: reference_sddmm.sddmm(x, y, pattern_for(x, y)).to_dense(),
        lambda x, y: (x @ y) * _ones(pattern_for(x, y), x),
    ),
    "sddmm of transposes": Form(
        (),
        ("km", "nk"),
        "sddmm",
        lambda x, y, kernel: sk.sddmm(x.mT, y.mT, pattern_for(x.mT, y.mT), kernel=kernel).to_dense(),
        lambda x, y: reference_sddmm.sddmm(x.mT, y.mT, pattern_for(x.mT, y.mT)).to_dense(),
        lambda x, y: (x.mT @ y.mT) * _ones(pattern_for(x.mT, y.mT), x),
    ),
    "A @ A2, dense": Form(
        ("mk", "kn"),
        (),
        "spgemm",
        lambda a, b, kernel: sk.spgemm(a, b, kernel=kernel),
        lambda a, b: reference_spgemm.spgemm(a, b).to_dense(),
        torch.matmul,
    ),
    "A @ A2": Form(
        ("mk", "kn"),
        (),
        "spgemm",
        lambda a, b, kernel: sk.spgemm(a, b, "bsr", kernel=kernel).to_dense(),
        lambda a, b: reference_spgemm.spgemm(a, b).to_dense(),
        torch.matmul,
    ),
    "A.T @ A2.T at a pattern": Form(
        ("km", "nk"),
        (),
        "spgemm",
        lambda a, b, kernel: sk.spgemm(a.T, b.T, pattern_for(a.T, b.T), kernel=kernel).to_dense(),
        lambda a, b: reference_spgemm.spgemm(a.T, b.T, pattern_for(a.T, b.T)).to_dense(),
        lambda a, b: (a.mT @ b.mT) * _ones(pattern_for(a.mT, b.mT), a),
    ),
    "A.T @ A2, dense": Form(
        ("km", "kn"),
        (),
        "spgemm",
        lambda a, b, kernel: sk.spgemm(a.T, b, kernel=kernel),
        lambda a, b: reference_spgemm.spgemm(a.T, b).to_dense(),
        lambda a, b: a.mT @ b,
    ),
}
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
    form: Form, sizes: dict[str, int], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[list[BSR], list[Tensor]]:
    """Random operands. Sizes need not be multiples of the blocks."""
    made = []
    for at, (rows, columns) in enumerate(form.blocks):
        a = random_bsr(
            sizes[rows],
            sizes[columns],
            (BLOCK[rows], BLOCK[columns]),
            0.6,
            pattern="powerlaw",
            dtype=dtype,
            device=device,
            seed=seed + at,
        )
        made.append(a)
    draw = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn([int(c) if c.isdigit() else sizes[c] for c in dims], generator=draw).to(device, dtype)
        for dims in form.dense
    ]
    return made, tensors


def hold(form: Form, matrices: list[BSR], tensors: list[Tensor], kernel: str | None) -> None:
    """Every gradient is as near to the reference in float64 as `testing/chain_budget.py` wants it."""
    wide = [a.to(dtype=torch.float64) for a in matrices], [x.double() for x in tensors]
    found = _gradients(lambda *args: form.mine(*args, kernel=kernel), matrices, tensors)
    exact = _gradients(form.exact, *wide)
    bounds = chain_bounds(
        lambda: _densely(form, *wide), exact, _densely(form, matrices, tensors), found[0].dtype
    )
    for mine, right, bound in zip(found, exact, bounds, strict=True):
        assert mine.shape == right.shape
        if mine.numel():
            gate = bound.judge(mine)
            assert gate.passed, gate


def _densely(form: Form, matrices: list[BSR], tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of the dense operation, those of matrices at their stored blocks."""
    leaves = [*(a.to_dense() for a in matrices), *tensors]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    dense = _back(form.plain(*leaves), leaves)
    for place, a in enumerate(matrices):
        dense[place] = stored(dense[place], a.pattern)
    return dense


def _gradients(run: Run, matrices: list[BSR], tensors: list[Tensor]) -> list[Tensor]:
    values = [a.values.detach().clone().requires_grad_() for a in matrices]
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    mine = [BSR.unchecked(a.pattern, v) for a, v in zip(matrices, values, strict=True)]
    return _back(run(*mine, *inputs), [*values, *inputs])


def _back(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=draw).to(out.device, torch.bfloat16).to(out.dtype)
    return list(torch.autograd.grad(out, leaves, cotangent))
