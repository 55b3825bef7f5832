"""Arithmetic on stored blocks: scaled, added, summed, measured by norm, cut into block rows, taken apart for a file.

Everything costs time and memory in proportion to what is stored; the dense matrix is never made. Nothing waits for
the device but what reads a pattern's indices on the host, once for each pattern: `add` and `subtract` of two pattern
objects, and `block_row_slice`. Sums are kept in float32, in float64 for float64, in an order that is fixed: the same
matrix gives the same bits. Everything is differentiable in the values, twice as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix.pattern import BlockPattern, HostPattern

if TYPE_CHECKING:
    from sparsek.matrix.bsr import BSR

NUMBERS = (Real, torch.SymInt, torch.SymFloat)
REAL = (*dtypes.FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
STATE = ("values", "indptr", "indices", "shape", "block", "transposed")


def scale(a: BSR, factor: Any) -> BSR:
    """a * factor: every stored value times a number or a 0-dim tensor, in a's dtype. A view stays a view.

    Elements that are not stored stay 0, also times Inf or NaN. Differentiable in a tensor factor too.
    """
    return a.unchecked(a.pattern, a._zero_outside(a.values * _factor(a, factor, "*")), a.order)


def divide(a: BSR, divisor: Any) -> BSR:
    """a / divisor: every stored value by a number or a 0-dim tensor; otherwise as `scale`, by 0 as well."""
    return a.unchecked(a.pattern, a._zero_outside(a.values / _factor(a, divisor, "/")), a.order)


def negate(a: BSR) -> BSR:
    """-a. A view stays a view."""
    return a.unchecked(a.pattern, -a.values, a.order)


def add(a: BSR, other: Any) -> BSR:
    """a + other for two matrices that store the same blocks, in one dtype and on one device; a + 0 is a.

    Blocks of a stored matrix and a transposed view are met by index: those of the view are copied, and the sum is a
    stored matrix. Two views make a view. Patterns that are one object need no look; those of two objects are compared
    on the host, where each one is copied once. Raises InvalidInput that says what differs.
    """
    return _joined(a, other, "+", torch.add)


def subtract(a: BSR, other: Any) -> BSR:
    """a - other; otherwise as `add`."""
    return _joined(a, other, "-", torch.sub)


def _joined(a: BSR, other: Any, sign: str, join: Callable[[Tensor, Tensor], Tensor]) -> BSR:
    if _is_zero(other):
        return a
    _check_addend(a, other, sign)
    if (a.order is None) == (other.order is None):
        return a.unchecked(a.pattern, join(a.values, other.values), a.order)
    return a.unchecked(a.pattern, join(a.logical_values(), other.logical_values()))


def subtract_from(a: BSR, other: Any) -> BSR:
    """other - a; otherwise as `add`."""
    return add(negate(a), other)


def total(a: BSR, dim: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all elements [], of every column (dim 0) [K], or of every row (dim 1) [M].

    `dtype` is that of the result, a's own if None: one rounding at the end. The blocks of a row are added as a binary
    tree over their places in the row. A NaN reaches the sums of its own row or column only.
    """
    dtype = _result_dtype(a, dtype)
    wide = _sum_dtype(a)
    if dim is None:
        return _zero_gradient_outside(a).sum(dtype=wide).to(dtype)
    dim = arguments.integer("dim", dim, -2, 1)
    base, rows = (a, dim % 2 == 1) if a.order is None else (a.T, dim % 2 == 0)
    inside = _zero_gradient_outside(base)
    if rows:
        pattern, parts = base.pattern, inside.sum(2, dtype=wide)
    else:
        pattern, order = base.pattern.transposed
        parts = inside.sum(1, dtype=wide).index_select(0, order)
    return _row_sums(parts, pattern).reshape(-1)[: pattern.shape[0]].to(dtype)


def norm(a: BSR, *, dtype: torch.dtype | None = None) -> Tensor:
    """The Frobenius norm [], in `dtype` or a's own. Its gradient at 0 is 0, as in torch.

    Squares that overflow float32 (values from 1.8e19 on) make it Inf.
    """
    dtype = _result_dtype(a, dtype)
    return torch.linalg.vector_norm(a.values, dtype=_sum_dtype(a)).to(dtype)


def block_norms(a: BSR, *, dtype: torch.dtype | None = None) -> Tensor:
    """The Frobenius norm of every stored block [nnzb], in the pattern's order; otherwise as `norm`."""
    dtype = _result_dtype(a, dtype)
    norms = torch.linalg.vector_norm(a.values, dim=(1, 2), dtype=_sum_dtype(a)).to(dtype)
    return norms if a.order is None else norms.index_select(0, a.order)


def block_row_slice(a: BSR, start: int, stop: int) -> BSR:
    """Block rows `start` to `stop - 1`: rows start * bm to min(stop * bm, M) - 1 of the matrix.

    Its values are those of `a`, in the same memory. Of a transposed view, whose block rows lie apart, they are
    copied, and the slice is a stored matrix. The pattern of a slice is kept with a's pattern, and so are its plans.
    Reads the indices on the host, so torch.compile cannot trace it. Raises InvalidInput for rows that are not there.
    """
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "block_row_slice inside torch.compile: slice outside and hand the slice to the compiled function"
        )
    pattern = a.pattern
    start = arguments.integer("start", start, 0, pattern.grid[0])
    stop = arguments.integer("stop", stop, start, pattern.grid[0])
    first, last = (int(pattern.host.indptr[at]) for at in (start, stop))
    part = pattern.derived(("block rows", start, stop), lambda: _cut(pattern, start, stop))
    if a.order is None:
        return a.unchecked(part, a.values[first:last])
    return a.unchecked(part, a.values.index_select(0, a.order[first:last]).mT.contiguous())


def gradient(a: BSR) -> BSR | None:
    """The gradient that a backward pass left in a.values, as a matrix like `a`; None before one."""
    found = a.values.grad
    return None if found is None else a.unchecked(a.pattern, found, a.order)


def state_dict(a: BSR) -> dict[str, Tensor]:
    """Tensors that say all of `a`: STATE, sizes as int64 [2] and the flag as bool [] on the host. Nothing is copied.

    A transposed view is told as the matrix that it views, with `transposed` true, so that no value moves.
    """
    base = a if a.order is None else a.T
    return {
        "values": base.values.detach(),
        "indptr": base.pattern.indptr,
        "indices": base.pattern.indices,
        "shape": torch.tensor(base.shape, device="cpu"),
        "block": torch.tensor(base.block, device="cpu"),
        "transposed": torch.tensor(a.order is not None, device="cpu"),
    }


def from_state_dict(cls: type[BSR], state: Mapping[str, Tensor]) -> BSR:
    """What `state_dict` took apart, a view as a view. Shares the tensors; checks all of it, with one sync."""
    if not isinstance(state, Mapping):
        raise InvalidInput(
            f"a state dict is a mapping of names to tensors, as A.state_dict() gives; got {arguments.shown(state)}"
        )
    lacking = [name for name in STATE if name not in state]
    others = [name if isinstance(name, str) else arguments.shown(name) for name in state if name not in STATE]
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


def _sum_dtype(a: BSR) -> torch.dtype:
    return torch.promote_types(a.dtype, torch.float32)


def _result_dtype(a: BSR, dtype: torch.dtype | None) -> torch.dtype:
    return a.dtype if dtype is None else arguments.dtype("dtype", dtype)


def _factor(a: BSR, factor: Any, sign: str) -> Any:
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


def _check_addend(a: BSR, b: Any, sign: str) -> None:
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
            "as BSR.from_dense(A.to_dense() + B.to_dense(), block)"
        )


def _difference(a: BlockPattern, b: BlockPattern) -> str:
    """What tells two patterns apart, in words; "" if they are the same. Only two objects are looked at."""
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
            "torch.compile does not look into patterns to compare them; make both matrices of one pattern object"
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


def _zero_gradient_outside(a: BSR) -> Tensor:
    """The values, whose gradient is 0 outside the matrix. A pass over them only if a side is ragged."""
    return a._zero_outside(a.values) if a.values.requires_grad and torch.is_grad_enabled() else a.values


def _row_sums(parts: Tensor, pattern: BlockPattern) -> Tensor:
    """What the parts [nnzb, b] of each block row add up to: [Mb, b].

    After a step, part p holds the sum of its row's parts p to p + 2 * step - 1, as far as there are any; so the first
    part of a row ends with all of it. Index-adds would meet in atomics, whose order changes.
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


def _cut(pattern: BlockPattern, start: int, stop: int) -> BlockPattern:
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
