"""C = act(alpha * (A @ B) + bias[:, None]) for a 2:4 A on Hopper's sparse tensor cores: host side.

A is a Semi24 or a BSR24 (hopper_bsr24.py), in 16 bits or, with scales on the sums, in FP8. The epilogue may also add or
multiply another matrix (`reference.epilogue`), in the layout of C.

The kernel, hopper_24.cu, is CUDA C++, because Gluon has no wgmma.sp. NVRTC compiles it on first use (launch/nvrtc.py),
and the driver launches it (launch/launch.py). It reads A as:

    values [M, K/2]    as stored, by TMA
    nibbles            the metadata in the order in which threads pass them to wgmma, one word per thread for 64
                       columns; as large as `meta`, made by the first plan of a matrix, kept while its metadata lives

wgmma.sp multiplies stored values only: a NaN in a row of B reaches only the rows of C whose groups select that row.
Sums are float32 in the order of k for every config, so the bits repeat.

8192^3 in bf16 on an H200 (2026-11-22): 1068 dense-equivalent TFLOPS for x @ W.T, 1.00 of the best algorithm and
layout of cuSPARSELt and 1.62 of cuBLAS; 1086 for A @ B, 1.01 and 1.62 of them. The bottleneck is L2 bandwidth.

FP8. A step is 128 columns of bytes instead of 64 of 16-bit numbers, so blocks must be as wide, and B is contiguous
along K, as FP8 wgmma requires. Tensor cores keep some 14 bits of a running FP8 sum, so their sums are promoted to
float32 registers every 512 columns; tiles are narrower for it. With `fast_accum` there is no promotion, and the tiles
are those of 16 bits. C is bf16 or fp16. 8192^3 on an H200 (docs/notes/fp8-products.md; variants in one run, without
peers): 0.596 ms, 1845 TFLOPS in dense-equivalent, after 0.698 ms while every promotion wrote zeros that the next wgmma
waited for. With `fast_accum` 0.546 ms, 2010 TFLOPS; that kernel is unchanged since it was 0.95 to 0.97 of cuSPARSELt
FP8 (2026-11-23), which accumulates the same way and was timed without scales. FP8 in blocks is not timed yet.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core.errors import InvalidInput
from sparsek.core.streams import tensors_in
from sparsek.engine.launch import driver, nvrtc
from sparsek.engine.launch.driver import Boxed, by_rows
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch_cuda
from sparsek.engine.launch.memo import Memo
from sparsek.engine.launch.nvrtc import Program
from sparsek.engine.plan.kernel import beside, unless_hopper, unless_near
from sparsek.engine.plan.ring import (
    BUSY_SLOTS,
    DRIVER_LAUNCHES,
    Ring,
    flops_per_second,
    ring_seconds,
    share_of_h200,
)
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds, unless_dense_sides, unless_stored
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import ACTIVATIONS, COMBINES, PLAIN, Epilogue

PROGRAM = Program(Path(__file__).with_name("hopper_24.cu"), "semi24_kernel")
ACTS, JOINS = tuple(ACTIVATIONS), ("", *COMBINES)  # the kernel uses their indices
BOX_BYTES = 8192  # 64 rows and 64 columns of C


@dataclass(frozen=True, repr=False)
class Config(KernelConfig):
    """A compiled kernel: tiles of 64*ms*wgs x tn, `stages` slots of `bk` columns of A in shared memory.

    `cluster` CTAs share their loads of B. `boxes` of a warpgroup's part of C are staged at once. `group` rows of
    tiles, each of a cluster, are walked together. `half`: C, and every operand that is not FP8, is fp16. `fp8` names
    the types of A and B, ".e4m3.e5m2"; sums are promoted to float32 every `promote` steps, an even number, or only at
    the end (0).
    """

    wgs: int = 2
    ms: int = 1
    tn: int = 256
    stages: int = 4
    cluster: int = 2
    boxes: int = 2
    group: int = 8
    b_row: bool = False
    c_col: bool = False
    half: bool = False
    lists: bool = False
    has_alpha: bool = False
    bias: bool = False
    activation: str = ""
    combine: str = ""
    fp8: str = ""
    promote: int = 0

    def __post_init__(self) -> None:
        if self.group < 1:
            raise InvalidInput(
                f"group is how many rows of tiles are walked together, 1 or more, not {self.group}"
            )

    @property
    def tm(self) -> int:
        return 64 * self.ms * self.wgs

    @property
    def bk(self) -> int:
        """Columns of A in a slot."""
        return 128 if self.fp8 else 64

    @property
    def a_row(self) -> int:
        """Bytes of a row of A in a slot, nibbles included."""
        return 64 + self.bk // 8

    @property
    def stage_bytes(self) -> int:
        """Bytes of A, B, nibbles, and two barriers."""
        return self.tm * self.a_row + self.tn * 128 + 16

    @property
    def smem(self) -> int:
        return self.stages * self.stage_bytes + self.wgs * self.boxes * BOX_BYTES

    @property
    def threads(self) -> int:
        return 128 * (self.wgs + 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of C."""
        return torch.float16 if self.half else torch.bfloat16

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_24.cu."""
        names = {
            "WGS": self.wgs, "MS": self.ms, "TN": self.tn, "STAGES": self.stages,
            "CLUSTER": self.cluster, "C_BOXES": self.boxes, "B_ROW": int(self.b_row),
            "C_COL": int(self.c_col), "HALF": int(self.half), "LISTS": int(self.lists),
            "HAS_ALPHA": int(self.has_alpha), "BIAS": int(self.bias), "ACT": ACTS.index(self.activation),
            "COMBINE": JOINS.index(self.combine),
            "FP8": int(bool(self.fp8)), "PROMOTE": self.promote, "SMEM_BYTES": self.smem,
            "LOAD_REGS": 56 if self.lists else 40, "MATH_REGS": 224 if self.lists else 232,
        }  # fmt: skip
        named = [f"-D{name}={value}" for name, value in names.items()]
        return [*named, f'-DFP8_TYPE="{self.fp8}"'] if self.fp8 else named

    def deepened(self, smem: int) -> Config:
        """The config with as many stages as fit into `smem` bytes, 8 at most."""
        room = (smem - self.wgs * self.boxes * BOX_BYTES) // self.stage_bytes
        return replace(self, stages=min(8, room))

    @property
    def texts(self) -> list[str]:
        sums = f"float32 sums every {self.promote} steps" if self.promote else "the tensor core's own sums"
        return [
            f"tile {self.tm}x{self.tn} for {self.wgs} warpgroups, {self.stages} stages",
            *self.true_values("cluster", "boxes", "group", "b_row", "c_col", "half", "lists", "has_alpha", "bias"),
            self.activation, self.combine, f"FP8 {self.fp8}, {sums}" * bool(self.fp8),
        ]  # fmt: skip


def _compiled(c: Config) -> Config:
    """`c` without the fields that are not compiled in."""
    return replace(c, group=1)


class Params(ctypes.Structure):
    """The struct of hopper_24.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("nibbles", "tiles", "starts", "cols", "blocks", "bias")),
        *((name, ctypes.c_void_p) for name in ("a_scale", "b_scale")),
        *(
            (name, ctypes.c_int)
            for name in ("m", "n", "a_each", "b_each", "row_groups", "col_tiles", "group")
        ),
        *((name, ctypes.c_int) for name in ("block_steps", "chunks", "slabs", "b_cols", "bm", "bk")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
    ]


def in_wgmma_order(meta: Tensor, fp8: bool = False) -> Tensor:
    """uint8 [M, K/8] nibbles -> int32 [ceil(M/64), 2*ceil(K/128), 128], the word of every thread of a warpgroup.

    Word of thread 32w + 4g + 2s + h for 64 columns: of the 32 columns s, 16 columns h, rows 16w + g (low half) and
    16w + g + 8 (high half), four groups each. So lanes 4g, 4g + 1 serve the first wgmma of 32 columns (selector 0) and
    lanes 4g + 2, 4g + 3 the second (selector 1). In FP8, where one wgmma takes 64 columns: of thread 32w + 4g + 2h + r
    the 32 columns h of row 16w + g + 8r. Padding is the nibble of columns 0 and 1.
    Source: PTX ISA, wgmma.mma_async.sp, metadata for .f16/.bf16 and for .e4m3/.e5m2.
    """
    m, bytes_ = meta.shape
    slabs, chunks = -(-m // 64), -(-bytes_ // 16) * 2
    if not meta.numel():
        return meta.new_empty((slabs, chunks, 128), dtype=torch.int32)
    if (m, bytes_) != (slabs * 64, chunks * 8):
        whole = meta.new_full((slabs * 64, chunks * 8), 0x44)
        whole[:m, :bytes_] = meta
        meta = whole
    columns = meta.view(torch.int32 if fp8 else torch.int16)
    each = columns.view(slabs, 4, 2, 8, chunks, -1)  # slab, w, row + 8, g, chunk, columns
    return each.permute(0, 4, 1, 3, 5, 2).contiguous().view(torch.int32).view(slabs, chunks, 128)


# meta -> Memo, in 16 bits and in FP8
_NIBBLES: tuple[WeakTensorKeyDictionary, WeakTensorKeyDictionary] = (
    WeakTensorKeyDictionary(),
    WeakTensorKeyDictionary(),
)
# A thread that reuses nibbles gets their own event, not that of older nibbles.
_one_thread = RLock()


def _kept(meta: Tensor, fp8: bool) -> Memo:
    found: Any = _NIBBLES[fp8].get(meta)
    if found is None:
        found = _NIBBLES[fp8][meta] = Memo()
    return found


class Scales(NamedTuple):
    """Of FP8 operands, float32: `a` [M] or [], `b` [..., N] or []."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, eq=False)
class Lists:
    """Tiles of a block-sparse A, int32 on the device, as in Params; `block` is (bm, bk)."""

    tiles: Tensor
    starts: Tensor
    cols: Tensor
    blocks: Tensor
    block: tuple[int, int]
    ctas: int


@dataclass(frozen=True, eq=False)
class Work:
    """Nibbles of the planned matrix, and the lists of a BSR24.

    `meta` and `kept` are weak: a plan that is used with many matrices keeps no nibbles alive.
    """

    sms: int
    fp8: bool
    meta: Callable[[], Tensor | None]
    kept: Callable[[], Memo | None]
    lists: Lists | None = None

    def nibbles(self, a: Semi24 | BSR24) -> Tensor:
        """The nibbles of `a`, which may differ from the planned matrix."""
        with _one_thread:
            kept = self.kept() if self.meta() is a.meta else None
            kept = _kept(a.meta, self.fp8) if kept is None else kept
            return kept.of(lambda: in_wgmma_order(a.meta.view(-1, a.meta.shape[-1]), self.fp8), a.meta)


def prepared(p: SpmmProblem, c: Config, a: Semi24 | BSR24, lists: Lists | None = None) -> Work:
    """Orders the nibbles of `a` and, on a GPU, loads the kernel; both only once."""
    fp8 = bool(c.fp8)
    work = Work(p.card.sm_count, fp8, weakref.ref(a.meta), weakref.ref(_kept(a.meta, fp8)), lists)
    with torch.no_grad(), torch.cuda.device_of(a.values):
        work.nibbles(a)
        if a.values.is_cuda:
            nvrtc.loaded(PROGRAM, _compiled(c), a.values.device.index)
    return work


def launch(
    c: Config,
    work: Work,
    a: Semi24 | BSR24,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    scales: Scales | None = None,
) -> None:
    """Computes C into `out` [..., M, N] from `b` [..., K, N], on torch's current stream; no sync."""
    if out.numel() == 0:
        return
    index = b.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(c, work, a, b, out, epilogue, scales)
    nibbles = work.nibbles(a)
    driver.enter(index)  # in a new thread torch may not have set a context yet
    function = nvrtc.loaded(PROGRAM, _compiled(c), index)
    held = [nibbles, *([] if work.lists is None else tensors_in(work.lists))]
    for at in np.ndindex(*b.shape[:-2]):
        b_one, c_one, other = b[at], out[at], None if epilogue.other is None else epilogue.other[at]
        params, grid = launch_params(c, work, nibbles, b_one, c_one, epilogue, _item(scales, at))
        # Without another matrix, C's map takes its place; the kernel does not read it.
        of_a, of_b, of_c, *of_other = boxes(c, a.values, b_one, c_one, other)
        arguments = of_a, of_b, of_c, params, *(of_other or [of_c])
        launch_cuda(function, grid, c.threads, c.smem, index, arguments, held)


def _item(scales: Scales | None, at: tuple[int, ...]) -> Scales | None:
    return Scales(scales.a, scales.b[at]) if scales is not None and scales.b.ndim else scales


def launch_params(
    c: Config,
    work: Work,
    nibbles: Tensor,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    scales: Scales | None = None,
) -> tuple[Params, int]:
    """The kernel's parameters except tensor maps, and the number of CTAs."""
    (k, n), (m, _), lists = b.shape, out.shape, work.lists
    p = Params(nibbles=nibbles.data_ptr(), m=m, n=n, group=c.group)
    p.alpha, p.beta = float(epilogue.alpha), float(epilogue.beta)
    p.bias = None if epilogue.bias is None else epilogue.bias.data_ptr()
    if scales is not None:
        p.a_scale, p.a_each = scales.a.data_ptr(), scales.a.ndim
        p.b_scale, p.b_each = scales.b.data_ptr(), scales.b.ndim
    p.row_groups, p.col_tiles = -(-m // (c.tm * c.cluster)), -(-n // c.tn)
    p.slabs, p.chunks = nibbles.shape[:2]
    p.b_cols = columns_of_b(c, n)
    if lists is None:
        p.block_steps = -(-k // c.bk)
        return p, min(p.row_groups * p.col_tiles, work.sms // c.cluster) * c.cluster
    p.bm, p.bk = lists.block
    p.block_steps = lists.block[1] // c.bk
    for name in ("tiles", "starts", "cols", "blocks"):
        setattr(p, name, getattr(lists, name).data_ptr())
    return p, lists.ctas


def columns_of_b(c: Config, n: int) -> int:
    """How many columns of B each CTA of a cluster loads at a time, a multiple of 8: no more than B has, rounded up.

    8192 x 8192 with 16 columns took 37.2 us when TMA zero-padded to 64 columns, and 28.9 us without (H200,
    2026-11-23).
    """
    return 8 * -(-min(n, c.tn) // (8 * c.cluster))


def boxes(c: Config, values: Tensor, b: Tensor, out: Tensor, other: Tensor | None = None) -> list[Boxed]:
    """Boxes of A, B [K, N] and C [M, N] for TMA, and of the other matrix, if there is one."""
    half = values.shape[-1]
    a_box = Boxed(values.data_ptr(), values.dtype, (half, values.numel() // half), half, (c.bk // 2, c.tm))
    b_lies, b_box = (b, (64, 64 // c.cluster)) if c.b_row else (b.mT, (c.bk, columns_of_b(c, b.shape[1])))
    like_c = [by_rows(x.mT if c.c_col else x, (64, 64)) for x in (out, other) if x is not None]
    return [a_box, by_rows(b_lies, b_box), *like_c]


def unable(p: SpmmProblem, dtype: str) -> list[str]:
    """Reasons from the machine, the dtype and the storage, shared by the CUDA C++ kernels. `dtype` is C's."""
    reasons = unless_hopper(p, (p.dtype,)) or nvrtc.missing()
    if dtype not in ("bf16", "fp16"):
        reasons.append(f"C must be bf16 or fp16, not {dtype}")
    if p.a.transposed:
        reasons.append(
            "A is transposed, so its pairs lie along the rows of C, which sparse tensor cores do not support"
        )
    return reasons


# (wgs, ms, tn, boxes) of tiles, largest first.
SHAPES = (
    (2, 1, 256, 2), (2, 2, 128, 2), (2, 1, 128, 2), (1, 1, 256, 2), (2, 1, 64, 1), (1, 1, 128, 2), (1, 1, 64, 1),
)  # fmt: skip
# In FP8 each element has two sums, the tensor core's and the float32 one, except with `fast_accum`.
SHAPES_FP8 = ((2, 1, 192, 3), (2, 1, 128, 2), (1, 1, 128, 2), (2, 1, 64, 1), (1, 1, 64, 1))
PROMOTE = 4
# Rate of products over that of dense 16-bit ones of all values: fitted (engine/plan/ring.py). In FP8 with promotion,
# and without.
RATE, RATES_FP8 = 1.9, (2.2, 2.3)
JOIN_SECONDS = 1.6e-6  # for another matrix in the epilogue of a tile of 128x256


def tiles_of(p: SpmmProblem, clusters: Sequence[int], lists: bool = False) -> Iterator[Config]:
    """Every tile of SHAPES for `p`, with as many stages as fit, alone and in clusters."""
    flags: dict[str, Any] = {
        "lists": lists,
        "b_row": p.b.layout == "row",
        "c_col": p.c.layout == "col",
        "half": p.dtype == "fp16",
        "has_alpha": p.has_alpha,
        "bias": p.bias,
        "activation": p.activation,
        "combine": p.combine,
    }
    shapes = SHAPES
    if p.a.quantized:
        shapes, flags["half"] = SHAPES if p.a.fast_accum else SHAPES_FP8, p.c.dtype == "fp16"
        flags |= {"fp8": f".{p.dtype}.{p.b.dtype}", "promote": 0 if p.a.fast_accum else PROMOTE}
    for (wgs, ms, tn, staged), cluster in product(shapes, clusters):
        c = Config(wgs, ms, tn, 2, cluster, staged, **flags)
        c = c.deepened(p.card.smem_bytes)
        if c.stages >= 2:
            yield c


def ring_of(p: SpmmProblem, c: Config, units: int, steps: float, longest: float) -> Ring:
    """The model of the kernel (engine/plan/ring.py) for `units` rows of tiles with `steps` each, of bk columns of A.

    CTAs of a cluster share B and count as one worker. Another matrix passes through the ring, in place of B in some
    steps.
    """
    rate = RATE
    if p.a.quantized:  # a step has twice the columns
        rate = RATES_FP8[0 if c.promote else 1] / 2
    copied, columns = c.tm * c.a_row + c.tn * 128, min(c.tn, -(-p.n // 8) * 8)
    return Ring(
        units=units,
        columns=-(-p.n // c.tn),
        workers=max(1, p.card.sm_count // c.cluster),
        steps=steps,
        longest=longest,
        multiply=2 * c.tm * c.tn * 64 / (rate * flops_per_second(p.card)),
        copied=copied,
        crossing=c.tm * c.a_row * c.cluster + columns * 128,
        in_flight=(c.stages - BUSY_SLOTS) * copied,
        boxes=2 * c.bk / p.block[1] if c.lists else 1,
        stored=2 * c.tm * columns * c.cluster,
        more=c.tm * c.tn / 32768 * JOIN_SECONDS if c.combine else 0.0,
    )


def seconds_of(p: SpmmProblem, ring: Ring) -> float:
    """All items of a batch, each of which is a launch."""
    batch = max(1, p.batch)
    launch = DRIVER_LAUNCHES * p.card.launch_seconds
    return batch * (ring_seconds(p.card, ring, p.compulsory_bytes / batch) + launch)


def rank(p: SpmmProblem, c: Config) -> float:
    """Seconds by which tiles of a whole A are compared with each other: rounds of tiles whose steps take the longest of
    L2 reads, multiplication and shared memory traffic (2026-11-22), whose choices are measured. A wgmma of 64 rows
    reads all of B; A's values are read once; TMA writes both and the nibbles. `seconds` is nearer to times, but
    prefers tiles that were not timed beside these.
    """
    share = share_of_h200(p.card)
    tiles = -(-p.m // (c.tm * c.cluster)) * -(-p.n // c.tn)
    reading = p.card.sm_count
    if p.n <= 64:
        reading = min(max(tiles * c.cluster, 0.75 * reading), reading)
    fetch = (c.tm * c.a_row + c.tn * 128 / c.cluster) * reading / (9.6e12 * share)
    products = 2 * c.tm * c.tn * 64 * p.card.sm_count / (1270e12 * share * p.card.pace)
    port = (c.tm // 64 * c.tn + c.tm / 2 + (c.tm * c.a_row + c.tn * 128) / 128) / 2.1e9
    rounds = -(-tiles // max(1, p.card.sm_count // c.cluster))
    tile = 0.8e-6 * max(0.25, c.tm * c.tn / 32768)
    busy = rounds * (-(-p.k // c.bk) * max(fetch, products, port) + tile)
    few = 0.55 if c.tm > 64 else 0.42
    return beside(
        busy, p.compulsory_bytes / max(1, p.batch) / ((0.85 if p.n > 64 else few) * p.card.bandwidth)
    )


class Hopper24(SpmmKernel):
    """The products of one kind of 2:4 storage, by hopper_24.cu. `listed` makes the lists of one with blocks."""

    def __init__(
        self, storage: str, listed: Callable[[SpmmProblem, Config, BSR24], Lists] | None = None
    ) -> None:
        self.storage, self.name, self.listed = storage, f"hopper.{storage}", listed

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless(self.storage):
            return foreign
        reasons = unable(p, p.c.dtype) + unless_dense_sides(p) + unless_near("M, K and N", p.m, p.k, p.n)
        if p.a.scale == "block":
            reasons.append("a scale per block belongs inside the sums, which the tensor core keeps to itself")
        if p.a.blocks is None:
            unit = 32 if p.a.quantized else 16
            if p.k % unit or not p.k:
                reasons.append(
                    f"a row of A's values must be whole 16 bytes: K a multiple of {unit}, not {p.k}"
                )
            return reasons
        reasons += unless_stored(p) + unless_near("the rows of all stored blocks", p.nnzb * p.block[0])
        if p.a.quantized and p.block[1] % 128:
            reasons.append(f"a step is 128 columns: blocks must be a multiple of that wide, not {p.block[1]}")
        return reasons

    def rank(self, p: SpmmProblem, c: Config) -> float:
        return rank(p, c) if self.storage == "semi24" else self.seconds(p, c)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Every tile, alone and in clusters; of blocks, tiles that divide their rows, alone."""
        if p.a.blocks is None:
            return tiles_of(p, (2, 1))
        return (c for c in tiles_of(p, (1,), lists=True) if p.block[0] % c.tm == 0)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """The product of what is stored, and the rounding of B."""
        if not (p.m and p.n and p.k and p.stored):
            return p.card.launch_seconds + rounding_seconds(p)
        if p.a.blocks is None:
            units, steps = -(-p.m // (c.tm * c.cluster)), -(-p.k // c.bk)
            ring = ring_of(p, c, units, steps, steps)
        else:
            of_block = p.block[1] // c.bk
            mean, longest = p.nnzb / p.grid[0] * of_block, p.row_max * of_block
            ring = ring_of(p, c, p.grid[0] * (p.block[0] // c.tm), mean, max(mean, longest))
        return seconds_of(p, ring) + rounding_seconds(p)

    def prepare(self, p: SpmmProblem, c: Config, a: Any) -> Work:
        matrix = a.matrix if isinstance(a, Quantized) else a
        return prepared(p, c, matrix, self.listed and self.listed(p, c, matrix))

    def launch(self, c: Config, work: Work, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        if not isinstance(a, Quantized):
            return launch(c, work, a, b, out, epilogue)
        scale = a.scale if a.kind == "row" else a.scale.view(())
        matrix: Any = a.matrix
        launch(c, work, matrix, b.values.mT, out, epilogue, Scales(scale, b.scale))


KERNELS: dict[str, SpmmKernel] = {each.name: each for each in map(Hopper24, ("semi24", "semi24_fp8"))}
