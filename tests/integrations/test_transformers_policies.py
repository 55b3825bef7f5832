"""Policies of sk.policies in models of transformers: they choose in each layer, at the place of the cache."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn import policies
from sparsek.core.errors import InvalidInput
from tests.integrations.models import check_alike, padding, pair, states, tokens, transformers
from tests.refusals import refused

ALL = policies.XAttention(threshold=1.0, block=64, precision="full")
SOME = policies.MeanTopK(topk=2, block=64)
LENGTH = 256


@pytest.mark.parametrize("name", ["llama", "qwen2", "bert"])
@pytest.mark.parametrize("at", ["none", "left", "right", "both", "gaps"])
def test_one_that_keeps_all_blocks_gives_what_eager_attention_gives(name: str, at: str):
    policy = policies.SubBlock(density=1.0) if name == "bert" else ALL
    check_alike(*pair(name, sparsek=policy), tokens(), padding(at))


def in_parts(model: Any, ids: Tensor, cache: Any, sizes: list[int]) -> Tensor:
    got = []
    with torch.no_grad():
        for part in ids.split(sizes, 1):
            got.append(model(part, past_key_values=cache, use_cache=True).logits)
    return torch.cat(got, 1)


@pytest.mark.parametrize("policy", [ALL, SOME, policies.Streaming(window=64, sinks=64, block=64)], ids=str)
def test_a_prompt_in_parts_is_the_prompt(policy: Any):
    """With a topk each tile of the prompt chooses for itself, so parts of whole blocks change nothing."""
    model = pair("llama", sparsek=policy)[1]
    ids = tokens(length=LENGTH)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=400),
    ):
        found = in_parts(model, ids, cache, [64, 128, 64])
        torch.testing.assert_close(found, whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", [ALL, SOME, policies.MeanTopK(density=0.3, block=64)], ids=str)
def test_static_and_dynamic_caches_generate_the_same_tokens(policy: Any):
    other, own = pair("llama", sparsek=policy)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = tokens(length=150)
    dynamic, static = (own.generate(ids, cache_implementation=c, **options) for c in ("dynamic", "static"))
    assert torch.equal(dynamic, static)
    if policy is ALL:
        assert torch.equal(dynamic, other.generate(ids, **options))


def test_the_scale_and_the_blocks_are_those_of_the_layer():
    plain, own = pair("llama", sparsek=SOME)
    ids = tokens(length=LENGTH)
    with torch.no_grad():
        assert not torch.allclose(states(own, ids), states(plain, ids), atol=1e-3)
        near = states(own, ids[:, :128])
        torch.testing.assert_close(near, states(plain, ids[:, :128]), rtol=0, atol=2e-5)  # two blocks are all


def test_a_dict_with_the_name_of_a_policy_is_kept_in_the_config(tmp_path: Any):
    options = {"policy": "MeanTopK", "topk": 2, "block": 64}
    model, same = pair("llama", sparsek=options)[1], pair("llama", sparsek=SOME)[1]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sparsek").eval()
    assert loaded.config.sparsek == options
    ids = tokens(length=LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(states(loaded, ids), states(same, ids))
    assert copy.deepcopy(same.config).sparsek == options


WRONG: dict[str, Any] = {
    r"LlamaAttention: .* policy SubBlock\(\) is not causal; give it causal=True$": policies.SubBlock(),
    r"VSA\(\) is not causal; it has no other form: .*, for instance XAttention\(\)$": policies.VSA(),
    r"config.sparsek\['policy'\] is 'Best'": {"policy": "Best"},
    "'Quest'; use one of FlexPrefill, MeanTopK, Nabla, Radial, SlidingTile, S": {"policy": "Quest"},
    "config.sparsek is .*unexpected keyword argument 'window'": {"policy": "VSA", "window": 3},
    r"config.sparsek is {'window': 0}: window is 0; it must be an int of at least 1": {"window": 0},
    "config.sparsek is .*: threshold is 2; it must be": {"policy": "XAttention", "threshold": 2},
    "it must be None, a policy of sk.policies, a dict of window": 3,
    r'or a dict of a policy\'s name and options: {"policy": "XAttention", "threshold": 0.9}': "XAttention",
    "it must hold numbers, texts and lists": {"window": torch.tensor(3)},
    r"two policies are joined by {\"policy\": \"|\", \"of\": \[": {"policy": "|", "of": [{"policy": "VSA"}]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message: str):
    refused(message, lambda: pair("llama", sparsek=WRONG[message])[1](tokens()))


def test_packed_documents_refuse_a_policy():
    model = pair("llama", sparsek=SOME)[1]
    positions = torch.cat([torch.arange(70), torch.arange(80)])[None].expand(2, -1)
    with pytest.raises(InvalidInput, match="keeps no documents apart; pass one document for each batch item"):
        model(tokens(), position_ids=positions, use_cache=False)


def test_an_index_head_chooses_the_blocks_of_minimax_m3():
    name = "transformers.models.minimax_m3_vl"
    config = pytest.importorskip(f"{name}.configuration_minimax_m3_vl").MiniMaxM3VLTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, index_n_heads=2, index_head_dim=16,
        index_block_size=16, index_topk_blocks=4, index_local_blocks=2, num_hidden_layers=1,
    )  # fmt: skip
    model = pytest.importorskip(f"{name}.modeling_minimax_m3_vl")
    torch.manual_seed(0)
    theirs, length = model.MiniMaxM3VLIndexer(config, 0), 150
    for each in theirs.parameters():
        torch.nn.init.normal_(each, std=0.5)
    x, position = torch.randn(2, length, 32), torch.arange(length).expand(2, -1)
    angles = (position[..., None] * torch.rand(8)).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    with torch.no_grad():
        wanted = theirs(x, (cos, sin), None, position)
        q = theirs.q_norm(theirs.q_proj(x).unflatten(-1, (2, 16))).transpose(1, 2)
        k = theirs.k_norm(theirs.k_proj(x).unflatten(-1, (1, 16))).transpose(1, 2)
        q, k = model.apply_rotary_pos_emb(q, k, cos, sin)
    found = policies.IndexHead(topk=4, block=16, always=(0, 2)).lists(q, k).indices
    assert torch.equal(found.sort(-1).values.long(), wanted.sort(-1).values)
