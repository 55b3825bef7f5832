"""What a serving engine would run instead of `sk.attention_paged`, a copy of the same bytes, and our unpaged kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import bias

from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention import attention
from sparsek_bench.engine.peer import Own, Peer, ReadyPeer, accepted, holding, setting_up
from sparsek_bench.peers.attention import LOW, imported

COPY, FA4, PLAIN, UNPAGED, BF16 = "copy", "fa4", "sdpa", "unpaged", "bf16"


@dataclass(frozen=True)
class TimedCalls(Peer):
    """A peer whose call of each set is made by `timed`. Its time stands beside ours whatever it computes; results are
    judged where it computes the same, `same(case)`.
    """

    def timed(self, case: Any, one: Any) -> Callable[[], Any]:
        """The call of a set."""
        raise NotImplementedError

    def same(self, case: Any) -> bool:
        """Whether it computes what the case has."""
        return True

    def shaped(self, case: Any, out: Any) -> Tensor:
        """Its result as [tokens, Hq, D]."""
        return out

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        with setting_up(self.title):
            calls = tuple(self.timed(case, one) for one in sets)
            out, *_ = [call() for call in calls]
            if self.same(case):
                accepted(sets[0].judge(self.shaped(case, out)), "its result")
        return ReadyPeer(calls, "" if self.same(case) else "every key up to each query's own")


@dataclass(frozen=True)
class Copy(TimedCalls):
    """torch's copy of as many bytes as a call must read and write: half of them read, half written."""

    def same(self, case: Any) -> bool:
        return False

    def timed(self, case: Any, one: Any) -> Callable[[], Any]:
        half = max(16, int(one.moved) // 32 * 16)
        given = torch.randint(0, 100, (half,), dtype=torch.uint8, device=one.q.device)
        return partial(torch.empty_like(given).copy_, given)

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        return ReadyPeer(super().ready(case, sets, tried).calls, "as many bytes")


@dataclass(frozen=True)
class PlainAttention(TimedCalls):
    """torch's scaled_dot_product_attention on keys and values that lie one after another; every key up to the query."""

    def same(self, case: Any) -> bool:
        return case.sees == "causal"

    def shaped(self, case: Any, out: Any) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def timed(self, case: Any, one: Any) -> Callable[[], Any]:
        q, k, v = one.plain
        seen = bias.causal_lower_right(case.q_len, case.kv_len) if case.q_len > 1 else None
        return partial(
            functional.scaled_dot_product_attention,
            q,
            k,
            v,
            attn_mask=seen,
            enable_gqa=case.heads != case.kv_heads,
        )


@dataclass(frozen=True)
class Unpaged(PlainAttention):
    """sk.attention on the same keys one after another, over the mask of the policy."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        return super().why_not(case, device) + holding({"its lists are of pages": case.listed})

    def same(self, case: Any) -> bool:
        return True

    def timed(self, case: Any, one: Any) -> Callable[[], Any]:
        q, k, v = one.plain
        mask = (one.mask or MaskPolicy()).mask(case.q_len, case.kv_len, q.device)
        return lambda: attention(q, k, v, mask)


@dataclass(frozen=True)
class PagedFlash4(TimedCalls):
    """FlashAttention-4 (flash_attn.cute) over pages [pages, page, Hkv, D]; where blocks are chosen, every key."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        reasons = {
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
            "is measured without FP8 pages": case.kv != case.dtype,
            "its window has no sinks": "sinks" in case.sees,
        }
        return super().why_not(case, device) + holding(reasons)

    def same(self, case: Any) -> bool:
        return not case.listed

    def timed(self, case: Any, one: Any) -> Callable[[], Any]:
        flash = imported("flash_attn.cute.interface").flash_attn_varlen_func
        k, v = (x.transpose(1, 2).contiguous() for x in one.pages)
        window = case.window
        options: dict[str, Any] = {
            "cu_seqlens_q": one.cu_seqlens_q,
            "seqused_k": one.seq_lens,
            "page_table": one.block_table,
            "max_seqlen_q": case.q_len,
            "max_seqlen_k": case.kv_len,
            "causal": True,
        }
        if window is not None:  # its window counts the keys before the query, ours the query too
            options["window_size"] = (window - 1, 0)
        known = inspect.signature(flash).parameters
        options = {name: value for name, value in options.items() if name in known}

        def call() -> Tensor:
            out = flash(one.q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return call


def over_bf16() -> Own:
    """The same call over pages in the dtype of q."""
    return Own(
        BF16,
        "bf16 pages",
        unless=lambda case: holding({"pages have the dtype of q": case.kv == case.dtype}),
        other=lambda case, one, index: one.unscaled,
    )


PEERS: tuple[Peer, ...] = (
    Copy(COPY, "a copy"),
    PagedFlash4(FA4, "FlashAttention-4", "cuda"),
    PlainAttention(
        PLAIN, "torch, unpaged", unless=lambda case: holding({"has no FP8": case.kv != case.dtype})
    ),
    Unpaged(UNPAGED, "ours, unpaged", unless=lambda case: holding({"has no FP8": case.kv != case.dtype})),
    over_bf16(),
)
