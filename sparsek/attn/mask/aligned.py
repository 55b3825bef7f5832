"""Packed documents of keys, each from a key block of its own on: where per-token lists count blocks of documents."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import PackedLayout
from sparsek.attn.mask.lists import mask_length, upload
from sparsek.core.arguments import faking
from sparsek.core.plan_owner import drop_oldest
from sparsek.core.streams import Ready, wait_for
from sparsek.core.tracing import outside_inference

LIMIT = 8  # layouts; one of 512 K tokens has 8 MB


class AlignedKeys(NamedTuple):
    """Places of the keys, with gaps between documents.

    Attributes:
        bounds: int32 [2, S]: the places that each query may see, from the first of its document on.
        places: int64 [T]: the place of each key; None where there are no gaps.
        length: The places, a multiple of the key block.
    """

    bounds: Tensor
    places: Tensor | None
    length: int

    def spread(self, x: Tensor) -> Tensor:
        """x [1, H, T, D] at its places, with zeros in the gaps. Differentiable."""
        if self.places is None:
            return x
        spread = x.new_zeros((1, self.length, x.shape[1], x.shape[3]))  # as packed documents are in memory
        return spread.index_copy_(1, self.places, x.transpose(1, 2)).transpose(1, 2)


_KEPT: dict[Hashable, tuple[AlignedKeys, Ready | None]] = {}
_CAPTURED: dict[int, AlignedKeys] = {}  # CUDA graphs read them at every replay


def aligned_keys(layout: PackedLayout, side: int, causal: bool, device: torch.device) -> AlignedKeys:
    """The places of documents at multiples of `side`. Those of the LIMIT layouts used last are kept."""
    key = layout.key, side, causal, device
    found = None if faking() else _KEPT.pop(key, None)
    if found is None:
        found = _aligned(layout, side, causal, device), Ready.here(device)
        if faking():
            return found[0]
    _KEPT[key] = found
    while len(_KEPT) > LIMIT:
        drop_oldest(_KEPT)
    keys, made = found
    if made is not None:
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED[id(keys)] = keys
        else:
            wait_for(made, (keys.bounds, keys.places))
    return keys


@outside_inference
def _aligned(layout: PackedLayout, side: int, causal: bool, device: torch.device) -> AlignedKeys:
    docs = layout.docs
    lengths, queries = docs.k_end - docs.k_start, docs.q_end - docs.q_start
    sizes = -(-lengths // side) * side
    length = mask_length(int(sizes.sum()), "the keys of all documents", side)
    starts = np.cumsum(sizes) - sizes
    lo, end = np.repeat(starts, queries), np.repeat(lengths, queries)
    if causal:
        own = np.arange(layout.q_len) + np.repeat(docs.shift - docs.k_start, queries)
        end = np.clip(own + 1, 0, end)
    parts = [np.stack((lo, lo + end))]
    if length != layout.kv_len:
        parts.append(np.arange(layout.kv_len) + np.repeat(starts - docs.k_start, lengths))
    there = upload(parts, device)
    return AlignedKeys(there[0], there[1].long() if len(there) > 1 else None, length)
