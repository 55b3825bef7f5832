"""Attention over paged keys as torch.library ops: one that returns out, and one that writes to a given tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.plan import paged_operands as operands
from sparsek.attn.plan.attention_operands import checked_scale, lse_dtype
from sparsek.attn.plan.attention_paged import AttendedPages, PagedPlan
from sparsek.attn.plan.paged_call import Paged
from sparsek.attn.plan.problems import PagedProblem
from sparsek.attn.reference.scores import checked_softcap
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
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
        q, cache, table, lengths, edges, lists, (max_q, max_k, window, sinks, *sizes), *rest = self
        listed, options = cast(Any, (lists, rest))
        sink_logits, k_scale, v_scale, causal, scale, softcap, return_lse, _ = options
        mask: MaskPolicy | PageLists | None = None
        if sizes:
            heads, tiles, bq, bk, longest = sizes
            full, partial = BlockLists(*listed[:3]), BlockLists(*listed[3:])
            mask = PageLists(full, partial, heads, tiles, (bq, bk), longest)
        elif window:
            mask = MaskPolicy(window=window, sinks=sinks, causal=causal)
        pages = cache[0] if len(cache) == 1 else tuple(cache)
        bounds = None if max_q < 0 else max_q, None if max_k < 0 else max_k
        return AttendedPages(
            q, pages, table, lengths, edges, mask, *bounds, causal, scale, softcap, sink_logits, k_scale, v_scale, out,
            return_lse,
        ).checked()  # fmt: skip

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


def through_op(call: AttendedPages) -> tuple[Tensor, Tensor]:
    """(out, lse) of the call through a torch.library op, which checks it once more. Its schema refuses with torch's
    errors.
    """
    q, cache, mask, causal, out = call.q, call.cache, call.mask, call.causal, call.out
    bounds = _bounded("max_seqlen_q", call.max_seqlen_q), _bounded("max_seqlen_k", call.max_seqlen_k)
    scale = None if call.scale is None else checked_scale(call.scale, 1)
    softcap = checked_softcap(call.softcap)
    tables = call.block_table, call.seq_lens, call.cu_seqlens_q
    first = operands.check_tensors(q, cache, tables, {"sink_logits": call.sink_logits, "out": out})
    scales = [operands.check_page_scale(name, first, getattr(call, name)) for name in ("k_scale", "v_scale")]
    if mask is not None and not isinstance(mask, MaskPolicy | PageLists):
        raise InvalidInput(f"mask is {arguments.shown(mask)}; it must be None, a MaskPolicy or PageLists")
    if isinstance(mask, MaskPolicy):
        operands.check_policy(mask, causal)
    operands.check_no_gradient({"q": q, "sink_logits": call.sink_logits, "out": out})
    causal = arguments.flag("causal", causal)
    causal = mask.causal if isinstance(mask, MaskPolicy) else causal
    many = max([1, *[x.numel() for x in scales if isinstance(x, Tensor)]])
    as_tensors = [
        x if x is None or isinstance(x, Tensor) else q.new_full((many,), x, dtype=torch.float32)
        for x in scales
    ]
    given = (
        q, [cache] if isinstance(cache, Tensor) else list(cache), *tables, *flat(mask, *bounds), call.sink_logits,
        *as_tensors, causal, scale, softcap, call.return_lse, call.kernel,
    )  # fmt: skip
    if out is None:
        return torch.ops.sparsek.attention_paged(*given)
    return out, torch.ops.sparsek.attention_paged_out(out, *given)


def _bounded(name: str, value: Any) -> int | None:
    """A bound of lengths, at most INT32_MAX. An int is only compared, so that a graph holds for others."""
    if type(value) is int and 0 <= value <= INT32_MAX:
        return value
    return None if value is None else min(arguments.integer(name, value), INT32_MAX)
