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
from sparsek.bench.memory import gigabytes, out_of_memory
from sparsek.bench.peer import rotating
from sparsek.core import dtypes
from sparsek.core.clock import time_rounds
from sparsek.core.device import CARDS, card_named
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, Unsupported
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern, as_device, block_sides
from sparsek.formats.weights import WeightFile, available_memory
from sparsek.kernels import names_for
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.testing.budget import Gate, check_spmm

# Longer lists of matrices are shown one row per group of like names and shapes, and then per shape.
LIST_ALL = 12
LIST_GROUPS = 24
# FLOPs of the dense product that the check does in float64, by kind of device: a fraction of a second. And the most
# tokens that it takes, whatever their number in the question.
CHECK_FLOPS = {"cpu": 5e8, "cuda": 1e13}
CHECK_TOKENS = 2**16
MAX_TOKENS = 2**31 - 1024  # as hopper.spmm
TIMED_INPUTS = 4
# Predictions read the shapes of operands and no value: these take no memory.
META = torch.device("meta")
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
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise InvalidInput(f"tokens must be from 1 to {MAX_TOKENS}, got {self.tokens}")
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
class Failure:
    """A matrix that nothing can be said of, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.reason}"


@dataclass(frozen=True)
class NoAdvice:
    """A group all of whose matrices failed."""

    group: Group
    failures: tuple[Failure, ...]
    verdict: str = "failed"


@dataclass(frozen=True)
class Advice:
    """The answer for one group: times of its first matrix that did not fail, kept norms and checks of all of them."""

    group: Group
    cells: int
    kept_norm: tuple[float, float]
    times: Times
    wrong: tuple[str, ...]
    worst_error: float  # of the error budget, over all matrices of the group
    first: Pruned
    failures: tuple[Failure, ...] = ()

    @property
    def checked(self) -> int:
        """How many matrices of the group were multiplied and checked."""
        return len(self.group.names) - len(self.failures)

    @property
    def verdict(self) -> str:
        """What to do, in words."""
        if not self.failures:
            return self._of_the_others
        return f"{self._of_the_others}, {len(self.failures)} of {len(self.group.names)} failed"

    @property
    def _of_the_others(self) -> str:
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

    The check takes as few tokens as keep its float64 product short. Raises InvalidFile for NaN or Inf in W, and
    InvalidInput for values that the dtype of the question cannot hold.
    """
    device, dtype = question.run_on, dtypes.parse(question.dtype)
    dense = weight.to(device=device, dtype=dtype)
    broken = int((~dense.isfinite()).sum())
    if broken:
        raise _not_finite(weight, broken, question.dtype)
    matrix = BSR.from_dense(dense, question.block, keep=question.keep, scope=question.scope)
    whole = _norm(dense)
    kept = _norm(matrix.values) / whole if whole else 1.0
    cheap = max(8, int(CHECK_FLOPS[device.type] / (2.0 * max(1, weight.numel()))))
    tokens = min(question.tokens, cheap, CHECK_TOKENS)
    x = random_dense(tokens, weight.shape[1], dtype, device, seed=0)
    return Pruned(name, matrix, kept, check_spmm(matrix, x.T, spmm(matrix, x.T)), tokens)


def _not_finite(weight: torch.Tensor, broken: int, dtype: str) -> SparseKError:
    own = int((~weight.isfinite()).sum())
    if own:
        return InvalidFile(f"{own} of its elements are NaN or Inf in the file")
    largest = torch.finfo(dtypes.parse(dtype)).max
    cast = f"the cast from {dtypes.name(weight.dtype)} to {dtype}"
    return InvalidInput(f"{broken} of its elements overflow in {cast}, which ends at {largest:.5g}")


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def advise(
    group: Group, read: Callable[[str], torch.Tensor], question: Question, step: Callable[[str], None]
) -> Advice | NoAdvice:
    """Prunes and checks every matrix of the group, times the first, calls `step(name)` after each.

    A matrix that cannot be read, pruned, multiplied or held in memory becomes a failure, and the others go on.
    """
    times: Times | None = None
    first: Pruned | None = None
    checks: list[tuple[str, float, Gate]] = []
    failures: list[Failure] = []
    for name in group.names:
        try:
            weight = read(name)
            pruned = prune(name, weight, question)
            if first is None:
                times, first = timed(pruned.matrix, weight, question), pruned
        except (SparseKError, MemoryError, RuntimeError) as error:
            reason = str(error) if isinstance(error, SparseKError) else out_of_memory(error)
            if reason is None:
                raise
            failures.append(Failure(name, reason))
        else:
            checks.append((name, pruned.kept_norm, pruned.gate))
        step(name)
    if first is None or times is None:
        return NoAdvice(group, tuple(failures))
    norms = [kept for _, kept, _ in checks]
    wrong = tuple(
        f"{name!r}: error {got.error:.2e}, budget {got.budget:.2e}"
        for name, _, got in checks
        if not got.passed
    )
    cells = first.matrix.grid[0] * first.matrix.grid[1]
    worst = max(got.error / got.budget for _, _, got in checks)
    kept_norm = (min(norms), max(norms))
    return Advice(group, cells, kept_norm, times, wrong, worst, first, tuple(failures))


def timed(a: BSR, weight: torch.Tensor, question: Question) -> Times:
    """Dense and sparse seconds of `tokens` tokens: measured if there is a device for it, else predicted.

    Raises InvalidInput for more tokens than the memory of a CPU can hold.
    """
    card = question.predicted_for
    if card is not None:
        dense = predicted_dense(question, a.shape, card)
        shapes = BSR.unchecked(a.pattern, torch.empty_like(a.values, device=META), a.order)
        plan = best_sparse(shapes, _tokens(question.tokens, a.shape[1], a.dtype, META), card)
        even = _BreakEven(a.shape, a.block, question.tokens, a.dtype, META, card)
        return Times(dense, plan.seconds, plan.kernel, even.density(dense), True)
    if a.device.type == "cpu":
        _refuse_beyond_memory(a, question.tokens)
    plan = best_sparse(a, _tokens(question.tokens, a.shape[1], a.dtype, a.device), card)
    even = _BreakEven(a.shape, a.block, question.tokens, a.dtype, a.device, card)
    dense_weight = weight.to(device=a.device, dtype=a.dtype)
    inputs = [
        random_dense(question.tokens, a.shape[1], a.dtype, a.device, seed=index)
        for index in range(TIMED_INPUTS)
    ]
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


def _tokens(count: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """x.T [width, count] for planning, unwritten: the transpose view of row-major x."""
    return torch.empty(count, width, dtype=dtype, device=device).T


def _refuse_beyond_memory(a: BSR, tokens: int) -> None:
    """Linux lends memory that it does not have, and kills who uses it: so this is asked before."""
    takes = tokens * (TIMED_INPUTS * a.shape[1] + a.shape[0]) * a.dtype.itemsize
    free = available_memory()
    if free is not None and takes > free:
        raise InvalidInput(
            f"timing {tokens} tokens takes {gigabytes(takes)}, {gigabytes(free)} are free; use fewer tokens"
        )


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
    full = uniform_blocks(shape, question.block, cells, dtype, META)
    x = _tokens(question.tokens, shape[1], dtype, META)
    return plan_spmm(full, x, kernel="vendor.dense", device=card).seconds


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
        x = _tokens(self.tokens, self.shape[1], self.dtype, self.device)
        return best_sparse(a, x, self.card).seconds


def uniform_blocks(
    shape: tuple[int, int], block: tuple[int, int], nnzb: int, dtype: torch.dtype, device: torch.device
) -> BSR:
    """A matrix with `nnzb` blocks spread evenly over the rows, values unwritten: for planning only.

    On the meta device its values take no memory, and its pattern lies on the CPU, where plans read it.
    """
    rows, cols = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    starts = torch.arange(rows + 1, dtype=torch.int64) * nnzb // max(1, rows)
    lengths = starts[1:] - starts[:-1]
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, cols, generator=generator).argsort(dim=1).argsort(dim=1)
    indices = (ranks < lengths[:, None]).nonzero()[:, 1]
    at = torch.device("cpu") if device == META else device
    pattern = BlockPattern(shape, block, starts.int().to(at), indices.int().to(at))
    return BSR.unchecked(pattern, torch.empty(nnzb, *block, dtype=dtype, device=device))
