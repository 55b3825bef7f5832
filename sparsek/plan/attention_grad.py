"""The plan of the gradients of attention over the blocks of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.mask.mask import BlockMask
from sparsek.plan import attention_operands as operands
from sparsek.plan.attention import MaskPlan, megabytes


class Forward(NamedTuple):
    """What a forward pass leaves for its gradients: `out` and `lse` as it gave them, and the scale it used."""

    out: Tensor
    lse: Tensor
    scale: float


@dataclass(frozen=True, eq=False, repr=False)
class AttentionGradPlan(MaskPlan):
    """How to run the backward pass of attention over one mask for one shape of q, k and v.

    Call it: `plan(q, k, v, mask, out, lse, grad)`, with `scale=` and `grad_lse=` where these were given or wanted.
    `problem` is an AttentionGradProblem.
    """

    planner: ClassVar[str] = "plan_attention_backward"

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) for the gradients `grad` of out and `grad_lse` of lse, or 0. No host sync.

        out and lse are those of a forward pass with the same mask and scale. A `grad` whose last dim is not contiguous
        is copied, and where the plan needs it one whose pointer or strides are not multiples of 16 bytes. The results
        have no gradients. Raises InvalidInput for operands of other shapes, dtypes or alignment, and for another mask.
        """
        found = self.checked(q, k, v, mask)
        operands.check_backward(q, v, out, lse, grad, grad_lse)
        forward = Forward(out, lse, operands.checked_scale(scale, q.shape[3]))
        with torch.no_grad():
            return self.run(q, k, v, found, forward, grad, grad_lse)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        forward: Forward,
        grad: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The call without its checks, for operands that are known to fit."""
        dq, dk, dv = (operands.empty_out(x, x.shape[3]) for x in (q, k, v))
        if q.numel() == 0 or k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_()
        grad = operands.fitting(grad, forward.out, self.problem.aligned)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        self._wait(q)
        kernel, config, _ = self.choice
        with dtypes.as_given(q.device):
            kernel.launch(
                config,
                self.work,
                q,
                k,
                v,
                mask,
                forward.scale,
                forward.out,
                forward.lse,
                grad,
                grad_lse,
                dq,
                dk,
                dv,
            )
        return dq, dk, dv

    def headline(self) -> list[str]:
        order = "" if self.problem.deterministic else ", sums in any order"
        first, *rest = super().headline()
        return [f"{first}{order}", *rest]

    def _title(self) -> str:
        return "gradients"

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
        """The tensors of the mask's transposed lists, if a kernel has asked for them."""
        mask = self.mask()
        return [] if mask is None else list(tensors_in(mask.known(TRANSPOSED)))


TRANSPOSED, TRANSPOSED_MADE = "transposed", "transposed made"


@contextmanager
def sharing_transposed(mask: BlockMask) -> Iterator[None]:
    """For a body that may read `mask.transposed`: the current stream waits for lists that another one has built."""
    if captured(mask.full.starts):
        yield
        return
    made = mask.known(TRANSPOSED_MADE)
    if made is not None:
        wait_for(made, tensors_in(mask.known(TRANSPOSED)))
    yield
    if made is None and mask.known(TRANSPOSED) is not None and mask.device.type == "cuda":
        mask.derived(TRANSPOSED_MADE, lambda: Ready.here(mask.device))
