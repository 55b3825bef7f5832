"""Gives formats their kernels on GPUs: packing to blocks and to 2:4, rounding to FP8."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsek.matrix import convert, two_four
from sparsek.matrix.bsr import BSR
from sparsek.matrix.dense8 import register_rounder
from sparsek.ops import library_args


def register() -> None:
    """Makes formats ask these kernels first. They load when the first CUDA tensor comes."""
    convert.register_pack(_pack_bsr)
    two_four.register_pack(_pack24)
    two_four.register_unpack(_unpack24)
    register_rounder(_round_rows)


def _kernel(name: str, function: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """A function of kernels/pack; None, and torch does the work, where Triton is missing, and where something looks at
    calls op by op."""
    if library_args.traced() or not library_args.are_plain(*tensors):
        return None
    try:
        return getattr(import_module(f"sparsek.kernels.pack.{name}"), function)
    except ImportError:
        return None


def _pack_bsr(w: Tensor, block: tuple[int, int], rule: convert.Rule) -> BSR | None:
    kernel = _kernel("to_bsr", "pack_bsr", w, rule.mask)
    return None if kernel is None else kernel(w, block, rule)


def _pack24(w: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    kernel = _kernel("to_24", "pack24", w, mask)
    return None if kernel is None else kernel(w, mask)


def _unpack24(values: Tensor, meta: Tensor) -> Tensor | None:
    kernel = _kernel("to_24", "unpack24", values, meta)
    return None if kernel is None else kernel(values, meta)


def _round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    kernel = _kernel("to_fp8", "round_rows", x)
    return None if kernel is None else kernel(x, dtype)
