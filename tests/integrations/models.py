"""Tiny models of transformers in pairs: one with eager attention and one with SparseK's, of the same weights."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.tools import need

need("transformers")

import transformers.masking_utils as masking_utils

import sparsek.integrations.transformers  # noqa: F401  registers itself

# Its configs have no types for options but their own, and pyright would read every model there is: 20 s.
transformers: Any = importlib.import_module("transformers")
WORDS = 99
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
# The same attention in plain torch, under the mask of the model and that of config.sparsek's window and sinks.
REFERENCE = "reference_of_sparsek"


def overlay(options: dict[str, int], first: Tensor) -> Any:
    """Window and sinks as a mask function; `first` token of each batch item, from which sinks count."""

    def admits(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (q - k < options["window"]) & (k - q < options["window"])
        return near | (k - first[batch] < options.get("sinks", 0))

    return admits


def reference_mask(
    *, mask_function: Any, attention_mask: Any, batch_size: int, config: Any, **asked: Any
) -> Any:
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        first = attention_mask.int().argmax(1)
    else:
        first = torch.zeros(batch_size, dtype=torch.int64)
    asked["allow_is_bidirectional_skip"] = False
    function = masking_utils.and_masks(mask_function, overlay(config.sparsek, first))
    return masking_utils.eager_mask(
        mask_function=function, attention_mask=attention_mask, batch_size=batch_size, config=config, **asked
    )


def reference_attention(module: Any, *args: Any, **options: Any) -> Any:
    module.num_key_value_groups = getattr(module, "num_key_value_groups", 1)  # BERT has none
    return transformers.models.llama.modeling_llama.eager_attention_forward(module, *args, **options)


transformers.AttentionInterface.register(REFERENCE, reference_attention)
transformers.AttentionMaskInterface.register(REFERENCE, reference_mask)


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 2} | options)
    return transformers.LlamaForCausalLM, config


def qwen2(**options: Any) -> Any:
    """Its first layer sees everything, its second a window of 50."""
    config = transformers.Qwen2Config(
        **SMALL,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=50,
        max_window_layers=1,
        **options,
    )
    return transformers.Qwen2ForCausalLM, config


def bert(**options: Any) -> Any:
    return transformers.BertModel, transformers.BertConfig(**SMALL, **options)


MODELS = {"llama": llama, "qwen2": qwen2, "bert": bert}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 50}
# Weights that are large enough for attention to matter.
LIVELY = {"initializer_range": 0.2, "tie_word_embeddings": False, "head_dim": 8, "num_key_value_heads": 2}


def mistral(**options: Any) -> Any:
    """Every layer sees a window of 50."""
    config = transformers.MistralConfig(**SMALL | LIVELY | {"sliding_window": 50} | options)
    return transformers.MistralForCausalLM, config


def gemma2(**options: Any) -> Any:
    """Capped scores; a layer with a window of 50, then one without."""
    more = LIVELY | BOTH_KINDS | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**SMALL | more | options)


def gemma3(**options: Any) -> Any:
    more = LIVELY | BOTH_KINDS | {"query_pre_attn_scalar": 8}
    return transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**SMALL | more | options)


def gemma4(**options: Any) -> Any:
    """Heads of the layer without a window are twice as wide."""
    more = LIVELY | BOTH_KINDS | {"global_head_dim": 16, "hidden_size_per_layer_input": 0}
    return transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**SMALL | more | options)


def gpt_oss(**options: Any) -> Any:
    """Learned sinks; a layer with a window of 50, then one without."""
    more = LIVELY | BOTH_KINDS | {"num_local_experts": 2, "num_experts_per_tok": 2}
    more["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**SMALL | more | options)


LAYERED = {"mistral": mistral, "gemma2": gemma2, "gemma3": gemma3, "gpt_oss": gpt_oss}
if hasattr(transformers, "Gemma4ForCausalLM"):
    LAYERED["gemma4"] = gemma4


def pair(name: str, against: Any = "eager", **options: Any) -> tuple[Any, Any]:
    """A model with another attention, and one with SparseK's."""
    torch.manual_seed(0)
    kind, config = (MODELS | LAYERED)[name](**options)
    other = kind._from_config(copy.deepcopy(config), attn_implementation=against).eval()
    own = kind._from_config(copy.deepcopy(config), attn_implementation="sparsek").eval()
    own.load_state_dict(other.state_dict())
    return other, own


def tokens(batch: int = 2, length: int = 150) -> Tensor:
    return torch.randint(1, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(name: str, length: int = 150) -> "Tensor | None":
    """2-D masks for two batch items."""
    there = torch.ones(2, length, dtype=torch.int64)
    if name == "none":
        return None
    if name in ("left", "both"):
        there[0, :40] = 0
        there[1, :3] = 0
    if name in ("right", "both"):
        there[1, 100:] = 0
    if name == "gaps":
        there[1, 40:44] = 0
        there[1, :5] = 0
    return there


def states(model: Any, ids: Tensor, **options: Any) -> Tensor:
    found = model(ids, **options)
    return found.logits if "logits" in found else found.last_hidden_state


@torch.no_grad()
def check_alike(
    other: Any, own: Any, ids: Tensor, attention_mask: "Tensor | None" = None, **options: Any
) -> None:
    """Both say the same of every token that is there."""
    there = torch.ones_like(ids) if attention_mask is None else attention_mask
    got, want = (states(model, ids, attention_mask=attention_mask, **options) for model in (own, other))
    torch.testing.assert_close(got[there > 0], want[there > 0], rtol=0, atol=2e-5)


@pytest.fixture
def no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SparseK's masks are made without a look at every pair of a query and a key."""
    from sparsek.integrations import transformers_masks

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("every pair is looked at")

    monkeypatch.setattr(transformers_masks.MaskRequest, "seen", refuse)
    monkeypatch.setattr(transformers_masks.BlockMask, "from_dense", refuse)
    monkeypatch.setattr(transformers_masks.BlockMask, "from_transformers", refuse)
