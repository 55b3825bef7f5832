"""A case of lines for the interpreter and for a GPU."""

import torch

from sparsek.attn.kernels.estimate import line_blocks
from sparsek.attn.reference import line_blocks as reference
from sparsek.attn.reference.line_blocks import LINES, Grid, Head

CORNERS = (254, 255, 256)


def check_corner(distance: int, dim: int, device: str) -> None:
    """A distance that meets a block in its corner keeps it."""
    torch.manual_seed(distance)
    k = torch.randn(1, 1, 448, dim, device=device).sign().half()
    q, grid = k.roll(distance, 2), Grid(448, 448, (64, 64), 0)
    heads = (Head(LINES, reference.FORCED_KEYS, reference.FORCED_DISTANCES + 1),)
    ours, right = (
        each.vertical_slash_blocks(q, k, grid, heads, 64, 2.0) for each in (line_blocks, reference)
    )
    assert torch.equal(ours, right)
    # From queries 320 to 383 to keys 128 to 191 it is 129 to 255.
    assert right[0, 0, 5, 2] == (distance < 256)
