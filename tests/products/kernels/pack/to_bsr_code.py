"""pack/to_bsr.py compiled for cards that are not there, as its launches specialise it."""

import re

import torch

from sparsek.products.kernels.pack import to_bsr as portable
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
TYPES = {"keys": "*i32", "where": "*i32", "indptr": "*i32", "word": "*i64", "indices": "*i32"}


def source_code(
    kernel: str, card: str, dtype: str, block: tuple[int, int], ragged: bool = False, squares: bool = True
) -> Code:
    """`_norms` or `_gather` of a matrix that lies aligned."""
    side = 8192 // block[1] * block[1]
    view = portable._view((side - 8 * ragged, side), side, DTYPES[dtype], True, block)
    types = TYPES | dict.fromkeys(("w", "values"), f"*{dtype}")
    if kernel == "gather":
        function, warps, constants = portable._gather, portable.GATHER_WARPS, view.gather
    else:
        integers = torch.int64 if squares and dtype == "fp64" else torch.int32
        types["keys"] = "*i64" if integers == torch.int64 else "*i32"
        function, warps = portable._norms, portable.NORM_WARPS
        constants = (squares, *portable._limits(integers), *view.norms)
    names = [p.name for p in function.params if p.is_constexpr]
    return compiled(function, types, dict(zip(names, constants, strict=True)), CARDS[card], warps, 1)


def choice_code(card: str, chunk: int, ranked: bool, wide: bool) -> Code:
    """`_choose` among norms in float32, or `wide`, in float64."""
    sure, infinity = portable._limits(torch.int64 if wide else torch.int32)
    constants = {
        "RANKED": ranked,
        "CHECKED": True,
        "SURE": sure,
        "INFINITY": infinity,
        "UNIT": 4,
        "CHUNK": chunk,
    } | ({"word": None} if ranked else {})
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
