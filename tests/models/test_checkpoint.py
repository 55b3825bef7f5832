"""sk.save_model and sk.load_model: models come back bit by bit, and files that do not fit are refused."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sparsek as sk
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files.tensor_file import opened
from sparsek.nn.experts import split_rows
from sparsek.products.formats.quantized import Quantized
from tests.house.tools import need
from tests.refusals import refused

HALF = sk.BlockSparse(block=32, keep=0.5)
CONFIGS = (
    HALF,
    sk.BlockSparse(block=(32, 64), keep=0.3),
    sk.SemiSparse(),
    sk.BlockSemiSparse(block=64, keep=0.5),
    sk.Float8(),
    sk.Float8(HALF),
    sk.Float8(sk.SemiSparse()),
    sk.Float8(sk.BlockSemiSparse(block=64, keep=0.5)),
)


class Net(nn.Module):
    """Layers, buffers that are saved and one that is not, tied words, and no parameter at all in between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 128)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.norm = nn.BatchNorm1d(128)
        self.head = nn.Linear(128, 40, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)


def sparse(config: Any = HALF, make: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    sk.sparsify_(model, config)
    assert isinstance(model.up, sk.nn.SparseLinear)
    return model


def same(a: nn.Module, b: nn.Module) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("make", [Net, Scaled])
def test_a_model_comes_back_into_a_factory_and_a_model(
    config: Any, make: Callable[[], Any], tmp_path: Path
) -> None:
    model = sparse(config, make).bfloat16()
    sk.save_model(model, tmp_path / "new" / "folder")
    for target in (make, make()):
        back = sk.load_model(target, tmp_path / "new" / "folder").eval()
        same(model, back)
        assert back.head.weight is back.words.weight
        words = torch.arange(8)
        if make is Net:
            torch.testing.assert_close(back(words), model(words))
        sk.densify_(back)
        assert type(back.up) is nn.Linear


def test_layers_made_by_hand_shared_and_with_activations_come_back(tmp_path: Path) -> None:
    def make() -> Any:
        model = nn.ModuleDict(
            {"a": nn.Linear(64, 64), "b": nn.Linear(64, 128, bias=False), "c": nn.Linear(64, 64)}
        )
        model["d"] = model["a"]
        return model

    model = make()
    matrix = sk.random_bsr(128, 64, 32, 0.5)
    model["a"] = model["d"] = sk.nn.SparseLinear.from_dense(model["a"], "semi24", activation="gelu")
    model["b"] = sk.nn.SparseLinear.from_matrix(sk.quantize(matrix, scale="block"))
    model["c"] = sk.nn.SparseLinear.from_dense(model["c"], "semi24").keep_pruned(model["c"], decay=0.5)
    sk.save_model(model, tmp_path)
    back = sk.load_model(make, tmp_path)
    same(model, back)
    assert back["a"] is back["d"]
    assert back["a"].activation == "gelu"
    assert back["c"]._decay == 0.5
    back["c"](torch.randn(4, 64)).sum().backward()
    assert back["c"].pruned.grad is not None


def test_a_pattern_without_blocks_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(sk.nn.SparseLinear.from_matrix(sk.random_bsr(64, 64, 32, 0.0)), nn.Linear(64, 8))
    sk.save_model(model, tmp_path)
    same(model, sk.load_model(lambda: nn.Sequential(nn.Linear(64, 64, False), nn.Linear(64, 8)), tmp_path))


def test_a_sparse_model_takes_another_pattern(tmp_path: Path) -> None:
    sk.save_model(sparse(), tmp_path)
    other = sparse(sk.BlockSparse(block=64, keep=0.25))
    same(sk.load_model(other, tmp_path), sparse())


@pytest.mark.parametrize("by", ["load_state_dict", "data"])
@pytest.mark.parametrize(
    "config",
    [sk.SemiSparse(), sk.BlockSemiSparse(64, 0.5, scope="global"), sk.Float8(sk.SemiSparse())],
    ids=repr,
)
def test_the_rows_of_experts_follow_what_is_loaded(config: Any, by: str) -> None:
    """Experts then have other numbers of blocks, and metadata in the same tensor may be in other memory."""
    torch.manual_seed(0)
    layer, other = (sk.nn.SparseLinear.from_dense(torch.randn(512, 128), config) for _ in range(2))
    split_rows(layer.weight, 4)
    if by == "data":
        for mine, its in zip(
            layer.state_dict(keep_vars=True).values(), other.state_dict().values(), strict=True
        ):
            mine.data = its.clone()
    else:
        layer.load_state_dict(other.state_dict())
    found = [
        (part.dequantize() if part.__class__ is Quantized else part).to_dense()
        for part in split_rows(layer.weight, 4)
    ]
    assert torch.equal(torch.cat(found), other.to_dense())


def test_what_packed_experts_do_not_compute_is_refused() -> None:
    """Their layers are multiplied without a call."""
    need("transformers")
    from tests.integrations.models import transformers

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    sk.sparsify_(model, {"*experts.*": sk.SemiSparse()})
    layer, words = model.get_submodule("model.layers.0.mlp.experts.down_proj"), torch.arange(8)[None]
    layer.keep_pruned()
    refused("down_proj has pruned elements .* set pruned of down_proj to None", model, words)
    with torch.no_grad():
        right = model(words).logits
    layer.pruned, layer.activation = None, "relu"
    refused("down_proj applies 'relu', .* set that of down_proj to None", model, words)
    layer.activation = None
    torch.testing.assert_close(model(words).logits, right)


def test_a_dense_model_does_not_take_the_file(tmp_path: Path) -> None:
    sk.save_model(sparse(), tmp_path)
    with opened(tmp_path / "model.safetensors") as file:
        state = {name: file.read(name) for name in file.tensors}
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        Net().load_state_dict(state, strict=False)


def change(folder: Path, how: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Rewrite the header of a file: `how` gets it and the description in it."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["sparsek"])
    how(header, about)
    header["__metadata__"]["sparsek"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "version": lambda _, a: a.update(version=True),
    "layers": lambda _, a: a.update(layers=[]),
    "entry": lambda _, a: a["layers"].update(up=None),
    "blocks": lambda _, a: a["layers"]["up"].update(blocks=2**62),
    "fewer": lambda _, a: a["layers"]["up"].update(blocks=3),
    "shape": lambda _, a: a["layers"]["up"].update(shape=[256]),
    "sides": lambda _, a: a["layers"]["up"].update(shape=[True, 128]),
    "dtype": lambda _, a: a["layers"]["up"].update(value_dtype=["bf16"]),
    "block": lambda _, a: a["layers"]["up"].update(block="32"),
    "activation": lambda _, a: a["layers"]["up"].update(activation="os.system"),
    "pruned": lambda _, a: a["layers"]["up"].update(pruned=0.1),
    "NaN": lambda _, a: a["layers"]["up"].update(
        format="semi24", block=None, blocks=None, pruned=float("nan")
    ),
    "left out": lambda _, a: a["layers"].pop("up"),
    "one more": lambda _, a: a["layers"].update({"": a["layers"]["up"]}),
    "ties": lambda _, a: a.update(ties=["head.weight"]),
    "tie": lambda _, a: a.update(ties={"head.weight": "nobody"}),
    "renamed": lambda h, _: h.update({"up.other": h.pop("up.indices")}),
    "reshaped": lambda h, _: h["up.bias"].update(shape=[128, 2]),
}


@pytest.mark.parametrize("how", FAULTS.values(), ids=list(FAULTS))
def test_files_that_do_not_fit_are_refused_and_the_model_stays(
    how: Callable[[dict[str, Any], dict[str, Any]], object], tmp_path: Path
) -> None:
    sk.save_model(sparse(), tmp_path)
    change(tmp_path, how)
    model = Net()
    before = model.up
    with pytest.raises(InvalidFile, match=r"model\.safetensors"):
        sk.load_model(model, tmp_path)
    assert model.up is before


def test_patterns_are_checked(tmp_path: Path) -> None:
    sk.save_model(sparse(), tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = json.loads(data[8 : 8 + length])["up.indices"]["data_offsets"][0] + 8 + length
    data[start : start + 4] = struct.pack("<i", 99)
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match="99"):
        sk.load_model(Net, tmp_path)


def test_arguments_are_checked(tmp_path: Path) -> None:
    untyped: Any = sk.load_model
    with pytest.raises(FileNotFoundError):
        sk.load_model(Net, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(InvalidFile, match=r"sk\.save_model"):
        sk.load_model(Net, tmp_path)
    sk.save_model(sparse(), tmp_path)
    for wrong in (3, lambda: 3):
        with pytest.raises(InvalidInput, match=r"torch\.nn\.Module"):
            untyped(wrong, tmp_path)
    with torch.device("meta"):
        scaled = Scaled()
    with pytest.raises(InvalidInput, match="scale of the model is on the meta device"):
        sk.load_model(scaled, tmp_path)
    with pytest.raises(InvalidInput, match="device"):
        sk.load_model(Net, tmp_path, device="nowhere")
    with pytest.raises(InvalidInput, match="plain tensors with values"):
        sk.save_model(Net().to("meta"), tmp_path)
    own = type("Packed", (torch.Tensor,), {})
    net = sparse()
    net.norm.weight = nn.Parameter(net.norm.weight.detach().as_subclass(own))
    with pytest.raises(InvalidInput, match=r"norm\.weight .* of class Packed; only plain tensors"):
        sk.save_model(net, tmp_path)
    with pytest.raises(InvalidInput, match="cannot be made: File exists"):
        sk.save_model(sparse(), tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"a torch\.nn\.Module"):
        sk.save_model("model", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_names_files_of_its_folder_only(name: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"up.bias": name}}))
    with pytest.raises(InvalidFile, match="weight_map"):
        sk.load_model(Net, tmp_path)
    sk.save_model(sparse(), tmp_path)  # which counts, beside the index of earlier shards
    same(sk.load_model(Net, tmp_path), sparse())


def test_a_save_that_fails_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sk.save_model(sparse(), tmp_path)
    monkeypatch.setattr("sparsek.files.tensor_file.Writer.finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sk.save_model(sparse(sk.SemiSparse()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    same(sk.load_model(Net, tmp_path), sparse())


def bit_masked(dense: torch.Tensor, mask: torch.Tensor, name: str, two_four: bool) -> dict[str, torch.Tensor]:
    """A weight as compressed-tensors writes it: `two_four` as sparse-24-bitmask, else as sparse-bitmask."""
    powers = torch.tensor([1 << bit for bit in range(8)])
    bytes_of = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    found = {
        "compressed": torch.cat([row[kept] for row, kept in zip(dense.float(), mask, strict=True)]).to(
            dense.dtype
        ),
        "bitmask": (bytes_of * powers).sum(-1).to(torch.uint8),
        "shape": torch.tensor(dense.shape),
    }
    if two_four:
        found |= {"compressed": found["compressed"].view(len(dense), -1), "shape": found["shape"][:, None]}
    else:
        found["row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
    return {f"{name}.{part}": each for part, each in found.items()}


def two_of_four(weight: torch.Tensor) -> torch.Tensor:
    best = weight.float().abs().unflatten(1, (-1, 4)).topk(2).indices
    return torch.zeros(*best.shape[:2], 4, dtype=torch.bool).scatter_(2, best, True).flatten(1)


def write_bit_masked(folder: Path, fp8: str, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpoint of Net whose layers are behind bit masks, and the dense weights."""
    torch.manual_seed(0)
    model: Any = Net().bfloat16().eval()
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for name, two_four in (("up", True), ("down", False)):
        dense = state.pop(f"{name}.weight")
        dense[0, :4] = 0  # elements that are stored, and 0
        if not two_four:
            dense[:, ::5] = 0
        kept = two_of_four(dense) if two_four else dense != 0
        stored = dense * kept
        if fp8:
            rows = len(dense) if fp8 == "row" else 1
            scale = (torch.rand(rows, 1) + 0.5).bfloat16()
            codes = (stored.float() / scale.float()).to(torch.float8_e4m3fn)
            state[f"{name}.weight_scale"] = scale if fp8 == "row" else scale[0]
            state |= bit_masked(codes, kept, name + prefix, two_four)
            stored = codes.float() * scale.float()
        else:
            state |= bit_masked(stored, kept, name + prefix, two_four)
        getattr(model, name).weight.data = stored.to(torch.bfloat16)
    del state["head.weight"]
    save_file(state, folder / "model.safetensors")
    about = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": about}))
    return model, state


@pytest.mark.parametrize("prefix", ["", ".weight"])
@pytest.mark.parametrize("fp8", ["", "row", "tensor"])
def test_weights_behind_bit_masks_become_sparse_layers(fp8: str, prefix: str, tmp_path: Path) -> None:
    dense, _ = write_bit_masked(tmp_path, fp8, prefix)
    back = sk.load_model(Net, tmp_path).eval()
    weight = back.up.weight
    assert isinstance(weight, sk.Quantized if fp8 else sk.Semi24)
    assert isinstance(getattr(weight, "matrix", weight), sk.Semi24)
    assert type(back.down) is nn.Linear
    assert back.head.weight is back.words.weight
    assert torch.equal(back.up.to_dense(), dense.up.weight)
    torch.testing.assert_close(back.down.weight, dense.down.weight, rtol=2**-7 if fp8 else 0, atol=0)
    assert torch.equal(back.up.bias, dense.up.bias)
    sk.save_model(back, tmp_path / "again")
    same(back, sk.load_model(Net, tmp_path / "again"))


def test_the_config_of_a_model_forgets_how_its_checkpoint_was_compressed(tmp_path: Path) -> None:
    write_bit_masked(tmp_path, "", "")
    model: Any = Net()
    model.config = SimpleNamespace(
        model_type="net", quantization_config={"quant_method": "compressed-tensors"}
    )
    sk.load_model(model, tmp_path)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("up.shape", lambda x: torch.tensor([[1 << 40], [128]]), "shape is"),
        ("up.shape", lambda x: -x, "shape is"),
        ("up.shape", lambda x: x.float(), "shape is"),
        ("up.bitmask", lambda x: x[:, 1:].contiguous(), "shape is"),
        ("up.bitmask", lambda x: x ^ 1, "bits in its mask for 16384 values"),
        ("up.compressed", lambda x: x[:-1], "bits in its mask for 16320 values"),
        ("up.compressed", lambda x: x.to(torch.int8), "dtype"),
        ("up.compressed", lambda x: x * torch.nan, "NaN"),
        ("up.compressed", lambda x: x.to(torch.float8_e4m3fn), "weight_scale"),
        ("up.weight_scale", lambda x: torch.ones(256, 1), "weight_scale"),
        ("up.compressed", None, "go together"),
        ("up.shape", None, "go together"),
        ("up.shape", lambda x: x.flip(0), r"shape is \[128, 256\], .*do not fit"),
        ("up.weight", lambda x: torch.zeros(256, 128, dtype=torch.bfloat16), "up: has another weight beside"),
        ("up.weight.bitmask", lambda x: torch.zeros(1), "up: has another weight beside"),
    ],
)
def test_wrong_bit_masks_are_refused(part: str, change: Any, why: str, tmp_path: Path) -> None:
    _, state = write_bit_masked(tmp_path, "", "")
    found = state.pop(part, None)
    save_file(state if change is None else {**state, part: change(found)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFile, match=why):
        sk.load_model(Net, tmp_path)


@pytest.mark.parametrize("layer", ["up", "down"])  # 2:4, and not
@pytest.mark.parametrize("fp8", ["row", "tensor"])
def test_scales_behind_bit_masks_are_positive_and_finite(fp8: str, layer: str, tmp_path: Path) -> None:
    for wrong in (torch.nan, torch.inf, 0.0, -1.0):
        _, state = write_bit_masked(tmp_path, fp8, "")
        state[f"{layer}.weight_scale"][-1] = wrong
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(InvalidFile, match=f"{layer}: .*not positive and finite"):
            sk.load_model(Net, tmp_path)


def test_a_tensor_without_a_place_is_not_blamed_on_the_config(tmp_path: Path) -> None:
    _, state = write_bit_masked(tmp_path, "", "")
    save_file(state | {"up.weight_g_idx": torch.zeros(128)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidFile, match="the model has no place for up") as error:
        sk.load_model(Net, tmp_path)
    assert "config.json" not in str(error.value)


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    state = {f"up.{part}": torch.ones(16, 16, dtype=torch.int32) for part in ("qweight", "qzeros")}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InvalidFile, match="no checkpoint of sparse layers"):
        sk.load_model(Net, tmp_path)


def test_a_bias_of_two_sparse_layers_stays_one(tmp_path: Path) -> None:
    def make() -> Any:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model[1].bias = model[0].bias
        return model

    model = make()
    sk.sparsify_(model, sk.BlockSparse(16, 0.5))
    sk.save_model(model, tmp_path)
    found = sk.load_model(make, tmp_path)
    assert found[0].bias is found[1].bias
    assert torch.equal(found[0].bias, model[0].bias)
