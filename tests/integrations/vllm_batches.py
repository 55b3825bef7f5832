"""Batches, caches and layers as vLLM makes them, without vLLM, and the attention that is right for them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsek.integrations import vllm_backend
from sparsek.integrations.vllm_layer import LayerAttention
from tests.integrations.dense import dense

# The order of the axes (layer, page, head, row, column) in memory: three members of vLLM's KVCacheLayout.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class Drawn:
    """A random batch: requests with `new` tokens of `lengths`, and their queries, keys and values."""

    new: list[int]
    lengths: list[int]
    q: Tensor  # [tokens, Hq, D]
    k: list[Tensor]  # [length, Hkv, D] of each request
    v: list[Tensor]
    page: int
    table: Tensor
    cache: Tensor  # [pages, Hkv, page, 2 D] without the new tokens
    slots: Tensor

    @property
    def edges(self) -> list[int]:
        return [sum(self.new[:r]) for r in range(len(self.new) + 1)]

    def fresh(self, of: list[Tensor]) -> Tensor:
        """The new tokens' keys or values [tokens, Hkv, D]."""
        return torch.cat([x[len(x) - new :] for x, new in zip(of, self.new, strict=True)])

    def common(self, **fields: Any) -> SimpleNamespace:
        """vLLM's CommonAttentionMetadata."""
        device = self.q.device
        edges = torch.tensor(self.edges, dtype=torch.int32, device="cpu")
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cpu")
        given = {
            "query_start_loc": edges.to(device), "query_start_loc_cpu": edges, "seq_lens": lengths.to(device),
            "num_reqs": len(self.new), "num_actual_tokens": sum(self.new), "max_query_len": max(self.new),
            "max_seq_len": max(self.lengths), "block_table_tensor": self.table, "slot_mapping": self.slots,
            "causal": True, "seq_lens_cpu_upper_bound": lengths, "is_prefilling": None, "mm_req_doc_ranges": None,
            "rswa_prefix_lens": None, "encoder_seq_lens": None,
        }  # fmt: skip
        return SimpleNamespace(**{**given, **fields})


def drawn(
    new: list[int],
    old: list[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    page: int = 64,
    layout: str = "LBHNC",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Drawn:
    """A batch over shuffled pages. Rows behind the lengths, and pages of nobody, are NaN."""
    random = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32).to(device, dtype)

    lengths = [a + b for a, b in zip(new, old, strict=True)]
    width = max(-(-length // page) for length in lengths) + 1
    count = len(new) * width + 3
    names = (torch.randperm(count - 1, generator=random) + 1).tolist()  # page 0 is vLLM's null page
    table = torch.zeros(len(new), width, dtype=torch.int32, device="cpu")
    order = LAYOUTS[layout]
    sides = (2, count, heads[1], page, 2 * dim)
    memory = torch.full([sides[axis] for axis in order], torch.nan, dtype=dtype, device=device)
    cache = memory.permute([order.index(axis) for axis in range(5)])[1]
    k, v = ([randn(length, heads[1], dim) for length in lengths] for _ in range(2))
    slots: list[Tensor] = []
    for r, length in enumerate(lengths):
        pages = torch.tensor(
            [names.pop() for _ in range(-(-length // page))], dtype=torch.int64, device="cpu"
        )
        table[r, : len(pages)] = pages
        at = torch.arange(length, device="cpu")
        rows = pages[at // page] * page + at % page
        slots.append(rows[old[r] :])
        before = rows[: old[r]].to(device)
        both = torch.cat((k[r], v[r]), 2)[: old[r]]
        cache.transpose(1, 2)[before // page, before % page] = both
    return Drawn(
        new, lengths, randn(sum(new), heads[0], dim), k, v, page, table.to(device), cache,
        torch.cat(slots).to(device),
    )  # fmt: skip


def layer(name: str = "model.layers.3.self_attn.attn", **fields: Any) -> Any:
    """What the attention of a layer reads of vLLM's Attention."""
    one = torch.tensor(1.0, dtype=torch.float32, device="cpu")
    return SimpleNamespace(**{"layer_name": name, "_k_scale": one, "_v_scale": one, **fields})


def served(impl: LayerAttention, batch: Drawn, spans: Any, of: Any = None) -> Tensor:
    """Update and attention as vLLM calls them, into a poisoned output."""
    of = layer() if of is None else of
    impl.do_kv_cache_update(of, batch.fresh(batch.k), batch.fresh(batch.v), batch.cache, batch.slots)
    out = torch.full_like(batch.q, torch.nan)
    return impl.forward(of, batch.q, batch.fresh(batch.k), batch.fresh(batch.v), batch.cache, spans, out)


def everything(r: int, p: Tensor, j: Tensor) -> Tensor:
    return (p >= 0) & (j >= 0)


def right(batch: Drawn, seen: Any, scale: float, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """The attention of a batch in float64; `seen(r, p, j)` is a mask over positions of queries and keys."""
    rows = []
    for r, (first, new, length) in enumerate(zip(batch.edges, batch.new, batch.lengths, strict=False)):
        q = batch.q[first : first + new].double().cpu().transpose(0, 1)[None]
        k, v = (x[r].double().cpu().transpose(0, 1)[None] for x in (batch.k, batch.v))
        p = torch.arange(length - new, length, device="cpu")[:, None]
        j = torch.arange(length, device="cpu")[None]
        mask = seen(r, p, j) & (j <= p)
        rows.append(_one(q, k, v, mask, scale, softcap, sinks)[0].transpose(0, 1))
    return torch.cat(rows)


def _one(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    if not softcap and sinks is None:
        return dense(q, k, v, mask, scale)[0]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        more = sinks.double().cpu()[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat((scores, more), 3).softmax(3)[..., :-1]) @ v
    return scores.softmax(3) @ v


class Builder:
    """vLLM's AttentionMetadataBuilder."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool = False) -> None:
        self.reorder_batch_threshold = threshold


class Engine(NamedTuple):
    """SparseK's classes in an engine: the attention of each layer by name, and the builder of their metadata."""

    backend: Any
    impls: dict[str, Any]
    builder: Any


def engine(
    monkeypatch: pytest.MonkeyPatch,
    layers: dict[str, dict[str, Any]],
    heads: tuple[int, int],
    dim: int,
    scale: float,
    device: str = "cpu",
    **fields: Any,
) -> Engine:
    """The classes that vLLM loads for the backend, over stand-ins of its own, as an engine makes objects of them.

    `layers`: arguments of each layer's attention by its name. `fields`: other fields of vLLM's config.
    """
    config = SimpleNamespace(
        additional_config={}, parallel_config=SimpleNamespace(), compilation_config=SimpleNamespace(),
        model_config=SimpleNamespace(is_mm_prefix_lm=False, max_model_len=8192),
    )  # fmt: skip
    vars(config).update(fields)
    modules: dict[str, dict[str, Any]] = {
        "attention.backend": {
            "AttentionBackend": object, "AttentionImpl": object, "AttentionMetadataBuilder": Builder,
            "AttentionCGSupport": Enum("AttentionCGSupport", "UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE"),
        },
        "kv_cache_interface": {"KVCacheLayout": Enum("KVCacheLayout", list(LAYOUTS))},
    }  # fmt: skip
    modules = {f"vllm.v1.{name}": each for name, each in modules.items()}
    modules["vllm.config"] = {"get_current_vllm_config_or_none": lambda: config}
    modules["vllm.distributed"] = {}
    modules["vllm.distributed.parallel_state"] = {"get_dcp_group": lambda: SimpleNamespace(rank_in_group=1)}
    modules["vllm._custom_ops"] = {"reshape_and_cache_flash": reshape_and_cache_flash}
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location(vllm_backend.__name__, str(vllm_backend.__file__))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    backend: Any = loaded.SparseKBackend
    impls = {
        name: backend.get_impl_cls()(heads[0], dim, scale, heads[1], **each) for name, each in layers.items()
    }
    context = {name: SimpleNamespace(impl=impl) for name, impl in impls.items()}
    config.compilation_config.static_forward_context = {"model.norm": SimpleNamespace(), **context}
    cache = SimpleNamespace(head_size=dim, head_size_v=dim)
    return Engine(backend, impls, backend.get_builder_cls()(cache, list(layers), config, device))


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, dtype: str, *scales: Tensor
) -> None:
    """vLLM's kernel that writes to a cache [pages, page, Hkv, D] in the model's dtype."""
    page, row = slots // keys.shape[1], slots % keys.shape[1]
    keys[page, row], values[page, row] = key, value
