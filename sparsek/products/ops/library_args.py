"""Matrices as tensors and ints, the argument types of torch.library ops, and back.

A transposed view is passed as the viewed matrix and a flag. So a graph of torch.compile has no transposition, and
gradients have the order in which values are stored. The op finds the pattern object of an index list again, and with it
all that is cached there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core.arguments import TENSORS
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Matrix, Quantized, SparseMatrix
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import Parts
from sparsek.products.plan.operands import readable
from sparsek.products.reference.epilogue import Combine, EpilogueActivation


class SpmmArgs(NamedTuple):
    """The arguments of `sparsek::spmm`: the parts of A, B, and the epilogue.

    `b` is [..., K, N]; or, with a `b_scale`, the FP8 values [..., N, K] of a QuantizedTensor. `by_columns`: C is
    written column-major, and C.mT is returned, [..., N, M], row-major. `dtype` is that of C.
    """

    values: Tensor
    scale: Tensor | None
    meta: Tensor | None
    indptr: Tensor | None
    indices: Tensor | None
    sizes: Sequence[int]
    scale_kind: str
    fast_accum: bool
    transposed: bool
    b: Tensor
    b_scale: Tensor | None
    by_columns: bool
    alpha: float
    bias: Tensor | None
    activation: EpilogueActivation
    other: Tensor | None
    combine: Combine
    dtype: torch.dtype
    kernel: str | None

    @property
    def parts(self) -> Parts:
        """The parts of A."""
        parts: Any = self[: len(Parts._fields)]
        return Parts(*parts)


class FlatMatrix(NamedTuple):
    """A BSR: the matrix as it is stored, and whether this is its transpose."""

    values: Tensor
    indptr: Tensor
    indices: Tensor
    sizes: Sequence[int]
    transposed: bool

    def flip(self) -> FlatMatrix:
        """Return the transpose."""
        return self._replace(transposed=not self.transposed)

    def side(self, at: int) -> tuple[int, int]:
        """Return the rows (0) or columns (1) of the matrix and of its blocks."""
        at = 1 - at if self.transposed else at
        return self.sizes[at], self.sizes[2 + at]


class SddmmArgs(NamedTuple):
    """The arguments of `sparsek::sddmm`."""

    x: Tensor
    y: Tensor
    indptr: Tensor
    indices: Tensor
    sizes: Sequence[int]
    kernel: str | None


class SpgemmArgs(NamedTuple):
    """The arguments of `sparsek::spgemm`; those of `spgemm_dense` lack the pattern of C."""

    a_values: Tensor
    a_indptr: Tensor
    a_indices: Tensor
    a_sizes: Sequence[int]
    a_transposed: bool
    b_values: Tensor
    b_indptr: Tensor
    b_indices: Tensor
    b_sizes: Sequence[int]
    b_transposed: bool
    c_indptr: Tensor
    c_indices: Tensor
    kernel: str | None

    @classmethod
    def dense(cls, *given: Any) -> SpgemmArgs:
        """Make them of the arguments of `spgemm_dense`."""
        return cls._make((*given[:10], None, None, *given[10:]))

    @property
    def a(self) -> FlatMatrix:
        return FlatMatrix(*self[:5])

    @property
    def b(self) -> FlatMatrix:
        return FlatMatrix(*self[5:10])

    @property
    def form(self) -> Literal["dense", "bsr"]:
        """That of C."""
        return "dense" if self.c_indptr is None else "bsr"

    @property
    def c_sizes(self) -> list[int]:
        """Shape and block of C."""
        (rows, bm), (columns, bn) = self.a.side(0), self.b.side(1)
        return [rows, columns, bm, bn]


class MlpArgs(NamedTuple):
    """The arguments of `sparsek::mlp`: x [..., K], and both layers with the biases."""

    x: Tensor
    up_values: Tensor
    up_indptr: Tensor
    up_indices: Tensor
    up_sizes: Sequence[int]
    up_transposed: bool
    up_bias: Tensor | None
    down_values: Tensor
    down_indptr: Tensor
    down_indices: Tensor
    down_sizes: Sequence[int]
    down_transposed: bool
    down_bias: Tensor | None
    activation: str
    kernel: str | None

    @property
    def up(self) -> FlatMatrix:
        return FlatMatrix(*self[1:6])

    @property
    def down(self) -> FlatMatrix:
        return FlatMatrix(*self[7:12])


class SampledArgs(NamedTuple):
    """The arguments of `sparsek::sampled`."""

    x: Tensor
    values: Tensor
    indptr: Tensor
    indices: Tensor
    sizes: Sequence[int]
    transposed: bool
    p_indptr: Tensor
    p_indices: Tensor
    p_sizes: Sequence[int]
    p_transposed: bool
    kernel: str | None

    @property
    def a(self) -> FlatMatrix:
        return FlatMatrix(*self[1:6])


FlatPattern = tuple[Tensor, Tensor, list[int]]


class CachedPattern(NamedTuple):
    """The pattern of an indptr and of indices at this address, while neither is written to."""

    pattern: Callable[[], BlockPattern | None]
    indices: int
    versions: tuple[int, int]


# From indptr to its pattern. A pattern of the caller is weakly referenced; one made here has tensors of its own. So an
# entry lives no longer than its indptr.
_PATTERNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def flat(a: BSR) -> FlatMatrix:
    """Values, indptr, indices and (rows, columns, bm, bk) of the matrix as stored; whether `a` is its `.T`."""
    pattern = a.pattern if a.order is None else a.pattern.T
    return FlatMatrix(a.values, *flat_pattern(pattern), a.order is not None)


def flat_pattern(pattern: BlockPattern) -> FlatPattern:
    """indptr, indices and the sizes of a pattern."""
    if not torch.compiler.is_compiling():
        remember(pattern.indptr, pattern.indices, pattern)
    return pattern.indptr, pattern.indices, [*pattern.shape, *pattern.block]


def pattern_of(indptr: Tensor, indices: Tensor, sizes: Sequence[int]) -> BlockPattern:
    """The pattern of these parts: the same object while they, or a user of it, live, and are not written to.

    Parts that are new, or were written to, are copied and checked, with one sync.
    """
    known: CachedPattern | None = _PATTERNS.get(indptr)
    if known is not None and known[1:] == _state(indptr, indices):
        pattern = known.pattern()
        sides = None if pattern is None else (*pattern.shape, *pattern.block)
        if pattern is not None and sides == tuple(sizes) and pattern.nnzb == indices.shape[0]:
            # On a CPU also what has no version: a write through .data, numpy or shared memory.
            parts = zip((indptr, indices), pattern.host, strict=True) if indptr.is_cpu else ()
            if all(part.numpy().tobytes() == right.tobytes() for part, right in parts):
                return pattern
    made = _unknown(indptr, indices, sizes)
    _PATTERNS[indptr] = CachedPattern(lambda: made, *_state(indptr, indices))
    return made


def remember(indptr: Tensor, indices: Tensor, pattern: BlockPattern, replace: bool = False) -> None:
    """Let ops find this pattern by tensors that have its contents, as long as it lives.

    `replace`: instead of the pattern that they found before.
    """
    known: CachedPattern | None = _PATTERNS.get(indptr)
    state = _state(indptr, indices)
    other = known.pattern() if known is not None and known[1:] == state else None
    if replace or other is None or (other.shape, other.block) != (pattern.shape, pattern.block):
        _PATTERNS[indptr] = CachedPattern(weakref.ref(pattern), *state)


def matrix(
    values: Tensor, indptr: Tensor, indices: Tensor, sizes: Sequence[int], transposed: bool = False
) -> BSR:
    """The BSR of the result of `flat`.

    Values that are not contiguous or not aligned, as gradients may be, are copied.
    """
    a = BSR.unchecked(pattern_of(indptr, indices, sizes), readable(values))
    return a.T if transposed else a


def parts(a: SparseMatrix, transposed: bool = False) -> Parts:
    """The tensors and numbers of a sparse matrix, or of its transpose. The op finds its pattern again."""
    plain = a.matrix if isinstance(a, Quantized) else a
    if not isinstance(plain, Semi24):
        flat_pattern(plain.pattern.T if isinstance(plain, BSR) and plain.order is not None else plain.pattern)
    return a.parts(transposed)


def whole(given: Parts) -> tuple[SparseMatrix, bool]:
    """The matrix of the result of `parts`, and whether its transpose is meant; a BSR is returned as the view.

    Parts that are not contiguous or not aligned, as gradients may be, are copied.
    """
    values, scale, meta, indptr, indices, sizes, scale_kind, fast_accum, transposed = given
    made: Matrix
    if meta is not None:
        values, meta = readable(values), readable(meta)
        made = Semi24.unchecked(values, meta)
        if indptr is not None and indices is not None:
            made = BSR24.unchecked(pattern_of(indptr, indices, sizes), values, meta)
    else:
        assert indptr is not None
        assert indices is not None
        made, transposed = matrix(values, indptr, indices, sizes, transposed), False
    if scale is None:
        return made, transposed
    return Quantized.unchecked(made, scale.contiguous(), scale_kind, fast_accum), transposed


def dequantized(given: Parts, dtype: torch.dtype) -> Parts:
    """The parts of scale * matrix in `dtype`, for parts in FP8, which may be fake; others as they are."""
    if given.scale is None:
        return given
    indptr, indices = given.indptr, given.indices
    inner: Any = Semi24.unchecked(given.values, given.meta)
    if indptr is not None and indices is not None:  # meta counts for no scale
        inner = fake(given.values, indptr, indices, given.sizes)
    values = Quantized.unchecked(inner, given.scale, given.scale_kind).dequantize(dtype).values
    return given._replace(values=values, scale=None, scale_kind="", fast_accum=False)


def shape_of(given: Parts) -> tuple[int, int]:
    """M and K of the matrix of these parts, which may be fake."""
    rows, columns = given.sizes[:2] if given.sizes else (given.values.shape[0], 2 * given.values.shape[1])
    return (columns, rows) if given.transposed else (rows, columns)


def fake(
    values: Tensor, indptr: Tensor, indices: Tensor, sizes: Sequence[int], transposed: bool = False
) -> BSR:
    """`matrix` for fake tensors: the pattern has sizes, and its indices must not be read."""
    rows, columns, bm, bk = sizes
    if transposed:
        rows, columns, bm, bk = columns, rows, bk, bm
    pattern = BlockPattern.unchecked((rows, columns), (bm, bk), indptr, indices)
    return BSR.unchecked(pattern, values, indices if transposed else None)


def _state(indptr: Tensor, indices: Tensor) -> tuple[int, tuple[int, int]]:
    """What a write to the parts of a pattern changes."""
    plain = type(indices) in TENSORS and not is_functorch_wrapped_tensor(indices)
    at = indices.data_ptr() if plain else id(indices)  # fake and wrapped ones have no address
    return at, (version_of(indptr), version_of(indices))


def version_of(x: Tensor) -> int:
    """The number of writes to a tensor; 0 for tensors of inference mode, which do not count them."""
    return 0 if x.is_inference() else x._version


@torch.inference_mode(False)
def _unknown(indptr: Tensor, indices: Tensor, sizes: Sequence[int]) -> BlockPattern:
    rows, columns, bm, bk = map(int, sizes)
    return BlockPattern((rows, columns), (bm, bk), indptr.detach().clone(), indices.detach().clone())
