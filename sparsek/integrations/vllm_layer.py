"""Attention of one layer of vLLM over its paged cache, and a batch as calls of `attention_paged`. Imports no vLLM.

A cache is [pages, Hkv, page, 2 D], K then V, in any strides. Requests with one new token, or with no more than the
engine verifies at once when it speculates, are decodes; those with more are chunks of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.ops.attention_paged import attention_paged
from sparsek.core.errors import InvalidInput
from sparsek.integrations.config import number_in
from sparsek.integrations.vllm import NAME, OWN, VARIABLE, Options
from sparsek.integrations.vllm_shards import (
    ContextShard,
    combined,
    gathered_heads,
    with_new_tokens,
    with_sinks,
)

HEAD_SIZES = tuple(range(8, 257, 8))
PAGES = (64, 128)
PLAIN, FP8 = ("auto", "float16", "bfloat16"), ("fp8", "fp8_e4m3")  # dtypes of the cache, as vLLM calls them
LARGEST = 448.0  # the largest e4m3
CURE = "choose another attention backend"


class RequestSpan(NamedTuple):
    """Neighbouring requests of a batch that one call of attention takes.

    Their queries are `first` to `last` - 1 of the batch. `table` int32 [requests, width], `lengths` int32 [requests]
    and `edges` int32 [requests + 1], which begin at 0, are on the device. `host`: (edges, lengths) on the CPU, for
    chunks of prompts that a policy may take. Over a shard `lengths` and `max_k` are of the tokens here, of chunks
    without their new ones.
    """

    first: int
    last: int
    table: Tensor
    lengths: Tensor
    edges: Tensor
    max_q: int
    max_k: int
    host: tuple[Tensor, Tensor] | None = None


class Batch(NamedTuple):
    """The metadata of one step: what every layer of a group shares. `shard`: the tokens that this rank keeps."""

    spans: tuple[RequestSpan, ...]
    shard: ContextShard | None = None


def batch_of(
    common: Any,
    options: Options,
    decoded: int = 1,
    longest: int | None = None,
    shard: ContextShard | None = None,
) -> Batch:
    """The spans of a batch, from vLLM's CommonAttentionMetadata. Waits for nothing where lengths are on the host.

    decoded: most new tokens of a request that is decoded. longest: the bound on keys that a CUDA graph is captured
    with; by default that of the batch. shard: the tokens that this rank keeps of each request.
    """
    _refuse(common)
    edges = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    new = [last - first for first, last in pairwise(edges)]
    on_host = _on_host(common) if max(new, default=0) > decoded else None
    lengths = [common.max_seq_len] * len(new) if on_host is None else on_host.tolist()
    kinds = [
        "decode"
        if n <= decoded
        else "chunk"
        if shard or _by_policy(common, options, r, lengths[r])
        else "dense"
        for r, n in enumerate(new)
    ]
    spans = []
    for kind, members in groupby(range(common.num_reqs), key=kinds.__getitem__):
        start, *more = members
        stop = more[-1] + 1 if more else start + 1
        first, last = edges[start], edges[stop]
        if first == last:  # requests that pad a batch to the size of a graph
            continue
        on_device = common.query_start_loc[start : stop + 1]
        host = None
        if kind == "chunk" and on_host is not None:
            host = common.query_start_loc_cpu[start : stop + 1] - first, on_host[start:stop]
        here, max_k = common.seq_lens[start:stop], longest or rounded(max(lengths[start:stop]))
        if shard is not None:
            here, max_k = _here(common, shard, slice(start, stop), on_device, kind), shard.bound(max_k)
        spans.append(
            RequestSpan(
                first,
                last,
                common.block_table_tensor[start:stop],
                here,
                on_device - first if first else on_device,
                # vLLM may distribute verified tokens anew on the device.
                max(rounded(max(new[start:stop])), decoded if kind == "decode" else 1),
                max_k,
                host,
            )
        )
    return Batch(tuple(spans), shard)


def _here(common: Any, shard: ContextShard, requests: slice, edges: Tensor, kind: str) -> Tensor:
    """The tokens that this rank keeps of some requests, with the new ones of decodes. A graph reads vLLM's own."""
    if kind != "decode":
        return shard.lengths(common.seq_lens[requests] - edges.diff())
    own = getattr(common, "dcp_local_seq_lens", None)
    return shard.lengths(common.seq_lens[requests]) if own is None else own[requests]


def _refuse(common: Any) -> None:
    """InvalidInput for a batch whose mask is not causal."""
    if common.causal is not True:
        raise InvalidInput(f"{NAME} attends causally, and this batch does not; {CURE}")
    for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "encoder_seq_lens"):
        if getattr(common, name, None) is not None:
            raise InvalidInput(f"{NAME} knows no {name}, which this batch has; {CURE}")


def _on_host(common: Any) -> Tensor:
    """Lengths on the CPU. Those of chunks of prompts are exact in vLLM's bound; without one this waits for them."""
    for name in ("seq_lens_cpu_upper_bound", "_seq_lens_cpu"):
        found = getattr(common, name, None)
        if found is not None:
            return found[: common.num_reqs]
    return common.seq_lens[: common.num_reqs].cpu()


def _by_policy(common: Any, options: Options, r: int, length: int) -> bool:
    """Whether the policy takes this request: a chunk of a prompt, with enough keys."""
    if options.policy is None or length < options.min_tokens:
        return False
    prompts = getattr(common, "is_prefilling", None)
    return prompts is None or prompts.is_cuda or bool(prompts[r])


def rounded(bound: int) -> int:
    """At least `bound`, in 8 steps for each power of two: plans are kept for each bound, and steps are many."""
    step = max(1 << max(bound - 1, 0).bit_length() - 4, 1) if bound > 8 else 1
    return -(-bound // step) * step


class LayerAttention:
    """The attention of one layer: what vLLM's AttentionImpl has, without its base class.

    Raises InvalidInput for a layer of a kind that it does not attend.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.softcap = float(logits_soft_cap or 0.0)
        self.window = MaskPolicy(window=sliding_window) if sliding_window else None
        self.sliding_window = sliding_window
        self.attn_type, self.kv_sharing_target_layer_name = attn_type, kv_sharing_target_layer_name
        self.options = Options()
        self.group: Any = None  # of ranks that share the tokens of requests
        reasons = [
            (alibi_slopes is not None, "ALiBi slopes"),
            (str(getattr(attn_type, "value", attn_type)) != "decoder", f"attention of the kind {attn_type}"),
            (head_size not in HEAD_SIZES, f"a head size of {head_size}: multiples of 8 to 256 only"),
            (
                kv_cache_dtype not in (*PLAIN, *FP8),
                f"a cache of {kv_cache_dtype}: {', '.join((*PLAIN, *FP8))} only",
            ),
            (num_heads % self.num_kv_heads != 0, f"{num_heads} heads over {self.num_kv_heads}"),
            *((value not in (None, False), f"the option {name} of a layer") for name, value in extra.items()),
        ]
        found = [text for holds, text in reasons if holds]
        if found:
            raise InvalidInput(f"{NAME} does not support {', nor '.join(found)}; {CURE}")

    def pages(self, kv_cache: Tensor) -> Tensor:
        """The cache of this layer in the dtype that its bytes have."""
        if kv_cache.shape[-1] != 2 * self.head_size:
            raise InvalidInput(
                f"the cache is {list(kv_cache.shape)}; heads of {self.head_size} need [pages, heads, page, "
                f"{2 * self.head_size}]: {NAME} takes no values of another size than keys; {CURE}"
            )
        if self.kv_cache_dtype in FP8 and kv_cache.dtype == torch.uint8:
            return kv_cache.view(torch.float8_e4m3fn)
        return kv_cache

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query [tokens, Hq, D] into output [tokens, Hq, D] and return it.

        The cache has the new keys and values already. Without metadata, as in vLLM's profiling run, zeros are written;
        tokens behind the batch's keep what they are.
        """
        if output_scale is not None or output_block_scale is not None:
            raise InvalidInput(f"{NAME} does not quantize its output; switch that fusion off")
        if attn_metadata is None:
            return output.zero_()
        cache = self.pages(kv_cache)
        options = dict[str, Any](scale=self.scale, softcap=self.softcap)
        if self.sinks is not None:
            options["sink_logits"] = self.sinks.float()  # vLLM may load new weights in place
        if cache.dtype == torch.float8_e4m3fn:
            options |= {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}
        if attn_metadata.shard is not None:
            return self._over_shards(layer, query, key, value, cache, attn_metadata, output, options)
        policy = self.policy_in(getattr(layer, "layer_name", ""))
        for span in attn_metadata.spans:
            sparse = span.host is not None and policy is not None
            edges, lengths = span.edges, span.lengths
            if sparse and span.host is not None and not isinstance(policy, MaskPolicy):
                edges, lengths = span.host
            attention_paged(
                query[span.first : span.last],
                cache,
                span.table,
                lengths,
                edges,
                policy if sparse else self.window,
                max_seqlen_q=span.max_q,
                max_seqlen_k=min(span.max_k, span.table.shape[1] * cache.shape[2]),
                out=output[span.first : span.last],
                **options,
            )
        return output

    def _over_shards(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor,
        batch: Batch,
        output: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """As `forward`, where this rank keeps some tokens of each request, and others have other heads of q."""
        shard, sinks = batch.shard, options.pop("sink_logits", None)
        assert shard is not None
        for span in batch.spans:
            at = slice(span.first, span.last)
            part = attention_paged(
                gathered_heads(query[at], self.num_kv_heads, self.group),
                cache,
                span.table,
                span.lengths,
                span.edges,
                causal=False,
                max_seqlen_q=span.max_q,
                max_seqlen_k=min(span.max_k, span.table.shape[1] * cache.shape[2]),
                return_lse=True,
                **options,
            )
            out, lse = combined(*part, self.num_kv_heads, self.group, shard.rank)
            if span.host is not None:
                assert key is not None
                assert value is not None
                new = [
                    as_stored(x[at], cache, each)
                    for x, each in ((key, layer._k_scale), (value, layer._v_scale))
                ]
                given = (query[at], new[0], new[1]), span.host[0], self.scale, self.softcap
                out, lse = with_new_tokens(out, lse, *given)
            output[at] = out if sinks is None else with_sinks(out, lse, sinks)
        return output

    def policy_in(self, name: str) -> MaskRule | None:
        """The policy of chunks of prompts in the layer of this name. Layers with a sliding window have none."""
        skipped = self.options.skip_layers
        if self.window is not None or (skipped and number_in(name) in skipped):
            return None
        return self.options.policy

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values [tokens, Hkv, D] to the cache. Slots [tokens] are page * rows + row.

        Tokens with a negative slot, and those behind the slots, are left out. On a GPU this waits for the device;
        vLLM's class calls vLLM's kernel there.
        """
        store(self.pages(kv_cache), key, value, slot_mapping, layer._k_scale, layer._v_scale)


def store(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
    """Rows of a cache [pages, Hkv, page, 2 D] from keys and values [tokens, Hkv, D]; FP8 over the scales."""
    kept = slots >= 0
    slots = slots[kept].long()
    rows = cache.shape[2]
    new = [x[: kept.shape[0]][kept] for x in (key, value)]
    if cache.dtype == torch.float8_e4m3fn:
        new = [_scaled(x, scale) for x, scale in zip(new, (k_scale, v_scale), strict=True)]
    both = torch.cat(new, 2).to(cache.dtype)
    if both.dtype == torch.float8_e4m3fn:  # torch has no index_put of it
        cache, both = cache.view(torch.uint8), both.view(torch.uint8)
    cache.transpose(1, 2)[slots // rows, slots % rows] = both


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST)


def as_stored(x: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    """Keys or values with the values that the cache has of them."""
    if cache.dtype != torch.float8_e4m3fn:
        return x
    return (_scaled(x, scale).to(cache.dtype).float() * scale).to(x.dtype)


def summary(layers: Mapping[str, LayerAttention], options: Options, longest: int) -> str:
    """What an engine does with its layers, by name, in one line: which are sparse, and what is dense and why.

    longest: the most tokens of a request.
    """
    count = f"{NAME}: {_layers(len(layers))}"
    policy = options.policy
    if policy is None:
        return f"{count}, all dense: neither {VARIABLE} nor additional_config['{OWN}'] names a policy"
    windows = [name for name, each in layers.items() if each.window is not None]
    sparse = [name for name, each in layers.items() if each.policy_in(name) is not None]
    numbers = {number_in(name) for name in layers}
    skipped, unknown = (
        sorted(n for n in options.skip_layers if (n in numbers) is known) for known in (True, False)
    )
    dense = ["decodes", f"prompts of fewer than {options.min_tokens} keys"]
    dense += [f"skip_layers {', '.join(map(str, skipped))}"] * bool(skipped)
    dense += [f"{_layers(len(windows))} with a sliding window, which stays"] * bool(windows)
    notes = [f"dense: {', '.join(dense)}"]
    if unknown:
        notes.append(f"no layer here has the number {', '.join(map(str, unknown))} of skip_layers")
    if options.min_tokens > longest:
        notes.append(
            f"nothing is sparse: no request has {options.min_tokens} keys, max_model_len is {longest}"
        )
    elif sparse and not isinstance(policy, MaskPolicy):
        notes.append("the choice depends on where vLLM cuts a prompt into chunks")
    return f"{count}; chunks of prompts in {len(sparse)} by {policy}; {'; '.join(notes)}"


def _layers(n: int) -> str:
    return f"{n} layer{'s' * (n != 1)}"
