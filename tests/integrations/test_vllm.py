"""The attention backend of vLLM, on batches and caches as vLLM makes them. `make test-vllm` runs the real engine."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.rule import MaskRule
from sparsek.integrations import vllm as plugin
from sparsek.integrations import vllm_backend
from sparsek.integrations.vllm import Options, configured, platform, register
from sparsek.integrations.vllm_layer import LayerAttention, batch_of, rounded, store, summary
from tests.house.tools import ROOT, run
from tests.integrations.vllm_batches import LAYOUTS, drawn, engine, everything, layer, right, served
from tests.refusals import refused

VARIABLE = "SPARSEK_VLLM"
SCALE = 0.3
DEEP = "[" * 100_000
NEW, OLD = [1, 1, 1, 90, 64, 200], [0, 63, 300, 0, 64, 150]  # three decodes, then chunks of prompts


def attended(**options: Any) -> LayerAttention:
    return LayerAttention(4, 16, SCALE, 2, **options)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-4, atol=1e-4)


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
    refused(f"{message}.*another attention backend", attended, **options)


def test_head_sizes_and_outputs_that_are_refused() -> None:
    for size in (4, 20, 264):
        refused("head size", LayerAttention, 4, size, SCALE, 2)
    refused("4 heads over 3", LayerAttention, 4, 16, SCALE, 3)
    batch, one = drawn([2], [3]), torch.ones(1)
    refused("quantize", attended().forward, layer(), batch.q, None, None, batch.cache, None, batch.q, one)
    refused("another size than keys", attended().pages, batch.cache[..., :24])


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
    refused("another attention backend", batch_of, drawn(NEW, OLD).common(**fields), Options())


def test_bounds_are_few_and_close() -> None:
    found = [rounded(n) for n in range(5000)]
    assert all(n <= at <= n * 9 / 8 + 1 for n, at in enumerate(found))
    assert len(set(found)) < 110
    assert [rounded(n) for n in (0, 1, 2, 7, 8, 1000, 4096)] == [0, 1, 2, 7, 8, 1024, 4096]


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (
        configured()
        == configured({"other": 3})
        == configured({"other": {"policy": "of others"}})
        == Options()
    )
    of_a_platform: Any = SimpleNamespace(compute_hash=lambda: "1")
    assert configured(of_a_platform) == Options()
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
        (f'{{"policy": {DEEP}}}', f"{VARIABLE} is .*; it is nested too deep$"),
        (DEEP, "nested too deep"),
    ],
)
def test_options_that_are_refused(monkeypatch: pytest.MonkeyPatch, given: str, message: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    refused(message, configured)


def test_options_of_a_dict_that_is_nested_too_deep() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for given in ({"policy": deep}, {"policy": "MeanTopK", "options": {"topk": deep}}, {"skip_layers": deep}):
        with pytest.raises(sk.InvalidInput):
            configured({"sparsek": given})
    while deep:  # released from the outside: a list releases what it holds by recursion
        deep = deep[0]


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        (
            {"policy": "XAttention"},
            "has the key 'policy'; SPARSEK reads its options below the key 'sparsek', as in",
        ),
        ({"options": {}, "other": 1}, "has the key 'options'"),
        ({"min_tokens": 1}, "has the key 'min_tokens'"),
        ({"skip_layers": []}, "has the key 'skip_layers'"),
        *(
            ({key: {"policy": "XAttention"}}, f"has the key '{key}'")
            for key in ("SparseK", "sparse_k", "sparsk", "SPARSEK_VLLM")
        ),
        ({"sparsek": {"polcy": "XAttention"}}, "is 'polcy'; use one of policy, options"),
        ({"sparsek": None}, r"additional_config\['sparsek'\] is None"),
        ({"sparsek": "XAttention"}, r"additional_config\['sparsek'\] is 'XAttention'"),
        ([], "additional_config is"),
    ],
)
def test_an_additional_config_that_is_refused(additional: Any, message: str) -> None:
    refused(message, configured, additional)


def test_keys_beside_ours_are_not_read_and_said(warned: Any) -> None:
    assert configured({"sparsek": {"min_tokens": 5}, "min_tokens": 6}).min_tokens == 5
    configured({"sparsek": {}, "min_tokens": 6})
    assert [text.split(", ")[-1] for text in warned()] == ["not min_tokens beside it"]


class Registry(ModuleType):
    """vLLM's registry of backends, which refuses a name that it has."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(plugin.REGISTRY)
        self.AttentionBackendEnum = Enum("AttentionBackendEnum", "FLASH_ATTN CPU_ATTN")
        self.made: dict[str, str] = {}
        for name, value in changed.items():
            setattr(self, name, value)

    def register_backend(self, backend: Any, class_path: str) -> None:
        if isinstance(backend, str):
            if backend in self.AttentionBackendEnum.__members__:
                raise ValueError(f"Backend {backend} already exists")
            names = [*self.AttentionBackendEnum.__members__, backend]
            self.AttentionBackendEnum = Enum("AttentionBackendEnum", names)
            self.made[backend] = class_path
        else:
            self.made[backend.name] = class_path


class Kept(logging.Handler):
    """Keeps the records of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the plugin has logged in this test; pytest's own plugin for it is off (pyproject.toml)."""
    log, kept = logging.getLogger("vllm.sparsek"), Kept()
    level = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    yield kept.records
    log.setLevel(level)
    log.removeHandler(kept)


@pytest.fixture
def warned(logged: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The warnings so far, in a process that has warned of nothing before."""
    plugin._warn.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("SPARSEK_VLLM_CPU", raising=False)
    return lambda: [each.getMessage() for each in logged if each.levelno == logging.WARNING]


def stand_in(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    """Modules of vLLM; None is a module that it does not have."""
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm"])["__version__"] = "0.77.1"
    monkeypatch.setitem(sys.modules, plugin.REGISTRY, registry)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_register_may_be_called_again(monkeypatch: pytest.MonkeyPatch, warned: Any, on_cpu: bool) -> None:
    registry = Registry()
    stand_in(monkeypatch, registry)
    monkeypatch.setenv("SPARSEK_VLLM_CPU", "1" if on_cpu else "0")
    platform()
    register()
    register()
    assert not warned()
    assert set(registry.made) == {plugin.NAME} | ({"CPU_ATTN"} if on_cpu else set())
    for path in registry.made.values():
        module, _, name = path.rpartition(".")
        assert getattr(sys.modules[module], name) is vllm_backend.SparseKBackend


def only_members(backend: Any, class_path: str) -> None:
    raise TypeError(f"{backend!r} is no member")


@pytest.mark.parametrize(
    ("registry", "error"),
    [
        (None, "ModuleNotFoundError|ImportError"),
        (ModuleType(plugin.REGISTRY), "AttributeError"),
        (Registry(AttentionBackendEnum={}), "AttributeError"),
        (Registry(register_backend=None), "TypeError"),
        (Registry(register_backend=only_members), "TypeError: 'SPARSEK' is no member"),
        (Registry(register_backend=lambda member: None), "TypeError"),
        (Registry(register_backend=lambda member, class_path=None: None), "KeyError"),
    ],
    ids=["no module", "no names", "no enum", "no function", "members only", "other signature", "ignored"],
)
def test_a_vllm_that_is_unknown_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, warned: Any, registry: Any, error: str
) -> None:
    stand_in(monkeypatch, registry)
    platform()
    assert not warned()
    register()
    register()
    (text,) = warned()
    assert "vLLM 0.77.1" in text
    assert f"SparseK {sk.__version__}" in text
    assert any(each in text for each in error.split("|"))


@pytest.mark.parametrize("wrong", ["[]", "{", DEEP, '{"policy": "Best"}', '{"min_tokens": "many"}'])
def test_wrong_options_do_not_stop_other_engines(
    monkeypatch: pytest.MonkeyPatch, warned: Any, wrong: str
) -> None:
    stand_in(monkeypatch, Registry())
    monkeypatch.setenv(VARIABLE, wrong)
    register()
    register()
    (text,) = warned()
    assert text.startswith("an engine with the attention backend SPARSEK will not start: ")


REGISTRY = """
from enum import Enum
from itertools import pairwise
class AttentionBackendEnum(Enum):
    CPU_ATTN = "cpu.Attention"
def register_backend(name, path):
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_ = name, path
    AttentionBackendEnum._member_map_[name] = AttentionBackendEnum._value2member_map_[path] = member
"""
CHILD = """
import copy, pickle, sys
from vllm.v1.attention.backends.registry import AttentionBackendEnum as members
assert "SPARSEK" not in members.__members__
read = pickle.loads(bytes.fromhex(sys.argv[1]))
assert read == {"backend": members.__members__["SPARSEK"]}, read
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    assert pickle.loads(pickle.dumps(read, protocol)) == read
assert copy.deepcopy(read) == copy.copy(read) == read
print(sorted(name for name in sys.modules if name.startswith("sparsek.")))
"""


def test_a_process_reads_the_backend_before_it_loads_plugins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As vLLM's config goes to the process of its engine. The process imports neither policies nor kernels."""
    registry = Registry()
    stand_in(monkeypatch, registry)
    register()
    sent = pickle.dumps({"backend": registry.AttentionBackendEnum[plugin.NAME]})
    folder = tmp_path / "vllm/v1/attention/backends"
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents[:3]):
        (each / "__init__.py").touch()
    (folder / "registry.py").write_text(REGISTRY)
    done = run(sys.executable, "-c", CHILD, sent.hex(), env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert "sparsek.integrations.vllm'" in done.stdout
    assert not [name for name in ("policies", "mask", "kernels", "plan") if f".{name}" in done.stdout]


def test_the_line_of_an_engine() -> None:
    layers = {f"model.layers.{n}.attn": attended(sliding_window=9 if n == 3 else None) for n in range(4)}
    assert summary(layers, Options(), 9000) == (
        "SPARSEK: 4 layers, all dense: neither SPARSEK_VLLM nor additional_config['sparsek'] names a policy"
    )
    options = Options(sk.MaskPolicy(window=64, sinks=4), 4096, frozenset({0, 7}))
    for impl in layers.values():
        impl.options = options
    assert summary(layers, options, 9000) == (
        f"SPARSEK: 4 layers; chunks of prompts in 2 by {options.policy}; dense: decodes, prompts of fewer than 4096 "
        "keys, skip_layers 0, 1 layer with a sliding window, which stays; no layer here has the number 7 of skip_layers"
    )
    chosen = Options(sk.policies.XAttention(threshold=0.9), 100)
    assert "by XAttention(threshold=0.9, " in summary(layers, chosen, 9000)
    assert summary(layers, chosen, 9000).endswith(
        "the choice depends on where vLLM cuts a prompt into chunks"
    )
    assert "nothing is sparse: no request has 100 keys, max_model_len is 99" in summary(layers, chosen, 99)


CARDS = [(7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (12, 1)]


LAYERS: dict[str, dict[str, Any]] = {f"model.layers.{n}.attn": {} for n in range(3)}
WINDOWED = {
    "policy": "MaskPolicy",
    "options": {"window": 20, "sinks": 5},
    "min_tokens": 128,
    "skip_layers": [1],
}


def test_the_classes_as_an_engine_uses_them(
    monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    given = {**LAYERS, "model.layers.2.attn": {"sliding_window": 30}}
    made = engine(monkeypatch, given, (4, 2), 16, SCALE, additional_config={"sparsek": WINDOWED})
    (line,) = (each.getMessage() for each in logged)
    assert line.startswith("SPARSEK: 3 layers; chunks of prompts in 1 by MaskPolicy(window=20, sinks=5, ")
    batch = drawn(NEW, OLD)
    spans = made.builder.build(0, batch.common())
    wanted = (
        lambda r, p, j: (j > p - 20) | (j < 5) if r >= 4 else everything(r, p, j),
        everything,
        lambda r, p, j: j > p - 30,
    )
    for (name, impl), seen in zip(made.impls.items(), wanted, strict=True):
        close(served(impl, batch, spans, layer(name)), right(batch, seen, SCALE))
    captured = made.builder.build_for_cudagraph_capture(drawn([1, 1], [5, 9]).common())
    assert [each.max_k for each in captured.spans] == [8192]
    assert [each.name for each in made.backend.supported_kv_cache_layouts()][0] == "LBHNC"


def test_one_line_for_an_engine(monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]) -> None:
    """Not one for each group of layers, nor for each GPU that shares a layer."""
    made = engine(monkeypatch, LAYERS, (4, 2), 16, SCALE)
    assert [each.getMessage() for each in logged] == [
        "SPARSEK: 3 layers, all dense: neither SPARSEK_VLLM nor additional_config['sparsek'] names a policy"
    ]
    builder = made.builder
    type(builder)(builder.kv_cache_spec, list(LAYERS)[1:], builder.vllm_config, "cpu")
    for rank, lines in ((1, 1), (2, 2)):
        shared = SimpleNamespace(rank=rank, tensor_parallel_size=2)
        engine(monkeypatch, LAYERS, (4, 2), 16, SCALE, parallel_config=shared)
        assert len(logged) == lines


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"additional_config": {"policy": "XAttention"}}, "below the key 'sparsek'"),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)},
            "prefill_context_parallel_size",
        ),
        ({"model_config": SimpleNamespace(is_mm_prefix_lm=True)}, "see later tokens"),
    ],
)
def test_engines_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    refused(message, engine, monkeypatch, LAYERS, (4, 2), 16, SCALE, **fields)


ALIGNED, APART = (0, 256, 640, 1024), (0, 100, 612, 1024)


@pytest.mark.parametrize(
    ("policy", "same"),
    [
        (sk.MaskPolicy(window=200, sinks=10), (ALIGNED, APART)),
        (sk.policies.Streaming(window=256), (ALIGNED,)),
        (sk.policies.MeanTopK(topk=3), (ALIGNED,)),
        (sk.policies.Nabla(threshold=0.6, causal=True), (ALIGNED,)),
        (sk.policies.XAttention(threshold=0.6), (ALIGNED,)),
        (sk.policies.SubBlock(density=0.4, causal=True), ()),
        (sk.policies.FlexPrefill(min_budget=128), ()),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, MaskRule) else "",
)
def test_which_choices_depend_on_where_a_prompt_is_cut(policy: Any, same: tuple[Any, ...]) -> None:
    """As the page on vLLM says: never, unless every cut is at a tile of the policy, or with every cut."""
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 1024, 32, generator=random, dtype=torch.float32).unbind()

    def chosen(first: int, last: int) -> Tensor:
        if isinstance(policy, sk.MaskPolicy):
            return policy.mask(last - first, last).to_dense()[None]
        return policy.mask(q[:, :, first:last], k[:, :, :last]).to_dense()[0]

    whole = chosen(0, 1024)
    for cuts in (ALIGNED, APART):
        found = all(
            torch.equal(chosen(first, last), whole[..., first:last, :last]) for first, last in pairwise(cuts)
        )
        assert found == (cuts in same)


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
    capable = [backend.supports_compute_capability(SimpleNamespace(major=a, minor=b)) for a, b in CARDS]
    assert capable == [False, False, True, True, True, True]
