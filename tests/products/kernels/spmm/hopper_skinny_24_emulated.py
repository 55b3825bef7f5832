"""Runs the roles of hopper_skinny_24.cu on the CPU: g++ compiles them with the wrappers of emulated_skinny_24.h.

What is right here: parts, addresses, which columns of A meet which rows of B, the reuse of the ring, sums. What PTX
instructions do is what the wrappers say.
"""

import ctypes
from pathlib import Path

from torch import Tensor

from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.spmm.hopper_skinny_24 import PROGRAM, Config, launch_params
from sparsek.products.reference.epilogue import PLAIN, Epilogue
from tests.products.kernels.spmm.emulated_library import library

WRAPPERS = Path(__file__).with_name("emulated_skinny_24.h")
EARLY, LATE = range(2)  # copies land at once, or when they are waited for


def multiply(
    c: Config,
    a: Semi24,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue = PLAIN,
    *,
    order: int = LATE,
    source: str = "",
) -> str:
    """Writes the product into `out`. What went wrong, or ""."""
    params, grid = launch_params(a, b, out, epilogue), -(-a.shape[0] // c.tm) * c.parts
    run = library(c, source or PROGRAM.source, WRAPPERS).launch
    return run(ctypes.byref(params), grid, order, order).decode()
