"""Matrices as tensors and ints, which is what torch.library ops take, and put together again inside of them.

A transposed view goes through as the matrix it was taken from and a flag. So nothing is transposed in a graph that
torch.compile traces, gradients come back in the order in which values are stored, and what follows from a pattern is
made once: the op finds the pattern that an index list came from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.operands import readable

FlatPattern = tuple[Tensor, Tensor, list[int]]
FlatMatrix = tuple[Tensor, Tensor, Tensor, list[int], bool]

# Plans are kept from call to call; the memory of a graph that torch.compile captures by itself would not outlive them.
TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)

# From indptr to its pattern. A pattern that somebody else holds is weakly referenced; one that was put together here
# holds other tensor objects on the same memory. So an entry lives no longer than its indptr.
_PATTERNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def traced() -> bool:
    """Something looks at calls op by op: torch.compile, torch.func, or a TorchDispatchMode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """None of these is of a subclass, which may look at calls op by op too."""
    return all(x is None or type(x) in (Tensor, Parameter) for x in tensors)


def flat(a: BSR) -> FlatMatrix:
    """Values, indptr, indices and (rows, columns, bm, bk) of the matrix as it is stored; whether `a` is its `.T`."""
    return a.values, *flat_pattern(a.pattern if a.order is None else a.pattern.T), a.order is not None


def flat_pattern(pattern: BlockPattern) -> FlatPattern:
    """indptr, indices and the sizes of a pattern."""
    if not torch.compiler.is_compiling():
        known = _PATTERNS.get(pattern.indptr)
        if known is None or known() is not pattern:
            _PATTERNS[pattern.indptr] = weakref.ref(pattern)
    return pattern.indptr, pattern.indices, [*pattern.shape, *pattern.block]


def pattern_of(indptr: Tensor, indices: Tensor, sizes: Sequence[int]) -> BlockPattern:
    """The pattern of these parts: the same object as long as they live, or somebody holds it. No sync."""
    known: Callable[[], BlockPattern | None] | None = _PATTERNS.get(indptr)
    pattern = None if known is None else known()
    if pattern is None or not _is(pattern, indices, sizes):
        made = pattern = _unknown(indptr, indices, sizes)
        _PATTERNS[indptr] = lambda: made
    return pattern


def matrix(
    values: Tensor, indptr: Tensor, indices: Tensor, sizes: Sequence[int], transposed: bool = False
) -> BSR:
    """The BSR that `flat` took apart.

    Values without the order or the alignment that kernels read, as gradients may have, are copied.
    """
    a = BSR.unchecked(pattern_of(indptr, indices, sizes), readable(values))
    return a.T if transposed else a


def flat24(a: Semi24 | BSR24) -> tuple[Tensor | list[int], ...]:
    """Values and metadata; of a BSR24 its pattern too, as `flat_pattern` takes it apart."""
    return (a.values, a.meta) if isinstance(a, Semi24) else (a.values, a.meta, *flat_pattern(a.pattern))


def matrix24(
    values: Tensor,
    meta: Tensor,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    sizes: Sequence[int] = (),
) -> Semi24 | BSR24:
    """The matrix that `flat24` took apart, with copies of parts that lie otherwise than kernels read them."""
    values, meta = readable(values), readable(meta)
    if indptr is None or indices is None:
        return Semi24.unchecked(values, meta)
    return BSR24.unchecked(pattern_of(indptr, indices, sizes), values, meta)


def fake(
    values: Tensor, indptr: Tensor, indices: Tensor, sizes: Sequence[int], transposed: bool = False
) -> BSR:
    """As `matrix`, of fake tensors: its pattern has sizes, but nobody may read its indices."""
    rows, columns, bm, bk = sizes
    if transposed:
        rows, columns, bm, bk = columns, rows, bk, bm
    pattern = BlockPattern.unchecked((rows, columns), (bm, bk), indptr, indices)
    return BSR.unchecked(pattern, values, indices if transposed else None)


def _unknown(indptr: Tensor, indices: Tensor, sizes: Sequence[int]) -> BlockPattern:
    rows, columns, bm, bk = map(int, sizes)
    with torch.inference_mode(False):
        return BlockPattern.unchecked((rows, columns), (bm, bk), indptr.detach(), indices.detach())


def _is(pattern: BlockPattern, indices: Tensor, sizes: Sequence[int]) -> bool:
    same = pattern.indices is indices or pattern.indices.data_ptr() == indices.data_ptr()
    return same and (*pattern.shape, *pattern.block) == tuple(sizes) and pattern.nnzb == indices.shape[0]
