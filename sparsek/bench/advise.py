"""Does block sparsity pay for these weights? Prunes, multiplies, checks, times or predicts, and says so.

A weight W [out, in] of y = x @ W.T is the left operand: A = W pruned to blocks, B = x.T, a view of row-major
x.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch

from sparsek.bench.cases import random_dense
from sparsek.bench.peer import rotating
from sparsek.core import dtypes
from sparsek.core.clock import time_rounds
from sparsek.core.device import CARDS, card_named
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern, as_device, block_sides
from sparsek.formats.weights import WeightFile
from sparsek.kernels import names_for
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.testing.budget import Gate, check_spmm

# Longer lists of matrices are shown one row per group of like names and shapes, and then per shape.
LIST_ALL = 12
LIST_GROUPS = 24
# FLOPs of the dense product that the check does on a CPU in float64: a fraction of a second.
CHECK_FLOPS = 5e8
# Kernels that are no sparse product: dense on purpose, or there to specify.
NOT_SPARSE = ("vendor.dense", "reference.spmm")


@dataclass(frozen=True)
class Question:
    """What `advise` is asked. `device`: None (a GPU if there is one, else predictions for the H200), "cuda",
    "cpu", or the name of a card to predict for. `keep` is the fraction of blocks that stay, `scope` "global"
    or "row"."""

    block: tuple[int, int] = (128, 128)
    keep: float = 0.125
    tokens: int = 4096
    device: str | None = None
    dtype: str = "bf16"
    scope: str = "global"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidInput(f"tokens must be at least 1, got {self.tokens}")
        if not 0.0 < self.keep <= 1.0:
            raise InvalidInput(f"keep is a fraction of blocks in (0, 1], got {self.keep}")
        if self.scope not in ("global", "row"):
            raise InvalidInput(f"scope is 'global' or 'row', got {self.scope!r}")
        dtypes.parse(self.dtype)
        block_sides(self.block)
        _ = self.run_on

    @property
    def predicted_for(self) -> str | None:
        """The short name of the card that times are predicted for; None where they are measured."""
        asked = self.device
        if asked is None:
            return None if torch.cuda.is_available() else "h200"
        if asked == "cpu" or asked.startswith("cuda"):
            return None
        card_named(asked)
        return asked.lower()

    @property
    def run_on(self) -> torch.device:
        """Where the arithmetic is done."""
        if self.predicted_for is not None or self.device == "cpu":
            return torch.device("cpu")
        asked = self.device or "cuda"
        if not torch.cuda.is_available():
            known = ", ".join(name for name in CARDS if name != "cpu")
            raise InvalidInput(f"there is no GPU for --device {asked}; name a card to predict for: {known}")
        return as_device(asked)


@dataclass(frozen=True)
class Group:
    """Matrices that share one row of the answer."""

    label: str
    names: tuple[str, ...]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Pruned:
    """One pruned matrix: its blocks, the share of the Frobenius norm they keep, the check of a product."""

    name: str
    matrix: BSR
    kept_norm: float
    gate: Gate
    checked_tokens: int


@dataclass(frozen=True)
class Times:
    """Seconds of the dense and the best sparse product, the kernel of the latter, where both are equal."""

    dense: float
    sparse: float
    kernel: str
    break_even: float
    predicted: bool

    @property
    def speedup(self) -> float:
        return self.dense / self.sparse


@dataclass(frozen=True)
class Advice:
    """The answer for one group: times of its first matrix, kept norms and checks of all of them."""

    group: Group
    cells: int
    kept_norm: tuple[float, float]
    times: Times
    wrong: tuple[str, ...]
    worst_error: float  # of the error budget, over all matrices of the group
    first: Pruned

    @property
    def verdict(self) -> str:
        """What to do, in words."""
        if self.wrong:
            return "wrong result"
        speedup, even = self.times.speedup, self.times.break_even
        if speedup >= 1.05:
            return "sparse pays"
        if speedup > 0.95:
            return "no gain"
        if even * self.cells < 1:
            return "stay dense"
        return f"prune to {percent(even)}"


def percent(fraction: float) -> str:
    """0.0625 -> "6.2 %"; 1 -> "100 %"."""
    return f"{fraction * 100:.3g} %" if fraction >= 0.1 else f"{fraction * 100:.2g} %"


def choose(file: WeightFile, wanted: Sequence[str], block: tuple[int, int]) -> list[str]:
    """Names of the matrices to look at: the wanted ones (* and ? allowed), or every one with sides of a
    block at least.

    Raises InvalidInput when nothing fits, and for a wanted name that is not there.
    """
    shapes = {name: shape for name, shape, _ in file.names()}
    if not wanted:
        chosen = [name for name, shape in shapes.items() if shape[0] >= block[0] and shape[1] >= block[1]]
        if not chosen:
            least = f"{block[0]}x{block[1]}"
            raise InvalidInput(f"{file.path}: none of its {len(shapes)} float matrices is at least {least}")
        return chosen
    found: list[str] = []
    for pattern in wanted:
        if pattern in shapes:
            found.append(pattern)
            continue
        matching = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matching:
            file.read(pattern)  # raises with the names that come near
        found += matching
    return list(dict.fromkeys(found))


def grouped(shapes: Iterable[tuple[str, tuple[int, int]]]) -> list[Group]:
    """One group per matrix; beyond a dozen, one per name with its numbers as * and shape; beyond two dozen,
    per shape.
    """
    listed = list(shapes)
    keys: tuple[Callable[[str], str], ...] = (str, lambda name: re.sub(r"\d+", "*", name), lambda name: "*")
    groups: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for key, limit in zip(keys, (LIST_ALL, LIST_GROUPS, len(listed)), strict=True):
        groups = {}
        for name, shape in listed:
            groups.setdefault((key(name), shape), []).append(name)
        if len(groups) <= limit:
            break
    return [
        Group(names[0] if len(names) == 1 else f"{label} ({len(names)})", tuple(names), shape)
        for (label, shape), names in groups.items()
    ]


def prune(name: str, weight: torch.Tensor, question: Question) -> Pruned:
    """Prunes W [out, in] by Frobenius norm, multiplies it with random tokens, and checks the product.

    On a CPU the check takes as few tokens as keep its float64 product short.
    """
    device, dtype = question.run_on, dtypes.parse(question.dtype)
    dense = weight.to(device=device, dtype=dtype)
    try:
        matrix = BSR.from_dense(dense, question.block, keep=question.keep, scope=question.scope)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None
    whole = float(dense.float().norm())
    kept = float(matrix.values.float().norm()) / whole if whole else 1.0
    tokens = question.tokens
    if device.type == "cpu":
        tokens = max(8, min(tokens, int(CHECK_FLOPS / (2.0 * max(1, weight.numel())))))
    x = random_dense(tokens, weight.shape[1], dtype, device, seed=0)
    return Pruned(name, matrix, kept, check_spmm(matrix, x.T, spmm(matrix, x.T)), tokens)


def advise(
    group: Group, read: Callable[[str], torch.Tensor], question: Question, step: Callable[[str], None]
) -> Advice:
    """Prunes and checks every matrix of the group, times its first, calls `step(name)` after each."""
    weight = read(group.names[0])
    first = prune(group.names[0], weight, question)
    times = timed(first.matrix, weight, question)
    step(first.name)
    checks = [(first.name, first.kept_norm, first.gate)]
    for name in group.names[1:]:
        pruned = prune(name, read(name), question)
        checks.append((name, pruned.kept_norm, pruned.gate))
        step(name)
    norms = [kept for _, kept, _ in checks]
    wrong = tuple(
        f"{name}: error {got.error:.2e}, budget {got.budget:.2e}" for name, _, got in checks if not got.passed
    )
    cells = first.matrix.grid[0] * first.matrix.grid[1]
    worst = max(got.error / got.budget for _, _, got in checks)
    return Advice(group, cells, (min(norms), max(norms)), times, wrong, worst, first)


def timed(a: BSR, weight: torch.Tensor, question: Question) -> Times:
    """Dense and sparse seconds of `tokens` tokens: measured if there is a device for it, else predicted."""
    card = question.predicted_for
    x = torch.empty(question.tokens, a.shape[1], dtype=a.dtype, device=a.device)
    plan = best_sparse(a, x.T, card)
    even = _BreakEven(a.shape, a.block, question.tokens, a.dtype, a.device, card)
    if card is not None:
        dense = predicted_dense(question, a.shape, card)
        return Times(dense, plan.seconds, plan.kernel, even.density(dense), True)
    dense_weight = weight.to(device=a.device, dtype=a.dtype)
    inputs = [random_dense(question.tokens, a.shape[1], a.dtype, a.device, seed=index) for index in range(4)]
    measured = time_rounds(
        {
            "dense": rotating([lambda x=x: torch.nn.functional.linear(x, dense_weight) for x in inputs]),
            "sparse": rotating([lambda x=x: plan(a, x.T) for x in inputs]),
        },
        device=a.device,
        rounds=5,
    )
    dense, sparse = measured["dense"].median / 1e3, measured["sparse"].median / 1e3
    # The planner's curve over density, scaled so that it passes through the measured point.
    return Times(dense, sparse, plan.kernel, even.density(dense * plan.seconds / sparse), False)


def best_sparse(a: BSR, b: torch.Tensor, card: str | None) -> Any:
    """The plan of the sparse kernel that the planner thinks fastest. Raises Unsupported when none runs."""
    plans, reasons = [], {}
    for name in names_for("spmm"):
        if name in NOT_SPARSE:
            continue
        try:
            plans.append(plan_spmm(a, b, kernel=name, device=card))
        except Unsupported as error:
            reasons |= {name: error.reasons.get(name, [str(error)])}
    if not plans:
        raise Unsupported(f"no sparse kernel runs {a!r} on {card or a.device}", reasons)
    return min(plans, key=lambda plan: plan.seconds)


def predicted_dense(question: Question, shape: tuple[int, int], card: str) -> float:
    """Seconds of the dense product on a named card, as the planner predicts them for vendor.dense with every block
    stored: it refuses matrices with empty block columns, where its zeros would carry NaN from B to C.
    """
    cells = -(-shape[0] // question.block[0]) * -(-shape[1] // question.block[1])
    dtype = dtypes.parse(question.dtype)
    full = uniform_blocks(shape, question.block, cells, dtype, torch.device("cpu"))
    x = torch.empty(question.tokens, shape[1], dtype=dtype)
    return plan_spmm(full, x.T, kernel="vendor.dense", device=card).seconds


@dataclass(frozen=True)
class _BreakEven:
    """Finds the density of random blocks at which the predicted sparse time reaches a given dense time."""

    shape: tuple[int, int]
    block: tuple[int, int]
    tokens: int
    dtype: torch.dtype
    device: torch.device
    card: str | None

    def density(self, dense_seconds: float) -> float:
        """Bisection to a hundredth of the range, by predictions. 0: never as fast as dense; 1: always."""
        cells = -(-self.shape[0] // self.block[0]) * -(-self.shape[1] // self.block[1])
        low, high = 0, cells
        if self.seconds(cells) <= dense_seconds:
            return 1.0
        while high - low > max(1, cells // 100):
            middle = (low + high) // 2
            if self.seconds(middle) <= dense_seconds:
                low = middle
            else:
                high = middle
        return low / cells

    @lru_cache(maxsize=4096)  # noqa: B019 (the key is a frozen value; like matrices of a model share it)
    def seconds(self, nnzb: int) -> float:
        a = uniform_blocks(self.shape, self.block, nnzb, self.dtype, self.device)
        x = torch.empty(self.tokens, self.shape[1], dtype=self.dtype, device=self.device)
        return best_sparse(a, x.T, self.card).seconds


def uniform_blocks(
    shape: tuple[int, int], block: tuple[int, int], nnzb: int, dtype: torch.dtype, device: torch.device
) -> BSR:
    """A matrix with `nnzb` blocks spread evenly over the rows, values unwritten: for planning only."""
    rows, cols = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    starts = torch.arange(rows + 1, dtype=torch.int64) * nnzb // max(1, rows)
    lengths = starts[1:] - starts[:-1]
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, cols, generator=generator).argsort(dim=1).argsort(dim=1)
    indices = (ranks < lengths[:, None]).nonzero()[:, 1]
    pattern = BlockPattern(shape, block, starts.int().to(device), indices.int().to(device))
    return BSR.unchecked(pattern, torch.empty(nnzb, *block, dtype=dtype, device=device))
