"""What a block mask is made of: lists of blocks, on the device, on the host and transposed, and their sizes."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor


class BlockLists(NamedTuple):
    """Rows of block columns, int32: row r holds indices[starts[r] : starts[r] + counts[r]], ascending and unique.

    Rows may share entries of `indices`, and `indices` may hold entries of no row. `starts` and `counts` are [rows].
    """

    starts: Tensor
    counts: Tensor
    indices: Tensor


class TransposedLists(NamedTuple):
    """The query tiles that visit each key block. Row (b * heads + h) * Nb + j describes key block j.

    `full.indices` and `partial.indices` are query tiles, ascending in each row. Entry e of them is entry
    `full_entries[e]` of the mask's own `full.indices` (`partial_entries[e]` of `partial.indices`), int32.
    Where the mask's sizes are bounds, entries of no row follow the last row.
    """

    full: BlockLists
    partial: BlockLists
    full_entries: Tensor
    partial_entries: Tensor


class HostLists(NamedTuple):
    """BlockLists as numpy arrays."""

    starts: np.ndarray
    counts: np.ndarray
    indices: np.ndarray


class HostMask(NamedTuple):
    """The tensors of a mask as numpy arrays. Do not write to them."""

    full: HostLists
    partial: HostLists
    lo: np.ndarray | None
    hi: np.ndarray | None
    rules: np.ndarray | None
    bits: np.ndarray | None


class Sizes(NamedTuple):
    """What the host knows without asking the device, summed over rows: stored blocks, how many of them are partial,
    and the blocks of the longest row. Upper bounds unless `exact`.
    """

    stored: int
    partial: int
    longest: int
    exact: bool


class Frame(TypedDict, total=False):
    """What most builders take besides `seq_len`, by keyword.

    `q_len` and `kv_len` replace `seq_len` where they differ. `block` is 64, 128 (the default) or a pair (bq, bk) of
    them. `device` is torch's default device if left out. Query q stands at key position q + `q_offset`, which is
    kv_len - q_len if left out: the last query stands at the last key.
    """

    q_len: int | None
    kv_len: int | None
    block: int | tuple[int, int]
    device: str | torch.device | None
    q_offset: int | None
