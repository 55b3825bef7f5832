"""attn_implementation="sparsek" for Hugging Face transformers. Importing this module registers it.

    import sparsek.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsek")
    model.config.sparsek = {"window": 4096, "sinks": 128}    # options of MaskPolicy; None: the model's own mask
    model.config.sparsek = sparsek.policies.XAttention()     # any policy, which chooses in each layer

The config stores a policy as its dict. Cross-attention stays dense, and a policy must fit the causality of a layer.
Packed documents need use_cache=False. A query sees the keys that both the model's mask (causality, window, padding,
packed documents, cache) and the policy admit. Needs transformers 5.4 or newer.

Models with sparse layers are saved by `save_pretrained` and loaded by `from_pretrained`: see `nn/savers.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import AttentionInterface

from sparsek.attn.mask.cache import ByTensor
from sparsek.attn.mask.convert.argument import MaskLike
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import ResolvedRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.attn.ops.attention import attention
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant
from sparsek.engine.call.autocast import autocasts, follow_autocast
from sparsek.integrations.transformers_config import chooses, install, policy_of, policy_of_options
from sparsek.integrations.transformers_cross import is_cross_attention
from sparsek.integrations.transformers_masks import (
    MaskRequest,
    ModelMask,
    PairsRequest,
    Restarts,
    dense_mask,
    model_mask,
    packed_mask,
)
from sparsek.integrations.transformers_mesh import MeshMask, mesh_inputs
from sparsek.integrations.transformers_paged import paged
from sparsek.integrations.transformers_steps import (
    EVERY,
    MOST,
    StepMask,
    WindowKeys,
    is_last,
    last_step,
    near_of,
    step,
)
from sparsek.nn import savers

__all__ = ["mesh_inputs", "sparsek_attention", "sparsek_mask"]

NAME, RESTARTS = "sparsek", Restarts()
REFUSED = {
    "position_bias": "a position bias",
    "head_mask": "head_mask",
    "output_attentions": "output_attentions: the weights are never in memory",
}
SIZES = ("batch_size", "q_length", "kv_length", "kv_offset")
# Options with which a layer needs more than softmax over the keys of its mask.
CHANGES = frozenset((*REFUSED, "softcap", "s_aux", "cache", "cu_seq_lens_q"))


def sparsek_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    dtype: Any = None,
    config: Any = None,
    **_: Any,
) -> ModelMask:
    """Return the mask of a forward pass, which its layers share. transformers calls this once per kind of layer.

    Masks of the functions of `transformers.masking_utils`, such as `causal_mask_function`, and of padding at either end
    are made in O(S). Equal lengths give the same object, with its plans. Any other function is evaluated at every pair,
    in O(S^2). Padding, the edges of documents, and the offset of a static cache on a GPU are read with one sync each.

    For up to 32 queries over more keys, as in a decode step, the result is a mask for torch's own attention: none where
    every query sees all keys, or all that a window leaves, for which padding is read, as by transformers' sdpa; else
    every pair is evaluated on the device, without a sync. Masks of a static cache are all made so, have one form for
    all positions, and a compiled model takes them or makes them itself. Not under a policy that chooses blocks, nor
    under a stride; those read the offset.

    Args:
        batch_size: Batch items.
        q_length: Queries, in tokens.
        kv_length: Keys, in tokens.
        q_offset: The position of the first query, an int or a tensor of one element.
        kv_offset: The position of the first key.
        mask_function: A function (batch item, head, query, key) of transformers.
        attention_mask: Padding [B or 1, tokens], true for a token; or the result of an earlier call.
        allow_is_causal_skip: Whether the mask of a step may have another form at another position, or with other
            padding. transformers passes False for a static cache, whose steps are compiled once.
        allow_is_bidirectional_skip: The same, where every query sees all keys.
        use_vmap: Whether an unknown function is evaluated under torch.vmap.
        device: Where the mask is made.
        dtype: That of the model's states, for masks of torch's attention.
        config: The config of the model; `config.sparsek` is a dict of the options of a `MaskPolicy`, a dict with
            "policy", the name of a class of sk.policies, and its options, which is what a policy becomes when it is
            assigned, or None.

    Returns:
        A `ModelMask`, the `attention_mask` of the layers.

    Raises:
        InvalidInput: For arguments that transformers does not pass, and for unknown options in config.sparsek.
    """
    if isinstance(attention_mask, MeshMask):
        return attention_mask.of_layers(mask_function, config)
    if isinstance(attention_mask, ModelMask):  # generate() has made it
        return attention_mask
    wanted = PairsRequest(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
    )
    options = getattr(config, "sparsek", None)
    causal, every = mask_function is causal_mask_function, mask_function is bidirectional_mask_function
    from_start = isinstance(q_offset, int) and q_offset == kv_offset == 0
    if every and from_start and q_length != kv_length:
        options = None  # cross-attention, whose queries have no position among the keys
    may_cut = allow_is_causal_skip is True or allow_is_bidirectional_skip is True
    if not torch.compiler.is_compiling():
        if may_cut and causal and options is None and is_last(wanted):
            return last_step(wanted, dtype)
        return _made_mask(wanted, options, may_cut, dtype)
    known = not chooses(options)
    given = tuple(options.items()) if known and options is not None else None
    near = _near(given) if known and q_length <= MOST and q_length < kv_length else None
    if near is not None:
        return step(wanted, WindowKeys(*[int(each) for each in near.split(",")]), may_cut, dtype)
    if known and (causal or every) and attention_mask is None and isinstance(q_offset, int):
        return _constant_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, causal, given, str(device)
        )
    whole = from_start and 1 < q_length == kv_length and attention_mask is None
    if whole and not use_vmap and _is_packed(mask_function, config):
        mask = packed_mask(_documents_of(mask_function, batch_size, q_length, device))
        return ModelMask(ResolvedRule(mask), (batch_size, 1, q_length, kv_length), packed=True)
    return _made_mask(wanted, options, may_cut, dtype)


def _is_packed(mask_function: Any, config: Any) -> bool:
    """Whether a function is that of transformers for packed documents, in a causal model without windows and chunks.

    torch.compile shows the name of a function made in the graph, and not what it holds.
    """
    for name in ("sparsek", "sliding_window", "attention_chunk_size"):
        if getattr(config, name, None) is not None:
            return False
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            return False
    return getattr(config, "is_causal", True) and mask_function.__name__ == "and_mask"


def _documents_of(mask_function: Any, batch: int, length: int, device: Any) -> Tensor:
    """int64 [B, S]: the document of each token, by whether it sees the one before."""
    item = torch.arange(batch, device=device)[:, None]
    query = torch.arange(1, length, device=device)[None]
    new = ~mask_function(item, 0, query, query - 1)
    return torch.nn.functional.pad(new.expand(batch, -1).cumsum(1), (1, 0))


@constant
def _near(options: tuple[tuple[str, Any], ...] | None) -> str | None:
    """The numbers of `near_of`, as text: torch.compile takes them as they are."""
    found = near_of(policy_of_options(None if options is None else dict(options)))
    return None if found is None else ",".join(map(str, found))


@constant
def _constant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    causal: bool,
    options: tuple[tuple[str, Any], ...] | None,
    device: str,
) -> ModelMask:
    """A mask that depends on lengths alone, which torch.compile takes as a constant of its graph."""
    request = MaskRequest(batch_size, q_length, kv_length, q_offset, kv_offset, None, torch.device(device))
    policy = None if options is None else policy_of_options(dict(options))
    return model_mask(request, causal_mask_function if causal else bidirectional_mask_function, policy)


@torch.compiler.disable(reason="masks are made and kept outside of graphs")
def _made_mask(of: PairsRequest, options: Any, may_cut: bool, dtype: Any) -> ModelMask:
    """The mask of any arguments, checked."""
    batch, q_len, kv_len, kv_offset = sizes = of.batch, of.q_len, of.kv_len, of.kv_offset
    if not all(type(size) is int and 0 <= size <= INT32_MAX for size in sizes):
        batch, q_len, kv_len, kv_offset = map(_host_int, SIZES, sizes)
    q_offset, padding = of.q_offset, of.padding
    if not isinstance(q_offset, Tensor):
        q_offset = arguments.integer("q_offset", q_offset, -INT32_MAX, INT32_MAX)
    elif arguments.tensor("q_offset", q_offset, (torch.int32, torch.int64)).numel() != 1:
        raise InvalidInput(f"q_offset is {arguments.shown(q_offset)}; it must be an int or a tensor of one")
    if padding is not None:
        arguments.tensor("attention_mask", padding)
        if padding.dim() != 2 or padding.shape[0] not in (1, batch):
            raise InvalidInput(
                f"attention_mask is {padding.dim()}-D {list(padding.shape)}; a model takes padding, 2-D "
                f"[{batch}, tokens], or a 4-D mask [{batch}, 1 or heads, queries, keys], bool or additive"
            )
    if not callable(of.function):
        raise InvalidInput(f"mask_function is {arguments.shown(of.function)}; it must be a function")
    where, policy = arguments.device("device", of.device), policy_of_options(options)
    use_vmap = arguments.flag("use_vmap", of.use_vmap)
    near = near_of(policy) if q_len <= MOST and q_len < kv_len else None
    if near is not None:
        wanted = PairsRequest(
            batch, q_len, kv_len, q_offset, kv_offset, of.function, padding, use_vmap, where
        )
        return step(wanted, near, may_cut, dtype)
    q_offset = _host_int("q_offset", q_offset, -INT32_MAX)
    request = MaskRequest(batch, q_len, kv_len, q_offset, kv_offset, padding, where)
    made = model_mask(request, of.function, policy, use_vmap)
    made.padded = padding is not None
    return made


def _host_int(name: str, value: Any, least: int = 0) -> int:
    """An int32 on the host, also from a tensor of one element."""
    is_one = (
        isinstance(value, Tensor) and arguments.tensor(name, value, (torch.int32, torch.int64)).numel() == 1
    )
    return arguments.integer(name, value.item() if is_one else value, least, INT32_MAX)


def sparsek_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (out, None), out [B, S, Hq, Dv], for one layer. transformers calls this in place of its own attention.

    A query that sees no key gets out = 0. The weights are never in memory, so None stands in their place.

    Args:
        module: The layer: its `config` and `is_causal` are read where there is no mask.
        query: [B, Hq, S, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
        attention_mask: A `ModelMask`; or a tensor [B, 1 or H, S, T], bool or additive, read in O(S^2) once for all
            layers; or None: causal if the layer is.
        dropout: Must be 0.
        scaling: The factor of the scores; D**-0.5 for None.
        is_causal: Whether the layer is causal; that of `module` for None.
        **options: Further options of transformers. `softcap` caps scores, `s_aux` [Hq] are learned sinks. With `cache`
            or `write_index`, of continuous batching, query, key and value are the new tokens of all requests (from
            transformers 5.24 key and value may be all that are seen), B is 1, and lengths are in `cu_seq_lens_q` and
            `cu_seq_lens_k`; the mask is not read, every request is causal.
            `block_indices` [B, Hkv, S, n], of MiniMax-M3, are the blocks of `indexer.block_size` keys that each query
            sees, -1 for none; beside masks other than causality and padding at the end they cost O(S^2).

    Raises:
        InvalidInput: For dropout, for options that change scores otherwise, such as biases, and for a policy whose
            causality is not that of the layer. A tensor is the mask of a causal layer if no query sees a later token.

    Warns where `position_ids` restart and the mask separates no documents.
    """
    if attention_mask is None:
        attention_mask = _every_key(module, query, key, options)
    in_pages = options.get("cache") is not None or options.get("write_index") is not None
    if autocasts() and not in_pages:
        query, key, value = follow_autocast(query, key, value)
    if isinstance(attention_mask, StepMask) and dropout == 0 and _is_plain(scaling, options):
        step_mask, blocks = attention_mask, options.get("block_indices")
        if blocks is not None and step_mask.span is None and step_mask.seen is not None:
            step_mask = step_mask.among(_lists(module, query, key, blocks, False).to_dense(key.shape[2]))
            blocks = None
        found = None if blocks is not None else step_mask.attended(query, key, value, scaling)
        if found is not None:
            return found, None
    check_tensors(query, key, value)
    if arguments.number("dropout", dropout, 0, 1):
        raise InvalidInput(
            f"attention dropout is {dropout}, which SparseK does not support: set config.attention_dropout "
            "(attention_probs_dropout_prob in BERT) to 0, or call model.eval()"
        )
    for name, what in REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise InvalidInput(f'attn_implementation="{NAME}" does not have {what}; "eager" does')
    settings = {"scale": scaling, **_scores(options)}
    if isinstance(attention_mask, MeshMask):
        if in_pages or options.get("block_indices") is not None:
            raise InvalidInput("over a mesh there is no continuous batching, and no layer may choose blocks")
        return attention_mask.attended(query, key, value, settings), None
    if in_pages:
        if options.get("block_indices") is not None:
            raise InvalidInput(
                f'attn_implementation="{NAME}" does not take block_indices in continuous batching; "sdpa" does, or '
                "call generate() for each batch"
            )
        return paged(module, query, key, value, options, settings), None
    mask = _model_mask(module, query, key, attention_mask, is_causal, options)
    if options.get("cu_seq_lens_q") is not None and not mask.packed:
        raise InvalidInput(
            "cu_seq_lens are given, but the mask does not separate documents: pass position_ids that restart, "
            "use_cache=False and no attention_mask to a causal model"
        )
    joined = getattr(module, "is_causal", False) and not (mask.packed or mask.padded)
    if joined and not torch.compiler.is_compiling():
        RESTARTS.look(getattr(module, "config", module), options.get("position_ids"), query.shape[2])
    choice = mask.choice
    if options.get("block_indices") is not None:
        seen = _selected(module, query, key, mask, options["block_indices"])
    elif choice is None:
        seen = mask.visible.mask_for(query, key)
    else:
        key, value = (x[:, :, : choice.kv_len] for x in (key, value))
        seen = choice.mask_for(query, key, scaling)
    out = attention(query, key, value, seen, **settings)
    return out.transpose(1, 2).contiguous(), None


def _lists(module: torch.nn.Module, query: Tensor, key: Tensor, indices: Any, causal: bool) -> TokenLists:
    """The blocks of each query. They count from the first key, as the model's indexer does."""
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if block is None:
        block = getattr(getattr(module, "config", None), "index_block_size", None)
    if block is None:
        raise InvalidInput(
            f"block_indices are given, but {type(module).__name__} has no indexer.block_size and its config no "
            "index_block_size: set one, the keys of a block"
        )
    lists = TokenLists(indices, block, causal=causal)
    right = (1, query.shape[0]), (1, key.shape[1]), (query.shape[2],)
    if not all(size in of for size, of in zip(indices.shape, right, strict=False)):
        raise InvalidInput(
            f"block_indices is {list(indices.shape)}; query {list(query.shape)} and key {list(key.shape)} need lists "
            f"of 1 or {query.shape[0]} batch items, 1 or {key.shape[1]} heads, and {query.shape[2]} queries"
        )
    return lists


def _selected(module: torch.nn.Module, query: Tensor, key: Tensor, mask: ModelMask, indices: Any) -> MaskLike:
    """The keys that both the blocks of each query and the model's mask admit: lists, where that is causality alone,
    or every pair.
    """
    lists = _lists(module, query, key, indices, mask.causal)
    if isinstance(mask, StepMask) and mask.span is None:
        return lists if mask.seen is None else lists.to_dense(key.shape[2]) & mask.seen
    if mask.choice is not None or mask.visible.always is not None:
        raise InvalidInput("the model chooses blocks (block_indices), and config.sparsek does: leave one out")
    return lists if mask.causal else lists.to_dense(key.shape[2]) & mask.visible.within.to_dense()


def _every_key(
    module: torch.nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]
) -> StepMask | None:
    """The mask of one query without one, which sees all keys; None where there is more to look at."""
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not query.ndim == key.ndim == 4:
        return None
    if query.shape[2] != 1 or options.get("sliding_window"):
        return None
    if getattr(getattr(module, "config", None), "sparsek", None) is not None:
        return None
    keys = key.shape[-2]
    every = PairsRequest(
        query.shape[0], 1, keys, keys - 1, 0, bidirectional_mask_function, None, False, query.device
    )
    return StepMask(every, EVERY, None, None)


def _is_plain(scaling: Any, options: dict[str, Any]) -> bool:
    """Whether these options leave scores as they are, by a factor that needs no look."""
    if not CHANGES.isdisjoint(options):
        for name in CHANGES:
            if options.get(name) is not None and options[name] is not False:
                return False
    return scaling is None or (isinstance(scaling, float) and 1e-30 <= scaling <= 1e30)


def _scores(options: dict[str, Any]) -> dict[str, Any]:
    """The options of transformers that change scores, by their names in `sk.attention`."""
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    given: dict[str, Any] = {} if not softcap else {"softcap": float(softcap)}
    return given if sinks is None else {**given, "sink_logits": sinks}


# Masks that were passed as tensors; the layers of a model share the conversion.
_OF_TENSORS: ByTensor[ModelMask] = ByTensor()


def _model_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, given: Any, is_causal: bool | None, options: Any
) -> ModelMask:
    mask = given
    if not isinstance(given, ModelMask):
        mask = _mask_of(module, query, key, given, is_causal, options)
    own = mask.own
    if own is not None and is_cross_attention(module, query.shape[2], key.shape[2]):
        mask = own if isinstance(own, ModelMask) else own()
    elif mask.misfit is not None:
        raise InvalidInput(_unfit(module, mask.misfit))
    return mask if mask.device == query.device else mask.to(query.device)


def _unfit(module: torch.nn.Module, why: str) -> str:
    """The message for a policy that does not go with a layer."""
    text = f"config.sparsek does not fit a {type(module).__name__}: {why}"
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        text += (
            ". The encoder sees every token and the decoder does not, and both read this config: only options of "
            'MaskPolicy fit both, as {"window": 4096}'
        )
    return text


@torch.compiler.disable(reason="masks are made and kept outside of graphs")
def _mask_of(
    module: torch.nn.Module, query: Tensor, key: Tensor, given: Any, is_causal: bool | None, options: Any
) -> ModelMask:
    """The mask of a layer that got a tensor or none."""
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    request = MaskRequest(batch, q_len, kv_len, kv_len - q_len, 0, None, query.device)
    policy = policy_of(getattr(module, "config", None))
    if given is None:
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        causal = arguments.flag("is_causal", is_causal) and q_len > 1
        if (causal and q_len != kv_len) or options.get("sliding_window"):
            raise InvalidInput(
                f"attention_mask is None for {q_len} queries and {kv_len} keys, and a causal mask or a window is "
                "wanted: the query positions are unknown; pass an explicit attention_mask"
            )
        if not is_causal and q_len != kv_len:  # cross-attention
            policy = None
        return model_mask(request, causal_mask_function if causal else bidirectional_mask_function, policy)
    if not isinstance(given, Tensor) or arguments.tensor("attention_mask", given).dim() != 4:
        found = f"{given.dim()}-D" if isinstance(given, Tensor) else type(given).__name__
        raise InvalidInput(
            f"attention_mask is {found}; a layer takes 4-D tensors and results of sparsek_mask"
        )
    if policy is not None and is_cross_attention(module, q_len, kv_len):
        policy = None
    if policy is not None and q_len != kv_len:
        raise InvalidInput(
            f"config.sparsek with a 4-D mask of {q_len} queries and {kv_len} keys: the query positions are unknown"
        )
    return _OF_TENSORS.get(
        given, (policy, q_len, kv_len), lambda: dense_mask(request, given[:, :, :q_len, :kv_len], policy)
    )


install()
savers.install()
AttentionInterface.register(NAME, sparsek_attention)
AttentionMaskInterface.register(NAME, sparsek_mask)
