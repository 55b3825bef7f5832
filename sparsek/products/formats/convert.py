"""Conversions of a BSR from and to dense matrices, torch.sparse_bsr, SciPy and lists of blocks.

All but `from_dense` cost time and memory in proportion to what is stored (`to_dense`: to its result). Outside autograd
blocks move as 16-byte words: torch's gather and scatter work element by element, and one wide element moves eight bf16
at the price of one. On a GPU a registered kernel packs (`products/kernels/pack/to_bsr.py`); torch packs what that
refuses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.tracing import (
    check_has_values,
    concrete,
    of_values,
    outside_inference,
    untransformed,
    watched,
)
from sparsek.products.formats.base import ALIGNMENT, OfDenseBlocks, check_finite
from sparsek.products.formats.padding import tiles_of, zero_padding
from sparsek.products.formats.pattern import (
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
    from typing_extensions import Self

Scope: TypeAlias = Literal["global", "row"]
SCOPES = get_args(Scope)
WORD = torch.complex128


class Rule(NamedTuple):
    """Which blocks `from_dense` stores: one of the first three decides; without any, those with a nonzero."""

    mask: Tensor | None
    threshold: float | None
    keep: float | None
    scope: str

    def count(self, cells: int) -> int:
        """The number of blocks, out of `cells`, that `keep` stores."""
        return min(cells, max(1, round(self.keep * cells))) if self.keep else 0

    def split(self, grid: tuple[int, int]) -> tuple[int, int, int]:
        """The number of groups of blocks that `keep` ranks, how many each stores, and how many store one more."""
        groups = grid[0] if self.scope == "row" else 1
        return groups, *divmod(self.count(grid[0] * grid[1]), max(groups, 1))


class Conversions(OfDenseBlocks):
    """The methods of a BSR that make it from other forms of a matrix, and those from it."""

    @classmethod
    @outside_inference
    def from_dense(
        cls,
        w: Tensor,
        block: int | tuple[int, int],
        *,
        mask: Tensor | None = None,
        threshold: float | None = None,
        keep: float | None = None,
        scope: Scope | None = None,
    ) -> Self:
        """Make a BSR of some blocks of a dense matrix: prune `w` to blocks. Differentiable in `w`.

        Give exactly one of `keep`, `threshold` and `mask`. They choose the blocks that are stored.

        Args:
            w: The dense matrix [M, K] in bf16, fp16, fp32 or fp64, with any strides.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512. Sides of
                `w` that are not multiples of the block are padded inside the BSR.
            mask: bool [Mb, Kb] of blocks, or [M, K] of elements. A block is stored if any of its elements is true;
                its elements outside the mask become 0.
            threshold: Store the blocks whose Frobenius norm is greater. 0 stores every block with a nonzero element
                of a finite `w`, so nothing is lost.
            keep: The share of the blocks to store, 0 to 1: those of largest Frobenius norm, of equal ones the first.
                `round(keep * blocks)` are stored, and at least one, unless `keep` is 0.
            scope: Where `keep` chooses: in each block row ("row", the default), or in the whole matrix ("global").
                With "row" every block row stores equally many; where the number does not divide, the rows whose next
                block has the largest norm store one more. Fewer blocks than block rows leave rows empty.

        Returns:
            A BSR [M, K] on the device of `w`, in its dtype.

        Raises:
            InvalidInput: For none or several of `keep`, `threshold` and `mask`, for a `block` or `mask` that does not
                fit, and for NaN or Inf: anywhere in `w` where norms decide, and among the stored values for a mask.

        Norms accumulate in float32, in float64 for float64: where two differ by no more than that rounding, a GPU and a
        CPU may order them differently. Costs one sync, one pass over `w` for the norms and a gather of what is stored;
        without norms another sync, to look for NaN and Inf in that. Where squares overflow, or the choice falls on
        blocks whose squares underflow, `w` is read once more with every block scaled. A ragged side may cost a padded
        copy of `w`.

        Examples:
            >>> w = torch.randn(1024, 512)
            >>> sk.BSR.from_dense(w, block=128, keep=0.25).nnzb
            8
            >>> sk.BSR.from_dense(torch.eye(256), block=(64, 64), threshold=0).density
            0.25
        """
        if keep is not None and mask is threshold is None and _is_on_gpu(w):
            made = by_kernel("pack_bsr_again", w, block, keep, "row" if scope is None else scope)
            if made is not None:
                return made
        block = block_sides(block)
        arguments.tensor("w", w, dtypes.FLOATS, ndim=2)
        shape = matrix_sides(tuple(w.shape), block)
        rule = _rule(mask, threshold, keep, scope)
        if mask is not None:
            _check_mask(mask, w.device, shape, grid_of(shape, block))
        made = by_kernel("pack_bsr", w, block, rule) if w.is_cuda and _is_plain(w) else None
        made = cls.unchecked(*_packed(w, shape, block, rule)) if made is None else made
        if rule.keep is rule.threshold is None:  # otherwise norms have been checked
            check_finite("w", made.values)
        return made

    def to_dense(self) -> Tensor:
        """Return the dense matrix [M, K], contiguous, in this dtype on this device. Differentiable. No sync."""
        values = self.logical_values()
        if torch._C._are_functorch_transforms_active():
            return _written_out(self.pattern, values)
        out = torch.zeros(self.pattern.padded_shape, dtype=self.dtype, device=self.device)
        target = tiles_of(out, self.block)
        if _has_words(values) and _has_words(target):
            target, values = target.view(WORD), values.view(WORD)
        target[self.pattern.block_rows, :, self.pattern.indices] = values
        return out[: self.shape[0], : self.shape[1]].contiguous()

    @classmethod
    @outside_inference
    def from_torch(cls, matrix: Tensor) -> Self:
        """Make a BSR of a torch.sparse_bsr tensor. One sync.

        Args:
            matrix: A torch.sparse_bsr tensor [M, K] whose block sides are multiples of 16. Its values are shared,
                unless they are not contiguous or not aligned to 16 bytes. Indices become int32.

        Raises:
            InvalidInput: For another layout, for batch or dense dimensions, and for blocks that do not fit.
        """
        if not isinstance(matrix, Tensor) or matrix.layout != torch.sparse_bsr:
            raise InvalidInput(
                f"expected a torch.sparse_bsr tensor, got {arguments.shown(matrix)}; use .to_sparse_bsr"
            )
        values = matrix.values().contiguous()
        if matrix.ndim != 2 or values.ndim != 3:
            raise InvalidInput(
                f"expected a 2-D matrix without dense dimensions, got shape {tuple(matrix.shape)}"
            )
        if values.data_ptr() % ALIGNMENT:
            values = values.clone()
        # What does not fit int32 becomes the limit, which no pattern accepts.
        lists = (part.clamp(-1, INT32_MAX) for part in (matrix.crow_indices(), matrix.col_indices()))
        indptr, indices = (part.to(torch.int32).contiguous() for part in lists)
        block = (values.shape[1], values.shape[2])
        return cls(BlockPattern((matrix.shape[0], matrix.shape[1]), block, indptr, indices), values)

    def to_torch(self) -> Tensor:
        """Return this matrix as a torch.sparse_bsr tensor on the same indices and values; a `.T` view's are copied.

        Raises:
            InvalidInput: For ragged sides, which torch.sparse_bsr does not support, and under torch.func.
        """
        _refuse_ragged(self, "torch.sparse_bsr")
        if watched(self.values) and not torch.compiler.is_compiling():
            raise InvalidInput(
                "torch.func and forward mode do not take torch.sparse_bsr; use .to_dense() there"
            )
        check_has_values("torch.sparse_bsr reads a pattern", "call it outside", self.values)
        pattern = self.pattern
        return torch.sparse_bsr_tensor(
            pattern.indptr,
            pattern.indices,
            self.logical_values(),
            size=self.shape,
            device=self.device,
            check_invariants=False,
        )

    @classmethod
    @outside_inference
    def from_scipy(cls, matrix: Any, block: int | tuple[int, int] | None = None) -> Self:
        """Make a BSR on the CPU of a SciPy sparse matrix or array. Nothing is shared.

        Args:
            matrix: A 2-D SciPy sparse matrix or array [M, K] in float32 or float64, in any format. Duplicate entries
                are added. It is not changed.
            block: The sides (bm, bk) of a block, or one side of a square one. May be left out for SciPy's own BSR.

        Raises:
            InvalidInput: For another dtype, for indices that SciPy finds invalid, and for a missing `block`.
        """
        is_sparse = all(hasattr(matrix, name) for name in ("format", "tocoo", "shape", "dtype"))
        if not is_sparse or not isinstance(matrix.shape, tuple) or len(matrix.shape) != 2:
            raise InvalidInput(f"expected a 2-D SciPy sparse matrix, got {arguments.shown(matrix)}")
        if matrix.dtype not in (np.float32, np.float64):
            raise InvalidInput(f"SciPy matrix has dtype {matrix.dtype}; call .astype('float32') or 'float64'")
        own = tuple(matrix.blocksize) if matrix.format == "bsr" else None
        if block is None and own is None:
            raise InvalidInput(
                f"a SciPy {matrix.format} matrix has no blocks of its own; pass block=(bm, bk)"
            )
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

    def to_scipy(self) -> sparse.bsr_array:
        """Return this matrix as a scipy.sparse.bsr_array on the host. Nothing is shared.

        SciPy has no bf16 and no sparse fp16: both become float32, without loss.

        Raises:
            InvalidInput: If SciPy is not installed, and for ragged sides, which SciPy's BSR does not support.
        """
        try:
            from scipy import sparse
        except ModuleNotFoundError as error:
            raise InvalidInput("to_scipy needs SciPy; install sparsek[scipy]") from error
        _refuse_ragged(self, "scipy.sparse.bsr_array")
        check_has_values("to_scipy reads values", "call it outside", self.values)
        values = self.logical_values().detach()
        values = values.float() if values.dtype in dtypes.LOW else values
        parts = (values.cpu().numpy(), self.pattern.host.indices, self.pattern.host.indptr)
        return sparse.bsr_array(parts, shape=self.shape, copy=True)

    @classmethod
    @outside_inference
    def from_coo_blocks(cls, rows: Tensor, cols: Tensor, blocks: Tensor, shape: tuple[int, int]) -> Self:
        """Make a BSR of blocks and their coordinates, in any order. Differentiable in `blocks`. One sync.

        Args:
            rows: The block rows [n], int32 or int64, on the device of `blocks`.
            cols: The block columns [n], int32 or int64, on the device of `blocks`.
            blocks: The dense blocks [n, bm, bk] in bf16, fp16, fp32 or fp64. They are copied.
            shape: (M, K) of the matrix. Values outside it become 0.

        Raises:
            InvalidInput: For a coordinate that is outside the matrix or appears twice.
        """
        arguments.tensor("blocks", blocks, dtypes.FLOATS, ndim=3)
        block = block_sides(tuple(blocks.shape[1:]))
        shape = matrix_sides(shape, block)
        for name, part in (("rows", rows), ("cols", cols)):
            arguments.tensor(name, part, (torch.int32, torch.int64), ndim=1)
            arguments.check_real("blocks", blocks, name, part)
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


def _written_out(pattern: BlockPattern, values: Tensor) -> Tensor:
    """As `to_dense`, with a copy more: vmap (torch 2.13) mixes up indices that a slice stands between."""
    (rows, columns), (bm, bk) = pattern.grid, pattern.block
    cells = values.new_zeros(rows * columns, bm, bk)
    cells = cells.index_copy(0, pattern.block_rows.long() * columns + pattern.indices, values)
    out = cells.view(rows, columns, bm, bk).transpose(1, 2).reshape(pattern.padded_shape)
    return out[: pattern.shape[0], : pattern.shape[1]].contiguous()


def _sorted_cells(
    rows: np.ndarray, cols: np.ndarray, grid: tuple[int, int]
) -> tuple[HostPattern, np.ndarray]:
    """The pattern of block coordinates in any order, and the permutation that sorts them."""
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
    rules = {"mask": mask, "threshold": threshold, "keep": keep}
    given = [name for name, rule in rules.items() if rule is not None]
    if not given:
        raise InvalidInput(
            "from_dense needs one rule that chooses blocks: keep=0.25 (the quarter with the largest norms), "
            "threshold=t (norms over t; threshold=0 keeps every block with a nonzero) or mask= (blocks or elements)"
        )
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} are given; give one of mask, threshold and keep")
    scope = ("global" if keep is None else "row") if scope is None else scope
    if arguments.one_of("scope", scope, SCOPES) != "global" and keep is None:
        raise InvalidInput(f"scope={scope!r} belongs to keep, which is not given")
    if threshold is not None:
        # Norms over 0 are those of blocks with a nonzero, which no square that underflows can hide.
        threshold = arguments.number("threshold", threshold, 0) or None
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
    check_has_values(
        "from_dense reads the values of w or mask", "make the matrix outside", w if mask is None else mask
    )
    rule = Rule(mask, rule.threshold, rule.keep, rule.scope)
    watched = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
    pattern = untransformed(
        lambda: _chosen(tiles if read is w and not watched else tiles_of(read, block), shape, block, rule),
        read,
    )
    if rule.mask is not None and rule.mask.shape != pattern.grid:
        inside = tiles_of(rule.mask, block)
    values = _gather(tiles, pattern)
    if inside is not None:
        values = values.masked_fill_(_gather(inside, pattern).logical_not_(), 0)
    return pattern, values


def _chosen(tiles: Tensor, shape: tuple[int, int], block: tuple[int, int], rule: Rule) -> BlockPattern:
    """The pattern of the blocks that `rule` stores, of a matrix viewed as tiles. With a mask no value is read."""
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
    """The smallest norm, accumulated in `dtype`, that is accurate even if squares in it underflow.

    A square that underflows is off by less than the smallest normal number. BLOCK_MAX^2 of them are within the
    rounding of a norm of at least this size; a smaller norm may be far off.
    """
    limits = torch.finfo(dtype)
    return BLOCK_MAX * math.sqrt(limits.tiny / limits.eps)


def _choose(tiles: Tensor, rule: Rule) -> tuple[Tensor, int]:
    """The blocks [Mb, Kb] that `rule` picks by norm, and their number. Refuses NaN and Inf. Usually one sync.

    Norms that may be far off are raised to `least_sure`, which does not change the order of those above it. If `rule`
    picks none of the raised ones, their exact values do not matter.
    """
    norms = _norms(tiles)
    sure = least_sure(norms.dtype)
    stored = picked(norms.clamp(min=sure), rule)
    unsure = ~norms.isfinite() | (stored & (norms < sure))
    count, again = torch.stack((stored.sum(), unsure.sum())).tolist()
    if not again:
        return stored, count
    norms = _scaled_norms(tiles)
    if norms.isnan().any():
        strange = int((~tiles.isfinite()).sum())
        raise InvalidInput(f"w has {strange} elements that are NaN or Inf; norms cannot rank its blocks")
    stored = picked(norms, rule)
    return stored, int(stored.sum())


def picked(norms: Tensor, rule: Rule) -> Tensor:
    """The blocks [Mb, Kb] of norm over the threshold, or those of largest norm."""
    if rule.threshold is not None:
        return norms > rule.threshold
    count, each, more = rule.split((norms.shape[0], norms.shape[1]))
    groups = norms.reshape(count, norms.numel() // max(count, 1))
    ranked, cells = torch.sort(groups, dim=1, descending=True, stable=True)
    stored = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, cells[:, :each], True)
    if more:
        rows = torch.sort(ranked[:, each], descending=True, stable=True).indices[:more]
        stored[rows, cells[rows, each]] = True
    return stored.view(norms.shape)


def _scaled_norms(tiles: Tensor) -> Tensor:
    """Norms of the blocks, float64 [Mb, Kb]: each block is divided by its largest magnitude first.

    So no square overflows, and none that matters underflows. NaN for a block with NaN or Inf. One block row at a
    time, because a scaled copy of the whole matrix would be large.
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
    return BlockPattern.unchecked(shape, block, indptr, indices, passing=False)


def _gather(tiles: Tensor, pattern: BlockPattern) -> Tensor:
    """The stored blocks [nnzb, bm, bk] of a matrix viewed as tiles, contiguous."""
    rows, columns = pattern.block_rows, pattern.indices
    # torch does not view words as smaller elements in an empty tensor whose rows are one word.
    if pattern.nnzb and _has_words(tiles):
        return tiles.view(WORD)[rows, :, columns].contiguous().view(tiles.dtype)
    return tiles[rows, :, columns].contiguous()


def _is_on_gpu(x: Any) -> bool:
    """Whether x, which may be anything, is on a GPU, outside torch.compile."""
    return getattr(x, "is_cuda", False) is True and not torch.compiler.is_compiling()


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


def _refuse_ragged(a: OfDenseBlocks, what: str) -> None:
    if a.pattern.is_ragged:
        raise InvalidInput(
            f"{what} needs sides that are multiples of the block {a.block[0]}x{a.block[1]}, not "
            f"{a.shape[0]}x{a.shape[1]}; use .to_dense(), or build the matrix {a.pattern.padded_shape}"
        )
