"""Blocks of keys for each query token: the best of their scores, for chunks of queries one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.aligned import AlignedKeys, aligned_keys
from sparsek.attn.mask.build.documents import Documents, PackedLayout
from sparsek.attn.mask.build.structured import of_intervals
from sparsek.attn.mask.cache import edges_of, kept_mask
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.mask.token_lists import LEAST, MOST, TokenLists
from sparsek.attn.mask.traced import traceable
from sparsek.attn.plan.attention_operands import checked_scale
from sparsek.attn.policies.maps import kernels
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant, not_traced

NO_EDGES = np.zeros(1, np.int64)
LONGEST = 1 << 20  # keys of a block
SCORES = 1 << 25  # of a chunk of queries: 128 MB in float32


class TokenGrid(NamedTuple):
    """Where queries and blocks of keys stand. Packed documents each begin at a block of their own, so positions and
    blocks count from the first document with the gaps between them.
    """

    block: int
    columns: int  # blocks of all documents
    offset: int  # from a query's number to its position, without documents
    position: Tensor  # int64 [S]: of each query
    first: Tensor  # int64 [S]: the first block of its document
    documents: AlignedKeys | None = None
    edges: np.ndarray = NO_EDGES  # int64 [documents + 1]: where each begins in tokens, and the end
    bases: np.ndarray = NO_EDGES  # int64 [documents + 1]: its first block

    @classmethod
    def of(cls, q: Tensor, k: Tensor, block: int, cu_seqlens: Tensor | None) -> TokenGrid:
        """The grid of q [B, Hq, S, D] and k [B, Hkv, T, D], or of packed documents, [1, H, total, D]."""
        queries, keys = q.shape[2], k.shape[2]
        if cu_seqlens is None:
            position = torch.arange(keys - queries, keys, dtype=torch.int64, device=q.device)
            return cls(block, -(-keys // block), keys - queries, position, torch.zeros_like(position))
        if q.shape[0] != 1 or queries != keys:
            raise InvalidInput(
                f"q is {list(q.shape)} and k {list(k.shape)}; with cu_seqlens both are packed documents "
                "[1, heads, total, D], as many queries as keys"
            )
        edges = edges_of(cu_seqlens, "cu_seqlens", queries)
        layout = PackedLayout(Documents.packed(edges, edges), queries, keys)
        documents = aligned_keys(layout, block, True, q.device)
        start, end = documents.bounds.long()
        return cls(
            block,
            documents.length // block,
            0,
            end - 1,
            start // block,
            documents,
            edges,
            _bases(edges, block),
        )

    def reach(self, start: int, end: int) -> tuple[int, int]:
        """The blocks that queries start to end - 1 may see: from the first to the one before the last."""
        if self.documents is None:
            return 0, min(max((end - 1 + self.offset) // self.block + 1, 0), self.columns)
        one, last = (int(np.searchsorted(self.edges, at, "right")) - 1 for at in (start, end - 1))
        return int(self.bases[one]), int(self.bases[last] + (end - 1 - self.edges[last]) // self.block + 1)

    def aligned(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] with a place for every position: each document from its first block on, then zeros up to the
        next. Differentiable.
        """
        return x if self.documents is None else self.documents.spread(x)

    def keys(self, given: int) -> int:
        """The keys of aligned(x), of so many in x."""
        return given if self.documents is None else self.documents.length


def best_blocks(grid: TokenGrid, scores: Tensor, start: int, topk: int, always: tuple[int, int]) -> Tensor:
    """int64 [B, H, n, topk]: of queries from `start` on the blocks with the highest scores, ascending, then -1.

    scores: [B, H, n, blocks], of the blocks from `grid.reach` on. The first and the last blocks of a query's document
    up to its own, as many as `always`, come first and count. Equal scores rank by block, the lower one first. -inf and
    NaN exclude a block.
    """
    queries, columns = scores.shape[2:]
    left = grid.reach(start, start + queries)[0]
    column = torch.arange(left, left + columns, dtype=torch.int64, device=scores.device)
    first = grid.first[start : start + queries, None]
    own = grid.position[start : start + queries, None] // grid.block
    there = (first <= column) & (column <= own)
    held = there & ((column < first + always[0]) | (column > own - always[1]))
    ranked = scores.masked_fill(scores.isnan() | ~there, -torch.inf).clamp(max=torch.finfo(scores.dtype).max)
    value, at = ranked.masked_fill(held, torch.inf).sort(dim=-1, descending=True, stable=True)
    none = grid.columns
    at = torch.where(value[..., :topk] > -torch.inf, at[..., :topk] + (left - first), none).sort(-1).values
    return functional.pad(at.masked_fill(at == none, -1), (0, topk - at.shape[-1]), value=-1)


def token_lists(
    grid: TokenGrid,
    shape: tuple[int, int],
    policy: Any,
    score: Callable[[int, int], Tensor],
    each: int,
    tiles: Any = None,
) -> TokenLists:
    """The lists of `shape` batch items and heads.

    `score(start, end)` returns the scores of the blocks in `grid.reach(start, end)`, with `each` numbers at once for a
    query. `tiles`: a kernel that does the same, of `tile_scores`.
    """
    queries, by_kernel = grid.position.shape[0], kernels("token_scores", grid.position)
    some = max(1, min(policy.topk, grid.columns))
    parts = max(grid.block // MOST, 1)  # blocks of lists in a block
    made = torch.full((*shape, queries, some * parts), -1, dtype=torch.int32, device=grid.position.device)
    step = max(SCORES // (each if tiles is None else tiles.numbers), 1)
    for start in range(0, queries, step):
        end = min(start + step, queries)
        reach = grid.reach(start, end)
        if reach[0] == reach[1]:
            continue
        scores = score(start, end) if tiles is None else tiles(start, end, reach)
        places = grid.position, grid.first, start, reach, grid.block
        if by_kernel is None or not by_kernel.pick(made, scores, *places, some, policy.always):
            found = best_blocks(grid, scores, start, some, policy.always)
            made[:, :, start:end] = _in_parts(grid, found, start, parts).to(torch.int32)
    return TokenLists(made, min(grid.block, MOST))


def tile_scores(
    grid: TokenGrid, q: Tensor, keys: Tensor, heads: int, spans: tuple[int, int, int], **options: Any
) -> Any:
    """A kernel that scores blocks by key i of [B, H, n, D] for `span` keys from i * stride on; None if there is none
    for these.
    """
    found = kernels("token_scores", q, keys)
    if found is None or grid.columns > found.MOST_COLUMNS:
        return None
    tiles = found.Tiles(q, keys, grid.position, grid.first, heads, spans, **options)
    return tiles if tiles.usable else None


def _in_parts(grid: TokenGrid, found: Tensor, start: int, parts: int) -> Tensor:
    """Blocks in equal parts, as far as a query's own position reaches."""
    if parts == 1:
        return found
    part = torch.arange(parts, dtype=torch.int64, device=found.device)
    at = torch.where(found[..., None] < 0, -1, found[..., None] * parts + part).flatten(-2)
    end = start + found.shape[2]
    own = (grid.position[start:end] - grid.first[start:end] * grid.block) * parts // grid.block
    return at.masked_fill(at > own[:, None], -1)


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """rows [B, H, n, D] times keys [B, 1 or H, m, D], [B, H, n, m] in float32, or float64 for float64."""
    if rows.is_cuda and rows.dtype in dtypes.LOW:  # exact products, sums in float32, on tensor cores
        some, all_of = (x.expand(*rows.shape[:2], -1, -1).flatten(0, 1) for x in (rows, keys))
        return torch.bmm(some, all_of.mT, out_dtype=torch.float32).unflatten(0, rows.shape[:2])
    kind = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(kind) @ keys.to(kind).mT


def compressed_mask(
    spans: tuple[int, int, int],
    q_len: int,
    kv_len: int,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
) -> BlockMask:
    """The mask of compressed keys, of `spans` (block, span, stride): a query sees those whose last key is not behind
    it, of its document. The same object for equal lengths.
    """
    if cu_seqlens is None:
        lengths = arguments.integer("q_len", q_len), arguments.integer("kv_len", kv_len)
        return (_constant_mask if torch.compiler.is_compiling() else _spans_mask)(spans, *lengths, device)
    return _spans_mask(spans, q_len, kv_len, device, edges_of(cu_seqlens, "cu_seqlens", q_len).tobytes())


@not_traced("a mask of compressed keys")
def _spans_mask(
    spans: tuple[int, int, int], q_len: int, kv_len: int, device: torch.device, edges: bytes | None = None
) -> BlockMask:
    def build() -> BlockMask:
        block, span, stride = spans
        first, position, length = np.zeros(q_len, np.int64), np.arange(kv_len - q_len, kv_len), kv_len
        if edges is not None:
            starts = np.frombuffer(edges, np.int64)
            sizes, bases = np.diff(starts), _bases(starts, block) * block
            first, length = np.repeat(bases[:-1], sizes), int(bases[-1])
            position = first + np.arange(q_len) - np.repeat(starts[:-1], sizes)
        count = max((length - span) // stride + 1, 0)
        lo = np.minimum(first // stride, count)
        hi = np.clip((position + 1 - span) // stride + 1, lo, count)
        place = Place.of(q_len=q_len, kv_len=count, device=device)
        return of_intervals(BlockMask, place, lo, hi, f"keys of {span}, {stride} apart")

    return kept_mask(("compressed", spans, q_len, kv_len, device, edges), build)


_constant_mask = constant(_spans_mask)


def _bases(edges: np.ndarray, block: int) -> np.ndarray:
    """The first block of each document, and the end of the last."""
    return np.concatenate(([0], np.cumsum(-(-np.diff(edges) // block))))


@dataclass(frozen=True)
class TokenPolicy(MaskRule):
    """Chooses blocks of keys for each query. `sk.attention(q, k, v, policy)` chooses anew in every call."""

    of_fields = True
    by_token = True
    causal: ClassVar[bool] = True

    def _check_fields(self) -> None:
        """Checks `block`, `topk` and `always`. A budget holds the blocks of `always`."""
        block: Any = self.block  # type: ignore[attr-defined]
        object.__setattr__(self, "block", arguments.power_of_two("block", block, LEAST, LONGEST))
        always = arguments.pair("always", self.always)  # type: ignore[attr-defined]
        object.__setattr__(self, "always", always)
        topk = arguments.integer("topk", self.topk, 1)  # type: ignore[attr-defined]
        if topk < sum(always):
            raise InvalidInput(
                f"topk is {topk} and always {always}, {sum(always)} blocks, which count among the topk"
            )
        object.__setattr__(self, "topk", topk)

    def lists(self, q: Tensor, k: Tensor, **options: Any) -> TokenLists:
        """The lists. What a policy implements."""
        raise NotImplementedError

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None = None) -> BlockMask:
        """Return the mask of `lists(q, k)`, as `attention` does for a policy in place of a mask.

        Args:
            q: Queries [B, Hq, S, D].
            k: Keys [B, Hkv, T, D].
            scale: The factor of q @ k.T; D**-0.5 by default.

        Raises:
            InvalidInput: As `lists`.
        """
        return mask_of(self, q, k, scale)

    @property
    def label(self) -> str:
        """The class and the options that are not default: "NSA(topk=32)"."""
        values = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@traceable
@not_traced("a policy's mask")
def mask_of(policy: TokenPolicy, q: Tensor, k: Tensor, scale: float | None, **options: Any) -> BlockMask:
    """The mask of a policy's lists, one node of a graph of torch.compile."""
    check_tensors(q, k, k)
    if not q.shape[0]:  # no batch item to choose for, and a mask has at least one
        checked_scale(scale, q.shape[3])
        return BlockMask.causal(q_len=q.shape[2], kv_len=k.shape[2], device=q.device)
    return policy.lists(q, k, scale=scale, **options).mask_for(q, k)
