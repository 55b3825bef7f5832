"""Masks that were made for a call and are kept for the next ones like it; documents' edges that were read once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.home import drop_oldest
from sparsek.core.streams import Ready, wait_for
from sparsek.core.tracing import concrete, untransformed
from sparsek.mask.mask import BlockMask

Result = TypeVar("Result")

LIMIT = 32  # a mask of 512 K queries has about 10 MB

_MASKS: dict[Hashable, tuple[BlockMask, Ready | None]] = {}
# Graphs go on reading the masks that they were captured with.
_CAPTURED: set[BlockMask] = set()
_EDGES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def kept_mask(key: Hashable, build: Callable[[], BlockMask]) -> BlockMask:
    """What `build()` gave for this key, for the current stream; the LIMIT masks that were used last are kept.

    So are the plans that are kept with them. A CUDA graph may capture a mask that was used before.
    """
    found = _MASKS.pop(key, None)
    if found is None:
        mask = untransformed(build)
        if type(mask.full.starts) is not Tensor:  # made for tensors that hold nothing
            return mask
        found = mask, Ready.here(mask.device)
    _MASKS[key] = found
    mask, made = found
    if made is not None:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.add(mask)
        else:
            wait_for(made, (*mask.full, *mask.partial, mask.lo, mask.hi, mask.rules, mask.bits))
    while len(_MASKS) > LIMIT:
        drop_oldest(_MASKS)
    return mask


def values_of(x: Tensor, name: str) -> Tensor:
    """The tensor that grad, vjp and jvp of torch.func have wrapped. InvalidInput under vmap, where values are many."""
    return concrete(x, f"masks follow the values of {name}", "make the mask outside")


def edges_of(cu_seqlens: Any, name: str, total: int | None = None) -> np.ndarray:
    """Where documents start and the last one ends, int64 [n + 1], checked against `total` tokens if that is given.

    From a GPU they are read once, with one sync, and kept for that tensor until something writes to it. A tensor of
    inference mode has no count of writes: it is read every time.
    """
    at = None
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = values_of(cu_seqlens, name)
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda and not cu_seqlens.is_inference():
        version, at = _EDGES.get(cu_seqlens) or (None, None)
        if version != cu_seqlens._version:
            at = _read(cu_seqlens, name)
            _EDGES[cu_seqlens] = cu_seqlens._version, at
    if at is None:
        at = _read(cu_seqlens, name)
    if total is not None and at[-1] != total:
        raise InvalidInput(f"{name} ends at {at[-1]}; there are {total} tokens")
    return at


def _read(cu_seqlens: Any, name: str) -> np.ndarray:
    arguments.tensor(name, cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise InvalidInput(
            f"{name} is {list(cu_seqlens.shape)}; it must be [documents + 1]: where each starts, and where all end"
        )
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            f"{name} is read while a CUDA graph is captured; call once with this tensor before, or pass a BlockMask"
        )
    at = untransformed(lambda: cu_seqlens.detach().cpu().numpy().astype(np.int64))
    if at[0] != 0:
        raise InvalidInput(f"{name} starts with {at[0]}; it must start with 0")
    falls = np.flatnonzero(np.diff(at) < 0)
    if falls.size:
        i = int(falls[0])
        raise InvalidInput(f"{name} falls from {at[i]} to {at[i + 1]} at document {i}; it must not")
    return at
