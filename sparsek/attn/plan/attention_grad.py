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
from sparsek.attn.plan.attention import MaskPlan, about, alike, megabytes, sizes
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.engine.plan.select import Choice


class Forward(NamedTuple):
    """What the forward pass saves for its gradients: its `out` and `lse`, and the scale it used."""

    out: Tensor
    lse: Tensor
    scale: float


class Differentiated(NamedTuple):
    """The gradients of q, k and v from what `forward` saved. The mask keeps the plans of these calls."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    deterministic: bool = True
    forward: Forward | None = None
    grad: Tensor | None = None
    grad_lse: Tensor | None = None
    scores: Scores = PLAIN

    @property
    def like(self) -> Tensor:
        return self.q

    def problem(self, card: Card) -> AttentionGradProblem:
        shared = sizes(*self[:4], operands.backward_layout(self.q, self.k, self.v), self.scores)
        return AttentionGradProblem(**shared, card=card, deterministic=self.deterministic)

    def key(self) -> Hashable:
        changes = operands.changes(self.scores)
        return (
            *alike(*self[:4]),
            operands.backward_layout(self.q, self.k, self.v),
            self.deterministic,
            changes,
        )

    def home(self) -> BlockMask:
        return self.mask

    def prepare(self, p: AttentionGradProblem, choice: Choice) -> Any:
        with sharing_transposed(self.mask):
            return choice.kernel.prepare(p, choice.config, self.mask)

    def about(self) -> dict[str, Any]:
        return about(self.mask)


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
        found = self.checked(q, k, v, mask)
        scores = operands.checked_scores(q, softcap, alibi_slopes, None)
        self.check_scores(scores)
        operands.check_backward(q, v, out, lse, grad, grad_lse)
        forward = Forward(out, lse, operands.checked_scale(scale, q.shape[3]))
        call = Differentiated(q, k, v, found, self.problem.deterministic, forward, grad, grad_lse, scores)
        with torch.no_grad():
            return self.run(call, captured(q))

    def _run(self, call: Differentiated) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mask, _, forward, grad, grad_lse, scores = call
        assert forward is not None
        assert grad is not None
        dq, dk, dv = (operands.empty_out(x, x.shape[3]) for x in (q, k, v))
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        out, lse, scale = forward
        grad = operands.fitting(grad, out, self.problem.aligned)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        kernel, config, _ = self.choice
        given = AttentionGradCall(q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores)
        kernel.launch(config, self.work, given)
        return dq, dk, dv

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
