"""Config "auto": the planner picks the form of each layer, under a bound on its error or for a wanted speed.

The forms are those of `choose_format`: BSR and BSR24 in blocks of 64 and 128 with a half, a quarter and an eighth of
them, 2:4, each in the dtype of the weight and in FP8, and dense in FP8. Times are predictions for a card. Errors are
given: of products with normally distributed inputs, or of the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.device import CARDS, Card, card_named, card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.models.config import AUTO, BlockSemiSparse, BlockSparse, Float8, LayerConfig, SemiSparse, form_of
from sparsek.models.report import LayerRow
from sparsek.nn.experts import split_rows
from sparsek.nn.forms import placeholder
from sparsek.products.ops.choose import BLOCK, KEEP, Option, consider
from sparsek.products.ops.weight_formats import WeightFormat, predict

DENSE = WeightFormat("dense")
NO_EXPERTS = f'is packed experts, for which "{AUTO}" picks nothing; name a config'
ROWS = 512  # of normally distributed inputs, for errors
PLAIN: tuple[LayerConfig, ...] = (
    SemiSparse(),
    *(kind(block, keep) for kind in (BlockSparse, BlockSemiSparse) for block in BLOCK for keep in KEEP),
)
CONFIGS: tuple[LayerConfig, ...] = (*PLAIN, Float8(), *(Float8(each) for each in PLAIN))
HALVINGS = 60  # of the interval of prices


class Pick(NamedTuple):
    """What a layer becomes: a config, None to stay dense; the reason; and its expected error."""

    config: LayerConfig | None
    why: str
    error: float


@dataclass
class Auto:
    """What "auto" is to reach, on a card."""

    max_error: float | None
    speedup: float | None
    card: Card
    tokens: int

    def __post_init__(self) -> None:
        self._times: dict[Any, dict[WeightFormat, float]] = {}

    @classmethod
    def of(
        cls,
        config: Any,
        max_error: float | None,
        speedup: float | None,
        card: Card | None,
        tokens: int,
        weight: Any,
    ) -> Auto | None:
        """That of the arguments of a call; None if no rule is "auto". `weight` is one of the model's.

        Raises InvalidInput for a bound without "auto", and "auto" without a bound.
        """
        values = config.values() if isinstance(config, Mapping) else (config,)
        bounds = {"max_error": max_error, "speedup": speedup}
        given = [name for name, each in bounds.items() if each is not None]
        if not any(isinstance(each, str) for each in values):
            if given:
                raise InvalidInput(f'{given[0]} is for the config "{AUTO}", which no rule has')
            return None
        if not given:
            raise InvalidInput(
                f'"{AUTO}" chooses within a loss that you allow: give max_error, such as 0.1, or speedup, such as 1.5'
            )
        if max_error is not None:
            max_error = arguments.number("max_error", max_error, 0)
        if speedup is not None:
            speedup = arguments.number("speedup", speedup, 1)
        return cls(max_error, speedup, card or usual_card(weight), tokens)

    def options(
        self, weight: Tensor, fits: Callable[[LayerConfig], bool], error: Callable[[LayerConfig], float]
    ) -> list[Option]:
        """The dense weight [M, K], and every form of it that is predicted to be faster, with its error."""
        dense = predict(weight, self.tokens, weight.dtype, self.card).seconds
        times = self._seconds(weight, [each for each in CONFIGS if fits(each)])
        found = [Option(DENSE, "torch", dense, error=0.0, lossless=True)]
        for config in CONFIGS:
            form = form_of(config)
            if times.get(form, dense) < dense:
                found.append(Option(form, predicted=times[form], error=error(config)))
        return found

    def choose(self, options: Mapping[str, list[Option]]) -> dict[str, Pick]:
        """The pick for each layer: the fastest form in the bound, or those of least error that reach the speed.

        With a wanted speed the sum of the squares of the errors is near the least.

        Raises:
            InvalidInput: If no choice reaches the wanted speed.
        """
        bound = float("inf") if self.max_error is None else self.max_error
        able = {
            name: [
                each
                for each in found
                if each.error is not None and math.isfinite(each.error) and each.error <= bound
            ]
            for name, found in options.items()
        }
        if self.speedup is None:
            best = {name: min(found, key=lambda each: each.seconds) for name, found in able.items()}
        else:
            best = self._fast_enough(able, self.speedup)
        return {name: self._pick(each, options[name], len(able[name])) for name, each in best.items()}

    def _fast_enough(self, able: Mapping[str, list[Option]], speedup: float) -> dict[str, Option]:
        """The options of least squared error whose times are those of the dense layers over `speedup`."""
        dense = sum(found[0].seconds for found in able.values())
        least = sum(min(each.seconds for each in found) for found in able.values())
        if least * speedup > dense:
            within = "" if self.max_error is None else f" within an error of {self.max_error:.3g}"
            raise InvalidInput(
                f"speedup={speedup:.3g} is out of reach: the fastest forms of these {len(able)} layers{within} are "
                f"predicted at {dense / max(least, 1e-30):.3g}x on {self.card.name} with {self.tokens} tokens"
            )

        def lost(each: Option) -> float:
            return (each.error or 0.0) ** 2

        def at(price: float) -> dict[str, Option]:
            """What each layer takes if time has a price, of the squares of errors."""
            return {
                name: min(found, key=lambda each: (lost(each) + price * each.seconds / dense, each.seconds))
                for name, found in able.items()
            }

        def slack(found: Mapping[str, Option]) -> float:
            return dense / speedup - sum(each.seconds for each in found.values())

        low, high = 0.0, 1.0
        while slack(at(high)) < 0:
            low, high = high, 4 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if slack(at(middle)) >= 0 else (middle, high)
        best = at(high)
        while True:  # spend what is left
            room = slack(best)
            better = [
                (lost(best[name]) - lost(each), name, each)
                for name, found in able.items()
                for each in found
                if lost(each) < lost(best[name]) and each.seconds - best[name].seconds <= room
            ]
            if not better:
                return best
            _, name, each = max(better, key=lambda found: found[0])
            best[name] = each

    def _pick(self, chosen: Option, options: list[Option], able: int) -> Pick:
        dense = options[0]
        error = chosen.error or 0.0
        if chosen.form != DENSE:
            how = f"{dense.seconds / chosen.seconds:.2f}x at an error of {error:.3g}"
            if self.speedup is None:
                how = f"the fastest of {able} forms within an error of {self.max_error:.3g}: {how}"
            else:
                how = f"for {self.speedup:.3g}x in all: {how}"
            return Pick(next(each for each in CONFIGS if form_of(each) == chosen.form), how, error)
        faster = [each for each in options if each is not dense]
        if not faster:
            return Pick(None, f"no form is predicted to be faster on {self.card.name}", 0.0)
        if self.speedup is not None and able > 1:
            return Pick(None, f"other layers give {self.speedup:.3g}x at a smaller error", 0.0)
        if self.max_error is None:
            return Pick(None, "no faster form has a finite error", 0.0)
        near = min(faster, key=lambda each: each.error if each.error is not None else float("inf"))
        return Pick(
            None,
            f"no faster form is within an error of {self.max_error:.3g}; {near.name}, "
            f"{dense.seconds / near.seconds:.2f}x, has {near.error:.3g}",
            0.0,
        )

    def _seconds(self, weight: Tensor, configs: list[LayerConfig]) -> dict[WeightFormat, float]:
        """The predicted times of forms of weights like this one; those that no kernel runs are left out.

        Blocks are chosen by rows, so that a pattern with as many in each row stands for any.
        """
        key = weight.shape, weight.dtype, tuple(configs)
        if key not in self._times:
            found: dict[WeightFormat, float] = {}
            for form in map(form_of, configs):
                try:
                    known = self.card in CARDS.values()
                    like: Any = (
                        placeholder(weight, form) if known else form.convert(beside(weight, self.card))
                    )
                    found[form] = predict(like, self.tokens, weight.dtype, self.card, form.kernel).seconds
                except Unsupported:
                    continue
            self._times[key] = found
        return self._times[key]


def wanted_card(card: Any) -> Card | None:
    """The card of an argument: a name, "cuda", or None."""
    if isinstance(card, str) and card.startswith("cuda"):
        return card_of(arguments.device("card", card))
    return None if card is None else card_named(card)


def usual_card(weight: Any) -> Card:
    """The GPU that a weight is on, else this machine's, else the H200."""
    if weight is not None and weight.is_cuda:
        return card_of(weight.device)
    return card_of(torch.device("cuda")) if torch.cuda.is_available() else card_named("h200")


def beside(weight: Any, card: Card) -> Any:
    """A weight where it is planned: for a GPU without facts in CARDS on that GPU."""
    return weight if card in CARDS.values() or weight.device.type == "cuda" else weight.to("cuda")


def timed(
    row: LayerRow, weight: Any, dtype: torch.dtype, form: WeightFormat, card: Card, tokens: int, routes: int
) -> LayerRow:
    """A row with the predicted times of a weight in a format and of a dense one.

    Of packed experts, those of all, with an equal share of the tokens each; `routes`: the experts of a token.
    """
    count = row.shape[0] if len(row.shape) == 3 else 1
    if count > 1:
        weight, tokens = split_rows(weight, count)[0], max(1, tokens * routes // count)
    like = torch.empty(weight.shape, dtype=dtype, device="meta")
    dense = predict(like, tokens, dtype, card).seconds
    row = replace(row, dense_seconds=count * dense, dtype=dtypes.name(dtype))
    try:
        seconds = predict(beside(weight, card), tokens, dtype, card, form.kernel).seconds
    except Unsupported as error:
        told = [
            f"{k}: {'; '.join(why)}" for k, why in error.reasons.items() if not k.startswith("reference.")
        ]
        cure = "" if dtype in dtypes.LOW else "; cast the model to bf16"
        slow = f"no kernel for GPUs is predicted to beat plain torch in {row.dtype} on {card.name}{cure}"
        why = "; ".join(told) or slow
        return replace(row, seconds=None, why="; ".join(filter(None, (row.why, why))))
    return replace(row, seconds=count * seconds)


def error_of(weight: Tensor, card: Card) -> Callable[[LayerConfig], float]:
    """The error of the products of a dense weight [M, K] in a config with normally distributed inputs."""
    draw = torch.Generator(weight.device).manual_seed(0)
    shape = (ROWS, weight.shape[1])
    x = torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=draw)

    def error(config: LayerConfig) -> float:
        (option, _), *_ = consider(weight, x, [form_of(config)], card, keep_weights=False)
        return float("inf") if option.error is None else option.error

    return error
