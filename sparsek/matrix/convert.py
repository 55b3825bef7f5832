"""From and to dense matrices, torch.sparse_bsr, SciPy and lists of blocks.

Everything but `from_dense` costs time and memory in proportion to what is stored (`to_dense`: to its result).
Blocks are moved as 16-byte words where no gradient is asked for: torch's gather and scatter work element by
element, and one wide element moves eight bf16 at the price of one. On a GPU a registered kernel packs
(`kernels/pack/to_bsr.py`), and torch what it does not take.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.tracing import concrete, of_values, outside_inference, untransformed, watched
from sparsek.matrix.base import ALIGNMENT
from sparsek.matrix.padding import tiles_of, zero_padding
from sparsek.matrix.pattern import (
    BLOCK_MAX,
    INT32_MAX,
    BlockPattern,
    HostPattern,
    block_sides,
    grid_of,
    matrix_sides,
)

if TYPE_CHECKING:
    from scipy import sparse

    from sparsek.matrix.bsr import BSR

SCOPES = ("global", "row")
WORD = torch.complex128


class Rule(NamedTuple):
    """Which blocks `from_dense` stores. At most one of the first three is given: see there."""

    mask: Tensor | None
    threshold: float | None
    keep: float | None
    scope: str

    def count(self, cells: int) -> int:
        """How many of so many blocks `keep` stores."""
        return max(1, round(self.keep * cells)) if self.keep else 0


@outside_inference
def from_dense(
    cls: type[BSR],
    w: Tensor,
    block: int | tuple[int, int],
    *,
    mask: Tensor | None = None,
    threshold: float | None = None,
    keep: float | None = None,
    scope: str = "global",
) -> BSR:
    """The chosen blocks of a dense matrix w [M, K], in any float dtype and with any strides.

    At most one rule chooses; without one, blocks with any nonzero (or NaN) are stored.
    - `mask`: bool [Mb, Kb] of blocks, or [M, K] of elements: a block is stored if any of its elements is
      true, and its elements outside the mask become 0.
    - `threshold`: blocks whose Frobenius norm is greater.
    - `keep`: the fraction of blocks to store, at least one if it is over 0: those of largest Frobenius norm,
      ties by position, over the whole matrix (`scope="global"`) or in each block row (`scope="row"`).

    Norms are summed in float32, in float64 for float64 input: of two blocks whose norms differ by no more than
    the rounding of their sums, either may be the larger, and which one a GPU and a CPU need not agree on. Works
    on w's device with one sync: one pass over w for the norms, one gather of what is stored. Where squares
    overflow, or the choice falls among blocks so small that squares underflow, w is read again, block row by
    block row, and every block scaled. If a side is ragged, w may be padded first: one more pass, and a copy.
    Differentiable in w. Raises InvalidInput for two rules at once, and for NaN or Inf in w under `threshold` or
    `keep`.
    """
    block = block_sides(block)
    arguments.tensor("w", w, dtypes.FLOATS, ndim=2)
    shape = matrix_sides(tuple(w.shape), block)
    rule = _rule(mask, threshold, keep, scope)
    if mask is not None:
        _check_mask(mask, w.device, shape, grid_of(shape, block))
    made = by_kernel("pack_bsr", w, block, rule) if w.is_cuda and _is_plain(w) else None
    return cls.unchecked(*_packed(w, shape, block, rule)) if made is None else made


def to_dense(a: BSR) -> Tensor:
    """The dense matrix [M, K], contiguous, in a's dtype and on its device. No sync. Differentiable."""
    values = a.logical_values()
    if torch._C._are_functorch_transforms_active():
        return _written_out(a.pattern, values)
    out = torch.zeros(a.pattern.padded_shape, dtype=a.dtype, device=a.device)
    target = tiles_of(out, a.block)
    if _has_words(values) and _has_words(target):
        target, values = target.view(WORD), values.view(WORD)
    target[a.pattern.block_rows, :, a.pattern.indices] = values
    return out[: a.shape[0], : a.shape[1]].contiguous()


def _written_out(pattern: BlockPattern, values: Tensor) -> Tensor:
    """As `to_dense`, with a copy more: vmap (torch 2.13) mixes up indices that a slice stands between."""
    (rows, columns), (bm, bk) = pattern.grid, pattern.block
    cells = values.new_zeros(rows * columns, bm, bk)
    cells = cells.index_copy(0, pattern.block_rows.long() * columns + pattern.indices, values)
    out = cells.view(rows, columns, bm, bk).transpose(1, 2).reshape(pattern.padded_shape)
    return out[: pattern.shape[0], : pattern.shape[1]].contiguous()


@outside_inference
def from_torch(cls: type[BSR], matrix: Tensor) -> BSR:
    """From a torch.sparse_bsr tensor [M, K] with blocks that are multiples of 16. One sync.

    Indices become int32; the values are shared unless they are not contiguous or not 16-byte aligned.
    """
    if not isinstance(matrix, Tensor) or matrix.layout != torch.sparse_bsr:
        raise InvalidInput(
            f"expected a torch.sparse_bsr tensor, got {arguments.shown(matrix)}; use .to_sparse_bsr"
        )
    values = matrix.values().contiguous()
    if matrix.ndim != 2 or values.ndim != 3:
        raise InvalidInput(f"expected a 2-D matrix without dense dimensions, got shape {tuple(matrix.shape)}")
    if values.data_ptr() % ALIGNMENT:
        values = values.clone()
    # What does not fit int32 becomes the limit, which no pattern accepts.
    lists = (part.clamp(-1, INT32_MAX) for part in (matrix.crow_indices(), matrix.col_indices()))
    indptr, indices = (part.to(torch.int32).contiguous() for part in lists)
    block = (values.shape[1], values.shape[2])
    return cls(BlockPattern((matrix.shape[0], matrix.shape[1]), block, indptr, indices), values)


def to_torch(a: BSR) -> Tensor:
    """The same matrix as torch.sparse_bsr; shares int32 indices and values (those of a `.T` view are copied).

    Raises InvalidInput for ragged sides, which torch.sparse_bsr cannot have.
    """
    _refuse_ragged(a, "torch.sparse_bsr")
    if watched(a.values) and not torch.compiler.is_compiling():
        raise InvalidInput("torch.func and forward mode do not take torch.sparse_bsr; use .to_dense() there")
    pattern = a.pattern
    return torch.sparse_bsr_tensor(
        pattern.indptr,
        pattern.indices,
        a.logical_values(),
        size=a.shape,
        device=a.device,
        check_invariants=False,
    )


@outside_inference
def from_scipy(cls: type[BSR], matrix: Any, block: int | tuple[int, int] | None = None) -> BSR:
    """From a SciPy sparse matrix or array in any format, float32 or float64, to a BSR on the CPU.

    `block` may be left out for SciPy's own BSR, whose blocks are then taken over. Repeated entries are added
    up, as SciPy means them. The matrix is left as it is; nothing is shared.
    """
    is_sparse = all(hasattr(matrix, name) for name in ("format", "tocoo", "shape", "dtype"))
    if not is_sparse or len(matrix.shape) != 2:
        raise InvalidInput(f"expected a 2-D SciPy sparse matrix, got {arguments.shown(matrix)}")
    if matrix.dtype not in (np.float32, np.float64):
        raise InvalidInput(f"SciPy matrix has dtype {matrix.dtype}; call .astype('float32') or 'float64'")
    own = tuple(matrix.blocksize) if matrix.format == "bsr" else None
    if block is None and own is None:
        raise InvalidInput(f"a SciPy {matrix.format} matrix has no blocks of its own; pass block=(bm, bk)")
    wanted = block_sides(own if block is None else block)
    shape = matrix_sides(tuple(matrix.shape), wanted)
    try:
        matrix = matrix.copy()
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)
        matrix = matrix if own == wanted else matrix.tocoo()
        matrix.sum_duplicates()
    except (ValueError, IndexError) as error:
        raise InvalidInput(f"SciPy finds its {matrix.format} matrix invalid: {error}") from error
    if own != wanted:
        return cls.unchecked(*_from_elements(matrix, shape, wanted))
    indptr, indices = (
        torch.tensor(part.astype(np.int32), device="cpu") for part in (matrix.indptr, matrix.indices)
    )
    return cls(BlockPattern(shape, wanted, indptr, indices), torch.tensor(matrix.data, device="cpu"))


def to_scipy(a: BSR) -> sparse.bsr_array:
    """The same matrix as scipy.sparse.bsr_array on the host. Nothing is shared.

    SciPy has no bf16 and no sparse fp16: both become float32, exactly. Raises InvalidInput without SciPy, and
    for ragged sides, which SciPy's BSR cannot have.
    """
    try:
        from scipy import sparse
    except ModuleNotFoundError as error:
        raise InvalidInput("to_scipy needs SciPy; install sparsek[scipy]") from error
    _refuse_ragged(a, "scipy.sparse.bsr_array")
    values = a.logical_values().detach()
    values = values.float() if values.dtype in dtypes.LOW else values
    parts = (values.cpu().numpy(), a.pattern.host.indices, a.pattern.host.indptr)
    return sparse.bsr_array(parts, shape=a.shape, copy=True)


@outside_inference
def from_coo_blocks(
    cls: type[BSR], rows: Tensor, cols: Tensor, blocks: Tensor, shape: tuple[int, int]
) -> BSR:
    """From blocks [n, bm, bk] at block coordinates rows [n], cols [n] (int32 or int64), in any order.

    `shape` is the true (M, K); values outside it become 0. The blocks are copied, on their device; one sync.
    Differentiable in the blocks. Raises InvalidInput for coordinates outside the matrix or given twice.
    """
    arguments.tensor("blocks", blocks, dtypes.FLOATS, ndim=3)
    block = block_sides(tuple(blocks.shape[1:]))
    shape = matrix_sides(shape, block)
    for name, part in (("rows", rows), ("cols", cols)):
        arguments.tensor(name, part, (torch.int32, torch.int64), ndim=1)
        if part.shape[0] != blocks.shape[0] or part.device != blocks.device:
            raise InvalidInput(
                f"{name} has {part.shape[0]} entries on {part.device}; "
                f"blocks has {blocks.shape[0]} on {blocks.device}"
            )
    at = of_values(
        lambda rows, cols: torch.stack((rows.long(), cols.long())).cpu().numpy(),
        rows, cols, reads="from_coo_blocks reads coordinates", instead="make the pattern outside",
    )  # fmt: skip
    host, order = _sorted_cells(at[0], at[1], grid_of(shape, block))
    pattern = BlockPattern.from_host(shape, block, host, blocks.device)
    values = blocks.index_select(0, torch.tensor(order, device=blocks.device))
    return cls.unchecked(pattern, zero_padding(pattern, values))


def _sorted_cells(
    rows: np.ndarray, cols: np.ndarray, grid: tuple[int, int]
) -> tuple[HostPattern, np.ndarray]:
    """The pattern of block coordinates in any order, and the order that sorts them."""
    for name, part, limit in (("rows", rows, grid[0]), ("cols", cols, grid[1])):
        outside = np.flatnonzero((part < 0) | (part >= limit))
        if outside.size:
            at = outside[0]
            raise InvalidInput(f"{name}[{at}] is {part[at]}; the grid has {grid[0]} x {grid[1]} blocks")
    order = np.lexsort((cols, rows))
    rows, cols = rows[order], cols[order]
    twice = np.flatnonzero((rows[1:] == rows[:-1]) & (cols[1:] == cols[:-1]))
    if twice.size:
        first, second = sorted(order[twice[0] : twice[0] + 2])
        raise InvalidInput(
            f"block ({rows[twice[0]]}, {cols[twice[0]]}) is given twice, at {first} and {second}; add them up"
        )
    return HostPattern(_indptr(rows, grid[0]), cols.astype(np.int32)), order


def _from_elements(coo: Any, shape: tuple[int, int], block: tuple[int, int]) -> tuple[BlockPattern, Tensor]:
    """Pattern and values of the blocks that hold the entries of a SciPy COO matrix without repeats."""
    rows, cols = coo.row.astype(np.int64), coo.col.astype(np.int64)
    block_rows, columns = grid_of(shape, block)
    cells, owner = np.unique(rows // block[0] * columns + cols // block[1], return_inverse=True)
    values = np.zeros((cells.size, *block), dtype=coo.dtype)
    values[owner, rows % block[0], cols % block[1]] = coo.data
    indptr = _indptr(cells // max(columns, 1), block_rows)
    host = HostPattern(indptr, (cells % max(columns, 1)).astype(np.int32))
    pattern = BlockPattern.from_host(shape, block, host, torch.device("cpu"))
    return pattern, torch.tensor(values, device="cpu")


def _indptr(rows: np.ndarray, count: int) -> np.ndarray:
    """Row pointers int32 [count + 1] of sorted block rows."""
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int32)


def _rule(mask: Any, threshold: Any, keep: Any, scope: Any) -> Rule:
    if (mask is not None) + (threshold is not None) + (keep is not None) > 1:
        rules = {"mask": mask, "threshold": threshold, "keep": keep}
        given = [name for name, rule in rules.items() if rule is not None]
        raise InvalidInput(f"{' and '.join(given)} are given; give one of mask, threshold and keep")
    if arguments.one_of("scope", scope, SCOPES) != "global" and keep is None:
        raise InvalidInput(f"scope={scope!r} belongs to keep, which is not given")
    if threshold is not None:
        threshold = arguments.number("threshold", threshold, 0)
    if keep is not None:
        keep = arguments.number("keep", keep, 0, 1)
    return Rule(mask, threshold, keep, scope)


def _check_mask(mask: Any, device: torch.device, shape: tuple[int, int], grid: tuple[int, int]) -> None:
    if tuple(arguments.tensor("mask", mask, (torch.bool,)).shape) not in (grid, shape):
        raise InvalidInput(
            f"mask has shape {tuple(mask.shape)}; it must be of blocks {grid} or of elements {shape}"
        )
    arguments.one_device("mask is", mask.device, "w", device)


def _packed(
    w: Tensor, shape: tuple[int, int], block: tuple[int, int], rule: Rule
) -> tuple[BlockPattern, Tensor]:
    """Pattern and values of the blocks of w [M, K] that `rule` stores."""
    tiles, inside = tiles_of(w, block), None
    read = (
        w
        if rule.mask is not None
        else concrete(w, "from_dense reads the values of w", "choose outside and pass mask=")
    )
    # torch.compile of torch 2.11 makes a tuple without elements of what `_replace` gives.
    mask = concrete(rule.mask, "from_dense reads its mask", "pass one that all share")
    rule = Rule(mask, rule.threshold, rule.keep, rule.scope)
    pattern = untransformed(
        lambda: _chosen(tiles if read is w else tiles_of(read, block), shape, block, rule)
    )
    if rule.mask is not None and rule.mask.shape != pattern.grid:
        inside = tiles_of(rule.mask, block)
    values = _gather(tiles, pattern)
    if inside is not None:
        values = values.masked_fill_(_gather(inside, pattern).logical_not_(), 0)
    return pattern, values


def _chosen(tiles: Tensor, shape: tuple[int, int], block: tuple[int, int], rule: Rule) -> BlockPattern:
    """Which blocks of a matrix seen as tiles `rule` stores. With a mask no value is read."""
    if rule.mask is not None:
        stored = rule.mask
        if tuple(stored.shape) != grid_of(shape, block):
            stored = tiles_of(stored, block).any(dim=3).any(dim=1)
        count = int(stored.sum())
    elif rule.threshold is None and rule.keep is None:
        stored = _norms(tiles.detach(), order=1) != 0
        count = int(stored.sum())
    else:
        stored, count = _choose(tiles.detach(), rule)
    return _pattern_of(stored, count, shape, block)


def least_sure(dtype: torch.dtype) -> float:
    """The least norm, summed in `dtype`, that is right whatever squares in it underflow.

    A square that underflows is off by less than the smallest normal number. BLOCK_MAX^2 of them are within the
    rounding of a norm from here on; a smaller norm may be far off.
    """
    limits = torch.finfo(dtype)
    return BLOCK_MAX * math.sqrt(limits.tiny / limits.eps)


def _choose(tiles: Tensor, rule: Rule) -> tuple[Tensor, int]:
    """The blocks [Mb, Kb] that `rule` picks by norm, and how many. Refuses NaN and Inf. One sync, mostly.

    Norms that may be far off are raised to the least that is sure, which no norm above it notices. If `rule` picks
    none of them even so, what they are does not matter.
    """
    norms = _norms(tiles)
    sure = least_sure(norms.dtype)
    stored = _picked(norms.clamp(min=sure), rule)
    unsure = ~norms.isfinite() | (stored & (norms < sure))
    count, again = torch.stack((stored.sum(), unsure.sum())).tolist()
    if not again:
        return stored, count
    norms = _scaled_norms(tiles)
    if norms.isnan().any():
        strange = int((~tiles.isfinite()).sum())
        raise InvalidInput(f"w has {strange} elements that are NaN or Inf; norms cannot rank its blocks")
    stored = _picked(norms, rule)
    return stored, int(stored.sum())


def _picked(norms: Tensor, rule: Rule) -> Tensor:
    """The blocks [Mb, Kb] of norm over the threshold, or those of largest norm."""
    if rule.threshold is not None:
        return norms > rule.threshold
    groups = norms if rule.scope == "row" else norms.reshape(1, -1)
    count = rule.count(groups.shape[1])
    largest = torch.sort(groups, dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, largest, True).view(norms.shape)


def _scaled_norms(tiles: Tensor) -> Tensor:
    """Norms of the blocks, float64 [Mb, Kb]: each block is divided by its largest magnitude first.

    So no square overflows, and none that counts underflows. NaN for a block with NaN or Inf. One block row at
    a time: a scaled copy of all of them would be large.
    """
    rows = []
    for row in tiles.split(1):
        largest = _norms(row, order=math.inf)
        scale = largest.masked_fill(largest == 0, 1)
        rows.append(largest.double() * _norms(row / scale[:, None, :, None]).double())
    return torch.cat(rows)


def _norms(tiles: Tensor, order: float = 2) -> Tensor:
    """Norms of the blocks [Mb, Kb]: first along their rows, which are contiguous, then over the rows."""
    dtype = torch.promote_types(tiles.dtype, torch.float32)
    by_row = torch.linalg.vector_norm(tiles, ord=order, dim=3, dtype=dtype)
    return torch.linalg.vector_norm(by_row, ord=order, dim=1)


def _pattern_of(stored: Tensor, count: int, shape: tuple[int, int], block: tuple[int, int]) -> BlockPattern:
    """The pattern of `count` true cells of a bool [Mb, Kb]. No sync."""
    rows, columns = stored.shape
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=stored.device)
    indptr[1:] = stored.sum(1).cumsum(0)
    cells = torch.nonzero_static(stored.reshape(-1), size=count).reshape(-1)
    indices = cells.remainder(max(columns, 1)).to(torch.int32)
    return BlockPattern.unchecked(shape, block, indptr, indices)


def _gather(tiles: Tensor, pattern: BlockPattern) -> Tensor:
    """The stored blocks [nnzb, bm, bk] of a matrix seen as tiles, contiguous."""
    rows, columns = pattern.block_rows, pattern.indices
    # torch refuses to view words as smaller elements where there are none and a row is one word.
    if pattern.nnzb and _has_words(tiles):
        return tiles.view(WORD)[rows, :, columns].contiguous().view(tiles.dtype)
    return tiles[rows, :, columns].contiguous()


def _is_plain(x: Tensor) -> bool:
    """Outside autograd, torch.func and tracing."""
    return not (watched(x) or (x.requires_grad and torch.is_grad_enabled()))


def _has_words(blocks: Tensor) -> bool:
    """True if rows of blocks are whole 16-byte words at 16-byte addresses, outside autograd and tracing."""
    if not _is_plain(blocks) or blocks.numel() == 0:
        return False
    steps = (blocks.storage_offset(), *blocks.stride()[:-1])
    in_bytes = (blocks.data_ptr(), *(step * blocks.element_size() for step in steps))
    return blocks.stride(-1) == 1 and all(address % ALIGNMENT == 0 for address in in_bytes)


def _refuse_ragged(a: BSR, what: str) -> None:
    if a.pattern.is_ragged:
        raise InvalidInput(
            f"{what} needs sides that are multiples of the block {a.block[0]}x{a.block[1]}, not "
            f"{a.shape[0]}x{a.shape[1]}; use .to_dense(), or build the matrix {a.pattern.padded_shape}"
        )
