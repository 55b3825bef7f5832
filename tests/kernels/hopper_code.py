"""Compiles hopper.spmm for sm_90a where no GPU is, and reads what came out. Runs under any supported Triton.

As a script: reads [[dtype, Config's fields], ...] as JSON on stdin and prints [Code's fields, ...]. test_hopper_spmm.py
runs it so in .venv-triton-next, where the newest Triton is.
"""

import contextlib
import io
import json
import re
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sparsek.core import dtypes
from sparsek.kernels.hopper.spmm import SOURCE, Config, spmm_kernel
from sparsek.kernels.prims.gluon import shared_layout


class Code(NamedTuple):
    """Facts of one compiled kernel. `registers` is for each thread of `warps` warps at launch; sizes are in bytes.

    `wgmma` and `copies` list the distinct instructions; `log` is what ptxas said.
    """

    triton: str
    wgmma: list[str]
    wgmma_count: int
    copies: list[str]
    in_flight: bool
    shared: int
    warps: int
    registers: int
    stack: int
    spills: int
    log: str


def compiled(c: Config, dtype: str) -> Code:
    """`c` for bf16 or fp16, with exactly the descriptors that `launch` makes."""
    torch_dtype = dtypes.parse(dtype)

    def descriptor(rows: int, cols: int) -> str:
        return f"tensordesc<{dtype}[{rows}, {cols}],{shared_layout((rows, cols), torch_dtype)!r}>"

    signature = {
        "a_desc": descriptor(c.a_box, c.width),
        "b_desc": descriptor(c.cols, c.width) if c.b_col else descriptor(c.width, c.cols),
        "c_desc": descriptor(c.c_box, c.panel),
        **dict.fromkeys(("tiles", "starts", "cols", "blocks"), "*i32"),
        **dict.fromkeys(("no_col", "no_block"), "i32"),
        "T": "constexpr",
        "SOURCE": "constexpr",
    }
    options = {"num_warps": 4} | ({"maxnreg": 128} if c.ctas_per_sm == 2 else {})
    source = GluonASTSource(spmm_kernel, signature, constexprs={"T": c, "SOURCE": SOURCE})
    said = io.StringIO()
    # ptxas speaks only where Triton's cache does not answer for it.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        kernel: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx, log = kernel.asm["ptx"], said.getvalue()
    registers, stack, spilled = (
        re.findall(pattern, log)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes spill")
    )
    assert len(registers) == 1, log
    wgmma = re.findall(r"wgmma\.mma_async\.\S+", ptx)
    return Code(
        triton=triton.__version__,
        wgmma=sorted(set(wgmma)),
        wgmma_count=len(wgmma),
        copies=sorted(set(re.findall(r"cp\.async\.bulk\.tensor\.\S+", ptx))),
        in_flight=re.search(rf"wgmma\.wait_group\.sync\.aligned\s+{c.pieces};", ptx) is not None,
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        registers=int(registers[0]),
        stack=max(map(int, stack)),
        spills=max(map(int, spilled)),
        log=log,
    )


def named(c: Config, dtype: str) -> Code:
    """`compiled`, whose errors name the config: a script compiles many."""
    try:
        return compiled(c, dtype)
    except Exception as error:
        raise RuntimeError(f"{c} in {dtype} does not compile") from error


def config_from(fields: dict[str, Any]) -> Config:
    """The inverse of dataclasses.asdict, after a way through JSON."""
    bm, bk = fields["block"]
    return Config(**{name: value for name, value in fields.items() if name != "block"}, block=(bm, bk))


def fields_of(c: Config) -> dict[str, Any]:
    """What `config_from` takes."""
    return asdict(c)


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    print(json.dumps([named(config_from(fields), dtype)._asdict() for dtype, fields in wanted]))
