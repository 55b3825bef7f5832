"""Sparse attention in the models of Hugging Face diffusers: one line puts a policy into a transformer.

    from sparsek.integrations import diffusers
    sparse = diffusers.use(pipe, sparsek.policies.SubBlock(density=0.25), skip_first_steps=10, skip_layers=(0, 1))
    ...
    sparse.undo()

Each attention layer keeps its own processor: projections, norms and rotary embeddings are the model's. Only its call of
`dispatch_attention_fn` is replaced. Needs diffusers 0.41 or newer; tested with 0.42.1.

Models compile with a policy as without one. Compiled code reads of a step only whether it is sparse, so that there is
one compilation for dense steps and one for sparse ones.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import types
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.named import require_fit
from sparsek.mask.mask import BlockMask
from sparsek.mask.rule import MaskRule
from sparsek.ops.attention import attention
from sparsek.reference.attention import merge_attention

DISPATCH = "dispatch_attention_fn"
BLOCK = re.compile(r"(?!text_)\w+\.\d+")  # a block of the transformer's own, which is not of its text encoder
# Where a joint processor puts the text among its tokens, by the start of its name.
TEXT_AT = {
    "HunyuanVideo": "last",
    "Flux": "first",
    "QwenDouble": "first",
    "JointAttn": "last",
    "CogVideoX": "first",
}
PREFIX = ("HunyuanVideo",)  # processors whose text mask is true for a prefix of the text
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

    Cross-attention, layers of text encoders, skipped steps and skipped layers stay as they are. In joint attention of
    video and text, as of HunyuanVideo, the policy chooses among the video alone; all tokens see the text, and the text
    sees all.

    Args:
        model: A transformer of diffusers, or a pipeline, whose `transformer` and `transformer_2` are taken.
        policy: A policy of `sparsek.policies` or a `MaskPolicy`, not causal, or a `BlockMask`. It sees q [B, H, S, D]
            and k of the video in the model's order of tokens.
        skip_first_steps: Denoising steps that stay dense. The step is `scheduler.step_index`; without a scheduler it is
            the number of calls of the transformer since `use` or `reset`, two per step with guidance.
        skip_layers: Blocks that stay dense, numbered from 0 in the order of the model: one number, or several.
        min_tokens: Layers with fewer queries stay dense.
        scheduler: The scheduler that counts the steps; that of the pipeline by default.
        text: Where joint attention has its text tokens. Known for HunyuanVideo, Flux, Qwen-Image, SD3 and CogVideoX.

    Returns:
        A `Sparse`, which undoes this, also at the end of a `with` block.

    Raises:
        InvalidInput: For a model without attention processors that can be replaced, layers that it does not have, one
            that already has a policy, and for a causal policy.

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
    models = [_plain(model)] if hasattr(model, "attn_processors") else _transformers_of(model)
    skipped_layers = tuple(skip_layers) if isinstance(skip_layers, Iterable) else (skip_layers,)
    if scheduler is None and not hasattr(model, "attn_processors"):
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
    found = [_plain(each) for each in found if hasattr(each, "attn_processors")]
    if not found:
        raise InvalidInput(
            f"model is {arguments.shown(pipe)}; it must be a transformer of diffusers, or a pipeline with one"
        )
    return found


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

    def __deepcopy__(self, memo: dict[int, Any]) -> _Step:
        return self


class _Followed:
    """What the class of a scheduler has beside its own: the policies that follow it take each new step."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith("step_index"):
            for each in tuple(_FOLLOWING):
                if each.scheduler is self:
                    each.follow()


# Those whose scheduler has a class with _Followed.
_FOLLOWING: weakref.WeakSet[Sparse] = weakref.WeakSet()


@functools.cache
def _followed(old: type) -> type:
    """A class of schedulers like `old`, also by name, for a scheduler writes the name of its class to files."""
    names = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    return type(old.__name__, (_Followed, old), names)


class Sparse:
    """A policy in one or more transformers: see `use`.

    Attributes:
        policy: What chooses the blocks.
        layers: The names of the attention layers that have it.
    """

    def __init__(
        self, policy: MaskRule | BlockMask, skip_first_steps: int = 0, scheduler: Any = None
    ) -> None:
        self.policy, self.scheduler = policy, scheduler
        self.skip_first_steps, self.min_tokens = skip_first_steps, 0
        self.layers: list[str] = []
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
        if not issubclass(kind, _Followed):
            try:
                self.scheduler.__class__ = _followed(kind)
            except TypeError:
                return
        _FOLLOWING.add(self)

    def put_into(self, model: Any, skip_layers: Collection[int], text: str | None) -> None:
        """Replace the processors of one transformer."""
        modules = {name: each for name, each in model.named_modules() if hasattr(each, "set_processor")}
        blocks = list(dict.fromkeys(found[0] for name in modules if (found := BLOCK.match(name))))
        skipped = {arguments.integer("skip_layers", at, 0, len(blocks) - 1) for at in skip_layers}
        names = [
            name
            for name in modules
            if (found := BLOCK.match(name)) and blocks.index(found[0]) not in skipped
            and not getattr(modules[name], "is_cross_attention", False)
        ]  # fmt: skip
        if not names and not skipped:
            raise InvalidInput(f"{type(model).__name__} has no attention layers in its blocks")
        for name in names:
            old = modules[name].processor
            modules[name].set_processor(_with(self, old, name, text))
            self._kept.append((modules[name], old))
            self.layers.append(name)
        self._hooks.append(model.register_forward_pre_hook(self._count))

    def _count(self, *_: Any) -> None:
        if self._counts:
            self._now = self._now.next
        elif not torch.compiler.is_compiling():
            self.follow()

    def undo(self) -> None:
        """Give every layer its own processor back."""
        for module, old in self._kept:
            module.set_processor(old)
        for hook in self._hooks:
            hook.remove()
        self._kept, self._hooks, self.layers = [], [], []
        if self in _FOLLOWING:
            _FOLLOWING.remove(self)
            if not any(each.scheduler is self.scheduler for each in _FOLLOWING):
                self.scheduler.__class__ = type(self.scheduler).__mro__[2]

    def __enter__(self) -> Sparse:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class _Processor:
    """What the processors of `use` have beside the class of the one that they replace."""

    _sparse: Sparse
    _text: str | None
    _dense: Any  # diffusers' dispatch_attention_fn
    _prefix: bool  # whether a mask is true for a prefix of the text

    def _attend(
        self,
        tokens: int,
        joint: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: Any = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Tensor:
        """In place of diffusers' dispatch_attention_fn: query [B, S, H, D], key and value [B, T, H, D].

        In a processor that was called with `tokens` hidden states and `joint` text states. It joins them if it has
        queries for both; else it attends to them.
        """
        is_self = query.shape[1] == key.shape[1] == tokens + joint
        known_mask = attn_mask is None or (joint and self._prefix)
        if not is_self or is_causal or dropout_p or not known_mask or not self._sparse.applies(tokens):
            return self._dense(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs,
                backend=backend, parallel_config=parallel_config,
            )  # fmt: skip
        if parallel_config is not None:
            raise InvalidInput(
                "context parallelism splits the tokens of a layer, and a policy needs all of them"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if not joint:
            return attention(q, k, v, self._sparse.policy, scale=scale).transpose(1, 2)
        if self._text is None:
            raise InvalidInput(
                f"{type(self).__name__} joins {joint} text tokens to the video, and where they are is unknown: pass "
                'use(..., text="last") or text="first"'
            )
        lengths = None if attn_mask is None else attn_mask.flatten(1).sum(1, dtype=torch.int32) - tokens
        return _joint(q, k, v, self._sparse.policy, joint, self._text == "first", lengths, scale).transpose(
            1, 2
        )


def _joint(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: MaskRule | BlockMask,
    joint: int,
    first: bool,
    lengths: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention in which the video sees its blocks and the text, and the text sees all; [B, H, S, D].

    `lengths` int32 [B]: how many of the `joint` text tokens exist, the first ones; others see and are seen as padding:
    their rows mean nothing.
    """
    tokens = q.shape[2] - joint
    at = slice(joint, None) if first else slice(0, tokens)
    of_text = slice(0, joint) if first else slice(tokens, None)
    (qv, kv, vv), (qt, kt, vt) = ([x[:, :, part] for x in (q, k, v)] for part in (at, of_text))
    seen, sums = attention(qv, kv, vv, policy, scale=scale, return_lse=True)
    to_text, text_sums = attention(
        qv, kt, vt, _text_mask(tokens, joint, lengths, q), scale=scale, return_lse=True
    )
    video = merge_attention(seen, sums, to_text, text_sums)[0]
    by_text, by_sums = attention(qt, kv, vv, scale=scale, return_lse=True)
    own, own_sums = attention(qt, kt, vt, _text_mask(joint, joint, lengths, q), scale=scale, return_lse=True)
    text = merge_attention(by_text, by_sums, own, own_sums)[0]
    return torch.cat((text, video) if first else (video, text), 2)


def _text_mask(rows: int, joint: int, lengths: Tensor | None, q: Tensor) -> BlockMask | None:
    """The mask in which every query sees the text tokens that exist."""
    if lengths is None:
        return None
    blocks = -(-rows // 128), -(-joint // 128)
    there = torch.ones((lengths.shape[0], 1, *blocks), dtype=torch.bool, device=q.device)
    start = torch.arange(blocks[1], dtype=torch.int32, device=q.device) * 128
    keys = (lengths[:, None] - start).clamp(0, 128)
    return BlockMask.from_block_map(there, q_len=rows, kv_len=joint, kv_lengths=keys)


def _with(sparse: Sparse, old: Any, name: str, text: str | None) -> Any:
    """The processor `old` as one whose attention the policy decides."""
    if isinstance(old, _Processor):
        raise InvalidInput(f"{name} already has a policy; undo that use first")
    if isinstance(old, torch.nn.Module):
        raise InvalidInput(
            f"the processor of {name}, a {type(old).__name__}, has weights and cannot be replaced"
        )
    made = object.__new__(_class_of(type(old)))
    made.__dict__.update(old.__dict__)
    known = [where for start, where in TEXT_AT.items() if type(old).__name__.startswith(start)]
    own: Any = type(old).__call__
    made._sparse, made._text = sparse, text or next(iter(known), None)
    made._dense, made._prefix = own.__globals__[DISPATCH], type(old).__name__.startswith(PREFIX)
    return made


@functools.cache
def _class_of(old: type) -> type:
    """A class of processors with the signature of `old`, which models read."""
    own: Any = old.__call__
    redirected = _redirected(own, old.__name__)

    @functools.wraps(own)
    def call(self: Any, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("encoder_hidden_states", args[0] if args else None)
        tokens = math.prod(hidden_states.shape[1:-1])
        if "sparse_params" in kwargs and self._sparse.applies(tokens):
            kwargs["sparse_params"] = None  # the mask that the model would make itself
        joint = given.shape[1] if isinstance(given, Tensor) else 0
        kwargs[DISPATCH] = functools.partial(self._attend, tokens, joint)
        return redirected(self, attn, hidden_states, *args, **kwargs)

    return type(f"Sparse{old.__name__}", (_Processor, old), {"__call__": call})


def _redirected(own: Any, name: str) -> Any:
    """The function `own` of class `name` with an argument more, the dispatch_attention_fn that it calls.

    From its source, because torch.compile must find a function's global names in those of its module.
    """
    if not isinstance(own, types.FunctionType) or DISPATCH not in own.__code__.co_names:
        raise InvalidInput(f"{name} does not call {DISPATCH}; use a diffusers in which it does")
    code = own.__code__
    try:
        tree = ast.parse("if True:\n" + inspect.getsource(own))
    except (OSError, SyntaxError) as error:
        raise InvalidInput(f"{name} has no readable source, which use() needs ({error})") from error
    function: Any = tree.body[0].body[0]  # type: ignore[attr-defined]
    if own.__closure__ or not isinstance(function, ast.FunctionDef) or function.decorator_list:
        raise InvalidInput(f"{name}.__call__ is not a plain function, which use() needs")
    function.args.kwonlyargs.append(ast.arg(DISPATCH))
    function.args.kw_defaults.append(None)
    ast.fix_missing_locations(ast.increment_lineno(tree, code.co_firstlineno - 2))
    flags = code.co_flags & annotations.compiler_flag  # of __future__
    whole = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    inner = next(x for x in whole.co_consts if isinstance(x, types.CodeType) and x.co_name == function.name)
    made = types.FunctionType(inner, own.__globals__, own.__name__, own.__defaults__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made
