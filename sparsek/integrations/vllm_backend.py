"""The classes that vLLM loads for the backend SPARSEK: thin ones over `vllm_layer`, with vLLM's own as bases."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.integrations import vllm as plugin
from sparsek.integrations.vllm_layer import (
    FP8,
    HEAD_SIZES,
    PAGES,
    PLAIN,
    Batch,
    LayerAttention,
    batch_of,
    summary,
)
from sparsek.integrations.vllm_shards import ContextShard

try:
    vllm: Any = import_module("vllm.v1.attention.backend")
except ImportError:  # documentation and type checkers read the classes without vLLM
    vllm = SimpleNamespace(AttentionBackend=object, AttentionImpl=object, AttentionMetadataBuilder=object)

OLDEST = (8, 0)  # compute capability
FAVOURED = "LBHNC"  # a head's rows of a page are neighbours in memory


UNSHARDED = "does not support sliding windows and policies with decode context parallelism"


class SparseKImpl(LayerAttention, vllm.AttentionImpl):
    """The attention of one layer, with the options of the engine that loads the model."""

    # Both are required where ranks share the tokens of requests.
    can_return_lse_for_decode, supports_dcp = True, True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        config = import_module("vllm.config").get_current_vllm_config_or_none()
        self.options = plugin.configured(getattr(config, "additional_config", None))
        if getattr(self, "dcp_world_size", 1) > 1:
            self.group = import_module("vllm.distributed.parallel_state").get_dcp_group()
            if self.window is not None:
                raise InvalidInput(f"{plugin.NAME} {UNSHARDED}, and a layer has a sliding window")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to the cache, on a GPU by vLLM's own kernel."""
        if not kv_cache.is_cuda:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        import_module("vllm._custom_ops").reshape_and_cache_flash(
            key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )


class SparseKBuilder(vllm.AttentionMetadataBuilder):
    """Cuts each batch into spans: decodes, dense prompts, and prompts under the policy.

    CUDA graphs hold batches of decodes as a whole. With prompts they hold what is between the layers' attention.
    """

    _cudagraph_support: ClassVar[Any] = getattr(
        getattr(vllm, "AttentionCGSupport", None), "UNIFORM_BATCH", None
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.options = plugin.configured(vllm_config.additional_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        size, value_size = kv_cache_spec.head_size, getattr(kv_cache_spec, "head_size_v", None)
        parallel = vllm_config.parallel_config
        reasons = [
            (value_size not in (None, size), f"values of {value_size} with keys of {size}"),
            (vllm_config.model_config.is_mm_prefix_lm, "models whose images see later tokens"),
            (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill_context_parallel_size"),
            (
                getattr(vllm_config.model_config, "rswa_window", None) is not None,
                "windows that keep the prompt",
            ),
        ]
        found = [text for holds, text in reasons if holds]
        if found:
            raise InvalidInput(f"{plugin.NAME} does not support {', nor '.join(found)}")
        self.shard = None
        ranks = getattr(parallel, "decode_context_parallel_size", 1)
        if ranks > 1 and getattr(kv_cache_spec, "dcp_sharded", True):
            if self.options.policy is not None:
                raise InvalidInput(f"{plugin.NAME} {UNSHARDED}; leave the policy {self.options.policy} out")
            rank = import_module("vllm.distributed.parallel_state").get_dcp_group().rank_in_group
            self.shard = ContextShard(ranks, rank, getattr(parallel, "cp_kv_cache_interleave_size", 1))
            self.reorder_batch_threshold = 1  # queries that are verified at once see other numbers of tokens
        self._log(layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Of decodes; of several verified tokens at once too, unless ranks share the tokens of requests."""
        sharded = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1
        return vllm.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if sharded else cls._cudagraph_support

    def _log(self, layer_names: list[str]) -> None:
        """One line for an engine, by the group of its first layer, on the first of the GPUs that share a layer."""
        config = self.vllm_config
        every = getattr(config.compilation_config, "static_forward_context", {})
        impls = {name: getattr(layer, "impl", None) for name, layer in every.items()}
        layers = {name: impl for name, impl in impls.items() if isinstance(impl, LayerAttention)}
        parallel = config.parallel_config
        rank = getattr(parallel, "rank", 0) % getattr(parallel, "tensor_parallel_size", 1)
        if layers and next(iter(layers)) in layer_names and not rank:
            plugin.LOGGER.info(summary(layers, self.options, config.model_config.max_model_len))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        """The spans of a batch. vLLM gives no common prefix: cascade attention is off."""
        return batch_of(
            common_attn_metadata, self.options, self.reorder_batch_threshold or 1, shard=self.shard
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Batch:
        """The spans of a batch that a graph is captured with: it is replayed for requests of any length."""
        longest = self.vllm_config.model_config.max_model_len
        return batch_of(
            common_attn_metadata, self.options, self.reorder_batch_threshold or 1, longest, self.shard
        )


class SparseKBackend(vllm.AttentionBackend):
    """The backend SPARSEK: bf16 and fp16, on a CPU float32 too; pages of 64 or 128 tokens in any layout."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*PLAIN, *FP8]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's list of backends."""
        return plugin.NAME

    @staticmethod
    def get_impl_cls() -> type[SparseKImpl]:
        """The class of a layer's attention."""
        return SparseKImpl

    @staticmethod
    def get_builder_cls() -> type[SparseKBuilder]:
        """The class that makes the metadata of a batch."""
        return SparseKBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page."""
        return list(PAGES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Every multiple of 8 up to 256."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """True from 8.0 on: Ampere and newer."""
        return (capability.major, capability.minor) >= OLDEST

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Every layout, the one with neighbouring rows first."""
        layouts = import_module("vllm.v1.kv_cache_interface").KVCacheLayout
        return tuple(sorted(layouts, key=lambda layout: layout.name != FAVOURED))

    @classmethod
    def supports_sink(cls) -> bool:
        """True: learned sinks, as of gpt-oss."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True: windows of the model's own layers."""
        return True
