"""What the constructors of matrices refuse of their parts: each fault is named."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats import fp8

FP8 = torch.float8_e4m3fn
MAKERS: dict[str, Callable[[], Any]] = {
    "bsr": lambda: random_bsr(100, 70, (32, 16), 0.4, seed=3),
    "semi24": lambda: Semi24.from_dense(torch.randn(6, 32)),
    "bsr24": lambda: BSR24.from_bsr(random_bsr(128, 256, (64, 128), 1.0)),
    "row": lambda: quantize(fp8.bsr()),
    "tensor": lambda: quantize(fp8.bsr(), scale="tensor"),
    "block": lambda: quantize(fp8.bsr(), scale="block"),
    "semi24 in FP8": lambda: quantize(fp8.semi24()),
    "bsr24 in FP8": lambda: quantize(fp8.bsr24()),
}


def parts_of(a: Any) -> dict[str, Any]:
    names = ("matrix", "scale", "kind") if isinstance(a, Quantized) else ("pattern", "values", "meta")
    return {name: getattr(a, name) for name in names if hasattr(a, name)}


def remade(a: Any, part: str, change: Callable[[Any], Any]) -> Any:
    """`a` by the constructor of its class, with one part changed, which may be one of the matrix inside."""
    parts = parts_of(a)
    if part in parts:
        parts[part] = change(parts[part])
    else:
        inner = parts_of(a.matrix)
        parts["matrix"] = type(a.matrix).unchecked(**inner | {part: change(inner[part])})
    return type(a)(**parts)


def put(at: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(part: Tensor) -> Tensor:
        part = part.clone()
        part.view(-1)[at] = value
        return part

    return change


def unaligned(like: Tensor) -> Tensor:
    return torch.cat((like.new_zeros(1), like.reshape(-1)))[1:].view(like.shape)


TENSORS = [
    *(("bsr", "values"), ("row", "values"), ("row", "scale")),
    *((name, part) for name in ("semi24", "bsr24") for part in ("values", "meta")),
]
FAULTS: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    *((name, part, lambda t: t.tolist(), f"{part} must be a dense torch.Tensor, got list") for name, part in TENSORS),
    *((name, part, lambda t: t.to("meta"), f"{part} is on meta, which is not") for name, part in TENSORS),
    *((name, part, lambda t: torch.stack((t, t), -1)[..., 0], f"{part} must be contiguous") for name, part in TENSORS),
    *((name, part, unaligned, rf"{part} start \d+ bytes past a multiple of 16") for name, part in TENSORS
      if part != "scale"),
    *((name, "values", lambda v: v.int(), "is torch.int32; use one of") for name in ("bsr", "semi24", "bsr24")),
    *((name, "values", lambda v: v.to(FP8), "is torch.float8_e4m3fn; use one of") for name in ("bsr", "semi24")),
    *((name, "meta", lambda m: m.int(), "dtype of meta is torch.int32") for name in ("semi24", "bsr24")),
    *((name, "pattern", lambda p: (1, 2), r"pattern must be a BlockPattern, got \(") for name in ("bsr", "bsr24")),
    ("bsr", "values", lambda v: v[:-1], r"values have shape \(7, 32, 16\); the pattern needs \(8, 32, 16\)"),
    ("bsr", "values", lambda v: v.mT, r"values have shape \(8, 16, 32\)"),
    ("bsr", "values", lambda v: v.view(8, 512), r"values have shape \(8, 512\)"),
    ("bsr24", "values", lambda v: v[1:], r"values have shape \(3, 64, 64\); the pattern needs \(4, 64, 64\)"),
    ("bsr24", "values", lambda v: v.view(4, 4096), r"values have shape \(4, 4096\)"),
    ("bsr24", "meta", lambda m: m[1:], r"meta has shape \(3, 64, 16\); values \(4, 64, 64\) need \(4, 64, 16\)"),
    ("semi24", "values", lambda v: v.view(-1), r"values must be 2-D \[M, K/2\], got shape \(96,\)"),
    ("semi24", "values", lambda v: v.sum(), r"values must be 2-D \[M, K/2\], got shape \(\)"),
    ("semi24", "values", lambda v: v[:, :14].contiguous(), r"\(6, 14\), of 28 columns; K must be a multiple of 8"),
    ("semi24", "values", lambda v: v.to_sparse_csr(), "values must be a dense torch.Tensor, got layout"),
    ("semi24", "meta", lambda m: m.to(torch.int8), "dtype of meta is torch.int8"),
    ("semi24", "meta", lambda m: m[:, :3], r"meta has shape \(6, 3\); values \(6, 16\) need \(6, 4\)"),
    ("semi24", "meta", lambda m: m[:5], r"meta has shape \(5, 4\)"),
    ("semi24", "meta", lambda m: m.view(-1), r"meta has shape \(24,\)"),
    ("row", "matrix", lambda a: a.values, "must be a BSR, Semi24 or BSR24, got a torch.Tensor, torch.float8_e4m3fn"),
    ("row", "matrix", lambda a: fp8.bsr(), "values must be FP8, .*, got torch.float32; sparsek.quantize"),
    ("row", "values", lambda v: v[:1], r"values have shape \(1, 16, 32\)"),
    ("row", "values", lambda v: torch.ones_like(v.float()).to(v.dtype), "in the padding of a 70x50 matrix"),
    ("row", "pattern", lambda p: p.T, "values have shape"),
    ("semi24 in FP8", "values", lambda v: v[0], r"values must be 2-D \[M, K/2\]"),
    ("semi24 in FP8", "meta", torch.zeros_like, "90 of 90 groups have malformed metadata"),
    ("bsr24 in FP8", "meta", torch.zeros_like, "groups have malformed metadata"),
    ("bsr24 in FP8", "meta", lambda m: m.int(), "dtype of meta is torch.int32; it must be torch.uint8"),
    ("row", "scale", lambda s: s.double(), "dtype of scale is torch.float64; it must be torch.float32"),
    ("row", "scale", lambda s: s[:-1], r"scale has shape \(69,\); one per row needs \(70,\)"),
    ("row", "scale", lambda s: s[None], r"scale has shape \(1, 70\)"),
    ("tensor", "scale", lambda s: s[None], r"scale has shape \(1,\); one per tensor needs \(\)"),
    ("block", "scale", lambda s: s[1:], "one per block needs"),
    *(("row", "scale", put(*bad), "1 of 70 scales are not positive and finite")
      for bad in ((3, 0.0), (3, -1.0), (69, math.inf), (0, math.nan))),
    ("row", "kind", lambda k: "column", "kind is 'column'; use one of tensor, row, block"),
    ("semi24 in FP8", "kind", lambda k: "block", "a Semi24 has no blocks"),
    ("row", "kind", lambda k: "tensor", r"scale has shape \(70,\); one per tensor"),
    ("row", "matrix", lambda a: quantize(fp8.bsr(50, 70), scale="tensor").T.matrix, "is a transposed view"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "part", "change", "message"), FAULTS)
def test_parts_that_do_not_fit_are_refused(
    name: str, part: str, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        remade(MAKERS[name](), part, change)
