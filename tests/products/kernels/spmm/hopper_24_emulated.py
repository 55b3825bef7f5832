"""Runs the roles of hopper_24.cu on the CPU: g++ compiles them with the wrappers of emulated_24.h.

What is right here: tiles, addresses, swizzles, descriptors, nibbles, phases and counts of barriers, the reuse of slots,
of staged boxes and of registers that wgmma reads, the end of a cluster. What PTX instructions do is what the wrappers
say; that it is so on a GPU, only a GPU tells.
"""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsek.core.device import H200
from sparsek.engine.launch.driver import Boxed
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm import hopper_bsr24 as bsr24
from sparsek.products.kernels.spmm.hopper_24 import PROGRAM, Config, Scales, Work
from sparsek.products.reference.epilogue import PLAIN, Epilogue
from tests.attn.kernels.planned import problem
from tests.products.kernels.spmm.emulated_library import library

WRAPPERS = Path(__file__).with_name("emulated_24.h")
EARLY, MIXED, LATE = range(3)  # what is asynchronous happens at once, at random, as late as may be


def packed(m: Boxed) -> Any:
    """A tensor map as the wrappers read it."""
    size = m.dtype.itemsize
    return (ctypes.c_uint64 * 16)(m.pointer, size, *m.size, m.stride * size, *m.box)


def multiply(
    c: Config,
    a: Semi24 | BSR24,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue = PLAIN,
    *,
    order: int = LATE,
    ctas: int = 2,
    source: str = "",
) -> str:
    """Writes the product into `out` as `ctas` CTAs do, events in one `order`. What went wrong, or ""."""
    p = replace(problem(a, b, out, epilogue), card=replace(H200, sm_count=ctas))
    module = semi24 if isinstance(a, Semi24) else bsr24
    kernel = module.KERNELS[f"hopper.{p.storage}"]
    return run(c, kernel.prepare(p, c, a), a, b, out, epilogue, order=order, source=source)


def run(
    c: Config,
    work: Work,
    a: Semi24 | BSR24,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue = PLAIN,
    scales: Scales | None = None,
    *,
    order: int = LATE,
    source: str = "",
) -> str:
    """As `multiply`, with prepared work and, of FP8, scales."""
    nibbles = work.nibbles(a)
    params, grid = semi24.launch_params(c, work, nibbles, b, out, epilogue, scales)
    maps = [ctypes.byref(packed(each)) for each in semi24.boxes(c, a.values, b, out, epilogue.other)]
    size = ctypes.c_int64(nibbles.numel() * 4)
    return (
        library(c, source or PROGRAM.source, WRAPPERS)
        .launch(*maps[:3], ctypes.byref(params), maps[-1], grid, order, order, size)
        .decode()
    )
