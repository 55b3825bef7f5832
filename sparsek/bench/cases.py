"""Names that move: `SpmmCase` and `ISSUE2` live in `bench/spmm.py`, `parse_block` in `bench/case.py`."""

from sparsek.bench.case import parse_block
from sparsek.bench.spmm import ISSUE2
from sparsek.bench.spmm import SpmmCase as Case

__all__ = ["ISSUE2", "Case", "parse_block"]
