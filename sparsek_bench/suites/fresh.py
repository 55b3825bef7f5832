"""Attention whose mask is new in every call, products whose pattern is, and what planning a new mask takes: wall-clock
times, host included.

Calls follow one another as users write them, without a kernel's name or a plan, and the clock stops when the device is
idle. Every set has scores or documents of its own. A result is checked against attention of the mask that the CPU's
builder makes of them, at a sample of the query tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention, plan_attention
from sparsek.core.clock import wait
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern, grid_of
from sparsek.testing.budget import Gate
from sparsek.testing.compare import near_dense, worst
from sparsek.testing.product_budget import stored
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import (
    Bar,
    Case,
    Operands,
    OperandSet,
    block_name,
    rows,
    shape_name,
    stored_name,
)
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import Peer, ReadyPeer, holding
from sparsek_bench.engine.tables import CASE, MS, faster_than, mark, peer_ms, short_name, target
from sparsek_bench.engine.timed_call import Timed, several
from sparsek_bench.peers.attention import FORWARD, STEP, Attend, Flex, step
from sparsek_bench.suites.attention import LONG, SMALL, AttentionCase, sampled
from sparsek_bench.suites.attention_grad import StepOperands

KEPT, FLEX = "kept", "flex"
# Milliseconds of a mask, built and planned.
PLANNED = Bar("", 0.25, 0.1)


def by_the_cpu(make: Any) -> BlockMask:
    """The mask of a builder's call, a partial, made on the CPU and moved to its device."""
    given = *make.args, make.keywords
    where = [x.device for x in _pytree.tree_leaves(given) if isinstance(x, Tensor)]
    device = make.keywords.get("device", *where[:1])
    *given, named = _pytree.tree_map_only(Tensor, Tensor.cpu, given)
    return make.func(*given, **named | ({"device": "cpu"} if "device" in named else {})).to(device)


@dataclass(frozen=True)
class FreshOperands(StepOperands):
    """A set whose calls make their mask; `mask` is the same one, checked and kept. `trains`: with the gradients."""

    trains: bool

    def called(self, mask: Callable[[], BlockMask]) -> Callable[[], Any]:
        """Attention over the mask of each call."""
        given = self.q, self.k, self.v
        attend: Attend = lambda q, k, v: attention(q, k, v, mask())  # noqa: E731
        return step(attend, given, self.grad) if self.trains else partial(attend, *given)

    def kept(self) -> Callable[[], Any]:
        """The same over the kept mask."""
        return self.called(lambda: self.mask)

    def plan(self, kernel: str | None) -> Timed:
        """What runs is the planner's choice; a name is refused."""
        if kernel is not None:
            raise InvalidInput(f"calls with a new mask are measured as users write them, not by {kernel}")
        known = super().plan(None).plans or {}
        plans = known if self.trains else {"forward": known["forward"]}
        return several(plans, self.called(self.make))

    def sample(self) -> list[int] | None:
        return sampled(self.mask.grid[0])

    def judge(self, out: Any) -> Gate:
        return super().judge(out) if self.trains else self.expected.judge(out)


@dataclass(frozen=True)
class FreshCase(AttentionCase):
    """Attention with a mask that is new in every call. `trains`: with the gradients of q, k and v."""

    op: ClassVar[str] = "fresh"
    wall: ClassVar[int] = 20
    rated: ClassVar[bool] = False
    least_sets: ClassVar[int] = 4
    extra: ClassVar[tuple[str, ...]] = ()
    peer_extra: ClassVar[tuple[str, ...]] = ()
    hosted: ClassVar[bool] = True

    trains: bool = options.field(
        False, "With the gradients of q, k and v.", name="backward", off="forward", usual=False
    )

    @property
    def passes(self) -> tuple[str, ...]:
        """What is measured."""
        return STEP if self.trains else FORWARD

    @property
    def name(self) -> str:
        """As of attention, with a mark where gradients count."""
        return super().name + (", with backward" if self.trains else "")

    def sets(self, draw: Draw) -> Callable[[Draw], FreshOperands]:
        def one(draw: Draw) -> FreshOperands:
            q, k, v, grad = (draw.normal(*shape) for shape in (*self.shapes, self.out_shape))
            for x in (q, k, v):
                x.requires_grad_(self.trains)
            make = self.mask_maker(draw.device, draw.seed)
            more = by_the_cpu(make), make, self.flops_per_pair, grad, True, self.trains
            return FreshOperands(q, k, v, *more)

        return one


class PlannedMaskCase(AttentionCase):
    """A mask built and its forward pass planned, until the device is idle. Its gate compares query tiles with the rule
    that the mask is named after: not one pair may be wrong. The peer is the building alone.
    """

    op, table = "mask_plan", FreshCase.op
    wall = 20
    rated = False
    extra = peer_extra = ()
    hosted = True

    def sets(self, draw: Draw) -> Callable[[Draw], OperandSet]:
        """q, k and v are one tensor, whose values nobody reads."""
        q = torch.empty(self.shapes[0], dtype=self.drawn, device=draw.device)
        make = self.mask_maker(draw.device, draw.seed)

        def planned() -> BlockMask:
            mask = make()
            plan_attention(q, q, q, mask)
            wait(draw.device)
            return mask

        plan = lambda *given, kernel: Timed("mask.structured", planned)  # noqa: E731
        return lambda draw: OperandSet((q, make), plan, partial(check_mask, self), 1.0)

    @classmethod
    def below(cls, record: Record) -> str:
        ms, built = record["ms"]["median"], peer_ms(record, KEPT)
        alone = "" if built is None else f", built alone {built * 1e3:.0f} us"
        limit = f"target at most {PLANNED.must * 1e3:.0f} us, {PLANNED.verdict(ms)}"
        name = f"{short_name(record)}{mark(record)}"
        return f"A mask, built and planned: {ms * 1e3:.0f} us{alone} ({name}; {limit})."


def check_mask(case: AttentionCase, mask: BlockMask) -> Gate:
    """Compares up to 16 query tiles, the first and the last among them, element by element with the rule of positions.

    The error is the fraction of wrong pairs, and the budget 0.
    """
    side = mask.block[0]
    keys = torch.arange(mask.kv_len, device=mask.device)
    wrong = pairs = 0
    for tile in sampled(mask.grid[0]) or range(mask.grid[0]):
        first, last = tile * side, min((tile + 1) * side, mask.q_len)
        positions = torch.arange(first, last, device=mask.device) + mask.kv_len - mask.q_len
        right = case.mask_text.sees(positions, keys)
        if right is None:
            raise InvalidInput(
                f"{case.mask!r} is no rule of positions, which a mask's build can be checked by"
            )
        wrong += int((mask.dense_rows(first, last) != right).sum())
        pairs += right.numel()
    return Gate(wrong / pairs, 0.0, wrong == 0)


@dataclass(frozen=True)
class FreshProductOperands(Operands):
    """A set: the block lists of A on the device, its values, B, and with `dy` the gradient of A @ B."""

    kept_pattern: BlockPattern
    values: Tensor
    b: Tensor
    dy: Tensor | None

    @property
    def useful_flops(self) -> float:
        return 2.0 * self.values.numel() * self.b.shape[1]

    def make(self) -> BlockPattern:
        """The pattern as one that was just made on the device."""
        kept = self.kept_pattern
        return BlockPattern.unchecked(kept.shape, kept.block, kept.indptr, kept.indices)

    def called(self, pattern: Callable[[], BlockPattern]) -> Callable[[], Any]:
        """The product with the pattern of each call, or with gradients the results of a step."""

        def multiplied() -> Any:
            y = BSR.unchecked(pattern(), self.values) @ self.b
            if self.dy is None:
                return y
            return (y, *torch.autograd.grad(y, (self.values, self.b), self.dy))

        return multiplied

    def kept(self) -> Callable[[], Any]:
        """The same with the kept pattern."""
        return self.called(lambda: self.kept_pattern)

    def plan(self, kernel: str | None) -> Timed:
        """What runs is the planner's choice; a name is refused."""
        if kernel is not None:
            raise InvalidInput(f"calls with a new pattern are measured as users write them, not by {kernel}")
        return Timed("ops.spmm", self.called(self.make))

    def judge(self, out: Any) -> Gate:
        """Compares all results with those of the dense matrix of a pattern that the host made."""
        kept = self.kept_pattern
        lists = kept.indptr.cpu(), kept.indices.cpu()
        pattern = BlockPattern(kept.shape, kept.block, *lists).to(self.b.device)
        found = out if self.dy is not None else (out,)
        exact, rough = (self._dense_results(pattern, dtype) for dtype in (torch.float64, self.b.dtype))
        return worst([near_dense(*each, kept.shape[1]) for each in zip(found, exact, rough, strict=True)])

    def _dense_results(self, pattern: BlockPattern, dtype: torch.dtype) -> list[Tensor]:
        a = BSR.unchecked(pattern, self.values.detach()).to_dense().to(dtype)
        b = self.b.detach().to(dtype)
        if self.dy is None:
            return [a @ b]
        dy = self.dy.to(dtype)
        return [a @ b, stored(dy @ b.T, pattern), a.T @ dy]


@dataclass(frozen=True)
class FreshProductCase(Case):
    """A @ B of `size` on each side, whose A has a pattern that is new in every call and was made on the device: as many
    random blocks in each block row. `trains`: with the gradients of A's values and of B.
    """

    op: ClassVar[str] = "fresh_product"
    wall: ClassVar[int] = 20
    rated: ClassVar[bool] = False
    least_sets: ClassVar[int] = 4
    hosted: ClassVar[bool] = True

    size: int = options.size("Rows and columns of A and B", usual=8192)
    block: tuple[int, int] = options.block(usual=(128, 128))
    density: float = options.share(usual=0.125)
    trains: bool = options.field(False, "With gradients.", usual=False)
    dtype: str = options.dtype()

    @property
    def name(self) -> str:
        """As of products, with a mark where gradients count: "8192³ block 64 12.5 % bf16, with backward"."""
        size, stored = (
            shape_name(*[self.size] * 3),
            stored_name(block_name(self.block), self.density, self.dtype),
        )
        return f"{size} {stored}" + (", with backward" if self.trains else "")

    @property
    def dense_flops(self) -> float:
        return (6.0 if self.trains else 2.0) * self.size**3

    def sets(self, draw: Draw) -> Callable[[Draw], FreshProductOperands]:
        def one(draw: Draw) -> FreshProductOperands:
            (rows, columns), where = grid_of((self.size, self.size), self.block), draw.device
            each = max(1, round(columns * self.density))
            seed = torch.Generator(where).manual_seed(draw.seed)
            chosen = torch.rand(rows, columns, generator=seed, dtype=torch.float32, device=where)
            lists = chosen.topk(each, 1).indices.sort(1).values.int().flatten()
            starts = torch.arange(0, len(lists) + 1, each, dtype=torch.int32, device=where)
            kept = BlockPattern.unchecked((self.size, self.size), self.block, starts, lists)
            values = draw.normal(len(lists), *self.block) * (each * self.block[1]) ** -0.5
            b, dy = draw.normal(self.size, self.size), draw.normal(self.size, self.size)
            for x in (values, b):
                x.requires_grad_(self.trains)
            return FreshProductOperands(kept, values, b, dy if self.trains else None)

        return one


@dataclass(frozen=True)
class KeptMaskPeer(Peer):
    """Attention over kept masks, products of kept patterns; of a planned mask, the building of it alone."""

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        return ReadyPeer(tuple(map(self._call, sets)))

    def _call(self, one: Any) -> Callable[[], Any]:
        if not isinstance(one, OperandSet):
            return one.kept()
        q, make = one.given
        return lambda: (make(), wait(q.device))


@dataclass(frozen=True)
class FreshFlex(Flex):
    """FlexAttention, and in every call its own mask of the same documents; both compiled."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        if case.op != FreshCase.op:
            return ["computes attention"]
        other = not case.mask.startswith("documents")
        return super().why_not(case, device) + holding({"is measured with masks of documents": other})

    def attend(self, case: Any, one: Any) -> Any:
        """Its functions of attention and of the mask."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()  # a compiled function stops compiling after 8 kinds of masks
        attend, made = (torch.compile(each, dynamic=False) for each in (flex_attention, create_block_mask))
        sizes = {"B": None, "H": None, "Q_LEN": case.q_len, "KV_LEN": case.kv_len}
        return partial(attend, enable_gqa=case.heads != case.kv_heads), partial(made, **sizes)

    def timed(self, case: Any, attend: Any, one: Any) -> Callable[[], Any]:
        flex, made = attend
        lengths = one.make.args[0].diff()
        document = torch.arange(len(lengths), device=one.q.device).repeat_interleave(lengths)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (document[q] == document[k]) & (k <= q)

        q, k, v = one.q, one.k, one.v
        return lambda: flex(q, k, v, block_mask=made(seen, device=q.device))


_case = FreshCase.square
BARS: Mapping[Any, tuple[Bar, ...]] = {
    _case("topk:8", 8): (Bar(KEPT, 1.35, 1.1),),
    _case("topk:32", 32): (Bar(KEPT, 1.1, 1.03),),
    _case("topk:8", 8, trains=True): (),
    _case("topk:32", 32, trains=True): (Bar(KEPT, 1.1, 1.03),),
    _case("documents:1000", 8): (Bar(FLEX, 0.5, 0.4),),
    _case("documents:1000", 32): (Bar(FLEX, 0.2, 0.15),),
}
PRODUCTS: Mapping[Any, tuple[Bar, ...]] = {
    FreshProductCase(block=(side, side), trains=trains): (Bar(KEPT, 1.4, 1.1),)
    for trains in (False, True)
    for side in (128, 64)
}
SUITES = {name: rows("auto", *(each for each in BARS if name in each.mask)) for name in ("topk", "documents")}
OVER_KEPT = Column("over a kept mask", lambda record: faster_than(KEPT)(record)[:-1])
BENCH = Bench(
    "fresh",
    suites={
        **SUITES,
        "window": rows("auto", PlannedMaskCase.square(LONG, 512)),
        "products": rows("auto", *PRODUCTS),
    },
    kinds=(FreshCase, PlannedMaskCase, FreshProductCase),
    peers=(
        KeptMaskPeer(KEPT, "a kept mask"),
        FreshFlex(FLEX, "FlexAttention", "cuda"),
    ),
    tables=(
        Table(
            op="fresh",
            title="attention with new masks",
            dense=(KEPT,),
            columns=(CASE, MS, OVER_KEPT, target(BARS, "")),
            note=(
                "Wall time of a call, mask included, back to back until the GPU is idle. A kept mask: the same call "
                "with a mask that was made before. Masks come from other scores, or other documents, in each of four "
                "calls. FlexAttention: its compiled create_block_mask and flex_attention. Over a peer: 1.50 means 1.5 "
                "times as fast; a target is the most that a call may take, as a multiple of the peer's time."
            ),
            beside=(FLEX,),
            usual=("block 128", "16 heads", "D 128", "bf16"),
        ),
        Table(
            op="fresh_product",
            title="products with new patterns",
            headings={KEPT: "a kept pattern"},
            dense=(KEPT,),
            columns=(
                CASE,
                MS,
                Column("over a kept pattern", OVER_KEPT.cell),
                target(PRODUCTS, ""),
            ),
            note=(
                "Wall time of A @ B, back to back until the GPU is idle. A gets a new pattern in every call, from "
                "lists on the GPU. A kept pattern: the same call with the pattern of the call before. With backward: "
                "the gradients of A's values and of B, too."
            ),
            ratios=False,
        ),
    ),
    small=SMALL,
    kernels="",
    slowest=150.0,
)
