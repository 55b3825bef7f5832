"""portable/pack_bsr.py compiled for cards that are not there, as its launches specialise it.

As a program it prints, for one card, every code's facts: test_portable_pack_bsr.py runs it under the newest Triton.
"""

import json
import re
import sys
from dataclasses import replace

import torch
import triton

from sparsek.core.device import H200
from sparsek.formats.convert import least_sure
from sparsek.formats.two_four import BITS
from sparsek.kernels.portable import pack_bsr as portable
from tests.kernels.portable_code import Code, compiled

A100 = replace(H200, name="NVIDIA A100", capability=(8, 0), sm_count=108, smem_bytes=166912)
CARDS = {"sm_90": H200, "sm_80": A100}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
TYPES = {"keys": "*i32", "where": "*i32", "indptr": "*i32", "status": "*i32", "indices": "*i32"}


def source_code(
    kernel: str, card: str, dtype: str, block: tuple[int, int], ragged: bool = False, squares: bool = True
) -> Code:
    """`_norms` or `_gather` of a matrix that lies aligned."""
    function, (size, warps) = {
        "norms": (portable._norms, (portable.NORM_BYTES, portable.NORM_WARPS)),
        "gather": (portable._gather, (portable.GATHER_BYTES, portable.GATHER_WARPS)),
    }[kernel]
    x = torch.empty(8192 - 8 * ragged, 8192, dtype=DTYPES[dtype], device="meta")
    _, _, constants, _ = portable._described(x, block)
    constants += portable._tile(block, x.element_size(), size)
    names = [p.name for p in function.params if p.is_constexpr and p.name != "SQUARES"]
    given = dict(zip(names, constants, strict=True))
    types = TYPES | dict.fromkeys(("w", "values"), f"*{dtype}")
    if kernel == "norms":
        given["SQUARES"] = squares
        types["keys"] = "*i64" if squares and dtype == "fp64" else "*i32"
    return compiled(function, types, given, CARDS[card], warps, 1)


def choice_code(card: str, chunk: int, ranked: bool, wide: bool) -> Code:
    """`_choose` among norms in float32, or `wide`, in float64."""
    floats = torch.float64 if wide else torch.float32
    constants = {
        "RANKED": ranked,
        "CHECKED": True,
        "SURE": portable._bits(least_sure(floats), floats),
        "INFINITY": BITS[floats][1],
        "CHUNK": chunk,
    }
    types = TYPES | ({"keys": "*i64", "least": "i64"} if wide else {})
    warps = chunk // (32 * portable.KEYS_PER_THREAD)
    return compiled(portable._choose, types, constants, CARDS[card], warps, 1)


def loads(ptx: str) -> set[str]:
    """The distinct loads from global memory: "v4.b32" moves 16 bytes."""
    return set(re.findall(r"ld\.global\.(\S+)", ptx))


def facts() -> dict[str, list]:
    """Of sm_90: loads, stores, bytes of stack."""
    codes = {
        f"{kernel} {dtype}": source_code(kernel, "sm_90", dtype, (64, 64))
        for kernel, dtype in (("norms", "bf16"), ("norms", "fp64"), ("gather", "bf16"))
    }
    codes["choose"] = choice_code("sm_90", portable.MAX_CHUNK, True, False)
    return {name: [sorted(loads(c.ptx)), sorted(c.stores), c.stack] for name, c in codes.items()}


if __name__ == "__main__":
    json.dump({"triton": triton.__version__, "codes": facts()}, sys.stdout)
