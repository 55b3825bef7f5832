"""What a user would pick instead of FP8 products of this library. One line per peer in PEERS, at the end."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.bench.engine.case import random_dense
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted, elsewhere, rotating, setting_up
from sparsek.bench.peers.cusparselt import Task
from sparsek.bench.peers.product import Dense, Own
from sparsek.bench.peers.semi24 import BEST, fastest, missing, ways_that_run
from sparsek.bench.suites.fp8 import SEMI24, Fp8Case, Fp8Operands, fp8_product
from sparsek.bench.suites.product import WIDE, ProductOperands
from sparsek.core.clock import time_rounds
from sparsek.matrix.quantized import quantize
from sparsek.testing.budget import judge

E4M3 = torch.float8_e4m3fn
# cuSPARSELt sums FP8 in fewer bits; nobody is measured whose product is wronger than this.
LOOSE = 1e-2


@dataclass(frozen=True)
class CublasFp8:
    """torch._scaled_mm with everything stored: the fastest of one scale for all and one a row, for each of its sums."""

    name: str = "cublas_fp8"
    title: str = "cuBLAS FP8"
    device: str = "cuda"
    sums: tuple[bool, ...] = (False, True)

    def why_not(self, case: Fp8Case, device: torch.device) -> list[str]:
        return elsewhere(self, device)

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
        times = time_rounds(
            {name: rotating(calls) for name, calls in candidates.items()},
            device=sets[0].a.device,
            rounds=5,
            inner_ms=10.0,
        )
        for name, found in times.items():
            tried(f"cuBLAS FP8, {name}: {found.median:.3f} ms")
        best = min(candidates, key=lambda name: times[name].median)
        return Ready(candidates[best], best, case.dense_flops)


def _dense(case: Fp8Case, one: Fp8Operands, scale: str, fast: bool, seed: int) -> Callable[[], Tensor]:
    """x @ W.T, or W @ x.T, of a dense random W."""
    given = {"dtype": WIDE, "device": one.a.device}
    w = quantize(random_dense(case.m, case.k, seed=seed, **given).mul_(case.k**-0.5), E4M3, scale)
    x = quantize(one.x.dequantize(WIDE), E4M3, scale)
    first, second = (x, w) if one.is_linear else (w, x)
    return lambda: fp8_product(first.values, first.scale, second.values, second.scale, fast=fast)


@dataclass(frozen=True)
class CuSparseLtFp8:
    """cuSPARSELt in FP8, by the fastest of all its algorithms and layouts: values without scales, C in bf16."""

    name: str = "cusparselt"
    title: str = "cuSPARSELt FP8"
    device: str = ""

    def why_not(self, case: Fp8Case, device: torch.device) -> list[str]:
        reasons = missing(device)
        if case.stored != SEMI24:
            reasons.append("has 2:4 matrices without blocks only")
        if case.dtype != "e4m3":
            reasons.append(f"not set up here for {case.dtype}")
        if case.m % 32 or case.k % 32 or case.n % 16:
            reasons.append("needs sides of A that are multiples of 32 and N of 16")
        return reasons

    def ready(self, case: Fp8Case, sets: Sequence[Fp8Operands], tried: Callable[[str], None]) -> Ready:
        right = ways_that_run(Task(case.m, case.k, case.n, "fp8"), sets[0].a.device, tried)
        factors = [(one.dense_values(), one.x.values.mT) for one in sets]
        a, b = factors[0]
        exact = a.double() @ b.double()

        def judged(c: Tensor) -> None:
            accepted(judge(c, exact, LOOSE), "cuSPARSELt FP8")

        with setting_up("cuSPARSELt"):
            calls, note = fastest(right[:BEST], factors, judged, tried)
        return Ready(calls, note)


def wider(case: Fp8Case, one: Fp8Operands, index: int) -> ProductOperands:
    """This library's product of the same matrix in bf16."""
    b = one.wide if one.is_linear else one.wide.contiguous()
    return ProductOperands(one.a.dequantize(WIDE), b, one.out, one.form)


PEERS: tuple[Peer, ...] = (
    CublasFp8(),
    CublasFp8("cublas_fp8_float32", "cuBLAS FP8, float32 sums", sums=(False,)),
    CuSparseLtFp8(),
    Own("bf16", "this library in bf16", wider),
    Dense("torch_dense", "torch dense, bf16", "cpu"),
)
