"""`choose_format`: the fastest format for the weight of a layer, and the accuracy that it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import INT32_MAX, shown
from sparsek.core.clock import Times, time_rounds
from sparsek.core.device import Card, card_named, card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.tracing import check_has_values, reads_values, untransformed
from sparsek.engine.call import transforms
from sparsek.engine.plan.plan import time_text
from sparsek.products.formats.base import check_finite
from sparsek.products.formats.convert import SCOPES, Scope
from sparsek.products.formats.pattern import block_sides
from sparsek.products.formats.quantized import SPARSE
from sparsek.products.ops.linear import Activation, linear
from sparsek.products.ops.weight_formats import (
    Format,
    Weight,
    WeightFormat,
    combinations,
    format_of,
    keeps_all,
    kept_norm,
    parts_of,
    predict,
    stored_fraction,
)

KEEP = (0.5, 0.25, 0.125)
BLOCK = (64, 128)
# Errors are computed on at most so many tokens of x; on a CPU on fewer, so that the dense product has these FLOPs.
ERROR_TOKENS = 4096
ERROR_FLOPS = 2e8
# On a GPU, calls rotate through copies of weight and x, so that no operand is in the cache.
MOST_COPIES = 8
ROUNDS = 5
INNER_MS = 5.0
SETTLE_MS = 100.0


@dataclass(frozen=True)
class Option:
    """One format for the weight, with its times and losses.

    Attributes:
        form: The format.
        kernel: The kernel that would run.
        predicted: The seconds of a call by the model of the kernel.
        measured: The median seconds of interleaved rounds; None if it was not timed.
        stored: Stored values over N * K.
        lossless: Whether the stored values are those of W: no nonzero is dropped, and none is rounded to FP8.
        kept_norm: ||stored values|| / ||W||, Frobenius; None for a W that is stored already.
        error: ||y - x @ W.T|| / ||x @ W.T|| on the given x, Frobenius; None for a W that is stored already.
        why_not: Why it cannot run; empty if it can.
    """

    form: WeightFormat
    kernel: str = ""
    predicted: float = math.inf
    measured: float | None = None
    stored: float = 0.0
    lossless: bool = False
    kept_norm: float | None = None
    error: float | None = None
    why_not: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the format, for example "BSR 128 25 %"."""
        return self.form.name

    @property
    def seconds(self) -> float:
        """The time that decides: measured if there is one, otherwise predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class Requirement:
    """What an option must satisfy to be chosen; without limits it must be lossless.

    Attributes:
        max_error: The largest error; None for no limit.
        min_norm: The smallest share of the norm kept, 0 to 1; None for no limit.
    """

    max_error: float | None = None
    min_norm: float | None = None

    def __post_init__(self) -> None:
        """Raise InvalidInput for limits that are no shares."""
        for name, most in (("max_error", math.inf), ("min_norm", 1)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, arguments.number(name, value, 0, most))

    def faults(self, option: Option) -> list[str]:
        """Return why the option may not be chosen; [] if it may. A loss that is not known satisfies no limit."""
        out = []
        if not self.words and not option.lossless:
            out.append("LOSSY")
        if self.max_error is not None and not (option.error is not None and option.error <= self.max_error):
            out.append(f"error {_number(option.error)} is not within {self.max_error:.3g}")
        if self.min_norm is not None and not (
            option.kept_norm is not None and option.kept_norm >= self.min_norm
        ):
            out.append(f"it keeps {_number(option.kept_norm)} of the norm, not {self.min_norm:.3g}")
        return out

    @property
    def words(self) -> str:
        """The limits, as text; "" without any."""
        parts = []
        if self.max_error is not None:
            parts.append(f"an error of at most {self.max_error:.3g}")
        if self.min_norm is not None:
            parts.append(f"at least {self.min_norm:.3g} of the norm kept")
        return " and ".join(parts)


@dataclass(frozen=True, eq=False, repr=False)
class FormatChoice:
    """The result of `sparsek.choose_format`: a weight in the chosen format. Call it as `choice(x, bias, activation)`.

    Attributes:
        shape: (N, K) of the weight.
        tokens: The number of tokens that it was chosen for. Calls with other numbers run too.
        dtype: The dtype of x, for example "bf16".
        card: The card of the times.
        options: All options that were considered.
        choice: The option that was chosen.
        bound: The limits of the choice.
        weight: W in the chosen format: a dense tensor, BSR, Semi24, BSR24 or Quantized, for `sparsek.linear` and
            `sparsek.save`.
    """

    shape: tuple[int, int]
    tokens: int
    dtype: str
    card: Card
    options: tuple[Option, ...]
    choice: Option
    bound: Requirement
    weight: Any = field(repr=False)

    def __copy__(self) -> FormatChoice:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FormatChoice:
        """Copy the weight, as its class does, and share the rest."""
        return replace(self, weight=deepcopy(self.weight, memo))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidInput(
            "a FormatChoice is not pickled (torch.save pickles too), for it holds times of this machine: save its "
            "weight with sparsek.save and pass it to sparsek.linear, or plan anew"
        )

    @property
    def is_measured(self) -> bool:
        """Whether times were measured; otherwise they are predictions."""
        return self.choice.measured is not None

    @property
    def losers(self) -> tuple[Option, ...]:
        """Every option that was not chosen."""
        return tuple(option for option in self.options if option is not self.choice)

    def __repr__(self) -> str:
        n, k = self.shape
        how = "measured" if self.is_measured else "predicted"
        return (
            f"FormatChoice(W [{n}, {k}] {self.dtype}, {self.choice.name} by {self.choice.kernel}: "
            f"{time_text(self.choice.seconds)} {how} on {self.card.name}, of {len(self.options)} options)"
        )

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return act(x @ W.T + bias) + residual with the chosen weight; see `sparsek.linear`."""
        return linear(x, self.weight, bias, activation, residual, kernel=self.choice.form.kernel)

    def explain(self) -> str:
        """Return the choice as text, with a line for every option: time, stored values, kept norm, error, why it lost.

        LOSSY marks an option that drops or rounds values, where no limit allows that, and a choice that does.
        """
        n, k = self.shape
        chosen, how = self.choice, "measured" if self.is_measured else "predicted"
        dense = next((each for each in self.options if each.form.format == "dense"), None)
        subject = f"of options with {self.bound.words}"
        if not self.bound.words:
            subject = "of options that lose nothing: no max_error= and no min_norm= was given"
        lead = ""
        if dense is not None and dense is not chosen and not dense.why_not:
            lead = f", {dense.seconds / chosen.seconds:.2f}x as fast as dense"
        lead += "" if chosen.lossless else ", LOSSY"
        unsure = self.card.source and not self.is_measured  # predictions rest on rates that were not measured
        lines = [
            f"y = x @ W.T   x [{self.tokens}, {k}], W [{n}, {k}] {self.dtype}, on {self.card.name}",
            f"  choice     {chosen.name} by {chosen.kernel}: {time_text(chosen.seconds)} {how}{lead}",
            f"  decided    by {how} time, {subject}",
            *([f"  rates      {self.card.caveat(self.dtype)}"] if unsure else []),
            "  "
            + self._line(("option", "kernel", "predicted", "measured", "stored", "norm", "error", "why not")),
        ]
        for option in self.options:
            if not option.why_not:
                mark = "*" if option is chosen else " "
                lines.append(f"{mark} {self._line((*_cells(option), self._lost(option)))}")
        lines.extend(
            f"  not        {each.name}: {'; '.join(each.why_not)}" for each in self.options if each.why_not
        )
        return "\n".join(lines)

    def _line(self, cells: Sequence[str]) -> str:
        """One line of the table; without the column of measured times if there are none."""
        name, kernel, predicted, measured, stored, norm, error, end = cells
        times = f"{predicted:>10} {measured:>10}" if self.is_measured else f"{predicted:>10}"
        first = max(len("option"), *(len(each.name) for each in self.options))
        second = max(len("kernel"), *(len(each.kernel) for each in self.options))
        return f"{name:<{first}}  {kernel:<{second}} {times} {stored:>7} {norm:>7} {error:>7}  {end}".rstrip()

    def _lost(self, option: Option) -> str:
        if option is self.choice:
            return ""
        faults = self.bound.faults(option)
        return "; ".join(faults) or f"{option.seconds / self.choice.seconds:.2f}x the time"


@reads_values("choose_format reads values", "call it outside")
def choose_format(
    x: Tensor | Sequence[int],
    W: Weight | torch.nn.Linear,
    *,
    keep: float | Sequence[float] = KEEP,
    block: int | tuple[int, int] | Sequence[int | tuple[int, int]] | None = None,
    scope: Scope = "row",
    formats: Format | Sequence[Format] | None = None,
    max_error: float | None = None,
    min_norm: float | None = None,
    device: str | None = None,
) -> FormatChoice:
    """Choose the fastest format for the weight of a layer y = x @ W.T, within a loss that you allow.

    Without `max_error` or `min_norm` only options that lose nothing may be chosen; `.explain()` shows the others,
    marked LOSSY. Every option is made, and multiplied with some tokens of x; while times are measured all are in memory
    at once. The result is outside autograd.

    Args:
        x: Activations [..., K] of the dtype of W on its device, as close to real ones as possible; or their shape, for
            N(0, 1) values.
        W: The weight [N, K]: a dense tensor or a torch.nn.Linear (without its bias), pruned by magnitude for each
            option; or a BSR, Semi24, BSR24 or Quantized, which then is the only option.
        keep: The share of the blocks to store, or several, 0 to 1. Every combination of `block` and `keep` is an
            option. BSR24 stores half of the values of a block.
        block: A block side, a pair (bm, bk), or a list of these; 64 and 128 by default.
        scope: Where `keep` chooses: in each block row ("row"), or in the whole matrix ("global"); see `BSR.from_dense`.
        formats: One or several of "dense", "semi24", "bsr" and "bsr24", and of these with the suffix "_fp8"; by default
            all that have kernels. FP8 rounds x too.
        max_error: The largest relative error of the output against the dense product on x, in Frobenius norms.
        min_norm: The smallest share of the norm of W that is kept, 0 to 1. 0 allows any loss.
        device: None: times are measured where W is on a GPU, and otherwise predicted for the H200. "cuda" or "cpu":
            measured there. The name of a card, for example "h200": predicted for it, on any machine.

    Returns:
        A FormatChoice: call it as a layer, print its `.explain()`, or take its `.weight`.

    Raises:
        InvalidInput: For operands that do not fit, and for NaN or Inf in a dense W.
        Unsupported: If no option is within the bound; the message has the reasons of each.

    Examples:
        >>> layer = torch.nn.Linear(512, 256, dtype=torch.bfloat16)
        >>> sk.choose_format((4096, 512), layer).choice.name
        'dense'
        >>> sk.choose_format((4096, 512), layer, formats="semi24", min_norm=0.5).choice.name
        '2:4'
    """
    transforms.refuse("choose_format")
    W = arguments.dense("W.weight", W.weight).detach() if isinstance(W, torch.nn.Linear) else W
    if isinstance(W, Tensor):
        arguments.tensor("W", W, dtypes.FLOATS)
    elif not isinstance(W, SPARSE):
        known = isinstance(W, torch.nn.Module) and hasattr(W, "weight")
        raise InvalidInput(
            f"W must be a dense torch.Tensor, torch.nn.Linear, BSR, Semi24, BSR24 or Quantized, got {type(W).__name__}"
            f"{'; pass layer.weight' if known else ''}"
        )
    arguments.supported("W", W.device)
    check_has_values("choose_format reads values", "call it outside", W, x)
    bound, blocks = Requirement(max_error, min_norm), _blocks(BLOCK if block is None else block)
    keeps = [arguments.number("keep", each, 0, 1) for each in _listed(keep)]
    asked: Any = None if formats is None else [arguments.text("formats", each) for each in _listed(formats)]
    card, timed = _where(W, device)
    dense = W if isinstance(W, Tensor) else None
    rows, tokens = _rows(W, x, timed)
    if dense is not None:
        check_finite("W", dense)
    arguments.one_of("scope", scope, SCOPES)
    candidates = [replace(form, scope=scope) for form in combinations(asked, blocks, keeps)]
    if dense is None:
        candidates = [format_of(W)]
    with torch.no_grad():
        options, weights = compare(W, rows, candidates, card, tokens, timed)
        choice = choose(options, bound)
        weight = next(weight for each, weight in zip(options, weights, strict=True) if each is choice)
        if weight is None:
            weight = W if dense is None else choice.form.convert(dense)
    shape = (W.shape[0], W.shape[1])
    return FormatChoice(shape, tokens, dtypes.shown(rows.dtype), card, tuple(options), choice, bound, weight)


def compare(
    W: Weight, x: Tensor, candidates: Sequence[WeightFormat], card: Card, tokens: int, timed: bool
) -> tuple[list[Option], list[Any]]:
    """The options of `consider`, with measured times if `timed`, and the weights."""
    found = list(consider(W, x, candidates, card, tokens, keep_weights=timed))
    times = measure(found, x, card) if timed else {}
    options = [
        replace(option, measured=times[at].median / 1e3) if at in times else option
        for at, (option, _) in enumerate(found)
    ]
    return options, [weight for _, weight in found]


def consider(
    W: Weight,
    x: Tensor,
    candidates: Sequence[WeightFormat],
    card: Card,
    tokens: int = 0,
    *,
    keep_weights: bool = True,
) -> Iterator[tuple[Option, Any]]:
    """Each option for x [T, K], before it is timed, and W in its format.

    None in place of the weight if it cannot run, and without `keep_weights`. A W that is no dense tensor is used as it
    is. `tokens`: the number that predictions are for, if x is a sample; 0: T.
    """
    tokens = tokens or x.shape[0]
    dense = W if isinstance(W, Tensor) else None
    exact = None if dense is None else _Exact.of(dense, x)
    # By format without FP8: W in it, the share of the norm that it keeps, and whether it keeps every nonzero.
    made: dict[WeightFormat, tuple[Any, float, bool]] = {}
    for form in candidates:
        why = form.why_not(dense) if dense is not None else []
        if why:
            yield Option(form, why_not=tuple(why)), None
            continue
        weight: Any = W
        if dense is not None:
            if form.plain not in made:
                plain: Any = form.plain.convert(dense)
                made[form.plain] = plain, kept_norm(plain, dense), keeps_all(plain, dense)
            weight = form.convert(dense, made[form.plain][0]) if form.is_fp8 else made[form.plain][0]
        try:
            found = predict(weight, tokens, x.dtype, card, form.kernel)
            error = None if exact is None else exact.error(form, weight)
        except Unsupported as refused:
            why = [f"{name}: {'; '.join(reasons)}" for name, reasons in refused.reasons.items()]
            yield Option(form, why_not=tuple(why or [str(refused)])), None
            continue
        _, kept, whole = (W, None, True) if dense is None else made[form.plain]
        lossless = whole and (dense is None or not form.is_fp8)
        stored = stored_fraction(weight)
        option = Option(form, found.kernel, found.seconds, None, stored, lossless, kept, error)
        yield option, weight if keep_weights else None


def measure(
    found: Sequence[tuple[Option, Any]],
    x: Tensor,
    card: Card,
    rounds: int = ROUNDS,
    inner_ms: float | None = None,
) -> dict[int, Times]:
    """Times of x [T, K] @ W.T by `sparsek.linear` for the options of `consider`, by index, in interleaved rounds.

    `inner_ms`: the milliseconds of a batch of calls.
    """
    calls = {
        str(at): _rotating(option.form, weight, x, card)
        for at, (option, weight) in enumerate(found)
        if weight is not None
    }
    if not calls:
        return {}
    heat = next(iter(calls))
    times = time_rounds(
        calls, device=x.device, rounds=rounds, inner_ms=inner_ms or INNER_MS, settle_ms=SETTLE_MS, heat=heat
    )
    return {int(name): each for name, each in times.items()}


def choose(options: Sequence[Option], bound: Requirement) -> Option:
    """Return the fastest option within the bound. Raises Unsupported with the reasons of each if there is none."""
    able = [each for each in options if not each.why_not and not bound.faults(each)]
    if not able:
        what = f"no option has {bound.words}"
        if not bound.words:
            what = (
                "no option runs and loses nothing; max_error= and min_norm= allow a loss, and min_norm=0 takes the "
                "fastest option, whatever it loses"
            )
        raise Unsupported(what, {each.name: each.why_not or bound.faults(each) for each in options})
    return min(able, key=lambda each: each.seconds)


def _where(w: Weight, device: str | None) -> tuple[Card, bool]:
    """The card of the times, and whether they are measured."""
    if device is None:
        return (card_of(w.device), True) if w.device.type == "cuda" else (card_named("h200"), False)
    if arguments.text("device", device) == "cpu" or device.startswith("cuda"):
        if arguments.device("device", device).type != w.device.type:
            raise InvalidInput(
                f"W is on {w.device}; times of {device} are measured where W is, W.to({device!r})"
            )
        return card_of(w.device), True
    return card_named(device), False


def _blocks(block: Any) -> list[int | tuple[int, int]]:
    """One side, a pair (bm, bk), or a list of both."""
    is_pair = isinstance(block, tuple) and not any(isinstance(side, (list, tuple)) for side in block)
    made = [(each, block_sides(each)) for each in ([block] if is_pair else _listed(block))]
    return [sides if isinstance(each, (list, tuple)) else sides[0] for each, sides in made]


def _listed(value: Any) -> list[Any]:
    """The items of a list or tuple; anything else is the only one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _rows(w: Weight, x: Any, timed: bool) -> tuple[Tensor, int]:
    """x as [T, K], and the number of tokens. Of a shape that is not timed, fewer are drawn."""
    if len(w.shape) != 2:
        raise InvalidInput(f"W must be [N, K], got {list(w.shape)}")
    if not isinstance(x, (Tensor, list, tuple)):
        raise InvalidInput(
            f"x must be a torch.Tensor [..., {w.shape[1]}] or its shape, like (4096, {w.shape[1]}); got {shown(x)}"
        )
    if isinstance(x, Tensor):
        shape = tuple(arguments.dense("x", x).shape)
    else:
        shape = tuple(arguments.integer("a side of x", side) for side in x)
    if not shape or shape[-1] != w.shape[1] or not math.prod(shape) or not w.shape[0]:
        raise InvalidInput(
            f"x is {list(shape)} and W {list(w.shape)}: the last dim of x must be {w.shape[1]}, and no side 0"
        )
    tokens = arguments.integer("the number of tokens of x", math.prod(shape[:-1]), most=INT32_MAX)
    if isinstance(x, Tensor):
        if x.device != w.device or (x.dtype != w.dtype and w.dtype in dtypes.NAMES):
            raise InvalidInput(
                f"x is {x.dtype} on {x.device} and W {w.dtype} on {w.device}; they must be of one dtype on one device"
            )
        return x.detach().reshape(tokens, shape[-1]), tokens
    dtype = w.dtype if w.dtype in dtypes.NAMES else torch.bfloat16
    generator = torch.Generator(device=w.device).manual_seed(0)
    drawn = tokens if timed else min(tokens, ERROR_TOKENS)
    # Outside of a trace by make_fx, which torch 2.11 refuses for a generator.
    return untransformed(
        lambda: torch.randn(drawn, shape[-1], dtype=dtype, device=w.device, generator=generator),
        w if isinstance(w, Tensor) else w.values,
    ), tokens


@dataclass(frozen=True)
class _Exact:
    """Some tokens of x, and their dense product in float32 (float64 for float64)."""

    some: Tensor
    product: Tensor

    @classmethod
    def of(cls, dense: Tensor, x: Tensor) -> _Exact:
        limit = ERROR_TOKENS
        if not x.is_cuda:
            limit = min(limit, max(8, int(ERROR_FLOPS / (2.0 * dense.numel()))))
        some = x[:: -(-x.shape[0] // limit)]
        wide = torch.promote_types(dense.dtype, torch.float32)
        return cls(some, some.to(wide) @ dense.to(wide).T)

    def error(self, form: WeightFormat, weight: Any) -> float:
        """||linear(x, weight) - x @ W.T|| / ||x @ W.T||."""
        off = linear(self.some, weight, kernel=form.kernel).to(self.product.dtype) - self.product
        wrong, whole = (
            float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in (off, self.product)
        )
        return wrong / whole if whole else (0.0 if wrong == 0 else math.inf)


def _rotating(form: WeightFormat, weight: Any, x: Tensor, card: Card) -> Callable[[], object]:
    """A call of `sparsek.linear` that rotates through copies of its operands."""
    kernel = form.kernel
    turns = itertools.cycle(
        [lambda w=w, x=x: linear(x, w, kernel=kernel) for w, x in copies(weight, x, card)]
    )

    def call() -> object:
        return next(turns)()

    return call


def copies(weight: Any, x: Tensor, card: Card) -> list[tuple[Any, Tensor]]:
    """Weight and x; on a GPU at most eight copies of both, which together fill two caches."""
    count = 1
    if x.is_cuda:
        size = sum(part.nbytes for part in (*parts_of(weight), x))
        count = max(1, min(MOST_COPIES, -(-2 * card.l2_bytes // max(1, size))))
    return [(weight, x), *((weight.clone(), x.clone()) for _ in range(count - 1))]


def _cells(option: Option) -> tuple[str, ...]:
    return (
        option.name,
        option.kernel,
        time_text(option.predicted),
        "" if option.measured is None else time_text(option.measured),
        _share(option.stored),
        _share(option.kept_norm),
        _number(option.error) if option.error is not None else "",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.3g} %"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"
