"""Gated MLPs and packed experts of whole models: what sk.sparsify_ fuses, and when it does not."""

import copy
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.files.tensor_file import opened
from sparsek.models.auto import NO_EXPERTS
from sparsek.nn import gated as fused
from sparsek.nn.experts import padded, split_rows
from sparsek.nn.gated import gated_forward
from sparsek.nn.regrow import _GRADIENTS
from sparsek.nn.replace import layer_of
from tests.house.tools import need
from tests.sums import alike

HALF = sk.BlockSparse(block=16, keep=0.5)
WORDS = torch.arange(3, 19).view(2, 8)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def lib() -> Any:
    need("transformers")
    return importlib.import_module("transformers")


def llama(**options: Any) -> Any:
    return lib().LlamaForCausalLM(lib().LlamaConfig(**SMALL | options)).eval()


def mixtral(**options: Any) -> Any:
    return lib().MixtralForCausalLM(lib().MixtralConfig(**SMALL | options, num_local_experts=3)).eval()


def qwen2_moe() -> Any:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    options |= {"shared_expert_intermediate_size": 64}
    return lib().Qwen2MoeForCausalLM(lib().Qwen2MoeConfig(**SMALL, **options)).eval()


def qwen3_moe() -> Any:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return lib().Qwen3MoeForCausalLM(lib().Qwen3MoeConfig(**SMALL, **options)).eval()


def gpt_oss(**options: Any) -> Any:
    options = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16} | options
    return lib().GptOssForCausalLM(lib().GptOssConfig(**SMALL | options)).eval()


class Gated(nn.Module):
    """A gated MLP of one's own."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (
            nn.Linear(*sides, bias=False) for sides in ((32, 64), (32, 64), (64, 32))
        )
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * self.act(self.w1(x)))


class Functional(Gated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.w1(x)) * self.w3(x)
        return self.w2(hidden)


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the fused products so far."""
    calls: list[str] = []
    plain = fused.gated

    def noted(x: Any, gate: Any, up: Any, act: Any) -> Tensor:
        calls.append(act)
        return plain(x, gate, up, act)

    monkeypatch.setattr(fused, "gated", noted)
    return calls


def mlp(kind: type[Gated] = Gated, act: nn.Module | None = None, config: Any = HALF) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind(act or nn.SiLU()))
    sk.sparsify_(model, config)
    return model


def test_a_gated_mlp_of_transformers_is_one_fused_product_in_inference(
    fusions: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = llama()
    kinds, names = {n: type(m) for n, m in model.named_modules()}, list(model.state_dict())
    sk.sparsify_(model, HALF)
    part = model.model.layers[0].mlp
    assert isinstance(part, kinds["model.layers.0.mlp"])
    assert repr(part).startswith("LlamaMLP(")
    assert "model.layers.0.mlp.gate_proj.values" in model.state_dict()
    learnt = model(WORDS)
    assert not fusions
    with torch.no_grad():
        found = model(WORDS).logits
        assert fusions == ["silu"]
        torch.testing.assert_close(found, learnt.logits)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        model.save_pretrained(tmp_path)
        copies = copy.deepcopy(model), torch.load(stored, weights_only=False)
        for other in (*copies, type(model).from_pretrained(tmp_path)):
            assert alike(other(WORDS).logits, found)
        assert len(fusions) == 4
    sk.densify_(model)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(WORDS).logits, found)


@pytest.mark.parametrize(
    ("kind", "act", "name"),
    [
        (Gated, nn.SiLU(), "silu"),
        (Gated, nn.ReLU(), "relu"),
        (Gated, nn.GELU(), "gelu"),
        (Gated, nn.GELU("tanh"), "gelu_tanh"),
        (Functional, nn.Identity(), "silu"),
        (Gated, nn.Tanh(), None),
    ],
)
def test_forwards_are_found_whatever_their_names(
    kind: type[Gated], act: nn.Module, name: str | None, fusions: list[str]
) -> None:
    model, x = mlp(kind, act), torch.randn(5, 32)
    dense = copy.deepcopy(model)
    sk.densify_(dense)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x))
    assert fusions == ([] if name is None else [name])


@pytest.mark.parametrize(
    "config",
    [sk.SemiSparse(), sk.BlockSemiSparse(64, 1.0), sk.Float8(HALF), {"*w1": HALF, "*w3": sk.SemiSparse()}],
    ids=repr,
)
def test_storages_are_fused_where_both_have_one(config: Any, fusions: list[str]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Gated(nn.SiLU()))
    model[0].w1, model[0].w3 = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
    model[0].w2 = nn.Linear(128, 32, bias=False)
    sk.sparsify_(model, config)
    x = torch.randn(5, 128)
    with torch.no_grad():
        found = model(x)
        assert len(fusions) == (not isinstance(config, dict))
        handle = model[0].act.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(model(x), found)
        assert len(fusions) == (not isinstance(config, dict))
        handle.remove()


def _hook(name: str) -> Callable[[Any], Any]:
    return lambda part: getattr(part, name).register_forward_hook(lambda *_: None)


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda part: setattr(part, name, value)


def _adapted(part: Any) -> None:
    """LoRA as peft puts it in."""
    part.w1 = nn.Sequential(part.w1)


def _own_forward(part: Any) -> None:
    """As the hooks of accelerate."""
    part.w3.forward = part.w3.forward


@pytest.mark.parametrize(
    "change",
    [
        _hook("w1"),
        _hook("w3"),
        _hook("act"),
        _set("act", nn.Tanh()),
        _set("w3", nn.Linear(32, 64)),
        _adapted,
        _own_forward,
        lambda part: setattr(part.w1, "activation", "relu"),
        lambda part: setattr(part.w3, "bias", nn.Parameter(torch.ones(64))),
    ],
)
def test_what_looks_at_a_part_or_changes_it_switches_the_fused_product_off(
    change: Callable[[Any], Any], fusions: list[str]
) -> None:
    model, x = mlp(), torch.randn(5, 32)
    change(model[0])
    with torch.no_grad():
        right = Gated.forward(model[0], x)
        assert torch.equal(model(x), right)
    assert not fusions


def test_hooks_of_all_modules_switch_it_off(fusions: list[str]) -> None:
    model, seen = mlp(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    with handle, torch.no_grad():
        model(torch.randn(5, 32))
    assert not fusions
    assert nn.SiLU in seen


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x) * 2)


class Shifted(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x + 1))


class Branched(Gated):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = -x
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Squared(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w1(x))


class Noted(Gated):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(SEEN))
        return super().forward(x)


class Kept(Gated):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Counted(Gated):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(SEEN))
        return self.w2(self.act(self.w1(x)) * self.w3(x))


SEEN: list[int] = []


@pytest.mark.parametrize("kind", [Scaled, Shifted, Branched, Squared, Noted, Kept, Counted])
def test_forwards_that_compute_something_else_are_left_alone(kind: type[Gated], fusions: list[str]) -> None:
    assert gated_forward(kind.forward) is None
    model, x = mlp(kind), torch.randn(5, 32)
    assert type(model[0]) is kind
    dense = copy.deepcopy(model)
    sk.densify_(dense)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x))
    assert not fusions


class Sealed(Gated):
    """It takes no subclass."""

    def __init_subclass__(cls) -> None:
        raise RuntimeError("no subclass")


def test_a_gated_mlp_whose_class_stays_computes_both_products(fusions: list[str]) -> None:
    model = mlp(Sealed)
    assert type(model[0]) is Sealed
    with torch.no_grad():
        model(torch.randn(4, 32))
    assert not fusions
    assert len(sk.densify_(model)) == 3


def test_a_fused_product_is_in_the_graph_of_a_compiled_mlp(fusions: list[str]) -> None:
    model, x = mlp(), torch.randn(5, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), model(x))
    assert len(fusions) == 2


EXPERTS: dict[str, Callable[..., Any]] = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("name", EXPERTS)
def test_packed_experts_become_sparse_learn_and_become_dense_again(name: str) -> None:
    torch.manual_seed(0)
    model = EXPERTS[name]()
    kinds = {n: type(m) for n, m in model.named_modules()}
    sizes = {n: p.shape for n, p in model.named_parameters()}
    report = sk.sparsify_(model, {"*experts.*": HALF})
    rows = {row.name: row.format for row in report.rows if ".experts." in row.name}
    assert rows == dict.fromkeys((GATE_UP, GATE_UP.replace("gate_up", "down")), "BSR 16 50 %")
    with torch.no_grad():
        fused_logits = model(WORDS).logits
    dense = copy.deepcopy(model)
    assert set(rows) <= set(sk.densify_(dense))
    assert {n: type(m) for n, m in dense.named_modules()} == kinds
    assert {n: p.shape for n, p in dense.named_parameters()} == sizes
    with sk.nn.dense_gradients(model):
        found = [each(WORDS, labels=WORDS) for each in (model, dense)]
    torch.testing.assert_close(found[0].logits, found[1].logits)
    torch.testing.assert_close(fused_logits, found[1].logits)
    for each in found:
        each.loss.backward()
    layer, packed = model.get_submodule(GATE_UP), dense.get_parameter(GATE_UP)
    of_blocks = sk.BSR(layer.pattern, layer.values.grad).to_dense()
    mask = sk.BSR(layer.pattern, torch.ones_like(layer.values)).to_dense()
    wanted = packed.grad.mT if name == "gpt_oss" else packed.grad
    torch.testing.assert_close(of_blocks, wanted.reshape(mask.shape) * mask, atol=1e-6, rtol=1e-3)
    whole = _GRADIENTS[layer]  # of all blocks, stored or not
    torch.testing.assert_close(whole, wanted.reshape(mask.shape), atol=1e-6, rtol=1e-3)

    other = EXPERTS[name]()
    sk.sparsify_(other, {"*experts.*": sk.BlockSparse(16, 1.0)})
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert alike(other(WORDS).logits, fused_logits)


@pytest.mark.parametrize(
    "config",
    [sk.SemiSparse(), sk.BlockSemiSparse(64, 0.5), sk.Float8(HALF), sk.Float8(sk.SemiSparse())],
    ids=repr,
)
def test_rows_of_a_matrix_are_matrices(config: Any) -> None:
    w = sk.nn.SparseLinear.from_dense(torch.randn(256, 128), config).weight
    dense = (w.dequantize() if isinstance(config, sk.Float8) else w).to_dense()
    for part, rows in zip(split_rows(w, 2), dense.split(128), strict=True):
        x = torch.randn(4, 128)
        exact = x @ rows.T
        error = (sk.linear(x, part) - exact).norm() / exact.norm()
        assert error < (0.1 if isinstance(config, sk.Float8) else 1e-5)
    assert split_rows(w, 2)[1].plan_owner() is split_rows(w, 2)[1].plan_owner()  # plans are kept


def test_one_weight_of_experts_may_stay_dense_and_rules_choose_by_type() -> None:
    torch.manual_seed(0)
    model: Any = mixtral()
    kind = type(model.model.layers[0].mlp.experts)
    right = model(WORDS).logits
    rules = {"*gate_up_proj": None, kind: sk.BlockSparse(16, 1.0)}
    report = sk.sparsify_(model, rules, card="h200")
    assert [row.name for row in report.replaced] == [GATE_UP.replace("gate_up", "down")]
    assert report.replaced[0].shape == (3, 32, 64)
    assert report.replaced[0].speed is not None
    assert report.html().count("<figure>") == 1
    torch.testing.assert_close(model(WORDS).logits, right)


def test_experts_whose_class_stays_leave_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixtral()
    experts, linear = model.model.layers[0].mlp.experts, model.model.layers[0].self_attn.q_proj
    with monkeypatch.context() as patched:
        patched.setattr("sparsek.nn.replace.fitted_class", lambda kind, base: type("X", (int, base), {}))
        with pytest.raises(InvalidInput, match="MixtralExperts cannot be sparse"):
            sk.sparsify_(model, HALF)
    assert model.model.layers[0].self_attn.q_proj is linear
    assert [*experts._parameters] == ["gate_up_proj", "down_proj"]
    experts.factor = nn.Parameter(torch.ones(()))
    nn.utils.parametrize.register_parametrization(experts, "factor", nn.Identity())
    skipped = sk.sparsify_(model, {"*experts*": HALF, "*": None}).skipped
    assert sum("parametrization; remove it first" in row.why_not for row in skipped) == 2


def test_experts_whose_rows_are_no_whole_blocks_are_skipped() -> None:
    model = mixtral()
    report = sk.sparsify_(model, {"*experts.*": sk.BlockSparse((48, 16), 0.5)})
    whys = [row.why_not for row in report.rows if ".experts." in row.name]
    assert whys == [
        "has experts of 128 rows, no multiple of 48",
        "has 1x4 blocks of 48x16; at least 2x2 are needed",
    ]


def test_experts_take_no_tokens_and_ids_of_none() -> None:
    torch.manual_seed(0)
    model: Any = mixtral()
    sk.sparsify_(model, {"*experts.*": HALF})
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    ids = torch.tensor([[0, 3], [3, 3], [2, 1], [1, 1], [0, 2], [3, 0]])
    dense = copy.deepcopy(experts)
    sk.densify_(dense)
    eager = type(dense).forward.__wrapped__
    torch.testing.assert_close(experts(x, ids, weights), eager(dense, x, ids, weights))
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 32)
    assert not any(experts(x, torch.full((6, 2), none), weights).any() for none in (3, -1, -(2**31), 2**40))


def test_packed_experts_are_saved_so_that_nothing_fits_a_dense_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = mixtral()
    sk.sparsify_(model, {"*experts.*": HALF})
    right = model(WORDS).logits
    for options in ({}, {"state_dict": model.state_dict()}):
        model.save_pretrained(tmp_path, **options)
        with opened(tmp_path / "model.safetensors") as file:
            assert file.read(GATE_UP).shape == (0,)  # missing, transformers would draw it at random
        back = type(model).from_pretrained(tmp_path).eval()
        assert alike(back(WORDS).logits, right)
        sk.densify_(back)
        assert back.get_parameter(GATE_UP).shape == (3, 128, 32)
    sk.save_model(model, tmp_path / "plain")
    assert alike(sk.load_model(mixtral, tmp_path / "plain").eval()(WORDS).logits, right)


def test_numbers_of_tokens_are_few() -> None:
    sizes = {padded(n) for n in range(4097)}
    assert len(sizes) < 45
    assert all(n <= padded(n) <= max(n + 15, 1.25 * n) for n in range(1, 4097))


LINES: Any = {
    "input_ids": torch.randint(3, 32, (4, 32), generator=torch.Generator().manual_seed(0)),
    "attention_mask": (torch.arange(32) < torch.tensor([[32], [20], [32], [9]])).long(),
}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_each_expert_is_pruned_as_a_layer_on_the_tokens_that_reach_it(name: str) -> None:
    torch.manual_seed(0)
    model, given = EXPERTS[name](), []
    experts = model.model.layers[0].mlp.experts
    if name == "gpt_oss":
        model.model.layers[0].mlp.router.bias.data[1] = -1e4  # no token goes there
        experts.gate_up_proj_bias.data.normal_()
    with experts.register_forward_pre_hook(lambda _, args: given.extend(args)), torch.no_grad():
        model(**LINES)
    weight, rows = experts.gate_up_proj.detach().clone(), []
    biases = experts.gate_up_proj_bias.detach().clone() if name == "gpt_oss" else [None] * 3
    report = sk.prune(model, {"*experts.*": HALF}, calibration=[LINES], method="obs", reconstruct="layer")
    found = experts.gate_up_proj.to_dense().split(128)
    for at, (w, bias) in enumerate(zip(weight.mT if name == "gpt_oss" else weight, biases, strict=True)):
        layer: Any = nn.Linear(32, 128, bias=bias is not None)
        layer.weight.data, alone = w, nn.Sequential(layer)
        if bias is not None:
            layer.bias.data = bias
        options: Any = {"method": "magnitude", "reconstruct": None}
        here = (given[1] == at).any(-1) & LINES["attention_mask"].flatten().bool()
        if bool(here.any()):
            options = {"calibration": [given[0][here]], "method": "obs", "reconstruct": "layer"}
        rows += sk.prune(alone, HALF, **options).replaced
        torch.testing.assert_close(found[at], layer_of(alone, "0").to_dense(), rtol=1e-3, atol=1e-5)
        if bias is not None:
            torch.testing.assert_close(
                experts.gate_up_proj_bias[at], layer_of(alone, "0").bias, rtol=1e-3, atol=1e-5
            )
    into, out = report.replaced
    assert (into.shape, into.kept) == ((3, 128, 32), 0.5)
    reached = [row.error_after for row in rows if row.error_after is not None]
    assert min(reached) <= (into.error_after or 0) <= max(reached)
    lost = (
        "no token of the calibration reaches 1 of 3 experts, pruned by magnitude" if name == "gpt_oss" else ""
    )
    assert into.why == out.why == lost
    assert 0 < (out.error_after or 0) < (out.error or 0) < 1
    with torch.no_grad():
        assert model(**LINES).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [("gpt_oss", HALF, {}), ("mixtral", sk.Float8(HALF), {"reconstruct": "block", "budget": "sensitivity"})],
)
def test_experts_pruned_after_a_kill_have_the_same_bytes(
    name: str, config: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        return EXPERTS[name](num_hidden_layers=2)

    def pruned(model: Any, **more: Any) -> Any:
        rules = {"*experts.*": config}
        return sk.prune(model, rules, calibration=[LINES], method="wanda", card="h200", **options, **more)

    report, plain = pruned(whole := made()), Path.replace

    def dying(self: Path, target: Path) -> Path:
        if target.name.startswith("finished-00001"):
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            pruned(made(), folder=tmp_path)
    again = pruned(other := made(), folder=tmp_path)
    state = other.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in whole.state_dict().items())
    assert [row.error_after for row in again.rows] == [row.error_after for row in report.rows]
    assert len(report.replaced) == 4
    assert all(row.speed is not None for row in report.replaced)


def test_packed_experts_take_no_adapter() -> None:
    """As peft puts one there, in the place of a layer."""
    torch.manual_seed(0)
    model: Any = mixtral()
    sk.sparsify_(model, {"*experts.*": HALF})
    experts, right = model.model.layers[0].mlp.experts, model(WORDS).logits
    with pytest.raises(InvalidInput, match="would be a Sequential, and packed experts take no adapter"):
        experts.down_proj = nn.Sequential(experts.down_proj)
    assert torch.equal(model(WORDS).logits, right)


def test_auto_picks_nothing_for_packed_experts() -> None:
    report = sk.prune(mixtral(), "auto", calibration=[LINES], method="wanda", max_error=0.5, card="h200")
    assert [row.why_not for row in report.skipped if ".experts." in row.name] == [NO_EXPERTS] * 2


@pytest.mark.gpu
def test_a_gated_mlp_on_a_gpu_is_fused_also_in_a_graph(fusions: list[str]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Gated(nn.SiLU()))
    model[0].w1, model[0].w3 = (nn.Linear(512, 1024, bias=False) for _ in range(2))
    model[0].w2 = nn.Linear(1024, 512, bias=False)
    model.to("cuda", torch.bfloat16)
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    for config in (sk.BlockSparse(128, 0.25), sk.SemiSparse(), sk.Float8(sk.BlockSparse(128, 0.25))):
        made = copy.deepcopy(model)
        sk.sparsify_(made, config)
        with torch.no_grad():
            for part in (x, x[:1], x[:16]):
                right = Gated.forward(made[0], part)
                for _ in range(3):
                    torch.testing.assert_close(made(part), right, atol=3e-2, rtol=3e-2)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = made(x)
            graph.replay()
            torch.testing.assert_close(y, made(x), atol=0, rtol=0)
    assert len(fusions) == 3 * 11


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [sk.BlockSparse(64, 0.5), sk.SemiSparse(), sk.Float8(sk.BlockSparse(64, 0.5))], ids=repr
)
def test_packed_experts_on_a_gpu_compute_as_dense_ones(config: Any) -> None:
    torch.manual_seed(0)
    big = SMALL | {"hidden_size": 256, "intermediate_size": 512}
    options = lib().MixtralConfig(**big, num_local_experts=4)
    model = lib().MixtralForCausalLM(options).eval().to("cuda", torch.bfloat16)
    sk.sparsify_(model, {"*experts.*": config})
    experts = model.model.layers[0].mlp.experts
    dense = copy.deepcopy(experts)
    sk.densify_(dense)
    for count in (1, 37, 300, 37):
        x = torch.randn(count, 256, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(count, 4, device="cuda").argsort(1)[:, :2]
        weights = torch.rand(count, 2, device="cuda")
        right = type(dense).forward.__wrapped__(dense, x, ids, weights)
        with torch.no_grad():
            fused_y = experts(x, ids, weights)
        found = experts(x.requires_grad_(), ids, weights)
        found.float().square().sum().backward()
        for y in (fused_y, found):
            error = (y - right).norm() / right.norm()
            assert error < (0.1 if isinstance(config, sk.Float8) else 2e-2)
        assert x.grad is not None
        assert x.grad.isfinite().all()
