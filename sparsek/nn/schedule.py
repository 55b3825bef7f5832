"""PatternSchedule: when the layers of a model take another pattern in training, and how many blocks they then store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.nn.regrow import Optimizers, Regrown, dense_gradients, is_recorded, swap


class PatternSchedule:
    """Prune the layers of a model step by step, swap their blocks, or both, while it trains.

    With `keep`, the share of stored blocks of each layer falls to it by a cubic curve from that of now (Zhu and Gupta
    2017, arXiv:1710.01878). With `swapped`, this share of the stored blocks, those of smallest norm, gives way to
    others; it falls to 0 by a cosine. By gradient this is RigL (Evci et al. 2020, arXiv:1911.11134), at random SET
    (Mocanu et al. 2018, arXiv:1707.04780), with blocks in place of weights. The state of optimizers is carried as by
    `set_pattern`.

    Args:
        model: A BlockSparseLinear, or a module with some.
        end: The step of the last change.
        begin: The step of the first change. The first call of `step` is step 1.
        every: The number of steps from one change to the next.
        keep: The share of all blocks that each layer stores in the end, 0 to 1. None: as many as now.
        swapped: The share of the stored blocks that the first change swaps, 0 to 1.
        by: How new blocks are chosen, "gradient" or "random": see `BlockSparseLinear.grow_`.
        generator: A torch.Generator on the device of the model, for "random"; torch's global one by default.

    Raises:
        InvalidInput: For arguments outside these ranges, for neither `keep` nor `swapped`, and for a model without a
            BlockSparseLinear.

    Examples:
        >>> layer = sk.nn.BlockSparseLinear.random(64, 128, 16, 0.5)
        >>> schedule = sk.nn.PatternSchedule(layer, end=10, every=5, keep=0.25)
        >>> [schedule.step() for _ in range(10)].count(True), layer.weight.nnzb
        (3, 8)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        end: int,
        begin: int = 1,
        every: int = 100,
        keep: float | None = None,
        swapped: float = 0.0,
        by: Literal["gradient", "random"] = "gradient",
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module")
        self.model = model
        self.layers: dict[str, Any] = {name: x for name, x in model.named_modules() if isinstance(x, Regrown)}
        if not self.layers:
            raise InvalidInput(f"{type(model).__name__} has no BlockSparseLinear whose pattern could change")
        self.begin = arguments.integer("begin", begin, 1)
        self.end = arguments.integer("end", end, self.begin)
        self.every = arguments.integer("every", every, 1)
        self.keep = None if keep is None else arguments.number("keep", keep, 0, 1)
        self.swapped = arguments.number("swapped", swapped, 0, 1)
        self.by = arguments.one_of("by", by, ("gradient", "random"))
        if self.keep is None and not self.swapped:
            raise InvalidInput(
                "neither keep nor swapped is given, and no pattern would change; give one or both"
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"generator is {arguments.shown(generator)}; it must be a torch.Generator or None"
            )
        self.generator = generator
        self.steps = 0
        self.first = {name: x.pattern.density for name, x in self.layers.items()}

    def share(self, name: str, step: int | None = None) -> float:
        """Return the share of all blocks that a layer stores after a step, that of now by default."""
        if not isinstance(name, str) or name not in self.first:
            layers = ", ".join(map(repr, self.first))
            raise InvalidInput(f"name is {arguments.shown(name)}; the layers are {layers}")
        first = self.first[name]
        left = 1 - self._progress(self.steps if step is None else arguments.integer("step", step))
        return first if self.keep is None else min(first, self.keep + (first - self.keep) * left**3)

    def gradients(self) -> AbstractContextManager[None]:
        """Return a context for the forward and backward passes of a step, which records what its change needs.

        It records the gradients of all blocks where the next `step` grows by gradient, and else does nothing.
        """
        return dense_gradients(self.model) if self._grows(self.steps + 1) else nullcontext()

    def step(self, optimizer: Optimizers = None) -> bool:
        """Count a step, after that of the optimizer, and change the patterns where it is due. Return whether it was.

        Args:
            optimizer: As for `BlockSparseLinear.set_pattern`.

        Raises:
            InvalidInput: As `set_pattern`, and where blocks grow by gradient and `gradients` recorded none. The step is
                not counted then. Layers that had no part in the backward pass swap nothing.
        """
        step = self.steps + 1
        due, grows = self._is_due(step), self._grows(step)
        if grows and not any(map(is_recorded, self.layers.values())):
            raise InvalidInput(
                f"step {step} grows blocks by gradient, and none is recorded; compute the loss and its backward pass "
                'under `with schedule.gradients():`, not compiled, or give by="random"'
            )
        for name, layer in self.layers.items() if due else ():
            cells = math.prod(layer.pattern.grid)
            share = self.share(name, step)
            count = max(1, round(share * cells)) if share else 0
            new = 0 if grows and not is_recorded(layer) else round(self._swapped(step) * count)
            swap(layer, min(count, cells), new, self.by, optimizer, self.generator)
        self.steps = step
        return due

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the first densities, to resume a run."""
        return {"steps": self.steps, "first": dict(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned for a model with layers of the same names.

        Raises:
            InvalidInput: For another state.
        """
        first = state.get("first") if isinstance(state, Mapping) else None
        if not isinstance(first, Mapping) or {*state} != {"steps", "first"} or {*first} != {*self.first}:
            raise InvalidInput("state is not that of a PatternSchedule for layers of these names")
        steps = arguments.integer("steps", state["steps"])
        self.first = {name: arguments.number(name, x, 0, 1) for name, x in first.items()}
        self.steps = steps

    def _progress(self, step: int) -> float:
        """How far a step is from `begin` to `end`, 0 to 1."""
        if step >= self.end:
            return 1.0
        return max(0, step - self.begin) / (self.end - self.begin)

    def _is_due(self, step: int) -> bool:
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)

    def _swapped(self, step: int) -> float:
        return self.swapped / 2 * (1 + math.cos(math.pi * self._progress(step)))

    def _grows(self, step: int) -> bool:
        return self._is_due(step) and self.by == "gradient" and step < self.end and self.swapped > 0
