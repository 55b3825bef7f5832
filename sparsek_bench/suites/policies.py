"""Policies as a benchmark: what choosing blocks takes, attention with the choice in it, and how much mass is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention
from sparsek.attn.policies import VSA, FlexPrefill, MeanTopK, SubBlock, VerticalSlash, XAttention
from sparsek.attn.policies.mass import recall
from sparsek.attn.policies.policy import Policy
from sparsek.core.clock import wall_rounds
from sparsek.integrations.fastvideo import video_sparse_attn
from sparsek.testing.attention_data import GENERATORS, HeadSizes
from sparsek.testing.budget import Gate
from sparsek.testing.compare import worst
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Bar, Case, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.run import Outcome, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, MS, target
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.peers.attention import PEERS
from sparsek_bench.suites.attention import SMALL, AttentionCase, AttentionOperands, sampled
from sparsek_bench.suites.attention_masks import MaskForm, parse_mask
from sparsek_bench.suites.fresh import KeptMaskPeer
from sparsek_bench.suites.host import parse_sides
from sparsek_bench.suites.quality import SPARSITIES, Dial, at_sparsity, dials, qualities

ATTENTION = "attention"

# Of the blocks that the specification on the CPU chooses in some tiles, this share may differ: scores are rounded.
MOVED = 0.05
# Above, a gate looks at every fourth of the sampled tiles.
LONGEST_GATE = 2**16


def white(case: PolicyCase, draw: Draw) -> tuple[Tensor, Tensor]:
    """N(0, 1) values: no block has more mass than another."""
    return draw.normal(*case.shapes[0]), draw.normal(*case.shapes[1])


def topics(case: PolicyCase, draw: Draw) -> tuple[Tensor, Tensor]:
    """Segments of 1024 tokens, each of one of 24 topics: keys hold the topic's direction and queries look for it, other
    directions for each head of k; all queries look for the first 64 keys. The rest is N(0, 1).
    """
    (batch, heads, length, dim), (_, kv_heads, keys, _) = case.shapes[:2]
    generator = torch.Generator("cpu").manual_seed(draw.seed)
    of_segment = torch.randint(24, (-(-keys // 1024),), generator=generator, device="cpu").to(draw.device)
    topic = of_segment.repeat_interleave(1024)[:keys]
    direction = torch.nn.functional.normalize(draw.normal(kv_heads, 25, dim).float(), dim=-1) * 8.5
    k = draw.normal(batch, kv_heads, keys, dim) + direction[:, topic].to(draw.dtype)
    k[:, :, :64] += direction[:, 24:].to(draw.dtype)
    looked = (direction[:, topic] + direction[:, 24:])[:, keys - length :].to(draw.dtype)
    q = draw.normal(batch, heads, length, dim) + looked.repeat_interleave(heads // kv_heads, 0)
    return q, k


DATA: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {"white": white, "topics": topics}


def _form(form: str, words: str, make: Callable[..., Policy], **more: Any) -> MaskForm:
    """A text of a policy, `make(number, block=)`, which `prepare` gives in the place of a mask's builder."""
    prepare: Any = lambda case, draw, number: make(number, block=case.block)  # noqa: E731
    return MaskForm(form, words.format, prepare, **more)


POLICIES = (
    _form("xattention:T", "XAttention {:g}", partial(XAttention, causal=False)),
    _form("causal-xattention:T", "causal XAttention {:g}", XAttention, causal=True),
    _form("subblock:F", "SubBlock {:g}", SubBlock),
    _form("mean-topk:F", "MeanTopK {:g}", lambda share, block: MeanTopK(None, share, block, False, (0, 0))),
    _form("vsa:K", "video_sparse_attn {:g}", lambda topk, block: VSA(int(topk), block), uniform=True),
)


def _module(policy: Policy) -> str:
    """The module of a policy in records: "policies.top"."""
    return ".".join(type(policy).__module__.split(".")[-2:])


@dataclass(frozen=True)
class PolicyOperands(AttentionOperands):
    """A set whose mask a policy chooses; `mask` is that choice, kept. `run` is the timed call."""

    case: PolicyCase
    policy: Any
    run: Callable[..., Any]

    @property
    def useful_flops(self) -> float:
        """Those of dense attention, which the call stands for: a ratio to a peer is one of times."""
        return self.case.causal_flops if self.case.mask_text.causal else self.case.dense_flops

    def plan(self, kernel: str | None) -> Timed:
        return Timed(_module(self.policy), self.run)

    def kept(self) -> Callable[[], Tensor]:
        """Attention over the kept mask."""
        return partial(attention, self.q, self.k, self.v, self.mask)

    def gate(self, plan: Any) -> Gate:
        """Of the choice, and of what is computed with it."""
        return worst([self.choice(), *([] if self.case.alone else [self.result()])])

    def choice(self) -> Gate:
        """The first, the middle and the last tile of a head beside the specification on the CPU: the error is the share
        of blocks that are chosen by one of both only.
        """
        mask, side, either, wrong = self.mask, self.mask.block[0], 0, 0
        q, k = (x[:1, :1].detach().cpu() for x in (self.q, self.k))
        for tile in {0, mask.grid[0] // 2, mask.grid[0] - 1}:
            first, last = tile * side, min((tile + 1) * side, mask.q_len)
            right = self.policy.mask(q[:, :, first:last], k, q_offset=first + mask.kv_len - mask.q_len)
            mine, theirs = mask.dense_rows(first, last)[0, 0].cpu(), right.to_dense()[0, 0]
            either, wrong = either + int((mine | theirs).sum()), wrong + int((mine ^ theirs).sum())
        error = wrong / max(1, either)
        return Gate(error, MOVED, error <= MOVED)

    def result(self) -> Gate:
        """The call's result as attention over the chosen mask; of `video_sparse_attn` without the coarse branch, which
        is checked by itself.
        """
        out = self.run()
        if not isinstance(self.policy, VSA):
            return self.judge(out)
        fine, side = self.run(compress_attn_weight=self.q.new_zeros(())), self.mask.block[0]
        group = self.q.shape[1] // self.k.shape[1]
        q, k, v = (x.double().unflatten(2, (-1, side)).mean(3) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        means = (self.q.shape[3] ** -0.5 * (q @ k.mT)).softmax(-1) @ v
        both = fine.double() + means.repeat_interleave(side, 2)
        error = float((out - both).norm() / both.norm())
        return worst([self.judge(fine), Gate(error, 2**-7, error <= 2**-7)])

    def sample(self) -> list[int] | None:
        tiles = sampled(self.mask.grid[0])
        return tiles and (tiles[::4] if self.mask.kv_len > LONGEST_GATE else tiles)

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        """The share of the visible blocks that is kept, and the recall."""
        mask, visible = self.mask, BlockMask.causal if self.case.mask_text.causal else BlockMask.full
        whole = visible(**self.case.frame, device="cpu").stored_blocks * mask.batch * mask.heads
        found = recall(mask, self.q, self.k, causal=self.case.mask_text.causal)
        return {"kept": round(mask.stored_blocks / whole, 6), "recall": round(float(found.mean()), 6)}


@dataclass(frozen=True)
class PolicyCase(AttentionCase):
    """Attention with a policy in the place of a mask, which chooses anew in every call: wall-clock time.

    `mask` is a text of POLICIES, `data` how q and k are drawn. `alone`: the choice of the blocks is timed, without the
    attention.
    """

    op: ClassVar[str] = "policy"
    wall: ClassVar[int] = 8
    alone: ClassVar[bool] = False
    rated: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = ("kept", "recall")
    peer_extra: ClassVar[tuple[str, ...]] = ()
    hosted: ClassVar[bool] = True

    mask: str = options.field(
        "causal-xattention:0.9",
        f"Policies, with numbers for the letters: {', '.join(each.form for each in POLICIES)}.",
        check=lambda name, mask: parse_mask(mask, POLICIES),
        name="policy",
    )
    data: str = options.choice("How q and k are drawn", DATA, usual="white")

    @property
    def mask_text(self) -> MaskForm:
        return parse_mask(self.mask, POLICIES)

    @property
    def name(self) -> str:
        """As of attention, with the data where they are not white noise."""
        return super().name + ("" if self.data == "white" else f", {self.data}")

    def sets(self, draw: Draw) -> Callable[[Draw], PolicyOperands]:
        form = self.mask_text
        policy: Any = form.prepare(self, draw, *form.numbers)

        def one(draw: Draw) -> PolicyOperands:
            q, k = DATA[self.data](self, draw)
            v, mask = draw.normal(*self.shapes[2]), policy.mask(q, k)
            mask.verify(wait=True)
            made = PolicyOperands(
                q, k, v, mask, partial(policy.mask, q, k), self.flops_per_pair, self, policy, lambda: None
            )
            if self.alone:
                return replace(made, run=made.make)
            if not isinstance(policy, VSA):
                return replace(made, run=partial(attention, q, k, v, policy))
            side = self.block[0]
            sizes = torch.full((self.q_len // side,), side, dtype=torch.int32, device=draw.device)
            return replace(made, run=partial(video_sparse_attn, q, k, v, sizes, sizes, policy.topk, side))

        return one


class EstimateCase(PolicyCase):
    """The choice of the blocks alone, on the device; attention over the chosen mask is its peer."""

    op = "policy_estimate"
    wall, alone = 0, True


def recalled(shape: tuple[int, int, int]) -> dict[str, Dial]:
    """The policies whose recall is measured, each from a number that sets its sparsity."""
    tokens = math.prod(shape)
    return {
        **dials(shape),
        "XAttention": lambda number: XAttention(number, block=64, causal=False),
        "FlexPrefill, causal": lambda number: FlexPrefill(number, min_budget=64, block=64),
        "VerticalSlash, causal": lambda number: VerticalSlash(
            max(64, int(number * tokens / 4)), max(64, int(number * tokens)), 64
        ),
    }


@dataclass(frozen=True)
class RecallCase(Case):
    """The mass that a policy keeps of a video's q and k at three sparsities. The choice at the last one is timed."""

    op: ClassVar[str] = "policy_recall"
    rated: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = tuple(
        f"{what}_{round(100 * each)}" for each in SPARSITIES for what in ("kept", "mass", "best")
    )
    hosted: ClassVar[bool] = True
    dense_flops: ClassVar[float] = 0.0

    policy: str = options.choice("Policies", recalled((16, 16, 16)))
    data: str = options.choice("How q and k are drawn", GENERATORS)
    shape: tuple[int, int, int] = options.field(
        "8x8x16", "Frames, rows and columns in tokens.", parse_sides, usual=(16, 32, 32)
    )
    heads: int = options.size("Heads", "2", usual=4)
    dtype: str = options.dtype()

    @property
    def name(self) -> str:
        """One short line: "SubBlock, smooth, 16x32x32, 4 heads, bf16"."""
        return (
            f"{self.policy}, {self.data}, {'x'.join(map(str, self.shape))}, {self.heads} heads, {self.dtype}"
        )

    def run(self, *, device: torch.device, rounds: int, report: Callable[[str], None], **_: Any) -> Outcome:
        """One record. Raises GateError for a policy that keeps more than the best mask."""
        report("masks of every sparsity")
        dial, sizes = recalled(self.shape)[self.policy], HeadSizes(1, self.heads, self.heads, 128)
        q, k = (x.to(self.drawn) for x in GENERATORS[self.data](self.shape, sizes, 0, str(device))[:2])
        found = qualities(self.policy, dial, q, k, self.shape)
        more = [number for each in found for number in (each.kept, each.recall, each.oracle)]
        over = max(each.recall - each.oracle for each in found)
        policy = at_sparsity(dial, q, k, SPARSITIES[-1])[0]
        plan = Timed(_module(policy), partial(policy.mask, q, k))
        gate, seen = passed(self, plan.kernel, Gate(max(0.0, over), 1e-4, over <= 1e-4)), Sensors(device)
        times = wall_rounds({"": plan.call}, device, rounds, on_sample=seen.sample)[""]
        extra = dict(zip(self.extra, (round(each, 6) for each in more), strict=True))
        extra |= {"ran": executed_by(plan.call)}
        return Outcome(self, (record_of(self, plan, times, gate, device, seen, **extra),), {}, {})


def _share(record: Record) -> str:
    ratio = record["ratio"].get(ATTENTION)
    return "" if ratio is None else f"{100 / ratio:.1f} %"


def _beside_best(sparsity: int) -> Column:
    names = [f"{what}_{sparsity}" for what in ("kept", "mass", "best")]
    shown = "{:.0f} %: {:.1f} % ({:.1f} %)".format
    return Column(f"at {sparsity} % sparsity", lambda record: shown(*(100 * record[name] for name in names)))


def _percent(heading: str, field: str) -> Column:
    return Column(heading, lambda record: f"{record[field] * 100:.1f} %")


KEPT, RECALL = _percent("blocks kept", "kept"), _percent("mass kept", "recall")
_case, _alone = PolicyCase.square, EstimateCase.square
# The share of the attention that an estimate may take.
LIMITS = {
    "xattention:0.125": (128, 0.25, 0.1),
    "subblock:0.125": (64, 0.12, 0.06),
    "mean-topk:0.125": (128, 0.08, 0.03),
}
ESTIMATES: Mapping[Any, tuple[Bar, ...]] = {
    _alone(policy, kilo, block): (Bar(ATTENTION, must, aim),)
    for policy, (block, must, aim) in LIMITS.items()
    for kilo in (32, 128)
}
PREFILL = _case("causal-xattention:0.9", 128, heads=(32, 8), data="topics")
VIDEO = _case("vsa:64", 32, 64)
CALLS: Mapping[Any, tuple[Bar, ...]] = {
    PREFILL: (Bar("cudnn", 4.0, 6.0),),
    VIDEO: (Bar("cudnn_bsa", 0.95, 1.1),),
}
USUAL = ("16 heads", "D 128", "bf16")
NOTE = (
    "Blocks kept: of those that a mask may have, the visible ones if it is causal. Mass kept: the share of the softmax "
    "mass of dense attention, a mean over sampled queries and all heads."
)
BENCH = Bench(
    "policies",
    suites={
        "estimates": rows("auto", *ESTIMATES),
        "prefill": rows("auto", PREFILL),
        "video": rows("auto", VIDEO),
        "recall": rows(
            "auto", *(RecallCase(each, data) for data in GENERATORS for each in recalled((16, 16, 16)))
        ),
    },
    kinds=(PolicyCase, EstimateCase, RecallCase),
    measures={"attention": PolicyCase, "estimate": EstimateCase},
    peers=(
        KeptMaskPeer(
            ATTENTION, "attention", unless=lambda case: [] if case.alone else ["is measured beside estimates"]
        ),
        *(
            replace(
                peer,
                unless=lambda case: ["computes attention, the case chooses blocks"] if case.alone else [],
            )
            for peer in PEERS
            if peer.name in ("cudnn", "cudnn_bsa")
        ),
    ),
    tables=(
        Table(
            op="policy_estimate",
            title="choosing blocks",
            dense=(ATTENTION,),
            columns=(CASE, MS, Column("of the attention", _share), KEPT, RECALL, target(ESTIMATES, "")),
            note=f"Device time of `policy.mask(q, k)`, and its share of attention over that mask. {NOTE}",
            usual=("block 128", *USUAL),
        ),
        Table(
            op="policy",
            title="attention with policies",
            dense=("cudnn",),
            columns=(CASE, MS, KEPT, RECALL, target(CALLS, "")),
            note=(
                "Wall time of a call that chooses its blocks, back to back until the GPU is idle. q and k of `topics`: "
                "segments of 1024 tokens, each of one of 24 topics that its keys hold and its queries look for, and "
                "64 first keys that all look for; the rest is N(0, 1). video_sparse_attn has its coarse branch, and "
                "cuDNN's block-sparse attention is given the same blocks. Over a peer: 1.50 means 1.5 times as fast. "
                f"{NOTE}"
            ),
            beside=("cudnn_bsa",),
            usual=USUAL,
        ),
        Table(
            op="policy_recall",
            dense=(),
            title="mass that policies keep",
            columns=(CASE, *(_beside_best(round(100 * each)) for each in SPARSITIES)),
            note=(
                "The blocks that a policy keeps, of those that may be seen: the share of the softmax mass of dense "
                "attention in them, in brackets the most that as many blocks of each tile could have. q and k are a "
                "video of 16 frames of 32 x 32 tokens in cubes of 64. `white`: N(0, 1) values; `smooth`: near tokens "
                "are alike; `needle`: runs of 32 keys that an eighth of the queries look for. Blocks of 64."
            ),
            usual=("16x32x32", "4 heads", "bf16"),
        ),
    ),
    small=SMALL,
    kernels="",
    slowest=60.0,
)
