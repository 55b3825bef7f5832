"""Whole models: prefill, decoding and training with sparse MLPs over the dense model, and what new patterns, generate()
of transformers and pruning take.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.core.clock import Times, wall_rounds
from sparsek.core.errors import InvalidInput
from sparsek.models.config import BlockSparse
from sparsek.models.report import ModelReport
from sparsek.models.sparsify import densify_, sparsify_
from sparsek.products.formats.pattern import grid_of
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Bar, Case, block_name, rows, stored_name
from sparsek_bench.engine.run import Outcome, PeerResult, beside, captured, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, MS, SPEEDUP, target
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.generate import GENERATE, GENERATED, GenerateCase
from sparsek_bench.suites.llama import KeyCache, Llama, Sizes, llama, near
from sparsek_bench.suites.mlp import MODES
from sparsek_bench.suites.prune_memory import PRUNE, PRUNED, PruneMemoryCase

DENSE, KEPT = "torch_dense", "kept"
# Calls of a sample, by what is measured.
WORKS = {"prefill": 5, "decode": 50, "train": 2}
# The whole model and its head, which the layers measured are a part of.
WHOLE_LAYERS, WHOLE_VOCABULARY = 32, 128256
EVERY = 100  # steps with one pattern


@dataclass(frozen=True)
class ModelCase(Case):
    """A model of Llama's shapes, whose MLPs are sparse: `work` on `sequences` of `tokens`, over the same dense one.

    "prefill": the logits of the last token. "decode": a token of each sequence after `tokens` others, in a CUDA graph.
    "train": forward, backward and AdamW. Wall time until the device is idle.
    """

    op: ClassVar[str] = "model"
    rated: ClassVar[bool] = False
    hosted: ClassVar[bool] = True
    extra: ClassVar[tuple[str, ...]] = ("predicted", "whole")
    dense_flops: ClassVar[float] = 0.0

    work: str = options.choice("What is measured", WORKS, usual="prefill")
    sequences: int = options.size("Sequences", "1", usual=1)
    tokens: int = options.size("Tokens of each", "4096", usual=4096)
    mode: str = options.choice("How it is run", MODES, usual="eager")
    layers: int = options.size("Layers", "8", usual=8)
    width: int = options.size("Features of a token", "4096", usual=4096)
    hidden: int = options.size("Features of an MLP", "14336", usual=14336)
    heads: int = options.size("Heads of q", "32", usual=32)
    kv_heads: int = options.size("Heads of k and v", "8", usual=8)
    vocabulary: int = options.size("Tokens of the head", "1024", usual=1024)
    block: tuple[int, int] = options.block(usual=(128, 128))
    density: float = options.share(default="0.25", usual=0.25)
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise InvalidInput(f"{self.width} features are not {self.heads} heads over {self.kv_heads}")

    @property
    def name(self) -> str:
        """One short line: "prefill 1 x 4096, 8 layers of 4096 and 14336, block 128 25 % bf16"."""
        mode = "" if self.mode == "eager" else f", {self.mode}"
        return f"{self.work} {self.sequences} x {self.tokens}{mode}, {self.model_name}"

    @property
    def model_name(self) -> str:
        stored = stored_name(block_name(self.block), self.density, self.dtype)
        return f"{self.layers} layers of {self.width} and {self.hidden}, {stored}"

    def models(self, device: torch.device) -> tuple[Llama, Llama, ModelReport]:
        """The dense model, the sparse one, and its report with predictions for the device."""
        sizes = self.layers, self.width, self.hidden, self.heads, self.kv_heads, self.vocabulary
        dense = llama(Sizes(*sizes), self.tokens, self.drawn, device)
        sparse = copy.deepcopy(dense)
        rows = self.sequences * (1 if self.work == "decode" else self.tokens)
        config = {"*.mlp.*": BlockSparse(self.block, self.density)}
        card = "cuda" if device.type == "cuda" else None
        return dense, sparse, sparsify_(sparse, config, card=card, tokens=rows)

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """Gates the result, or the gradient of a training step; then interleaved samples of both models and of two
        heads. Raises GateError for a wrong one.
        """
        report("models")
        dense, sparse, predictions = self.models(device)
        ids = self.drawn_ids(device)
        if self.mode == "compiled":
            torch.compiler.reset()
            for block in (*dense.blocks, *sparse.blocks):
                block.compile(fullgraph=True, dynamic=False)
        report("gate")
        compute = self.gradient if self.work == "train" else self.result
        gate = passed(self, "models.sparsify", judged_by_dense(sparse, partial(compute, ids=ids)))
        heads = [head(self, size, device) for size in (self.vocabulary, WHOLE_VOCABULARY)]
        calls = {"sparse": self.call(sparse, ids), DENSE: self.call(dense, ids)}
        ran = executed_by(calls["sparse"])
        calls |= {"head": heads[0], "whole head": heads[1]}
        if self.work == "decode" and device.type == "cuda":
            report("graphs")
            wanted = calls["sparse"]()
            graphs = {name: captured([call], device) for name, call in calls.items()}
            graphs["sparse"][0]()
            found = graphs["sparse"][1][0]
            passed(self, "models.sparsify", near(found, wanted, wanted))
            calls = {name: replay for name, (replay, _) in graphs.items()}
        report("samples")
        seen = Sensors(device)
        times = wall_rounds(calls, device, rounds, count=WORKS[self.work], on_sample=seen.sample)
        ms = {name: each.median for name, each in times.items()}
        more = beside(1 / ms["sparse"], {DENSE: PeerResult(times[DENSE], 1 / ms[DENSE], {})}, rated=False)
        more |= {"predicted": self.predicted(predictions, ms[DENSE]), "whole": self.whole(ms), "ran": ran}
        plan = Timed("models.sparsify")
        return Outcome(self, (record_of(self, plan, times["sparse"], gate, device, seen, **more),), {}, {})

    def drawn_ids(self, device: torch.device) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(1)
        shape = self.sequences, 1 if self.work == "decode" else self.tokens
        return torch.randint(self.vocabulary, shape, generator=generator, device="cpu").to(device)

    def kept(self, device: torch.device) -> list[KeyCache]:
        """Keys and values of each layer, N(0, 1)."""
        shape = self.sequences, self.kv_heads, self.tokens, self.width // self.heads
        generator = torch.Generator(device).manual_seed(2)
        drawn = torch.randn(self.layers, 2, *shape, dtype=self.drawn, device=device, generator=generator)
        return [KeyCache(*each) for each in drawn]

    @torch.no_grad()
    def result(self, model: Llama, ids: Tensor) -> Tensor:
        """The logits of the last tokens."""
        kept = None
        if self.work == "decode":
            dtype = model.embedding.weight.dtype
            kept = [KeyCache(k.to(dtype), v.to(dtype)) for k, v in self.kept(ids.device)]
        return model(ids, kept, True)

    def gradient(self, model: Llama, ids: Tensor) -> Tensor:
        """The gradient of the embedding, which those of all layers meet in."""
        model.zero_grad()
        loss_of(model(ids), ids).backward()
        found = model.embedding.weight.grad
        assert found is not None
        found = found.clone()
        model.zero_grad()
        return found

    def call(self, model: Llama, ids: Tensor) -> Callable[[], Any]:
        """What is timed."""
        if self.work == "train":
            return training_step(model, lambda: loss_of(model(ids), ids))
        kept = self.kept(ids.device) if self.work == "decode" else None
        return torch.no_grad()(partial(model, ids, kept, True))

    def predicted(self, report: ModelReport, dense_ms: float) -> float | None:
        """The planner's prediction of the time over the dense model's: products as predicted, the rest as measured. The
        two products of a backward pass are taken to be as fast as the forward one. None without predictions.
        """
        timed = [row for row in report.replaced if row.seconds is not None and row.dense_seconds is not None]
        if not timed:
            return None
        saved = sum((row.dense_seconds or 0.0) - (row.seconds or 0.0) for row in timed) * 1e3
        return round(1 / (1 - saved * (3 if self.work == "train" else 1) / dense_ms), 4)

    def whole(self, ms: dict[str, float]) -> float:
        """The speedup of 32 such layers with a head of 128,256 tokens: measured layers, and the measured head."""
        dense, sparse = (
            max(0.0, ms[name] - ms["head"]) * WHOLE_LAYERS / self.layers + ms["whole head"]
            for name in (DENSE, "sparse")
        )
        return round(dense / sparse, 4)


def judged_by_dense(sparse: nn.Module, compute: Callable[[Any], Tensor]) -> Gate:
    """Compares what a sparse model computes with the dense one of the same stored values, and with it exactly."""
    found = compute(sparse)
    same = copy.deepcopy(sparse)
    for each in same.modules():
        each._compiled_call_impl = None
    densify_(same)
    rough = compute(same)
    exact = compute(same.to(torch.float64 if rough.dtype == torch.float32 else torch.float32))
    return near(found, rough, exact)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean loss of each next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def training_step(model: nn.Module, loss: Callable[[], Tensor], made: Any = None) -> Callable[[], None]:
    """A step of AdamW, or of the optimizer that is `made`."""
    optimizer = made or torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def head(case: ModelCase, vocabulary: int, device: torch.device) -> Callable[[], Any]:
    """The work of a case in its head alone."""
    layer = nn.Linear(case.width, vocabulary, bias=False, device=device, dtype=case.drawn)
    rows = case.sequences, case.tokens if case.work == "train" else 1
    x = torch.randn(*rows, case.width, device=device, dtype=case.drawn)
    if case.work != "train":
        return torch.no_grad()(partial(layer, x))
    x.requires_grad_()
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    return training_step(layer, lambda: loss_of(layer(x), ids))


@dataclass(frozen=True)
class PatternStepsCase(ModelCase):
    """Training steps with a new pattern of every sparse layer each 100 steps: milliseconds of a step, the new patterns
    and what they make slower spread over the hundred. `layers` 0: one layer of `width`, without a model.
    """

    op: ClassVar[str] = "pattern_steps"
    extra: ClassVar[tuple[str, ...]] = ()

    layers: int = options.checked(lambda name, value: None, usual=8)

    def check(self) -> None:
        super().check()
        if (self.work, self.mode) != ("train", "eager") or self.layers < 0:
            raise InvalidInput("a new pattern is measured in training steps, eager, of 0 or more layers")

    @property
    def model_name(self) -> str:
        if self.layers:
            return super().model_name
        return f"a layer of {self.width}, {stored_name(block_name(self.block), self.density, self.dtype)}"

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """One record. Raises GateError for a wrong result of new patterns."""
        report("model")
        ids = self.drawn_ids(device)
        if self.layers:
            model: nn.Module = self.models(device)[1]
            loss = lambda: loss_of(model(ids), ids)  # noqa: E731
            compute = lambda model: self.result(model, ids)  # noqa: E731
        else:
            given = self.block, self.density
            layer = sk.nn.BlockSparseLinear.random(
                self.width, self.width, *given, dtype=self.drawn, device=device
            )
            model = nn.Sequential(layer)
            x = torch.randn(self.sequences * self.tokens, self.width, device=device, dtype=self.drawn)
            loss = lambda: model(x).square().mean()  # noqa: E731
            compute = torch.no_grad()(lambda model: model(x.to(next(model.parameters()).dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = training_step(model, loss, optimizer)
        layers = [each for each in model.modules() if isinstance(each, sk.nn.BlockSparseLinear)]
        generator = torch.Generator(device).manual_seed(3)
        step()
        masks = [[self.mask(layer, generator) for layer in layers] for _ in range(4)]
        turn = iter(range(10**9))
        steps = 4 if self.layers else 10

        def several() -> None:
            for _ in range(steps):
                step()

        def regrown() -> None:
            for layer, mask in zip(layers, masks[next(turn) % len(masks)], strict=True):
                layer.set_pattern(mask, optimizer)
            several()

        report("gate")
        ran = executed_by(regrown)
        gate = passed(self, "nn.regrow", judged_by_dense(model, compute))
        report("samples")
        seen = Sensors(device)
        times = wall_rounds({"new": regrown, KEPT: several}, device, rounds, count=1, on_sample=seen.sample)
        pairs = list(zip(times["new"].samples, times[KEPT].samples, strict=True))
        spread = Times.of([max(1e-6, kept / steps + (new - kept) / EVERY) for new, kept in pairs])
        alone = Times.of([kept / steps for _, kept in pairs])
        more = beside(1 / spread.median, {KEPT: PeerResult(alone, 1 / alone.median, {})}, rated=False)
        plan = Timed("nn.regrow")
        return Outcome(self, (record_of(self, plan, spread, gate, device, seen, **more, ran=ran),), {}, {})

    @staticmethod
    def mask(layer: sk.nn.BlockSparseLinear, generator: torch.Generator) -> Tensor:
        """As many random blocks in each row as the layer has now, on average."""
        sides = grid_of((layer.out_features, layer.in_features), layer.block)
        each = layer.weight.nnzb // sides[0]
        where = layer.values.device
        drawn = torch.rand(sides, generator=generator, dtype=torch.float32, device=where)
        return drawn.argsort(1) < each


def _percent_of_steps(record: Record) -> str:
    ratio = record["ratio"].get(KEPT)
    return "" if ratio is None else f"{100 * (1 / ratio - 1):.2f} %"


def _times(name: str) -> Callable[[Record], str]:
    return lambda record: "" if record[name] is None else f"{record[name]:.2f}x"


def _model(must: float, aim: float, work: str, sequences: int = 1, tokens: int = 4096) -> dict[Any, Any]:
    return {ModelCase(work, sequences, tokens, mode): (Bar(DENSE, must, aim),) for mode in MODES}


MODELS: dict[Any, Any] = {
    **_model(1.85, 2.0, "prefill"),
    **_model(1.5, 1.8, "decode", 1, 512),
    **_model(1.5, 1.8, "decode", 16, 512),
    **_model(1.85, 2.0, "train"),
}
PATTERNS: dict[Any, Any] = {
    PatternStepsCase("train", layers=each): (Bar(KEPT, 1.01, 1.001),) for each in (0, 8)
}
BENCH = Bench(
    "models",
    suites={
        "llama": rows("auto", *MODELS),
        "patterns": rows("auto", *PATTERNS),
        "generate": GENERATE,
        "prune": PRUNE,
    },
    kinds=(ModelCase, PatternStepsCase, GenerateCase, PruneMemoryCase),
    tables=(
        Table(
            op="model",
            title="models of Llama-8B shapes",
            headings={DENSE: "torch dense"},
            dense=(DENSE,),
            columns=(
                CASE,
                MS,
                SPEEDUP,
                Column("predicted", _times("predicted")),
                Column("32 layers, real head", _times("whole")),
                target(MODELS, ""),
            ),
            note=(
                "Wall time until the GPU is idle, over the same dense model in the same rounds, both eager or both "
                "compiled, of random weights. A step of decoding is replayed in a CUDA graph, after 512 tokens; a "
                "training step has forward, backward and fused AdamW. Predicted: the products of the MLPs as the "
                "planner predicts them, all else as measured dense. 32 layers: the measured layers four times, and a "
                "measured head of 128,256 tokens."
            ),
            usual=("8 layers of 4096 and 14336", "block 128 25 % bf16"),
            ratios=False,
        ),
        Table(
            op="pattern_steps",
            title="new patterns in training",
            headings={KEPT: "kept patterns"},
            dense=(KEPT,),
            columns=(CASE, MS, Column("new patterns take", _percent_of_steps), target(PATTERNS, "")),
            note=(
                "A training step with fused AdamW, whose layers get new patterns by `set_pattern` every 100 steps: "
                "wall time, new patterns included. The share is of the time of steps with kept patterns."
            ),
            usual=("block 128 25 % bf16",),
            ratios=False,
        ),
        GENERATED,
        PRUNED,
    ),
    small="--sequences 1 --tokens 64 --layers 2 --width 64 --hidden 128 --heads 4 --kv-heads 2 --block 32",
    kernels="",
    slowest=60.0,
)
