"""The plan of attention over q, k and v in FP8, forward only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.attn.mask.convert.argument import block_mask
from sparsek.attn.mask.operands import DIMS, check_shapes
from sparsek.attn.mask.quantized_heads import QuantizedHeads
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended, AttendedPlan
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core import arguments, dtypes
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import wants_gradient

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


@dataclass(slots=True, eq=False)
class AttendedFp8(Attended):
    """A call of attention of three QuantizedHeads, which are checked when it is made."""

    q: Any
    k: Any
    v: Any

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise InvalidInput(
                "FP8 attention does not go through torch.compile and torch.func; call it outside"
            )
        check_heads(self.q, self.k, self.v)

    def convert_mask(self, is_causal: bool = False, *, predicted: bool = False) -> None:
        mask = self.mask
        plain = isinstance(mask, TokenLists) or (isinstance(mask, MaskPolicy) and mask.topk is None)
        if isinstance(mask, MaskRule) and not plain:
            raise InvalidInput(
                f"mask is {mask.label}, which chooses blocks by q and k, and these are quantized; pass the BlockMask "
                "that policy.mask_for(q, k) makes of the tensors"
            )
        q, k = (x.scale.new_zeros(()).expand(x.shape) for x in (self.q, self.k))
        self.mask = block_mask(mask, q, k, is_causal, predicted=predicted)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        q, k, v = self.q, self.k, self.v
        return q.values, q.scale, k.values, k.scale, v.values, v.scale

    @property
    def form(self) -> Hashable:
        return "attention_fp8", self.rows, self.v.length, self.dtype

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v that share a scale, 0 for a whole head."""
        return self.q.rows, self.k.rows, self.v.rows

    @property
    def like(self) -> Tensor:
        return self.q.values

    @property
    def dtype(self) -> torch.dtype:
        return self.q.source_dtype

    @property
    def layout(self) -> operands.Layout:
        return operands.layout(self.q.values, self.k.values, self.v.values)

    def check_operands(self, here: bool = True, planner: str = "plan_attention") -> None:
        if here:
            arguments.supported("q", self.q.device)

    def refuse_gradient(self) -> None:
        q, k, v, sinks = self.q, self.k, self.v, self.scores.sink_logits
        for name, x in (("q", q.values), ("k", k.values), ("v", v.values), ("sink_logits", sinks)):
            if wants_gradient(x):
                raise InvalidInput(f"{name} requires a gradient, and {NO_GRADIENT}")

    def problem(self, card: Card) -> AttentionFp8Problem:
        given = {**self.fields(self.layout), **self.lse_fields()}
        return AttentionFp8Problem(**given, card=card, out=dtypes.name(self.dtype), scale_rows=self.rows)


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
class AttentionFp8Plan(AttendedPlan):
    """How to run FP8 attention over one mask for one shape of q, k and v. Call it: `plan(q, k, v, mask)`."""

    calls: ClassVar[type[Attended]] = AttendedFp8

    def _check_sizes(self, call: Any) -> None:
        p = self.problem
        shapes = (p.batch, p.q_heads, p.q_len, p.dim), (p.batch, p.kv_heads, p.kv_len, p.v_dim)
        planned = *shapes, p.out, p.scale_rows
        found = tuple(call.q.shape), tuple(call.v.shape), dtypes.name(call.dtype), call.rows
        if found != planned:
            raise InvalidInput(f"this plan takes {_facts(*planned)}; got {_facts(*found)}")
        if (p.unit_stride, p.aligned) > tuple(call.layout):
            raise InvalidInput(
                "this plan needs values whose rows are contiguous and begin at multiples of 16 bytes, as those of "
                "quantize_heads; attention(q, k, v, mask) takes any"
            )

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
