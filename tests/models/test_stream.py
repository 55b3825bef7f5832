"""Repeated blocks, the flow between them, and calibrated pruning of transformers' models."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.models import stream
from sparsek.models.stream import DENSE, ActivationStore, Stream
from tests.house.tools import need


def test_repeated_blocks_are_the_outermost_lists_of_one_class():
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(5))

    model: Any = nn.Module()
    model.mixed = nn.ModuleList([Expert(), nn.Linear(4, 4)])
    model.encoder = nn.ModuleList(Layer() for _ in range(2))
    model.decoder = nn.Sequential(Layer(), Layer(), Layer())
    model.single = nn.ModuleList([Layer()])
    model.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    found = {stack.name: list(stack.blocks) for stack in stream.stacks_of(model)}
    assert found == {
        "encoder": ["encoder.0", "encoder.1"],
        "decoder": ["decoder.0", "decoder.1", "decoder.2"],
        "single.0.experts": [f"single.0.experts.{at}" for at in range(5)],
    }
    assert stream.stacks_of(nn.Linear(3, 3))[0].blocks.keys() == {""}
    (stack,) = stream.stacks_of(nn.Sequential(Layer(), Layer()))  # the model is the list
    assert (stack.name, list(stack.blocks), stack.is_whole) == ("", ["0", "1"], False)
    assert stack.has("1.experts.0.up")


def test_a_model_that_is_a_list_of_blocks_is_pruned_block_by_block():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(x).relu()

    seen: list[tuple[int, int, str]] = []
    report = sk.prune(
        nn.Sequential(*(Residual() for _ in range(3))),
        sk.BlockSparse(16, 0.5),
        calibration=[torch.randn(64, 32)],
        progress=lambda *given: seen.append(given),
    )
    assert [row.name for row in report.replaced] == ["0.up", "1.up", "2.up"]
    assert seen == [(0, 3, "0"), (1, 3, "1"), (2, 3, "2"), (3, 3, "")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor, options: dict[str, Tensor], cache: Any = None) -> dict[str, Any]:
        return {"x": x + self.inner(x) * options["scale"], "again": options["other"], "text": "a"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.forward_count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forward_count += 1
        other = torch.zeros(2)
        for at, block in enumerate(self.blocks):
            found = block(x, {"scale": torch.tensor(float(at)), "other": other}, cache=DynamicCache())
            x, other = found["x"], found["again"]
        return x


class DynamicCache:
    """As transformers' one, which must not be filled twice."""


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stream_gives_each_block_what_the_model_gives_it(on_disk: bool, tmp_path: Path):
    model: Any = Model()
    inputs = [torch.randn(3, 8), torch.randn(5, 8)]
    store = ActivationStore(tmp_path if on_disk else None)
    (stack,) = stream.stacks_of(model)
    with torch.no_grad():
        line = Stream(model, stack, [((x,), {}) for x in inputs], store, "0")
        assert "forward" not in vars(model.blocks[0])
        for index, block in enumerate(model.blocks):
            for batch in range(2):
                outputs = line.outputs(line.call(block, index, DENSE, batch), index, batch)
                line.put(index + 1, DENSE, batch, outputs)
                assert len(list(tmp_path.iterdir())) >= on_disk
            line.drop(index)
        for batch, x in enumerate(inputs):
            assert any(torch.equal(each, model(x)) for each in line.get(4, DENSE, batch).values())
    line.close()
    assert not list(tmp_path.iterdir())


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Side() for _ in range(3))

    def forward(self, x: Tensor, way: str) -> Tensor:
        first, side, held = None, x, Held(x)
        for block in self.blocks:
            x, out, found = block(x, held if way == "object" else first if way == "first" else side)
            first, held = out if first is None else first, found
            if way == "in place":
                x.mul_(0.5)
            side = torch.ones(8) if way == "constant" else out.sin() if way == "computed" else out
        return x


class Held:
    """An object that no tree of arguments looks into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, side: Any) -> tuple[Tensor, Tensor, Held]:
        side = side.x if isinstance(side, Held) else x if side is None else side
        return (x + self.inner(x + side), x * side, Held(x.cos()))


@pytest.mark.parametrize("way", ["constant", "side", "first", "in place", "computed", "object"])
def test_blocks_are_a_sequence_only_if_all_that_they_return_flows_to_the_next_one(way: str):
    model, x = Mixed(), torch.randn(4, 8)
    (stack,) = stream.stacks_of(model)
    made = stream.record(model, stack, ((x, way), {}), 0)
    assert (made is not None) == (way in ("constant", "side"))
    report = sk.prune(model, {"*.inner": sk.Float8()}, calibration=[(x, way)], reconstruct=None)
    assert len(report.replaced) == 3


def test_residuals_are_found_by_value():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(self.norm(x))  # from the input of the block
            y = self.after(x)
            return y + self.c(torch.relu(self.b(y)))  # from the result of a norm

    block = Residual()
    layers = {name: block.get_submodule(name) for name in "abc"}
    found = stream.residuals_of(block, layers, lambda: block(torch.randn(5, 8)))
    assert found.keys() == {"a", "c"}
    assert found["a"] in {stream.TensorPlace("", False, 0), stream.TensorPlace("norm", False, 0)}
    assert found["c"] in {stream.TensorPlace("after", True, 0), stream.TensorPlace("b", False, 0)}


def tiny(name: str) -> tuple[Any, dict[str, Tensor]]:
    need("transformers")
    hf: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 40,
    }
    ids = {"input_ids": torch.randint(3, 40, (4, 16)), "attention_mask": torch.ones(4, 16, dtype=torch.int64)}
    ids["attention_mask"][0, 9:] = 0
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**small)), ids
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_key_value_heads=1)), ids
    if name == "windows":
        more = {
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        }
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**small, **more)), ids
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
        ), ids
    if name == "vit":
        del small["vocab_size"]
        model = hf.ViTModel(hf.ViTConfig(**small, image_size=16, patch_size=4))
        return model, {"pixel_values": torch.randn(4, 3, 16, 16)}
    config = hf.T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=40, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), {**ids, "labels": torch.randint(3, 40, (4, 7))}


PRUNED = {"bert": 12, "llama": 14, "windows": 14, "gpt2": 8, "vit": 12, "t5": 2 * 6 + 2 * 10}


@pytest.mark.parametrize("name", PRUNED)
def test_models_of_transformers_are_pruned_block_by_block(name: str):
    model, batch = tiny(name)
    with torch.no_grad():
        want = model.eval()(**batch)[0 if name != "t5" else 1]
        report = sk.prune(model, sk.BlockSparse(16, 1.0), calibration=[batch], method="wanda")
        torch.testing.assert_close(model(**batch)[0 if name != "t5" else 1], want, rtol=1e-3, atol=1e-3)
    assert len(report.replaced) == PRUNED[name]
    assert max(row.error_after or 0 for row in report.replaced) < 5e-3
    if name in ("llama", "windows", "gpt2"):
        assert "lm_head" in [row.name for row in report.skipped]
    again, batch = tiny(name)
    repair: Any = "block" if name == "gpt2" else "layer"  # weights of Conv1D are transposed views
    rows = sk.prune(
        again, sk.BlockSparse(16, 0.5), calibration=[batch], method="wanda", reconstruct=repair
    ).replaced
    assert all(row.error_after is not None and row.error is not None for row in rows)
    assert sum(row.error_after < row.error for row in rows) >= len(rows) - 1  # type: ignore[operator]
