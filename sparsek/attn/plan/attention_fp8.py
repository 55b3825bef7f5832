"""The plan of attention over q, k and v in FP8, forward only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from sparsek.attn.mask.heads8 import QuantizedHeads
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import DIMS, check_shapes
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import MaskPlan, about, sizes, without_keys
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import arguments, dtypes
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import wants_gradient
from sparsek.engine.plan.select import Choice

NO_GRADIENT = (
    "FP8 attention has none; attention of the tensors has gradients, and torch.no_grad() lets this call run"
)


@dataclass(frozen=True)
class AttentionFp8Problem(AttentionProblem):
    """Attention of q, k and v in e4m3 with float32 scales. `dtype` is "e4m3".

    `out`: the dtype of the result. `scale_rows`: rows of q, k and v that share a scale, 0 for a whole head.
    """

    op: ClassVar[str] = "attention_fp8"

    out: str = "bf16"
    scale_rows: tuple[int, int, int] = (0, 0, 0)

    @property
    def rate_name(self) -> str:
        return "fp8"

    @property
    def compulsory_bytes(self) -> float:
        """As of other dtypes, with the result in its own; scales are left out."""
        more = dtypes.itemsize(self.out) - dtypes.itemsize(self.dtype)
        return super().compulsory_bytes + float(more * self.batch * self.q_heads * self.q_len * self.v_dim)


class AttendedFp8(NamedTuple):
    """Attention of quantized q, k and v over the blocks of a mask, the home of its plans. `lse`: return it too."""

    q: QuantizedHeads
    k: QuantizedHeads
    v: QuantizedHeads
    mask: BlockMask
    scale: float = 1.0
    lse: bool = False
    scores: Scores = PLAIN

    @property
    def like(self) -> Tensor:
        return self.q.values

    def problem(self, card: Card) -> AttentionFp8Problem:
        q, k, v, sinks = self.q, self.k, self.v, self.scores.sink_logits
        return AttentionFp8Problem(
            **sizes(q, k, v, self.mask, operands.layout(q.values, k.values, v.values), self.scores),
            card=card,
            lse=self.lse,
            sink_logits="" if sinks is None else dtypes.name(sinks.dtype),
            out=dtypes.name(q.source_dtype),
            scale_rows=(q.rows, k.rows, v.rows),
        )

    def key(self) -> Hashable:
        q, k, v, scores = self.q, self.k, self.v, self.scores
        kind = None if scores is PLAIN else (*operands.changes(scores), scores.form[2])
        layout = operands.layout(q.values, k.values, v.values)
        rows = q.rows, k.rows, v.rows
        return (
            q.shape,
            k.shape[1],
            v.shape[3],
            q.source_dtype,
            rows,
            self.mask.sizes.exact,
            layout,
            self.lse,
            kind,
        )

    def home(self) -> BlockMask:
        return self.mask

    def prepare(self, p: AttentionFp8Problem, choice: Choice) -> Any:
        return choice.kernel.prepare(p, choice.config, self.mask)

    def about(self) -> dict[str, Any]:
        return about(self.mask)


def check_heads(q: Any, k: Any, v: Any) -> None:
    """InvalidInput unless q, k and v are QuantizedHeads on one device that fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, QuantizedHeads):
            kind = "a torch.Tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InvalidInput(
                f"{name} must be QuantizedHeads {DIMS[name]} as the other operands, got {kind}; "
                "sparsek.quantize_heads(q, k, v) makes all three"
            )
        if x.turned is not (name == "v"):
            along = "along keys, as v is" if x.turned else "by rows, as q and k are"
            raise InvalidInput(f"{name} is quantized {along}; pass quantize_heads(q, k, v) in this order")
        arguments.one_device("q is", q.device, name, x.device, "move one of them, SparseK does not")
    check_shapes(q.shape, k.shape, v.shape)


def _facts(q: Any, v: Any, out: str, rows: tuple[int, ...]) -> str:
    """Sizes and scales of operands, in words."""
    return (
        f"q {list(q)} and v {list(v)} of {out}, with a scale for {list(rows)} rows of q, k and v (0: a head)"
    )


@dataclass(frozen=True, eq=False, repr=False)
class AttentionFp8Plan(MaskPlan):
    """How to run FP8 attention over one mask for one shape of q, k and v. Call it: `plan(q, k, v, mask)`."""

    def __call__(
        self,
        q: QuantizedHeads,
        k: QuantizedHeads,
        v: QuantizedHeads,
        mask: BlockMask | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink_logits: Tensor | None = None,
    ) -> Any:
        """out, or (out, lse) if planned with return_lse; as `sk.attention`. No host sync.

        Raises InvalidInput for operands of other shapes or scales, and for another mask.
        """
        found = self.checked(q, k, v, mask)
        scores = operands.checked_scores(q, softcap, alibi_slopes, sink_logits, dtype=q.source_dtype)
        self.check_scores(scores)
        check_no_gradient(q, k, v, sink_logits)
        call = AttendedFp8(q, k, v, found, operands.checked_scale(scale, q.shape[3]), scores=scores)
        out, lse = self.run(call, captured(q.values))
        return out if lse is None else (out, lse)

    def _checked_operands(self, q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor]:
        check_heads(q, k, v)
        return q.values, k.values

    def _check_planned(self, q: QuantizedHeads, k: QuantizedHeads, v: QuantizedHeads) -> None:
        p = self.problem
        planned = (
            (p.batch, p.q_heads, p.q_len, p.dim),
            (p.batch, p.kv_heads, p.kv_len, p.v_dim),
            p.out,
            p.scale_rows,
        )
        found = tuple(q.shape), tuple(v.shape), dtypes.name(q.source_dtype), (q.rows, k.rows, v.rows)
        if found != planned:
            raise InvalidInput(f"this plan takes {_facts(*planned)}; got {_facts(*found)}")
        layout = operands.layout(q.values, k.values, v.values)
        if (p.unit_stride, p.aligned) > tuple(layout):
            raise InvalidInput(
                "this plan needs values whose rows are contiguous and begin at multiples of 16 bytes, as those of "
                "quantize_heads; attention(q, k, v, mask) takes any"
            )

    def _run(self, call: AttendedFp8) -> tuple[Tensor, Tensor | None]:
        """lse is None unless it was planned."""
        q, k, v, mask, scale, _, scores = call
        out = operands.empty_out(q.values, v.shape[3], q.source_dtype)
        lse = (
            out.new_empty(q.shape[:3], dtype=operands.lse_dtype(q.source_dtype)) if self.problem.lse else None
        )
        if out.numel() == 0:
            return out, lse
        if mask.kv_len == 0:
            return out.zero_(), None if lse is None else without_keys(lse, scores.sink_logits)
        kernel, config, _ = self.choice
        kernel.launch(config, self.work, AttentionCall(q, k, v, mask, scale, out, lse, scores))
        return out, lse

    def details(self) -> list[str]:
        p = self.problem
        rows = dict.fromkeys("head" if not each else f"block of {each} rows" for each in p.scale_rows)
        return [f"  scales     float32, one per {', '.join(rows)}; out {p.out}", *super().details()]

    def _tensors(self) -> tuple[str, int]:
        p = self.problem
        rows, keys = p.batch * p.q_heads * p.q_len, p.batch * p.kv_heads * p.kv_len
        return "q, k, v and out", (rows + keys) * p.dim + keys * p.v_dim + rows * p.v_dim * dtypes.itemsize(
            p.out
        )


def check_no_gradient(q: QuantizedHeads, k: QuantizedHeads, v: QuantizedHeads, sinks: Tensor | None) -> None:
    """InvalidInput if autograd would expect a gradient."""
    for name, x in (("q", q.values), ("k", k.values), ("v", v.values), ("sink_logits", sinks)):
        if wants_gradient(x):
            raise InvalidInput(f"{name} requires a gradient, and {NO_GRADIENT}")
