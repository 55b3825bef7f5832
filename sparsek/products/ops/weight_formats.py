"""The formats of the weight W [N, K] of a layer x @ W.T, with their losses and predicted times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.arguments import shown
from sparsek.core.device import CARDS, Card
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.plan.dense import dense_seconds
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BLOCK_STEP, BSR24
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.quantized import Matrix, Quantized, SparseMatrix, quantize
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.linear import plan_layer
from sparsek.products.ops.spmm import plan_spmm

Weight: TypeAlias = Tensor | SparseMatrix

FP8 = "_fp8"
Format: TypeAlias = Literal[
    "dense", "semi24", "bsr", "bsr24", "dense_fp8", "semi24_fp8", "bsr_fp8", "bsr24_fp8"
]
FORMATS = get_args(Format)
TITLES = {"dense": "dense", "semi24": "2:4", "bsr": "BSR", "bsr24": "BSR24"}
META = torch.device("meta")
# A dense W in FP8 is a Quantized BSR that stores all blocks, of these sides, and is multiplied by this kernel.
DENSE_FP8 = "vendor.cublas_fp8"
DENSE_BLOCK = 128


class Predicted(NamedTuple):
    """The kernel that would run, and the seconds that it predicts."""

    kernel: str
    seconds: float


@dataclass(frozen=True)
class WeightFormat:
    """A format of FORMATS; with blocks also their side and the share that is stored.

    `scope`: where blocks are chosen, "global" or "row"; see `BSR.from_dense`.
    """

    format: str
    block: int | tuple[int, int] = 0
    keep: float = 1.0
    scope: Scope = "global"

    @property
    def base(self) -> str:
        """The format without FP8."""
        return self.format.removesuffix(FP8)

    @property
    def is_fp8(self) -> bool:
        """Whether the format is FP8."""
        return self.format.endswith(FP8)

    @property
    def kernel(self) -> str | None:
        """The only kernel that multiplies it, or None if kernels are chosen by speed."""
        return DENSE_FP8 if self.format == "dense_fp8" else None

    @property
    def name(self) -> str:
        """ "BSR24 128, 12.5 % of the blocks, FP8" in short: "BSR24 128 12.5 % fp8"."""
        parts = [TITLES[self.base]]
        if self.block:
            parts += [block_text(self.block), f"{self.keep * 100:.3g} %"]
        return " ".join([*parts, "fp8"] if self.is_fp8 else parts)

    def why_not(self, w: Tensor) -> list[str]:
        """Return the reasons, of shape and dtype, why W cannot have this format."""
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
            why.append(f"FP8 is rounded from bf16, fp16 or fp32, not {w.dtype}")
        return why

    def convert(self, w: Tensor, plain: Any = None) -> Weight:
        """Convert W [N, K] to this format, on its device. `plain`: W in the format without FP8, if it is known."""
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
        """The format without FP8."""
        return replace(self, format=self.base)


def block_text(block: int | tuple[int, int]) -> str:
    """128 -> "128"; (256, 128) -> "256x128"."""
    if isinstance(block, int):
        return str(block)
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def combinations(
    formats: Sequence[str] | None, blocks: Sequence[int | tuple[int, int]], keeps: Sequence[float]
) -> Iterator[WeightFormat]:
    """Every combination: formats with blocks once for each block and share. None: all formats."""
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
    """The format of a weight that is stored already."""
    if isinstance(weight, Quantized):
        inner = format_of(weight.matrix)
        return WeightFormat(inner.format + FP8, inner.block, inner.keep)
    if isinstance(weight, BSR):
        return WeightFormat("bsr", weight.block, weight.density)
    if isinstance(weight, BSR24):
        return WeightFormat("bsr24", weight.block, weight.pattern.density)
    return WeightFormat("semi24" if isinstance(weight, Semi24) else "dense")


def parts_of(weight: Weight) -> tuple[Tensor, ...]:
    """The tensors that a product reads, without indices."""
    if isinstance(weight, Tensor):
        return (weight,)
    if isinstance(weight, Quantized):
        return (*parts_of(weight.matrix), weight.scale)
    return (weight.values,) if isinstance(weight, BSR) else (weight.values, weight.meta)


def stored_fraction(weight: Weight) -> float:
    """Stored values over N * K; more than 1 where blocks reach beyond the edge of a small matrix."""
    if isinstance(weight, Tensor):
        return 1.0
    inner = weight.matrix if isinstance(weight, Quantized) else weight
    return inner.values.numel() / max(1, math.prod(weight.shape))


def kept_norm(weight: Tensor | Matrix, w: Tensor) -> float:
    """||stored values|| / ||W||, Frobenius, of a weight that is not in FP8. One sync."""
    return 1.0 if isinstance(weight, Tensor) else weight.kept_norm(w)


def keeps_all(weight: Tensor | Matrix, w: Tensor) -> bool:
    """Whether a weight that is not in FP8 stores every nonzero of W. One sync."""
    if isinstance(weight, Tensor):
        return True
    return bool(torch.count_nonzero(weight.values) == torch.count_nonzero(w))


def predict(
    weight: Weight, tokens: int, dtype: torch.dtype, card: Card, kernel: str | None = None
) -> Predicted:
    """The time of x [tokens, K] @ W.T on a card, by the models of the kernels. No value is read.

    `dtype`: that of x. `kernel`: this one only. Raises Unsupported where no kernel runs. W may be on another device, if
    the card is one of CARDS.
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
    return Predicted(plan.kernel, plan.seconds)


def plan_of(
    x: Tensor, weight: Weight, device: str | None = None, kernel: str | None = None, config: Any = None
) -> Any:
    """The plan of x [T, K] @ W.T for a sparse weight; call it by `run_plan`. Options as in `plan_spmm`."""
    if isinstance(weight, Tensor):
        raise InvalidInput(f"no plan of a {type(weight).__name__}: torch multiplies it")
    if isinstance(weight, BSR):
        return plan_spmm(x, weight.T, kernel=kernel, config=config, device=device)
    return plan_layer(x, weight, kernel=kernel, config=config, device=device)


def run_plan(plan: Any, x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] @ W.T by a plan of `plan_of`."""
    return plan(x, weight.T) if isinstance(weight, BSR) else plan(x, weight)
