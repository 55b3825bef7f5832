"""save_pretrained and from_pretrained of models with sparse layers: nothing is lost, and nothing is loaded as noise."""

import copy
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import sparsek as sk
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.nn import description
from sparsek.nn.experts import PackedLinear
from tests.house.tools import need
from tests.refusals import refused
from tests.sampling import sampled

need("transformers")

from tests.integrations.models import transformers as lib

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
HALF = sk.BlockSparse(block=32, keep=0.5)
CONFIGS = (
    HALF,
    sk.SemiSparse(),
    sk.BlockSemiSparse(block=64, keep=0.5),
    sk.Float8(),
    sk.Float8(HALF),
    sk.Float8(sk.SemiSparse()),
)
UP = "model.layers.0.mlp.up_proj"
WORDS = torch.arange(8)[None]


def bert() -> Any:
    return lib.BertForMaskedLM(lib.BertConfig(**SMALL))


def llama(**options: Any) -> Any:
    return lib.LlamaForCausalLM(lib.LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def qwen3() -> Any:
    return lib.Qwen3ForCausalLM(lib.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=64))


def gpt2() -> Any:
    return lib.GPT2LMHeadModel(lib.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=2))


def t5() -> Any:
    options = {"vocab_size": 96, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
    return lib.T5ForConditionalGeneration(lib.T5Config(**options, decoder_start_token_id=0))


def mixtral() -> Any:
    return lib.MixtralForCausalLM(
        lib.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    )


def vit() -> Any:
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return lib.ViTForImageClassification(lib.ViTConfig(**options, image_size=32, patch_size=16))


def run(model: Any) -> torch.Tensor:
    kind = type(model).__name__
    with torch.no_grad():
        if kind.startswith("ViT"):
            return model(torch.ones(1, 3, 32, 32)).logits
        more = {"decoder_input_ids": WORDS} if kind.startswith("T5") else {}
        return model(WORDS, **more).logits


def sparse(make: Callable[[], Any], config: Any = HALF) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    sk.sparsify_(model, config)
    return model


def same(a: nn.Module, b: nn.Module) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0)


@pytest.mark.parametrize("make", [bert, llama, qwen3, gpt2, t5, mixtral, vit])
def test_models_come_back_exactly(make: Callable[[], Any], tmp_path: Path) -> None:
    model = sparse(make)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    back, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same(model, back)
    torch.testing.assert_close(run(back), run(model))
    assert "sparsek.integrations.transformers" in (tmp_path / "README.md").read_text()
    same(model, sk.load_model(make, tmp_path))
    for each in (model, back):
        sk.densify_(each)
    same(model, back)


@pytest.mark.parametrize("config", CONFIGS[1:], ids=str)
def test_every_storage_comes_back_sharded_and_twice(config: Any, tmp_path: Path) -> None:
    model = sparse(llama, config)
    model.get_submodule(UP).activation = "relu"
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    once = lib.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    once.save_pretrained(tmp_path / "two")
    back = lib.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    same(model, back)
    assert back.get_submodule(UP).activation == "relu"


def test_dtypes_device_maps_and_ties(tmp_path: Path) -> None:
    need("accelerate")
    model = sparse(lambda: llama(tie_word_embeddings=True), {"*.q_proj": sk.Float8(HALF), "*": HALF})
    model.save_pretrained(tmp_path)
    back = lib.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    attention = back.model.layers[0].self_attn
    assert attention.k_proj.values.dtype == torch.bfloat16
    assert attention.q_proj.codes.dtype == torch.float8_e4m3fn
    assert attention.q_proj.scale.dtype == torch.float32
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert run(back).isfinite().all()
    back.half()  # nothing says that it is quantized


@pytest.mark.parametrize("config", [HALF, sk.Float8(HALF)], ids=str)
def test_layers_that_a_model_keeps_in_float32_do_so(config: Any, tmp_path: Path) -> None:
    """As `wo` of T5 in half precision, whose code casts x for a dense weight alone."""
    torch.manual_seed(0)
    t5().save_pretrained(tmp_path / "dense")
    model = lib.T5ForConditionalGeneration.from_pretrained(tmp_path / "dense", dtype=torch.float16)
    sk.sparsify_(model, config)
    wanted, part = run(model), "decoder.block.0.layer.2.DenseReluDense.wo"
    assert model.get_submodule(part).to_dense().dtype == torch.float32
    model.save_pretrained(tmp_path / "sparse")
    loads: Any = (
        lambda: type(model).from_pretrained(tmp_path / "sparse", dtype=torch.float16),
        lambda: sk.load_model(t5, tmp_path / "sparse"),
        lambda: copy.deepcopy(model),
    )
    for load in loads:
        assert torch.equal(run(load().eval()), wanted)
    same(loads[0](), model)
    assert (
        type(model)
        .from_pretrained(tmp_path / "sparse", dtype=torch.bfloat16)
        .get_submodule(part)
        .to_dense()
        .dtype
        == torch.bfloat16
    )
    sk.densify_(model)
    torch.testing.assert_close(run(model), wanted, rtol=0.1, atol=0.1)


def test_layers_on_disk_give_the_same(tmp_path: Path) -> None:
    need("accelerate")
    model = sparse(llama)
    model.save_pretrained(tmp_path / "model")
    places = {"model": "cpu", "lm_head": "disk"}
    back = lib.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "off"
    )
    torch.testing.assert_close(run(back), run(model))


@pytest.mark.parametrize("buffers", [False, True])
def test_packed_experts_on_disk_give_the_same(buffers: bool, tmp_path: Path) -> None:
    """Their layers are multiplied without a call, before which accelerate brings what it moves."""
    need("accelerate")
    model = sparse(mixtral)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    back = type(model).from_pretrained(
        tmp_path / "model", device_map={**places, "model.layers": "disk"}, offload_folder=tmp_path / "off",
        offload_buffers=buffers,
    )  # fmt: skip
    for _ in range(2):
        torch.testing.assert_close(run(back), run(model))


def test_packed_experts_have_a_layer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that stands for a weight of theirs is gone when the next one is made, perhaps in its memory."""
    model = lib.MixtralForCausalLM(
        lib.MixtralConfig(**{**SMALL, "num_hidden_layers": 2}, num_key_value_heads=2, num_local_experts=2)
    )
    layers = description.describe(sparse(lambda: copy.deepcopy(model)))
    look_up, one = description.layer_of, []

    def in_one_place(of: Any, name: str) -> Any:
        found = look_up(of, name)
        if isinstance(found, PackedLinear):
            one.append(found)
            vars(one[0]).update(vars(found))
            return one[0]
        return found

    monkeypatch.setattr(description, "layer_of", in_one_place)
    made = description.empty_layers(model, layers)
    assert len({id(each) for each in made.values()}) == len(layers)


def test_a_sparse_head_of_a_model_with_tied_words(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True).eval()
    model.lm_head = sk.nn.BlockSparseLinear.from_dense(model.lm_head, 32, keep=0.5)
    model.save_pretrained(tmp_path)
    same(model, lib.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_the_base_of_a_model_and_a_model_of_a_base(tmp_path: Path) -> None:
    model = sparse(bert)
    model.save_pretrained(tmp_path / "whole")
    base = lib.BertModel.from_pretrained(tmp_path / "whole", add_pooling_layer=False)
    same(base, model.bert)
    base.save_pretrained(tmp_path / "base")
    same(lib.BertForMaskedLM.from_pretrained(tmp_path / "base").bert, model.bert)


def test_dense_checkpoints_are_as_before(tmp_path: Path) -> None:
    model = llama().eval()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / "README.md").exists()
    same(model, lib.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_loaded_models_are_copied(saved: Path) -> None:
    back = lib.AutoModelForCausalLM.from_pretrained(saved)
    same(copy.deepcopy(back), back)
    assert pickle.dumps(back)


def test_the_state_dict_that_is_given_is_saved(tmp_path: Path) -> None:
    model = sparse(llama)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    name = "model.layers.0.mlp.up_proj.values"
    state[name] += 1
    model.save_pretrained(tmp_path, state_dict=state)
    back = lib.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back.state_dict()[name], state[name])


WITHOUT = """
import sys
sys.modules["sparsek"] = None
import transformers
for folder in sys.argv[1:]:
    try:
        transformers.AutoModel.from_pretrained(folder)
    except RuntimeError as error:
        assert "ignore_mismatched_sizes" in str(error)
        print("refused")
"""


@pytest.mark.parametrize("where", sampled(("in a process of its own", "unregistered here"), 1))
def test_without_sparsek_a_loader_raises(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {llama: HALF, gpt2: sk.SemiSparse(), t5: sk.Float8(sk.SemiSparse()), bert: HALF}
    folders = [str(tmp_path / make.__name__) for make in configs]
    for (make, config), folder in zip(configs.items(), folders, strict=True):
        sparse(make, {"*": config}).save_pretrained(folder, max_shard_size="100KB")
    if where == "in a process of its own":  # which takes 3 CPU seconds
        command = [sys.executable, "-c", WITHOUT, *folders]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "refused\n" * len(folders), done.stderr[-3000:]
        return
    for mapping in ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"):
        monkeypatch.delitem(getattr(lib.quantizers.auto, mapping), "sparsek")
    for folder in folders:
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            lib.AutoModel.from_pretrained(folder)


def test_a_layer_from_before_the_library_was_loaded_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse(llama)
    before = lib.PreTrainedModel.save_pretrained
    monkeypatch.setattr(lib.PreTrainedModel, "save_pretrained", before.__wrapped__)
    model.save_pretrained(tmp_path / "first")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        lib.AutoModel.from_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")  # asked for a state dict, layers make themselves known
    same(model, lib.AutoModelForCausalLM.from_pretrained(tmp_path / "second"))
    assert not any(part.shape == (0,) for part in model.state_dict().values())


def test_a_model_with_the_encoder_alone_and_another_head(tmp_path: Path) -> None:
    model = sparse(t5)
    model.save_pretrained(tmp_path)
    same(model.encoder, lib.T5EncoderModel.from_pretrained(tmp_path).encoder)
    model = sparse(bert)
    model.save_pretrained(tmp_path / "bert")
    classifier = lib.BertForSequenceClassification.from_pretrained(tmp_path / "bert")
    same(model.bert.encoder, classifier.bert.encoder)


def test_a_save_that_was_cut_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(llama).save_pretrained(tmp_path, max_shard_size="20KB")
    whole, count = lib.modeling_utils.safe_save_file, iter(range(9))
    with monkeypatch.context() as patch:
        patch.setattr(
            lib.modeling_utils,
            "safe_save_file",
            lambda *args, **more: 1 / (2 - next(count)) and whole(*args, **more),
        )
        torch.manual_seed(1)
        model = sparse(lambda: llama(rms_norm_eps=1e-3))
        with pytest.raises(ZeroDivisionError):
            model.save_pretrained(tmp_path, max_shard_size="20KB")
    refused("not saved to the end", lib.AutoModelForCausalLM.from_pretrained, tmp_path)
    for size in ("50GB", "20KB"):  # transformers leaves the single file beside the shards, and reads it
        model.model.norm.weight.data += 1
        model.save_pretrained(tmp_path, max_shard_size=size)
        same(model, lib.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_state_dicts_with_guards_are_those_of_sparse_layers_only(saved: Path) -> None:
    file = importlib.import_module("safetensors.torch").load_file(saved / "model.safetensors")
    model = sparse(llama, sk.BlockSparse(block=32, keep=0.25))
    assert model.load_state_dict(file).missing_keys == []
    same(model, lib.AutoModelForCausalLM.from_pretrained(saved))
    with pytest.raises(RuntimeError, match="size mismatch"):
        llama().load_state_dict(file, strict=False)


def test_accelerate_loads_the_files_and_saves_guarded_ones(saved: Path, tmp_path: Path) -> None:
    need("accelerate")
    accelerate = importlib.import_module("accelerate")
    right = lib.AutoModelForCausalLM.from_pretrained(saved)
    for places in ({"": "cpu"}, {"model": "disk", "lm_head": "cpu"}):
        with accelerate.init_empty_weights():
            model, dense = llama(), llama()
        sk.sparsify_(model, HALF)
        options = {"device_map": places, "offload_folder": tmp_path / "off", "offload_buffers": True}
        model = accelerate.load_checkpoint_and_dispatch(model, saved, **options)
        torch.testing.assert_close(run(model), run(right))
        with pytest.raises((ValueError, RuntimeError)):
            accelerate.load_checkpoint_and_dispatch(dense, saved, **options)
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "accelerate")
        with safe_open(tmp_path / "accelerate" / "model.safetensors", framework="pt") as file:
            guards = {name for name in file.keys() if file.get_slice(name).get_shape() == [0]}  # noqa: SIM118
        assert guards == {f"{name}.weight" for name in description.describe(model)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            accelerate.load_checkpoint_in_model(llama(), tmp_path / "accelerate")


def test_the_mixin_of_the_hub_refuses(tmp_path: Path) -> None:
    hub: Any = importlib.import_module("huggingface_hub")

    class Model(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

    model: Any = Model()
    model.save_pretrained(tmp_path / "dense")
    sk.sparsify_(model, HALF)
    refused(r"sk\.save_model", model.save_pretrained, tmp_path / "sparse")


def test_options_that_write_no_safetensors_and_other_quantizers_are_refused(tmp_path: Path) -> None:
    model = sparse(llama)
    if "distributed_checkpoint" in inspect.signature(model.save_pretrained).parameters:
        refused("safetensors", model.save_pretrained, tmp_path, distributed_checkpoint=True)
    model.hf_quantizer = "bitsandbytes"
    refused("one quantization_config", model.save_pretrained, tmp_path)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "version": lambda c: c.update(version=2),
    "no layers": lambda c: c.pop("layers"),
    "field": lambda c: c.update(code="import os"),
    "no dict": lambda c: c["layers"].update({UP: [1]}),
    "unknown": lambda c: c["layers"][UP].update(hook="x"),
    "format": lambda c: c["layers"][UP].update(format="weird"),
    "shape": lambda c: c["layers"][UP].update(shape=[2**40, 128]),
    "other shape": lambda c: c["layers"][UP].update(shape=[64, 64]),
    "block": lambda c: c["layers"][UP].update(block=[0, 32]),
    "blocks": lambda c: c["layers"][UP].update(blocks=2**60),
    "unfinished": lambda c: c.update(unfinished=True),
    "negative": lambda c: c["layers"][UP].update(blocks=-1),
    "float": lambda c: c["layers"][UP].update(blocks=4.0),
    "dtype": lambda c: c["layers"][UP].update(value_dtype="int8"),
    "bias": lambda c: c["layers"][UP].update(bias=1),
    "activation": lambda c: c["layers"][UP].update(activation=["eval"]),
    "fp8": lambda c: c["layers"][UP].update(fp8="e4m3"),
    "scale": lambda c: c["layers"][UP].update(fp8="e4m3", scale="all"),
    "no such layer": lambda c: c["layers"].update({"model.none": c["layers"][UP]}),
    "no linear layer": lambda c: c["layers"].update({"model.norm": c["layers"][UP]}),
    "the model": lambda c: c["layers"].update({"": c["layers"][UP]}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    sparse(llama).save_pretrained(folder)
    return folder


def copied(saved: Path, folder: Path) -> Path:
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_hostile_entries_are_refused(
    change: Callable[[dict[str, Any]], object], saved: Path, tmp_path: Path
) -> None:
    edit(copied(saved, tmp_path), change)
    with pytest.raises(InvalidInput):
        lib.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change", [{"blocks": 3}, {"block": [16, 64]}, {"format": "bsr24", "block": [64, 64]}]
)
def test_entries_that_do_not_fit_the_tensors_are_refused(
    change: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    edit(copied(saved, tmp_path), lambda c: c["layers"][UP].update(change))
    with pytest.raises((InvalidInput, InvalidFile)):
        lib.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_layer_that_the_config_leaves_out_mismatches(saved: Path, tmp_path: Path) -> None:
    edit(copied(saved, tmp_path), lambda c: c["layers"].pop(UP))
    with pytest.raises(InvalidFile, match=rf"{UP}\.weight is \[0\]"):
        lib.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["values", "indices"])
def test_missing_and_wrong_tensors_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    need("safetensors")
    torch_files = importlib.import_module("safetensors.torch")
    path = copied(saved, tmp_path) / "model.safetensors"
    tensors = torch_files.load_file(path)
    part = tensors.pop(f"{UP}.{name}")
    torch_files.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InvalidFile, match=f"lacks {UP}.{name}"):
        lib.AutoModelForCausalLM.from_pretrained(tmp_path)
    if name == "indices":
        torch_files.save_file(tensors | {f"{UP}.{name}": part + 9}, path, {"format": "pt"})
        refused(UP, lib.AutoModelForCausalLM.from_pretrained, tmp_path)


def test_a_config_in_the_call_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = lib.quantizers.AutoQuantizationConfig.from_dict(
        {"quant_method": "sparsek", "version": 1, "layers": {}}
    )
    refused("sparsify_", lib.AutoModelForCausalLM.from_pretrained, tmp_path, quantization_config=config)


@pytest.mark.parametrize("ranks", [{"tp_plan": "auto"}, {"tp_plan": None, "tp_size": 2}])
def test_tensor_parallelism_is_refused(ranks: dict[str, Any], saved: Path) -> None:
    config = lib.AutoConfig.from_pretrained(saved)
    quantizer = lib.quantizers.AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    model = llama()
    model.config.distributed_config = SimpleNamespace(**ranks)  # as from_pretrained leaves it
    refused("does not split sparse layers", quantizer.preprocess_model, model)


def test_pipelines_generate_as_with_dense_layers(saved: Path) -> None:
    of = importlib.import_module("tokenizers")
    words = of.Tokenizer(of.models.WordLevel({f"w{at}": at for at in range(96)}, unk_token="w0"))
    words.pre_tokenizer = of.pre_tokenizers.Whitespace()
    tokenizer = lib.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    model = lib.AutoModelForCausalLM.from_pretrained(saved)
    found = []
    for _ in range(2):
        pipe = lib.pipeline("text-generation", model=model, tokenizer=tokenizer)
        found.append(pipe("w5 w7 w9", max_new_tokens=4, do_sample=False)[0]["generated_text"])
        sk.densify_(model)
    assert found[0] == found[1]
    assert found[0].count("w") == 7


def test_a_vocabulary_grows_with_a_dense_head_only(tmp_path: Path) -> None:
    model = sparse(llama)
    model.resize_token_embeddings(104)
    model.save_pretrained(tmp_path)
    same(model, lib.AutoModelForCausalLM.from_pretrained(tmp_path))
    model = sparse(llama, {"lm_head": HALF})
    with pytest.raises(TypeError, match=r"not an instance of <class 'torch\.nn"):
        model.resize_token_embeddings(104)
    model = sparse(llama, {"lm_head": HALF})
    sk.densify_(model)
    model.resize_token_embeddings(104)
    assert model.lm_head.weight.shape[0] == 104


def test_models_of_diffusers_are_loaded_by_sparsek_and_raise_without(tmp_path: Path) -> None:
    need("diffusers")
    of: Any = importlib.import_module("diffusers")

    class Net(of.ModelMixin, of.ConfigMixin):
        @of.configuration_utils.register_to_config
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    model: Any = Net()
    sk.sparsify_(model, {"up": HALF, "down": sk.SemiSparse()})
    model.save_pretrained(tmp_path)
    same(model, sk.load_model(lambda: Net.from_config(Net.load_config(tmp_path)), tmp_path))
    with pytest.raises((ValueError, RuntimeError)):
        Net.from_pretrained(tmp_path)
