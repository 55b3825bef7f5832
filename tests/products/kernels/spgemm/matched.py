"""Patterns to match, and what it means that two matches are the same, for the tests of match.py on every device."""

import torch

from sparsek.products.formats.pattern import BlockPattern, block_sides, grid_of
from sparsek.products.plan.matches import Matches


def drawn(
    shape: tuple[int, int], block: int | tuple[int, int], density: float, seed: int, device: str = "cpu"
) -> BlockPattern:
    """Each block of the grid is stored with probability `density`, so rows are of all lengths."""
    block = block_sides(block)
    draw = torch.Generator().manual_seed(seed)
    stored = torch.rand(grid_of(shape, block), generator=draw) < density
    indptr = torch.zeros(stored.shape[0] + 1, dtype=torch.int32)
    indptr[1:] = stored.sum(1).cumsum(0)
    return BlockPattern(shape, block, indptr.to(device), stored.nonzero()[:, 1].int().to(device))


def full(shape: tuple[int, int], block: int | tuple[int, int], device: str = "cpu") -> BlockPattern:
    return drawn(shape, block, 1.0, 0, device)


def assert_same(found: Matches, right: Matches) -> None:
    """Every number and every tensor, bit for bit."""
    assert (found.pattern.shape, found.pattern.block) == (right.pattern.shape, right.pattern.block)
    assert type(found.longest) is int
    assert (found.longest, found.pairs) == (right.longest, right.pairs)
    parts = ("indptr", "left", "right")
    tensors = [(name, getattr(found, name), getattr(right, name)) for name in parts]
    tensors += [
        (f"pattern.{n}", getattr(found.pattern, n), getattr(right.pattern, n)) for n in ("indptr", "indices")
    ]
    for name, ours, theirs in tensors:
        assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device), name
        assert ours.is_contiguous(), name
        assert torch.equal(ours, theirs), name
