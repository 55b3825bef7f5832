"""What a user would pick instead of FP8 products of this library. One line per peer in PEERS, at the end."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine.data import random_weight
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, setting_up
from sparsek.bench.peers.cusparselt import Task
from sparsek.bench.peers.product import Dense, Own, fastest
from sparsek.bench.peers.semi24 import CuSparseLt
from sparsek.bench.suites.fp8 import Fp8Case, Fp8Operands, fp8_product
from sparsek.bench.suites.product import WIDE, ProductOperands
from sparsek.matrix.dense8 import DenseScale
from sparsek.matrix.quantized import quantize
from sparsek.testing.budget import Gate, judge

E4M3 = torch.float8_e4m3fn
# cuSPARSELt sums FP8 in fewer bits; nobody is measured whose product is wronger than this.
LOOSE = 1e-2


@dataclass(frozen=True)
class CublasFp8(Peer):
    """torch._scaled_mm with everything stored: the fastest of one scale for all and one a row, for each of its sums."""

    sums: tuple[bool, ...] = (False, True)

    def ready(self, case: Fp8Case, sets: Sequence[Fp8Operands], tried: Callable[[str], None]) -> Ready:
        candidates: dict[str, tuple[Callable[[], Tensor], ...]] = {}
        refused: list[str] = []
        for scale, fast in itertools.product(("tensor", "row"), self.sums):
            name = f"a scale per {scale}, {'fast' if fast else 'float32'} sums"
            try:
                with setting_up(name):
                    calls = tuple(_dense(case, one, scale, fast, 1000 + i) for i, one in enumerate(sets))
                    calls[0]()
            except UnavailableError as error:
                refused.append(str(error))
                tried(f"cuBLAS FP8, {error}")
            else:
                candidates[name] = calls
        if not candidates:
            raise UnavailableError("; ".join(refused))
        best = fastest("cuBLAS FP8", candidates, sets[0].a.device, tried)
        return Ready(candidates[best], best, case.dense_flops)


def _dense(case: Fp8Case, one: Fp8Operands, scale: DenseScale, fast: bool, seed: int) -> Callable[[], Tensor]:
    """x @ W.T, or W @ x.T, of a dense random W."""
    given = {"dtype": WIDE, "device": one.a.device}
    w = quantize(random_weight(case.m, case.k, seed=seed, **given), E4M3, scale)
    x = quantize(one.x.dequantize(WIDE), E4M3, scale)
    first, second = (x, w) if one.is_linear else (w, x)
    return lambda: fp8_product(first.values, first.scale, second.values, second.scale, fast=fast)


@dataclass(frozen=True)
class CuSparseLtFp8(CuSparseLt):
    """cuSPARSELt in FP8: values without scales, C in bf16."""

    STEPS: ClassVar[tuple[int, int]] = (32, 16)

    def takes(self, dtype: str) -> bool:
        return dtype == "e4m3"

    def task(self, case: Fp8Case) -> Task:
        return Task(case.m, case.k, case.n, "fp8")

    def factors(self, one: Fp8Operands) -> tuple[Tensor, Tensor]:
        return one.dense_values(), one.x.values.mT

    def judge(self, one: Fp8Operands, a: Tensor, b: Tensor) -> Callable[[Tensor], Gate]:
        exact = a.double() @ b.double()
        return lambda c: judge(c, exact, LOOSE)


def wider(case: Fp8Case, one: Fp8Operands, index: int) -> ProductOperands:
    """This library's product of the same matrix in bf16."""
    b = one.wide if one.is_linear else one.wide.contiguous()
    return ProductOperands(one.a.dequantize(WIDE), b, one.out, one.form)


PEERS: tuple[Peer, ...] = (
    CublasFp8("cublas_fp8", "cuBLAS FP8", "cuda"),
    CublasFp8("cublas_fp8_float32", "cuBLAS FP8, float32 sums", "cuda", sums=(False,)),
    CuSparseLtFp8("cusparselt", "cuSPARSELt FP8"),
    Own("bf16", "this library in bf16", other=wider),
    Dense("torch_dense", "torch dense, bf16", "cpu"),
)
