"""generate() of transformers with SparseK's attention, over sdpa: milliseconds of a token."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core.clock import Times, wait
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Column, Table
from sparsek_bench.engine.case import Bar, Case, length_name, rows
from sparsek_bench.engine.peer import UnavailableError, setting_up
from sparsek_bench.engine.run import Outcome, PeerResult, beside, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, MS, faster_than, target
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.llama import near

SDPA, OURS = "sdpa", "sparsek"
CACHES = ("dynamic", "static")
MODULE = "integrations.transformers"


@dataclass(frozen=True)
class GenerateCase(Case):
    """A token of `sequences` after `tokens` others, by generate() of transformers, which compiles static caches on a
    GPU. `window`: of Mistral's attention; 0: of Llama, which sees all tokens. `padding`: tokens of the second sequence
    that are padding.
    """

    op: ClassVar[str] = "generate"
    rated: ClassVar[bool] = False
    hosted: ClassVar[bool] = True
    dense_flops: ClassVar[float] = 0.0

    sequences: int = options.size("Sequences", "1", usual=1)
    tokens: int = options.size("Tokens before", "512", usual=512)
    cache: str = options.choice("Caches", CACHES, usual="dynamic")
    window: int = options.checked(lambda name, value: None, usual=0)
    padding: int = options.checked(lambda name, value: None, usual=0)
    new: int = options.size("New tokens", "24", usual=24)
    layers: int = options.size("Layers", "16", usual=16)
    width: int = options.size("Features of a token", "2048", usual=2048)
    heads: int = options.size("Heads of q", "16", usual=16)
    vocabulary: int = options.size("Tokens of the head", "32000", usual=32000)
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.new < 4 or self.padding >= self.tokens or (self.padding and self.sequences < 2):
            raise InvalidInput(
                "four new tokens are the least, and padding is of the second of several sequences"
            )

    @property
    def name(self) -> str:
        """One short line: "8 x 4K dynamic, window 1024, 16 layers of 2048, bf16"."""
        more = f", window {self.window}" if self.window else ""
        more += f", {self.padding} of padding" if self.padding else ""
        size = f"{self.sequences} x {length_name(self.tokens)} {self.cache}"
        return f"{size}{more}, {self.layers} layers of {self.width}, {self.dtype}"

    def model(self, device: torch.device) -> Any:
        """A model of transformers with random weights."""
        import transformers

        import sparsek.integrations.transformers  # noqa: F401

        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": 11 * self.width // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": 4 * self.tokens,
        }
        if self.window:
            config: Any = transformers.MistralConfig(**sizes, sliding_window=self.window)
            kind: Any = transformers.MistralForCausalLM
        else:
            config, kind = transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM
        torch.manual_seed(0)
        with device:
            return kind._from_config(config, dtype=self.drawn, attn_implementation=SDPA).eval()

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens, and which of them are there."""
        generator = torch.Generator("cpu").manual_seed(1)
        shape = self.sequences, self.tokens
        ids = torch.randint(1, self.vocabulary, shape, generator=generator, device="cpu")
        there = torch.ones_like(ids)
        there[1:2, : self.padding] = 0
        return ids.to(device), there.to(device)

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """Gates the logits of a step, then interleaves it with sdpa. Raises GateError for wrong ones."""
        report("model")
        try:
            with setting_up("transformers"):
                model = self.model(device)
        except UnavailableError as error:
            return Outcome(self, (), {MODULE: [str(error)]}, {})
        ids, there = self.inputs(device)
        report("gate")
        found, same = (logits(model, way, ids, there) for way in (OURS, SDPA))
        wider = torch.float64 if self.drawn == torch.float32 else torch.float32
        exact = logits(copy.deepcopy(model).to(wider), SDPA, ids, there)
        gate = passed(self, MODULE, near(found, same, exact))
        del exact
        samples: dict[str, list[float]] = {OURS: [], SDPA: []}
        seen = Sensors(device)
        for index in range(rounds + 1):  # the first compiles
            report(f"round {index} of {rounds}")
            for way in samples if index % 2 else reversed(samples):
                model.set_attn_implementation(way)
                took = self.seconds(model, ids, there)
                if index:
                    samples[way].append(took * 1e3)
                seen.sample()
        model.set_attn_implementation(OURS)
        ran = executed_by(lambda: self.seconds(model, ids, there))
        times = {way: Times.of(each) for way, each in samples.items()}
        sdpa = PeerResult(times[SDPA], 1 / times[SDPA].median, {})
        more = beside(1 / times[OURS].median, {SDPA: sdpa}, rated=False) | {"ran": ran}
        record = record_of(self, Timed(MODULE), times[OURS], gate, device, seen, **more)
        return Outcome(self, (record,), {}, {})

    def seconds(self, model: Any, ids: Tensor, there: Tensor) -> float:
        """The median time of a token but the first three."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        at: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
                wait(ids.device)
                at.append(time.perf_counter())
                return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        static = {"cache_implementation": "static"} if self.cache == "static" else {}
        model.generate(
            ids,
            attention_mask=there,
            max_new_tokens=self.new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([Clock()]),
            **static,
        )
        return statistics.median(b - a for a, b in pairwise(at[2:]))


@torch.no_grad()
def logits(model: Any, way: str, ids: Tensor, there: Tensor) -> Tensor:
    """The logits of a step of decoding."""
    from transformers import DynamicCache

    model.set_attn_implementation(way)
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], attention_mask=there[:, :-1], past_key_values=cache, logits_to_keep=1)
    return model(ids[:, -1:], attention_mask=there, past_key_values=cache).logits


BARS: Mapping[Any, tuple[Bar, ...]] = {
    each: (Bar(SDPA, 1.02, 0.9),)
    for each in (
        GenerateCase(),
        GenerateCase(cache="static", layers=8),
        GenerateCase(8, 4096),
        GenerateCase(4, 512, padding=100),
        GenerateCase(8, 4096, window=1024),
    )
}
GENERATE = rows("auto", *BARS)
GENERATED = Table(
    op="generate",
    title="tokens of transformers",
    headings={SDPA: "sdpa"},
    dense=(SDPA,),
    columns=(CASE, MS, Column("over sdpa", lambda record: faster_than(SDPA)(record)[:-1]), target(BARS, "")),
    note=(
        'Milliseconds of a token in `generate()` with `attn_implementation="sparsek"`: medians of whole generations, '
        "interleaved with sdpa's, of a model with random weights. A static cache is compiled, as `generate()` does it. "
        "Over sdpa: 1.50 means 1.5 times as fast; a target is the most that a token may take, as a multiple of sdpa's."
    ),
    usual=("16 layers of 2048", "bf16"),
    ratios=False,
)
