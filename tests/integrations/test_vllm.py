"""The attention backend of vLLM, on batches and caches as vLLM makes them. `make test-vllm` runs the real engine."""

from __future__ import annotations

import json
import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.integrations import vllm as plugin
from sparsek.integrations import vllm_backend
from sparsek.integrations.vllm import Options, configured, register
from sparsek.integrations.vllm_layer import LayerAttention, batch_of, rounded, store
from tests.integrations.vllm_batches import LAYOUTS, drawn, layer, right, served

VARIABLE = "SPARSEK_VLLM"
SCALE = 0.3
NEW, OLD = [1, 1, 1, 90, 64, 200], [0, 63, 300, 0, 64, 150]  # three decodes, then chunks of prompts


def attended(**options: Any) -> LayerAttention:
    return LayerAttention(4, 16, SCALE, 2, **options)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-4, atol=1e-4)


def everything(r: int, p: Tensor, j: Tensor) -> Tensor:
    return (p >= 0) & (j >= 0)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("page", [64, 128])
def test_decodes_and_chunks_of_one_batch(layout: str, page: int) -> None:
    batch = drawn(NEW, OLD, page=page, layout=layout)
    spans = batch_of(batch.common(), Options())
    assert [(each.first, each.last) for each in spans.spans] == [(0, 3), (3, 357)]
    close(served(attended(), batch, spans), right(batch, everything, SCALE))


def test_a_sliding_window_leaves_out_the_policy() -> None:
    batch, impl = drawn(NEW, OLD), attended(sliding_window=50)
    impl.options = Options(sk.MaskPolicy(window=3), 0)
    found = served(impl, batch, batch_of(batch.common(), impl.options))
    close(found, right(batch, lambda r, p, j: j > p - 50, SCALE))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_and_learned_sinks(softcap: float | None, dtype: torch.dtype) -> None:
    batch, sinks = drawn(NEW, OLD), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)
    impl = attended(logits_soft_cap=softcap, sinks=sinks)
    found = served(impl, batch, batch_of(batch.common(), Options()))
    close(found, right(batch, everything, SCALE, softcap or 0.0, sinks))


def test_chunks_of_long_requests_are_by_the_policy() -> None:
    batch, impl = drawn(NEW, OLD), attended()
    impl.options = Options(sk.MaskPolicy(window=20, sinks=5), min_tokens=128, skip_layers=frozenset({7}))
    spans = batch_of(batch.common(), impl.options)
    assert [each.host is not None for each in spans.spans] == [False, False, True]
    sparse = right(batch, lambda r, p, j: (j > p - 20) | (j < 5) if r >= 4 else everything(r, p, j), SCALE)
    close(served(impl, batch, spans), sparse)
    close(served(impl, batch, spans, layer("model.layers.7.attn")), right(batch, everything, SCALE))
    generated = batch.common(is_prefilling=torch.tensor([False] * 4 + [True, False]))
    assert [each.host is not None for each in batch_of(generated, impl.options).spans] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "policy", [sk.policies.MeanTopK(topk=2, block=64), sk.policies.XAttention(threshold=1.0)]
)
def test_policies_choose_for_each_request(policy: Any) -> None:
    batch, impl = drawn(NEW, OLD), attended()
    impl.options = Options(policy, min_tokens=0)
    rows = []
    for r, (first, new) in enumerate(zip(batch.edges, batch.new, strict=False)):
        q = batch.q[first : first + new].transpose(0, 1)[None]
        mask = policy.mask(q, batch.k[r].transpose(0, 1)[None], scale=SCALE).to_dense() if new > 1 else None
        rows.append(mask)
    wanted = []
    for r, mask in enumerate(rows):
        one = drawn(NEW, OLD)
        one.new, one.lengths = [NEW[r]], [batch.lengths[r]]
        one.q = batch.q[batch.edges[r] : batch.edges[r + 1]]
        one.k, one.v = [batch.k[r]], [batch.v[r]]
        heads = mask[0].repeat_interleave(4 // mask.shape[1], 0) if mask is not None else None
        wanted.append(
            right(one, lambda r, p, j, heads=heads: everything(r, p, j) if heads is None else heads, SCALE)
        )
    close(served(impl, batch, batch_of(batch.common(), impl.options)), torch.cat(wanted))


def test_speculated_tokens_are_decoded() -> None:
    batch = drawn([3, 1, 4, 100], [100, 5, 70, 0])
    spans = batch_of(batch.common(), Options(sk.MaskPolicy(window=2), 0), decoded=4)
    assert [(each.first, each.last, each.max_q) for each in spans.spans] == [(0, 8, 4), (8, 108, 104)]
    assert [each.host is None for each in spans.spans] == [True, False]
    impl = attended()
    close(served(impl, batch, spans), right(batch, everything, SCALE))


def test_requests_that_pad_a_batch_are_skipped_or_see_nothing() -> None:
    batch = drawn([1, 1], [40, 70])
    common = batch.common(num_reqs=4)
    for name, more in (("query_start_loc", [2, 2]), ("seq_lens", [0, 0])):
        setattr(common, name, torch.cat((getattr(common, name), torch.tensor(more, dtype=torch.int32))))
    common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound = common.query_start_loc, common.seq_lens
    common.block_table_tensor = torch.cat((batch.table, torch.zeros_like(batch.table)))
    spans = batch_of(common, Options(), longest=4096)
    assert [(each.first, each.last, each.max_k, len(each.lengths)) for each in spans.spans] == [
        (0, 2, 4096, 4)
    ]
    close(served(attended(), batch, spans), right(batch, everything, SCALE))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_fp8_pages(scale: float) -> None:
    batch = drawn(NEW, [0] * len(NEW))
    factor = torch.tensor(scale, dtype=torch.float32)
    batch.cache = torch.full(batch.cache.shape, 0x7F, dtype=torch.uint8)
    impl, of = attended(kv_cache_dtype="fp8"), layer(_k_scale=factor, _v_scale=factor)
    found = served(impl, batch, batch_of(batch.common(), Options()), of)
    for x in (batch.k, batch.v):
        x[:] = [(each / scale).to(torch.float8_e4m3fn).float() * scale for each in x]
    close(found, right(batch, everything, SCALE))


def test_a_cache_saturates_and_leaves_out_negative_slots() -> None:
    cache = torch.zeros(2, 1, 64, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    new, one = torch.tensor([[[1e6, -1e6]], [[1.0, 2.0]], [[3.0, 3.0]]]), torch.tensor(1.0)
    store(cache, new, new, torch.tensor([70, -1]), one, one)
    wide = cache.float()
    assert wide[1, 0, 6].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert int((wide != 0).sum()) == 4


def test_without_metadata_the_output_is_zero() -> None:
    batch = drawn([2], [3])
    assert not served(attended(), batch, None).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": [1.0] * 4}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8"),
        ({"chunk_lookback": 2}, "chunk_lookback"),
    ],
)
def test_layers_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sk.InvalidInput, match=f"{message}.*another attention backend"):
        attended(**options)


def test_head_sizes_and_outputs_that_are_refused() -> None:
    for size in (4, 20, 264):
        with pytest.raises(sk.InvalidInput, match="head size"):
            LayerAttention(4, size, SCALE, 2)
    with pytest.raises(sk.InvalidInput, match="4 heads over 3"):
        LayerAttention(4, 16, SCALE, 3)
    batch, one = drawn([2], [3]), torch.ones(1)
    with pytest.raises(sk.InvalidInput, match="quantize"):
        attended().forward(layer(), batch.q, None, None, batch.cache, None, batch.q, one)
    with pytest.raises(sk.InvalidInput, match="another size than keys"):
        attended().pages(batch.cache[..., :24])


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {"causal": torch.ones(6)},
        {"mm_req_doc_ranges": {}},
        {"rswa_prefix_lens": torch.ones(6)},
    ],
)
def test_batches_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(sk.InvalidInput, match="another attention backend"):
        batch_of(drawn(NEW, OLD).common(**fields), Options())


def test_bounds_are_few_and_close() -> None:
    found = [rounded(n) for n in range(5000)]
    assert all(n <= at <= n * 9 / 8 + 1 for n, at in enumerate(found))
    assert len(set(found)) < 110
    assert [rounded(n) for n in (0, 1, 2, 7, 8, 1000, 4096)] == [0, 1, 2, 7, 8, 1024, 4096]


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert configured() == configured({"other": 3}) == Options()
    given = {"policy": "SubBlock", "options": {"density": 0.5}, "min_tokens": 10, "skip_layers": [1, 0]}
    monkeypatch.setenv(VARIABLE, json.dumps(given))
    policy = sk.policies.SubBlock(density=0.5, causal=True)
    assert configured() == Options(policy, 10, frozenset({0, 1}))
    assert configured({"sparsek": {"min_tokens": 20}}).min_tokens == 20
    windowed = {"policy": "MaskPolicy", "options": {"window": 64, "sinks": 4}}
    assert configured({"sparsek": windowed}).policy == sk.MaskPolicy(window=64, sinks=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[]", VARIABLE),
        ("{", VARIABLE),
        ('{"polices": 1}', "polices"),
        ('{"options": {"topk": 3}}', "without a policy"),
        ('{"policy": "Best"}', "policy is"),
        (
            '{"policy": "Policy"}',
            "policy is 'Policy'; use one of FlexPrefill, MaskPolicy, MeanTopK, Nabla, Str",
        ),
        ('{"policy": "Quest", "options": {"topk": 4}}', "Streaming, SubBlock, VerticalSlash, XAttention$"),
        ('{"policy": "MeanTopK", "options": {"tops": 3}}', "options of MeanTopK"),
        ('{"policy": "MaskPolicy", "options": {"topk": 3}}', "neither topk"),
        ('{"policy": "MaskPolicy", "options": {"windows": 3}}', "options of MaskPolicy"),
        (
            '{"policy": "MaskPolicy", "options": {"causal": false}}',
            "no token after its own.* give it causal=True",
        ),
        ('{"policy": "VSA"}', r"policy VSA\(\) is not causal; it has no other form: .* XAttention\(\)$"),
        (
            '{"policy": "SubBlock", "options": {"causal": false}}',
            "SubBlock.* is not causal; give it causal=True",
        ),
        ('{"min_tokens": "many"}', "min_tokens"),
        ('{"skip_layers": 3}', "skip_layers"),
        ('{"skip_layers": ["a"]}', "skip_layers"),
    ],
)
def test_options_that_are_refused(monkeypatch: pytest.MonkeyPatch, given: str, message: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(sk.InvalidInput, match=message):
        configured()
    with pytest.raises(sk.InvalidInput, match=message):
        register()


class Registry(ModuleType):
    """vLLM's registry of backends, which refuses a name that it has."""

    def __init__(self) -> None:
        super().__init__("vllm.v1.attention.backends.registry")
        self.AttentionBackendEnum = Enum("AttentionBackendEnum", "FLASH_ATTN CPU_ATTN")
        self.made: dict[str, str] = {}

    def register_backend(self, backend: Any, class_path: str) -> None:
        if isinstance(backend, str):
            if backend in self.AttentionBackendEnum.__members__:
                raise ValueError(f"Backend {backend} already exists")
            names = [*self.AttentionBackendEnum.__members__, backend]
            self.AttentionBackendEnum = Enum("AttentionBackendEnum", names)
            self.made[backend] = class_path
        else:
            self.made[backend.name] = class_path


@pytest.mark.parametrize("on_cpu", [False, True])
def test_register_may_be_called_again(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    registry = Registry()
    parents = "vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("SPARSEK_VLLM_CPU", "1" if on_cpu else "0")
    register()
    register()
    assert set(registry.made) == {plugin.NAME} | ({"CPU_ATTN"} if on_cpu else set())
    for path in registry.made.values():
        module, _, name = path.rpartition(".")
        assert getattr(sys.modules[module], name) is vllm_backend.SparseKBackend


def test_what_the_backend_says() -> None:
    backend = vllm_backend.SparseKBackend
    assert (backend.get_name(), backend.get_supported_kernel_block_sizes()) == ("SPARSEK", [64, 128])
    assert backend.get_supported_head_sizes()[:2] == [8, 16]
    assert backend.get_supported_head_sizes()[-1] == 256
    assert issubclass(backend.get_impl_cls(), LayerAttention)
    assert backend.get_builder_cls() is vllm_backend.SparseKBuilder
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert not backend.forward_includes_kv_cache_update
    assert set(backend.supported_kv_cache_dtypes) == {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3"}
