"""Pieces of plain Triton kernels that multiply FP8 matrices: tiles, steps, scales, and required card features.

B is contiguous along K: b [batch, N, K], because FP8 tensor cores read both operands along K. Scales per row of A and
per column of B multiply the finished sums; a scale per block of A multiplies every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.core.errors import InvalidInput
from sparsek.kernels.lang import epilogue as epilogues
from sparsek.kernels.lang import tensors
from sparsek.kernels.lang.launch import launch
from sparsek.kernels.lang.tensors import SIZE_LIMIT, at
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.plan.product_kernels import rounding_seconds
from sparsek.plan.product_problems import SpmmProblem
from sparsek.plan.ring import TRITON_LAUNCHES
from sparsek.reference.epilogue import Epilogue

LEAST_K = 32  # minimum K of an FP8 product on tensor cores
FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@dataclass(frozen=True)
class Config:
    """tile_m x tile_n of C per program, tile_k of the inner side per step; powers of two, 16 or more (tile_k 32).

    `group`: how many column tiles are walked down all rows together, for reuse in L2.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group: int = 4

    def __post_init__(self) -> None:
        for name, least in (("tile_m", 16), ("tile_n", 16), ("tile_k", LEAST_K)):
            size = getattr(self, name)
            if size < least or size & (size - 1):
                raise InvalidInput(
                    f"{name} of an FP8 kernel must be a power of two from {least} up, not {size}"
                )


@triton.jit
def dense_tile(b, k0, kt, k_live, col, col_live, k, WIDE: tl.constexpr, RAGGED_N: tl.constexpr):
    """[TK, TN]: k from k0 on and columns `col` of B, stored as b [N, k]; 0 where not live."""
    live = k_live[None, :]
    if RAGGED_N:
        live = live & col_live[:, None]
    ptr = b + k0.to(tl.int64) + ((at(col, WIDE) * k)[:, None] + kt[None, :])
    return tl.trans(tl.load(ptr, mask=live, other=0.0))


@triton.jit
def add_fp8(z, a, b, scale, STRETCHED: tl.constexpr):
    """z + a @ b, or z + scale * (a @ b) if STRETCHED. The tensor core sums within a step, float32 over the steps."""
    TK: tl.constexpr = a.shape[1]
    if STRETCHED:
        step = tl.dot(a, b, max_num_imprecise_acc=TK)
        return z + scale * step
    return tl.dot(a, b, z, max_num_imprecise_acc=TK)


@triton.jit
def scaled_sums(
    z, a_scale, row, row_live, b_scale, column, column_live, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr
):
    """The sums z [TM, TN] times the row scales of A and column scales of B; scales per block are already applied."""
    if B_SCALE == "column":
        of_b = tl.load(b_scale + column, mask=column_live, other=1.0)[None, :]
    else:
        of_b = tl.load(b_scale)
    if A_SCALE == "row":
        return z * tl.load(a_scale + row, mask=row_live, other=1.0)[:, None] * of_b
    elif A_SCALE == "tensor":
        return z * (tl.load(a_scale) * of_b)
    else:
        return z * of_b


def start(
    kernel: Any, c: Config, stored: tuple[Any, ...], down: int, cut: int, a: Quantized, b: QuantizedTensor,
    out: Tensor, epilogue: Epilogue, own: dict[str, Any],
) -> None:  # fmt: skip
    """Launches a kernel for C [..., M, N], strides as they are; no sync, no allocation.

    `stored` are its first arguments, `own` its constexprs that follow from A. `down`: rows of tiles or block rows,
    `cut` tiles high.
    """
    m, n = out.shape[-2:]
    column_tiles = -(-n // c.tile_n)
    for b3, b_scale, out3, other in folded(b, out, epilogue.other):
        shared = constants(c, b3, out3, replace(epilogue, other=other), a.kind, b.kind)
        batch = b3.shape[0]
        with torch.cuda.device_of(b3):
            launch(
                kernel, (down * cut * column_tiles * batch,),
                *stored, b3, out3, epilogue.bias, other, a.scale, b_scale,
                float(epilogue.alpha), float(epilogue.beta),
                m, n, a.shape[1], down, column_tiles, column_tiles * batch,
                *tensors.strides(out3), *tensors.strides(other),
                **own, **shared, num_warps=c.num_warps, num_stages=c.num_stages,
            )  # fmt: skip


def constants(
    c: Config, b: Tensor, out: Tensor, epilogue: Epilogue, a_kind: str, b_kind: str
) -> dict[str, Any]:
    """Constexprs that follow from the config, from `b` [batch, N, K], `out` and `epilogue.other` [batch, M, N], and
    from the scopes of the scales of A and B.
    """
    (_, n, k), other = b.shape, epilogue.other
    (unit_cm, unit_cn), (unit_om, unit_on) = tensors.units(out), tensors.units(other)
    return {
        "TM": c.tile_m, "TN": c.tile_n, "TK": c.tile_k, "GROUP": c.group, "RAGGED_N": n % c.tile_n != 0,
        "WIDE": max(map(tensors.extent, (b, out, other))) > SIZE_LIMIT,
        "UNIT_K": 16 if k % 16 == 0 else 1, "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
        "UNIT_OM": unit_om, "UNIT_ON": unit_on, "A_SCALE": a_kind,
        "B_SCALE": "column" if b_kind == "row" else "tensor", **epilogues.constants(epilogue),
    }  # fmt: skip


def folded(b: QuantizedTensor, out: Tensor, other: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Values of B [batch, N, K], its scales, C and the epilogue's matrix [batch, M, N]: one tuple if all collapse."""
    by_row = b.kind == "row"
    scale = b.scale.unsqueeze(-1) if by_row else b.values[..., :1, :1]
    for values, of_b, out3, other3 in tensors.folded(b.values, scale, out, other):
        yield values, of_b if by_row else b.scale, out3, other3


# By falling tile_m: tile_m, tile_n, tile_k, warps, stages; the order is a guess. A step of 128 is 128 bytes of a row,
# the widest swizzle of shared memory. A thread holds two sums: the tensor core's and the float32 one.
# fmt: off
TABLE = (Config(128, 128, 128, 8, 4), Config(128, 128, 128, 8, 3), Config(128, 128, 64, 8, 4),
         Config(64, 128, 128, 4, 3), Config(64, 128, 128, 4, 4), Config(64, 256, 128, 8, 3), Config(64, 64, 128, 4, 4),
         Config(32, 128, 128, 4, 3), Config(32, 64, 128, 4, 3), Config(16, 128, 128, 4, 3), Config(16, 64, 128, 4, 3))
# fmt: on


def configs(p: Any, tallest: int, deepest: int, inner: int) -> Iterator[Config]:
    """Alternatives worth timing, for tiles of `tallest` rows and steps of at most `deepest`, best guess first.

    Limited by N, by `inner` (the longest extent along K) and by shared memory.
    """
    widest = max(16, 1 << (p.n - 1).bit_length())
    deepest = max(LEAST_K, min(deepest, 1 << max(0, inner - 1).bit_length()))
    seen = set()
    for c in TABLE:
        if c.tile_m != tallest:
            continue
        c = replace(c, tile_n=min(c.tile_n, widest), tile_k=min(c.tile_k, deepest))
        if p.combine and c.tile_m * c.tile_n > 64 * 32 * c.num_warps:  # two tiles of C at once spill
            c = replace(c, num_warps=2 * c.num_warps)
        c = replace(c, num_stages=tensors.stages(p, c.num_stages, c.tile_k * (c.tile_m + c.tile_n)))
        if c not in seen:
            seen.add(c)
            yield c


class Fp8Kernel:
    """What the three FP8 kernels share. `storage`: what they multiply. `most_k`: the longest K."""

    storage: str
    most_k: int | None = None

    def down(self, p: SpmmProblem, c: Config) -> int:
        """Tiles of C down the rows."""
        return p.grid[0] * -(-p.block[0] // c.tile_m)

    def tiles(self, p: SpmmProblem, c: Config) -> int:
        """Tiles of C of all batches."""
        return self.down(p, c) * -(-p.n // c.tile_n) * p.batch

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here."""
        if foreign := p.a.unless(self.storage):
            return foreign
        why = why_not(p)
        if self.most_k and p.k > self.most_k:
            why.append(f"K must be at most {self.most_k}; got {p.k}")
        if not why and self.tiles(p, self.default(p)) > SIZE_LIMIT:
            why.append(f"more than {SIZE_LIMIT} tiles of C")
        return why

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Alternatives worth timing, best guess first."""
        raise NotImplementedError

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs` with a tile for every SM, else the one with the most tiles."""
        made = list(self.configs(p))
        most = max(made, key=lambda c: self.tiles(p, c))
        return next((c for c in made if self.tiles(p, c) >= p.card.sm_count), most)


def seconds(p: Any, c: Config, tiles: int, flops: float, longest: float, steps: int) -> float:
    """Launch + the longest of: `flops` with padding at 50 % of the FP8 rate, 27 % where tiles are unpacked (less for
    lower tiles), with 1.5 us for each wave of tiles; `longest` FLOP on one SM, where unpacking takes 0.5 us a step;
    compulsory bytes at 80 % of copy bandwidth. Plus the rounding of B. Tiles of 128 and 64 rows were measured (H200,
    2026-11-22); the rest is a guess. In the interpreter, `steps` of all tiles count.
    """
    if p.on_cpu:  # about two milliseconds for each program and step
        return 2e-3 * (tiles + steps)
    rate = p.card.sustained("fp8") * 1e12 * {128: 0.5, 64: 0.46, 32: 0.2}.get(c.tile_m, 0.1)
    rate *= min(1.0, c.tile_n / 64) * (1.0 if not p.a.two_four else 0.55)
    busy = max(1, min(p.card.sm_count, tiles)) / p.card.sm_count
    arithmetic = 1.5e-6 * -(-tiles // p.card.sm_count) + flops / (rate * busy)
    alone = 1.5e-6 + longest * p.card.sm_count / rate
    if p.a.two_four:
        alone = max(alone, 1.5e-6 + 0.5e-6 * longest / (2 * c.tile_m * c.tile_n * c.tile_k))
    moved = 1.5e-6 + p.compulsory_bytes / (0.8 * p.card.bandwidth)
    return TRITON_LAUNCHES * p.card.launch_seconds + max(arithmetic, alone, moved) + rounding_seconds(p)


def why_not(p: Any) -> list[str]:
    """Reasons why no plain Triton kernel multiplies this FP8 matrix."""
    why = []
    if p.on_cpu and not env.interpreting():
        why.append("CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import)")
    if p.on_cpu and p.c.dtype == "bf16":
        why.append("bf16 is wrong in Triton's interpreter; use dtype=torch.float16 or float32 there")
    if not p.on_cpu and p.card.capability < (8, 9):
        has = ".".join(map(str, p.card.capability))
        why.append(
            f"FP8 tensor cores came with compute capability 8.9; {p.card.name} has {has}. A BSR in bf16 runs there: "
            ".dequantize(torch.bfloat16)"
        )
    if max(p.m, p.k, p.n) > SIZE_LIMIT:
        why.append(f"M, K and N must be at most {SIZE_LIMIT}; got {p.m}, {p.k}, {p.n}")
    return why
