"""Sparse attention in the models of Hugging Face diffusers: one line puts a policy into a transformer.

    from sparsek.integrations import diffusers
    sparse = diffusers.use(pipe, sparsek.policies.SubBlock(density=0.25), skip_first_steps=10, skip_layers=(0, 1))
    ...
    sparse.undo()

Each attention layer keeps its own processor: projections, norms and rotary embeddings are the model's. Only its call of
attention is replaced. Processors are known by their class (`diffusers_layers.FORMS`); layers of others stay dense.
Needs diffusers 0.41 or newer; tested with 0.42.1.

Models compile with a policy as without one. Compiled code reads of a step only whether it is sparse, so that there is
one compilation for dense steps and one for sparse ones.
"""

from __future__ import annotations

import collections
import functools
import re
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskRule
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.config import require_fit
from sparsek.integrations.diffusers_layers import FORMS, Around, Form, Processor, form_of, with_policy

BLOCK = re.compile(r"(?!text_)\w+\.\d+")  # a block of the transformer's own, which is not of its text encoder
MOST_STEPS = 10_000  # that may stay dense


def use(
    model: Any,
    policy: MaskRule | BlockMask,
    skip_first_steps: int = 0,
    skip_layers: int | Collection[int] = (),
    *,
    min_tokens: int = 0,
    scheduler: Any = None,
    text: Literal["first", "last"] | None = None,
) -> Sparse:
    """Let the self-attention layers of a diffusion transformer visit the blocks that a policy chooses.

    Cross-attention, layers of text encoders, skipped steps and skipped layers stay as they are, and so do layers whose
    processor is not known. Where video and text are one sequence, as in HunyuanVideo and in Flux's single-stream
    layers, the policy chooses among the video alone; all tokens see the text, and the text sees all.

    Args:
        model: A transformer of diffusers, or a pipeline, whose `transformer` and `transformer_2` are taken.
        policy: A policy of `sparsek.policies` or a `MaskPolicy`, not causal, or a `BlockMask`. It sees q [B, H, S, D]
            and k of the video in the model's order of tokens.
        skip_first_steps: Denoising steps that stay dense. The step is `scheduler.step_index`; without a scheduler it is
            the number of calls of the transformer since `use` or `reset`, two per step with guidance.
        skip_layers: Blocks that stay dense, numbered from 0 in the order of the model: one number, or several.
        min_tokens: Layers with fewer queries stay dense.
        scheduler: The scheduler that counts the steps; that of the pipeline by default.
        text: Where joint attention has its text tokens, for processors of other classes. They need the parameters attn,
            hidden_states and encoder_hidden_states and a call of dispatch_attention_fn. Calls with a mask, and calls
            without encoder_hidden_states, stay dense.

    Returns:
        A `Sparse`, which undoes this, also at the end of a `with` block, and lists the dense layers with reasons.

    Raises:
        InvalidInput: For a model without a processor that is known, layers that it does not have, one that already has
            a policy, and for a causal policy.

    Example:
        sparse = use(pipe, sparsek.policies.SubBlock(density=0.25), skip_first_steps=10, skip_layers=(0, 1))
    """
    if not isinstance(policy, (MaskRule, BlockMask)):
        raise InvalidInput(
            f"policy is {arguments.shown(policy)}; it must be a policy, a MaskPolicy or a BlockMask"
        )
    if not isinstance(policy, BlockMask):
        require_fit(policy, False, "a diffusion transformer")
    if text is not None:
        arguments.one_of("text", text, ("first", "last"))
    models = [_plain(model)] if _has_processors(model) else _transformers_of(model)
    skipped_layers = tuple(skip_layers) if isinstance(skip_layers, Iterable) else (skip_layers,)
    if scheduler is None and not isinstance(model, torch.nn.Module):
        scheduler = getattr(model, "scheduler", None)
    skipped = arguments.integer("skip_first_steps", skip_first_steps, 0, MOST_STEPS)
    made = Sparse(policy, skipped, scheduler)
    made.min_tokens = arguments.integer("min_tokens", min_tokens)
    try:
        for each in models:
            made.put_into(each, skipped_layers, text)
    except InvalidInput:
        made.undo()
        raise
    return made


def _transformers_of(pipe: Any) -> list[Any]:
    found = [getattr(pipe, name, None) for name in ("transformer", "transformer_2")]
    found = [_plain(each) for each in found if _has_processors(each)]
    if not found:
        raise InvalidInput(
            f"model is {arguments.shown(pipe)}; it must be a transformer of diffusers, or a pipeline with one"
        )
    return found


def _has_processors(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and any(hasattr(x, "set_processor") for x in model.modules())


def _block(name: str) -> str:
    """The transformer's block that has the layer of this name."""
    found = BLOCK.match(name)
    return found[0] if found else ""


def _plain(model: Any) -> Any:
    """The model in what torch.compile returns."""
    return getattr(model, "_orig_mod", model)


class _Step:
    """A step without a scheduler, which knows the next: compiled code that read numbers would compile for each."""

    def __init__(self, at: int, sparse: bool) -> None:
        self.at, self.sparse = at, sparse
        self.next = self

    @staticmethod
    def chain(skipped: int) -> tuple[_Step, _Step]:
        """What is before the first call, and the sparse step after `skipped` dense ones, which repeats."""
        last = following = _Step(skipped, True)
        for at in reversed(range(skipped)):
            step = _Step(at, False)
            step.next, following = following, step
        start = _Step(0, following.sparse)
        start.next = following
        return start, last


class _SchedulerHooks:
    """What the class of a scheduler has beside its own: the policies that follow it take each new step."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith("step_index"):
            for each in tuple(_FOLLOWING):
                if each.scheduler is self:
                    each.follow()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As one of its own class: a copy has that, and a file does not need SparseK."""
        whole: Any = super().__reduce_ex__(1)  # of 2 and up pickle refuses another class
        made, given, *rest = whole
        return made, tuple(_own_class(x) if x is type(self) else x for x in given), *rest


# Those whose scheduler has a class with _Followed.
_FOLLOWING: weakref.WeakSet[Sparse] = weakref.WeakSet()


@functools.cache
def _followed(old: type) -> type:
    """A class of schedulers like `old`, also by name, for a scheduler writes the name of its class to files."""
    names = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    return type(old.__name__, (_SchedulerHooks, old), names)


def _own_class(followed: type) -> type:
    return followed.__mro__[2]


class Sparse:
    """A policy in one or more transformers: see `use`.

    Attributes:
        policy: What chooses the blocks.
        layers: The names of the attention layers that have it.
        dense: Why each of the other attention layers is dense, by its name; also of those in `layers` that were called
            with a mask that cannot be read.
    """

    def __init__(
        self, policy: MaskRule | BlockMask, skip_first_steps: int = 0, scheduler: Any = None
    ) -> None:
        self.policy, self.scheduler = policy, scheduler
        self.skip_first_steps, self.min_tokens = skip_first_steps, 0
        self.layers: list[str] = []
        self.dense: dict[str, str] = {}
        self._first, self._last = _Step.chain(skip_first_steps)
        self._now = self._first
        self._counts = scheduler is None
        self._kept: list[tuple[Any, Any]] = []
        self._hooks: list[Any] = []
        if scheduler is not None:
            self.follow()
            self._watch()

    @property
    def step(self) -> int:
        """The denoising step, from 0: that of the scheduler, else the calls of the transformer before this one.

        Without a scheduler it counts to `skip_first_steps` and stays there.
        """
        return self._now.at if self._counts else getattr(self.scheduler, "step_index", None) or 0

    def reset(self) -> None:
        """Count calls of the transformer from 0 again, before another picture is made without a scheduler."""
        if self._counts:
            self._now = self._first

    def applies(self, tokens: int) -> bool:
        """Whether a layer with so many queries is sparse in this step."""
        return self._now.sparse and tokens >= self.min_tokens

    def follow(self) -> None:
        """Take the step of the scheduler. That happens by itself, before each call of a transformer."""
        self._now = self._last if self.step >= self.skip_first_steps else self._first

    def _watch(self) -> None:
        """Take each step when the scheduler does, for compiled code; not of one of a builtin class or with slots."""
        kind = type(self.scheduler)
        if not issubclass(kind, _SchedulerHooks):
            try:
                self.scheduler.__class__ = _followed(kind)
            except TypeError:
                return
        _FOLLOWING.add(self)

    def put_into(
        self, model: Any, skip_layers: Collection[int], text: Literal["first", "last"] | None
    ) -> None:
        """Replace the processors of one transformer."""
        modules = {
            name: each
            for name, each in model.named_modules()
            if hasattr(each, "set_processor") and BLOCK.match(name)
        }
        for name, each in modules.items():
            if isinstance(each.processor, Processor):
                raise InvalidInput(f"{name} already has a policy; undo that use first")
        found = {name: form_of(each, name, text) for name, each in modules.items()}
        known = {name: form for name, form in found.items() if isinstance(form, Form)}
        self.dense |= {name: why for name, why in found.items() if isinstance(why, str)}
        if not known:
            kinds = sorted({type(each.processor).__name__ for each in modules.values()})
            names = sorted({name.rpartition(".")[2] for name in FORMS})
            raise InvalidInput(
                f"{type(model).__name__} has no attention layer that can take a policy: its processors are "
                f"{', '.join(kinds) or 'none'}; those known are {', '.join(names)}"
            )
        blocks = list(dict.fromkeys(_block(name) for name in known))
        skipped = {arguments.integer("skip_layers", at, 0, len(blocks) - 1) for at in skip_layers}
        around = Around(self, model)
        for name, form in known.items():
            if blocks.index(_block(name)) in skipped:
                self.dense[name] = "in skip_layers"
                continue
            old = modules[name].processor
            modules[name].set_processor(with_policy(around, old, name, form))
            self._kept.append((modules[name], old))
            self.layers.append(name)
        self._hooks.append(model.register_forward_pre_hook(around.before, with_kwargs=True))

    def count(self) -> None:
        """Take the step of a call of a transformer. That happens by itself, before the call."""
        if self._counts:
            self._now = self._now.next
        elif not torch.compiler.is_compiling():
            self.follow()

    def __repr__(self) -> str:
        reasons = collections.Counter(self.dense.values())
        dense = "".join(f"; {number} dense: {why}" for why, number in reasons.items())
        return f"Sparse({self.policy!r} in {len(self.layers)} layers{dense})"

    def undo(self) -> None:
        """Give every layer its own processor back."""
        for module, old in self._kept:
            module.set_processor(old)
        for hook in self._hooks:
            hook.remove()
        self._kept, self._hooks, self.layers, self.dense = [], [], [], {}
        if self in _FOLLOWING:
            _FOLLOWING.remove(self)
            if not any(each.scheduler is self.scheduler for each in _FOLLOWING):
                self.scheduler.__class__ = _own_class(type(self.scheduler))

    def __getstate__(self) -> dict[str, Any]:
        """With the number of calls in place of the chain of steps."""
        calls = 0 if self._now is self._first else self._now.at + 1
        return {name: x for name, x in self.__dict__.items() if name not in ("_first", "_last", "_now")} | {
            "calls": calls
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        calls = state.pop("calls")
        self.__dict__.update(state)
        self._first, self._last = _Step.chain(self.skip_first_steps)
        self._now = self._first
        for _ in range(calls):
            self._now = self._now.next
        if self.scheduler is not None and self._hooks:
            self.follow()
            self._watch()

    def __enter__(self) -> Sparse:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
