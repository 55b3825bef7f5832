"""C = A @ B for two BSR matrices, C in BSR too: the specification of every kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR, zero_padding
from sparsek.products.formats.pattern import BlockPattern, HostPattern


class BlockPairs(NamedTuple):
    """The pairs of blocks, on the host: block left[p] of A times block right[p] of B is added to block target[p] of
    C.

    Positions are those in the patterns' order, int64. Pairs are sorted by target, and by A's column within one.
    """

    pattern: BlockPattern
    left: np.ndarray
    right: np.ndarray
    target: np.ndarray


def spgemm(a: BSR, b: BSR, pattern: BlockPattern | None = None) -> BSR:
    """C[i, j] = sum over k of A[i, k] @ B[k, j], over the pairs of stored blocks, for the blocks (i, j) of `pattern`.

    `a` is [M, K] in blocks of (bm, bk), `b` [K, N] in blocks of (bk, bn), of one dtype on one device. `pattern` is
    [M, N] in blocks of (bm, bn); by default C has every block with at least one pair. Blocks of `pattern` without a
    pair are 0, as is the padding outside the matrix. Sums in float64 for float64 inputs, otherwise in float32
    (following torch's own TF32 setting), rounded once. Differentiable in a.values and b.values. Raises InvalidInput
    for matrices that do not fit. Reads the patterns on the host.

    Only pairs are multiplied: a NaN in a block of A or B reaches only the blocks of C that this block has a pair for,
    in its row (of A) or its column (of B). Blocks without a pair are not read. Step s adds the s-th pair of every
    block of C that has one. A block occurs once in a step, so no two additions collide and the bits repeat.
    """
    _check(a, b, pattern)
    found = pairs(a.pattern, b.pattern, pattern)
    with dtypes.as_given(a.device):
        values = _sums(a, b, found).to(a.dtype)
        return BSR.unchecked(found.pattern, zero_padding(found.pattern, values))


def pairs(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None = None) -> BlockPairs:
    """The pairs of A [M, K] and B [K, N] whose block of C is in `wanted`; all of them without it."""
    columns = b.grid[1]
    starts = b.host.indptr.astype(np.int64)
    met = np.diff(starts)[a.host.indices]
    left = np.repeat(np.arange(a.nnzb), met)
    right = starts[a.host.indices[left]] + np.arange(left.size) - np.repeat(np.cumsum(met) - met, met)
    cell = _rows(a)[left] * columns + b.host.indices[right]
    if wanted is None:
        cells = np.unique(cell)
        ends = np.searchsorted(cells, np.arange(a.grid[0] + 1) * columns).astype(np.int32)
        host = HostPattern(ends, (cells % max(columns, 1)).astype(np.int32))
        shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
        wanted = BlockPattern.from_host(shape, block, host, a.device)
    else:
        cells = _rows(wanted) * columns + wanted.host.indices
        inside = np.isin(cell, cells)
        left, right, cell = left[inside], right[inside], cell[inside]
    target = np.searchsorted(cells, cell)
    order = np.argsort(target, kind="stable")
    return BlockPairs(wanted, left[order], right[order], target[order])


def _rows(pattern: BlockPattern) -> np.ndarray:
    """The block row of each stored block, int64."""
    return np.repeat(np.arange(pattern.grid[0]), np.diff(pattern.host.indptr))


def _sums(a: BSR, b: BSR, found: BlockPairs) -> Tensor:
    """C's blocks as summed, in float32 or float64; undefined outside the matrix."""
    sum_dtype = torch.promote_types(a.dtype, torch.float32)
    of_a, of_b = a.logical_values(), b.logical_values()
    out = torch.zeros(found.pattern.nnzb, *found.pattern.block, dtype=sum_dtype, device=a.device)
    place = np.arange(found.target.size) - np.searchsorted(found.target, found.target)
    by_step = np.argsort(place, kind="stable")
    ends = np.cumsum(np.bincount(place))[:-1]
    for step in np.split(by_step, ends):
        left, right, target = (torch.tensor(part[step], device=a.device) for part in found[1:])
        product = torch.bmm(
            of_a.index_select(0, left).to(sum_dtype), of_b.index_select(0, right).to(sum_dtype)
        )
        out.index_add_(0, target, product)
    return out


def _check(a: BSR, b: BSR, pattern: BlockPattern | None) -> None:
    if not isinstance(a, BSR) or not isinstance(b, BSR):
        raise InvalidInput(f"spgemm needs two BSR matrices, got {type(a).__name__} and {type(b).__name__}")
    dtypes.name(a.dtype)
    if a.shape[1] != b.shape[0] or a.block[1] != b.block[0]:
        raise InvalidInput(
            f"A is {_size(a)} and B {_size(b)}; B needs {a.shape[1]} rows in blocks of {a.block[1]} rows"
        )
    if b.dtype != a.dtype or b.device != a.device:
        raise InvalidInput(f"A is {a.dtype} on {a.device} and B {b.dtype} on {b.device}; they must agree")
    if pattern is None:
        return
    if not isinstance(pattern, BlockPattern):
        raise InvalidInput(f"pattern must be a BlockPattern or None, got {type(pattern).__name__}")
    shape, block = (a.shape[0], b.shape[1]), (a.block[0], b.block[1])
    if (pattern.shape, pattern.block) != (shape, block) or pattern.device != a.device:
        raise InvalidInput(
            f"the pattern is {_size(pattern)} on {pattern.device}; C is {shape[0]}x{shape[1]} in blocks of "
            f"{block[0]}x{block[1]} on {a.device}"
        )


def _size(x: BSR | BlockPattern) -> str:
    return f"{x.shape[0]}x{x.shape[1]} in blocks of {x.block[0]}x{x.block[1]}"
