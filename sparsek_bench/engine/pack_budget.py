"""Whether a matrix that was packed from a dense one stores the values that it should, and nothing else."""

import torch
from torch import Tensor

from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.semi24 import Semi24
from sparsek.testing.budget import Gate, error, judge

# Packing rounds nothing. Norms of blocks are summed in float32, so that of two nearly alike either may be kept.
EXACT, NORMS = 1e-12, 1e-6


def check_semi24(w: Tensor, out: Semi24) -> Gate:
    """Whether `out` stores the two of larger magnitude of every four neighbours of w [m, k]."""
    return judge(out.to_dense(), larger_two(w), EXACT)


def check_bsr(w: Tensor, out: BSR, blocks: int) -> Gate:
    """Whether `out` stores so many blocks of w [m, k], those of the largest norms."""
    dense = out.to_dense()
    best, stored = block_norms(w, out.block), block_norms(dense, out.block)
    kept = torch.linalg.vector_norm(best.flatten().topk(out.nnzb).values)
    lost = float(1 - torch.linalg.vector_norm(stored) / kept)
    rows, columns = out.block
    absent = (stored == 0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    found = max(lost, 0.0) + error(dense, w.double().masked_fill(absent, 0))
    return Gate(found, NORMS, out.nnzb == blocks and found <= NORMS)


def larger_two(w: Tensor) -> Tensor:
    """w in float64, of every four neighbours the two of larger magnitude, of equal ones the lower columns."""
    wide = two_four.groups(w.double())
    order = wide.abs().sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(wide).scatter(-1, order, wide.gather(-1, order)).flatten(-2)


def block_norms(w: Tensor, block: tuple[int, int]) -> Tensor:
    """The Frobenius norm of every block of w [m, k], sides that the block divides, in float64."""
    tiles = w.double().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return torch.linalg.vector_norm(tiles, dim=(1, 3))
