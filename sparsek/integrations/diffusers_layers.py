"""The attention processors of diffusers that can take a policy: how each calls attention, and that call with it.

A processor is known by its exact class and the parameters of its `__call__`. FORMS holds what its tokens and masks are.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import types
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.ops.attention import attention
from sparsek.attn.reference.attention import merge_attention
from sparsek.core.errors import InvalidInput
from sparsek.core.plan_owner import drop_oldest

DISPATCH, TORCH = "dispatch_attention_fn", "scaled_dot_product_attention"
USUAL = ("attn", "hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb")
ROTARY = (*USUAL[:4], "rotary_emb")
TWO_ROTARIES = (*USUAL[:4], "query_rotary_emb", "key_rotary_emb")


class Form(NamedTuple):
    """What a processor does with its tokens.

    `text`: where it puts encoder_hidden_states among the tokens; None where these are for cross-attention.
    `alone`: what hidden_states are in a call without them: the video, or text and video "joined".
    `masks`: what a bool mask has: the "keys" that exist, [B, 1, 1, T], or the "pairs" of tokens that exist,
    [B, 1, T, T]. All tokens of the video exist.
    `only`: the name of the modules of the video's self-attention, where others have this class too.
    """

    call: tuple[str, ...] = USUAL
    text: Literal["first", "last"] | None = None
    alone: Literal["video", "joined"] | None = None
    masks: Literal["keys", "pairs"] | None = None
    only: str = ""


MODELS = "diffusers.models.transformers.transformer_"
OTHERS = "diffusers.models.attention_processor."
FORMS = {
    f"{MODELS}wan.WanAttnProcessor": Form(ROTARY, alone="video"),
    f"{MODELS}wan_animate.WanAttnProcessor": Form(ROTARY, alone="video"),
    f"{MODELS}chronoedit.WanAttnProcessor": Form(ROTARY, alone="video"),
    f"{MODELS}skyreels_v2.SkyReelsV2AttnProcessor": Form(ROTARY, alone="video"),
    f"{MODELS}ltx.LTXVideoAttnProcessor": Form(alone="video", only="attn1"),
    f"{MODELS}ltx2.LTX2AudioVideoAttnProcessor": Form(TWO_ROTARIES, alone="video", only="attn1"),
    f"{MODELS}ltx2.LTX2PerturbedAttnProcessor": Form(
        (*TWO_ROTARIES, "perturbation_mask", "all_perturbed"), alone="video", only="attn1"
    ),
    f"{MODELS}cosmos.CosmosAttnProcessor2_0": Form(alone="video", only="attn1"),
    f"{MODELS}kandinsky.Kandinsky5AttnProcessor": Form(
        (*USUAL[:3], "rotary_emb", "sparse_params"), alone="video", only="self_attention"
    ),
    f"{MODELS}hunyuan_video.HunyuanVideoAttnProcessor2_0": Form(text="last", masks="keys"),
    f"{MODELS}hunyuan_video15.HunyuanVideo15AttnProcessor2_0": Form(text="last", masks="pairs"),
    f"{MODELS}hunyuanimage.HunyuanImageAttnProcessor": Form(text="last", masks="keys"),
    f"{MODELS}qwenimage.QwenDoubleStreamAttnProcessor2_0": Form(
        (*USUAL[:3], "encoder_hidden_states_mask", *USUAL[3:]), text="first", masks="keys"
    ),
    f"{MODELS}flux.FluxAttnProcessor": Form(text="first", alone="joined"),
    f"{MODELS}longcat_image.LongCatImageAttnProcessor": Form(text="first", alone="joined"),
    f"{MODELS}ovis_image.OvisImageAttnProcessor": Form(text="first", alone="joined"),
    f"{MODELS}bria.BriaAttnProcessor": Form(text="first", alone="joined"),
    f"{MODELS}flux2.Flux2AttnProcessor": Form(text="first", alone="joined"),
    f"{MODELS}flux2.Flux2ParallelSelfAttnProcessor": Form(
        (*USUAL[:2], *USUAL[3:]), text="first", alone="joined"
    ),
    f"{OTHERS}CogVideoXAttnProcessor2_0": Form(text="first"),
    f"{OTHERS}JointAttnProcessor2_0": Form((*USUAL[:4], "args", "kwargs"), text="last", alone="video"),
}


def form_of(module: Any, layer: str, text: Literal["first", "last"] | None = None) -> Form | str:
    """The form of the processor of an attention module of this name, or why its layer stays dense.

    `text`: where a class that is not in FORMS puts its text tokens, by the word of the user.
    """
    kind = type(module.processor)
    name = kind.__name__
    own: Any = kind.__call__
    form = FORMS.get(f"{kind.__module__}.{kind.__qualname__}")
    names = tuple(inspect.signature(own).parameters)[1:]
    if form is None:
        if text is None:
            return f"{name} is not a processor that use() knows"
        if names[:3] != USUAL[:3]:
            return f"{name}.__call__ does not take {', '.join(USUAL[:3])}"
        form = Form(names, text)
    elif form.call != names:
        return f"{name}.__call__ takes {', '.join(names)}, which is not the form that use() knows"
    elif text is not None and form.text not in (None, text):
        raise InvalidInput(f"text is {text!r}; {name} has its text tokens {form.text}")
    if getattr(module, "is_cross_attention", False):
        return "cross-attention"
    if form.only not in ("", layer.rpartition(".")[2]):
        return "not the self-attention of the video"
    if isinstance(module.processor, torch.nn.Module):
        return f"{name} has weights and cannot be replaced"
    return _unfit(own, name) or form


PLANS = 8  # sizes of videos and texts, whose plans are kept


class ContextRanks(NamedTuple):
    """The ranks that share the tokens of a model by diffusers' context parallelism, ring and Ulysses alike."""

    group: Any
    size: int
    rank: int
    even: bool

    @classmethod
    def of(cls, config: Any) -> ContextRanks | None:
        """Of a ParallelConfig; None without context parallelism."""
        config = getattr(config, "context_parallel_config", None)
        if config is None:
            return None
        mesh = config._flattened_mesh
        group = mesh.get_group()
        return cls(
            group, mesh.size(), dist.get_rank(group), not (config.ulysses_anything or config.ring_anything)
        )

    def split(self, tokens: int) -> list[int]:
        """The tokens of each rank, as diffusers splits them."""
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def sizes(self, tokens: int) -> list[int]:
        """The tokens of each rank, `tokens` of this one; the host waits if they may differ."""
        if self.even:
            return [tokens] * self.size
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, tokens, self.group)
        return every


class Around:
    """What the processors of one transformer share: the policy with its steps, and the text of the running call.

    `text`: the tokens in the model's argument encoder_hidden_states, None where it has none.
    """

    def __init__(self, sparse: Any, model: Any) -> None:
        self.sparse, self.text = sparse, None
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._splits_text = "encoder_hidden_states" in (getattr(model, "_cp_plan", None) or {}).get("", {})
        self._plans: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without plans, whose process groups are of this process."""
        return {**self.__dict__, "_plans": {}}

    def text_here(self, ranks: ContextRanks | None) -> int:
        """The text tokens of this rank."""
        text = self.text or 0
        return text if ranks is None else ranks.split(text)[ranks.rank]

    def split(self, ranks: ContextRanks, tokens: int, joint: int) -> list[tuple[int, int]] | None:
        """The tokens of the video and of the text of every rank; None if ranks do not split the text."""
        if joint and not (self._splits_text and ranks.split(self.text or 0)[ranks.rank] == joint):
            return None
        text = ranks.split(self.text or 0) if joint else [0] * ranks.size
        return list(zip(ranks.sizes(tokens), text, strict=True))

    def plan(self, ranks: ContextRanks, sizes: list[tuple[int, int]], first: bool) -> tuple[Any, bool]:
        """The plan of a call with these tokens on the ranks, and whether it is new: then ranks compare their calls."""
        key = ranks.group, tuple(sizes), first
        new = key not in self._plans
        if new:
            while len(self._plans) >= PLANS:
                drop_oldest(self._plans)
            order = (1, 0) if first else (0, 1)
            owner = [rank for at in order for rank, each in enumerate(sizes) for _ in range(each[at])]
            mask = sk.BlockMask.full(len(owner), device="cpu")
            given = torch.tensor(owner, dtype=torch.int64, device="cpu")
            self._plans[key] = sk.distributed.plan(mask, ranks.group, "heads", owner=given)
        return self._plans[key], new

    def before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the forward pass of the model."""
        given = kwargs.get("encoder_hidden_states")
        if given is None and "encoder_hidden_states" in self._names[: len(args)]:
            given = args[self._names.index("encoder_hidden_states")]
        self.text = given.shape[1] if isinstance(given, Tensor) and given.ndim == 3 else None
        self.sparse.count()


class Processor:
    """What the processors of `use` have beside the class of the one that they replace."""

    _around: Around
    _form: Form
    _layer: str
    _dense: Any  # diffusers' dispatch_attention_fn, or torch's scaled_dot_product_attention

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the class that it replaces: its own is made here."""
        return _empty, (type(self).__mro__[2],), self.__dict__

    def _attend(
        self,
        dim: int,
        tokens: int,
        joint: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """In place of diffusers' dispatch_attention_fn, whose operands [B, S, H, D] have their tokens in `dim` 1, or of
        torch's scaled_dot_product_attention, [B, H, S, D].

        In a processor that was called with `tokens` of the video and `joint` text tokens.
        """
        rows, keys = query.shape[dim], key.shape[dim]
        ranks = ContextRanks.of(options.get("parallel_config"))
        sizes, every = None, tokens
        if ranks is not None and rows == keys == tokens + joint and tokens > 0:
            sizes = self._around.split(ranks, tokens, joint)
            every = tokens * ranks.size if sizes is None else sum(video for video, _ in sizes)
        if not self._applies(tokens, joint, rows, keys, attn_mask, dropout_p, is_causal, every) or (
            ranks is not None and not self._is_split(sizes, attn_mask)
        ):
            return self._dense(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        q, k, v = (x.transpose(dim, 2) for x in (query, key, value))
        if ranks is None or sizes is None:
            return self._sparsely(q, k, v, joint, attn_mask, scale).transpose(dim, 2)
        plan, new = self._around.plan(ranks, sizes, self._form.text == "first")
        whole = sum(text for _, text in sizes)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._sparsely(q, k, v, whole, None, scale)

        return sk.distributed.ulysses(attend, q, k, v, plan, check=new).transpose(dim, 2)

    def _is_split(self, sizes: list[tuple[int, int]] | None, mask: Any) -> bool:
        """Whether a call of one of several ranks is of tokens whose split is known, without a mask."""
        if sizes is None:
            self._stays_dense("called over ranks that do not split the text")
        elif mask is not None:
            self._stays_dense("called with a mask over ranks")
        return sizes is not None and mask is None

    def _applies(
        self,
        tokens: int,
        joint: int,
        rows: int,
        keys: int,
        mask: Any,
        dropout: float,
        causal: bool,
        every: int,
    ) -> bool:
        """Whether a call is sparse: self-attention of the tokens that are known, in a sparse step. `every`: the tokens
        of the video on all ranks.
        """
        if not rows == keys == tokens + joint or tokens < 1 or not self._around.sparse.applies(every):
            return False
        if dropout or causal:
            self._stays_dense("called with dropout" if dropout else "called as causal attention")
            return False
        if mask is not None and not self._reads(mask, rows):
            self._stays_dense(f"called with a mask {list(getattr(mask, 'shape', ()))}")
            return False
        return True

    def _reads(self, mask: Any, length: int) -> bool:
        """Whether a mask's meaning is known, by its shape."""
        rows = {"keys": 1, "pairs": length}.get(self._form.masks or "")
        return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[1:] == (1, rows, length)

    def _stays_dense(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            self._around.sparse.dense[self._layer] = reason

    def _sparsely(
        self, q: Tensor, k: Tensor, v: Tensor, joint: int, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """The attention [B, H, S, D] of a call that applies."""
        policy, first = self._around.sparse.policy, self._form.text == "first"
        if not joint:
            return attention(q, k, v, policy, scale=scale)
        there = None
        if mask is not None:  # as a token of the video sees it
            row = mask[:, 0, joint if first and mask.shape[2] > 1 else 0]
            there = (row[:, :joint] if first else row[:, -joint:]).expand(q.shape[0], -1)
        return joint_attention(q, k, v, policy, joint, first, there, scale)


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: MaskRule | BlockMask,
    joint: int,
    first: bool,
    there: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention in which the video sees its blocks and the text, and the text sees all; [B, H, S, D].

    `there` bool [B, joint]: which text tokens exist. No token sees the others, whose rows mean nothing.
    """
    tokens = q.shape[2] - joint
    at = slice(joint, None) if first else slice(0, tokens)
    of_text = slice(0, joint) if first else slice(tokens, None)
    (qv, kv, vv), (qt, kt, vt) = ([x[:, :, part] for x in (q, k, v)] for part in (at, of_text))
    lengths = None
    if there is not None:  # those that exist come first: the order of keys does not matter
        order = torch.argsort(there.to(torch.uint8), dim=1, descending=True, stable=True)[:, None, :, None]
        kt, vt = kt.take_along_dim(order, 2), vt.take_along_dim(order, 2)
        lengths = there.sum(1, dtype=torch.int32)
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
    """The mask in which every query sees the first `lengths` of the text tokens."""
    if lengths is None:
        return None
    blocks = -(-rows // 128), -(-joint // 128)
    there = torch.ones((lengths.shape[0], 1, *blocks), dtype=torch.bool, device=q.device)
    start = torch.arange(blocks[1], dtype=torch.int32, device=q.device) * 128
    keys = (lengths[:, None] - start).clamp(0, 128)
    return BlockMask.from_block_map(there, q_len=rows, kv_len=joint, kv_lengths=keys)


def with_policy(around: Around, old: Any, layer: str, form: Form) -> Any:
    """The processor `old` of a layer as one whose attention the policy decides."""
    made = _empty(type(old))
    made.__dict__.update(old.__dict__)
    made._around, made._form, made._layer = around, form, layer
    own: Any = type(old).__call__
    made._dense = own.__globals__.get(DISPATCH) or torch.nn.functional.scaled_dot_product_attention
    return made


def _empty(old: type) -> Any:
    """A processor in place of one of this class, without attributes."""
    return object.__new__(_class_of(old))


@functools.cache
def _class_of(old: type) -> type:
    """A class of processors with the signature of `old`, which models read."""
    own: Any = old.__call__
    redirected = _redirected(own)
    dim = 1 if DISPATCH in own.__code__.co_names else 2
    takes_text = "encoder_hidden_states" in own.__code__.co_varnames[: own.__code__.co_argcount]

    @functools.wraps(own)
    def call(self: Any, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = None
        if takes_text:
            given = kwargs.get("encoder_hidden_states", args[0] if args else None)
        tokens, joint = math.prod(hidden_states.shape[1:-1]), 0
        if given is not None:  # for cross-attention, a call that has no known tokens
            joint, tokens = (given.shape[1], tokens) if self._form.text else (0, -1)
        elif self._form.alone == "joined" and self._around.text is not None:
            joint = self._around.text_here(ContextRanks.of(getattr(self, "_parallel_config", None)))
            tokens -= joint
        elif self._form.alone != "video":
            tokens = -1
        if "sparse_params" in kwargs and tokens > 0 and self._around.sparse.applies(tokens):
            kwargs["sparse_params"] = None  # the mask that the model would make itself
        kwargs[DISPATCH] = functools.partial(self._attend, dim, tokens, joint)
        return redirected(self, attn, hidden_states, *args, **kwargs)

    return type(f"Sparse{old.__name__}", (Processor, old), {"__call__": call})


def _unfit(own: Any, name: str) -> str | None:
    """Why the function `own` of class `name` cannot be redirected."""
    if not isinstance(own, types.FunctionType) or not {DISPATCH, TORCH} & {*own.__code__.co_names}:
        return f"{name} does not call {DISPATCH}"
    try:
        function = _source(own).body[0].body[0]  # type: ignore[attr-defined]
    except (OSError, SyntaxError) as error:
        return f"{name} has no readable source ({error})"
    if own.__closure__ or not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return f"{name}.__call__ is not a plain function"
    return None


def _source(own: types.FunctionType) -> ast.Module:
    return ast.parse("if True:\n" + inspect.getsource(own))


class _Calls(ast.NodeTransformer):
    """torch's attention, by the name that has the policy."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Name(DISPATCH, ast.Load()), node) if node.attr == TORCH else node


def _redirected(own: types.FunctionType) -> Any:
    """The function with an argument more, the dispatch_attention_fn that it calls.

    From its source, because torch.compile must find a function's global names in those of its module.
    """
    code, tree = own.__code__, _source(own)
    function: Any = tree.body[0].body[0]  # type: ignore[attr-defined]
    function.args.kwonlyargs.append(ast.arg(DISPATCH))
    function.args.kw_defaults.append(None)
    if DISPATCH not in code.co_names:
        tree = _Calls().visit(tree)
    ast.fix_missing_locations(ast.increment_lineno(tree, code.co_firstlineno - 2))
    flags = code.co_flags & annotations.compiler_flag  # of __future__
    whole = compile(tree, code.co_filename, "exec", flags, dont_inherit=True)
    inner = next(x for x in whole.co_consts if isinstance(x, types.CodeType) and x.co_name == function.name)
    made = types.FunctionType(inner, own.__globals__, own.__name__, own.__defaults__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made
