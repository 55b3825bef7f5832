"""The plan of the gradients of attention over the blocks of a mask."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import NONE, Attended, MaskPlan, megabytes
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.attn.reference.scores import Scores
from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.engine.plan.select import Choice


class Differentiated(NamedTuple):
    """The gradients of a call of attention from what its forward pass gave, and the gradients of that.

    The mask keeps the plans of these calls.
    """

    call: Attended
    out: Tensor = NONE
    lse: Tensor = NONE
    grad: Tensor = NONE
    grad_lse: Tensor | None = None

    @property
    def like(self) -> Tensor:
        return self.call.q

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All but those of the scores, and of the mask."""
        call, *rest = self
        return *call.tensors, *(x for x in rest if x is not None)

    @property
    def layout(self) -> operands.Layout:
        """The layouts of q, k and v, and of the gradient of out, which is copied if needed."""
        return operands.backward_layout(self.call.q, self.call.k, self.call.v)

    def check(self) -> None:
        """InvalidInput for operands that do not fit together."""
        call = self.call
        call.check()
        operands.check_backward(call.q, call.v, *self[1:])

    def problem(self, card: Card) -> AttentionGradProblem:
        fields = self.call.fields(self.layout)
        in_order, wide = self.call.in_order, self.call.wide
        problem = AttentionGradProblem(**fields, card=card, deterministic=in_order, wide=wide)
        return self.call.placed(problem)

    def key(self) -> Hashable:
        return *self.call.alike(self.layout), self.call.in_order, self.call.wide

    def plan_owner(self) -> BlockMask:
        return self.call.mask

    def prepare(self, p: AttentionGradProblem, choice: Choice) -> Any:
        mask = self.call.mask
        with sharing_transposed(mask):
            return choice.kernel.prepare(p, choice.config, mask)

    def about(self) -> dict[str, Any]:
        return self.call.about()


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGradPlan(MaskPlan):
    """How to run the backward pass of attention over one mask for one shape of q, k and v.

    Call it: `plan(q, k, v, mask, out, lse, grad)`, with `scale=` if the forward pass had one and `grad_lse=` for the
    gradient of lse; `softcap=` and `alibi_slopes=` as planned. `problem` is an AttentionGradProblem.
    """

    planner: ClassVar[str] = "plan_attention_backward"
    title: ClassVar[str] = "gradients"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask | None,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) for the gradients `grad` of out and `grad_lse` of lse, or 0. No host sync.

        out and lse are those of a forward pass with the same mask, scale, softcap and slopes; learned sinks, whose
        gradient only `attention` gives, are in lse. A `grad` whose last dim is not
        contiguous is copied; so is one whose pointer or strides are not multiples of 16 bytes, if the plan needs
        that. The results have no gradients. Raises InvalidInput for operands of other shapes, dtypes or alignment,
        and for another mask.
        """
        scores = Scores(softcap, alibi_slopes)
        call = Attended(q, k, v, mask, scale, scores=scores, plan=self)
        given = Differentiated(call, out, lse, grad, grad_lse)
        given.check()
        with torch.no_grad():
            return self.run(given, captured(q))

    def _allocated(
        self, given: Differentiated
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[AttentionGradCall] | None]:
        call, out, lse, grad, grad_lse = given
        q, k, v = call.q, call.k, call.v
        widens = self.problem.wide and getattr(self.choice.kernel, "widens", False)
        of_keys = torch.promote_types(k.dtype, torch.float32) if widens else None
        dq = operands.empty_out(q, q.shape[3])
        dk, dv = (operands.empty_out(x, x.shape[3], of_keys) for x in (k, v))
        if q.numel() == 0 or k.numel() == 0:
            return (dq.zero_(), dk.zero_(), dv.zero_()), None
        grad = operands.fitting(grad, out, self.problem.aligned)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        results = dq, dk, dv
        launch = AttentionGradCall(
            q, k, v, call.mask, call.factor, out, lse, grad, grad_lse, *results, call.scores
        )
        return results, (launch,)

    def headline(self) -> list[str]:
        order = "" if self.problem.deterministic else ", sums in any order"
        first, *rest = super().headline()
        return [f"{first}{order}", *rest]

    def _tensors(self) -> tuple[str, int]:
        p = self.problem
        rows, keys = p.batch * p.q_heads * p.q_len, p.batch * p.kv_heads * p.kv_len
        size = 2 * (rows + keys) * (p.dim + p.v_dim) * dtypes.itemsize(p.dtype)
        return "q, k, v, out and their gradients", size + rows * 4

    def _kept(self) -> list[str]:
        lists = self._transposed()
        return [
            *super()._kept(),
            *([f"its transposed lists {megabytes(x.nbytes for x in lists)}"] if lists else []),
        ]

    def _own(self) -> list[int]:
        shared = {x.data_ptr() for x in self._transposed()}
        return [x.nbytes for x in tensors_in(self.work) if x.data_ptr() not in shared]

    def _transposed(self) -> list[Tensor]:
        """The tensors of the mask's transposed lists, if a kernel has built them."""
        mask = self.mask()
        return [] if mask is None else list(tensors_in(mask.known(TRANSPOSED)))


TRANSPOSED, TRANSPOSED_MADE = "transposed", "transposed made"


@contextmanager
def sharing_transposed(mask: BlockMask) -> Iterator[None]:
    """Around code that may read `mask.transposed`: makes the current stream wait for lists built on another stream."""
    if captured(mask.full.starts):
        yield
        return
    made = mask.known(TRANSPOSED_MADE)
    if made is not None:
        wait_for(made, tensors_in(mask.known(TRANSPOSED)))
    yield
    if made is None and mask.known(TRANSPOSED) is not None and mask.device.type == "cuda":
        mask.derived(TRANSPOSED_MADE, lambda: Ready.here(mask.device))
