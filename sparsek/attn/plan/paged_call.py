"""One call of attention over paged keys and values: its operands, checked."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan import paged_operands as operands
from sparsek.attn.plan.problems import PagedProblem
from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.core.plan_owner import PlanOwner
from sparsek.engine.plan.select import Choice

HOME = PlanOwner()


class Paged(NamedTuple):
    """Attention of a ragged batch over paged keys; operands as in `PagedCall`. `max_q`, `max_k`: bounds of lengths.

    `lse`: return it too. `out`: where to write, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    lists: PageLists | None
    sink_logits: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    softcap: float
    causal: bool
    window: int
    sinks: int
    max_q: int
    max_k: int
    lse: bool = False
    out: Tensor | None = None

    @property
    def like(self) -> Tensor:
        return self.q

    def problem(self, card: Card) -> PagedProblem:
        q, k, v, lists = self.q, self.k, self.v, self.lists
        form = operands.layout(q, k, v)
        listed: dict[str, Any] = (
            {}
            if lists is None
            else {"list_heads": lists.heads, "list_block": lists.block, "listed": lists.longest}
        )
        return PagedProblem(
            # Kernels divide by sizes. A call without queries, requests or keys launches nothing.
            tokens=max(1, q.shape[0]),
            requests=max(1, self.seq_lens.shape[0]),
            q_heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[2],
            v_dim=v.shape[3],
            page=k.shape[2],
            max_q=max(1, self.max_q),
            max_k=max(1, self.max_k),
            dtype=dtypes.name(q.dtype),
            kv_dtype=dtypes.shown(k.dtype),
            card=card,
            causal=self.causal,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap != 0,
            sink_logits=self.sink_logits is not None,
            scale_per=self._scale_per,
            aligned=form.aligned,
            unit_stride=form.unit_stride,
            lse=self.lse,
            **listed,
        )

    @property
    def _scale_per(self) -> str:
        given = [x.numel() for x in (self.k_scale, self.v_scale) if x is not None]
        return "" if not given else "tensor" if max(given) == 1 else "head"

    def key(self) -> Hashable:
        q, k, v, lists = self.q, self.k, self.v, self.lists
        listed = None if lists is None else (lists.heads, lists.block, lists.longest)
        return (
            q.shape, k.shape[1:3], v.shape[3], self.seq_lens.shape[0], q.dtype, k.dtype, q.device, listed,
            operands.layout(q, k, v), self.sink_logits is None, self._scale_per, self.softcap != 0, *self[12:18],
        )  # fmt: skip

    def plan_owner(self) -> PlanOwner:
        return HOME

    def prepare(self, p: PagedProblem, choice: Choice) -> Any:
        return choice.kernel.prepare(p, choice.config, self.q.device)

    def about(self) -> dict[str, Any]:
        return {}


# The plans of this process. They hold nothing of a cache, so caches and layers of one shape share them.
