"""LoRA of peft over sparse layers: adapters learn, merge, and come back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import SparseLinear

peft: Any = pytest.importorskip(
    "peft", reason="peft is in no environment of `make env`: every process would load it"
)

import sparsek.integrations.peft
from tests.integrations.models import SMALL
from tests.integrations.models import transformers as lib

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for what peft calls
HALF = sk.BlockSparse(block=16, keep=0.5)
WORDS = torch.arange(8)[None]


def sparse(config: Any = HALF) -> Any:
    torch.manual_seed(0)
    model = lib.LlamaForCausalLM(lib.LlamaConfig(**SMALL)).eval()
    sk.sparsify_(model, {"*.mlp.*": config})
    return model


def experts() -> Any:
    model = lib.MixtralForCausalLM(
        lib.MixtralConfig(**SMALL, num_key_value_heads=4, num_local_experts=3)
    ).eval()
    sk.sparsify_(model, HALF)
    return model


def run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=WORDS).logits


def up(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp.up_proj.base_layer


@pytest.mark.parametrize("config", [HALF, sk.SemiSparse(), sk.Float8(HALF)], ids=str)
def test_adapters_learn_merge_and_come_back(config: Any, tmp_path: Path) -> None:
    base = sparse(config)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules="all-linear"))
    assert sum("mlp" in name for name in model.peft_config["default"].target_modules) == 6
    learning = [each for each in model.parameters() if each.requires_grad]
    assert all(each.dtype == torch.float32 for each in learning)
    optimizer = torch.optim.SGD(learning, 1.0)
    for _ in range(2):
        model(input_ids=WORDS, labels=WORDS).loss.backward()
        optimizer.step()
    right = run(model)
    assert (right - run(base)).abs().max() > 0.01
    before = {name: part.clone() for name, part in up(model).state_dict().items()}
    model.merge_adapter(safe_merge=True)
    assert type(up(model)) is torch.nn.Linear
    torch.testing.assert_close(run(model), right, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    assert isinstance(up(model), SparseLinear)
    assert all(torch.equal(part, before[name]) for name, part in up(model).state_dict().items())
    model.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    loaded = lib.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    torch.testing.assert_close(run(back), right)
    torch.testing.assert_close(run(back.merge_and_unload()), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_what_needs_the_dense_weight_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="over sparse layers"):
        peft.get_peft_model(sparse(), peft.LoraConfig(target_modules=["up_proj"], **options))


def test_a_fused_activation_is_refused() -> None:
    model = sparse()
    model.model.layers[0].mlp.up_proj.activation = "relu"
    with pytest.raises(InvalidInput, match="set its activation to None"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"]))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft, for Mixtral
def test_all_linear_leaves_packed_experts_out_as_dense_ones() -> None:
    model = experts()
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    tuned(input_ids=WORDS).logits.sum().backward()
    names = {
        name
        for name, each in tuned.named_modules()
        if isinstance(each, sparsek.integrations.peft.LoraSparseLinear)
    }
    assert len(names) == 8
    assert not any("experts" in name for name in names)
    model = experts()
    with pytest.raises(InvalidInput, match="packed experts take no adapter"):
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["down_proj"]))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.parametrize("asked", [True, False])
def test_layers_that_were_a_conv1d_become_one_again(asked: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    base = lib.GPT2LMHeadModel(lib.GPT2Config(**sizes)).eval()
    sk.sparsify_(base, {"*.h.0.*": HALF, "*.h.1.mlp.*": HALF})
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=asked, lora_bias=True)
    model = peft.get_peft_model(base, config)
    for name, each in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(each, std=0.2)
    right = run(model)
    model.merge_adapter()
    torch.testing.assert_close(run(model), right, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    torch.testing.assert_close(run(model), right)
    merged = model.merge_and_unload()
    assert type(merged.transformer.h[0].attn.c_proj) is type(merged.transformer.h[1].attn.c_proj)
    merged.save_pretrained(tmp_path)  # a square weight has no shape that tells it from its transpose
    torch.testing.assert_close(
        run(lib.GPT2LMHeadModel.from_pretrained(tmp_path)), right, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("config", [HALF, sk.Float8(HALF)], ids=str)
def test_the_sparse_layer_follows_what_happened_to_the_merged_one(config: Any) -> None:
    model = peft.get_peft_model(sparse(config), peft.LoraConfig(r=4, target_modules="all-linear"))
    calls = []
    up(model).register_forward_hook(lambda *_: calls.append(1))
    model.merge_adapter()
    assert not any(each.requires_grad for each in up(model).parameters())
    run(model)
    assert len(calls) == 1
    model.to(torch.bfloat16).train()
    model.unmerge_adapter()
    assert run(model).dtype == up(model).to_dense().dtype == torch.bfloat16
    assert up(model).training


def test_a_layer_that_accelerate_offloads_is_not_merged() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    model = peft.get_peft_model(sparse(), peft.LoraConfig(r=4, target_modules=["up_proj"]))
    accelerate.cpu_offload(up(model), "cpu", offload_buffers=True)
    with pytest.raises(InvalidInput, match="load the model without offloading"):
        model.merge_adapter()
    assert isinstance(up(model), SparseLinear)
