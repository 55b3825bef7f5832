"""What tests of pack/to_bsr.py share: matrices, rules, layouts, and what is right."""

import torch
from torch import Tensor

from sparsek.products.formats import convert
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Rule
from sparsek.products.kernels.pack import to_bsr as portable

NOTHING = Rule(None, None, None, "global")


def kept(share: float, scope: str = "global") -> Rule:
    return NOTHING._replace(keep=share, scope=scope)


def over(threshold: float) -> Rule:
    return NOTHING._replace(threshold=threshold)


def masked(mask: Tensor) -> Rule:
    return NOTHING._replace(mask=mask)


def tied(grid: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, levels: int = 3) -> Tensor:
    """A matrix whose blocks are one block times powers of two, of which there are few: many norms are equal, and others
    far apart. Some blocks are zero.
    """
    one = torch.randn(block).to(dtype)
    scale = (2.0 ** torch.randint(levels, grid)) * (torch.rand(grid) > 0.1)
    return torch.kron(scale.to(dtype), one)


def by_blocks(flags: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Flags of blocks as flags of elements."""
    return flags.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def wide(w: Tensor) -> Tensor:
    """Rows of a matrix with 64 more columns."""
    return torch.cat((w, w.new_ones(w.shape[0], 64)), 1)[:, : w.shape[1]]


def odd(w: Tensor) -> Tensor:
    """Rows that begin one element late, of a matrix with an odd number of columns more."""
    return torch.cat((w[:, :1], w, w.new_ones(w.shape[0], 2)), 1)[:, 1 : w.shape[1] + 1]


def shifted(w: Tensor) -> Tensor:
    """Contiguous, and one element late."""
    return torch.cat((w.reshape(-1)[:1], w.reshape(-1)))[1:].view(w.shape)


def as_is(w: Tensor) -> Tensor:
    return w


LAYOUTS = (as_is, wide, odd, shifted)


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_bytes = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def packed(w: Tensor, block: tuple[int, int], rule: Rule) -> BSR:
    """What torch makes of it."""
    return BSR.unchecked(*convert._packed(w, (w.shape[0], w.shape[1]), block, rule))


def same(w: Tensor, block: tuple[int, int], rule: Rule) -> BSR:
    """Fails unless the kernels pack w as torch does, bit for bit, once it is given their norms, and those are right.

    So the two may add up in different orders, and no check depends on which of two nearly equal norms is the larger.
    """
    made = portable.pack_bsr(w, block, rule)
    assert made is not None
    if rule.threshold is not None or rule.keep is not None:
        norms = norms_of(w, block)
        sure = norms.clamp(min=convert.least_sure(norms.dtype)).masked_fill(norms == 0, 0)
        rule = masked(convert.picked(sure, rule))
    equal(made, packed(w, block, rule))
    return made


def equal(made: BSR, right: BSR) -> None:
    assert (made.shape, made.block, made.order) == (right.shape, right.block, None)
    for a, b in ((made.pattern.indptr, right.pattern.indptr), (made.pattern.indices, right.pattern.indices)):
        assert a.is_contiguous()
        assert same_bits(a, b)
    assert made.values.is_contiguous()
    assert same_bits(made.values, right.values)


def norms_of(w: Tensor, block: tuple[int, int]) -> Tensor:
    """The norms [Mb, Kb] of the kernel, which are held to those in float64."""
    source = portable._source(w, block)
    assert source is not None
    keys, _ = portable._keys(source, True)
    norms = keys.view(torch.float64 if w.dtype == torch.float64 else torch.float32)
    # By rows first: over both dims at once a CPU adds all squares in one chain.
    by_row = torch.linalg.vector_norm(convert.tiles_of(w, block).double(), dim=3)
    right = torch.linalg.vector_norm(by_row, dim=1)
    sure = convert.least_sure(norms.dtype)
    # At most 2^18 squares are added, in a tree but for 128 in a row; the root halves what is off.
    torch.testing.assert_close(norms.double(), right, rtol=64 * torch.finfo(norms.dtype).eps, atol=sure)
    return norms


def chosen(keys: Tensor, count: int) -> tuple[Tensor, Tensor, bool]:
    """indptr, the cells that are stored of one block row, and whether norms decide nothing."""
    where = keys.new_empty(count)
    indptr = portable._choose_in(keys, where, 1, True, count=count)
    return indptr, where, portable._is_undecided(keys, where)
