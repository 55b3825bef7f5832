"""Cases for every kernel of attention over paged keys: ragged batches, awkward in every allowed way, and random ones.

Rows of pages behind the lengths and pages of no request hold NaN. Entries of block tables behind the lengths are no
pages at all. Pages lie in random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.core import dtypes
from sparsek.testing.paged_budget import PagedInputs

E4M3 = torch.float8_e4m3fn
NOWHERE = (-1, 2**31 - 1, -(2**31), 10**6)  # entries of tables and lists that no kernel may follow
SPARE = 3  # pages of no request


@dataclass(frozen=True)
class ListForm:
    """Random lists of up to `most` blocks for each tile, in any order, for `heads` heads: "all", "kv" or "q".

    Entries that are no blocks stand among them, and block 0 behind each row's count. `full`: blocks that every query
    of the tile sees are listed as full.
    """

    block: tuple[int, int]
    heads: str = "kv"
    most: int = 4
    full: bool = False


@dataclass(frozen=True)
class PagedCase:
    """Requests with (queries, keys) each, N(0, 1) keys and values, and queries of `spread` times that.

    `form`: how the cache is stored, a name of FORMS. `kv_dtype`: "" for that of q, or "e4m3"; `scale_per`: "", "tensor"
    or "head". `shared`: requests begin with the same pages. `tail`: rows of q after the last request. `loose`: the
    bounds of lengths and the table are wider than the lengths.
    """

    note: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    page: int = 16
    dtype: str = "bf16"
    form: str = "one"
    kv_dtype: str = ""
    scale_per: str = ""
    causal: bool = True
    window: int = 0
    sinks: int = 0
    lists: ListForm | None = None
    softcap: float = 0.0
    sink_logits: bool = False
    shared: bool = False
    tail: int = 0
    loose: bool = False
    spread: float = 1.0

    def __str__(self) -> str:
        (hq, hkv), (d, dv) = self.heads, self.dims
        kind = self.kv_dtype or self.dtype
        return f"{self.note.replace(' ', '_')}-r{len(self.lengths)}-h{hq}:{hkv}-d{d}:{dv}-p{self.page}-{kind}"

    def make(self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0) -> PagedInputs:
        """The operands on `device`, q in the case's dtype unless another is given."""
        draw = torch.Generator("cpu").manual_seed(seed)
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        of_pages = E4M3 if self.kv_dtype else kind
        (hq, hkv), (d, dv) = self.heads, self.dims
        queries, keys = [n for n, _ in self.lengths], [t for _, t in self.lengths]
        end, widest = sum(queries), max([-(-t // self.page) for t in keys], default=0)
        width = widest + 3 if self.loose else widest
        needed = [-(-t // self.page) for t in keys]
        common = min(needed, default=0) // 2 if self.shared else 0
        table, pages = shuffled_pages(draw, needed, width, common)
        rows = [_normal(draw, pages, self.page, hkv, size).to(of_pages).to(torch.float32) for size in (d, dv)]
        held = torch.zeros(pages, self.page, dtype=torch.bool, device="cpu")
        for r, t in enumerate(keys):
            for j in range(-(-t // self.page)):
                held[table[r, j], : min(self.page, t - j * self.page)] = True
        stored = [x.masked_fill(~held[..., None, None], torch.nan).to(of_pages).to(device) for x in rows]
        cache = FORMS[self.form](*stored)
        k, v = (cache[..., :d], cache[..., d:]) if isinstance(cache, Tensor) else cache
        scales = [self._scales(draw, hkv, device) for _ in range(2)]

        def ints(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        edges = [sum(queries[:r]) for r in range(len(queries) + 1)]
        q = (_normal(draw, end + self.tail, hq, d) * self.spread).to(kind)
        sink = _normal(draw, hq).to(device) if self.sink_logits else None
        more = 5 if self.loose else 0
        return PagedInputs(
            q=q.to(device), cache=cache, k=k, v=v, block_table=table.to(device), seq_lens=ints(keys),
            cu_seqlens_q=ints(edges), lists=None if self.lists is None else self._lists(random.Random(seed), device),
            sink_logits=sink, k_scale=scales[0], v_scale=scales[1], scale=d**-0.5, softcap=self.softcap,
            causal=self.causal, window=self.window, sinks=self.sinks,
            max_q=max(queries, default=0) + more, max_k=min(max(keys, default=0) + more, width * self.page), end=end,
        )  # fmt: skip

    def _scales(self, draw: torch.Generator, hkv: int, device: str) -> Tensor | None:
        if not self.scale_per:
            return None
        many = 1 if self.scale_per == "tensor" else hkv
        return (0.5 + torch.rand(many, generator=draw, dtype=torch.float32, device="cpu")).to(device)

    def _lists(self, draw: random.Random, device: str) -> PageLists:
        spec, (hq, hkv) = self.lists, self.heads
        assert spec is not None
        (bq, bk), heads = spec.block, {"all": 1, "kv": hkv, "q": hq}[spec.heads]
        rows: tuple[list[list[int]], list[list[int]]] = [], []
        for _ in range(heads):
            for n, t in self.lengths:
                for i in range(-(-n // bq)):
                    blocks = -(-t // bk)
                    some = draw.sample(range(blocks), min(blocks, draw.randint(0, spec.most)))
                    seen = min(t, t - n + i * bq + 1) if self.causal else t
                    whole = [j for j in some if spec.full and not self.window and (j + 1) * bk <= seen]
                    for row, kept in zip(rows, (whole, [j for j in some if j not in whole]), strict=True):
                        absent = draw.choice((-1, -(2**31), 2**31 - 1, blocks, blocks + 7))
                        row.append([*kept, *[absent] * draw.randint(0, 1)])
                        draw.shuffle(row[-1])
            for row in rows:
                row += [[], []] * self.loose
        full, partial = (self._listed(row, heads, device) for row in rows)
        if not spec.full:
            return partial
        return PageLists(full.partial, partial.partial, heads, partial.tiles, spec.block, spec.most + 2)

    def _listed(self, rows: list[list[int]], heads: int, device: str) -> PageLists:
        assert self.lists is not None
        width = self.lists.most + 1
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device).view(heads, -1)
        entries = torch.tensor(
            [row + [0] * (width - len(row)) for row in rows], dtype=torch.int32, device=device
        )
        return PageLists.from_indices(entries.view(*counts.shape, width), self.lists.block, counts)


def shuffled_pages(
    draw: torch.Generator, needed: Sequence[int], width: int, common: int = 0
) -> tuple[Tensor, int]:
    """A block table int32 [requests, width] with `needed` pages of each request in random order, and how many pages
    there are. The first `common` ones are those of all requests, entries behind the pages are none, and SPARE pages
    belong to nobody.
    """
    pages = common + sum(n - common for n in needed) + SPARE
    order = torch.randperm(pages, generator=draw, device="cpu").to(torch.int32)
    table = torch.tensor(NOWHERE, dtype=torch.int32, device="cpu").repeat(len(needed), width)[:, :width]
    table, free = table.contiguous(), common
    for r, n in enumerate(needed):
        table[r, :common] = order[:common]
        table[r, common:n] = order[free : free + n - common]
        free += n - common
    return table, pages


def _normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def _one(k: Tensor, v: Tensor) -> Tensor:
    """[pages, Hkv, page, 2 D], contiguous."""
    return torch.cat([x.transpose(1, 2).contiguous() for x in (k, v)], 3)


def _one_by_rows(k: Tensor, v: Tensor) -> Tensor:
    """A view of [pages, page, Hkv, 2 D]."""
    return torch.cat((k, v), 3).transpose(1, 2)


def _one_of_layers(k: Tensor, v: Tensor) -> Tensor:
    """One layer of a cache [pages, layers, Hkv, page, 2 D]."""
    one = _one(k, v)
    return torch.stack((torch.full_like(one, torch.nan), one), 1)[:, 1]


def _pair(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _pair_by_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [pages, page, Hkv, D]."""
    return k.transpose(1, 2), v.transpose(1, 2)


def _planes(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [2, pages, page, Hkv, D]."""
    both = torch.stack((k, v))
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


def _beside(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [pages, 2, page, Hkv, D]."""
    both = torch.stack((k, v), 1)
    return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)


def _gaps(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with 16 more elements than D, and values stored with the head outermost."""
    wide = torch.cat((k, torch.full_like(k[..., :1], torch.nan).expand(*k.shape[:3], 16)), 3)
    return wide[..., : k.shape[3]].transpose(1, 2), v.permute(2, 0, 1, 3).contiguous().transpose(0, 1)


def _apart(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Every second element of a row: last dims that are not contiguous."""
    wide_k, wide_v = (x.repeat_interleave(2, 3).transpose(1, 2) for x in (k, v))
    return wide_k[..., ::2], wide_v[..., ::2]


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]] = {
    "one": _one,
    "one by rows": _one_by_rows,
    "one of layers": _one_of_layers,
    "pair": _pair,
    "pair by rows": _pair_by_rows,
    "planes": _planes,
    "beside": _beside,
    "gaps": _gaps,
    "apart": _apart,
}

DECODE = ((1, 300), (1, 17), (1, 1), (1, 512), (1, 128))
MIXED = ((1, 200), (70, 70), (0, 0), (33, 250), (0, 40), (130, 300), (1, 1))
EARLY = ((9, 4), (200, 150), (3, 0), (2, 1))  # more queries than keys: the first see nothing
"""(queries, keys) of each request."""

PAGED_CASES: tuple[PagedCase, ...] = (
    PagedCase("decode", DECODE),
    PagedCase("decode one request", ((1, 1000),), dims=(128, 128)),
    PagedCase("decode one group", DECODE, heads=(2, 2), form="pair"),
    PagedCase("decode group 16", DECODE, heads=(16, 1), dims=(128, 128), form="pair by rows"),
    PagedCase("decode group 8", DECODE, heads=(16, 2), page=64, form="planes"),
    PagedCase("decode group 6", DECODE, heads=(6, 1), page=32, dtype="fp16"),
    PagedCase("decode long", ((1, 3001), (1, 5), (1, 2048)), heads=(4, 1), dims=(128, 128), page=256),
    PagedCase("no requests", (), tail=3),
    PagedCase("no tokens", ((0, 30), (0, 0))),
    PagedCase("many requests", tuple((r % 3, 7 * r % 90) for r in range(40)), heads=(4, 2)),
    PagedCase("mixed", MIXED),
    PagedCase("mixed by rows", MIXED, form="one by rows", dims=(128, 128), page=128),
    PagedCase("mixed one of layers", MIXED, form="one of layers", page=32),
    PagedCase("mixed beside", MIXED, form="beside", page=64, dims=(96, 96)),
    PagedCase("mixed gaps", MIXED, form="gaps", heads=(4, 4), page=32),
    PagedCase("mixed apart", ((3, 40), (1, 20)), form="apart"),
    PagedCase("mixed loose bounds and tail", MIXED, loose=True, tail=11),
    PagedCase("mixed dim 256", MIXED, heads=(4, 1), dims=(256, 256), page=16, dtype="fp16"),
    PagedCase("mixed dims 192 128", MIXED, heads=(4, 2), dims=(192, 128), page=64, form="pair"),
    PagedCase("more queries than keys", EARLY, heads=(4, 1)),
    PagedCase("shared prefix", ((1, 200), (1, 230), (40, 260)), shared=True, page=32),
    PagedCase("prefill", ((300, 300), (129, 129)), heads=(4, 2), dims=(128, 128), page=16),
    PagedCase("not causal", MIXED, causal=False),
    PagedCase("window decode", DECODE, window=40, page=32),
    PagedCase("window and sinks", MIXED, window=50, sinks=4, heads=(8, 1)),
    PagedCase("window of one", MIXED, window=1, heads=(4, 1)),
    PagedCase("window both ways", MIXED, window=30, sinks=2, causal=False),
    PagedCase("window beyond keys", DECODE, window=100000, sinks=100000, loose=True),
    PagedCase("sink logits", MIXED, sink_logits=True, heads=(16, 2), window=64),
    PagedCase("sink logits see nothing", EARLY, sink_logits=True, heads=(4, 1)),
    PagedCase("softcap", MIXED, softcap=2.0, dims=(128, 128)),
    PagedCase("softcap and sink logits", DECODE, softcap=30.0, sink_logits=True, heads=(8, 1)),
    PagedCase("lists for each query", DECODE, lists=ListForm((1, 64)), page=64, heads=(16, 2)),
    PagedCase("lists of parts of pages", DECODE, lists=ListForm((1, 16), most=9), page=64),
    PagedCase("lists of several pages", MIXED, lists=ListForm((1, 64), "all"), page=16),
    PagedCase("lists for each head of q", MIXED, lists=ListForm((1, 32), "q"), page=32, heads=(4, 2)),
    PagedCase("lists of tiles of 64", MIXED, lists=ListForm((64, 64)), page=16, dims=(128, 128)),
    PagedCase("lists of tiles of 128", ((300, 300), (1, 500)), lists=ListForm((128, 128), "q"), heads=(4, 2)),
    PagedCase("lists with full blocks", MIXED, lists=ListForm((64, 64), full=True), page=64),
    PagedCase(
        "lists with full blocks decode", DECODE, lists=ListForm((1, 64), full=True), page=32, loose=True
    ),
    PagedCase("lists not causal", MIXED, lists=ListForm((1, 64)), causal=False),
    PagedCase("lists and sink logits", MIXED, lists=ListForm((1, 64), most=2), sink_logits=True),
    PagedCase("fp8", DECODE, kv_dtype="e4m3", scale_per="tensor", dims=(128, 128), page=32),
    PagedCase("fp8 per head", MIXED, kv_dtype="e4m3", scale_per="head", form="pair by rows", page=32),
    PagedCase("fp8 without scales", MIXED, kv_dtype="e4m3", dtype="fp16", page=64, window=90, sinks=5),
    PagedCase("fp8 lists", MIXED, kv_dtype="e4m3", scale_per="head", lists=ListForm((1, 64)), page=64),
    PagedCase("fp32", MIXED, dtype="fp32", heads=(4, 2), form="pair"),
)

ALIGNED = ("one", "one by rows", "one of layers", "pair", "pair by rows", "planes", "beside", "gaps")
"""Forms of a cache with contiguous last dims."""
OF_E4M3 = ("one", "pair", "pair by rows")
OF_EQUAL = ("planes", "beside")  # forms that need equal dims of keys and values
LISTS = tuple(
    ListForm((bq, bk), heads, 8, full)
    for bq in (1, 64, 128)
    for bk in (64, 128, 256)
    for heads in ("all", "kv", "q")
    for full in (False, True)
)
CHOICES: dict[str, Sequence[Any]] = {
    "heads": ((2, 2), (4, 1), (8, 2), (6, 2), (16, 1)), "dims": ((64, 64), (96, 96), (128, 128), (256, 256)),
    "page": (16, 32, 64, 128, 256), "dtype": ("bf16", "fp16"), "kv_dtype": ("",), "scale_per": ("", "tensor", "head"),
    "form": ALIGNED, "causal": (True, True, False), "window": (0, 0, 1, 77, 128, 500, 1500),
    "sinks": (0, 4, 128, 200), "softcap": (0.0, 0.0, 5.0), "sink_logits": (False, False, True),
    "lists": (*LISTS, *[None] * 2 * len(LISTS)), "shared": (False, False, True), "tail": (0, 1, 70),
    "loose": (False, True), "spread": (1.0, 4.0),
}  # fmt: skip
"""Values that `drawn_case` takes for the fields of a case."""


def drawn_lengths(draw: random.Random, requests: int, queries: int, keys: int) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of up to `requests` requests, with up to `queries` queries and `keys` keys more; not all are
    without queries.
    """
    found = []
    for _ in range(draw.randint(1, requests)):
        n = draw.choice(
            (0, 1, 1, min(2, queries), draw.randint(1, min(40, queries)), draw.randint(1, queries))
        )
        found.append((n, n + draw.choice((0, 0, 1, draw.randint(0, keys), -(n // 2), -n if n < 3 else 0))))
    return tuple(found) if any(n for n, _ in found) else ((3, 3 + found[0][1]), *found[1:])


def drawn_case(
    seed: int, *, requests: int = 6, queries: int = 700, keys: int = 2000, **choices: Sequence[Any]
) -> PagedCase:
    """A random case: lengths as of `drawn_lengths`, and other fields of `choices`, else of CHOICES."""
    draw = random.Random(seed)
    some = {name: draw.choice(values) for name, values in {**CHOICES, **choices}.items()}
    if some["lists"] is not None:
        some["window"] = 0
    if not some["window"]:
        some["sinks"] = 0
    if not some["kv_dtype"] and "scale_per" not in choices:
        some["scale_per"] = ""
    if some["kv_dtype"] and some["form"] not in OF_E4M3:
        some["form"] = draw.choice(OF_E4M3)
    if some["form"] in OF_EQUAL and some["dims"][0] != some["dims"][1]:
        some["form"] = "pair by rows"
    return PagedCase(f"drawn {seed}", drawn_lengths(draw, requests, queries, keys), **some)
