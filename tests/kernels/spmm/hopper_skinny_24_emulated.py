"""Runs the roles of hopper_skinny_24.cu on the CPU: g++ compiles them with the wrappers of emulated_skinny_24.h.

What is right here: parts, addresses, which columns of A meet which rows of B, the reuse of the ring, sums. What PTX
instructions do is what the wrappers say.
"""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from sparsek.kernels.spmm.hopper_skinny_24 import SOURCE, Config, launch_params
from sparsek.matrix.semi24 import Semi24
from sparsek.reference.epilogue import PLAIN, Epilogue

WRAPPERS = Path(__file__).with_name("emulated_skinny_24.h")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing")
EARLY, LATE = range(2)  # copies land at once, or when they are waited for


@cache
def library(c: Config, source: str) -> ctypes.CDLL:
    """`source` in the place of hopper_skinny_24.cu, for this machine."""
    constants, rest = source.split("// " + "-" * 100 + " PTX wrappers")
    roles = rest.split("// " + "-" * 100 + " tiles and roles")[1]
    include = f'#include "{WRAPPERS}"\n'
    folder = Path(mkdtemp())
    (folder / "skinny.cpp").write_text(f"{constants}\n{include}{roles}\n#define RUNS\n{include}")
    command = ["g++", *FLAGS, *c.defines, "-o", str(folder / "skinny.so"), str(folder / "skinny.cpp")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found = ctypes.CDLL(str(folder / "skinny.so"))
    found.launch.restype = ctypes.c_char_p
    return found


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
    run = library(c, source or SOURCE.read_text()).launch
    return run(ctypes.byref(params), grid, order, order).decode()
