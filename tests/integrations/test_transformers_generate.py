"""Generation with a KV cache: the same tokens as eager attention under the same mask."""

import copy
from typing import Any

import pytest
import torch

from tests.integrations.models import LAYERED, REFERENCE, check_alike, no_pairs, padding, pair, states, tokens

__all__ = ["no_pairs"]
POLICY = {"window": 20, "sinks": 3, "block": 64}


def generated(model: Any, cache: str, at: str, length: int = 70) -> torch.Tensor:
    return model.generate(
        tokens(length=length), attention_mask=padding(at, length), max_new_tokens=12, do_sample=False,
        cache_implementation=cache, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("options", [{}, {"sparsek": POLICY}], ids=["plain", "policy"])
@pytest.mark.usefixtures("no_pairs")
def test_it_generates_the_tokens_of_eager_attention(name: str, cache: str, options: dict[str, Any]):
    """Qwen2's second layer keeps its last 49 keys only; left padding is longer than the window."""
    other, own = pair(name, REFERENCE if options else "eager", **options)
    for at in ("none", "left"):
        assert torch.equal(generated(own, cache, at), generated(other, cache, at))


@pytest.mark.parametrize("name", LAYERED)
def test_capped_scores_learned_sinks_and_windows_of_layers_are_those_of_the_model(name: str):
    """The prompt ends before the window does: caches of layers with a window fill up on the way."""
    other, own = pair(name)
    for at in ("none", "left", "gaps"):
        check_alike(other, own, tokens(), padding(at))
    for cache in ("dynamic", "static"):
        assert torch.equal(generated(own, cache, "left", 45), generated(other, cache, "left", 45))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_they_have_the_gradients_of_eager_attention(name: str):
    other, own = pair(name)
    for model in (other, own):
        states(model.train(), tokens(), use_cache=False).square().mean().backward()
    for (label, a), b in zip(own.named_parameters(), other.parameters(), strict=True):
        assert b.grad is not None, label
        assert b.grad.abs().max() > 0, label
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=label)


def test_top_k_over_all_blocks_generates_the_tokens_of_the_plain_model():
    other, own = pair("llama"), pair("llama", sparsek={"topk": 9, "block": 64})
    assert torch.equal(generated(own[1], "dynamic", "left"), generated(other[0], "dynamic", "left"))
    generated(pair("llama", sparsek={"topk": 1, "block": 64})[1], "dynamic", "left", 150)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("options", [{}, {"sparsek": POLICY}], ids=["plain", "policy"])
@pytest.mark.usefixtures("no_pairs")
def test_a_prompt_in_parts_is_the_prompt(name: str, options: dict[str, Any]):
    """Fewer queries than keys: each part follows what the cache holds."""
    other, own = pair(name, REFERENCE if options else "eager", **options)
    ids = tokens()
    with torch.no_grad():
        want = states(other, ids, use_cache=False)
        cache, got = None, []
        for part in ids.split([60, 1, 70, 19], 1):
            found = own(part, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            got.append(found.logits)
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=2e-5)


def test_beams_and_assisted_generation_reorder_and_crop_the_cache():
    other, own = pair("llama")
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    ids = tokens(1, 40)
    assert torch.equal(own.generate(ids, num_beams=3, **options), other.generate(ids, num_beams=3, **options))
    guess = copy.deepcopy(own)
    with torch.no_grad():
        for weight in guess.parameters():
            weight += 0.01 * torch.randn_like(weight)
    assisted = own.generate(ids, assistant_model=guess, **options)
    assert torch.equal(assisted, other.generate(ids, **options))
