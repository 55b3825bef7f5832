"""Attention over the paged caches of transformers' continuous batching: many requests in one batch item, flattened.

The engine passes its cache and lengths as further options of the layer's call; `cache.update`, which from transformers
5.24 the layer has called before, stores the new keys and values. It either returns those of all requests, one behind
the other, or, for decode, leaves them to the kernel, with a table of pages.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_paged import attention_paged
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers_config import paged_policy, policy_of

Options: TypeAlias = dict[str, Any]


@torch.compiler.disable(reason="the tensors of a paged cache are written in place, outside of graphs")
def paged(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    settings: Options,
) -> Tensor:
    """out [1, tokens, Hq, Dv] of new queries, keys and values [1, H, tokens, D] of all requests.

    Causal in each request, its last query at its last key. `settings`: scale and other options of `attention`.
    """
    cache = options.get("cache")
    if cache is not None and "kwargs" not in inspect.signature(cache.update).parameters:
        raise InvalidInput(
            f"transformers {version('transformers')} passes paged caches in another way than the one known here, that "
            "of 5.23; use a newer one"
        )
    if query.shape[0] != 1:
        raise InvalidInput(
            f"a paged cache goes with one batch item of all requests; query has {query.shape[0]}"
        )
    policy = _policy(module, options)
    found = {name: each for name, each in options.items() if name != "cache"}
    if cache is not None:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=found
        )
    if found.get("block_table") is not None:
        return _tabled(query, key, value, policy, found, settings)
    return _flat(query, key, value, policy, found, settings)


def _policy(module: torch.nn.Module, options: Options) -> MaskPolicy:
    """What the policy of the config and the layer's own window admit."""
    own = options.get("sliding_window")
    own = None if own is None else arguments.integer("sliding_window", own, 1)
    return paged_policy(policy_of(getattr(module, "config", None)), own)


def _flat(
    query: Tensor, key: Tensor, value: Tensor, policy: MaskPolicy, found: Options, settings: Options
) -> Tensor:
    """Of the keys and values of all requests, one behind the other. One sync for new lengths on a GPU.

    Tokens behind those of the last request are padding, and get 0.
    """
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            "the lengths of requests are read here, which a CUDA graph cannot capture; pass "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    mask = policy.packed(found["cu_seq_lens_q"], found["cu_seq_lens_k"])
    tokens, keys = query.shape[2], mask.kv_len
    if mask.q_len > tokens or keys > key.shape[2]:
        raise InvalidInput(
            f"cu_seq_lens are for {mask.q_len} queries and {keys} keys; there are {tokens} and {key.shape[2]}"
        )
    out = attention(query[:, :, : mask.q_len], key[:, :, :keys], value[:, :, :keys], mask, **settings)
    if mask.q_len < tokens:
        out = torch.nn.functional.pad(out, (0, 0, 0, tokens - mask.q_len))
    return out.transpose(1, 2).contiguous()


def _tabled(
    query: Tensor, key: Tensor, value: Tensor, policy: MaskPolicy, found: Options, settings: Options
) -> Tensor:
    """Of one new token for each request, whose keys and values are in pages [pages, page, Hkv, D] of a table.

    The new ones are written here. No sync. A request without keys, as graphs are padded with, writes to page 0, which
    the cache gives to no request, and gets 0.
    """
    k_pages, v_pages, table = found["k_cache"], found["v_cache"], found["block_table"]
    lengths = found["cu_seq_lens_k"].diff()
    if query.shape[2] != len(lengths):
        raise InvalidInput(
            f"a table of pages goes with one new token for each request; there are {query.shape[2]} tokens and "
            f"{len(lengths)} requests"
        )
    last = (lengths - 1).clamp(min=0).long()
    page = table.gather(1, last[:, None] // k_pages.shape[1])[:, 0].clamp(min=0).long()
    place = page * (lengths > 0), last % k_pages.shape[1]
    for pages, new in ((k_pages, key), (v_pages, value)):
        pages.index_put_(place, new[0].transpose(0, 1))
    if "sink_logits" in settings:
        settings = {**settings, "sink_logits": settings["sink_logits"].float()}
    each = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    pair = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    out = attention_paged(
        query[0].transpose(0, 1), pair, table, lengths, each, policy, max_seqlen_q=1, **settings
    )
    return out[None]
