"""The ways to store the weight W [N, K] of a layer x @ W.T: what each keeps of W, and what it takes by prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.arguments import shown
from sparsek.core.device import CARDS, Card
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.matrix import two_four
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BLOCK_STEP, BSR24
from sparsek.matrix.quantized import Quantized, quantize
from sparsek.matrix.semi24 import Semi24
from sparsek.ops.linear import plan_layer
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.dense import dense_seconds

Weight = Tensor | BSR | Semi24 | BSR24 | Quantized

FP8 = "_fp8"
FORMATS = ("dense", "semi24", "bsr", "bsr24", "dense_fp8", "semi24_fp8", "bsr_fp8", "bsr24_fp8")
TITLES = {"dense": "dense", "semi24": "2:4", "bsr": "BSR", "bsr24": "BSR24"}
META = torch.device("meta")
# A dense W in FP8 is a Quantized BSR that stores every block of so many rows and columns, multiplied by this kernel.
DENSE_FP8 = "vendor.cublas_fp8"
DENSE_BLOCK = 128


class Predicted(NamedTuple):
    """The kernel that would run, and the seconds that it says it needs."""

    kernel: str
    seconds: float


@dataclass(frozen=True)
class WeightFormat:
    """One way to store a weight: a format of FORMATS, and of one with blocks their side and the fraction that stays.

    `scope`: where these are chosen, "global" or "row", as in `BSR.from_dense`.
    """

    format: str
    block: int | tuple[int, int] = 0
    keep: float = 1.0
    scope: str = "global"

    @property
    def base(self) -> str:
        """The format without FP8."""
        return self.format.removesuffix(FP8)

    @property
    def is_fp8(self) -> bool:
        return self.format.endswith(FP8)

    @property
    def kernel(self) -> str | None:
        """The kernel that it must be multiplied by, where that is no question of speed."""
        return DENSE_FP8 if self.format == "dense_fp8" else None

    @property
    def name(self) -> str:
        """ "BSR24 128, 12.5 % of the blocks, FP8" in short: "BSR24 128 12.5 % fp8"."""
        parts = [TITLES[self.base]]
        if self.block:
            parts += [block_text(self.block), f"{self.keep * 100:.3g} %"]
        return " ".join([*parts, "fp8"] if self.is_fp8 else parts)

    def why_not(self, w: Tensor) -> list[str]:
        """Reasons of the shape and dtype why W cannot be stored so."""
        why = []
        step = two_four.STEP
        if self.base == "semi24" and w.shape[1] % step:
            why.append(f"K must be a multiple of {step}, not {w.shape[1]}")
        sides = self.block if isinstance(self.block, tuple) else (self.block, self.block)
        if self.base == "bsr24" and any(side % BLOCK_STEP for side in sides):
            why.append(f"its blocks are multiples of {BLOCK_STEP}")
        if self.block and (sides[0] > w.shape[0] or sides[1] > w.shape[1]):
            why.append(f"W [{w.shape[0]}, {w.shape[1]}] is smaller than a block")
        if self.is_fp8 and w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            why.append(f"FP8 is made of bf16, fp16 or fp32, not {w.dtype}")
        return why

    def convert(self, w: Tensor, plain: Any = None) -> Weight:
        """W [N, K] stored so, on its device. `plain`: what `self.plain` has made of it, for a format in FP8."""
        w = w.detach()
        if self.format == "dense_fp8":
            plain = BSR.from_dense(w, DENSE_BLOCK, keep=1.0)
        elif self.is_fp8 and plain is None:
            plain = self.plain.convert(w)
        if self.is_fp8:
            return quantize(plain, check=False)
        if self.format == "dense":
            return w
        if self.format == "semi24":
            return Semi24.from_dense(w)
        made = BSR.from_dense(w, self.block, keep=self.keep, scope=self.scope)
        return BSR24.from_bsr(made) if self.format == "bsr24" else made

    @property
    def plain(self) -> WeightFormat:
        """The same not in FP8."""
        return replace(self, format=self.base)


def block_text(block: int | tuple[int, int]) -> str:
    """128 -> "128"; (256, 128) -> "256x128"."""
    if isinstance(block, int):
        return str(block)
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def combinations(
    formats: Sequence[str] | None, blocks: Sequence[int | tuple[int, int]], keeps: Sequence[float]
) -> Iterator[WeightFormat]:
    """Every combination: formats with blocks once for each block and fraction. None: all formats."""
    if formats is None:
        formats = FORMATS
    for name in formats:
        if name not in FORMATS:
            raise InvalidInput(f"no format is called {shown(name)}; known: {', '.join(FORMATS)}")
        if name.removesuffix(FP8) in ("dense", "semi24"):
            yield WeightFormat(name)
            continue
        for block in blocks:
            for keep in keeps:
                yield WeightFormat(name, block, keep)


def format_of(weight: Weight) -> WeightFormat:
    """What a weight that is stored already is."""
    if isinstance(weight, Quantized):
        inner = format_of(weight.matrix)
        return WeightFormat(inner.format + FP8, inner.block, inner.keep)
    if isinstance(weight, BSR):
        return WeightFormat("bsr", weight.block, weight.density)
    if isinstance(weight, BSR24):
        return WeightFormat("bsr24", weight.block, weight.pattern.density)
    return WeightFormat("semi24" if isinstance(weight, Semi24) else "dense")


def parts_of(weight: Weight) -> tuple[Tensor, ...]:
    """The tensors whose bytes a product reads, but for indices."""
    if isinstance(weight, Tensor):
        return (weight,)
    if isinstance(weight, Quantized):
        return (*parts_of(weight.matrix), weight.scale)
    return (weight.values,) if isinstance(weight, BSR) else (weight.values, weight.meta)


def stored_fraction(weight: Weight) -> float:
    """Stored values over N * K; more than 1 where blocks reach over the edge of a small matrix."""
    if isinstance(weight, Tensor):
        return 1.0
    inner = weight.matrix if isinstance(weight, Quantized) else weight
    return inner.values.numel() / max(1, math.prod(weight.shape))


def kept_norm(weight: Weight, w: Tensor) -> float:
    """||stored values|| over ||W||, Frobenius, of a weight that is not in FP8. One sync."""
    return 1.0 if isinstance(weight, Tensor) else weight.kept_norm(w)


def predict(
    weight: Weight, tokens: int, dtype: torch.dtype, card: Card, kernel: str | None = None
) -> Predicted:
    """What x [tokens, K] @ W.T takes on a card, by the kernels' own models. No value is read.

    `dtype`: of x. `kernel`: this one. Raises Unsupported where no kernel runs there. W may be elsewhere, unless no card
    is known by that name.
    """
    if isinstance(weight, Tensor):
        n, k = weight.shape
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        seconds = dense_seconds(card, dtypes.name(weight.dtype), tokens, n, k, tf32=tf32)
        return Predicted("torch", seconds)
    short = next((name for name, known in CARDS.items() if known == card), None)
    where = weight.device if short is None else META
    x = torch.empty(tokens, weight.shape[1], dtype=dtype, device=where)
    stored: Any = weight if short is None else weight._each(lambda part: torch.empty_like(part, device=META))
    plan = plan_of(x, stored, short, kernel)
    if plan.kernel.startswith("reference.") and not card.is_cpu:
        raise Unsupported("no kernel", {plan.kernel: ["runs it, and is there to specify, not to be fast"]})
    seconds = plan.seconds
    if kernel == DENSE_FP8:
        seconds = max(seconds, dense_seconds(card, "fp8", tokens, *weight.shape))
    return Predicted(plan.kernel, seconds)


def plan_of(
    x: Tensor, weight: Weight, device: str | None = None, kernel: str | None = None, config: Any = None
) -> Any:
    """The plan of x [T, K] @ W.T for a sparse weight; call it with `run_plan`. Options as in `plan_spmm`."""
    if isinstance(weight, Tensor):
        raise InvalidInput(f"no plan of a {type(weight).__name__}: torch multiplies it")
    if isinstance(weight, BSR):
        return plan_spmm(x, weight.T, kernel=kernel, config=config, device=device)
    return plan_layer(x, weight, kernel=kernel, config=config, device=device)


def run_plan(plan: Any, x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] @ W.T by a plan of `plan_of`."""
    return plan(x, weight.T) if isinstance(weight, BSR) else plan(x, weight)
