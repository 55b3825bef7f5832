"""sk.sparsify_ and sk.densify_: what is replaced, skipped and kept; models of transformers; errors change nothing."""

import copy
import importlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.models.config import BlockSparse as Config
from sparsek.nn import BlockSparseLinear
from tests.house.tools import need

HALF = sk.BlockSparse(block=32, keep=0.5)
WHOLE = sk.BlockSparse(block=32, keep=1.0)
Untyped: Any = sk.sparsify_  # for what its types forbid
OTHERS = (
    sk.SemiSparse(),
    sk.BlockSemiSparse(block=64, keep=0.5),
    sk.Float8(),
    sk.Float8(HALF),
    sk.Float8(sk.SemiSparse()),
    sk.Float8(sk.BlockSemiSparse(block=64, keep=0.5)),
)
KEPT = {"2:4": 0.5, "BSR24 64 50 %": 0.25, "dense fp8": 1, "BSR 32 50 % fp8": 0.5, "2:4 fp8": 0.5} | {
    "BSR24 64 50 % fp8": 0.25
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WORDS = 96
SIZES: dict[str, Any] = SMALL | {"vocab_size": WORDS}


def transformers() -> Any:
    need("transformers")
    return importlib.import_module("transformers")


def bert() -> Any:
    lib = transformers()
    return lib.BertForMaskedLM(lib.BertConfig(**SIZES))


def llama(**options: Any) -> Any:
    lib = transformers()
    return lib.LlamaForCausalLM(lib.LlamaConfig(**SIZES | {"num_key_value_heads": 2} | options))


def qwen3() -> Any:
    lib = transformers()
    config = lib.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    return lib.Qwen3ForCausalLM(config)


def t5() -> Any:
    lib = transformers()
    options = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
    config = lib.T5Config(
        vocab_size=WORDS, **options, feed_forward_proj="gated-gelu", decoder_start_token_id=0
    )
    return lib.T5ForConditionalGeneration(config)


def vit() -> Any:
    lib = transformers()
    return lib.ViTForImageClassification(lib.ViTConfig(**SMALL, image_size=32, patch_size=16))


def gpt2() -> Any:
    lib = transformers()
    options = {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return lib.GPT2LMHeadModel(lib.GPT2Config(vocab_size=WORDS, **options))


# How many layers become sparse, and why the head does not.
MODELS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "bert": (bert, 13, "shares its weight with bert.embeddings.word_embeddings"),
    "llama": (llama, 14, "is the output embedding"),
    "qwen3": (qwen3, 14, "shares its weight with model.embed_tokens"),
    "t5": (t5, 18, "shares its weight with shared"),
    "vit": (vit, 12, "has 1x2 blocks of 32x32"),
    "gpt2": (gpt2, 8, "shares its weight with transformer.wte"),
}


def inputs(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    words = {"input_ids": torch.randint(3, WORDS, (2, 8))}
    return words | ({"decoder_input_ids": words["input_ids"]} if name == "t5" else {})


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_become_sparse_and_dense_again(name: str) -> None:
    torch.manual_seed(0)
    make, count, why_no_head = MODELS[name]
    model, given = make().eval(), inputs(name)
    before, kinds = model(**given).logits, {n: type(m) for n, m in model.named_modules()}
    tied = {n for n, _ in model.named_parameters()}

    report = sk.sparsify_(model, WHOLE)
    assert len(report.replaced) == count
    assert all(isinstance(model.get_submodule(row.name), BlockSparseLinear) for row in report.replaced)
    assert all(row.kept == 1 and row.kept_norm == pytest.approx(1) for row in report.replaced)
    assert any(row.why_not.startswith(why_no_head) for row in report.skipped), str(report)
    torch.testing.assert_close(model(**given).logits, before, atol=1e-5, rtol=1e-4)

    assert sk.densify_(model) == [row.name for row in report.replaced]
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert {n for n, _ in model.named_parameters()} == tied
    torch.testing.assert_close(model(**given).logits, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_goes_into_a_new_model_with_another_pattern(name: str) -> None:
    make, given = MODELS[name][0], inputs(name)
    torch.manual_seed(1)
    model, other = make().eval(), make().eval()
    sk.sparsify_(model, HALF)
    sk.sparsify_(other, sk.BlockSparse(block=32, keep=1.0))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**given).logits, model(**given).logits)


@pytest.mark.parametrize("name", ["llama", "qwen3", "t5", "gpt2"])
def test_generate_gives_the_words_of_the_masked_dense_model(name: str) -> None:
    torch.manual_seed(2)
    model = MODELS[name][0]().eval()
    sk.sparsify_(model, HALF)
    dense = copy.deepcopy(model)
    assert sk.densify_(dense)
    options = {"input_ids": torch.randint(3, WORDS, (1, 6)), "max_new_tokens": 4, "do_sample": False}
    options |= {"pad_token_id": 0}
    assert torch.equal(model.generate(**options), dense.generate(**options))


def test_a_gated_mlp_learns_as_the_masked_dense_one() -> None:
    torch.manual_seed(0)
    model, words = llama(), torch.randint(WORDS, (2, 8))
    sk.sparsify_(model, {"*.mlp.*": HALF})
    dense = copy.deepcopy(model)
    sk.densify_(dense)
    for each in (model, dense):
        each(input_ids=words, labels=words).loss.backward()
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer, other = (each.model.layers[0].mlp.get_submodule(name) for each in (model, dense))
        found = layer.weight.pattern
        of_blocks = sk.BSR(found, layer.values.grad).to_dense()
        mask = sk.BSR(found, torch.ones_like(layer.values)).to_dense()
        torch.testing.assert_close(of_blocks, other.weight.grad * mask, atol=1e-5, rtol=1e-3)


def test_the_first_rule_that_matches_counts() -> None:
    model = llama(tie_word_embeddings=False)
    quarter = sk.BlockSparse(block=16, keep=0.25)
    rules = {
        "*.layers.0.*": None,
        "*.mlp.down_proj": quarter,
        nn.Embedding: HALF,
        lambda module, name: module.in_features == 64 and name.endswith("gate_proj"): WHOLE,
        nn.Linear: HALF,
    }
    report = sk.sparsify_(model, rules)
    found = {row.name: row.format or row.why_not for row in report.rows}
    assert found["model.layers.0.mlp.down_proj"] == "is left dense by its rule"
    assert found["model.layers.1.mlp.down_proj"] == "BSR 16 25 %"
    assert found["model.layers.1.mlp.gate_proj"] == "BSR 32 100 %"
    assert found["model.layers.1.self_attn.q_proj"] == "BSR 32 50 %"
    assert found["model.embed_tokens"] == "is no linear layer, but of Embedding"
    assert "a rule by its name" in found["lm_head"]


@pytest.mark.parametrize("rule", ["lm_head", "*head", lambda module, name: name == "lm_head"])
def test_an_output_embedding_becomes_sparse_if_a_rule_names_it(rule: Any) -> None:
    model = llama()
    report = sk.sparsify_(model, {rule: HALF})
    assert [row.name for row in report.replaced] == ["lm_head"]
    assert report.rows[-2].why_not == "no rule matches it"


def test_a_star_does_not_name_the_output_embedding() -> None:
    assert "lm_head" not in [row.name for row in sk.sparsify_(llama(), {"*": HALF}).replaced]


def test_filter_fn_gets_layers_and_names() -> None:
    model = mlp()
    report = sk.sparsify_(model, HALF, lambda module, name: type(module) is nn.Linear and name == "0")
    assert [row.name for row in report.replaced] == ["0"]
    assert {row.why_not for row in report.skipped} == {"is left dense by filter_fn"}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 64))


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Renamed(nn.Linear):
    """A subclass that computes as its base does."""


class OwnCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def hooked(what: str) -> nn.Linear:
    layer = nn.Linear(64, 64)
    getattr(layer.weight, what)(lambda *args: None)
    return layer


def noted(name: str, on_weight: bool = False) -> nn.Linear:
    layer = nn.Linear(64, 64)
    setattr(layer.weight if on_weight else layer, name, torch.zeros(64, 64))
    return layer


def tied(kind: type[nn.Module], view: slice) -> nn.Sequential:
    """Two Parameters in one memory."""
    model: Any = nn.Sequential(kind(64, 64), nn.Linear(64, 64))
    model[1].weight = nn.Parameter(model[0].weight.data[view].expand(64, 64))
    return model


def with_own_forward() -> nn.Linear:
    layer: Any = nn.Linear(64, 64)
    layer.forward = lambda x: x  # as the hooks of accelerate
    return layer


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: OwnForward(64, 64), "forward of its own"),
        (with_own_forward, "forward of its own"),
        (lambda: OwnCall(64, 64), "call of its own"),
        (lambda: hooked("register_hook"), "weight with hooks"),
        (lambda: hooked("register_post_accumulate_grad_hook"), "weight with hooks"),
        (lambda: noted("scale"), "an attribute 'scale' of its own"),
        (lambda: noted("main_grad", on_weight=True), "a tensor as its attribute 'main_grad'"),
        (lambda: tied(nn.Linear, slice(None)), "shares its weight with 0.1"),
        (lambda: tied(nn.Embedding, slice(None)), "shares its weight with 0.0"),
        (lambda: tied(nn.Linear, slice(9, 10)), "shares its weight with 0.1"),
        (normed, "computes its weight"),
        (lambda: nn.LazyLinear(64), "UninitializedParameter"),
        (lambda: nn.Linear(32, 64), "has 2x1 blocks of 32x32"),
        (lambda: nn.Linear(64, 2), "has 1x2 blocks of 32x32"),
        (lambda: nn.Linear(64, 0), "is empty"),
        (lambda: nn.Linear(64, 64).to(torch.float8_e4m3fn), "is of torch.float8_e4m3fn"),
        (lambda: nn.Conv2d(64, 64, 1), "no linear layer, but of Conv2d"),
        (lambda: nn.MultiheadAttention(64, 2), "nn.MultiheadAttention reads without a call"),
        (lambda: BlockSparseLinear.random(64, 64, 32, 0.5), "is sparse already"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:Lazy modules")
def test_layers_that_do_not_fit_are_skipped_with_a_reason(layer: Callable[[], nn.Module], why: str) -> None:
    model = nn.Sequential(layer(), nn.Linear(64, 64))
    modules = dict(model.named_modules())
    report = sk.sparsify_(model, HALF)
    assert report.replaced[-1].name == "1"
    assert any(why in row.why_not for row in report.skipped), str(report)
    assert all(each is modules[name] for name, each in model[0].named_modules(prefix="0"))


def test_subclasses_without_a_forward_of_their_own_and_ragged_weights_are_taken() -> None:
    model = nn.Sequential(Renamed(64, 63), nn.Linear(63, 40))
    x, y = torch.randn(3, 64), None
    for change in (lambda: None, lambda: sk.sparsify_(model, WHOLE), lambda: sk.densify_(model)):
        change()
        y = model(x) if y is None else y
        torch.testing.assert_close(model(x), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_padded", [False, True])
def test_encoders_of_torch_leave_their_fast_path(is_padded: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 8, 64), torch.arange(8).expand(3, 8) >= 6
    given = {"src_key_padding_mask": padding} if is_padded else {}
    with torch.no_grad():
        y = encoder(x, **given)
        assert len(sk.sparsify_(encoder, WHOLE).replaced) == 4
        found = encoder(x, **given)
    torch.testing.assert_close(found[:, :6], y[:, :6])


def test_weights_that_two_layers_share_are_skipped_and_stay_tied() -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model.append(model[1])  # the same layer in two places
    report = sk.sparsify_(model, HALF)
    assert [row.why_not for row in report.rows] == [f"shares its weight with {x}" for x in (2, 3, 0, 1)]
    assert model[2].weight is model[0].weight


def test_hooks_mode_requires_grad_dtype_and_bias_stay() -> None:
    model: Any = mlp().to(torch.bfloat16).eval()
    model[0].weight.requires_grad_(False)
    model[0].train()
    bias, calls = model[0].bias, []
    model[0].weight.decays, model[0].gain = False, 5
    model[0]._register_state_dict_hook(lambda *args: calls.append("state"))
    model[0]._register_load_state_dict_pre_hook(lambda *args: calls.append(args[0]), with_module=True)
    handle = model[0].register_forward_hook(lambda module, args, out: calls.append("out"))
    model[0].register_forward_pre_hook(lambda module, args, kwargs: calls.append("in"), with_kwargs=True)
    model[2].register_full_backward_hook(lambda *args: calls.append("back"))
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    for change in (lambda: sk.sparsify_(model, HALF), lambda: sk.densify_(model)):
        change()
        model(x).sum().backward()
        assert calls == ["in", "out", "back"]
        calls.clear()
        model.load_state_dict(model.state_dict())
        assert calls == ["state", model[0]]
        calls.clear()
        assert model[0].gain == 5
        assert next(p for n, p in model[0].named_parameters() if n != "bias").decays is False
        assert model[0].bias is bias
        assert bias.requires_grad
        assert [p.requires_grad for n, p in model[0].named_parameters() if n != "bias"] == [False]
        assert [each.training for each in model] == [True, False, False, False]
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    handle.remove()
    model(x)
    assert calls == ["in"]


class Stubborn(nn.Module):
    """It takes no other child."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, BlockSparseLinear):
            raise RuntimeError("no other child")
        super().__setattr__(name, value)


def broken() -> nn.Sequential:
    model: Any = mlp()
    with torch.no_grad():
        model[3].weight[5, 7] = float("nan")
    return model


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (broken, WHOLE, "3: its weight has 1 elements that are NaN or Inf"),
        (mlp, {"*": HALF, "4": HALF}, "the rule for '4' matches no layer; layers are 0, 2, 3"),
        (mlp, {"0": HALF, nn.Embedding: None}, "Embedding.* matches no layer"),
        (mlp, {"0": HALF, "1": None}, "the rule for '1' matches no layer"),
        (mlp, {}, "config is {}"),
        (mlp, "automatic", "config is 'automatic'"),
        (mlp, "auto", "give max_error"),
        (mlp, {"*": 0.5}, "the rule for '\\*' is 0.5"),
        (mlp, {3: HALF}, "a rule is for 3"),
        (lambda: nn.Linear(64, 64), HALF, "itself a Linear"),
        (lambda: {"model": 1}, HALF, "takes a torch.nn.Module"),
    ],
)
def test_an_error_changes_nothing(model: Callable[[], Any], config: Any, message: str) -> None:
    made = model()
    before = list(made.named_modules()) if isinstance(made, nn.Module) else []
    with pytest.raises(InvalidInput, match=message):
        Untyped(made, config)
    if before:
        assert list(made.named_modules()) == before


def test_a_module_that_takes_no_other_child_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Stubborn())
    before = list(model.named_modules())
    with pytest.raises(RuntimeError, match="no other child"):
        sk.sparsify_(model, HALF)
    assert list(model.named_modules()) == before


@pytest.mark.parametrize("change", ["freeze", "freeze bias", "nothing"])
def test_frozen_weights_in_fp8_come_back_frozen(change: str) -> None:
    model: Any = mlp()
    sk.sparsify_(model, sk.Float8(HALF))
    parts = model if change == "freeze" else model[0].bias
    parts.requires_grad_(change == "nothing")
    sk.densify_(model)
    assert [x.weight.requires_grad for x in (model[0], model[2])] == {
        "freeze": [False, False],
        "freeze bias": [False, True],
        "nothing": [True, True],
    }[change]


ASKED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a predicate": lambda model, f: sk.sparsify_(model, {f: HALF}),
    "filter_fn": lambda model, f: sk.sparsify_(model, HALF, f),
    "filter_fn of densify_": sk.densify_,
    "filter_fn of prune": lambda model, f: sk.prune(
        model, {"*": HALF}, calibration=[torch.randn(4, 64)], filter_fn=f
    ),
}


@pytest.mark.parametrize("verb", ASKED)
def test_functions_of_layers_take_a_name_and_return_a_bool(verb: str) -> None:
    model = mlp()
    if "densify_" in verb:
        sk.sparsify_(model, HALF)
    before = list(model.named_modules())
    for wrong in (lambda name: True, lambda *, module, name: True, lambda: True):
        with pytest.raises(InvalidInput, match=r"function of two arguments, \(module, name\)"):
            ASKED[verb](model, wrong)
    for odd in (torch.ones(2, dtype=torch.bool), torch.ones(2).numpy(), torch.ones(1, device="meta")):
        with pytest.raises(
            InvalidInput, match=f"{verb.split(' of')[0]} returned a .* for '0'; .* True or False"
        ):
            ASKED[verb](model, lambda module, name, odd=odd: odd)
    with pytest.raises(KeyError, match="own"):
        ASKED[verb](model, lambda module, name: {}["own"])
    assert list(model.named_modules()) == before


def test_a_model_inside_a_wrapper_is_densified_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = mlp()
    sk.sparsify_(model, HALF)
    monkeypatch.setattr(model[2]._history, "ranks", lambda: "a group")
    with pytest.raises(InvalidInput, match=r"2 is in a DistributedDataParallel.* copy\.deepcopy\(model\)"):
        sk.densify_(model)
    assert len(sk.densify_(copy.deepcopy(model))) == 3


def test_odd_arguments_are_refused() -> None:
    for wrong in ({"filter_fn": 3}, {"tokens": 0}, {"card": "h9"}, {"skip_slower": 1}):
        with pytest.raises(InvalidInput):
            Untyped(mlp(), HALF, **wrong)
    with pytest.raises(InvalidInput, match="filter_fn is 3"):
        sk.densify_(mlp(), 3)  # type: ignore[arg-type]
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = mlp()
    with pytest.raises(InvalidInput, match="wrap it afterwards"):
        sk.sparsify_(wrapped, HALF)


def test_a_model_on_the_meta_device_gets_its_pattern_with_a_state_dict() -> None:
    torch.manual_seed(0)
    dense, (other, x) = mlp(), (mlp(), torch.randn(3, 64))
    with torch.device("meta"):
        empty = mlp()
    report = sk.sparsify_(empty, HALF)
    assert len(report.replaced) == 3
    assert all(row.kept == 0.5 and row.kept_norm is None for row in report.replaced)
    assert all(each.is_meta for each in empty.parameters())
    sk.sparsify_(dense, HALF)
    empty.load_state_dict(dense.state_dict(), assign=True)
    assert torch.equal(empty(x), dense(x))
    empty.to("meta")
    sk.densify_(empty)
    assert all(isinstance(each, (nn.Linear, nn.ReLU)) for each in empty)
    assert [p.shape for p in empty.parameters()] == [p.shape for p in other.parameters()]


def test_layers_slower_than_dense_ones_are_skipped_on_demand() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(128, 256))
    few = sk.BlockSparse(block=(64, 64), keep=0.05)
    rules = {"0": few, "1": WHOLE}
    count: Any = np.array(4096)  # an int to Python, which has no hash
    seen = sk.sparsify_(copy.deepcopy(model), rules, card="h200", tokens=count)
    assert type(seen.tokens) is int
    fast, slow = seen.rows
    assert fast.speed is not None
    assert slow.speed is not None
    assert fast.speed > 1 > slow.speed
    assert "predicted for NVIDIA H200" in str(seen)
    report = sk.sparsify_(model, rules, skip_slower=True)
    assert [row.name for row in report.replaced] == ["0"]
    assert "x the speed of a dense one in fp32, with 4096 tokens on NVIDIA H200" in report.skipped[0].why_not


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_predicted_for_it_and_stays_there() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(128, 256)).to("cuda", torch.bfloat16)
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    y = model[0](x)
    sk.sparsify_(model, {"0": WHOLE})
    torch.testing.assert_close(model[0](x), y, atol=2e-2, rtol=2e-2)
    sk.densify_(model)
    assert torch.equal(model[0](x), y)
    report = sk.sparsify_(
        model, {"0": sk.BlockSparse(64, 0.05), "1": sk.BlockSparse(16, 1.0)}, skip_slower=True
    )
    assert [row.name for row in report.replaced] == ["0"]
    assert torch.cuda.get_device_name().split()[-1] in report.skipped[0].why_not
    assert all(each.is_cuda for each in (*model.parameters(), *model.buffers()))


def test_the_report_is_a_table_and_json() -> None:
    model = llama()
    report = sk.sparsify_(model, HALF)
    found = json.loads(json.dumps(report.to_dict()))
    assert [row["name"] for row in found["rows"]] == [row.name for row in report.rows]
    assert found["rows"][1]["format"] == "BSR 32 50 %"
    assert found["rows"][1]["kept"] == 0.5
    lines = str(report).splitlines()
    assert lines[0] == "14 of 16 layers are sparse"
    assert "model.layers.*.mlp.gate_proj (2)" in str(report)
    assert len(lines) == 11  # a line for the layers of one kind


def test_layers_with_an_activation_are_not_made_dense() -> None:
    layer = BlockSparseLinear.random(64, 64, 32, 0.5, activation="gelu")
    model = nn.Sequential(nn.Linear(64, 64), layer)
    sk.sparsify_(model, HALF)
    before = list(model)
    with pytest.raises(InvalidInput, match="1 applies 'gelu'"):
        sk.densify_(model)
    assert list(model) == before
    assert sk.densify_(model, lambda module, name: name == "0") == ["0"]


def test_a_layer_in_two_places_becomes_one_dense_layer() -> None:
    layer = BlockSparseLinear.random(64, 64, 32, 0.5)
    model: Any = nn.Sequential(layer, layer)
    assert sk.densify_(model) == ["0", "1"]
    assert model[0] is model[1]
    assert torch.equal(model[0].weight, layer.weight.to_dense())


@pytest.mark.parametrize("config", OTHERS, ids=repr)
def test_each_format_has_a_layer_that_loads_and_becomes_dense(config: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 128))
    x = torch.randn(4, 128)
    model[0].weight.requires_grad_(False)
    (row,) = sk.sparsify_(model, config, card="h200").replaced
    assert row.kept_norm is not None
    assert 0.6 < row.kept_norm <= 1
    assert row.kept == KEPT[row.format]
    y = model(x)
    other = nn.Sequential(nn.Linear(128, 128))
    sk.sparsify_(other, config)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    sk.densify_(model)
    assert not model[0].weight.requires_grad
    torch.testing.assert_close(model(x), y, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("config", [HALF, WHOLE, *OTHERS], ids=repr)
def test_configs_are_json(config: Any) -> None:
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert eval(repr(config), dict(vars(sk))) == config  # the repr is code


def test_float8_is_of_a_config_in_another_dtype() -> None:
    for wrong in (sk.Float8(), "semi24", 3):
        with pytest.raises(InvalidInput, match="of is"):
            sk.Float8(wrong)  # type: ignore[arg-type]
