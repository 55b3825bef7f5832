"""Repeated blocks, the flow between them, and calibrated pruning of transformers' models."""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.models import passes, stream
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
        line = Stream(model, stack, [((x,), {}) for x in inputs], range(len(inputs)), store, "0")
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


class Strict(Model):
    """It raises after its blocks if these gave it no outputs of theirs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert not any("forward" in vars(block) for block in self.blocks)
        return y


def test_what_follows_the_blocks_may_raise_while_they_are_recorded() -> None:
    model = Strict()
    (stack,) = stream.stacks_of(model)
    with torch.no_grad():
        assert stream.record(model, stack, ((torch.randn(3, 8),), {}), 0) is not None
    assert not any("forward" in vars(block) for block in model.blocks)


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
    found = passes.residuals_of(block, layers, [*zip("abc")], lambda: block(torch.randn(5, 8)))
    assert found.keys() == {"a", "c"}
    assert found["a"] in {passes.TensorPlace("", False, 0), passes.TensorPlace("norm", False, 0)}
    assert found["c"] in {passes.TensorPlace("after", True, 0), passes.TensorPlace("b", False, 0)}


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
    if name == "albert":  # one group of two layers, called three times
        small |= {"num_hidden_layers": 6, "inner_group_num": 2, "embedding_size": 32}
        return hf.AlbertModel(hf.AlbertConfig(**small)), ids
    if name in ("bart", "whisper"):
        sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIDE.items()}
        special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
        more: Any = {"d_model": 32, "vocab_size": 40, **sides, **special}
        labels = torch.randint(3, 40, (4, 7))
        if name == "bart":
            model = hf.BartForConditionalGeneration(hf.BartConfig(**more, max_position_embeddings=32))
            return model, {**ids, "labels": labels}
        more |= {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
        model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**more, suppress_tokens=None))
        return model, {"input_features": torch.randn(4, 8, 24), "labels": labels}
    if name == "vit":
        del small["vocab_size"]
        model = hf.ViTModel(hf.ViTConfig(**small, image_size=16, patch_size=4))
        return model, {"pixel_values": torch.randn(4, 3, 16, 16)}
    config = hf.T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=40, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), {**ids, "labels": torch.randint(3, 40, (4, 7))}


SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
PAIR = 2 * 6 + 2 * 10  # of an encoder and a decoder
PRUNED = {"bert": 12, "llama": 14, "windows": 14, "gpt2": 8, "vit": 12, "albert": 12}
PRUNED |= {"t5": PAIR, "bart": PAIR, "whisper": PAIR}


@pytest.mark.parametrize("name", PRUNED)
def test_models_of_transformers_are_pruned_block_by_block(name: str):
    model, batch = tiny(name)
    with torch.no_grad():
        want = model.eval()(**batch)[int("labels" in batch)]
        report = sk.prune(model, sk.BlockSparse(16, 1.0), calibration=[batch], method="wanda")
        torch.testing.assert_close(model(**batch)[int("labels" in batch)], want, rtol=1e-3, atol=1e-3)
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


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_batches_of_ids_pass_some_sequences_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch):
    found: list[Tensor] = []
    for size in (4, 2):  # whole, and in two pieces of 16 tokens each, the widest layer has 64 outputs
        monkeypatch.setattr(passes, "PIECE", size * 16 * 64)
        model, batch = tiny(name)
        seen: list[int] = []
        model.register_forward_pre_hook(
            lambda _, args, given, seen=seen: seen.append(len(given["input_ids"])), with_kwargs=True
        )
        sk.prune(model, sk.BlockSparse(16, 0.5), calibration=[batch], reconstruct="block")
        assert set(seen) == {size}
        with torch.no_grad():
            found.append(model.eval()(**batch)[int("labels" in batch)])
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


def test_what_is_cut_with_the_sequences_of_a_batch():
    ids, mask = torch.arange(40).view(5, 8), torch.ones(5, 8)
    more = {
        "labels": torch.arange(5),
        "position_ids": torch.arange(8),
        "bias": torch.ones(1, 2, 8, 8),
        "flag": True,
    }
    first, *_, last = pieces = passes.pieces_of(
        ((), {"input_ids": ids, "attention_mask": mask, **more}), ids, 20
    )
    assert [len(each["input_ids"]) for _, each in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([each["input_ids"] for _, each in pieces]), ids)
    assert first[1]["attention_mask"].shape == (2, 8)
    assert torch.equal(last[1]["labels"], torch.tensor([4]))
    assert all(last[1][name] is more[name] for name in ("position_ids", "bias", "flag"))
    by_place = passes.pieces_of(((ids,), {"attention_mask": mask}), ids, 20)
    assert [len(args[0]) for args, _ in by_place] == [2, 2, 1]
    assert [len(kwargs["attention_mask"]) for _, kwargs in by_place] == [2, 2, 1]
    square = torch.arange(64).view(8, 8)
    for args, kwargs in (
        ((ids, mask), {}),  # of sequences, or of tokens?
        ((), {"input_ids": mask}),  # features, not ids
        ((), {"input_ids": ids, "other": torch.ones(3, 8)}),
        ((), {"input_ids": ids, "past": (torch.ones(5, 8),)}),
        ((), {"input_ids": ids, "lengths": [8, 7, 6, 5, 4]}),
        ((), {"input_ids": square, "position_ids": torch.arange(8)}),  # of positions, or of sequences?
        ((), {"input_ids": ids[:2]}),
    ):
        (whole,) = passes.pieces_of((args, kwargs), kwargs.get("input_ids"), 20)
        assert whole == (args, kwargs)


@pytest.mark.parametrize(
    ("images", "videos", "count"),
    [
        ((0, 1, 2, 3, 4), (), 3),
        ((0, 0, 2, 3, 4), (), 1),  # two of the first sequence, none of the second
        ((), (), 1),
        ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), 3),
        ((0, 1, 2, 3, 4), (0, 1), 1),
    ],
)
def test_sequences_are_cut_from_their_images_only_where_each_has_one(images: Any, videos: Any, count: int):
    ids, shown = torch.arange(10, 50).view(5, 8), torch.randn(5, 3, 4, 4)
    for at, rows in enumerate((images, videos)):
        for column, row in enumerate(rows):
            ids[row, column] = at
    batch = ((), {"input_ids": ids, "pixel_values": shown})
    pieces = passes.pieces_of(batch, ids, 20, {0, 1})
    assert len(pieces) == count
    assert torch.equal(torch.cat([each["pixel_values"] for _, each in pieces]), shown)
    assert len(passes.pieces_of(((), {"input_ids": ids}), ids, 20, {0, 1})) == 3  # without images
    assert len(passes.pieces_of(batch, ids, 20)) == 1  # no ids are known for images


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (5, 16, 24)], ids=["an image", "sound"])
def test_features_that_may_not_be_of_each_sequence_keep_the_batch_whole(shape: tuple[int, ...]):
    ids, shown = torch.arange(10, 50).view(5, 8), torch.randn(shape)
    ids[2, 3] = 0
    (whole,) = passes.pieces_of(((), {"input_ids": ids, "features": shown}), ids, 20, {0})
    assert whole[1]["input_ids"] is ids
    masks = {
        "attention_mask": torch.zeros(5, 1, 8, 8),
        "causal": torch.zeros(1, 1, 8),
        "bias": torch.zeros(5, 1, 8),
    }
    assert len(passes.pieces_of(((), {"input_ids": ids, **masks}), ids, 20, {0})) == 3


def test_a_compiled_model_has_the_mask_that_is_given_by_place():
    class Masked(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return x

    x, mask = torch.ones(2, 3, 4), torch.ones(2, 3)
    (found,) = stream.padding_of(cast(Any, torch.compile(Masked(), backend="eager")), ((x, mask), {}))
    assert found is mask


class Seeing(nn.Module):
    """Features of all images, in their order, stand in the places of token 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(image_token_id=0)
        self.embed, self.see = nn.Embedding(50, 32), nn.Linear(48, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        self.seen.append(len(input_ids))
        x = self.embed(input_ids)
        x[input_ids == 0] = self.see(pixel_values.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(("rows", "size"), [((0, 1, 2, 3), 2), ((0, 0, 2, 3), 4)])
def test_a_model_has_the_images_of_the_sequences_that_it_is_given(
    rows: Any, size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passes, "PIECE", 2 * 8 * 32)
    model, ids = Seeing(), torch.randint(1, 50, (4, 8))
    ids[list(rows), list(range(4))] = 0
    batch = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 4, 4)}
    report = sk.prune(model, sk.BlockSparse(16, 0.5), calibration=[batch])
    assert len(report.replaced) == 2
    assert set(model.seen) == {size}


class Loop(nn.Module):
    """The same blocks in several rounds, more of them for a larger x."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        for block in self.blocks:
            block.add_module("inner", nn.Sequential(nn.Linear(32, 32)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if x.abs().max() < 1 else 4):
            for block in self.blocks:
                x = x + block(x)
        return x


def test_blocks_called_in_rounds_are_calibrated_on_all_rounds() -> None:
    model: Any = Loop()
    small, large = 0.1 * torch.randn(4, 32).clamp(-2, 2), torch.randn(4, 32) + 2
    seen: list[Tensor] = []
    with model.blocks[0][0].register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        model(small)
        model(large)
    assert len(seen) == 6
    weight, x = model.blocks[0][0].weight.detach().clone(), torch.cat(seen).detach()
    options: Any = {"method": "wanda", "reconstruct": None}
    found = sk.prune(model, sk.BlockSparse(16, 0.5), calibration=[small, large], **options).rows[0].error
    layer: Any = nn.Linear(32, 32)
    layer.weight.data, layer.bias.data = weight, model.blocks[0][0].bias.data
    alone: Any = nn.Sequential(layer)
    (row,) = sk.prune(alone, sk.BlockSparse(16, 0.5), calibration=[x], **options).rows
    assert found == pytest.approx(row.error, rel=1e-4)
    torch.testing.assert_close(model.blocks[0][0].to_dense(), alone[0].to_dense())


class Cross(nn.Module):
    """A block with attention to the states of an encoder, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        return x + self.own(x) + (0 if states is None else self.k(states).mean(1, keepdim=True))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = (nn.ModuleList(Cross() for _ in range(2)) for _ in range(2))
        self.config = SimpleNamespace(is_encoder_decoder=True)

    def states(self, ids: Tensor) -> Tensor:
        for block in self.encoder:
            ids = block(ids)
        return ids

    def forward(self, ids: Tensor, labels: Tensor, **masks: Tensor) -> Tensor:
        states, x = self.states(ids), labels[..., None].clamp(0, 3) * torch.linspace(-1, 1, 32)
        for block in self.decoder:
            x = block(x, states=states)
        return x


@pytest.mark.parametrize("on_disk", [False, True])
def test_cross_attention_compares_with_the_states_of_the_dense_encoder(on_disk: bool, tmp_path: Path) -> None:
    model: Any = Pair()
    ids, labels, mask = torch.randn(4, 6, 32), torch.arange(20).view(4, 5), torch.ones(4, 6)
    mask[0, 2:], labels[1, 3:] = 0, -100
    batch = {"ids": ids, "labels": labels, "attention_mask": mask}
    dense, real = copy.deepcopy(model), mask.bool()
    rules = {"encoder.*": sk.BlockSparse(16, 0.5), "decoder.*": sk.BlockSparse(16, 1.0)}
    options: Any = {"method": "wanda", "reconstruct": None, "folder": tmp_path / "run" if on_disk else None}
    rows = {row.name: row for row in sk.prune(model, rules, calibration=[batch], **options).rows}
    with torch.no_grad():
        for name in ("decoder.0.k", "decoder.1.k"):
            layer = dense.get_submodule(name)
            y, other = (layer(each.states(ids))[real] for each in (dense, model))
            assert rows[name].error == pytest.approx(float((y - other).norm() / y.norm()), rel=1e-3)
        lost = rows["decoder.1.own"].error
        assert lost is not None
        assert lost > 0.05  # by the states
    assert rows["decoder.0.own"].error == pytest.approx(0, abs=1e-3)
    assert len(list((tmp_path / "run").iterdir())) == 5 if on_disk else True
    line = Stream(dense, stream.stacks_of(dense)[1], [((), batch)], [0], ActivationStore(None), "0")
    assert torch.equal(line.rows(torch.ones(4, 5, 32), 0), (labels != -100).flatten().float())
    assert torch.equal(line.rows(torch.ones(4, 6, 32), 0), mask.flatten())
