"""Gluon's names in each Triton release, and descriptions of tensors for TMA. No other module depends on the release.

Triton 3.6 and 3.7 call the bulk tensor copies `async_copy_global_to_shared` and `async_copy_shared_to_global`; 3.8
and later call them `async_load` and `async_store`, with the same arguments. A shared memory descriptor is viewed in
another shape by `_reinterpret` in older releases and by `reinterpret` in newer ones.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsek.engine.launch.launch import launch_direct

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Device code: views the same bytes of shared memory as `dtype` in another shape and layout."""
    seen_as = getattr(memory, "reinterpret", None) or memory._reinterpret
    return seen_as(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def opaque(x):
    """Device code: an int32 passed through an instruction that is not removed. No compiler knows its value, so none
    keeps addresses that are computed from it in registers across steps.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@cache
def shared_layout(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The shared memory layout of a box: the widest swizzle that fits its rows."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _element(dtype))


def _element(dtype: torch.dtype) -> Any:
    more = {
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float8_e5m2: gl.float8e5,
    }
    return more.get(dtype) or GLUON_DTYPES[dtype]


class Described(NamedTuple):
    """The fields of a TensorDescriptor that a launch reads. Skips its checks, which take 2 us; callers have checked."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    padding: str = "zero"

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def describe(tensor: Tensor, box: tuple[int, int]) -> Described:
    """A TMA description of a row-major matrix, read or written one `box` at a time; TMA reads zeros outside it.

    A matrix of one column may have any last stride.
    """
    return Described(tensor, tensor.shape, (tensor.stride(0), 1), box)


def describe_heads(tensor: Tensor, rows: int, dim: int) -> Described:
    """A TMA description of [B, H, L, D]: `rows` rows of one head at a time, zero-padded to `dim` columns."""
    return Described(tensor, tuple(tensor.shape), (*tensor.stride()[:3], 1), (1, 1, rows, dim))


def describe_transposed(tensor: Tensor, box: tuple[int, int]) -> Described:
    """`describe(tensor.mT, box)` without making the view."""
    rows, columns = tensor.shape
    return Described(tensor, (columns, rows), (tensor.stride(1), 1), box)


def launch_on(
    device: torch.device,
    kernel: Any,
    ctas: int,
    args: Sequence[Any],
    options: Mapping[str, int] | None = None,
) -> None:
    """Launches a Gluon kernel of 4-warp groups on the current stream of `device`.

    `args` may hold Described matrices. The last two are the constants: a config, and a text that changes with the
    source.
    """
    full = [_full(arg) if isinstance(arg, Described) else arg for arg in args]
    launch_direct(kernel, device, ctas, args, args[-2], full, num_warps=4, **(options or {}))


def _full(d: Described) -> TensorDescriptor:
    return TensorDescriptor(
        d.base, list(d.shape), list(d.strides), list(d.box), shared_layout(d.box, d.base.dtype)
    )
