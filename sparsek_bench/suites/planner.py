"""Does the planner choose well? Its choice among the ways to store a weight, beside the best measured.

One case is a suite of layers, each with a share of blocks to keep. For every layer all options of `sk.choose_format`
are made, checked and timed in the same rounds. The choices compared with the fastest of them are that of the
predictions, and that of short rounds of the planner's own, timed before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsek.core.clock import Times
from sparsek.core.device import card_of
from sparsek.core.errors import Unsupported
from sparsek.core.parsing import named
from sparsek.products.ops import choose as choosing
from sparsek.products.ops.linear import linear
from sparsek.products.ops.weight_formats import FORMATS, WeightFormat, combinations, plan_of, run_plan
from sparsek.testing.budget import Gate
from sparsek.testing.compare import Expected, worst
from sparsek_bench.engine import compilation, options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Case, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.run import Outcome, PeerResult, beside, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.tables import CASE, MS
from sparsek_bench.engine.timed_call import Timed

# Hashed for the records of the planner, with the model of the dense product: how W is stored and predicted.
PLANNER = "ops.weight_formats"
# A choice within this of the best counts as good.
NEAR = 1.05
GATE_TOKENS = 64
# Fifty layers with a dozen options each are to take a minute and a half, once their kernels are compiled.
INNER_MS = 2.0
OWN_ROUNDS = 3


@dataclass(frozen=True)
class Layer:
    """y [tokens, n] = x [tokens, k] @ W.T, of W a share `keep` of the blocks kept."""

    tokens: int
    n: int
    k: int
    keep: float

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.k} to {self.n}, {self.keep * 100:.4g} %"


# Attention and MLP layers of models with 2048 to 8192 features, from decoding to long prompts. The wider two densities
# go with every other number of tokens.
SHAPES = ((2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
TOKENS = (16, 256, 1024, 4096, 8192)
KEEPS = ((0.5, 0.125), (0.25, 0.0625))
# Shapes, tokens and densities for which no model was fitted. Of the first four shapes suite "other" has the first four
# numbers of tokens.
UNSEEN_SHAPES = (
    *((5120, 5120), (11008, 4096), (4096, 11008), (3072, 12288), (6144, 6144)),
    *((13824, 5120), (5120, 13824), (18944, 3584), (3584, 18944), (2560, 7680)),
)
UNSEEN_TOKENS = (32, 512, 2048, 6144, 96)
UNSEEN_KEEPS = ((0.375, 0.1), (0.2, 0.07))  # of the first four shapes, and of the others


def _unseen(shapes: int, tokens: int) -> tuple[Layer, ...]:
    """The layers of so many of these shapes and numbers of tokens."""
    return tuple(
        Layer(count, n, k, UNSEEN_KEEPS[at >= 4][(at + place) % 2])
        for at, (n, k) in enumerate(UNSEEN_SHAPES[:shapes])
        for place, count in enumerate(UNSEEN_TOKENS[:tokens])
    )


LAYERS: Mapping[str, tuple[Layer, ...]] = {
    "models": tuple(
        Layer(tokens, n, k, keep)
        for n, k in SHAPES
        for at, tokens in enumerate(TOKENS)
        for keep in KEEPS[at % 2]
    ),
    "other": _unseen(4, 4),
    "unseen": _unseen(10, 5),
    "few": (Layer(64, 128, 256, 0.5), Layer(48, 256, 128, 0.25)),
}


def _listed(formats: str) -> list[str] | None:
    """The formats, as `choose_format` takes them."""
    return None if formats == "all" else formats.split("+")


@dataclass(frozen=True)
class PlannerCase(Case):
    """All layers of a suite in one dtype. `formats`: those considered, joined by +; "all": that have kernels."""

    op: ClassVar[str] = "planner"
    rated: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = ("near", "near_measured", "count", "worst")
    sources: ClassVar[tuple[str, ...]] = ("plan.dense",)

    layers: str = options.field(
        "models",
        f"Layers with densities: {', '.join(LAYERS)}.",
        check=lambda name, layers: named(LAYERS, layers),
        usual="models",
    )
    dtype: str = options.dtype()
    formats: str = options.field(
        "all",
        f"all that have kernels, or some of {', '.join(FORMATS)}, joined by +.",
        check=lambda name, formats: list(combinations(_listed(formats), (), ())),
        name="format",
        usual="all",
    )

    @property
    def name(self) -> str:
        """ "50 layers x densities of models, bf16"."""
        shown = "" if self.formats == "all" else f", {self.formats}"
        return f"{len(LAYERS[self.layers])} layers × densities of {self.layers}, {self.dtype}{shown}"

    @property
    def dense_flops(self) -> float:
        return sum(2.0 * each.tokens * each.n * each.k for each in LAYERS[self.layers])

    def run(self, *, device: torch.device, rounds: int, report: Callable[[str], None], **_: Any) -> Outcome:
        """One record of all layers. Raises GateError if a result of any option is outside its budget."""
        layers = LAYERS[self.layers]
        judged: list[LayerChoice] = []
        if device.type == "cuda":
            report("compile the kernels of all layers")
            compilation.compiled([(device, each, self) for each in layers], prepared)
        seen = Sensors(device)
        for number, layer in enumerate(layers, start=1):
            near = sum(each.of_best(each.choice) <= NEAR for each in judged)
            report(f"layer {number} of {len(layers)}, {near} choices good so far: {layer.name}")
            judged.append(_judge(layer, self, device, rounds))
            seen.sample()
        record = _record(self, judged, device, seen)
        return Outcome(self, (record,), {}, {"planner": _missed(record, judged)})


class LayerChoice(NamedTuple):
    """One layer: its options, their times by name, the option that predictions choose, and what a measurement chose."""

    layer: Layer
    options: tuple[choosing.Option, ...]
    times: Mapping[str, Times]
    choice: str
    measured: str
    gate: Gate

    @property
    def best(self) -> str:
        return min(self.times, key=lambda name: self.times[name].median)

    def of_best(self, name: str) -> float:
        """The time of an option over the best one's."""
        return self.times[name].median / self.times[self.best].median

    def as_config(self) -> dict[str, Any]:
        """The layer in a record: every option with predicted and measured microseconds."""
        by_name = {each.name: each for each in self.options}
        return {
            "layer": self.layer.name,
            "choice": self.choice,
            "kernel": by_name[self.choice].kernel,
            "measured": self.measured,
            "best": self.best,
            "of_best": round(self.of_best(self.choice), 4),
            "us": {
                name: [round(each.predicted * 1e6, 2), round(self.times[name].median * 1e3, 2)]
                for name, each in by_name.items()
                if name in self.times
            },
        }


def _drawn(
    layer: Layer, case: PlannerCase, device: torch.device
) -> tuple[Tensor, Tensor, list[WeightFormat]]:
    """W and x of a layer, and the formats considered."""
    draw = Draw(device, case.drawn, 0)
    listed = list(combinations(_listed(case.formats), choosing.BLOCK, [layer.keep]))
    return draw.weight(layer.n, layer.k), draw.normal(layer.tokens, layer.k), listed


def prepared(
    given: tuple[torch.device, Layer, PlannerCase],
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The kernel, block and config of every option of a layer, as text, and a call."""
    device, layer, case = given
    w, x, listed = _drawn(layer, case, device)
    for form in listed:
        if form.format == "dense" or form.why_not(w):
            continue
        weight = form.convert(w)
        try:
            plan = plan_of(x, weight, kernel=form.kernel)
        except Unsupported:
            continue
        yield f"{plan.kernel} {form.block} {plan.config!r}", partial(run_plan, plan, x, weight)


def _judge(layer: Layer, case: PlannerCase, device: torch.device, rounds: int) -> LayerChoice:
    card = card_of(device)
    w, x, listed = _drawn(layer, case, device)
    with torch.no_grad():
        found = list(choosing.consider(w, x, listed, card))
        gates = [_gated(layer, option, weight, x) for option, weight in found if weight is not None]
        own = choosing.measure(found, x, card, OWN_ROUNDS, INNER_MS)
        times = choosing.measure(found, x, card, rounds, INNER_MS)
    every = tuple(option for option, _ in found)
    timed = [replace(option, measured=own[at].median / 1e3) for at, option in enumerate(every) if at in own]
    by_name = {every[at].name: each for at, each in times.items()}
    chosen = [choosing.choose(each, choosing.Requirement(min_norm=0)).name for each in (every, timed)]
    return LayerChoice(layer, every, by_name, *chosen, gate=worst(gates))


def _gated(layer: Layer, option: choosing.Option, weight: Any, x: Tensor) -> Gate:
    step = max(1, x.shape[0] // GATE_TOKENS)
    y = linear(x, weight, kernel=option.form.kernel)
    return passed(layer, f"{option.name} by {option.kernel}", Expected.of(x[::step], weight).judge(y[::step]))


def _record(case: PlannerCase, judged: Sequence[LayerChoice], device: torch.device, seen: Sensors) -> Record:
    def total(names: Sequence[str]) -> PeerResult:
        """All layers one after another, each with the option of its name."""
        times = [each.times[name] for each, name in zip(judged, names, strict=True)]
        median, least, most = (sum(getattr(one, of) for one in times) for of in ("median", "min", "max"))
        took = Times(median, least, most, min(one.rounds for one in times))
        return PeerResult(took, case.dense_flops / median / 1e9, {})

    chosen = total([each.choice for each in judged])
    peers = {name: total([getattr(each, name) for each in judged]) for name in ("best", "measured")}
    for name in ("dense", "2:4"):
        if all(name in each.times for each in judged):
            peers[name] = total([name] * len(judged))
    more: dict[str, Any] = beside(chosen.rate, peers, rated=True) | {
        "config": {"layers": [each.as_config() for each in judged]},
        "near": sum(each.of_best(each.choice) <= NEAR for each in judged),
        "near_measured": sum(each.of_best(each.measured) <= NEAR for each in judged),
        "count": len(judged),
        "worst": round(max(each.of_best(each.choice) for each in judged), 4),
    }
    gate = worst([each.gate for each in judged])
    return record_of(case, Timed(PLANNER), chosen.times, gate, device, seen, **more)


def _missed(record: Record, judged: Sequence[LayerChoice]) -> str:
    """In words: how many choices are good, and which are not, the worst first."""
    head = (
        f"{record['near']} of {record['count']} choices within {(NEAR - 1) * 100:.0f} % of the best by prediction, "
        f"{record['near_measured']} by the planner's own rounds"
    )
    bad = [(each.of_best(each.choice), each) for each in judged if each.of_best(each.choice) > NEAR]
    bad.sort(key=lambda pair: -pair[0])
    return "; ".join(
        [head, *(f"{one.layer.name}: {one.choice} takes {ratio:.2f}x {one.best}" for ratio, one in bad)]
    )


TABLE = Table(
    op="planner",
    title="the planner's choice",
    headings={
        "best": "the best measured",
        "measured": "its own rounds' choice",
        "dense": "dense",
        "2:4": "2:4",
    },
    dense=("dense",),
    columns=(
        CASE,
        MS,
        Column("within 5 %, by prediction", lambda record: f"{record['near']} of {record['count']}"),
        Column("worst choice", lambda record: f"{record['worst']:.2f}x the best"),
        Column("by its own rounds", lambda record: f"{record['near_measured']} of {record['count']}"),
    ),
    note=(
        "For every layer, each format of `choose_format` is checked and timed in the same rounds: dense, 2:4, and BSR "
        "and BSR24 in blocks of 64 and 128 with the given share of blocks. The time is that of the formats chosen by "
        "prediction, summed over all layers. By its own rounds: `choose_format` on a GPU, which times the formats "
        "briefly. 'Within 5 %' counts layers whose format takes at most 1.05 times as long as the fastest. Over dense "
        "and over 2:4: the sum of their times over SparseK's."
    ),
    beside=("dense", "2:4"),
)
BENCH = Bench(
    "planner",
    suites={name: rows("auto", PlannerCase(name)) for name in ("models", "other")},
    kinds=(PlannerCase,),
    tables=(TABLE,),
    small="--layers few --dtype fp32",
    kernels="",
    rounds=5,
    slowest=150.0,
)
