"""Attention and models over a mesh of GPUs as a benchmark: each over the same work on one GPU, in the same rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.clock import Times
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import Gate
from sparsek.testing.compare import worst
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Bar, SuiteRow, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.ranks import ranks_of
from sparsek_bench.engine.run import GateError, Outcome, PeerResult, beside, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.tables import CASE, MS, faster_than, judged, target
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.attention_grad import AttentionTrainCase
from sparsek_bench.suites.attention_masks import MASK_FORMS, Maker, MaskForm, parse_mask
from sparsek_bench.suites.mesh_models import MODEL_TABLE, MODELS, WIDER_MODELS, MeshModelCase
from sparsek_bench.suites.mesh_ranks import EXACT, ONE, WAYS, attention_rows, memory

MODULE = "distributed.attention"
GATED = 16384  # tokens of the sequence whose results are looked at, at most
SECONDS = 200.0  # of a row, until all its ranks are ended


def _mixed(case: Any, draw: Draw, longest: float) -> Maker:
    """Documents of 1/64 of the longest to the longest, uniform in the logarithm of their lengths."""
    generator = torch.Generator("cpu").manual_seed(draw.seed)
    drawn = (
        torch.rand(1024, generator=generator, dtype=torch.float64, device="cpu").mul_(-math.log(64)).exp_()
    )
    lengths = drawn.mul_(longest).long().clamp_(1)
    whole = lengths[lengths.cumsum(0) < case.q_len].tolist()
    given = {"block": case.block, "device": draw.device}
    return partial(BlockMask.block_diagonal, [*whole, case.q_len - sum(whole)], **given)


FORMS = (*MASK_FORMS, MaskForm("mixed:L", "mixed documents of up to {:g}".format, _mixed, causal=True))


def why_not(device: torch.device, ranks: int) -> str:
    """Why so many ranks do not run here, or ""."""
    count = torch.cuda.device_count() if device.type == "cuda" else ranks
    return (
        ""
        if count >= ranks
        else f"{ranks} ranks need as many GPUs of one host; this one has {count}: skipped"
    )


@dataclass(frozen=True)
class MeshCase(AttentionTrainCase):
    """A training step of attention over ranks, one on each GPU, by every way, over `sk.attention` on one GPU.

    Wall time until all ranks are done. The record is that of the fastest way; the others and one GPU stand beside it.
    `imbalance`: visited pairs of the fullest rank over the mean. `bytes_over_fewest`: what "gather" received in a
    forward pass, over the fewest that its queries need. `differing`: elements of out, dq, dk and dv of a small case
    that differ from one GPU's, by the ways that promise its bits. `unlike`: those that differed in `repeats`
    more calls.
    """

    op: ClassVar[str] = "mesh"
    rated: ClassVar[bool] = False
    hosted: ClassVar[bool] = True
    extra: ClassVar[tuple[str, ...]] = ("imbalance", "bytes_over_fewest", "differing", "unlike")
    peer_extra: ClassVar[tuple[str, ...]] = ()
    sources: ClassVar[tuple[str, ...]] = ()

    mask: str = options.field(
        "blocks:0.125",
        f"Masks, with numbers for the letters: {', '.join(kind.form for kind in FORMS)}.",
        check=lambda name, mask: parse_mask(mask, FORMS),
    )
    ranks: int = options.size("Ranks.", "2", usual=2)
    repeats: int = options.size("Calls of a small case whose bits are compared.", "20", usual=20)

    @property
    def mask_text(self) -> MaskForm:
        return parse_mask(self.mask, FORMS)

    @property
    def ways(self) -> tuple[str, ...]:
        """All; "both" only where ranks make several pairs."""
        return tuple(way for way in WAYS if way != "both" or (self.ranks > 2 and self.ranks % 2 == 0))

    @property
    def name(self) -> str:
        """As attention's, with the ranks."""
        more = "" if self.repeats == 20 else f", {self.repeats} repeats"
        return f"{super().name}, {self.ranks} ranks{more}"

    @property
    def small(self) -> MeshCase:
        """The case whose results are looked at: shorter, with as large a share of blocks."""
        tokens = min(self.q_len, GATED)
        form, mask = self.mask_text, self.mask
        if form.form == "topk:K":
            mask = f"topk:{max(1, round(form.numbers[0] * tokens / self.q_len))}"
        return replace(self, q_len=tokens, kv_len=tokens, mask=mask)

    def check(self) -> None:
        super().check()
        if self.q_len != self.kv_len:
            raise InvalidInput("a mesh is measured with as many keys as queries")

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """One record. A wrong way is left out, with a note; GateError if there is no other."""
        why = why_not(device, self.ranks)
        if why:
            return Outcome(self, (), {MODULE: [why]}, {})
        report("ranks")
        found = ranks_of(device.type, self.ranks).run(
            attention_rows, self, rounds, limit=SECONDS, report=report
        )[0]
        notes = {f"{at + 1}": text for at, text in enumerate(found["notes"])}
        for text in found["notes"]:
            report(text)
        best = found["best"]
        if best == ONE:
            raise GateError(f"{MODULE} on {self.name}: {'; '.join(found['notes'])}")
        times = {name: Times.of(samples) for name, samples in found["samples"].items()}
        others = {name: PeerResult(each, 1 / each.median, {}) for name, each in times.items() if name != best}
        received, fewest = (found[name].get("gather", 0.0) for name in ("received", "fewest"))
        extra = {
            "imbalance": round(found["imbalance"][best], 6),
            "bytes_over_fewest": round(received / fewest, 6) if fewest else 1.0,
            "differing": sum(found["differing"][name] for name in EXACT),
            "unlike": sum(found["unlike"].values()),
        }
        gate = worst([found["gates"][name] for name in found["samples"] if name != ONE])
        more = {"config": {"way": best}, **beside(1 / times[best].median, others, rated=False), **extra}
        record = record_of(
            self, Timed(MODULE), times[best], gate, device, Sensors(device), **more, ran=found["ran"]
        )
        return Outcome(self, (record,), {}, notes)


@dataclass(frozen=True)
class MeshMemoryCase(MeshCase):
    """The most memory of a card in a step by "gather", over half, or one in `ranks`, of what one GPU takes for all.

    In 1e9 bytes: `peak_gb` of the fullest rank, `one_gb` of one GPU; null on a CPU.
    """

    op: ClassVar[str] = "mesh_memory"
    extra: ClassVar[tuple[str, ...]] = ("peak_gb", "one_gb")

    @property
    def ways(self) -> tuple[str, ...]:
        return ("gather",)

    def run(
        self, *, device: torch.device, report: Callable[[str], None] = lambda text: None, **_: Any
    ) -> Outcome:
        """One record, whose time is that of one step."""
        why = why_not(device, self.ranks)
        if why:
            return Outcome(self, (), {MODULE: [why]}, {})
        found = ranks_of(device.type, self.ranks).run(memory, self, limit=SECONDS, report=report)[0]
        for text in found["notes"]:
            report(text)
        gate: Gate = found["gates"]["gather"]
        if not gate.passed:
            raise GateError(f"{MODULE} on {self.name}: {'; '.join(found['notes'])}")
        on_gpu = device.type == "cuda"
        sizes = {"peak_gb": max(found["peaks"].values()), "one_gb": found["one"][0]}
        extra = {name: round(size / 1e9, 6) if on_gpu else None for name, size in sizes.items()}
        alone = Times.of([found["one"][1]])
        times = Times.of([found["mine"][1]])
        more = beside(1 / times.median, {ONE: PeerResult(alone, 1 / alone.median, {})}, rated=False)
        record = record_of(
            self, Timed(MODULE), times, gate, device, Sensors(device), **more, **extra, ran=found["ran"]
        )
        return Outcome(self, (record,), {}, {str(at): text for at, text in enumerate(found["notes"])})


def _case(mask: str, kilo: int = 128, kind: Any = MeshCase, **more: Any) -> Any:
    return kind.square(mask, kilo, heads=(32, 8), **more)


LONG = "window:4096+sinks:128"
MESH: dict[Any, Any] = {
    _case("blocks:0.125"): (Bar(ONE, 1.85, 1.95),),
    _case("causal"): (Bar(ONE, 1.8, 1.95),),
    _case("mixed:32768"): (Bar(ONE, 1.85, 1.95),),
    _case(LONG): (Bar(ONE, 1.9, 1.95),),
    _case("topk:128"): (Bar(ONE, 1.8, 1.95),),
}
REPEATS = rows("auto", *(_case(mask, 4, repeats=1000) for mask in ("window:1024+sinks:128", "mixed:1024")))
MEMORY = _case(LONG, 256, MeshMemoryCase)
MASKS = ("blocks:0.125", "causal", "mixed:32768", LONG, "topk:128", "tokens:16:15")
# Masks of 512K tokens with as many keys of a query as of 128K, or as large a share.
LONGEST = ("mixed:32768", LONG, "blocks:0.125", "topk:512")
WIDER: dict[Any, Any] = {  # on more GPUs of one host
    **{_case(mask, 128, ranks=ranks): () for ranks in (4, 8) for mask in MASKS},
    **{_case(mask, 512, ranks=ranks): () for ranks in (4, 8) for mask in LONGEST},
    _case("blocks:0.125", ranks=4): (Bar(ONE, 3.5, 3.8),),
    _case("blocks:0.125", ranks=8): (Bar(ONE, 6.5, 7.4),),
    **{_case(mask, 512, ranks=8): (Bar(ONE, 7.0, 7.6),) for mask in LONGEST},
}
MOST_MEMORY = Bar("", 1.1, 1.05)


def _memory(record: Record) -> float | None:
    ranks = record["case"]["ranks"]
    return None if record["peak_gb"] is None else record["peak_gb"] * ranks / record["one_gb"]


def _memory_target(record: Record) -> str:
    over = _memory(record)
    if over is None:
        return ""
    verdict, shown = judged(MOST_MEMORY, over)
    return f"at most {MOST_MEMORY.must:g}, {verdict}: {shown}"


def _way(record: Record) -> str:
    return record["config"]["way"]


def _over_one(record: Record) -> str:
    """Over one GPU, and what that could be at most: with the time of the fullest rank's pairs alone."""
    return f"{faster_than(ONE)(record)}, {record['case']['ranks'] / record['imbalance']:.2f}x"


def _numbers(*names: str) -> Callable[[Record], str]:
    return lambda record: ", ".join("" if record[name] is None else f"{record[name]:.4g}" for name in names)


HEADINGS = {
    ONE: "one GPU",
    "gather": "gather",
    "pieces": "gather, pieces",
    "exact": "gather, exact",
    "heads": "heads",
    "both": "both",
}
TABLE = Table(
    op="mesh",
    title="attention over a mesh",
    headings=HEADINGS,
    dense=(ONE,),
    columns=(
        CASE,
        MS,
        Column("over one GPU, at most", _over_one),
        Column("by", _way, text=True),
        Column("imbalance, bytes", _numbers("imbalance", "bytes_over_fewest")),
        Column("differing, unlike", _numbers("differing", "unlike")),
        target(MESH | WIDER, ""),
    ),
    note=(
        "A training step by the fastest way, in wall time until all ranks are done; over `sk.attention` with the same "
        "mask on one GPU, in the same rounds. At most: with one GPU's time of the "
        "fullest rank's pairs, as if all else were hidden. Imbalance: visited pairs of the fullest rank "
        'over the mean. Bytes: those that a forward pass received by "gather", over the fewest. Differing: elements of '
        'out, dq, dk and dv that have other bits than one GPU by "heads" and by `exact=True`. Unlike: those that had '
        "other bits in repeats."
    ),
    usual=("block 128", "32:8 heads", "D 128", "bf16", "2 ranks"),
    kernels=None,
)
MEMORY_TABLE = Table(
    op="mesh_memory",
    title="memory of attention over a mesh",
    headings={ONE: "one GPU"},
    dense=(ONE,),
    columns=(
        CASE,
        MS,
        Column("GB of a card", _numbers("peak_gb")),
        Column("of one GPU for all", _numbers("one_gb")),
        Column("over its share", lambda record: "" if _memory(record) is None else f"{_memory(record):.3f}"),
        Column("target", _memory_target, text=True),
    ),
    note=(
        "The most that torch held at once in a training step, with q, k, v, out and all gradients. Over the share: "
        "1.00 is one GPU's peak divided by the ranks."
    ),
    usual=("block 128", "32:8 heads", "D 128", "bf16", "2 ranks"),
    ratios=False,
)
SUITES: dict[str, tuple[SuiteRow, ...]] = {
    "attention": rows("auto", *MESH),
    "memory": rows("auto", MEMORY),
    "models": rows("auto", *MODELS),
    "repeats": REPEATS,
    **{
        name: rows("auto", *(case for case in (*WIDER, *WIDER_MODELS) if case.ranks == ranks))
        for name, ranks in (("four", 4), ("eight", 8))
    },
}
BENCH = Bench(
    "mesh",
    suites=SUITES,
    kinds=(MeshCase, MeshMemoryCase, MeshModelCase),
    tables=(TABLE, MEMORY_TABLE, MODEL_TABLE),
    small="--seq 1K --heads 4:2 --dim 64 --dtype fp32",
    kernels="",
    rounds=5,
    slowest=60.0,
)
