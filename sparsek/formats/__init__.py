"""Floor 1: what a sparse matrix is, how it is made, and how it is stored."""

from sparsek.formats.block_mask import BlockLists, BlockMask
from sparsek.formats.bsr import BSR
from sparsek.formats.io import load, save
from sparsek.formats.pattern import BlockPattern, HostPattern
from sparsek.formats.random import random_bsr

# In order of their appearance in the documentation: name and "module:class".
FORMATS: tuple[tuple[str, str], ...] = (
    ("bsr", "sparsek.formats.bsr:BSR"),
    ("block_mask", "sparsek.formats.block_mask:BlockMask"),
)

__all__ = [
    "BSR",
    "FORMATS",
    "BlockLists",
    "BlockMask",
    "BlockPattern",
    "HostPattern",
    "load",
    "random_bsr",
    "save",
]
