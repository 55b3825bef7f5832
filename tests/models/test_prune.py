"""sk.prune: what is replaced, what is skipped, its figures, and a run that goes on after a kill."""

import copy
import dataclasses
import gc
import importlib
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.models import quality, stream
from sparsek.models.config import BlockSparse as Config
from sparsek.models.config import form_of
from sparsek.models.report import Measured
from sparsek.nn import BlockSparseLinear
from tests.house.tools import need

HALF = sk.BlockSparse(block=16, keep=0.5)
Untyped: Any = sk.prune  # for what its types forbid


class Block(nn.Module):
    """A pre-norm residual block, with a mask of its own and a second tensor that flows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor, *, scale: float, total: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x) * mask.to(x.dtype)
        y = self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return x + scale * y if scale != 1 else x + y, total + x.mean()


class Model(nn.Module):
    """Embedding, blocks in a list, a head with the weight of the embedding, and a layer outside of the blocks."""

    def __init__(self, blocks: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.extra, self.head = nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, total = self.embed(ids), torch.zeros((), device=ids.device)
        for at, layer in enumerate(self.layers):
            x, total = layer(x, torch.full((32,), 1.0 + at, device=x.device), scale=1.0, total=total)
        return self.head(self.extra(x)) + total


def batches(count: int = 2, seed: int = 1) -> list[dict[str, Tensor]]:
    draw = torch.Generator("cpu").manual_seed(seed)
    made = []
    for _ in range(count):
        mask = torch.ones(8, 12, dtype=torch.int64)
        mask[0, 6:] = 0
        made.append({"input_ids": torch.randint(50, (8, 12), generator=draw), "attention_mask": mask})
    return [{"ids": each["input_ids"], "attention_mask": each["attention_mask"]} for each in made]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def two_layers() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False)), torch.randn(256, 64)


@pytest.mark.parametrize(
    "config", [HALF, sk.BlockSparse(32, 0.5, "global"), sk.SemiSparse(), sk.BlockSemiSparse(64, 0.5)]
)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "exact", "obs"])
def test_the_reported_error_is_that_of_the_outputs(config: Any, method: Any):
    dense, x = two_layers()
    want, errors = dense(x).detach(), {}
    for repair in (None, "layer", "block"):
        model = copy.deepcopy(dense)
        report = sk.prune(model, config, calibration=[x[:128], x[128:]], method=method, reconstruct=repair)
        errors[repair] = float((model(x).detach() - want).norm() / want.norm())
        if repair != "block":
            assert report.replaced[-1].error_after == pytest.approx(errors[repair], rel=2e-3)
    assert errors["layer"] < errors[None]
    assert errors["block"] < errors["layer"]


@pytest.mark.parametrize("of", [None, HALF, sk.SemiSparse(), sk.BlockSemiSparse(64, 0.5)])
def test_errors_in_fp8_are_those_of_rounded_weights_and_inputs(of: Any):
    dense, x = two_layers()
    x = x @ torch.randn(64, 64) / 8
    want, errors = dense(x).detach(), {}
    for repair in (None, "layer", "block"):
        model = copy.deepcopy(dense)
        report = sk.prune(
            model, sk.Float8(of), calibration=[x[:128], x[128:]], method="wanda", reconstruct=repair
        )
        errors[repair] = float((model(x).detach() - want).norm() / want.norm())
        if repair != "block":
            assert report.rows[-1].error_after == pytest.approx(errors[repair], rel=0.03)
        assert isinstance(model[0].weight, sk.Quantized)
        assert not model[0]._forward_pre_hooks
        assert report.rows[0].format == form_of(sk.Float8(of)).name
    assert errors["layer"] < errors[None]
    assert errors["block"] <= errors["layer"] * 1.03


def test_better_methods_lose_less():
    dense, x = two_layers()
    dense[0].weight.data *= torch.linspace(0.2, 2, 64)
    x = x @ torch.randn(64, 64)
    want = dense(x)

    def error(method: Any, repair: Any) -> float:
        model = copy.deepcopy(dense)
        sk.prune(model, HALF, calibration=[x], method=method, reconstruct=repair)
        return float((model(x) - want).norm().detach() / want.detach().norm())

    assert error("obs", "layer") < error("wanda", "layer") < error("wanda", None)
    assert error("exact", None) < error("magnitude", None)


def test_everything_kept_changes_nothing():
    model = Model()
    want = [model(**each) for each in batches()]
    report = sk.prune(model, sk.BlockSparse(16, 1.0), calibration=batches())
    for each, y in zip(batches(), want, strict=True):
        torch.testing.assert_close(model(**each), y, rtol=1e-4, atol=1e-4)
    assert max(row.error_after or 0 for row in report.replaced) < 2e-3


def test_blocks_are_pruned_and_tied_and_outer_layers_are_not():
    model = Model().train()
    layer: Any = model.layers[0]
    layer.up.weight.requires_grad_(False)
    layer.down.bias.requires_grad_(False)
    report = sk.prune(model, HALF, calibration=batches())
    learns = {name for name, each in layer.named_parameters() if each.requires_grad}
    assert learns == {"norm.weight", "norm.bias", "up.bias", "gate.values", "down.values"}
    assert [row.name for row in report.replaced] == [
        f"layers.{at}.{name}" for at in range(3) for name in ("gate", "up", "down")
    ]
    assert all(isinstance(layer.up, BlockSparseLinear) for layer in model.layers)
    assert {row.name: row.why_not.split(";")[0] for row in report.skipped} == {
        "extra": "is outside of the repeated blocks",
        "head": "shares its weight with embed",
    }
    assert all(row.kept == 0.5 and 0 < (row.kept_norm or 0) < 1 for row in report.replaced)
    assert model.training
    assert model.layers[0].up.training  # type: ignore[union-attr]
    text = str(report)
    assert text.splitlines()[0] == "9 of 11 layers are sparse"
    assert text.splitlines()[1].split()[-7:] == ["format", "kept", "norm", "error", "after", "seconds", "why"]
    assert "layers.*.up (3)" in text
    assert "shares its weight with embed" in text
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["config"] == HALF.to_dict()


def test_rules_choose_by_glob_type_and_predicate_and_the_first_wins():
    model = Model()
    rules: Any = {
        "*.gate": None,
        "extra": sk.SemiSparse(),
        lambda layer, name: name.endswith("0.up"): sk.SemiSparse(),
        nn.Linear: HALF,
    }
    report = sk.prune(
        model, rules, calibration=batches(), filter_fn=lambda layer, name: name != "layers.2.up"
    )
    formats = {row.name: (row.config or {})["format"] for row in report.replaced}
    assert formats == {
        "layers.0.up": "semi24",
        "layers.0.down": "bsr",
        "layers.1.up": "bsr",
        "layers.1.down": "bsr",
        "layers.2.down": "bsr",
        "extra": "semi24",
    }
    assert isinstance(model.extra, sk.nn.SparseLinear)
    assert isinstance(model.extra.weight, sk.Semi24)


def test_later_blocks_repair_what_earlier_ones_lost():
    """Each layer is fitted to the outputs of the dense model on the inputs and residuals of the pruned one."""
    data = batches(8)
    dense = Model(4)

    def error(**options: Any) -> float:
        model = copy.deepcopy(dense)
        sk.prune(model, sk.BlockSparse(16, 0.5), calibration=data, method="wanda", **options)
        return float(sum((model(**each) - dense(**each)).detach().square().sum() for each in data))

    assert error(reconstruct="block") < error(reconstruct="layer") < error(reconstruct=None)


def test_padding_counts_for_nothing():
    odd = batches()
    for each in odd:
        each["ids"] = each["ids"].masked_fill(each["attention_mask"] == 0, 7)
    by_place = [tuple(each[name] for name in ("ids", "attention_mask")) for each in odd]
    rows = [sk.prune(Model(), HALF, calibration=data).replaced for data in (batches(), odd, by_place)]
    for a, b, c in zip(*rows, strict=True):
        assert a.error_after == pytest.approx(b.error_after, rel=1e-4)
        assert b.error_after == c.error_after


def test_without_calibration_magnitude_alone_works():
    model = Model()
    report = sk.prune(model, HALF, method="magnitude", reconstruct=None)
    want = sk.BSR.from_dense(Model().layers[1].down.weight.detach(), 16, keep=0.5, scope="row")  # type: ignore[union-attr]
    torch.testing.assert_close(model.layers[1].down.weight.to_dense(), want.to_dense())  # type: ignore[union-attr]
    assert report.replaced[0].error is None
    with pytest.raises(InvalidInput, match="needs calibration"):
        sk.prune(Model(), HALF)


@pytest.mark.parametrize("budget", ["sensitivity", "owl"])
def test_budgets_spread_the_kept_share(budget: Any):
    model = Model()
    with torch.no_grad():
        model.layers[1].down.weight[:, :4] *= 30  # type: ignore[index, union-attr]
        model.layers[0].up.weight[:2] *= 40  # type: ignore[index, union-attr]
    report = sk.prune(model, sk.BlockSparse(16, 0.5, "global"), calibration=batches(), budget=budget)
    kept = {(row.config or {})["keep"] for row in report.replaced}
    sizes = {row.name: 32 * 64 for row in report.replaced}
    total = sum((row.config or {})["keep"] * sizes[row.name] for row in report.replaced)
    assert len(kept) > 1
    assert total == pytest.approx(0.5 * sum(sizes.values()))


@pytest.mark.parametrize("bound", [{"max_error": 0.25}, {"speedup": 1.5}])
def test_the_planner_picks_forms_within_a_bound_on_the_calibration(bound: Any):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 32))
    x = torch.randn(512, 16) @ torch.randn(16, 128)  # of few directions: much can be made up for
    options: Any = {"calibration": [x], "method": "wanda", "card": "h200", "tokens": 65536, **bound}
    report = sk.prune(model, "auto", **options)
    picked = {row.name: row for row in report.replaced}
    assert picked.keys() == {"0", "2"}
    assert report.card == "NVIDIA H200"
    (left,) = report.skipped
    assert left.why_not == "no form is predicted to be faster on NVIDIA H200"
    if "max_error" in bound:
        assert (
            max(row.error_after or 1 for row in picked.values()) < 0.3
        )  # 0.25 where layers before are dense
        assert "within an error of 0.25" in picked["0"].why
    else:
        assert (report.speed or 0) >= 1.5
        assert "for 1.5x in all" in picked["0"].why


def test_the_planner_sees_layers_outside_of_the_blocks():
    rules: Any = {"extra": "auto", "*.up": "auto", "*": None}
    report = sk.prune(Model(), rules, calibration=batches(1), max_error=0.5, card="h200")
    assert {row.name for row in report.skipped if "is predicted to be faster" in row.why_not} == {
        "extra",
        *(f"layers.{at}.up" for at in range(3)),
    }


class Killed(Exception):
    """Ends a run."""


@pytest.mark.parametrize("repair", ["layer", "block"])
def test_a_run_killed_at_every_write_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repair: Any
):
    options: Any = {"calibration": batches(1), "budget": "owl", "method": "wanda", "reconstruct": repair}
    whole = Model(2)
    want = sk.prune(whole, HALF, **options)
    replace, kills = Path.replace, 0
    folder, model = tmp_path / "run", Model(2)
    report = None
    while report is None:
        done = 0

        def dying(self: Path, target: Path, limit: int = 3 + kills % 5) -> Path:
            nonlocal done
            done += 1
            if done > limit:
                raise Killed
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", dying)
        model = Model(2)
        try:
            report = sk.prune(model, HALF, folder=folder, **options)
        except Killed:
            kills += 1
            assert kills < 40
            if kills > 12:
                monkeypatch.undo()
                report = sk.prune(model := Model(2), HALF, folder=folder, **options)
    assert kills > 2
    assert weights(model).keys() == weights(whole).keys()
    assert all(torch.equal(each, weights(whole)[name]) for name, each in weights(model).items())

    def figures(report: Any) -> list[dict[str, Any]]:
        return [{**row, "pruning_seconds": 0} for row in report.to_dict()["rows"]]

    assert figures(report) == figures(want)
    assert sorted(path.name for path in folder.iterdir()) == [
        "finished-00000.safetensors",
        "finished-00001.safetensors",
        "prune.json",
    ]


def test_a_folder_of_another_run_and_damaged_files_are_refused(tmp_path: Path):
    options: Any = {"calibration": batches(1), "folder": tmp_path}
    sk.prune(Model(1 + 1), HALF, **options)
    for model, config, more in (
        (Model(2), sk.BlockSparse(32, 0.5), {}),
        (Model(2, seed=5), HALF, {}),
        (Model(2), HALF, {"method": "exact"}),
        (Model(2), HALF, {"calibration": batches(1, seed=9)}),
    ):
        with pytest.raises(InvalidInput, match="another model, config"):
            sk.prune(model, config, **{**options, **more})
    (tmp_path / "finished-00001.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(InvalidFile, match="finished-00001"):
        sk.prune(Model(2), HALF, **options)
    (tmp_path / "finished-00001.safetensors").write_bytes(
        (tmp_path / "finished-00000.safetensors").read_bytes()
    )
    with pytest.raises(InvalidFile, match=r"layers\.1"):
        sk.prune(Model(2), HALF, **options)
    (tmp_path / "finished-00001.safetensors").unlink()
    with pytest.raises(InvalidFile, match="is missing"):
        sk.prune(Model(2), HALF, **options)
    for text in (
        "[]",
        "{}",
        "no",
        '{"fingerprint": 1, "finished": "a", "rows": 3, "skipped": [], "keep": 1}',
        (tmp_path / stream.STATE).read_text().replace('"picks": null', '"picks": 3'),
    ):
        (tmp_path / stream.STATE).write_text(text)
        with pytest.raises((InvalidFile, InvalidInput)):
            sk.prune(Model(2), HALF, **options)


def test_a_model_without_repeated_blocks_is_one_block():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.a(x * 2)  # one is called twice

    model = Odd()
    report = sk.prune(model, HALF, calibration=[(torch.randn(64, 32),)])
    assert [row.name for row in report.replaced] == ["a", "b"]
    assert [(row.name, row.why_not) for row in report.skipped] == [
        ("unused", "is not called with the calibration")
    ]


def test_blocks_that_are_no_sequence_are_pruned_as_one_model():
    class Reversed(Model):
        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x, total = self.embed(ids), torch.zeros((), device=ids.device)
            for layer in reversed(self.layers):
                x, total = layer(x, torch.ones(32), scale=1.0, total=total)
            return x

    report = sk.prune(Reversed(), HALF, calibration=batches())
    assert [row.name for row in report.replaced][:3] == ["layers.2.gate", "layers.2.up", "layers.2.down"]
    assert len(report.replaced) == 9


def test_half_precision_keeps_its_dtype_and_the_device_stays():
    model = Model().to(torch.bfloat16)
    report = sk.prune(model, HALF, calibration=batches(), device="cpu", permute=False)
    layer: Any = model.layers[0]
    assert layer.up.values.dtype == layer.up.bias.dtype == torch.bfloat16
    assert all(0 < (row.error_after or 0) < (row.error or 0) for row in report.replaced)


def test_torch_encoders_run_on_and_computed_weights_stay():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x = torch.randn(4, 10, 32)
    report = sk.prune(encoder, HALF, calibration=[x])  # attention reads the weight of its out_proj itself
    assert [row.name for row in report.replaced] == [
        f"layers.{at}.linear{to}" for at in (0, 1) for to in (1, 2)
    ]
    with torch.no_grad():
        fast = encoder(x)
    torch.testing.assert_close(fast, encoder(x))
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    assert [row.name for row in sk.prune(model, HALF, calibration=[x]).replaced] == ["1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    with pytest.raises(InvalidInput, match="the model cannot be copied"):
        sk.prune(old, HALF, calibration=[x])
    report = sk.prune(old, HALF, method="magnitude", reconstruct=None)
    assert report.skipped[0].why_not.startswith("computes its weight")


@pytest.mark.parametrize("budget", ["uniform", "sensitivity"])
@pytest.mark.parametrize("where", ["0.weight", "2.weight", "0.bias", "inputs"])
def test_nan_is_refused_with_the_name_of_the_first_layer(where: str, budget: Any):
    model, x = two_layers()
    if where == "inputs":
        x[5] = torch.inf
    else:
        model.get_parameter(where).data[3] = torch.nan
    what = "inputs on calibration batch 0 have" if where == "inputs" else f"{where[2:]} has"
    with pytest.raises(InvalidInput, match=f"^{where[0].replace('i', '0')}: its {what} NaN or Inf"):
        sk.prune(model, HALF, calibration=[x], budget=budget)


def test_under_autocast_the_systems_are_solved_in_full_precision():
    model, x = two_layers()
    with torch.autocast("cpu", torch.bfloat16):
        rows = sk.prune(model, HALF, calibration=[x], permute=False).replaced
    model, _ = two_layers()
    for row, want in zip(rows, sk.prune(model, HALF, calibration=[x], permute=False).replaced, strict=True):
        assert row.error_after == pytest.approx(want.error_after, rel=0.02)


def test_progress_counts_the_blocks():
    seen: list[tuple[int, int, str]] = []
    sk.prune(Model(), HALF, calibration=batches(1), method="wanda", progress=lambda *each: seen.append(each))
    assert seen == [(0, 3, "layers.0"), (1, 3, "layers.1"), (2, 3, "layers.2"), (3, 3, "")]


def test_times_of_blocks_are_in_the_report():
    x = torch.ones(4, 32)
    dense, after = quality.seconds_of(nn.Linear(32, 32), nn.Identity(), ((), {"input": x}))
    assert 0 < after < dense
    report = sk.prune(two_layers()[0], HALF, method="magnitude", reconstruct=None)
    timed = dataclasses.replace(report, measured=Measured(2.0, 0.5, "a GPU"))
    assert "the blocks of the model take 0.25x the time, measured on a GPU" in str(timed)
    assert "The blocks of the model take 0.25x the time" in timed.html()
    assert timed.to_dict()["measured"] == {
        "dense_seconds": 2.0,
        "seconds": 0.5,
        "card": "a GPU",
        "what": "the blocks of the model take",
    }


def test_dense_layers_are_free_once_their_block_is_pruned():
    model = Model()
    layers = {
        name: (weakref.ref(each), weakref.ref(each.weight))
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }
    alive: list[int] = []

    def look(done: int, total: int, name: str) -> None:
        gc.collect()
        alive.append(sum(any(each() is not None for each in both) for both in layers.values()))

    sk.prune(model, HALF, calibration=batches(1), method="wanda", progress=look)
    assert alive == [11, 8, 5, 2]  # three a block; the head and one outside of the blocks stay


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return Model(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "torch.nn.Module"),
        ({"config": 3}, "config is 3"),
        ({"config": {}}, "config is {}"),
        ({"config": {3: HALF}}, "a rule is for 3"),
        ({"config": {"a": 3}}, "the rule for 'a' is 3"),
        ({"config": {"embed": HALF}}, "embed is no linear layer, but of Embedding"),
        ({"config": sk.BlockSparse(128)}, "less than a block of 128x128"),
        ({"model": nn.Linear(32, 32)}, "model is itself a Linear"),
        ({"method": "best"}, "method is 'best'"),
        ({"reconstruct": "all"}, "reconstruct is 'all'"),
        ({"budget": "none"}, "budget is 'none'"),
        ({"config": "auto"}, "give max_error"),
        ({"config": "auto", "speedup": 0.5}, "speedup is 0.5"),
        ({"config": "auto", "speedup": 99}, "speedup=99 is out of reach"),
        ({"config": "auto", "max_error": 0.1, "budget": "owl"}, "budget 'owl' spreads"),
        ({"max_error": 0.1}, 'max_error is for the config "auto"'),
        ({"card": "h9"}, "no facts about a card"),
        ({"tokens": 0}, "tokens"),
        ({"calibration": torch.ones(3)}, "must be batches"),
        ({"calibration": []}, "no batch"),
        ({"calibration": ["text"]}, "calibration batch 0"),
        ({"calibration": [[64], {"x": 3}]}, "calibration batch 0 has no tensor"),
        (
            {"calibration": [torch.ones(2, 32), torch.ones(2, 32, device="meta")]},
            "batch 1 has a tensor on the meta",
        ),
        ({"filter_fn": 3}, "filter_fn is 3"),
        ({"device": "tpu"}, "device"),
        ({"folder": 3}, "folder is 3"),
        ({"model": Model().to("meta")}, "meta device"),
        ({"model": nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))}, "0.weight has no values yet"),
        ({"model": made_for_inference()}, "inference_mode; make or copy"),
        (
            {"config": {"*.upp": HALF, "*": HALF}},
            r"the rule for '\*\.upp' matches no layer; layers are \S*up\b",
        ),
        ({"config": {nn.Conv2d: None, "*": HALF}}, "Conv2d.* matches no layer"),
    ],
)
def test_odd_arguments_are_refused(change: dict[str, Any], message: str):
    given = {"model": Model(2), "config": HALF, "calibration": batches(1), **change}
    with pytest.raises(InvalidInput, match=message):
        Untyped(given.pop("model"), given.pop("config"), **given)


def test_configs_are_json_and_code():
    for config in (
        HALF,
        sk.BlockSparse((16, 32), 0.25, "global"),
        sk.SemiSparse(),
        sk.BlockSemiSparse(64, 0.5),
    ):
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert eval(f"sk.{config!r}") == config
    for wrong in (
        {"format": "csr"},
        {"format": "bsr", "size": 3},
        {},
        3,
        {"format": "bsr", "keep": 0},
        {"format": ["bsr"]},
    ):
        with pytest.raises(InvalidInput):
            Config.from_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["wanda", "obs"])
def test_blocks_are_computed_on_a_gpu_one_at_a_time(method: Any):
    options: Any = {"calibration": batches(), "method": method, "reconstruct": "layer"}
    want = sk.prune(Model(), HALF, **options)
    model = Model()
    got = sk.prune(model, HALF, device="cuda", **options)
    for a, b in zip(got.rows, want.rows, strict=True):
        assert a.error_after == pytest.approx(b.error_after, rel=0.02, abs=1e-3)
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert want.measured is None
    assert got.measured is not None
    assert min(got.measured.seconds, got.measured.dense_seconds) > 0
    moved = Model().cuda()
    sk.prune(moved, sk.SemiSparse(), **{**options, "reconstruct": "block"})
    assert {each.device.type for each in moved.parameters()} == {"cuda"}


def test_hooks_biases_and_conv1d_outlast_pruning() -> None:
    need("transformers")
    lib = importlib.import_module("transformers")
    config = lib.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=1)
    model = lib.GPT2LMHeadModel(config).eval()
    layer, calls = model.transformer.h[0].mlp.c_fc, []
    bias, handle = layer.bias, layer.register_forward_hook(lambda *args: calls.append(args))
    words = torch.randint(64, (2, 8))
    sk.prune(model, HALF, calibration=[{"input_ids": words}], method="wanda", reconstruct="layer")
    new = model.transformer.h[0].mlp.c_fc
    assert new is not layer
    assert new.bias is bias
    calls.clear()
    with torch.no_grad():
        out = model(words).logits
        assert len(calls) == 1
        handle.remove()
        sk.densify_(model)
        assert type(model.transformer.h[0].mlp.c_fc) is type(layer)
        torch.testing.assert_close(model(words).logits, out, atol=1e-4, rtol=1e-4)
        assert len(calls) == 1


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("config", [sk.BlockSparse(16, 0.5), sk.SemiSparse()])
def test_inputs_that_hardly_vary_leave_moments_that_have_an_inverse(config: Any, spread: float):
    model = nn.Sequential(nn.Linear(64, 32))
    draw = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(64, generator=draw) + spread * torch.randn(100, 64, generator=draw)
    wanted = model(x).detach()
    (row,) = sk.prune(model, config, calibration=[x]).replaced
    assert (row.error_after or 0.0) < 1e-2  # by the bias
    assert (model(x).detach() - wanted).norm() < 1e-2 * wanted.norm()
