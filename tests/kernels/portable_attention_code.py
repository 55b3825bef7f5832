"""Compiles portable.attention_fwd and its merge for cards that are not there, and reads what came out. Any Triton.

As a script: reads [[card, dim, v_dim, block, rules, Config's fields], ...] as JSON on stdin and prints [Code's fields,
...]. test_portable_attention.py runs it so in .venv-triton-next, where the newest Triton is.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsek.core.device import H200, Card
from sparsek.kernels.attention import portable_fwd as portable
from sparsek.kernels.attention.merge import FIELDS, ROWS, _merge

CARDS: dict[str, Card] = {
    "sm_90": H200,
    "sm_80": replace(H200, name="NVIDIA A100", capability=(8, 0), sm_count=108, smem_bytes=166912),
    "sm_89": replace(H200, name="NVIDIA RTX 4090", capability=(8, 9), sm_count=128, smem_bytes=101376),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
RULES = {
    "interval": ("rules", "bits"),
    "bits": ("lo", "hi"),
    "both": (),
    "none": ("lo", "hi", "rules", "bits"),
}


class Code(NamedTuple):
    """Facts of one compiled kernel; sizes in bytes. `copies`: asynchronous 16-byte copies are there. `chained`: each
    warp owns whole rows of both products, so P stays in registers.
    """

    triton: str
    stack: int
    shared: int
    copies: bool
    wgmma: bool
    chained: bool


def compiled(
    card: str,
    dim: int,
    v_dim: int,
    block: tuple[int, int],
    rules: str,
    c: portable.Config,
    dtype: str = "bf16",
) -> Code:
    """The kernel as `launch` specialises it for contiguous, 16-byte aligned tensors of 16 heads. `rules`: of RULES."""
    q, v = (torch.empty(1, 16, 4096, d, dtype=torch.bfloat16, device="meta") for d in (dim, v_dim))
    mask: Any = SimpleNamespace(block=block, heads=16)
    constants = portable._constants(c, mask, q, q, v, v)
    constants |= dict.fromkeys(("sq_d", "sk_d", "sv_d", "so_d"), 1) | dict.fromkeys(RULES[rules])
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | dict.fromkeys(portable._POINTERS, "*i32")
    types |= {"lse": "*fp32", "scale": "fp32"}
    return _code(portable._attention, types, constants, card, c.num_warps, c.num_stages)


def merged(card: str, v_dim: int) -> Code:
    """The merge of parts of the keys."""
    constants = {"SLOT": 128, "DV": v_dim, "GROUP": 1, "ROWS": ROWS, "FIELDS": FIELDS, "so_d": 1}
    types = {"o_part": "*fp32", "lse_part": "*fp32", "table": "*i32", "out": "*bf16", "lse": "*fp32"}
    return _code(_merge, types, constants, card, 4, 3)


def _code(
    function: Any, types: dict[str, str], constants: dict[str, Any], card: str, warps: int, stages: int
) -> Code:
    names = list(function.arg_names)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    plain = {p.name for p in function.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    known = [name for name in names if name not in constants and name not in plain and name != "scale"]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in known},
    )
    major, minor = CARDS[card].capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    kernel: Any = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack, usage
    spread = re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), \d+\]", kernel.asm["ttgir"])
    return Code(
        triton=triton.__version__,
        stack=int(stack[1]),
        shared=kernel.metadata.shared,
        copies="cp.async.cg.shared.global" in kernel.asm["ptx"],
        wgmma="wgmma.mma_async" in kernel.asm["ptx"],
        chained=all(int(rows) == warps for rows in spread),
    )


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    print(
        json.dumps(
            [
                compiled(card, dim, v_dim, tuple(block), rules, portable.Config(**fields))._asdict()
                for card, dim, v_dim, block, rules, fields in wanted
            ]
        )
    )
