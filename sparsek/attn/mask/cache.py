"""Kept masks: by a key, for later calls like the one that made them; by a tensor, as long as nothing writes to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.attn.mask.lists import read_edges
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.arguments import faking
from sparsek.core.errors import InvalidInput
from sparsek.core.plan_owner import drop_oldest
from sparsek.core.streams import Contents, Ready, wait_for
from sparsek.core.tracing import concrete, untransformed

Result = TypeVar("Result")

LIMIT = 32  # masks; one of 512 K queries has about 10 MB
VIEWS = 8  # results of one tensor: of its views, of several lengths

# A CUDA graph reads the masks that it captured at every replay.
_CAPTURED: set[BlockMask] = set()


class CachedMask(NamedTuple):
    """A mask for later calls, and the stream and event after which its tensors are ready."""

    mask: BlockMask
    made: Ready | None

    @classmethod
    def of(cls, mask: BlockMask) -> CachedMask:
        """A mask made on the current stream."""
        return cls(mask, Ready.here(mask.device))

    def here(self) -> BlockMask:
        """The mask, for the current stream. A CUDA graph may capture it; it is then never freed."""
        mask, made = self
        if made is not None:
            if torch.cuda.is_current_stream_capturing():
                _CAPTURED.add(mask)
            else:
                wait_for(made, (*mask.full, *mask.partial, mask.lo, mask.hi, mask.rules, mask.bits))
        return mask


_MASKS: dict[Hashable, CachedMask] = {}


def kept_mask(key: Hashable, build: Callable[[], BlockMask]) -> BlockMask:
    """The mask that `build()` made for this key, for the current stream. The LIMIT masks used last are kept, and
    their plans with them. A FakeTensorMode, which takes no real ones, gets a new one.
    """
    found = None if faking() and not torch.compiler.is_compiling() else _MASKS.pop(key, None)
    if found is None:
        mask = untransformed(build)
        if type(mask.full.starts) is not Tensor:  # a fake tensor
            return mask
        found = CachedMask.of(mask)
    _MASKS[key] = found
    while len(_MASKS) > LIMIT:
        drop_oldest(_MASKS)
    return found.here()


class ByTensor(Generic[Result]):
    """Results computed from the values of a tensor, kept until the tensor is freed or written to in place.

    Views of one tensor share its entry, so a view made anew for each call is found again. A tensor made in inference
    mode has no version counter: its results are computed at every call. Of writes that torch does not count, those to
    CPU tensors are found by their `Contents`; replays of a CUDA graph go unnoticed. Results must not hold the tensor.
    """

    def __init__(self) -> None:
        # The version of each tensor, and of each of its views the result and, on a CPU, the contents.
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, x: Tensor, key: Hashable) -> Result | None:
        """The result for this view and key, if nothing has written to the tensor since."""
        known = self._kept.get(x if x._base is None else x._base)
        made = known[1].get(_view(x, key)) if known is not None and known[0] == x._version else None
        return made[0] if made is not None and (made[1] is None or made[1].are_of(x)) else None

    def get(self, x: Tensor, key: Hashable, build: Callable[[], Result]) -> Result:
        """The result for this view and key: that of an earlier call, or of `build()`."""
        if x.is_inference():
            return build()
        found = self.find(x, key)
        if found is not None:
            return found
        version, held = x._version, Contents.of(x) if x.is_cpu else None
        found = build()
        base = x if x._base is None else x._base
        known = self._kept.get(base)
        if known is None or known[0] != version:
            known = self._kept[base] = version, {}
        view = _view(x, key)
        known[1].pop(view, None)
        if len(known[1]) >= VIEWS:
            drop_oldest(known[1])
        known[1][view] = found, held
        return found


def _view(x: Tensor, key: Hashable) -> Hashable:
    """A key for one view of a tensor."""
    return x.shape, x.stride(), x.data_ptr(), x.dtype, key  # `x.data = other` counts no write


_EDGES: ByTensor[np.ndarray] = ByTensor()


def values_of(x: Tensor, name: str) -> Tensor:
    """The tensor inside the wrappers of torch.func's grad, vjp and jvp. InvalidInput under vmap."""
    return concrete(x, f"masks depend on the values of {name}", "make the mask outside")


def edges_of(cu_seqlens: Any, name: str, total: int | None = None) -> np.ndarray:
    """Where each document starts and the last one ends, int64 [n + 1]. The end must be `total`, if that is given.

    A tensor on a GPU is read with one sync, and again after a write: see `ByTensor`. torch.compile cannot trace it.
    """
    if torch.compiler.is_compiling():  # without fullgraph=True torch then runs the caller as Python
        raise InvalidInput(f"torch.compile cannot read {name}: call what takes it outside")
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = values_of(cu_seqlens, name)
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda:
        at = _EDGES.get(cu_seqlens, None, lambda: read_edges(cu_seqlens, name))
    else:
        at = read_edges(cu_seqlens, name)
    if total is not None and at[-1] != total:
        raise InvalidInput(f"{name} ends at {at[-1]}; there are {total} tokens")
    return at
