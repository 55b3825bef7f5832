"""Paged caches of transformers' continuous batching: the engine itself, and calls as its code makes them."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.tools import need
from tests.refusals import refused
from tests.sampling import sampled

need("transformers")

from sparsek.attn import policies
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers import sparsek_attention
from tests.integrations.models import WORDS, pair, transformers

Cache: Any = pytest.importorskip("transformers.generation.continuous_batching").PagedAttentionCache
pytestmark = pytest.mark.skipif(
    "kwargs" not in inspect.signature(Cache.update).parameters, reason="paged caches have another protocol"
)
PROMPTS = (5, 33, 70, 128, 17)
POLICY = {"window": 20, "sinks": 3, "block": 64}


@pytest.fixture
def in_the_engine() -> Iterator[None]:
    """SparseK's attention under the one name for attention of its own kind that the engine takes."""
    known = transformers.AttentionInterface._global_mapping
    before = known["paged|eager"]
    transformers.AttentionInterface.register("paged|eager", sparsek_attention)
    yield
    known["paged|eager"] = before


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, WORDS, (length,), generator=draw).tolist() for length in PROMPTS]


def served(model: Any, requests: list[list[int]]) -> list[list[int]]:
    """New tokens of each request: prompts in parts, four requests at a time, pages of 16."""
    settings = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=64, page_size=16, max_batch_tokens=96, max_requests_per_batch=4
    )
    model.set_attn_implementation("paged|eager")
    found = model.generate_batch(
        inputs=requests, generation_config=settings, continuous_batching_config=batching, progress_bar=False
    )
    assert all(each.error is None for each in found.values())
    return [each.generated_tokens for each in found.values()]


@pytest.mark.parametrize(
    ("name", "policy"),
    sampled(
        [
            ("llama", None),
            ("gemma2", None),
            ("gpt_oss", None),
            ("llama", POLICY),
            ("mistral", {"window": 20}),
        ],
        2,
    ),
)
@pytest.mark.usefixtures("in_the_engine")
def test_the_engine_gives_the_tokens_of_each_request_alone(name: str, policy: Any):
    own = pair(name, sparsek=policy, initializer_range=0.2)[1]
    alone = [
        own.generate(
            torch.tensor([each]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(each) :].tolist()
        for each in prompts()
    ]
    assert served(own, prompts()) == alone


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", policies.XAttention()),
        ("llama", {"topk": 4}),
        ("llama", {"stride": 128, "window": 64}),
        ("mistral", {"window": 20, "sinks": 3}),
    ],
)
@pytest.mark.usefixtures("in_the_engine")
def test_a_policy_that_the_engine_cannot_follow_is_refused_where_it_is_chosen(name: str, policy: Any):
    """The engine reports errors of layers in a log, and gives empty results."""
    plain, own = pair(name, sparsek=policy)
    message = r"with a paged cache it takes a window and sinks only|paged cache drops the sinks"
    refused(message, own.set_attn_implementation, "paged|eager")
    with pytest.raises(InvalidInput, match=message):  # of "eager" the engine makes "paged|eager"
        plain.generate_batch([[1, 2, 3]], transformers.GenerationConfig(max_new_tokens=2), progress_bar=False)
    own = pair(name)[1]
    own.set_attn_implementation("paged|eager")
    with pytest.raises(InvalidInput, match=message):
        own.config.sparsek = policy
    assert own.config.sparsek is None


class Requests:
    """A real cache, and the options with which the engine calls a layer, for requests of these past and new lengths."""

    def __init__(self, past: list[int], new: list[int], page: int = 16, **config: Any) -> None:
        from transformers.generation.continuous_batching.distributed import DistributedHelper

        self.config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **config
        )
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=32, page_size=page, max_batch_tokens=256, max_requests_per_batch=8, max_memory_percent=0.5,
            max_blocks_per_request=8, use_async_batching=False, return_logprobs=False,
        )  # fmt: skip
        self.cache = Cache(self.config, batching, "cpu", DistributedHelper(None, None), torch.float32)
        self.past, self.new = past, new
        (self.allocator,) = self.cache.cache_allocators.values()
        self.store()
        self.module: Any = torch.nn.Module()
        self.module.layer_idx, self.module.config = 1, self.config

    def store(self) -> None:
        """Allocate what the engine would for the new tokens."""
        for name, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
            state = SimpleNamespace(request_id=str(name), current_len=lambda past=past: past)
            assert self.cache.can_store_request_tokens(state, new)

    def options(self, table: bool = False) -> dict[str, Any]:
        """Fresh ones: `update` writes to them."""
        writes: list[int] = []
        reads: list[int] = []
        for name, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
            writes += self.allocator.get_write_indices(str(name), past, new)
            reads += self.allocator.get_read_indices(str(name), past, new)
        kind, lengths = self.allocator.layer_type, [a + b for a, b in zip(self.past, self.new, strict=True)]
        pages = torch.full((1, len(self.new), 8), -1, dtype=torch.int32)
        if table:
            for name, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
                self.allocator.fill_block_table(str(name), past, new, pages[0, name])
        return {
            "cache": self.cache,
            "cu_seq_lens_q": edges(self.new),
            "cu_seq_lens_k": {kind: edges(lengths)},
            "max_length_q": max(self.new),
            "max_length_k": {kind: max(lengths)},
            "read_index": [torch.tensor(reads)],
            "write_index": [torch.tensor(writes)],
            "block_table": pages if table else None,
            "is_causal": False,
        }


def edges(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def ended_again(at: Tensor) -> Tensor:
    """With one more request, which is empty."""
    return torch.cat((at, at[-1:]))


def drawn(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=draw) for heads in (4, 2, 2))
    return q, k, v


def filled(past: list[int], new: list[int], **config: Any) -> tuple[Requests, list[Tensor], list[Tensor]]:
    """Requests whose past keys and values are in the cache, which is NaN elsewhere; and these, [Hkv, past, D] each."""
    requests = Requests([0] * len(past), past, **config)
    requests.cache.cache_tensor.view(torch.float32).fill_(torch.nan)
    _, k, v = drawn(sum(past), 5)
    requests.cache.update(k, v, 1, requests.options())
    requests.past, requests.new = past, new
    requests.store()
    return requests, list(k[0].split(past, 1)), list(v[0].split(past, 1))


def expected(
    q: Tensor, k: Tensor, v: Tensor, requests: Requests, keys: Any, values: Any, **rules: Any
) -> Tensor:
    """Attention of each request by itself, in float64."""
    parts = []
    for i, (a, b, c) in enumerate(zip(*(x[0].split(requests.new, 1) for x in (q, k, v)), strict=True)):
        whole_k, whole_v = torch.cat((keys[i], b), 1), torch.cat((values[i], c), 1)
        parts.append(attended(a, whole_k, whole_v, **rules))
    return torch.cat(parts, 1).transpose(0, 1)[None]


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 1 << 20,
    sinks: int = 0,
    softcap: float = 0,
    s_aux: Any = None,
) -> Tensor:
    q, k, v = q.double(), k.double().repeat_interleave(2, 0), v.double().repeat_interleave(2, 0)
    scores = q @ k.mT * 8**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, key = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    seen = (key <= at) & ((at - key < window) | (key < sinks))
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(2, keepdim=True) + (0 if s_aux is None else s_aux.double().exp()[:, None, None])
    return weights / total @ v


RULES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "policy": ({"sparsek": {"window": 9, "sinks": 2}}, {}, {"window": 9, "sinks": 2}),
    "softcap": ({}, {"softcap": 1.5}, {"softcap": 1.5}),
    "s_aux": (
        {},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("padded", [0, 3])
def test_keys_of_all_requests_one_behind_the_other(rule: str, padded: int):
    """Also with tokens that fill up the batch, as in CUDA graphs: their results are not read."""
    config, options, rules = RULES[rule]
    requests, keys, values = filled([20, 1, 40], [3, 1, 18], **config)
    q, k, v = drawn(22, 7)
    asked = requests.options()
    want = expected(q, k, v, requests, keys, values, **rules)
    if padded:
        trash = requests.allocator.write_trash_index
        asked["write_index"] = [torch.nn.functional.pad(asked["write_index"][0], (0, padded), value=trash)]
        trash = requests.allocator.read_trash_index
        asked["read_index"] = [torch.nn.functional.pad(asked["read_index"][0], (0, padded), value=trash)]
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, padded)) for x in (q, k, v))
    given = dict(asked)
    out, weights = sparsek_attention(requests.module, q, k, v, torch.zeros(1, 1, 1, 1), **options, **asked)
    assert weights is None
    assert out.shape == (1, 22 + padded, 4, 8)
    torch.testing.assert_close(out[:, :22], want.float(), rtol=0, atol=2e-6)
    assert all(asked[name] is given[name] for name in given)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stale", [False, True])
def test_one_token_for_each_request_and_a_table_of_pages(rule: str, stale: bool):
    """The last request is absent, as graphs are padded with; another begins a page. `stale`: its row of the table
    names a page of the first request.
    """
    config, options, rules = RULES[rule]
    requests, keys, values = filled([20, 1, 64], [1, 1, 1], **config)
    q, k, v = drawn(4, 7)
    asked = requests.options(table=True)
    of_absent = int(asked["block_table"].flatten()[0]) if stale else -1
    asked["block_table"] = torch.nn.functional.pad(asked["block_table"], (0, 0, 0, 1), value=of_absent)
    asked["cu_seq_lens_q"] = ended_again(asked["cu_seq_lens_q"])
    asked["cu_seq_lens_k"] = {kind: ended_again(at) for kind, at in asked["cu_seq_lens_k"].items()}
    out = sparsek_attention(requests.module, q, k, v, None, **options, **asked)[0]
    want = expected(q[:, :, :3], k[:, :, :3], v[:, :, :3], requests, keys, values, **rules)
    torch.testing.assert_close(out[:, :3], want.float(), rtol=0, atol=2e-6)
    assert not out[:, 3].any()
    # The new keys and values are where the engine's own writes put them.
    k_view, v_view = requests.allocator._kv_token_views[1]
    at = torch.tensor(
        [requests.allocator.get_write_indices(str(i), past, 1)[0] for i, past in enumerate((20, 1, 64))]
    )
    assert torch.equal(k_view[at].transpose(0, 1), k[0, :, :3])
    assert torch.equal(v_view[at].transpose(0, 1), v[0, :, :3])


@pytest.mark.parametrize("table", [False, True])
def test_a_layer_may_have_stored_the_new_keys(table: bool):
    """As those of transformers 5.24 do, which pass no cache."""
    new = [1, 1, 1] if table else [3, 1, 18]
    requests, keys, values = filled([20, 1, 40], new)
    q, k, v = drawn(sum(new), 7)
    want = expected(q, k, v, requests, keys, values)
    asked = requests.options(table)
    k, v = asked.pop("cache").update(k, v, 1, asked)
    out = sparsek_attention(requests.module, q, k, v, None, **asked)[0]
    torch.testing.assert_close(out, want.float(), rtol=0, atol=2e-6)


def test_a_table_of_pages_is_for_one_token_of_each_request():
    requests = filled([20, 3], [2, 1])[0]
    with pytest.raises(InvalidInput, match="there are 3 tokens and 2 requests"):
        sparsek_attention(requests.module, *drawn(3, 1), None, **requests.options(table=True))


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "with a paged cache it takes a window and sinks only": ({"sparsek": {"topk": 3}}, {}),
    "is MeanTopK.*; with a paged cache it takes": ({"sparsek": policies.MeanTopK(topk=2)}, {}),
    "whose paged cache drops the sinks": ({"sparsek": POLICY}, {"sliding_window": 50}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_paged_cache_cannot_follow_is_refused_before_it_is_written(message: str):
    config, options = WRONG[message]
    requests = Requests([0], [4], **config)
    before = requests.cache.cache_tensor.clone()
    refused(message, sparsek_attention, requests.module, *drawn(4, 1), None, **options, **requests.options())
    assert torch.equal(requests.cache.cache_tensor, before)


def test_one_batch_item_holds_all_requests():
    requests = Requests([0], [4])
    q, k, v = (x.expand(2, -1, -1, -1) for x in drawn(4, 1))
    with pytest.raises(InvalidInput, match="one batch item of all requests; query has 2"):
        sparsek_attention(requests.module, q, k, v, None, **requests.options())
