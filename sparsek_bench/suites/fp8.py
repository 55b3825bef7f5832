"""Products of FP8 matrices with FP8 dense operands as a benchmark: its cases, operands, peers and suites.

Both operands are in FP8 before any time, the dense one with a scale for each token; C is in bf16. Rates count, as in
`sparsek_bench/suites/semi24.py`, every value in stored blocks, and the zeros of 2:4 groups too.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.quantized import Quantized, Scale, quantize
from sparsek.products.formats.quantized_tensor import DenseScale, QuantizedTensor
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import Bar, Case, SuiteRow, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import Own, Peer, ReadyPeer, dense, fastest
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, target
from sparsek_bench.peers.cusparselt import CuSparseLt
from sparsek_bench.suites.product import LINEAR, WIDE, ProductCase, ProductOperands, check_24_sides
from sparsek_bench.suites.semi24 import FORMS

BSR_, SEMI24, BSR24_ = STORED = ("bsr", "semi24", "bsr24")
SCALES = ("row", "tensor", "block")
DTYPES = {name: dtype for dtype, name in dtypes.FP8.items()}
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Operands(ProductOperands):
    """One of the rotating sets: its own FP8 matrix [m, k] and FP8 x [n, k], and C [m, n], unless a layer makes it."""

    a: Quantized
    b: QuantizedTensor

    @property
    def dense_factors(self) -> tuple[Tensor, Tensor]:
        """The FP8 values, with zeros where the matrix stores none: exact, FP8 fits into bf16."""
        plain = Quantized(self.a.matrix, torch.ones_like(self.a.scale), self.a.kind)
        return plain.dequantize(WIDE).to_dense().to(self.a.dtype), self.b.values.mT


@dataclass(frozen=True)
class Fp8Case(ProductCase):
    """An FP8 matrix [m, k] times a dense FP8 one: "x@W.T", a layer of n tokens, or "A@B" with B [k, n].

    `stored` is "bsr", "semi24" or "bsr24"; `block` and `density` are those of stored blocks. `scale` is what of the
    matrix shares a scale. `dtype` is that of its values: "e4m3" or "e5m2"; the dense operand is in E4M3. `fast_accum`:
    sums may stay in the tensor cores.
    """

    op: ClassVar[str] = "fp8"
    later: ClassVar[tuple[str, ...]] = ("fast_accum",)
    drawn: ClassVar[torch.dtype] = WIDE

    m: int = options.size("Rows of the FP8 matrix")
    k: int = options.size("Its columns")
    n: int = options.size("Rows of x, or columns of B")
    stored: str = options.choice("Formats", STORED, usual=BSR_)
    block: tuple[int, int] | None = options.block(usual=(128, 128))
    density: float = options.share(usual=1.0)
    form: str = options.choice("Products", FORMS, usual=LINEAR)
    scale: Scale = options.choice("What shares a scale", SCALES, usual="row")
    dtype: str = options.choice("Values", DTYPES, usual="e4m3")
    fast_accum: bool = options.field(False, "Sums may stay in the tensor cores.", usual=False)

    def check(self) -> None:
        if (self.block is None) != (self.stored == SEMI24):
            raise InvalidInput("bsr and bsr24 have blocks, semi24 has none")
        if self.block is None and (self.density != 1.0 or self.scale == "block"):
            raise InvalidInput("a 2:4 matrix without blocks has neither a density nor a scale of blocks")
        if self.block is not None and self.stored == BSR24_:
            check_24_sides(self.block)
        if self.fast_accum and self.scale == "block":
            raise InvalidInput("scales of blocks are applied to float32 sums, which fast_accum does without")
        if self.k % 16:
            raise InvalidInput(f"K of an FP8 product is a multiple of 16 here, got {self.k}")

    @property
    def name(self) -> str:
        """One short line: "x @ W.T 8192³ block 128 12.5 % e4m3"; the scale is named unless it is that of rows."""
        scale = "" if self.scale == "row" else f"scale per {self.scale}"
        return " ".join(filter(None, (super().name, scale, "fast_accum" if self.fast_accum else "")))

    def one_set(self, draw: Draw, a: Any, b: Tensor) -> Fp8Operands:
        """In FP8."""
        a8 = quantize(a, DTYPES[self.dtype], self.scale, fast_accum=self.fast_accum)
        b8 = quantize(b) if self.form == LINEAR else quantize(b.mT.contiguous()).mT
        return Fp8Operands(**vars(super().one_set(draw, a8, b8)))


@dataclass(frozen=True)
class CublasFp8(Peer):
    """torch._scaled_mm with everything stored: the fastest of one scale for all and one a row, for each of its sums."""

    sums: tuple[bool, ...] = (False, True)

    def ready(self, case: Fp8Case, sets: Sequence[Fp8Operands], tried: Callable[[str], None]) -> ReadyPeer:
        def calls(scale: DenseScale, fast: bool) -> list[Callable[[], Tensor]]:
            made = [_dense(case, one, scale, fast, 1000 + index) for index, one in enumerate(sets)]
            made[0]()
            return made

        scales: tuple[DenseScale, ...] = ("tensor", "row")
        ways = {
            f"a scale per {scale}, {'fast' if fast else 'float32'} sums": partial(calls, scale, fast)
            for scale, fast in itertools.product(scales, self.sums)
        }
        return fastest("cuBLAS FP8", ways, sets[0].a.device, tried, case.dense_flops)


def _dense(case: Fp8Case, one: Fp8Operands, scale: DenseScale, fast: bool, seed: int) -> Callable[[], Tensor]:
    """x @ W.T, or W @ x.T, of a dense random W. `fast` sums in fewer bits than float32 has."""
    w = Draw(one.a.device, WIDE, seed).weight(case.m, case.k)
    w8, x8 = quantize(w, E4M3, scale), quantize(one.b_as_factor.mT.dequantize(WIDE), E4M3, scale)
    first, second = (x8, w8) if one.is_linear else (w8, x8)
    scales = (
        first.scale[:, None] if first.scale.ndim else first.scale,
        second.scale[None] if second.scale.ndim else second.scale,
    )
    return lambda: torch._scaled_mm(
        first.values, second.values.mT, *scales, out_dtype=WIDE, use_fast_accum=fast
    )


def _wider(case: Fp8Case, one: Fp8Operands, index: int) -> ProductOperands:
    """This library's product of the same matrix in bf16."""
    return ProductOperands(one.a.dequantize(WIDE), one.b.dequantize(WIDE).contiguous(), one.out, one.form)


PEERS: tuple[Peer, ...] = (
    CublasFp8("cublas_fp8", "cuBLAS FP8", "cuda"),
    CublasFp8("cublas_fp8_float32", "cuBLAS FP8, float32 sums", "cuda", sums=(False,)),
    CuSparseLt("cusparselt", "cuSPARSELt FP8", "cuda"),
    Own("bf16", "this library in bf16", other=_wider),
    dense("torch_dense", "torch dense, bf16", "cpu"),
)


BLOCKS = tuple(Fp8Case(8192, 8192, 8192, BSR_, (128, 128), 0.125, form) for form in FORMS)
WHOLE = tuple(Fp8Case(8192, 8192, 8192, SEMI24, None, form=form) for form in FORMS)
FAST_BLOCKS, FAST_WHOLE = ([replace(case, fast_accum=True) for case in cases] for cases in (BLOCKS, WHOLE))
KERNELS = ("hopper.spmm_fp8", "hopper.semi24_fp8", "hopper.bsr24_fp8")
# Sums in float32, and as the peers have them. Portable kernels sum in float32 whatever is allowed.
PUBLISHED: tuple[SuiteRow, ...] = (
    *rows((KERNELS[0], "portable.spmm_fp8"), *BLOCKS),
    *rows((KERNELS[1], "unpacked.semi24_fp8"), *WHOLE),
    *rows(KERNELS[0], *FAST_BLOCKS),
    *rows(KERNELS[1], *FAST_WHOLE),
)
BARS: Mapping[Case, tuple[Bar, ...]] = {
    **dict.fromkeys((*BLOCKS, *FAST_BLOCKS), (Bar("cublas_fp8", 0.75, 0.9),)),
    **dict.fromkeys((*WHOLE, *FAST_WHOLE), (Bar("cusparselt", 0.95, 1.1),)),
}
TABLE = Table(
    op="fp8",
    title="FP8",
    dense=("cublas_fp8", "torch_dense"),
    columns=(CASE, MS, SPEEDUP, USEFUL, ROOF, target(BARS)),
    note=(
        "Both operands are quantized before they are timed, to E4M3 with a float32 scale for each row of W and of x; C "
        "is bf16. Useful TFLOPS count every value in stored blocks, of 2:4 matrices also the values that are not "
        "stored. Dense is cuBLAS FP8: the faster of one scale for all and one for each row, with the accumulation that "
        "is fastest. cuSPARSELt FP8 is the fastest of its algorithms and layouts, without scales. A target is the rate "
        "of useful work over that of the peer. Over SparseK in bf16: 1.50 means 1.5 times as fast."
    ),
    beside=("bf16",),
    usual=("e4m3",),
    kernels=KERNELS,
)
BENCH = Bench("fp8", suites={"published": PUBLISHED}, kinds=(Fp8Case,), peers=PEERS, tables=(TABLE,))
