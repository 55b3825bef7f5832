"""Floor 1: what a sparse matrix is, how it is made, and how it is stored."""

from sparsek.formats.block_mask import BlockLists, BlockMask
from sparsek.formats.bsr import BSR
from sparsek.formats.bsr24 import BSR24
from sparsek.formats.io import load, save
from sparsek.formats.pattern import BlockPattern, HostPattern
from sparsek.formats.random import random_bsr
from sparsek.formats.scaled import Scaled, quantize
from sparsek.formats.scaled_tensor import ScaledTensor
from sparsek.formats.semi24 import Semi24

# In order of their appearance in the documentation: name and "module:class".
FORMATS: tuple[tuple[str, str], ...] = (
    ("bsr", "sparsek.formats.bsr:BSR"),
    ("semi24", "sparsek.formats.semi24:Semi24"),
    ("bsr24", "sparsek.formats.bsr24:BSR24"),
    ("scaled", "sparsek.formats.scaled:Scaled"),
    ("block_mask", "sparsek.formats.block_mask:BlockMask"),
)

__all__ = [
    "BSR",
    "BSR24",
    "FORMATS",
    "BlockLists",
    "BlockMask",
    "BlockPattern",
    "HostPattern",
    "Scaled",
    "ScaledTensor",
    "Semi24",
    "load",
    "quantize",
    "random_bsr",
    "save",
]
