"""The plan of attention over paged keys and values. It depends on shapes and kinds alone, never on lengths."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import LEAST, PageLists
from sparsek.attn.mask.token_lists import MOST, TokenLists
from sparsek.attn.plan import paged_operands as operands
from sparsek.attn.plan.attention import megabytes
from sparsek.attn.plan.attention_operands import checked_scale, lse_dtype
from sparsek.attn.plan.kernels import PagedCall
from sparsek.attn.plan.paged_call import Paged
from sparsek.attn.plan.paged_checks import check_values
from sparsek.attn.plan.problems import TYPICAL, PagedProblem
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX, faking, is_fake
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.plan_owner import drop_oldest
from sparsek.core.streams import captured, tensors_in
from sparsek.engine.plan.plan import Plan

MOST_QUERIES = 1 << 25
NUMBERS = 256  # scales of pages given as floats that are kept
_NUMBERS: dict[Hashable, Tensor] = {}
_HELD: dict[Hashable, Tensor] = {}  # those that captured graphs read, permanently


def _without_keys(call: Paged, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The result of a call in which no query has a key: 0, and -inf or the sink; after the last request -inf."""
    if not call.q.shape[0]:
        return out, lse
    rows = torch.arange(call.q.shape[0], dtype=torch.int32, device=call.q.device) < call.cu_seqlens_q[-1]
    if call.out is None:
        out.zero_()
    else:
        out.masked_fill_(rows[:, None, None], 0)
    if lse is not None:
        lse.fill_(-torch.inf)
        if call.sink_logits is not None:
            lse.copy_(torch.where(rows, call.sink_logits[:, None].to(lse.dtype), lse))
    return out, lse


@dataclass(slots=True, eq=False)
class AttendedPages:
    """A call of `sk.attention_paged`: its operands and options, each declared here, and checked by `checked`."""

    q: Any
    cache: Any
    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any
    mask: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    causal: Any = True
    scale: Any = None
    softcap: Any = 0.0
    sink_logits: Any = None
    k_scale: Any = None
    v_scale: Any = None
    out: Any = None
    return_lse: Any = False
    kernel: str | None = None

    def checked(self, *, planned: bool = False, predicted: bool = False) -> Paged:
        """The call in the form that kernels take; of CPU tensors the values are checked too.

        `planned`: it is not run, and values do not matter; if also `predicted`, tensors may be on any device.
        """
        q, block_table, seq_lens, cu_seqlens_q = self.q, self.block_table, self.seq_lens, self.cu_seqlens_q
        sink_logits, out = self.sink_logits, self.out
        if isinstance(self.mask, TokenLists):
            pass_lists(self)
        k, v = operands.split_cache(q, self.cache)
        if not predicted:
            arguments.supported("q", q.device)
        operands.check_tables(q, block_table, seq_lens, cu_seqlens_q)
        seen = operands.visible(q, k, self.mask, self.causal)
        cap = operands.check_scores(q, sink_logits, self.softcap)
        scales = [operands.check_page_scale(name, k, getattr(self, name)) for name in ("k_scale", "v_scale")]
        operands.check_out(q, v, out)
        tensors = {"q": q, "cache": k, "v of cache": v, "sink_logits": sink_logits, "out": out}
        operands.check_no_gradient(tensors)
        if out is not None:
            del tensors["out"]
            tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
            operands.check_memory(out, tensors | tables)
        most = block_table.shape[1] * k.shape[2]
        # More bounds nothing, and kernels multiply it.
        max_q, max_k = self.max_seqlen_q, self.max_seqlen_k
        max_q = q.shape[0] if max_q is None else min(arguments.integer("max_seqlen_q", max_q), MOST_QUERIES)
        max_k = most if max_k is None else arguments.integer("max_seqlen_k", max_k)
        on_cpu = q.device.type == "cpu" and not (faking() or is_fake(q))
        if not on_cpu:
            operands.check_sizes(q, k, block_table, seen, max_q)
        k_factor, v_factor = _page_scales(k, scales)
        call = Paged(
            q, k, v, block_table, seq_lens, cu_seqlens_q, seen.lists, sink_logits, k_factor, v_factor,
            checked_scale(self.scale, q.shape[2]), cap, seen.causal, seen.window, seen.sinks, max_q,
            min(max_k, most), arguments.flag("return_lse", self.return_lse), out,
        )  # fmt: skip
        if on_cpu and not (planned or predicted):
            check_values(call, every=False)
        return call


def pass_lists(call: AttendedPages) -> None:
    """Replace TokenLists of a call by lists over pages, whose rows name a block once. No sync."""
    lists: TokenLists = call.mask
    arguments.flag("causal", call.causal)
    if lists.indices.shape[0] != 1:
        raise InvalidInput(
            f"indices is {list(lists.indices.shape)}; over pages it must be [1, heads, tokens, n], for all tokens"
        )
    if lists.window or lists.sinks:
        raise InvalidInput(
            f"mask is {lists.label}; attention_paged has no window and no sinks beside lists: list their blocks"
        )
    call.causal, block = lists.causal, page_block(lists.block)
    at, counts = lists.indices[0], None if lists.counts is None else lists.counts[0]
    made = by_kernel("page_lists", at, counts, lists.block) if at.is_cuda else None
    if made is None:
        call.mask = PageLists.from_indices(_ascending(at, counts, lists.block), block)
        return
    (heads, tokens, n), (full, partial) = at.shape, (BlockLists(*made[:3]), BlockLists(*made[3:]))
    call.mask = PageLists(full, partial, heads, tokens, block, n)


def page_block(block: int) -> tuple[int, int]:
    """The block of per-token lists over pages."""
    if block < LEAST:
        raise InvalidInput(f"block is {block}; over pages it must be one of {LEAST} to {MOST} keys")
    return 1, block


def _ascending(at: Tensor, counts: Tensor | None, block: int) -> Tensor:
    """Lists of ascending blocks, int32 [heads, tokens, n], with -1 for those that occur again or cannot exist."""
    at = at.masked_fill(at > INT32_MAX // block, -1).clamp(min=-1).to(torch.int32)
    if counts is not None:
        entry = torch.arange(at.shape[2], dtype=torch.int32, device=at.device)
        at = at.masked_fill(entry >= counts[..., None], -1)
    at = at.sort(-1).values
    again = functional.pad(at[..., 1:] == at[..., :-1], (1, 0)) if at.shape[2] else at < 0
    return at.masked_fill(again, -1).contiguous()


def _page_scales(k: Tensor, scales: list[Any]) -> list[Tensor | None]:
    """Both as tensors of one length, 1 or Hkv, or None."""
    many = max((x.numel() for x in scales if isinstance(x, Tensor)), default=1)
    for x in scales:
        if isinstance(x, Tensor) and x.numel() != many:
            raise InvalidInput(
                f"k_scale and v_scale have {scales[0].numel()} and {scales[1].numel()} elements; they must have as "
                f"many: x.expand({many}).contiguous()"
            )
    return [_number(x, many, k.device) if isinstance(x, float) else x for x in scales]


def _number(value: float, many: int, device: torch.device) -> Tensor:
    """A float as a float32 tensor [many], made once for each stream: recorded calls hold it as a constant."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = value, many, device, stream
    found = _HELD.get(key, _NUMBERS.get(key))
    if found is None:
        with torch.inference_mode(False):
            found = torch.full((many,), value, dtype=torch.float32, device=device)
        if not captured(found):
            if len(_NUMBERS) >= NUMBERS:
                drop_oldest(_NUMBERS)
            _NUMBERS[key] = found
    elif captured(found):
        _HELD[key] = found
    return found


@dataclass(frozen=True, eq=False, repr=False)
class PagedPlan(Plan):
    """How to run attention over paged keys for one shape of q, cache, tables and lists. `problem` is a PagedProblem.

    Call it with the arguments of `attention_paged`. It holds nothing of a cache, and calls of one shape share one.
    """

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """out, or (out, lse) if planned with return_lse; arguments as of `sk.attention_paged` but kernel, check and
        return_lse, and no policies. No host sync.

        Raises InvalidInput for operands of other shapes or kinds than planned.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            raise InvalidInput(
                "plans do not go through torch.compile and torch.func; call attention_paged(...) there"
            )
        self.refuse_unless_ready()
        call = AttendedPages(*operands, **options, return_lse=self.problem.lse).checked(planned=True)
        self._check_planned(call)
        if call.q.device.type == "cpu":
            check_values(call, every=False)
        out, lse = self.run(call, captured(call.q))
        if call.out is not None:
            increment_version(out)  # kernels write by its address, which autograd does not see
        return out if lse is None else (out, lse)

    def _check_planned(self, call: Paged) -> None:
        p, card = self.problem, card_of(call.q.device)
        if card != p.card:
            raise InvalidInput(
                f"this plan is for {p.card.name}, and the call on {card.name}; plan with its operands"
            )
        found = call.problem(card)
        for each in fields(p):
            planned, got = getattr(p, each.name), getattr(found, each.name)
            weaker = each.name in ("aligned", "unit_stride") and got
            if planned != got and not weaker:
                raise InvalidInput(
                    f"this plan has {each.name}={planned}, and the call {got}; attention_paged(...) takes any, and "
                    "plans once for each"
                )

    def _allocated(self, call: Paged) -> tuple[tuple[Tensor, Tensor | None], tuple[PagedCall] | None]:
        q, out, p = call.q, call.out, self.problem
        if out is None:
            out = q.new_empty((q.shape[0], p.q_heads, p.v_dim))
        lse = q.new_empty((p.q_heads, q.shape[0]), dtype=lse_dtype(q.dtype)) if p.lse else None
        if not q.shape[0] or not call.seq_lens.shape[0] or not call.max_k:
            return _without_keys(call, out, lse), None
        ends = 0 if call.out is not None else q.shape[0], 0 if lse is None else q.shape[0]
        return (out, lse), (PagedCall(*call[:12], out, lse, *ends),)

    def headline(self) -> list[str]:
        p: PagedProblem = self.problem
        line = (
            f"attention_paged  q {[p.tokens, p.q_heads, p.dim]} {p.dtype} in {p.requests} requests of at most "
            f"{p.max_q} queries and {p.max_k} keys, pages of {p.page} rows, {p.kv_heads} heads, {p.kv_dtype}, on "
            f"{p.card.name}"
        )
        return [line, f"  sees       {self._seen()}"]

    def _seen(self) -> str:
        p: PagedProblem = self.problem
        parts = ["keys up to each query's own" if p.causal else "every key"]
        if p.window:
            parts.append(
                f"of these a window of {p.window}" + (f" and the first {p.sinks}" if p.sinks else "")
            )
        if p.list_heads:
            bq, bk = p.list_block
            parts.append(f"of these at most {p.listed} listed blocks of {bq}x{bk}, for {p.list_heads} heads")
        parts += [
            name
            for name, there in (("capped scores", p.softcap), ("a sink per head", p.sink_logits))
            if there
        ]
        return ", ".join(parts)

    def details(self) -> list[str]:
        by = f"  chosen     for {TYPICAL} such requests, so that the bits of a request do not depend on the batch"
        if not self.ready:
            return [by, *super().details()]
        own = megabytes([x.nbytes for x in tensors_in(self.work)])
        return [by, f"  memory     plan {own}", *super().details()]
