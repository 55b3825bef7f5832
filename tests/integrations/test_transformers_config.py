"""config.sparsek holds what config.json can hold, whatever is assigned; composite configs refuse it."""

import copy
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek.attn import policies
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.policy import PolicyInputs
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers_config import form_of, policy_of
from tests.integrations.models import pair, states, tokens, transformers
from tests.refusals import refused

TOP, NEAR = policies.MeanTopK(topk=2, block=64), policies.Streaming(window=64, sinks=64, block=64)
SAVED: list[tuple[Any, dict[str, Any]]] = [
    (policies.XAttention(), {"policy": "XAttention"}),
    (
        policies.XAttention(threshold=0.8, block=64, causal=False),
        {"policy": "XAttention", "threshold": 0.8, "block": 64, "causal": False},
    ),
    (TOP, {"policy": "MeanTopK", "topk": 2, "block": 64}),
    (
        policies.MeanTopK(density=0.3, block=(64, 128), always=(2, 1)),
        {"policy": "MeanTopK", "density": 0.3, "block": [64, 128], "always": [2, 1]},
    ),
    (
        policies.VerticalSlash(heads=[("stream_llm", 64, 512)]),
        {"policy": "VerticalSlash", "heads": [["stream_llm", 64, 512]]},
    ),
    (policies.Radial(frames=3, frame_tokens=64), {"policy": "Radial", "frames": 3, "frame_tokens": 64}),
    (
        policies.SlidingTile((8, 8, 8), window=(3, 3, 3)),
        {"policy": "SlidingTile", "shape": [8, 8, 8], "window": [3, 3, 3]},
    ),
    (policies.FlexPrefill(gamma=0.5), {"policy": "FlexPrefill", "gamma": 0.5}),
    (policies.Nabla(threshold=0.5), {"policy": "Nabla", "threshold": 0.5}),
    (policies.SubBlock(topk=3), {"policy": "SubBlock", "topk": 3}),
    (policies.VSA(), {"policy": "VSA"}),
    (
        (TOP | NEAR) & TOP,
        {"policy": "&", "of": [{"policy": "|", "of": [form_of(TOP), form_of(NEAR)]}, form_of(TOP)]},
    ),
]


@pytest.mark.parametrize(("policy", "form"), SAVED, ids=[each.label for each, _ in SAVED])
def test_a_policy_that_is_assigned_is_saved(policy: Any, form: dict[str, Any], tmp_path: Path):
    config = transformers.LlamaConfig(sparsek=policy)
    assert config.sparsek == form
    assert policy_of(config) == policy
    assert '"sparsek"' in repr(config)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sparsek"] == form
    loaded = transformers.LlamaConfig.from_pretrained(tmp_path)
    assert policy_of(loaded) == policy
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301
        assert twin.sparsek == form
        assert policy_of(twin) == policy


def test_a_model_with_a_policy_is_saved(tmp_path: Path):
    model = pair("llama")[1]
    assert model.config.sparsek is None
    with torch.no_grad():
        dense = states(model, tokens(length=256))
        model.config.sparsek = TOP | NEAR
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, attn_implementation="sparsek").eval()
        found = states(loaded, tokens(length=256))
        torch.testing.assert_close(found, states(model, tokens(length=256)))  # loaded weights lie elsewhere
        assert not torch.allclose(found, dense, atol=1e-3)
        del model.config.sparsek
        assert torch.equal(states(model, tokens(length=256)), dense)
        model.config.sparsek = {"window": 9}
        model.config.sparsek["window"] = 256
        torch.testing.assert_close(states(model, tokens(length=256)), dense)


@dataclass(frozen=True)
class Everything(policies.Policy):
    """A policy of the user's own."""

    causal: bool = True

    def choose(self, given: PolicyInputs) -> BlockMask:
        return given.from_map(torch.ones_like(given.blank_map()), self.causal)


@pytest.mark.parametrize("composite", [False, True])
def test_a_saved_policy_that_no_attention_reads_warns(composite: bool, tmp_path: Path):
    if composite:
        part = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.CLIPConfig(
            text_config=part, vision_config=part | {"image_size": 32, "patch_size": 16}
        )
        config.text_config.sparsek = {"window": 9}
        model = transformers.CLIPModel(config)
    else:
        model = pair("llama")[1]
        model.config.sparsek = TOP
    model.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match='config.json has "sparsek", but the attention implementation is "sdpa"'
    ):
        loaded = type(model).from_pretrained(tmp_path)
    loaded.set_attn_implementation("sparsek")
    for chosen in ("sparsek", "eager"):
        type(model).from_pretrained(tmp_path, attn_implementation=chosen)


def test_a_policy_of_ones_own_serves_its_process_and_is_described_in_the_file(tmp_path: Path):
    plain, own = pair("llama", "sparsek")
    own.config.sparsek = Everything()
    with torch.no_grad():
        torch.testing.assert_close(states(own, tokens()), states(plain, tokens()))
    for twin in (copy.deepcopy(own.config), pickle.loads(pickle.dumps(own.config))):  # noqa: S301
        assert policy_of(twin) == Everything()
    own.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sparsek"] == {"policy": "Everything()"}
    loaded = type(own).from_pretrained(tmp_path, attn_implementation="sparsek").eval()
    refused(r"config.sparsek\['policy'\] is 'Everything\(\)'; use one of", states, loaded, tokens())
    joined = Everything() | policies.MeanTopK(topk=2)
    own.config.sparsek = joined
    assert policy_of(own.config) == joined
    assert "Everything" in repr(own.config)


def test_what_no_file_holds_is_refused_before_it_is_stored():
    config = transformers.LlamaConfig(sparsek={"window": 3})
    for wrong in (
        policies.XAttention,
        "XAttention",
        3,
        {"policy": policies.XAttention},
        {"window": object()},
    ):
        with pytest.raises(InvalidInput, match=r"config\.sparsek is"):
            config.sparsek = wrong
    assert config.sparsek == {"window": 3}


def llava() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=32)
    text = transformers.LlamaConfig(**sizes, vocab_size=99, initializer_range=0.3)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=98)


def test_a_config_that_no_layer_reads_refuses_it():
    message = "on a LlavaConfig, which no attention layer reads.*config.text_config.sparsek"
    kind, ids = transformers.LlavaForConditionalGeneration, tokens().clamp(max=97)
    model = kind._from_config(llava(), attn_implementation="sparsek").eval()
    with torch.no_grad():
        dense = states(model, ids)
        with pytest.raises(InvalidInput, match=message):
            model.config.sparsek = {"window": 4}
        model.config.sparsek = None
        model.config.text_config.sparsek = {"window": 4}
        assert not torch.allclose(states(model, ids), dense, atol=1e-3)
    refused("on a CLIPConfig", transformers.CLIPConfig, sparsek=TOP)


@pytest.mark.parametrize(
    "name", ["GitConfig", "MoshiConfig", "GPT2Config", "BartConfig", "T5Config", "IdeficsConfig"]
)
def test_configs_with_layers_of_their_own_take_it(name: str):
    assert getattr(transformers, name)(sparsek={"window": 4}).sparsek == {"window": 4}


ALONE = {
    "Bloom": {"n_layer": 1, "n_head": 2, "hidden_size": 32},
    "Mpt": {"n_layers": 1, "n_heads": 2, "d_model": 32},
    "Falcon": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "alibi": True},
    "GPTNeoXJapanese": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32},
    "XLNet": {"n_layer": 1, "n_head": 2, "d_model": 32, "d_inner": 32},
}


@pytest.mark.parametrize("name", ALONE)
def test_models_that_compute_attention_by_themselves_are_refused(name: str):
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **ALONE[name])
    kind = getattr(transformers, f"{name}Model")
    with pytest.raises(InvalidInput, match=rf"{name}Model computes attention by itself.*leave it out"):
        kind._from_config(config, attn_implementation="sparsek")
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **ALONE[name])
    assert kind._from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


def test_a_part_that_computes_attention_by_itself_is_left_out_by_name():
    def made(**options: Any) -> Any:
        sizes = {"embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}
        vision = transformers.Swinv2Config(image_size=16, patch_size=2, **sizes)
        text = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
        )
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=1)
        return transformers.LlavaForConditionalGeneration._from_config(config, **options)

    with pytest.raises(InvalidInput, match="Swinv2Model computes attention by itself"):
        made(attn_implementation="sparsek")
    model = made(attn_implementation={"text_config": "sparsek"})
    assert model.model.language_model.config._attn_implementation == "sparsek"
