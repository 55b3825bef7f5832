"""Cases that every kernel of FP8 products must get right: small, and awkward in every way that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized, quantize
from sparsek.matrix.random import random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.reference.epilogue import Epilogue
from sparsek.testing.poison import poisoned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Scales:
    """What shares a scale, and the FP8 dtypes: of A and of B. `fast`: A's `fast_accum`."""

    a: str = "row"
    b: str = "row"
    dtype: torch.dtype = E4M3
    b_dtype: torch.dtype = E4M3
    fast: bool = False


@dataclass(frozen=True)
class CaseFp8:
    """C = act(alpha * (A @ B) + bias[:, None]), then + beta * other or * other, for A [m, k] and B [k, n] in FP8.

    `kind` is "bsr", "semi24" or "bsr24", the first and last of `block` and a `density` of blocks. `view` makes A the
    `.T` of a BSR. `by_columns`: C and the other matrix lie so. `batch` are leading dims of B and C.
    """

    kind: str
    m: int
    k: int
    n: int
    note: str
    block: tuple[int, int] = (64, 64)
    density: float = 0.5
    scales: Scales = field(default_factory=Scales)
    view: bool = False
    alpha: float = 1.0
    bias: bool = False
    activation: str = ""
    combine: str = ""
    beta: float = 1.0
    by_columns: bool = False
    batch: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        """The operation's name in the kernels' table."""
        return {"bsr": "spmm_fp8"}.get(self.kind, f"{self.kind}_fp8")

    def __str__(self) -> str:
        block = "" if self.kind == "semi24" else f"-b{self.block[0]}x{self.block[1]}"
        return f"{self.kind}-{self.m}x{self.k}x{self.n}{block}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> tuple[Quantized, QuantizedTensor, Epilogue, Tensor]:
        """A, B, the epilogue and an output full of NaN, in `dtype` on `device`.

        Rows of A and columns of B differ in size by powers of two, so that a scale in the wrong place is seen.
        """
        draw = torch.Generator("cpu").manual_seed(seed)

        def sizes(*shape: int) -> Tensor:
            return torch.exp2(torch.randint(-3, 4, shape, generator=draw, device="cpu").float())

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

        wide = self._matrix(draw, sizes).to(device)
        a = quantize(wide, self.scales.dtype, self.scales.a, fast_accum=self.scales.fast)
        x = normal(*self.batch, self.n, self.k) * sizes(*self.batch, self.n, 1)
        b = quantize(x.to(device), self.scales.b_dtype, self.scales.b).mT
        lies = (self.n, self.m) if self.by_columns else (self.m, self.n)
        out = poisoned((*self.batch, *lies), dtype, device)
        bias = normal(self.m).to(device, dtype) if self.bias else None
        other = normal(*self.batch, *lies).to(device, dtype) if self.combine else None
        if self.by_columns:
            out, other = out.mT, None if other is None else other.mT
        return (
            a if not self.view else a.T,
            b,
            Epilogue(self.alpha, bias, self.activation, other, self.combine or "add", self.beta),
            out,
        )

    def _matrix(self, draw: torch.Generator, sizes: Callable[..., Tensor]) -> Any:
        """A in float32, before it is quantized, as it is stored."""
        m, k = (self.k, self.m) if self.view else (self.m, self.k)
        if self.kind == "semi24":
            dense = torch.randn(m, k, generator=draw, dtype=torch.float32, device="cpu")
            return Semi24.from_dense(dense * sizes(m, 1))
        seed = int(torch.randint(2**31, (), generator=draw, device="cpu"))
        block = (self.block[1], self.block[0]) if self.view else self.block
        a = random_bsr(m, k, block, self.density, dtype=torch.float32, device="cpu", seed=seed)
        a.values.mul_(sizes(*a.values.shape[:2], 1))
        return a if self.kind == "bsr" else BSR24.from_bsr(a)


ROW = Scales()
TENSOR, BLOCK, FAST = Scales("tensor", "tensor"), Scales("block"), Scales(fast=True)
LAYER: dict[str, Any] = {"by_columns": True, "bias": True}

FP8_CASES: tuple[CaseFp8, ...] = (
    CaseFp8("bsr", 128, 192, 40, "plain"),
    CaseFp8("bsr", 96, 160, 24, "block 32", (32, 32), bias=True, activation="gelu"),
    CaseFp8("bsr", 64, 80, 16, "block 16", (16, 16), scales=BLOCK),
    CaseFp8("bsr", 256, 256, 32, "block 128", (128, 128), 0.6, scales=BLOCK, by_columns=True),
    CaseFp8("bsr", 96, 144, 20, "no power of two", (48, 96), 0.7, scales=TENSOR),
    CaseFp8("bsr", 250, 130, 33, "ragged", (64, 32), 0.6, activation="silu", combine="add", beta=-0.5),
    CaseFp8("bsr", 192, 128, 8, "empty rows", (32, 64), 0.2, bias=True, activation="relu"),
    CaseFp8("bsr", 128, 128, 24, "no blocks", density=0.0, bias=True),
    CaseFp8("bsr", 128, 192, 48, "layer", **LAYER, activation="gelu_tanh", combine="add"),
    CaseFp8("bsr", 64, 128, 1, "one token", by_columns=True, combine="mul"),
    CaseFp8("bsr", 128, 128, 12, "batch", batch=(2, 3), alpha=2.0, scales=Scales("row", "tensor")),
    CaseFp8("bsr", 128, 96, 32, "view", (32, 64), scales=Scales("block"), view=True, by_columns=True),
    CaseFp8("bsr", 100, 72, 17, "ragged view", (32, 16), 0.7, scales=TENSOR, view=True, bias=True),
    CaseFp8("bsr", 128, 128, 32, "e5m2", scales=Scales("row", "row", E5M2)),
    CaseFp8("bsr", 128, 128, 32, "both e5m2", scales=Scales("tensor", "row", E5M2, E5M2)),
    CaseFp8("bsr", 128, 640, 24, "fast", scales=FAST, bias=True),
    CaseFp8("bsr", 0, 128, 16, "no rows"),
    CaseFp8("bsr", 128, 0, 16, "no inner side", bias=True),
    CaseFp8("bsr", 128, 128, 0, "no columns"),
    CaseFp8("semi24", 64, 128, 32, "plain"),
    CaseFp8("semi24", 100, 72, 37, "ragged", bias=True, activation="gelu", scales=TENSOR),
    CaseFp8("semi24", 7, 24, 50, "few rows", alpha=0.5, combine="add", beta=2.0),
    CaseFp8("semi24", 96, 136, 40, "layer", **LAYER, activation="silu", combine="mul"),
    CaseFp8("semi24", 48, 80, 12, "batch", batch=(2,), scales=Scales("row", "row", E5M2)),
    CaseFp8("semi24", 64, 640, 40, "fast", scales=FAST, **LAYER),
    CaseFp8("semi24", 1, 8, 1, "smallest", by_columns=True),
    CaseFp8("semi24", 32, 0, 8, "no inner side", bias=True),
    CaseFp8("bsr24", 128, 256, 32, "plain"),
    CaseFp8("bsr24", 256, 192, 24, "block 128x64", (128, 64), scales=BLOCK, bias=True, activation="gelu"),
    CaseFp8("bsr24", 130, 136, 40, "layer", (128, 64), **LAYER, activation="silu", combine="add"),
    CaseFp8("bsr24", 320, 128, 24, "empty rows", density=0.2, bias=True, scales=TENSOR),
    CaseFp8("bsr24", 128, 128, 12, "batch", (64, 128), batch=(2, 2), scales=Scales("block", "row", E5M2)),
    CaseFp8("bsr24", 128, 640, 24, "fast", (64, 128), scales=FAST),
    CaseFp8("bsr24", 128, 192, 16, "no blocks", density=0.0, combine="mul"),
)
