"""The plan of attention over the blocks of a mask, and what it shares with the plan of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.convert.argument import block_mask
from sparsek.attn.mask.data import MaskPart
from sparsek.attn.mask.lists import Frame
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import PLAIN, Scores, checked_scores, told
from sparsek.core import arguments, dtypes
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured, tensors_in
from sparsek.core.tracing import wants_gradient
from sparsek.engine.plan.plan import Plan
from sparsek.engine.plan.select import Choice

NONE: Any = None  # an operand of a call that has none
BOUNDS = (
    "  bounds     times and roofline are for the most blocks that the mask may have; a plan that is made after "
    "mask.verify(wait=True) has its own"
)
Problem = TypeVar("Problem", bound=AttentionProblem)


@dataclass(slots=True, eq=False)  # a frozen one takes twice as long to make
class Attended:
    """A call of attention: the operands and options of `sk.attention`, each declared here, and checked by `check`.

    `mask`: the owner of its plans; None for every block, until that is filled in. `scale`: None for D**-0.5. `plan`:
    that of the caller; without one the mask's is used. `once`: the plan of a new mask is not kept. `wide`: gradients
    of k and v are parts of sums, in float32 where the kernel has that. As no pytree, the class hides the mask and the
    slopes from torch.func.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    scale: float | None = None
    return_lse: bool = False
    kernel: str | None = None
    deterministic: bool = True
    scores: Scores = PLAIN
    plan: Any = None
    once: bool = False
    wide: bool = False

    form: ClassVar[Hashable] = "attention"
    """The operation, and all of q, k and v but the shapes and dtypes of `tensors`."""

    def convert_mask(self, is_causal: bool = False, *, predicted: bool = False) -> None:
        """Make a BlockMask of the mask, of whatever form."""
        self.mask = block_mask(self.mask, self.q, self.k, is_causal, scale=self.scale, predicted=predicted)

    def of(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Attended:
        """This call of other operands, such as those that torch.func has unwrapped."""
        scores, options = self.scores.with_sinks(sinks), (self.scale, self.return_lse, self.kernel)
        more = self.plan, self.once, self.wide
        return Attended(q, k, v, self.mask, *options, self.deterministic, scores, *more)

    def without(self) -> Attended:
        """This call of no operands, for autograd to keep beside them."""
        return self.of(NONE, NONE, NONE, None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k and v, in FP8 their values and scales."""
        return self.q, self.k, self.v

    @property
    def learns(self) -> bool:
        """Whether autograd would expect a gradient."""
        return wants_gradient(*self.tensors, self.scores.sink_logits)

    @property
    def like(self) -> Tensor:
        return self.q

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.q.dtype

    @property
    def layout(self) -> operands.Layout:
        """The layout of q, k and v."""
        return operands.layout(self.q, self.k, self.v)

    @property
    def factor(self) -> float:
        """The scale, also of a call without one."""
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale

    @property
    def in_order(self) -> bool:
        """Whether sums have a fixed order: always under torch.use_deterministic_algorithms."""
        return self.deterministic or torch.are_deterministic_algorithms_enabled()

    def check(self, *, here: bool = True, planner: str = "plan_attention") -> None:
        """InvalidInput for operands and options that do not fit together, or not the plan.

        `here`: the call will run, so everything must be on one device. `planner`: the function that predicts it, for
        messages.
        """
        plan = self.plan
        if plan is not None:
            plan.refuse_unless_ready()
        self.check_operands(here, planner)
        if plan is not None:
            self.mask = plan.mask_for(self.mask)
        if self.mask is not None:
            operands.check_mask(self.like, self.k, self.mask, here=here)
        if self.scale is not None:
            self.scale = arguments.number("scale", self.scale, *operands.SCALES)
        self.check_scores(here)
        if plan is not None:
            plan.check(self)

    def check_operands(self, here: bool = True, planner: str = "plan_attention") -> None:
        """The checks of q, k and v."""
        check_tensors(self.q, self.k, self.v, predicted=not here, planner=planner)

    def check_scores(self, here: bool = True) -> None:
        """The checks of what changes the scores."""
        self.scores = checked_scores(self.q, *self.scores, here=here, dtype=self.dtype)

    def refuse_gradient(self) -> None:
        """InvalidInput if autograd would expect a gradient, which a plan does not give."""
        if self.learns:
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT)

    def problem(self, card: Card) -> AttentionProblem:
        return self.placed(AttentionProblem(**self.fields(self.layout), **self.lse_fields(), card=card))

    def placed(self, p: Problem) -> Problem:
        """The problem of this call, with that of one process if the mask is part of a whole one."""
        part = MaskPart.of(self.mask)
        if part is None:
            return p
        whole, kv_heads = part.whole, part.kv_heads or p.kv_heads
        lengths = {"q_len": whole.q_len, "kv_len": whole.kv_len, **whole.sizes._asdict()}
        lists = {"mask_batch": whole.batch, "mask_heads": whole.heads}
        return replace(p, whole=replace(p, q_heads=kv_heads * p.group, kv_heads=kv_heads, **lengths, **lists))

    def fields(self, layout: operands.Layout) -> dict[str, Any]:
        """Fields that the problems of both passes share, and those in FP8."""
        q, mask, scores = self.q, self.mask, self.scores
        batch, q_heads, q_len, dim = q.shape
        return {
            "batch": batch,
            "q_heads": q_heads,
            "kv_heads": self.k.shape[1],
            "q_len": q_len,
            "kv_len": self.k.shape[2],
            "dim": dim,
            "v_dim": self.v.shape[3],
            "dtype": dtypes.shown(q.dtype),
            "block": mask.block,
            "mask_batch": mask.batch,
            "mask_heads": mask.heads,
            **mask.sizes._asdict(),
            "by_interval": mask.lo is not None,
            "by_bits": mask.bits is not None and mask.rules is not None,
            "members": 0 if mask.members is None else mask.members.rows,
            "member_ends": mask.members is not None and mask.members.at_ends,
            "aligned": layout.aligned,
            "unit_stride": layout.unit_stride,
            **scores.changes,
        }

    def lse_fields(self) -> dict[str, Any]:
        """Those of lse, which has the sinks."""
        sinks = self.scores.sink_logits
        return {"lse": self.return_lse, "sink_logits": "" if sinks is None else dtypes.name(sinks.dtype)}

    def alike(self, layout: operands.Layout) -> tuple[Any, ...]:
        """What calls of one plan share in both passes."""
        # Bounds of a mask's sizes may be replaced by the actual sizes of its lists, which may give a better plan.
        q, exact, changes = self.q, self.mask.sizes.exact, self.scores.changes.values()
        return q.shape, self.k.shape[1], self.v.shape[3], self.dtype, exact, layout, *changes

    def key(self) -> Hashable:
        sinks = self.scores.sink_logits
        return *self.alike(self.layout), self.return_lse, None if sinks is None else sinks.dtype, self.form

    def plan_owner(self) -> BlockMask:
        return self.mask

    def prepare(self, p: AttentionProblem, choice: Choice) -> Any:
        return choice.kernel.prepare(p, choice.config, self.mask)

    def about(self) -> dict[str, Any]:
        return {"mask": weakref.ref(self.mask), "label": self.mask.label}


def every_block(q: Any, k: Any, here: bool = True) -> BlockMask:
    """The mask of a call without one. `here`: as in `Attended.check`."""
    frame = Frame(q_len=q.shape[2], kv_len=k.shape[2], device=q.device if here else "cpu")
    return kept_mask(("every block", *frame.values()), lambda: BlockMask.full(**frame))


@dataclass(frozen=True, eq=False, repr=False)
class MaskPlan(Plan):
    """A plan over the blocks of one mask for one shape of q, k and v. `problem` is an AttentionProblem.

    `mask` is a weak reference, because a mask keeps its plans. A plan made without a mask is `unmasked` and owns the
    mask of every block.
    """

    planner: ClassVar[str] = "plan_attention"
    """The verb that makes such plans."""
    title: ClassVar[str] = "attention"

    mask: Callable[[], BlockMask | None] = field(default=lambda: None)
    label: str = ""
    unmasked: bool = False

    def refuse_unless_ready(self) -> None:
        """InvalidInput where plans cannot run: if this one only predicts, under torch.compile, and in torch.func."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise InvalidInput(
                "plans do not go through torch.compile and torch.func; call attention(q, k, v, mask) there"
            )
        Plan.refuse_unless_ready(self)

    def mask_for(self, mask: BlockMask | None) -> BlockMask:
        """The mask of a call with `mask`. InvalidInput for another than that of this plan."""
        planned = self.mask()
        found = planned if mask is None and self.unmasked else mask
        if planned is None:
            raise InvalidInput(
                "the mask of this plan no longer exists: TokenLists and policies that choose blocks make one in each "
                f"call. Make it once, mask = lists.mask_for(q, k), and give it to {self.planner} and to each call"
            )
        if found is not planned:
            raise InvalidInput(
                f"this plan was made for another mask; call {self.planner}(q, k, v, mask) for this one, "
                "or attention(q, k, v, mask)"
            )
        return planned

    def check(self, call: Attended) -> None:
        """InvalidInput for a call of other shapes, dtypes or alignment, or whose scores are changed otherwise."""
        p, sinks = self.problem, call.scores.sink_logits
        self._check_sizes(call)
        if p.unit_stride and not call.layout.unit_stride:
            raise InvalidInput(
                "this plan needs last dims of q, k and v that are contiguous; attention(q, k, v, mask) takes any"
            )
        if p.aligned and not call.layout.aligned:
            raise InvalidInput(
                "this plan needs pointers and strides of q, k and v that are multiples of 16 bytes; "
                "attention(q, k, v, mask) takes any"
            )
        found = {**call.scores.changes, "sink_logits": "" if sinks is None else dtypes.name(sinks.dtype)}
        planned = {name: getattr(p, name) for name in found}
        if p.op == "attention_backward":  # for any sinks
            planned["sink_logits"] = found["sink_logits"]
        if found != planned:
            *names, last = Scores._fields
            raise InvalidInput(
                f"this plan is for {told(**planned)} and the call has {told(**found)}; give {self.planner} the "
                f"{', '.join(names)} and {last} of its calls"
            )

    def _check_sizes(self, call: Attended) -> None:
        p, q, v = self.problem, call.q, call.v
        planned = (p.batch, p.q_heads, p.q_len, p.dim), (p.batch, p.kv_heads, p.kv_len, p.v_dim)
        if (tuple(q.shape), tuple(v.shape)) != planned or dtypes.name(q.dtype) != p.dtype:
            raise InvalidInput(
                f"this plan takes {p.dtype} q {list(planned[0])} and v {list(planned[1])}; "
                f"got {q.dtype} {list(q.shape)} and {list(v.shape)}"
            )

    def headline(self) -> list[str]:
        p = self.problem
        shared = f", {p.group} heads of q to a head of k" if p.group > 1 else ""
        shapes = (
            f"q {[p.batch, p.q_heads, p.q_len, p.dim]} {p.dtype}, k {[p.batch, p.kv_heads, p.kv_len, p.dim]}, "
            f"v {[p.batch, p.kv_heads, p.kv_len, p.v_dim]}{shared}, on {p.card.name}"
        )
        changes = [f"  scores     {', '.join(p.changes)}"] if p.changes else []
        return [f"{self.title:<11} {shapes}", f"  mask       {self._mask_line()}", *changes]

    def _mask_line(self) -> str:
        p = self.problem
        most = "" if p.exact else "at most "
        kinds = ("members", p.members), ("interval", p.by_interval and not p.members), ("bits", p.by_bits)
        rules = [name for name, there in kinds if there]
        by = f" by {' or '.join(rules)}" if p.partial and rules else ""
        counts = (
            f"{most}{p.stored} of {p.cells} blocks of {p.block[0]}x{p.block[1]} stored ({100 * p.density:.3g} %), "
            f"{most}{p.partial} partial{by}, {self._sharing()}"
        )
        more = "; dense: every block is stored" if p.exact and p.stored == p.cells and p.cells else ""
        if p.members and p.cells:
            tiles = p.cells // -(-p.kv_len // p.block[1])
            more += f"; the union of {p.block[0]} tokens has {most}{p.stored / tiles:.3g} blocks"
        return f"{self.label}: {counts}{more}" if self.label else f"{counts}{more}"

    def _sharing(self) -> str:
        p = self.problem
        heads = {1: "one list for all heads", p.q_heads: "a list per head of q"}.get(
            p.mask_heads, "a list per head of k"
        )
        return f"{heads}, per batch item" if p.mask_batch > 1 else heads

    def details(self) -> list[str]:
        kept = [] if self.mask() is None else self._kept()
        if self.ready:
            kept.append(f"plan {megabytes(self._own())}")
        more = f"; kept beside them: {', '.join(kept)}" if kept else ""
        name, size = self._tensors()
        bounds = [] if self.problem.exact else [BOUNDS]
        return [*bounds, f"  memory     {name} {megabytes([size])}{more}", *super().details()]

    def _tensors(self) -> tuple[str, int]:
        """The tensors that a call reads and writes, and their bytes."""
        p = self.problem
        rows, keys = p.batch * p.q_heads * p.q_len, p.batch * p.kv_heads * p.kv_len
        return "q, k, v and out", (rows + keys) * (p.dim + p.v_dim) * dtypes.itemsize(p.dtype)

    def _kept(self) -> list[str]:
        """A description of the mask."""
        mask = self.mask()
        return [] if mask is None else [f"mask {megabytes([mask.nbytes])}"]

    def _own(self) -> list[int]:
        """Bytes of the work's tensors."""
        return [x.nbytes for x in tensors_in(self.work)]


@dataclass(frozen=True, eq=False, repr=False)
class AttendedPlan(MaskPlan):
    """A plan of the forward pass. `calls`: the class of its calls."""

    calls: ClassVar[type[Attended]] = Attended

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: BlockMask | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink_logits: Tensor | None = None,
    ) -> Any:
        """out, or (out, lse) if planned with return_lse; as `sk.attention`, but without gradients. No host sync.

        Raises InvalidInput for operands of other shapes, dtypes, scales or alignment, for another mask, and if an
        operand requires a gradient; use `sk.attention(q, k, v, mask, plan=plan)` for gradients.
        """
        scores = Scores(softcap, alibi_slopes, sink_logits)
        call = self.calls(q, k, v, mask, scale, scores=scores, plan=self)
        call.check()
        call.refuse_gradient()
        out, lse = self.run(call, captured(call.like))
        return out if lse is None else (out, lse)

    def _allocated(self, call: Attended) -> tuple[tuple[Tensor, Tensor | None], tuple[AttentionCall] | None]:
        """lse is None unless it was planned."""
        q, v, mask, like, scores = call.q, call.v, call.mask, call.like, call.scores
        out = operands.empty_out(like, v.shape[3], call.dtype)
        lse = like.new_empty(q.shape[:3], dtype=operands.lse_dtype(call.dtype)) if self.problem.lse else None
        if out.numel() == 0:
            return (out, lse), None
        if mask.kv_len == 0:
            return (out.zero_(), None if lse is None else without_keys(lse, scores.sink_logits)), None
        return (out, lse), (AttentionCall(q, call.k, v, mask, call.factor, out, lse, scores),)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan(AttendedPlan):
    """How to run attention over one mask for one shape of q, k and v. Call it: `plan(q, k, v, mask)`."""


def without_keys(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """`lse` [B, Hq, S] of queries that see no key."""
    return lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[None, :, None].expand_as(lse))


def megabytes(counts: Iterable[int]) -> str:
    """A number of bytes as text."""
    return f"{sum(counts) / 1e6:.4g} MB"
