"""Arithmetic on the stored blocks of a BSR: scaling, sums, norms, slices of block rows, and state dicts.

The dense matrix is never made. Only `+` and `-` of two pattern objects and `block_row_slice` synchronize, once for each
pattern, because they read its indices on the host. Sums accumulate in float32, in float64 for float64, in a fixed
order: the same matrix gives the same bits. Everything supports double backward in the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import reads_values
from sparsek.products.formats.base import OfDenseBlocks
from sparsek.products.formats.pattern import BlockPattern, HostPattern

if TYPE_CHECKING:
    from typing_extensions import Self

Factor: TypeAlias = "float | Tensor"
NUMBERS = (Real, torch.SymInt, torch.SymFloat)
REAL = (*dtypes.FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
STATE = ("values", "indptr", "indices", "shape", "block", "transposed")


class Arithmetic(OfDenseBlocks):
    """The arithmetic of a BSR. Every method costs time and memory in proportion to what is stored."""

    def __mul__(self, factor: Factor) -> Self:
        """Return self * factor: every stored value times a number or a 0-dim tensor, in this matrix's dtype.

        Elements that are not stored stay 0, for factors of Inf and NaN too. Differentiable, in a tensor `factor` too.
        """
        return self._each(lambda values: self._zero_outside(values * _factor(self, factor, "*")))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Factor) -> Self:
        """Return self / divisor, a number or a 0-dim tensor; see `__mul__`. Division by 0 gives Inf or NaN."""
        return self._each(lambda values: self._zero_outside(values / _factor(self, divisor, "/")))

    def __neg__(self) -> Self:
        """Return -self."""
        return self._each(torch.neg)

    def __add__(self, other: Self | Literal[0]) -> Self:
        """Return self + other, for two matrices that store the same blocks, in one dtype on one device.

        self + 0 is self, so the builtin sum() works.

        The blocks of a stored matrix and a transposed view are matched by index: those of the view are copied. The sum
        of two views is a view. Two different pattern objects are compared on the host, which synchronizes once for
        each.

        Raises:
            InvalidInput: If the patterns differ; the message names the first block that only one of them stores.
        """
        return self._joined(other, "+", torch.add)

    def __radd__(self, other: Self | int) -> Self:
        """Return other + self, where `other` is a BSR or 0; see `__add__`."""
        return self._joined(other, "+", torch.add)

    def __sub__(self, other: Self | Literal[0]) -> Self:
        """Return self - other; see `__add__`."""
        return self._joined(other, "-", torch.sub)

    def __rsub__(self, other: Self | int) -> Self:
        """Return other - self; see `__add__`."""
        return (-self)._joined(other, "+", torch.add)

    def _joined(self, other: Any, sign: str, join: Callable[[Tensor, Tensor], Tensor]) -> Self:
        if _is_zero(other):
            return self
        _check_addend(self, other, sign)
        if (self.order is None) == (other.order is None):
            return self.unchecked(self.pattern, join(self.values, other.values), self.order)
        return self.unchecked(self.pattern, join(self.logical_values(), other.logical_values()))

    def sum(self, dim: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of all elements, of each column or of each row. Differentiable.

        The blocks of a row are added as a binary tree over their positions in the row, so results repeat bit for bit. A
        NaN reaches the sum of its own row or column only.

        Args:
            dim: None for the sum [] of all elements, 0 for those of the columns [K], 1 for those of the rows [M].
            dtype: The dtype of the result, this matrix's own by default. Rounded once, from float32 (float64).
        """
        dtype = _result_dtype(self, dtype)
        wide = _sum_dtype(self)
        if dim is None:
            return _zero_gradient_outside(self).sum(dtype=wide).to(dtype)
        dim = arguments.integer("dim", dim, -2, 1)
        base, rows = (self, dim % 2 == 1) if self.order is None else (self.T, dim % 2 == 0)
        inside = _zero_gradient_outside(base)
        if rows:
            pattern, parts = base.pattern, inside.sum(2, dtype=wide)
        else:
            pattern, order = base.pattern.transposed
            parts = inside.sum(1, dtype=wide).index_select(0, order)
        return _row_sums(parts, pattern).flatten()[: pattern.shape[0]].to(dtype)

    def norm(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the Frobenius norm []. Differentiable; the gradient at 0 is 0, as in torch.

        Squares that overflow float32, of values from 1.8e19 on, make it Inf.

        Args:
            dtype: The dtype of the result, this matrix's own by default.
        """
        dtype = _result_dtype(self, dtype)
        return torch.linalg.vector_norm(self.values, dtype=_sum_dtype(self)).to(dtype)

    def block_norms(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the Frobenius norm of each stored block, [nnzb], in the order of the pattern; see `norm`."""
        dtype = _result_dtype(self, dtype)
        norms = torch.linalg.vector_norm(self.values, dim=(1, 2), dtype=_sum_dtype(self)).to(dtype)
        return norms if self.order is None else norms.index_select(0, self.order)

    def block_row_slice(self, start: int, stop: int) -> Self:
        """Return block rows `start` to `stop - 1`, which are rows start * bm to min(stop * bm, M) - 1. Differentiable.

        The values are a view of this matrix's own. Those of a transposed view, whose block rows are not contiguous, are
        copied. The pattern of a slice is cached with the pattern of the matrix, and so are its plans. The first slice
        reads the indices on the host, one sync.

        Raises:
            InvalidInput: For block rows outside the matrix, and inside torch.compile.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput(
                "block_row_slice inside torch.compile: slice outside and hand the slice to the compiled function"
            )
        pattern = self.pattern
        start = arguments.integer("start", start, 0, pattern.grid[0])
        stop = arguments.integer("stop", stop, start, pattern.grid[0])
        first, last = (int(pattern.host.indptr[at]) for at in (start, stop))
        part = pattern.derived(("block rows", start, stop), lambda: cut_rows(pattern, start, stop))
        if self.order is None:
            return self.unchecked(part, self.values[first:last])
        return self.unchecked(part, self.values.index_select(0, self.order[first:last]).mT.contiguous())

    @property
    def grad(self) -> Self | None:
        """The gradient that a backward pass left in `values`, as a matrix on the same pattern; None before one."""
        found = self.values.grad
        return None if found is None else self._each(lambda _: found)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that describe this matrix, for torch.save. Nothing is copied.

        Returns:
            "values", "indptr" and "indices" on their device, and on the host "shape" and "block", int64 [2], and
            "transposed", bool []. A transposed view is described by the matrix it views, with "transposed" true.

        Example:
            `torch.save(A.state_dict(), "a.pt"); A = sk.BSR.from_state_dict(torch.load("a.pt"))`
        """
        base = self if self.order is None else self.T
        return {
            "values": base.values.detach(),
            "indptr": base.pattern.indptr,
            "indices": base.pattern.indices,
            "shape": torch.tensor(base.shape, device="cpu"),
            "block": torch.tensor(base.block, device="cpu"),
            "transposed": torch.tensor(self.order is not None, device="cpu"),
        }

    @classmethod
    @reads_values("from_state_dict reads a pattern")
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        """Make the matrix, or the transposed view, that `state_dict` described. Shares its tensors; one sync.

        Raises:
            InvalidInput: For names that are missing or unknown, and for tensors that do not fit each other.
        """
        if not isinstance(state, Mapping):
            raise InvalidInput(
                f"a state dict is a mapping of names to tensors, as A.state_dict() gives; got {arguments.shown(state)}"
            )
        lacking = [name for name in STATE if name not in state]
        others = [
            name if isinstance(name, str) else arguments.shown(name) for name in state if name not in STATE
        ]
        if lacking or others:
            faults = [
                f"{word} {', '.join(names)}"
                for word, names in (("lacks", lacking), ("also has", others))
                if names
            ]
            raise InvalidInput(f"the state dict {' and '.join(faults)}; a BSR's has {', '.join(STATE)}")
        (m, k), (bm, bk), (flag,) = (
            _ints(state, name, n) for name, n in (("shape", 2), ("block", 2), ("transposed", 1))
        )
        pattern = BlockPattern((m, k), (bm, bk), state["indptr"], state["indices"])
        base = cls(pattern, state["values"])
        return base.T if flag else base


def _sum_dtype(a: OfDenseBlocks) -> torch.dtype:
    return torch.promote_types(a.dtype, torch.float32)


def _result_dtype(a: OfDenseBlocks, dtype: torch.dtype | None) -> torch.dtype:
    return a.dtype if dtype is None else arguments.dtype("dtype", dtype)


def _factor(a: OfDenseBlocks, factor: Any, sign: str) -> Any:
    """A real number, or a real 0-dim tensor that torch multiplies values with."""
    if isinstance(factor, (float, torch.SymInt, torch.SymFloat)):
        return factor
    if isinstance(factor, Real) and not isinstance(factor, bool):
        try:
            return factor if isinstance(factor, int) and -(2**63) <= factor < 2**63 else float(factor)
        except OverflowError as error:
            raise InvalidInput(f"A {sign} {arguments.shown(factor)}: no float is so large") from error
    if isinstance(factor, type(a)):
        raise InvalidInput(
            f"A {sign} B of two BSR is not defined. A @ B is their product; element by element, where both store the "
            f"same blocks, it is BSR(A.pattern, A.logical_values() {sign} B.logical_values())"
        )
    if not isinstance(factor, Tensor):
        raise InvalidInput(f"A {sign} {arguments.shown(factor)}: use a real number or a 0-dim tensor")
    if factor.ndim:
        raise InvalidInput(
            f"A {sign} {arguments.shown(factor)}: use a number or a 0-dim tensor; A @ B is the product"
        )
    if factor.layout != torch.strided or factor.dtype not in REAL:
        raise InvalidInput(f"A {sign} {arguments.shown(factor)}: use a dense one of a real dtype")
    if factor.device != a.device and factor.device.type != "cpu":
        raise InvalidInput(
            f"A is on {a.device} and the 0-dim tensor on {factor.device}; move it to A's device or to the CPU"
        )
    return factor


def _is_zero(b: Any) -> bool:
    """The number 0, with which the builtin sum() begins."""
    return isinstance(b, NUMBERS) and not isinstance(b, bool) and b == 0


def _check_addend(a: OfDenseBlocks, b: Any, sign: str) -> None:
    if not isinstance(b, type(a)):
        raise InvalidInput(
            f"a BSR and {arguments.shown(b)} do not add up: the sum would be dense. Write A.to_dense() {sign} ... for "
            "that, or add to A.values for a change of the stored elements only"
        )
    if (a.dtype, a.device) != (b.dtype, b.device):
        raise InvalidInput(
            f"A is {dtypes.name(a.dtype)} on {a.device} and B {dtypes.name(b.dtype)} on {b.device}; use "
            "B.to(A.device, A.dtype)"
        )
    differs = _difference(a.pattern, b.pattern)
    if differs:
        raise InvalidInput(
            f"{differs}; BSR matrices are added where both store the same blocks. For others build the union, such "
            "as BSR.from_dense(A.to_dense() + B.to_dense(), block, threshold=0)"
        )


def _difference(a: BlockPattern, b: BlockPattern) -> str:
    """How two patterns differ, in words; "" if they are equal."""
    if a is b or (
        a.indptr is b.indptr and a.indices is b.indices and (a.shape, a.block) == (b.shape, b.block)
    ):
        return ""
    if a.shape != b.shape:
        return f"A is {a.shape[0]}x{a.shape[1]} and B {b.shape[0]}x{b.shape[1]}"
    if a.block != b.block:
        return f"A has blocks of {a.block[0]}x{a.block[1]} and B of {b.block[0]}x{b.block[1]}"
    if a.nnzb != b.nnzb:
        return f"A stores {a.nnzb} blocks and B {b.nnzb}"
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "torch.compile does not compare the contents of patterns; make both matrices of one pattern object"
        )
    if a.same_as(b):
        return ""
    apart = [_cells(pattern) for pattern in (a, b)]
    row, column = min(apart[0] ^ apart[1])
    owner, other = "AB" if (row, column) in apart[0] else "BA"
    return f"{owner} stores the block at block row {row}, block column {column} and {other} does not"


def _cells(pattern: BlockPattern) -> set[tuple[int, int]]:
    indptr, indices = (part.tolist() for part in pattern.host)
    return {
        (row, column) for row, (first, last) in enumerate(pairwise(indptr)) for column in indices[first:last]
    }


def _zero_gradient_outside(a: OfDenseBlocks) -> Tensor:
    """The values, whose gradient is 0 outside the matrix. A pass over them only if a side is ragged."""
    return a._zero_outside(a.values) if a.values.requires_grad and torch.is_grad_enabled() else a.values


def _row_sums(parts: Tensor, pattern: BlockPattern) -> Tensor:
    """The sums [Mb, b] of the parts [nnzb, b] of each block row.

    After a step, part p holds the sum of its row's parts p to p + 2 * step - 1, as far as they exist; at the end the
    first part of a row holds the sum of the row. Index-adds would use atomics, whose order varies.
    """
    place = torch.arange(pattern.nnzb, dtype=torch.int32, device=parts.device)
    left = pattern.indptr[1:][pattern.block_rows] - place
    step = 1
    while step < min(pattern.nnzb, pattern.grid[1]):
        more = parts[step:].masked_fill((left[:-step] <= step)[:, None], 0)
        parts = torch.cat((parts[:-step] + more, parts[-step:]))
        step *= 2
    first = pattern.indptr[:-1].masked_fill(pattern.row_lengths == 0, pattern.nnzb)
    return functional.pad(parts, (0, 0, 0, 1)).index_select(0, first)


def cut_rows(pattern: BlockPattern, start: int, stop: int) -> BlockPattern:
    """The pattern of some block rows; shares the block columns' memory."""
    bm, at = pattern.block[0], pattern.host.indptr[start : stop + 1]
    first, last = int(at[0]), int(at[-1])
    host = HostPattern(at - at[0], pattern.host.indices[first:last])
    host.indptr.flags.writeable = False
    rows = min(stop * bm, pattern.shape[0]) - min(start * bm, pattern.shape[0])
    indptr = pattern.indptr[start : stop + 1] - pattern.indptr[start]
    return BlockPattern.unchecked(
        (rows, pattern.shape[1]), pattern.block, indptr, pattern.indices[first:last], host
    )


def _ints(state: Mapping[str, Tensor], name: str, count: int) -> tuple[int, ...]:
    """A small tensor of whole numbers as ints."""
    part = arguments.tensor(f"{name!r} in the state dict", state[name])
    if part.is_floating_point() or part.is_complex() or part.numel() != count:
        raise InvalidInput(
            f"{name!r} in the state dict must be a tensor of {count} whole numbers, not {arguments.shown(part)}"
        )
    return tuple(int(each) for each in part.reshape(-1).tolist())
