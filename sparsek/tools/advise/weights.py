"""Does block sparsity pay for these weights? Prunes, multiplies, checks, then times or predicts.

A weight W [out, in] of y = x @ W.T is the left operand: A = W pruned to blocks, B = x.T, a view of row-major
x.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from sparsek.core import arguments, dtypes
from sparsek.core.clock import rotating, time_rounds
from sparsek.core.device import GPUS, card_named, card_of
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, Unsupported
from sparsek.core.memory import available_memory, gigabytes, out_of_memory
from sparsek.engine.plan.dense import dense_seconds
from sparsek.engine.plan.host import eager_seconds
from sparsek.files.weights import WeightFile
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.padding import tiles_of
from sparsek.products.formats.pattern import BlockPattern, block_sides
from sparsek.products.formats.random import random_dense
from sparsek.products.ops.choose import ERROR_TOKENS, Option, compare
from sparsek.products.ops.spmm import plan_spmm, spmm
from sparsek.products.ops.weight_formats import combinations
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
# Speedups from which on a sparse product counts as faster, and up to which as slower.
FASTER, SLOWER = 1.05, 0.95
# Kernels that are no sparse product: dense on purpose, or there to specify.
NOT_SPARSE = ("vendor.dense", "reference.spmm")


@dataclass(frozen=True)
class AdviceSettings:
    """The settings of `advise`. `device`: None (a GPU if there is one, else predictions for the H200), "cuda",
    "cpu", or the name of a card to predict for. `keep` is the fraction of blocks that stay, `scope` "row"
    or "global"."""

    block: tuple[int, int] = (128, 128)
    keep: float = 0.125
    tokens: int = 4096
    device: str | None = None
    dtype: str = "bf16"
    scope: str = "row"

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise InvalidInput(f"tokens must be from 1 to {MAX_TOKENS}, got {self.tokens}")
        arguments.number("keep", self.keep, 0, 1)
        if self.scope not in ("row", "global"):
            raise InvalidInput(f"scope is 'row' or 'global', got {self.scope!r}")
        object.__setattr__(
            self, "dtype", dtypes.name(dtypes.parse(self.dtype))
        )  # of torch's name the short one
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
            raise InvalidInput(
                f"there is no GPU for --device {asked}; name a card to predict for: {', '.join(GPUS)}"
            )
        return arguments.device("device", asked)


@dataclass(frozen=True)
class WeightGroup:
    """Matrices that share one row of the answer. `lookup`: embeddings by their names, whose rows are fetched."""

    label: str
    names: tuple[str, ...]
    shape: tuple[int, int]
    lookup: bool = False


@dataclass(frozen=True)
class Pruned:
    """One pruned matrix: its blocks, the share of the Frobenius norm they keep, the check of a product."""

    name: str
    matrix: BSR
    kept_norm: float
    gate: Gate
    checked_tokens: int


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of the dense and the best sparse product, the kernel of the latter, and the break even: the largest
    share of blocks stored by the same rule at which sparse is as fast as dense, 0 if there is none. `host`: seconds
    that an eager call takes at least."""

    dense: float
    sparse: float
    kernel: str
    break_even: float
    predicted: bool
    host: float = 0.0

    @property
    def speedup(self) -> float:
        return self.dense / self.sparse

    @property
    def is_faster(self) -> bool:
        return self.speedup >= FASTER

    @property
    def needs_graph(self) -> bool:
        """True if the sparse product is faster, but not when each call waits for the host."""
        return self.is_faster and self.dense / max(self.sparse, self.host) < FASTER


@dataclass(frozen=True)
class Failure:
    """A matrix without advice, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name!r}: {self.reason}"


@dataclass(frozen=True)
class NoAdvice:
    """A group all of whose matrices failed."""

    group: WeightGroup
    failures: tuple[Failure, ...]
    verdict: str = "failed"


@dataclass(frozen=True)
class Advice:
    """The answer for one group: kept norms and checks of all its matrices that did not fail; times of all of them if
    predicted, and of the first if measured; every format of the first, but for look-ups."""

    group: WeightGroup
    cells: int
    kept_norm: tuple[float, float]
    times: tuple[ProductTimes, ...]
    wrong: tuple[str, ...]
    worst_error: float  # of the error budget, over all matrices of the group
    first: Pruned
    failures: tuple[Failure, ...] = ()
    formats: tuple[Option, ...] = ()

    @property
    def checked(self) -> int:
        """How many matrices of the group were multiplied and checked."""
        return len(self.group.names) - len(self.failures)

    @property
    def fastest(self) -> Option:
        """The format of least time."""
        return min(self.formats, key=lambda option: option.seconds)

    @property
    def needs_graph(self) -> bool:
        return not self.group.lookup and any(times.needs_graph for times in self.times)

    @property
    def verdict(self) -> str:
        """The speed in words. What the model loses is not tested."""
        if not self.failures:
            return self._of_the_others
        return f"{self._of_the_others}, {len(self.failures)} of {len(self.group.names)} failed"

    @property
    def _of_the_others(self) -> str:
        if self.wrong:
            return "wrong result"
        if self.group.lookup:
            return "look-up, not a product"
        faster = sum(times.is_faster for times in self.times)
        if faster:
            share = "" if faster == len(self.times) else f"{faster} of {len(self.times)} "
            return f"{share}faster{' in a CUDA graph' if self.needs_graph else ''}"
        if max(times.speedup for times in self.times) > SLOWER:
            return "no gain"
        even = min(times.break_even for times in self.times)
        if 0 < even * self.cells < self.first.matrix.nnzb:
            return f"prune to {percent(even)}"
        return "stay dense"


def percent(fraction: float) -> str:
    """0.0625 -> "6.2 %"; 1 -> "100 %"."""
    return f"{fraction * 100:.3g} %" if fraction >= 0.1 else f"{fraction * 100:.2g} %"


def choose(file: WeightFile, wanted: Sequence[str], block: tuple[int, int]) -> list[str]:
    """Names of the matrices to look at: the wanted ones (* and ? allowed), or every one with sides of a
    block at least.

    Raises InvalidInput when nothing fits, with what the file holds, and for a wanted name that is missing.
    """
    shapes = {name: shape for name, shape, _ in file.names()}
    if not wanted:
        if not shapes:
            raise InvalidInput(f"{file.path}: no 2-D float matrix is in it; found {file.described()}")
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


def grouped(shapes: Iterable[tuple[str, tuple[int, int]]], *, wanted: bool = False) -> list[WeightGroup]:
    """One group per matrix; beyond a dozen, one per name with its numbers as * and shape; beyond two dozen,
    per shape. Names with "embed" in them are look-ups, unless they were `wanted`.
    """
    listed = [(name, shape, not wanted and "embed" in name.lower()) for name, shape in shapes]
    keys: tuple[Callable[[str], str], ...] = (str, lambda name: re.sub(r"\d+", "*", name), lambda name: "*")
    groups: dict[tuple[str, tuple[int, int], bool], list[str]] = {}
    for key, limit in zip(keys, (LIST_ALL, LIST_GROUPS, len(listed)), strict=True):
        groups = {}
        for name, shape, lookup in listed:
            groups.setdefault((key(name), shape, lookup), []).append(name)
        if len(groups) <= limit:
            break
    return [
        WeightGroup(names[0] if len(names) == 1 else f"{label} ({len(names)})", tuple(names), shape, lookup)
        for (label, shape, lookup), names in groups.items()
    ]


def prune(name: str, weight: torch.Tensor, question: AdviceSettings) -> Pruned:
    """Prunes W [out, in] by Frobenius norm, multiplies it with random tokens, and checks the product.

    The check takes as few tokens as keep its float64 product short. Raises InvalidFile for NaN or Inf in W, and
    InvalidInput for values that the dtype of the question cannot hold.
    """
    device, dtype = question.run_on, dtypes.parse(question.dtype)
    dense = weight.to(device=device, dtype=dtype)
    broken = int((~dense.isfinite()).sum())
    if broken:
        raise _not_finite(weight, broken, question.dtype)
    matrix = BSR.from_dense(dense, question.block, keep=question.keep, scope=cast(Scope, question.scope))
    cheap = max(8, int(CHECK_FLOPS[device.type] / (2.0 * max(1, weight.numel()))))
    tokens = min(question.tokens, cheap, CHECK_TOKENS)
    x = random_dense(tokens, weight.shape[1], dtype=dtype, device=device, seed=0)
    return Pruned(name, matrix, matrix.kept_norm(dense), check_spmm(matrix, x.T, spmm(matrix, x.T)), tokens)


def compared(weight: torch.Tensor, question: AdviceSettings) -> tuple[Option, ...]:
    """Every way to store W [N, K] that some kernel multiplies, with the question's blocks: measured or predicted.

    Errors are those of N(0, 1) tokens, which follow the kept norm; those of real activations may differ.
    """
    card, device = question.predicted_for, question.run_on
    dense = weight.to(device=device, dtype=dtypes.parse(question.dtype))
    drawn = question.tokens if card is None else min(question.tokens, ERROR_TOKENS)
    x = random_dense(drawn, dense.shape[1], dtype=dense.dtype, device=device, seed=0)
    listed = [
        replace(form, scope=cast(Scope, question.scope))
        for form in combinations(None, [question.block], [question.keep])
    ]
    on = card_of(device) if card is None else card_named(card)
    with torch.no_grad():
        options, _ = compare(dense, x, listed, on, question.tokens, timed=card is None)
    return tuple(option for option in options if not option.why_not)


def _not_finite(weight: torch.Tensor, broken: int, dtype: str) -> SparseKError:
    own = int((~weight.isfinite()).sum())
    if own:
        return InvalidFile(f"{own} of its elements are NaN or Inf in the file")
    largest = torch.finfo(dtypes.parse(dtype)).max
    cast = f"the cast from {dtypes.name(weight.dtype)} to {dtype}"
    return InvalidInput(f"{broken} of its elements overflow in {cast}, which ends at {largest:.5g}")


def advise(
    group: WeightGroup,
    read: Callable[[str], torch.Tensor],
    question: AdviceSettings,
    step: Callable[[str], None],
) -> Advice | NoAdvice:
    """Prunes and checks every matrix of the group, predicts all times or measures the first, calls `step(name)` after
    each.

    A matrix that cannot be read, pruned, multiplied or held in memory becomes a failure, and the others go on.
    """
    times: list[ProductTimes] = []
    first: Pruned | None = None
    formats: tuple[Option, ...] = ()
    checks: list[tuple[str, float, Gate]] = []
    failures: list[Failure] = []
    for name in group.names:
        try:
            weight = read(name)
            pruned = prune(name, weight, question)
            if first is None or question.predicted_for is not None:
                times.append(timed(pruned.matrix, weight, question))
            if first is None and not group.lookup:
                formats = compared(weight, question)
            first = first or pruned
        except (SparseKError, OSError, MemoryError, RuntimeError) as error:
            reason = str(error) if isinstance(error, (SparseKError, OSError)) else out_of_memory(error)
            if reason is None:
                raise
            failures.append(Failure(name, reason))
        else:
            checks.append((name, pruned.kept_norm, pruned.gate))
        step(name)
    if first is None:
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
    return Advice(group, cells, kept_norm, tuple(times), wrong, worst, first, tuple(failures), formats)


def timed(a: BSR, weight: torch.Tensor, question: AdviceSettings) -> ProductTimes:
    """Dense and sparse seconds of `tokens` tokens: measured if there is a device for it, else predicted.

    Raises InvalidInput for more tokens than the memory of a CPU can hold.
    """
    card = question.predicted_for
    dense_weight = weight.to(device=a.device, dtype=a.dtype)
    curve = TimeCurve.of(dense_weight, question)
    if card is not None:
        dense = predicted_dense(question, a.shape, card)
        plan = curve.plan(a.pattern)
        even = curve.break_even(a.nnzb, plan.seconds, dense)
        return ProductTimes(dense, plan.seconds, plan.kernel, even, True, eager_seconds(card_named(card)))
    if a.device.type == "cpu":
        _refuse_beyond_memory(a, question.tokens)
    plan = curve.plan(a.pattern)
    inputs = [
        random_dense(question.tokens, a.shape[1], dtype=a.dtype, device=a.device, seed=index)
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
    even = curve.break_even(a.nnzb, plan.seconds, dense * plan.seconds / sparse)
    return ProductTimes(dense, sparse, plan.kernel, even, False, eager_seconds(card_of(a.device)))


def _tokens(count: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """x.T [width, count] for planning, unwritten: the transpose view of row-major x."""
    return torch.empty(count, width, dtype=dtype, device=device).T


def _refuse_beyond_memory(a: BSR, tokens: int) -> None:
    """Linux overcommits memory and kills the process that uses it, so the size is checked first."""
    takes = tokens * (TIMED_INPUTS * a.shape[1] + a.shape[0]) * a.dtype.itemsize
    free = available_memory()
    if free is not None and takes > free:
        raise InvalidInput(
            f"timing {tokens} tokens takes {gigabytes(takes)}, {gigabytes(free)} are free; use fewer tokens"
        )


def best_sparse(a: BSR, b: torch.Tensor, card: str | None) -> Any:
    """The plan of the sparse kernel that the planner thinks fastest. Raises Unsupported when none runs."""
    plan = plan_spmm(a, b, device=card)
    sparse = [each for each in plan.candidates if each.name not in NOT_SPARSE]
    best = min((each for each in sparse if not each.why_not), key=lambda each: each.seconds, default=None)
    if best is None:
        reasons = {each.name: each.why_not for each in sparse}
        raise Unsupported(f"no sparse kernel runs {a!r} on {card or a.device}", reasons)
    return plan if best.name == plan.kernel else plan_spmm(a, b, kernel=best.name, device=card)


def predicted_dense(question: AdviceSettings, shape: tuple[int, int], card: str) -> float:
    """Seconds of the dense product with W [N, K] of this shape on a named card, as the planner predicts them."""
    return dense_seconds(card_named(card), question.dtype, question.tokens, *shape)


@dataclass(frozen=True, eq=False)
class TimeCurve:
    """The predicted sparse time of one weight over the number of blocks that the rule of the question stores.

    `ranks` [Mb, Kb]: the place of each block by falling Frobenius norm, or first by its place in its block row; the
    first `n` places are what a pruning to `n` blocks stores.
    """

    question: AdviceSettings
    shape: tuple[int, int]
    device: torch.device
    ranks: torch.Tensor

    @classmethod
    def of(cls, dense: torch.Tensor, question: AdviceSettings) -> "TimeCurve":
        tiles = tiles_of(dense, question.block)
        norms = torch.linalg.vector_norm(tiles, dim=3, dtype=torch.float64).square().sum(dim=1)
        order = norms.flatten().argsort(descending=True, stable=True)
        if question.scope == "row":
            in_row = norms.argsort(dim=1, descending=True, stable=True).argsort(dim=1).flatten()
            order = order[in_row[order].argsort(stable=True)]
        ranks = order.argsort().view(norms.shape)
        return cls(question, (dense.shape[0], dense.shape[1]), dense.device, ranks)

    def pattern(self, count: int) -> BlockPattern:
        """The first `count` places."""
        stored = self.ranks < count
        starts = torch.nn.functional.pad(stored.sum(dim=1).cumsum(0), (1, 0))
        return BlockPattern(self.shape, self.question.block, starts.int(), stored.nonzero()[:, 1].int())

    def plan(self, pattern: BlockPattern) -> Any:
        """The plan of the best sparse kernel for a pattern; no value is read."""
        card, dtype = self.question.predicted_for, dtypes.parse(self.question.dtype)
        device = self.device if card is None else META
        values = torch.empty(pattern.nnzb, *pattern.block, dtype=dtype, device=device)
        x = _tokens(self.question.tokens, self.shape[1], dtype, device)
        return best_sparse(BSR.unchecked(pattern, values), x, card)

    def break_even(self, stored: int, seconds: float, dense_seconds: float) -> float:
        """The largest share of blocks at which the predicted time is within a given dense time; 0: there is none.

        Bisection to a hundredth of the range, above the `stored` blocks if their `seconds` are within it, and below
        them if not: so the answer never speaks against them.
        """
        blocks = self.ranks.numel()
        if not blocks:
            return 1.0
        if seconds <= dense_seconds:
            low, high = stored, blocks
            if low == high or self.plan(self.pattern(high)).seconds <= dense_seconds:
                return 1.0
        else:
            low, high = 1, stored
            if high <= 1 or self.plan(self.pattern(low)).seconds > dense_seconds:
                return 0.0
        while high - low > max(1, blocks // 100):
            middle = (low + high) // 2
            if self.plan(self.pattern(middle)).seconds <= dense_seconds:
                low = middle
            else:
                high = middle
        return low / blocks
