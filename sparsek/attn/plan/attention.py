"""The plan of attention over the blocks of a mask, and what it shares with the plan of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured, tensors_in
from sparsek.core.tracing import wants_gradient
from sparsek.engine.plan.plan import Plan
from sparsek.engine.plan.select import Choice


class Attended(NamedTuple):
    """Attention of q, k and v over the blocks of a mask, the home of its plans. `lse`: return it too."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    scale: float = 1.0
    lse: bool = False
    scores: Scores = PLAIN

    @property
    def like(self) -> Tensor:
        return self.q

    def problem(self, card: Card) -> AttentionProblem:
        layout = operands.layout(self.q, self.k, self.v)
        sinks = self.scores.sink_logits
        return AttentionProblem(
            **sizes(*self[:4], layout, self.scores),
            card=card,
            lse=self.lse,
            sink_logits="" if sinks is None else dtypes.name(sinks.dtype),
        )

    def key(self) -> Hashable:
        scores = self.scores
        kind = None if scores is PLAIN else (*operands.changes(scores), scores.form[2])
        return *alike(*self[:4]), operands.layout(self.q, self.k, self.v), self.lse, kind

    def home(self) -> BlockMask:
        return self.mask

    def prepare(self, p: AttentionProblem, choice: Choice) -> Any:
        return choice.kernel.prepare(p, choice.config, self.mask)

    def about(self) -> dict[str, Any]:
        return about(self.mask)


def about(mask: BlockMask) -> dict[str, Any]:
    """Plan fields for `mask`."""
    return {"mask": weakref.ref(mask), "label": mask.label}


def alike(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Any, ...]:
    """What calls of one plan share, apart from the layouts of q, k and v."""
    # Bounds of a mask's sizes may be replaced by the actual sizes of its lists, which may give a better plan.
    return q.shape, k.shape[1], v.shape[3], q.dtype, mask.sizes.exact


def sizes(q: Any, k: Any, v: Any, mask: BlockMask, layout: operands.Layout, scores: Scores) -> dict[str, Any]:
    """Fields that the problems of both passes share, and those in FP8."""
    batch, q_heads, q_len, dim = q.shape
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": k.shape[1],
        "q_len": q_len,
        "kv_len": k.shape[2],
        "dim": dim,
        "v_dim": v.shape[3],
        "dtype": dtypes.shown(q.dtype),
        "block": mask.block,
        "mask_batch": mask.batch,
        "mask_heads": mask.heads,
        **mask.sizes._asdict(),
        "by_interval": mask.lo is not None,
        "by_bits": mask.bits is not None and mask.rules is not None,
        "aligned": layout.aligned,
        "unit_stride": layout.unit_stride,
        "softcap": scores.softcap > 0,
        "alibi": scores.alibi_slopes is not None,
    }


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

    def checked(self, q: Any, k: Any, v: Any, mask: BlockMask | None) -> BlockMask:
        """The mask to use. InvalidInput for another mask, and for operands of other shapes, dtypes or alignment."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise InvalidInput(
                "plans do not go through torch.compile and torch.func; call attention(q, k, v, mask) there"
            )
        self.refuse_unless_ready()
        q_values, k_values = self._checked_operands(q, k, v)
        planned = self.mask()
        found = planned if mask is None and self.unmasked else mask
        if found is None or found is not planned:
            raise InvalidInput(
                f"this plan was made for another mask; call {self.planner}(q, k, v, mask) for this one, "
                "or attention(q, k, v, mask)"
            )
        operands.check_mask(q_values, k_values, found)
        self._check_planned(q, k, v)
        return found

    def _checked_operands(self, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor]:
        """Tensors with the shapes of q and k, after the checks that need no mask."""
        check_tensors(q, k, v, planner=self.planner)
        return q, k

    def check_scores(self, scores: Scores) -> None:
        """InvalidInput unless the plan is for scores that are changed so."""
        p = self.problem
        sinks = scores.sink_logits
        found = *operands.changes(scores), "" if sinks is None else dtypes.name(sinks.dtype)
        planned = p.softcap, p.alibi, p.sink_logits if p.op != "attention_backward" else found[2]
        if found != planned:
            raise InvalidInput(
                f"this plan is for {_changed(*planned)} and the call has {_changed(*found)}; give {self.planner} the "
                "softcap, alibi_slopes and sink_logits of its calls"
            )

    def _check_planned(self, q: Any, k: Any, v: Any) -> None:
        p = self.problem
        planned = (p.batch, p.q_heads, p.q_len, p.dim), (p.batch, p.kv_heads, p.kv_len, p.v_dim)
        if (tuple(q.shape), tuple(v.shape)) != planned or dtypes.name(q.dtype) != p.dtype:
            raise InvalidInput(
                f"this plan takes {p.dtype} q {list(planned[0])} and v {list(planned[1])}; "
                f"got {q.dtype} {list(q.shape)} and {list(v.shape)}"
            )
        layout = operands.layout(q, k, v)
        if p.unit_stride and not layout.unit_stride:
            raise InvalidInput(
                "this plan needs last dims of q, k and v that are contiguous; attention(q, k, v, mask) takes any"
            )
        if p.aligned and not layout.aligned:
            raise InvalidInput(
                "this plan needs pointers and strides of q, k and v that are multiples of 16 bytes; "
                "attention(q, k, v, mask) takes any"
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
        rules = [name for name, there in (("interval", p.by_interval), ("bits", p.by_bits)) if there]
        by = f" by {' or '.join(rules)}" if p.partial and rules else ""
        counts = (
            f"{most}{p.stored} of {p.cells} blocks of {p.block[0]}x{p.block[1]} stored ({100 * p.density:.3g} %), "
            f"{most}{p.partial} partial{by}, {self._sharing()}"
        )
        dense = "; dense: every block is stored" if p.exact and p.stored == p.cells and p.cells else ""
        return f"{self.label}: {counts}{dense}" if self.label else f"{counts}{dense}"

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
        return [f"  memory     {name} {megabytes([size])}{more}", *super().details()]

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
class AttentionPlan(MaskPlan):
    """How to run attention over one mask for one shape of q, k and v. Call it: `plan(q, k, v, mask)`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink_logits: Tensor | None = None,
    ) -> Any:
        """out, or (out, lse) if planned with return_lse; as `sk.attention`, but without gradients. No host sync.

        Raises InvalidInput for operands of other shapes, dtypes or alignment, for another mask, and if an operand
        requires a gradient; use `sk.attention(q, k, v, mask, plan=plan)` for gradients.
        """
        found = self.checked(q, k, v, mask)
        scores = operands.checked_scores(q, softcap, alibi_slopes, sink_logits)
        self.check_scores(scores)
        if wants_gradient(q, k, v, sink_logits):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT)
        call = Attended(q, k, v, found, operands.checked_scale(scale, q.shape[3]), scores=scores)
        out, lse = self.run(call, captured(q))
        return out if lse is None else (out, lse)

    def _run(self, call: Attended) -> tuple[Tensor, Tensor | None]:
        """lse is None unless it was planned."""
        q, k, v, mask, scale, _, scores = call
        out = operands.empty_out(q, v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=operands.lse_dtype(q.dtype)) if self.problem.lse else None
        if out.numel() == 0:
            return out, lse
        if mask.kv_len == 0:
            return out.zero_(), None if lse is None else without_keys(lse, scores.sink_logits)
        kernel, config, _ = self.choice
        kernel.launch(config, self.work, AttentionCall(q, k, v, mask, scale, out, lse, scores))
        return out, lse


def without_keys(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """`lse` [B, Hq, S] of queries that see no key."""
    return lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[None, :, None].expand_as(lse))


def _changed(softcap: bool, alibi: bool, sinks: str) -> str:
    """What changes scores, in words."""
    there = (("softcap", softcap), ("alibi_slopes", alibi), (f"{sinks} sink_logits", sinks))
    return ", ".join(name for name, given in there if given) or "plain scores"


def megabytes(counts: Iterable[int]) -> str:
    """A number of bytes as text."""
    return f"{sum(counts) / 1e6:.4g} MB"
