"""pack/to_24.py compiled for cards that are not there, as its launches specialise it."""

import re

import torch
from torch import Tensor

from sparsek.products.kernels.pack import to_24 as portable
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
READ = ("contiguous", "contiguous, ragged", "rows", "columns", "columns, ragged")
INTEGERS = {1: "*i8", 2: "*i16", 4: "*i32"}


def given(read: str, dtype: torch.dtype) -> Tensor:
    """A matrix of no memory that is read so."""
    wide = torch.empty(8192, 8192, dtype=dtype, device="meta")
    return {
        "contiguous": wide,
        "contiguous, ragged": wide[:8191, :16].contiguous(),
        "rows": wide[:, :4096],
        "columns": wide.T,
        "columns, ragged": wide[:, :8176].T,
    }[read]


def pack_code(card: str, dtype: str, read: str, masked: bool) -> Code:
    w = given(read, DTYPES[dtype])[None]
    mask = torch.empty_like(w, dtype=torch.bool) if masked else None
    launch = portable._launch(w, mask)
    assert launch.constants["RAGGED"] == ("ragged" in read)
    types = {"w": INTEGERS[w.element_size()], "mask": "*i8", "values": "*i32", "meta": "*u8"}
    if launch.kernel is portable._by_rows:
        types["w"] = "*i32"
    names = launch.kernel.arg_names[len(types) :]
    constants = launch.constants | {
        name: 1 for name, size in zip(names, launch.sizes, strict=False) if size == 1
    }
    constants = {name: value for name, value in constants.items() if name not in ("rows", "steps")}
    constants |= {} if masked else {"mask": None}
    return compiled(launch.kernel, types, constants, CARDS[card], portable.WARPS, 1)


def unpack_code(card: str, dtype: str, ragged: bool, blocks: bool = False) -> Code:
    kind = INTEGERS[DTYPES[dtype].itemsize]
    types = {"values": kind, "dense": kind, "meta": "*u8"}
    tall, across = (128, 16) if blocks else (0, 0)
    constants = {"LANES": portable.UNPACK_LANES, "RAGGED": ragged, "TALL": tall, "BYTES": across}
    return compiled(portable._unpack, types, constants, CARDS[card], portable.UNPACK_WARPS, 1)


def loads(ptx: str) -> set[str]:
    """The distinct loads from global memory: "v4.b32" moves 16 bytes."""
    return set(re.findall(r"ld\.global\.(\S+)", ptx))


def facts(reads: list[tuple[str, str]]) -> dict[str, list]:
    """Of sm_90: loads, stores, bytes of stack and of shared memory, for these dtypes and ways to be read."""
    codes = {f"{dtype} {read}": pack_code("sm_90", dtype, read, False) for dtype, read in reads}
    codes |= {f"{dtype} unpacked": unpack_code("sm_90", dtype, False) for dtype in DTYPES}
    codes |= {f"{dtype} unpacked blocks": unpack_code("sm_90", dtype, True, True) for dtype in DTYPES}
    return {name: [sorted(loads(c.ptx)), sorted(c.stores), c.stack, c.shared] for name, c in codes.items()}
