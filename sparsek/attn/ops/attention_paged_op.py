"""Attention over paged keys as torch.library ops: one that returns out, and one that writes to a given tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.plan.attention_operands import lse_dtype
from sparsek.attn.plan.attention_paged import PagedPlan, paged_call
from sparsek.attn.plan.paged_call import Paged
from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.operations import TAGS, schema_of
from sparsek.engine import table as kernels
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.select import Choice
from sparsek.engine.planning import choose


def choose_typical(p: PagedProblem, kernel: str | None = None, config: Any = None) -> Choice:
    """The choice for a typical batch, with the predictions for this one.

    It does not depend on how many requests and tokens there are, so that the bits of a request do not either.
    """
    found = choose(p.typical, kernel, config)
    of_batch = tuple(
        each if each.why_not else replace(each, seconds=kernels.load(each.name).seconds(p, each.config))
        for each in found.candidates
    )
    return found._replace(candidates=of_batch)


ATTENTION_PAGED = Operation(PagedPlan, choose_typical)


class PagedArgs(NamedTuple):
    """The arguments of `sparsek::attention_paged`. `cache`: one tensor or two. `lists` and `numbers` are of `flat`."""

    q: Tensor
    cache: Sequence[Tensor | None]
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    lists: Sequence[Tensor | None]
    numbers: Sequence[int]
    sink_logits: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    causal: bool
    scale: float | None
    softcap: float
    return_lse: bool
    kernel: str | None

    def call(self, out: Tensor | None = None) -> Paged:
        """The checked call."""
        max_q, max_k, window, sinks, *sizes = self.numbers
        cache, causal = self.cache[0] if len(self.cache) == 1 else tuple(self.cache), self.causal
        mask: MaskPolicy | PageLists | None = None
        if sizes:
            heads, tiles, bq, bk, longest = sizes
            lists: Any = self.lists
            full, partial = BlockLists(*lists[:3]), BlockLists(*lists[3:])
            mask = PageLists(full, partial, heads, tiles, (bq, bk), longest)
        elif window:
            mask = MaskPolicy(window=window, sinks=sinks, causal=causal)
        return paged_call(
            self.q, cache, self.block_table, self.seq_lens, self.cu_seqlens_q, mask,
            max_seqlen_q=None if max_q < 0 else max_q, max_seqlen_k=None if max_k < 0 else max_k, causal=causal,
            scale=self.scale, softcap=self.softcap, sink_logits=self.sink_logits, k_scale=self.k_scale,
            v_scale=self.v_scale, out=out, return_lse=self.return_lse,
        )  # fmt: skip

    def empty_lse(self) -> Tensor:
        """An uninitialised lse; empty unless it is returned."""
        shape = (self.q.shape[1], self.q.shape[0]) if self.return_lse else (0,)
        return self.q.new_empty(shape, dtype=lse_dtype(self.q.dtype))


RETURNS = schema_of(PagedArgs, "(Tensor, Tensor)")
WRITES = schema_of(PagedArgs).replace("(Tensor q", "(Tensor(a!) out, Tensor q", 1)


@torch.library.custom_op("sparsek::attention_paged", mutates_args=(), schema=RETURNS, tags=TAGS)
def attention_paged_op(*given: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `sparsek.attention_paged`; lse is empty unless `return_lse`."""
    args = PagedArgs(*given)
    with torch.no_grad():
        out, lse = ATTENTION_PAGED.run(args.call(), args.kernel)
        return out, args.empty_lse() if lse is None else lse


@attention_paged_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    args = PagedArgs(*given)
    last: Any = args.cache[-1]
    v_dim = last.shape[3] // 2 if len(args.cache) == 1 else last.shape[3]
    return args.q.new_empty((*args.q.shape[:2], v_dim)), args.empty_lse()


@torch.library.custom_op("sparsek::attention_paged_out", mutates_args=("out",), schema=WRITES, tags=TAGS)
def attention_paged_out_op(out: Tensor, *given: Any) -> Tensor:
    """lse of `sparsek.attention_paged` with `out`."""
    args = PagedArgs(*given)
    with torch.no_grad():
        lse = ATTENTION_PAGED.run(args.call(out), args.kernel)[1]
        return args.empty_lse() if lse is None else lse


@attention_paged_out_op.register_fake
def _(out: Tensor, *given: Any) -> Tensor:
    return PagedArgs(*given).empty_lse()


def flat(
    mask: MaskPolicy | PageLists | None, max_q: int | None, max_k: int | None
) -> tuple[list[Tensor | None], list[int]]:
    """A mask and the bounds of lengths as tensors and ints."""
    bounds = [-1 if x is None else x for x in (max_q, max_k)]
    if isinstance(mask, PageLists):
        full, part, (bq, bk) = mask.full, mask.partial, mask.block
        tensors: list[Tensor | None] = [
            full.starts, full.counts, full.indices, part.starts, part.counts, part.indices,
        ]  # fmt: skip
        return tensors, [*bounds, 0, 0, mask.heads, mask.tiles, bq, bk, mask.longest]
    if mask is None or mask.window is None:
        return [], [*bounds, 0, 0]
    return [], [*bounds, mask.window, mask.sinks]


def through_op(
    q: Tensor,
    cache: Any,
    tables: Sequence[Tensor],
    mask: MaskPolicy | PageLists | None,
    bounds: tuple[int | None, int | None],
    sink_logits: Tensor | None,
    scales: Sequence[Any],
    out: Tensor | None,
    causal: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the call through a torch.library op, with `settings` in the op's order."""
    pages = [cache] if isinstance(cache, Tensor) else list(cache)
    lists, numbers = flat(mask, *bounds)
    if isinstance(mask, MaskPolicy):
        causal = mask.causal
    many = max([1, *[x.numel() for x in scales if isinstance(x, Tensor)]])
    as_tensors = [
        x
        if x is None or isinstance(x, Tensor)
        else None
        if x == 1
        else q.new_full((many,), x, dtype=torch.float32)
        for x in scales
    ]
    given = (q, pages, *tables, lists, numbers, sink_logits, *as_tensors, causal, *settings)
    if out is None:
        return torch.ops.sparsek.attention_paged(*given)
    return out, torch.ops.sparsek.attention_paged_out(out, *given)
