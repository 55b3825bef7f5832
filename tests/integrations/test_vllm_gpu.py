"""The attention backend of vLLM on a GPU: its layer on batches and caches as vLLM makes them, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.integrations.vllm import Options
from sparsek.integrations.vllm_layer import LayerAttention, batch_of
from tests.engine.launch.covering import once
from tests.integrations.vllm_batches import Drawn, drawn, engine, everything, layer, right, served

pytestmark = pytest.mark.gpu
SCALE = 0.1
HEADS, DIM = (8, 2), 128
NEW, OLD = [1, 1, 1, 1, 300, 64, 513], [0, 127, 128, 3000, 0, 1000, 700]


def batch_on_gpu(new: list[int], old: list[int], **options: Any) -> Drawn:
    given = {"heads": HEADS, "dim": DIM, "page": 128, "dtype": torch.bfloat16, "device": "cuda", **options}
    return drawn(new, old, **given)


def attended(**options: Any) -> LayerAttention:
    return LayerAttention(HEADS[0], DIM, SCALE, HEADS[1], **options)


def on_gpu() -> Any:
    one = torch.tensor(1.0, dtype=torch.float32, device="cuda")
    return layer(_k_scale=one, _v_scale=one)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.isfinite().all()
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("layout", "page", "dtype"),
    once(
        product(("LBHNC", "LBNHC", "BLNHC", "BHLNC"), (64, 128), (torch.bfloat16, torch.float16)), together=2
    ),
    ids=str,
)
def test_decodes_and_chunks_of_one_batch(layout: str, page: int, dtype: torch.dtype) -> None:
    batch = batch_on_gpu(NEW, OLD, page=page, layout=layout, dtype=dtype)
    found = served(attended(), batch, batch_of(batch.common(), Options()), on_gpu())
    close(found, right(batch, everything, SCALE))


def test_windows_softcap_and_sinks() -> None:
    batch, sinks = batch_on_gpu(NEW, OLD), torch.randn(HEADS[0], device="cuda", dtype=torch.bfloat16)
    spans = batch_of(batch.common(), Options())
    found = served(attended(sliding_window=200), batch, spans, on_gpu())
    close(found, right(batch, lambda r, p, j: j > p - 200, SCALE))
    found = served(attended(logits_soft_cap=5.0, sinks=sinks), batch, spans, on_gpu())
    close(found, right(batch, everything, SCALE, 5.0, sinks))


def test_fp8_pages() -> None:
    batch = batch_on_gpu(NEW, [0] * len(NEW))
    batch.cache = torch.full(batch.cache.shape, 0x7F, dtype=torch.uint8, device="cuda")
    spans = batch_of(batch.common(), Options())
    found = served(attended(kv_cache_dtype="fp8"), batch, spans, on_gpu())
    for x in (batch.k, batch.v):
        x[:] = [each.to(torch.float8_e4m3fn).to(each.dtype) for each in x]
    close(found, right(batch, everything, SCALE))


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_the_classes_as_an_engine_uses_them(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Without vLLM: its base classes, its config and its kernel that writes to the cache are stand-ins."""
    options = {"policy": "MaskPolicy", "options": {"window": 200, "sinks": 16}, "min_tokens": 1024}
    layers = {"model.layers.3.self_attn.attn": {}, "model.layers.4.self_attn.attn": {"sliding_window": 100}}
    fields = {"additional_config": {"sparsek": options}}
    made = engine(monkeypatch, layers, HEADS, DIM, SCALE, "cuda", **fields)
    capability = SimpleNamespace(major=torch.cuda.get_device_capability()[0], minor=0)
    assert made.backend.supports_compute_capability(capability)
    batch = batch_on_gpu(NEW, OLD, layout=layout)
    spans = made.builder.build(0, batch.common())
    sparse, windowed = made.impls.values()
    found = served(sparse, batch, spans, on_gpu())
    close(found, right(batch, lambda r, p, j: (j > p - 200) | (j < 16) | (r < 5), SCALE))
    close(served(windowed, batch, spans, on_gpu()), right(batch, lambda r, p, j: j > p - 100, SCALE))


POLICIES = [
    sk.MaskPolicy(window=200, sinks=16),
    sk.policies.XAttention(threshold=0.9),
    sk.policies.MeanTopK(topk=3, block=64),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_by_a_policy_without_a_wait(policy: Any, no_sync: Callable[[], Any]) -> None:
    """Twice: the first call compiles, and reads what it must know of kernels."""
    batch, impl = batch_on_gpu(NEW, OLD), attended()
    impl.options = Options(policy, min_tokens=1024)
    common = batch.common()
    found = served(impl, batch, batch_of(common, impl.options), on_gpu())
    out, of = torch.full_like(batch.q, torch.nan), on_gpu()
    with no_sync():
        spans = batch_of(common, impl.options)
        impl.forward(of, batch.q, None, None, batch.cache, spans, out)
    assert torch.equal(out, found)
    chosen = []
    for r, (first, new) in enumerate(zip(batch.edges, batch.new, strict=False)):
        if new == 1 or batch.lengths[r] < 1024:
            chosen.append(None)
        elif isinstance(policy, sk.MaskPolicy):
            chosen.append(policy.mask(new, batch.lengths[r], "cuda").to_dense()[None, None])
        else:
            q, k = batch.q[first : first + new].transpose(0, 1)[None], batch.k[r].transpose(0, 1)[None]
            chosen.append(policy.mask(q, k, scale=SCALE).to_dense())
    masks = [None if each is None else each.reshape(-1, *each.shape[-2:]).cpu() for each in chosen]
    wide = [each if each is None else each.repeat_interleave(HEADS[0] // len(each), 0) for each in masks]
    close(found, right(batch, lambda r, p, j: everything(r, p, j) if wide[r] is None else wide[r], SCALE))


def test_a_graph_of_decodes_stays_right_while_requests_grow() -> None:
    batch, impl, of = batch_on_gpu([1] * 6, [5, 126, 127, 1000, 255, 0]), attended(), on_gpu()
    served(impl, batch, batch_of(batch.common(), Options()), of)
    common, out = batch.common(), torch.full_like(batch.q, torch.nan)
    spans = batch_of(common, Options(), longest=8192)
    assert len(spans.spans) == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            impl.forward(of, batch.q, None, None, batch.cache, spans, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(of, batch.q, None, None, batch.cache, spans, out)
    for seed in (1, 2, 3):
        grown = batch_on_gpu([1] * 6, [each + 100 * seed for each in (5, 126, 127, 600, 255, 0)], seed=seed)
        width, count = (
            min(grown.table.shape[1], batch.table.shape[1]),
            min(len(grown.cache), len(batch.cache)),
        )
        impl.do_kv_cache_update(of, grown.fresh(grown.k), grown.fresh(grown.v), grown.cache, grown.slots)
        assert int(grown.table.max()) < len(batch.cache), "the graph's cache has too few pages for this test"
        batch.cache[:count].copy_(grown.cache[:count])
        batch.table[:, :width].copy_(grown.table[:, :width])
        common.seq_lens.copy_(grown.common().seq_lens)
        batch.q.copy_(grown.q)
        out.fill_(torch.nan)
        graph.replay()
        close(out, right(grown, everything, SCALE))
