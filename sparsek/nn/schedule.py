"""PatternSchedule: when the layers of a model take another pattern in training, and how many blocks they then store."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.nn.agreement import check_patterns
from sparsek.nn.regrow import (
    Optimizers,
    Regrown,
    dense_gradients,
    is_recorded,
    is_sharded,
    ranks_of,
    ready,
    swap,
)

# What a callback of a Trainer is, by the package that has it.
CALLBACKS = (
    ("transformers", "transformers.trainer_callback", ("TrainerCallback", "ExportableState")),
    ("lightning", "lightning.pytorch.callbacks", ("Callback",)),
    ("pytorch_lightning", "pytorch_lightning.callbacks", ("Callback",)),
)


class PatternSchedule:
    """Prune the layers of a model step by step, swap their blocks, or both, while it trains.

    With `keep`, the share of stored blocks of each layer falls to it by a cubic curve from that of now (Zhu and Gupta
    2017, arXiv:1710.01878). With `swapped`, this share of the stored blocks, those of smallest norm, gives way to
    others; it falls to 0 by a cosine. By gradient this is RigL (Evci et al. 2020, arXiv:1911.11134), at random SET
    (Mocanu et al. 2018, arXiv:1707.04780), with blocks in place of weights. With `keep` and by="union" it is the prune
    and grow of BLaST (Okanovic et al. 2025, arXiv:2507.03117): beside the blocks of largest norm, as many as on the
    curve, as many of largest gradient are stored, until the last change drops them. The state of optimizers is carried
    as by `set_pattern`. DistributedDataParallel follows: a change makes its reducer anew. FSDP2 follows without `keep`.

    Args:
        model: A BlockSparseLinear, or a module with some.
        end: The step of the last change.
        begin: The step of the first change. The first call of `step` is step 1.
        every: The number of steps from one change to the next.
        keep: The share of all blocks that each layer stores in the end, 0 to 1. None: as many as now.
        swapped: The share of the stored blocks that the first change swaps, 0 to 1.
        by: How new blocks are chosen: "gradient" or "random", as in `BlockSparseLinear.grow_`, or "union", with `keep`
            and without `swapped`.
        generator: A torch.Generator on the device of the model, for "random"; torch's global one by default.

    Raises:
        InvalidInput: For arguments outside these ranges, for neither `keep` nor `swapped`, for a `keep` above what all
            layers store, and for a model without a BlockSparseLinear.

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
        by: Literal["gradient", "random", "union"] = "gradient",
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
        self.by = arguments.one_of("by", by, ("gradient", "random", "union"))
        if self.by == "union" and (self.keep is None or self.swapped):
            raise InvalidInput('by="union" stores blocks by `keep`; give keep, and no swapped')
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
        # A schedule that goes on has reached its share, rounded to blocks.
        most = max(x.pattern.density + 1 / max(1, math.prod(x.pattern.grid)) for x in self.layers.values())
        if self.keep is not None and not self.swapped and most < self.keep:
            raise InvalidInput(
                f"keep is {self.keep:g}, and no layer stores more than {max(self.first.values()):.3g} of its blocks: "
                "no pattern would change"
            )

    def share(self, name: str, step: int | None = None) -> float:
        """Return the share of all blocks that a layer stores after a step, that of now by default.

        With by="union", those of largest norm.
        """
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
                not counted then. Layers that had no part in the backward pass swap nothing. At the first step under
                DistributedDataParallel also where the patterns of ranks differ.
        """
        step = self.steps + 1
        due, grows = self._is_due(step), self._grows(step)
        for layer in () if self.steps else self.layers.values():
            values, _ = ready(layer)  # now rather than at the first change
            if self.keep is not None and is_sharded(values):
                raise InvalidInput(
                    "this schedule with keep changes the number of blocks, and FSDP2 keeps room for those that were "
                    "sharded; use swapped without keep, or DistributedDataParallel"
                )
        groups = dict.fromkeys(layer._history.ranks() for layer in self.layers.values())
        for group in () if self.steps else filter(None, groups):  # whose broadcasts may be turned off
            check_patterns(self.model, group)
        if grows and not any(map(is_recorded, self.layers.values())):
            raise InvalidInput(
                f"step {step} grows blocks by gradient, and none is recorded; compute the loss and its backward pass "
                'under `with schedule.gradients():`, not compiled, or give by="random"'
            )
        before = {name: layer.pattern.nnzb for name, layer in self.layers.items()} if due else {}
        for name, layer in self.layers.items() if due else ():
            cells = math.prod(layer.pattern.grid)
            share = self.share(name, step)
            count = max(1, round(share * cells)) if share else 0
            new: int | None = round(self._swapped(step) * count)
            if grows and not is_recorded(layer) and not ranks_of(layer):
                new = 0
            elif grows and self.by == "union":
                new = None
            swap(layer, min(count, cells), new, self.by, optimizer, self.generator)
        _renew([self.layers[name] for name, nnzb in before.items() if self.layers[name].pattern.nnzb != nnzb])
        self.steps = step
        return due

    def callback(self) -> Any:
        """Return a callback for `Trainer(..., callbacks=[schedule.callback()])` of transformers or Lightning.

        It is this schedule: it records `gradients` where a step needs them, calls `step` after each of the optimizer,
        not after each part of an accumulated batch, and a checkpoint of the Trainer has its state. Resume with a model
        and a schedule made as at first.

        Raises:
            InvalidInput: If neither transformers nor Lightning has been imported.
        """
        bases = tuple(_callbacks())
        if not bases:
            raise InvalidInput(
                "neither transformers nor lightning has been imported; import the Trainer before, or call schedule.step"
            )
        return type("PatternScheduleCallback", (TrainerHooks, *bases), {"schedule": self})()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the first densities, and the state of the generator if there is one."""
        state = {"steps": self.steps, "first": dict(self.first)}
        if self.generator is not None:
            state["generator"] = bytes(self.generator.get_state().tolist()).hex()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned for a model with layers of the same names.

        Raises:
            InvalidInput: For another state.
        """
        first = state.get("first") if isinstance(state, Mapping) else None
        if (
            not isinstance(first, Mapping)
            or {*state} - {"generator"} != {"steps", "first"}
            or {*first} != {*self.first}
        ):
            raise InvalidInput("state is not that of a PatternSchedule for layers of these names")
        steps = arguments.integer("steps", state["steps"])
        densities = {name: arguments.number(name, x, 0, 1) for name, x in first.items()}
        if "generator" in state:
            try:
                codes = torch.frombuffer(bytearray.fromhex(state["generator"]), dtype=torch.uint8)
                self.generator.set_state(codes)  # type: ignore[union-attr]
            except (AttributeError, TypeError, ValueError, RuntimeError):
                raise InvalidInput(
                    "state has that of a generator of another kind; make the schedule with a generator as the saved one"
                ) from None
        self.first, self.steps = densities, steps

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
        chosen = self.by == "union" or (self.by == "gradient" and self.swapped > 0)
        return chosen and self._is_due(step) and step < self.end


class TrainerHooks:
    """What the Trainers of transformers and Lightning call in a callback: see `PatternSchedule.callback`."""

    schedule: PatternSchedule

    def __init__(self) -> None:
        self.recording: ExitStack | None = None
        self.seen = 0

    def begin(self) -> None:
        """Record what the change of this step needs, before its first forward pass."""
        if self.recording is None:
            self.recording = ExitStack()
            self.recording.enter_context(self.schedule.gradients())

    def end(self) -> None:
        """Record no longer."""
        if self.recording is not None:
            self.recording.close()
        self.recording = None

    def on_train_end(self, *args: Any, **more: Any) -> None:
        """As of both."""
        self.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """As of transformers. The state of a checkpoint has what `state` returned."""
        self.end()
        found = (state.stateful_callbacks or {}).get(type(self).__name__, [])
        states = [each["attributes"]["saved"] for each in (found if isinstance(found, list) else [found])]
        own = [each for each in states if {*each["first"]} == {*self.schedule.first}]
        for each in own or states[:1]:  # which is then refused
            self.schedule.load_state_dict(each)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """As of transformers."""
        self.begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """As of transformers."""
        self.end()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        """As of transformers: what makes the callback anew."""
        return {"args": {}, "attributes": {"saved": self.schedule.state_dict()}}

    @property
    def saved(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.schedule.state_dict()

    @saved.setter
    def saved(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """As of Lightning."""
        self.end()
        self.seen = trainer.global_step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """As of Lightning."""
        self.begin()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """As of Lightning, which counts the steps of optimizers."""
        if trainer.global_step != self.seen:
            self.seen = trainer.global_step
            self.end()
            self.schedule.step()

    @property
    def state_key(self) -> str:
        """As of Lightning: the name of the state in a checkpoint."""
        return f"PatternSchedule of {', '.join(self.schedule.layers)}"

    def state_dict(self) -> dict[str, Any]:
        """As of Lightning."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of Lightning."""
        self.schedule.load_state_dict(state)


def _callbacks() -> Iterator[type]:
    """The classes of callbacks of the packages that have been imported."""
    for package, module, names in CALLBACKS:
        if package in sys.modules:
            with suppress(ImportError):
                found = importlib.import_module(module)
                yield from (getattr(found, name) for name in names)


def _renew(layers: list[Any]) -> None:
    """Make the reducers of DistributedDataParallel anew, as for its copy, which wait for as many blocks as before."""
    refs = {layer._history.wrapper for layer in layers if layer._history.ranks() is not None}
    for wrapper in filter(None, (ref() for ref in refs)):
        with suppress(
            RuntimeError
        ):  # not of the default process group: its next call raises, and names the cure
            wrapper.__setstate__(wrapper.__getstate__())
            wrapper._static_graph_delay_allreduce_enqueued = False  # by the reducer of before
            for hook, state in wrapper._comm_hooks:
                dist._register_comm_hook(wrapper.reducer, state, hook)
