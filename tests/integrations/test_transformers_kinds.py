"""A policy goes with layers of its own causality, and cross-attention has none: encoders, decoders and both in one."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function

from sparsek import MaskPolicy
from sparsek.attn import policies
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers import sparsek_attention, sparsek_mask
from sparsek.integrations.transformers_cross import is_cross_attention
from sparsek.integrations.transformers_masks import ModelMask
from tests.engine.launch.covering import once
from tests.integrations.models import WORDS, check_alike, pair, states, tokens, transformers
from tests.refusals import refused

WINDOW = {"window": 20, "sinks": 3, "block": 64}
LENGTH = 90
CAUSAL = {
    "XAttention": policies.XAttention(threshold=1.0),
    "MeanTopK": policies.MeanTopK(topk=2),
    "Streaming": policies.Streaming(window=4096) | policies.XAttention(),
    "FlexPrefill": policies.FlexPrefill(),
    "VerticalSlash": policies.VerticalSlash(),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_policy_is_refused_where_a_layer_sees_every_token(name: str):
    policy = CAUSAL[name]
    cure = "give it causal=False$"
    if name in ("FlexPrefill", "VerticalSlash"):
        cure = r"it has no other form: use another policy, for instance XAttention\(causal=False\)$"
    for where in (None, torch.ones(2, 150, dtype=torch.int64)):
        with pytest.raises(InvalidInput, match=f"BertSelfAttention: this layer sees every token, .*{cure}"):
            states(pair("bert", sparsek=policy)[1], tokens(), attention_mask=where)
    four = torch.ones(2, 1, 150, 150, dtype=torch.bool)
    for mask in (four, torch.zeros(2, 1, 150, 150)):
        refused(cure, states, pair("bert", sparsek=policy)[1], tokens(), attention_mask=mask)


def test_a_mask_of_pairs_without_later_ones_takes_a_causal_policy():
    policy = policies.XAttention(threshold=1.0, precision="full", block=64)
    seen = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    other, own = pair("bert", sparsek=policy)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = states(other, tokens(), attention_mask=additive)
        torch.testing.assert_close(states(own, tokens(), attention_mask=seen), want, rtol=0, atol=2e-5)


EITHER_WAY = {
    "SubBlock": policies.SubBlock(topk=2),
    "VSA": policies.VSA(topk=2),
    "XAttention": policies.XAttention(causal=False),
    "MeanTopK": policies.MeanTopK(topk=2, causal=False),
}


@pytest.mark.parametrize("name", EITHER_WAY)
def test_a_policy_that_is_not_causal_is_refused_by_any_causal_mask(name: str):
    """Its blocks are chosen by later tokens too: a mask of pairs says as much of a layer as one of tokens."""
    own, ids = pair("llama", sparsek=EITHER_WAY[name])[1], tokens()
    seen = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    seen[1, :, :, :20] = False
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (None, torch.ones(2, 150, dtype=torch.int64), seen, additive):
        with pytest.raises(InvalidInput, match="LlamaAttention: this layer sees no token after its own"):
            states(own, ids, attention_mask=mask)
    seen[:, :, :60, :60] = True  # a prefix that is seen whole
    with torch.no_grad():
        assert states(own, ids, attention_mask=seen).isfinite().all()


@pytest.mark.parametrize(
    "policy", [policies.XAttention(threshold=1.0, causal=False), {"window": 4096}], ids=str
)
def test_a_bidirectional_model_sees_later_tokens_under_a_policy(policy: Any):
    own, ids = pair("bert", sparsek=policy, initializer_range=0.3)[1], tokens()
    other = ids.clone()
    other[:, 120] = ids[:, 120] % 7 + 1
    with torch.no_grad():
        assert not torch.equal(states(own, ids)[:, 5], states(own, other)[:, 5])


@pytest.mark.parametrize("policy", [policies.MeanTopK(topk=9, block=64), WINDOW], ids=str)
def test_one_token_of_a_causal_layer_without_a_mask_takes_a_policy(policy: Any):
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 60, 8)
    module: Any = torch.nn.Identity()
    module.config = transformers.LlamaConfig(sparsek=policy)
    with torch.no_grad():
        found = sparsek_attention(module, q, k, k, None)[0]
        if isinstance(policy, dict):
            k = k[:, :, [*range(3), *range(40, 60)]]
        want = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(found, want.transpose(1, 2))


def bart(**options: Any) -> Any:
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=256, init_std=0.3,
        dropout=0.0, **options,
    )  # fmt: skip
    return transformers.BartModel, config


def whisper(**options: Any) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=LENGTH,
        max_target_positions=256, init_std=0.3, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0, **options,
    )  # fmt: skip
    return transformers.WhisperModel, config


def decoder_of_bert(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(
        vocab_size=WORDS, is_decoder=True, add_cross_attention=True, initializer_range=0.3, **sizes, **options
    )
    return transformers.BertModel, config


DECODERS: dict[str, Callable[..., Any]] = {"bart": bart, "whisper": whisper, "bert": decoder_of_bert}


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind, config = DECODERS[name](**options)
    return kind._from_config(copy.deepcopy(config), attn_implementation="sparsek").eval()


def decoded(model: Any, encoded: Tensor, ids: Tensor) -> Tensor:
    if hasattr(model, "decoder"):
        return model.decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
    return model(ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state


def looked_at(model: Any, encoded: Tensor, ids: Tensor, query: int) -> list[int]:
    """The encoded tokens that change the decoder's state of a query."""
    given = encoded.clone().requires_grad_()
    decoded(model, given, ids)[:, query].square().sum().backward()
    assert given.grad is not None
    return given.grad.abs().sum((0, 2)).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("name", "keys", "policy"),
    once(
        product(
            DECODERS,
            (LENGTH, LENGTH - 17, 25),
            ("window", policies.MeanTopK(topk=1, block=64, always=(0, 1))),
        ),
        together=2,
    ),
    ids=str,
)
def test_cross_attention_stays_dense_and_self_attention_follows_the_policy(name: str, keys: int, policy: Any):
    ids, encoded = tokens(length=LENGTH), torch.randn(2, keys, 32, generator=torch.Generator().manual_seed(1))
    plain, own = made(name), made(name, sparsek=WINDOW if policy == "window" else policy)
    for query in (0, 30, LENGTH - 1):
        assert looked_at(own, encoded, ids, query) == list(range(keys))
    with torch.no_grad():
        near, far = decoded(own, encoded, ids), decoded(plain, encoded, ids)
    seen = 20 if policy == "window" else 64
    torch.testing.assert_close(near[:, :seen], far[:, :seen], rtol=0, atol=2e-5)
    assert not torch.allclose(near[:, -1], far[:, -1], atol=1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_follows_encoder_and_decoder(padded: bool):
    """Every layer of this window is as dense as without it; then of a narrow one, whose encoder looks both ways."""
    there = torch.ones(2, 150, dtype=torch.int64)
    there[1, 100:] = 1 - int(padded)
    ids = tokens()
    plain, wide, narrow = made("bart"), made("bart", sparsek={"window": 150}), made("bart", sparsek=WINDOW)
    with torch.no_grad():
        found = [
            m(ids, attention_mask=there, decoder_input_ids=ids).last_hidden_state
            for m in (plain, wide, narrow)
        ]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)
        assert not torch.allclose(found[2], found[0], atol=1e-3)
        other = ids.clone()
        other[:, 60] = ids[:, 60] % 7 + 1
        changed = narrow.encoder(other).last_hidden_state != narrow.encoder(ids).last_hidden_state
    assert changed.any(2).any(0).nonzero().flatten().tolist() == list(range(41, 80))


def test_generation_with_cross_attention_under_a_policy():
    kind = transformers.BartForConditionalGeneration
    models = []
    for options in ({}, {"sparsek": {"window": 150, "sinks": 1}}):
        torch.manual_seed(0)
        models.append(kind._from_config(bart(**options)[1], attn_implementation="sparsek").eval())
    for length in (1, 150):
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        found = [model.generate(tokens(length=length), **options) for model in models]
        assert torch.equal(*found)


@pytest.mark.parametrize("policy", [policies.XAttention(), policies.XAttention(causal=False)], ids=str)
def test_one_policy_does_not_fit_encoder_and_decoder(policy: Any):
    model = made("bart", sparsek=policy)
    with pytest.raises(InvalidInput, match=r"both read this config: only options of MaskPolicy fit both"):
        model(tokens(), decoder_input_ids=tokens())


def test_modules_that_may_be_either_are_refused_where_nothing_shows_it():
    class Own(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Either(torch.nn.Module):
        def forward(self, x: Tensor, key_value_states: Tensor) -> Tensor:
            return x

    class SomeCrossAttention(Own):
        pass

    assert not is_cross_attention(Own(), 9, 9)
    assert is_cross_attention(SomeCrossAttention(), 9, 9)
    either: Any = Either()
    assert is_cross_attention(either, 9, 8)
    with pytest.raises(InvalidInput, match="Either: it may attend to its own tokens or, as cross-attention"):
        is_cross_attention(either, 9, 9)
    for name, value, right in (
        ("is_decoder", True, True),
        ("is_causal", True, False),
        ("is_decoder", False, False),
    ):
        setattr(either, name, value)
        assert is_cross_attention(either, 9, 9) is right
        assert right or not either.__delattr__(name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_layers_are_told_apart_too():
    torch._dynamo.reset()
    ids, encoded = tokens(length=LENGTH), torch.randn(2, LENGTH, 32)
    own = made("bart", sparsek=WINDOW).decoder
    compiled = torch.compile(own, backend="eager")
    with torch.no_grad():
        want = own(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
        got = compiled(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
        torch.testing.assert_close(got, want)
        bert = pair("bert", sparsek=WINDOW)[1]
        fast = torch.compile(bert, backend="eager", fullgraph=True)
        torch.testing.assert_close(states(fast, tokens()), states(bert, tokens()))
    torch._dynamo.reset()


def test_masks_for_cross_attention_are_of_the_model_alone():
    config = transformers.LlamaConfig(sparsek=WINDOW)
    same = sparsek_mask(1, 90, 90, mask_function=bidirectional_mask_function, config=config)
    alone = same.own
    assert isinstance(alone, ModelMask)
    assert alone.own is None
    assert alone.visible.within.to_dense().all()
    assert same.visible.within.to_dense().equal(MaskPolicy(20, 3, block=64, causal=False).mask(90).to_dense())
    less = sparsek_mask(1, 90, 80, mask_function=bidirectional_mask_function, config=config)
    assert less.visible.within.to_dense().all()


def test_a_model_of_both_kinds_is_alike_with_eager_attention():
    check_alike(*pair("bert", sparsek=policies.MeanTopK(topk=9, block=64, causal=False)), tokens())
