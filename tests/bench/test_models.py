"""Whole models through the run: prefill, decoding, training, new patterns, generate() and pruning, in small sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core import clock
from sparsek.nn.gated import GatedMLP
from sparsek_bench.engine import report, run
from sparsek_bench.suites import llama, models
from sparsek_bench.suites.generate import GenerateCase
from sparsek_bench.suites.models import BENCH, MODELS, PATTERNS, ModelCase, PatternStepsCase
from sparsek_bench.suites.prune_memory import PruneMemoryCase
from tests.bench.runs import measured

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "hidden": 96,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 50,
    "block": (16, 16),
    "dtype": "fp32",
}


def small(work: str = "prefill", sequences: int = 2, tokens: int = 24, **more: Any) -> ModelCase:
    return ModelCase(work, sequences, tokens, **SIZES | more)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "WALL_WARMUP", 0)
    monkeypatch.setattr(models, "WORKS", dict.fromkeys(models.WORKS, 1))
    monkeypatch.setattr(models, "WHOLE_VOCABULARY", 100)


def record_of(case: Any) -> Any:
    (record,) = measured(case, rounds=1).records
    return record


@pytest.mark.parametrize("work", ["prefill", "decode", "train"])
def test_a_model_is_measured_over_the_same_dense_one(work: str) -> None:
    case = small(work)
    record = record_of(case)
    dense = record["peers"]["torch_dense"]["ms"]["median"]
    assert record["ratio"]["torch_dense"] == pytest.approx(dense / record["ms"]["median"], rel=1e-2)
    assert record["predicted"] is None  # for a GPU
    assert record["whole"] > 0
    assert any(name.startswith("sparsek.nn") for name in record["ran"])


def test_a_compiled_model_is_held_to_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile(self: Any, **options: Any) -> None:
        compiled.append(self)
        torch.nn.Module.compile(self, backend="eager", **options)

    monkeypatch.setattr(llama.Block, "compile", compile, raising=False)
    assert record_of(small(mode="compiled"))["ratio"]["torch_dense"] > 0
    assert len(compiled) == 4


def test_the_mlps_alone_are_sparse_and_fused() -> None:
    dense, sparse, rows = small().models(CPU)
    assert {row.name.split(".")[-1] for row in rows.replaced} == {"gate", "up", "down"}
    assert len(rows.replaced) == 6
    assert all(isinstance(block.mlp, GatedMLP) for block in sparse.blocks)
    assert not any(isinstance(block.mlp, GatedMLP) for block in dense.blocks)


def test_a_step_of_decoding_is_the_last_token_of_a_prefill() -> None:
    case = small("decode", tokens=6)
    model: Any = llama.llama(llama.Sizes(2, 64, 96, 4, 2, 50), 6, torch.float64, CPU)
    ids = torch.randint(50, (2, 6))
    seen: list[Any] = []
    for block in model.blocks:
        attention = block.attention
        x: list[Any] = []
        attention.register_forward_pre_hook(lambda module, given, x=x: x.append(given[0]))
        seen.append((attention, x))
    with torch.no_grad():
        wanted = model(ids, None, True)
        kept = []
        for attention, (x,) in seen:
            k, v = (each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (attention.k, attention.v))
            kept.append(llama.KeyCache(llama.turned(k, model.cos, model.sin).clone(), v.clone()))
        for each in kept:
            each.k[:, :, -1:].zero_()
            each.v[:, :, -1:].zero_()
        torch.testing.assert_close(model(ids[:, -1:], kept, True), wanted)
    assert case.kept(CPU)[0].k.shape == kept[0].k.shape


def test_a_wrong_sparse_model_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModelCase.models

    def wrong(self: ModelCase, device: torch.device) -> Any:
        sparse: Any
        dense, sparse, rows = made(self, device)
        sparse.blocks[1].mlp.register_forward_hook(lambda module, given, y: 1.5 * y)
        return dense, sparse, rows

    gate = models.judged_by_dense

    def held(sparse: Any, compute: Any) -> Any:
        right = made(small(), CPU)[1]
        return gate(right, lambda model: compute(sparse if model is right else model))

    monkeypatch.setattr(ModelCase, "models", wrong)
    monkeypatch.setattr(models, "judged_by_dense", held)
    with pytest.raises(run.GateError, match="exceeds the budget"):
        record_of(small())


@pytest.mark.parametrize("layers", [0, 1])
def test_new_patterns_are_a_share_of_a_hundred_steps(layers: int) -> None:
    sizes: dict[str, Any] = SIZES | {"layers": layers}
    case = PatternStepsCase("train", 1, 16, **sizes)
    record = record_of(case)
    assert 0 < record["ratio"]["kept"] < 1.2
    assert any("set_pattern" in name for name in record["ran"])
    assert ("a layer of 64" in case.name) == (layers == 0)


def test_tokens_of_generate_take_turns_with_sdpa() -> None:
    pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 40, "dtype": "fp32"}
    record = record_of(GenerateCase(2, 24, "dynamic", 8, 5, 4, **sizes))
    assert record["peers"]["sdpa"]["ms"]["median"] > 0
    assert any("transformers" in name for name in record["ran"])


def test_the_memory_of_pruning_is_over_the_checkpoint() -> None:
    record = record_of(PruneMemoryCase(2, 32, 64, 2, 1, 2, 16, (16, 16), 0.5, "fp32"))
    assert record["peak_gb"] is None
    assert record["checkpoint_gb"] > record["block_gb"] > record["layer_gb"] > 0


def test_the_tables_show_ratios_predictions_and_verdicts(make_record: Any) -> None:
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    ms = {"ms": {"median": 0.38, "min": 0.3, "max": 0.4, "rounds": 5}, "tflops": None}
    given = {"peers": {"torch_dense": ms}, "ratio": {"torch_dense": 1.9}, "predicted": 2.02, "whole": 1.8}
    record = make_record(next(iter(MODELS)), **given, **nulls)
    line = report.markdown([record], "model").splitlines()[2]
    assert (
        line
        == "| prefill 1 x 4096 | 0.200 ± 0.030 | 1.90x | 2.02x | 1.80x | 1.85 over torch dense, met: 1.90 |"
    )
    kept = {"peers": {"kept": ms}, "ratio": {"kept": 0.996}}
    record = make_record(next(iter(PATTERNS)), **kept, **nulls)
    line = report.markdown([record], "pattern_steps").splitlines()[2]
    assert line.endswith("| 0.40 % | at most 1.01 of kept patterns, met: 1.00 |")
    (row,) = BENCH.suites["prune"]
    sizes = {
        "peak_gb": 0.5,
        "block_gb": 0.1,
        "layer_gb": 0.02,
        "batch_gb": 0.1,
        "forward_gb": 0.3,
        "host_gb": 1.2,
        "checkpoint_gb": 1.0,
    }
    record = make_record(row.case, peers={}, ratio={}, **sizes, **nulls)
    line = report.markdown([record], "prune_memory").splitlines()[2]
    assert "device at most 3x, met: 2.50; host at most 1.5x, met: 1.20" in line


def test_predictions_leave_the_rest_as_measured() -> None:
    _, _, rows = small().models(CPU)
    timed = replace(
        rows, rows=tuple(replace(row, seconds=1e-3, dense_seconds=2e-3) for row in rows.rows if row.format)
    )
    assert small().predicted(timed, 12.0) == 2.0
    assert small("train").predicted(timed, 36.0) == 2.0
    ms = {"torch_dense": 9.0, "sparse": 5.0, "head": 1.0, "whole head": 8.0}
    assert small().whole(ms) == round((8 * 16 + 8) / (4 * 16 + 8), 4)
