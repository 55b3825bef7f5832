"""Attention over paged keys as a benchmark: chunks of prompts and decoding, over causal keys, windows and lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention_paged import attention_paged, plan_attention_paged
from sparsek.attn.plan.attention_paged import PagedPlan
from sparsek.attn.plan.paged_operands import E4M3, PAGES
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import Gate
from sparsek.testing.paged_budget import ExpectedPaged, PagedInputs, expected_attention_paged
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import Bar, Operands, length_name, rows
from sparsek_bench.engine.case import Case as EngineCase
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.tables import CASE, GBPS, MS, SPEEDUP, USEFUL, target
from sparsek_bench.peers.paged import BF16, COPY, FA4, PEERS, UNPAGED
from sparsek_bench.suites.attention import lengths, parse_pair

GATED = 8  # queries that a gate looks at
DECODE = (
    16  # queries of a request up to which calls are those of a decoding step, which engines replay in a graph
)
TILE = 128
FORMS = {
    r"causal": "causal",
    r"window:(\d+)": "window:W",
    r"window:(\d+)\+sinks:(\d+)": "window:W+sinks:S",
    r"pages:(\d+)": "pages:N chosen for each query and head of keys",
    r"blocks:(0?\.\d+)": "blocks:F, a share of the blocks of 128 of each tile and head of queries",
}


def parse_sees(text: str) -> tuple[str, tuple[float, ...]]:
    """The kind of what queries see, and its numbers."""
    for form in FORMS:
        found = re.fullmatch(form, text)
        if found is not None:
            return text.split(":")[0], tuple(float(each) for each in found.groups())
    raise InvalidInput(f"what queries see is one of {', '.join(FORMS.values())}, got {text!r}")


@dataclass(frozen=True)
class ServingOperands(Operands):
    """One of the rotating sets: its own queries, pages in random order, and lists."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    mask: Any
    scale: Tensor | None
    lengths: tuple[int, int]
    useful_flops: float

    @property
    def given(self) -> tuple[Any, ...]:
        return self.q, self.cache, self.block_table, self.seq_lens, self.cu_seqlens_q, self.mask

    @property
    def options(self) -> dict[str, Any]:
        n, length = self.lengths
        return {"max_seqlen_q": n, "max_seqlen_k": length, "k_scale": self.scale, "v_scale": self.scale}

    def plan(self, kernel: str | None) -> PagedPlan:
        return plan_attention_paged(*self.given, kernel=kernel, **self.options)

    def eager(self, plan: PagedPlan) -> Callable[[], object]:
        return partial(attention_paged, *self.given, kernel=plan.kernel, **self.options)

    @property
    def moved(self) -> float:
        """Bytes that a call must read and write."""
        return plan_attention_paged(*self.given, **self.options).problem.compulsory_bytes

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pages, [pages, Hkv, page, D]."""
        dim = self.q.shape[2]
        return self.cache[..., :dim], self.cache[..., dim:]

    @property
    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as [requests, H, L, D], keys one after another."""
        requests, length = self.block_table.shape[0], self.lengths[1]
        k, v = (
            x[self.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
            for x in self.pages
        )
        return self.q.unflatten(0, (requests, -1)).transpose(1, 2).contiguous(), k, v

    @property
    def unscaled(self) -> ServingOperands:
        """The same with pages in the dtype of q."""
        assert self.scale is not None
        return replace(self, cache=(self.cache.float() * self.scale).to(self.q.dtype), scale=None)

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the attention of this set, by a sample of the queries."""
        return self.expected.judge(out[self.sample.to(out.device)])

    @cached_property
    def sample(self) -> Tensor:
        """Queries that a gate looks at: the first, the last and some random ones."""
        tokens = self.q.shape[0]
        drawn = torch.randperm(tokens, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        return torch.cat((drawn[: GATED - 2], torch.tensor([0, tokens - 1], device="cpu"))).unique()

    @cached_property
    def expected(self) -> ExpectedPaged:
        """The reference at the sample, each query as a request of its own with the keys up to it."""
        (n, length), device = self.lengths, self.q.device
        at = self.sample.to(device)
        window, sinks = (self.mask.window, self.mask.sinks) if isinstance(self.mask, MaskPolicy) else (0, 0)
        k, v = self.pages
        count = at.numel()
        return expected_attention_paged(
            PagedInputs(
                q=self.q[at], cache=self.cache, k=k, v=v, block_table=self.block_table[at // n],
                seq_lens=(length - n + 1 + at % n).int(),
                cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device), lists=self._lists_at(at),
                sink_logits=None, k_scale=self.scale, v_scale=self.scale, scale=self.q.shape[2] ** -0.5, softcap=0.0,
                causal=True, window=window or 0, sinks=sinks, max_q=1, max_k=length, end=count,
            )
        )  # fmt: skip

    def _lists_at(self, at: Tensor) -> PageLists | None:
        """The lists of the tiles of some queries, one tile for each."""
        lists, n = self.mask, self.lengths[0]
        if not isinstance(lists, PageLists):
            return None
        bq, bk = lists.block
        tile = at // n * -(-n // bq) + at % n // bq

        def rows(x: Tensor) -> Tensor:
            return x.view(lists.heads, -1)[:, tile].flatten()

        full, partial = (
            BlockLists(rows(starts), rows(counts), indices)
            for starts, counts, indices in (lists.full, lists.partial)
        )
        return PageLists(full, partial, lists.heads, at.numel(), (1, bk), lists.longest)


@dataclass(frozen=True)
class ServingCase(EngineCase):
    """`requests` requests with q_len queries at the end of kv_len keys each, in pages of `page` rows.

    `sees`: a text of FORMS. `kv`: the dtype of pages, that of q or "e4m3" with one scale.
    """

    op: ClassVar[str] = "serving"

    requests: int = options.size("Requests.", "1")
    q_len: int = lengths("Queries and keys of a request: 1x8K,2Kx32K.", "1x8K")
    kv_len: int = options.checked(options.positive)
    heads: int = options.size(
        "Heads of queries and of keys: 32:8.", "32:8", parse_pair, fields=("heads", "kv_heads")
    )
    kv_heads: int = options.checked(options.positive)
    sees: str = options.field(
        "causal",
        f"What a query sees: {', '.join(FORMS.values())}.",
        check=lambda name, sees: parse_sees(sees),
    )
    dim: int = options.size("Head sizes.", "128", usual=128)
    page: int = options.size("Rows of a page.", "128", usual=128)
    kv: str = options.field("bf16", "The dtype of pages: bf16, e4m3, ...; that of q or e4m3.", usual="bf16")
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.kv not in (self.dtype, "e4m3"):
            raise InvalidInput(f"pages are {self.dtype} as q, or e4m3, got {self.kv}")
        if self.heads % self.kv_heads:
            raise InvalidInput(f"{self.heads} query heads do not divide among {self.kv_heads} heads of keys")
        if self.page not in PAGES or self.kv_len % self.page or self.q_len > self.kv_len:
            raise InvalidInput(
                f"pages have {', '.join(map(str, PAGES))} rows, keys fill them, and queries stand at the last keys; "
                f"got pages of {self.page}, {self.q_len} queries and {self.kv_len} keys"
            )

    @property
    def in_graph(self) -> bool:
        """Decoding is measured in a CUDA graph."""
        return self.q_len <= DECODE

    @property
    def window(self) -> int | None:
        """The window in tokens."""
        kind, numbers = parse_sees(self.sees)
        return int(numbers[0]) if kind == "window" else None

    @property
    def listed(self) -> bool:
        """Whether queries see lists of blocks."""
        return parse_sees(self.sees)[0] in ("pages", "blocks")

    @property
    def name(self) -> str:
        """One short line: "decode 32 x 8K causal, 32:8 heads, D 128, pages of 128, bf16"."""
        many = f"{self.requests} x " if self.requests > 1 or self.in_graph else ""
        queries = "" if self.q_len == 1 else f"{self.q_len} at "
        kind = "decode" if self.in_graph else "prefill"
        sees = self.sees.replace(":", " ").replace("+", " and ")
        dtype = self.dtype if self.kv == self.dtype else f"{self.kv} pages, {self.dtype}"
        return (
            f"{kind} {many}{queries}{length_name(self.kv_len)} {sees}, {self.heads}:{self.kv_heads} heads, "
            f"D {self.dim}, pages of {self.page}, {dtype}"
        )

    @property
    def dense_flops(self) -> float:
        """FLOPs of the pairs that causality admits."""
        pairs = self.q_len * self.kv_len - self.q_len * (self.q_len - 1) / 2
        return 4.0 * self.dim * self.heads * self.requests * pairs

    def sets(self, draw: Draw) -> Callable[[Draw], ServingOperands]:
        def one(draw: Draw) -> ServingOperands:
            pages, device = self.requests * self.kv_len // self.page, draw.device
            random = torch.Generator(device).manual_seed(draw.seed)
            cache = draw.normal(pages, self.kv_heads, self.page, 2 * self.dim)
            table = torch.randperm(pages, generator=random, device=device).int().view(self.requests, -1)
            mask, share = self._mask(random, device)
            edges = torch.arange(self.requests + 1, dtype=torch.int32, device=device) * self.q_len
            quantized = self.kv != self.dtype
            return ServingOperands(
                q=draw.normal(self.requests * self.q_len, self.heads, self.dim),
                cache=(cache.float() * 2).to(E4M3) if quantized else cache,
                block_table=table,
                seq_lens=torch.full((self.requests,), self.kv_len, dtype=torch.int32, device=device),
                cu_seqlens_q=edges,
                mask=mask,
                scale=torch.full((1,), 0.5, dtype=torch.float32, device=device) if quantized else None,
                lengths=(self.q_len, self.kv_len),
                useful_flops=share * self.dense_flops,
            )

        return one

    def _mask(self, random: torch.Generator, device: torch.device) -> tuple[Any, float]:
        """The mask, and the share of the causal pairs that it admits."""
        kind, numbers = parse_sees(self.sees)
        pairs = self.dense_flops / (4.0 * self.dim * self.heads)
        if kind == "causal":
            return None, 1.0
        if kind == "window":
            window, sinks = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
            position = torch.arange(self.kv_len - self.q_len, self.kv_len, device=device)
            seen = (position + 1).clamp(max=window) + (position + 1 - window).clamp(0, sinks)
            return MaskPolicy(window=window, sinks=sinks), float(seen.sum()) * self.requests / pairs
        if kind == "pages":
            return self._chosen_pages(int(numbers[0]), random, device, pairs)
        masks = [self._chosen_blocks(numbers[0], random, device) for _ in range(self.requests)]
        met = sum(mask.elements for mask in masks) / self.heads
        return PageLists.of_masks(masks, verify=False), met / pairs

    def _chosen_pages(
        self, many: int, random: torch.Generator, device: torch.device, pairs: float
    ) -> tuple[PageLists, float]:
        """So many pages for each query and head of keys, the last whole one before the query among them."""
        tokens, pages = self.requests * self.q_len, (self.kv_len - self.q_len + 1) // self.page
        if not 0 < many <= pages:
            raise InvalidInput(f"{many} pages of {self.page} are chosen from {pages} before the queries")
        scores = torch.rand(
            self.kv_heads, tokens, pages, generator=random, device=device, dtype=torch.float32
        )
        scores[..., -1] = 2
        found = scores.topk(many).indices.int().contiguous()
        return PageLists.from_indices(found, (1, self.page)), many * self.page * tokens / pairs

    def _chosen_blocks(self, share: float, random: torch.Generator, device: torch.device) -> BlockMask:
        """A share of the blocks that each tile may see for each head of queries, its own and the first among them."""
        tiles, blocks = -(-self.q_len // TILE), -(-self.kv_len // TILE)
        last = (
            (torch.arange(1, tiles + 1, device=device) * TILE).clamp(max=self.q_len)
            + self.kv_len
            - self.q_len
            - 1
        )
        there = torch.arange(blocks, device=device) <= (last // TILE)[:, None]
        scores = torch.rand(self.heads, tiles, blocks, generator=random, device=device, dtype=torch.float32)
        scores[..., 0] = 2
        scores.scatter_(2, (last // TILE)[None, :, None].expand(self.heads, -1, 1), 3.0)
        rank = scores.masked_fill(~there, -1).argsort(-1, descending=True).argsort(-1)
        kept = (rank < (there.sum(-1) * share).round().clamp(min=1)[:, None]) & there
        return BlockMask.from_block_map(
            kept[None], causal=True, q_len=self.q_len, kv_len=self.kv_len, block=TILE
        )


def _case(
    requests: int, q_len: int, kilo: int, sees: str = "causal", heads: tuple[int, int] = (32, 8), **more: Any
) -> Any:
    return ServingCase(requests, q_len, kilo * 1024, *heads, sees, **more)


CHOSEN = "pages:16"
PREFILL: Mapping[Any, tuple[Bar, ...]] = {
    _case(1, 2048, 32): (Bar(FA4, 0.95, 1.0),),
    _case(1, 2048, 32, "window:4096+sinks:128"): (Bar(UNPAGED, 0.97, 1.0),),
    _case(1, 8192, 64, "blocks:0.125"): (Bar(FA4, 4.0, 6.0),),
    _case(1, 8192, 128, "blocks:0.125"): (Bar(FA4, 4.0, 6.0),),
}
STEP: Mapping[Any, tuple[Bar, ...]] = {
    _case(1, 1, 128): (Bar(COPY, 0.9, 0.95),),
    _case(32, 1, 8): (Bar(FA4, 0.97, 1.0),),
    _case(128, 1, 8): (Bar(FA4, 0.97, 1.0),),
}
PAGES_CHOSEN: Mapping[Any, tuple[Bar, ...]] = {
    _case(requests, 1, 32, CHOSEN, heads=(64, 4)): () for requests in (1, 32, 128)
}
FP8: Mapping[Any, tuple[Bar, ...]] = {
    _case(1, 1, 128, kv="e4m3"): (Bar(BF16, 1.7, 1.9),),
    _case(32, 1, 8, kv="e4m3"): (Bar(BF16, 1.7, 1.9),),
}
SUITES = {"prefill": PREFILL, "decode": STEP, "chosen": PAGES_CHOSEN, "fp8": FP8}
BARS = {case: bars for suite in SUITES.values() for case, bars in suite.items()}
BENCH = Bench(
    "serving",
    suites={name: rows("auto", *cases) for name, cases in SUITES.items()},
    kinds=(ServingCase,),
    peers=PEERS,
    tables=(
        Table(
            op="serving",
            title="attention over paged keys",
            dense=("sdpa",),
            columns=(CASE, MS, SPEEDUP, USEFUL, GBPS, target(BARS, "")),
            note=(
                "Useful TFLOPS count the pairs that are seen, GB/s the bytes of q, seen keys and values, and out. "
                "Decoding is replayed in a CUDA graph. Over a peer: 1.50 means 1.5 times as fast. A copy moves as many "
                "bytes as a call. Dense is torch on keys that lie one after another; SparseK's own kernel without "
                "pages reads them so too. Dense and FlashAttention-4 compute every key up to the query where a window "
                "or blocks are chosen, FlashAttention-4 a window as it is."
            ),
            beside=("fa4",),
            usual=("D 128", "pages of 128", "bf16"),
        ),
    ),
    small="--seq 32x512 --heads 4:2 --dim 64 --dtype fp32 --kv fp32",
    slowest=90.0,
)
