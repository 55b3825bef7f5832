"""Policies that choose blocks of keys for each query token, as their papers do: NSA, MoBA, InfLLM-v2, MiniMax-M3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.token_lists import LEAST, TokenLists
from sparsek.attn.plan.attention_operands import checked_scale
from sparsek.attn.policies.token import SCORES, TokenGrid, TokenPolicy, products, tile_scores, token_lists
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import (
    not_traced,
    save_for_backward,
    saved_tensors,
    untraced,
    wants_gradient,
    watched,
)


@dataclass(frozen=True)
class NSA(TokenPolicy):
    """Keeps, for each query, the blocks of keys with the largest weights of attention to compressed keys.

    Compressed key i stands for keys i * stride to i * stride + span - 1, their mean in their dtype unless others are
    given, and is seen by queries from its last key on. p is a query's softmax over the compressed keys that it sees.
    The score of block j is the sum of p[i] over the parts of `stride` keys in the block and the compressed keys i that
    cover the part, and over the heads of q that share a head of k. The choice has no gradient.

    Args:
        topk: Blocks that each query keeps, those of `always` among them.
        block: The keys of a block: a power of two from 4, a multiple of `stride`.
        always: (sinks, local): the first blocks, and the last ones up to the query's own.
        span: The keys of a compressed key, a multiple of `stride`.
        stride: Keys from one compressed key to the next.

    Raises:
        InvalidInput: For options that are out of range or do not go together.

    Source: Native Sparse Attention, Yuan et al., arXiv:2502.11089, equations 7 to 12.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = (torch.randn(1, heads, 2048, 64) for heads in (8, 2, 2))
        >>> policy = sk.policies.NSA(topk=8)
        >>> policy.lists(q, k).indices.shape, sk.attention(q, k, v, policy).shape
        (torch.Size([1, 2, 2048, 8]), torch.Size([1, 8, 2048, 64]))
    """

    topk: int = 16
    block: int = 64
    always: tuple[int, int] = (1, 2)
    span: int = 32
    stride: int = 16
    _sums: ClassVar[bool] = True  # whether the score of a block is a sum, else the largest

    def __post_init__(self) -> None:
        self._check_fields()
        for name in ("stride", "span"):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name), 1))
        for name in ("span", "block"):
            value = getattr(self, name)
            if value % self.stride:
                raise InvalidInput(f"{name} is {value} and stride {self.stride}, which must divide it")

    @property
    def spans(self) -> tuple[int, int, int]:
        """The block, the span and the stride."""
        return self.block, self.span, self.stride

    @not_traced("a policy's lists")
    @torch.no_grad()
    def lists(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        compressed: Tensor | None = None,
    ) -> TokenLists:
        """Return the blocks of each query and head of k. No sync on a GPU, except to read new cu_seqlens.

        Args:
            q: Queries [B, Hq, S, D]; the last one stands at the last key.
            k: Keys [B, Hkv, T, D]. With `compressed` only its shape is read.
            scale: The factor of q @ k.T in the softmax; D**-0.5 by default.
            cu_seqlens: int32 or int64 [documents + 1], for packed documents [1, H, total, D]. Blocks of a document
                count from its own first key.
            compressed: [B, Hkv, n, D]: other compressed keys, in place of means; n = (T - span) // stride + 1, at least
                0. Of packed documents, those of keys with zeros behind each document, up to whole blocks.

        Raises:
            InvalidInput: For operands that do not fit together.
        """
        factor, heads = checked(q, k, scale), k.shape[1]
        grid = TokenGrid.of(q, k, self.block, cu_seqlens)
        with dtypes.as_given(q.device):
            if compressed is None:
                compressed = means(grid.aligned(k), self.span, self.stride).to(k.dtype)
            else:
                count = max((grid.keys(k.shape[2]) - self.span) // self.stride + 1, 0)
                check_compressed(compressed, q, k, count)

            def score(start: int, end: int) -> Tensor:
                return self._pooled(grid, start, end, self._weights(grid, q, compressed, factor, start, end))

            rule: dict[str, Any] = {"scale": factor, "softmax": True, "sums": self._sums}
            tiles = tile_scores(grid, q, compressed, heads, self.spans, **rule)
            each = each_of(q, compressed.shape[2])
            return token_lists(grid, (q.shape[0], heads), self, score, each, tiles)

    def _weights(
        self, grid: TokenGrid, q: Tensor, compressed: Tensor, scale: float, start: int, end: int
    ) -> Tensor:
        """[B, Hkv, n, m]: the sum of a group's softmax, of the compressed keys of the blocks in reach."""
        per, (left, right) = self.block // self.stride, grid.reach(start, end)
        keys = compressed[:, :, left * per : right * per]
        rows = q[:, :, start:end].unflatten(1, (keys.shape[1], -1))
        scores = products(rows.flatten(2, 3), keys).mul_(scale).unflatten(2, rows.shape[2:4])
        begin = (
            torch.arange(keys.shape[2], dtype=torch.int64, device=q.device) * self.stride + left * self.block
        )
        position, first = (each[start:end, None] for each in (grid.position, grid.first * self.block))
        seen = (begin >= first) & (begin + self.span <= position + 1)
        return _masked_softmax(scores, seen).sum(2)

    def _pooled(self, grid: TokenGrid, start: int, end: int, weights: Tensor) -> Tensor:
        """[B, Hkv, n, blocks]: weights [B, Hkv, n, m] of compressed keys, joined over those that cover a part of a
        block, and over the parts.
        """
        left, right = grid.reach(start, end)
        covers, parts = self.span // self.stride, (right - left) * (self.block // self.stride)
        around = functional.pad(weights, (covers - 1, parts - weights.shape[-1]))
        join, of_block = (torch.add, torch.sum) if self._sums else (torch.maximum, torch.amax)
        joined = around[..., :parts]
        for at in range(1, covers):  # one after the other: parts with the same keys have the same bits
            joined = join(joined, around[..., at : at + parts])
        return of_block(joined.unflatten(-1, (right - left, -1)), -1)


@dataclass(frozen=True)
class InfLLMv2(NSA):
    """Keeps, for each query, the blocks of keys that contain the largest weight of attention to compressed keys.

    As `NSA`, with means of keys; the score of a block is the largest p[i] of the compressed keys that reach into it,
    where p is summed over the heads of q that share a head of k. The normalizer of p is exact; the authors' kernel
    estimates it from coarser means.

    Args:
        topk: Blocks that each query keeps, those of `always` among them. MiniCPM4.1 keeps 64 and the window.
        block: The keys of a block: a power of two from 4, a multiple of `stride`.
        always: (sinks, local): the first blocks, and the last ones up to the query's own: the window of the source in
            blocks, whose kernel counts the query's own block in addition.
        span: The keys of a compressed key, a multiple of `stride`.
        stride: Keys from one compressed key to the next.

    Raises:
        InvalidInput: For options that are out of range or do not go together.

    Source: InfLLM-V2, Zhao et al., arXiv:2509.24663; infllmv2_attn_stage1 and max_pooling_1d of its kernels.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = (torch.randn(1, heads, 2048, 64) for heads in (8, 2, 2))
        >>> policy = sk.policies.InfLLMv2(topk=16, always=(1, 9))
        >>> sk.attention(q, k, v, policy).shape
        torch.Size([1, 8, 2048, 64])
    """

    topk: int = 96
    always: tuple[int, int] = (1, 33)
    _sums: ClassVar[bool] = False


@dataclass(frozen=True)
class MoBAGate(TokenPolicy):
    """Keeps, for each query, its own block of keys and those before it whose mean key has the largest products with it.

    For heads of q that share a head of k the products are summed; the source has one head of q for each of k. The
    choice has no gradient.

    Args:
        topk: Blocks that each query keeps, its own among them.
        block: The keys of a block, a power of two from 4. Lists have parts of 128 of larger blocks.
        always: (sinks, local): the first blocks, and the last ones up to the query's own, which is one of them.

    Raises:
        InvalidInput: For options that are out of range.

    Source: MoBA, Lu et al., arXiv:2502.13189, equations 5 and 6.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(3, 1, 4, 2048, 64).unbind()
        >>> policy = sk.policies.MoBAGate(topk=3, block=256)
        >>> policy.lists(q, k).indices.shape, sk.attention(q, k, v, policy).shape
        (torch.Size([1, 4, 2048, 6]), torch.Size([1, 4, 2048, 64]))
    """

    topk: int = 3
    block: int = 512
    always: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self._check_fields()
        if not self.always[1]:
            raise InvalidInput(
                f"always is {self.always}; a query of MoBA sees its own block: (sinks, 1) or more"
            )

    @not_traced("a policy's lists")
    @torch.no_grad()
    def lists(
        self, q: Tensor, k: Tensor, *, scale: float | None = None, cu_seqlens: Tensor | None = None
    ) -> TokenLists:
        """Return the blocks of each query and head of k. No sync on a GPU, except to read new cu_seqlens.

        Args:
            q: Queries [B, Hq, S, D]; the last one stands at the last key.
            k: Keys [B, Hkv, T, D].
            scale: Checked, and not read: the order of products is that of any multiple of them.
            cu_seqlens: int32 or int64 [documents + 1], for packed documents [1, H, total, D]. Blocks of a document
                count from its own first key.

        Raises:
            InvalidInput: For operands that do not fit together.
        """
        checked(q, k, scale)
        heads, grid = k.shape[1], TokenGrid.of(q, k, self.block, cu_seqlens)
        with dtypes.as_given(q.device):
            gates = means(grid.aligned(k), self.block, self.block)
            gates = functional.pad(
                gates, (0, 0, 0, grid.columns - gates.shape[2])
            )  # the last one, of no later query

            def score(start: int, end: int) -> Tensor:
                left, right = grid.reach(start, end)
                rows = q[:, :, start:end].unflatten(1, (heads, -1)).sum(2, dtype=gates.dtype)
                return products(rows, gates[:, :, left:right])

            return token_lists(grid, (q.shape[0], heads), self, score, each_of(q, grid.columns))


@dataclass(frozen=True)
class IndexHead(TokenPolicy):
    """Keeps, for each query, the blocks with the largest product of an index query and an index key up to the query.

    The index queries and keys are those of a small head of the model, with norm and rotation applied: one query head
    for each head of k, and one key head for all, or as many. The choice has no gradient: MiniMax-M3 trains the head by
    a loss of its own.

    Args:
        topk: Blocks that each query keeps, those of `always` among them.
        block: The keys of a block: a power of two from 4.
        always: (sinks, local): the first blocks, and the last ones up to the query's own.

    Raises:
        InvalidInput: For options that are out of range.

    Source: MiniMax Sparse Attention, Xu et al., arXiv:2606.13392; index_topk_blocks, index_block_size and
    index_local_blocks of MiniMax-M3 are `topk`, `block` and always[1].

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = (torch.randn(1, heads, 2048, 64) for heads in (8, 2, 2))
        >>> index_q, index_k = torch.randn(1, 2, 2048, 32), torch.randn(1, 1, 2048, 32)
        >>> lists = sk.policies.IndexHead(topk=4).lists(index_q, index_k)
        >>> lists.indices.shape, sk.attention(q, k, v, lists).shape
        (torch.Size([1, 2, 2048, 4]), torch.Size([1, 8, 2048, 64]))
    """

    topk: int = 16
    block: int = 128
    always: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self._check_fields()

    @not_traced("a policy's lists")
    @torch.no_grad()
    def lists(
        self, q: Tensor, k: Tensor, *, scale: float | None = None, cu_seqlens: Tensor | None = None
    ) -> TokenLists:
        """Return the blocks of each query and index head. No sync on a GPU, except to read new cu_seqlens.

        Args:
            q: Index queries [B, Hkv, S, E]; the last one stands at the last key.
            k: Index keys [B, 1 or Hkv, T, E].
            scale: Checked, and not read: the order of products is that of any multiple of them.
            cu_seqlens: int32 or int64 [documents + 1], for packed documents [1, H, total, E]. Blocks of a document
                count from its own first key.

        Raises:
            InvalidInput: For operands that do not fit together.
        """
        checked(q, k, scale)
        if k.shape[1] not in (1, q.shape[1]):
            raise InvalidInput(
                f"k has {k.shape[1]} index heads and q {q.shape[1]}; k needs 1 or {q.shape[1]}"
            )
        grid = TokenGrid.of(q, k, self.block, cu_seqlens)
        with dtypes.as_given(q.device):
            keys = grid.aligned(k)

            def score(start: int, end: int) -> Tensor:
                left, right = grid.reach(start, end)
                rows = q[:, :, start:end]
                some = max(SCORES // (q.shape[0] * q.shape[1] * (end - start) * self.block), 1)
                parts = [
                    self._largest(grid, rows, keys, start, (at, min(at + some, right)))
                    for at in range(left, right, some)
                ]
                return torch.cat(parts, -1)

            rule: dict[str, Any] = {"scale": 1.0, "softmax": False, "sums": False}
            tiles = tile_scores(grid, q, keys, q.shape[1], (self.block, 1, 1), **rule)
            return token_lists(grid, (q.shape[0], q.shape[1]), self, score, each_of(q, grid.columns), tiles)

    def _largest(
        self, grid: TokenGrid, rows: Tensor, keys: Tensor, start: int, blocks: tuple[int, int]
    ) -> Tensor:
        """[B, H, n, blocks]: the largest product in each block of keys up to the query."""
        begin, end = (at * self.block for at in blocks)
        part = keys[:, :, begin:end]
        key = torch.arange(begin, begin + part.shape[2], dtype=torch.int64, device=rows.device)
        position = grid.position[start : start + rows.shape[2], None]
        scores = products(rows, part).masked_fill_(key > position, -torch.inf)
        scores = functional.pad(scores, (0, end - begin - part.shape[2]), value=-torch.inf)
        return scores.unflatten(-1, (-1, self.block)).amax(-1)


@untraced("an index loss is made", "make it outside and pass it to the compiled function")
def index_loss(
    index_q: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    lists: TokenLists | None = None,
    *,
    scale: float | None = None,
    index_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return how far an index head is from the attention whose blocks it chooses: the loss that trains MiniMax-M3's.

    Of a query and head of k, p is the attention's softmax over the keys that `lists` lets it see, in mean over the
    heads of q that share the head of k, and r the softmax of index_scale * index_q @ index_k.T over the same keys. The
    loss is the mean of KL(p || r) over heads and the queries that see a key. Gradients go to index_q and index_k alone,
    are computed with the loss and have none themselves; the source cuts them off from the layer's input too. Scores of
    some queries are in memory at a time. No sync on a GPU, except to read new cu_seqlens.

    Args:
        index_q: Index queries [B, Hkv, S, E]; the last one stands at the last key.
        index_k: Index keys [B, 1 or Hkv, T, E].
        q: Queries of the attention [B, Hq, S, D].
        k: Keys of the attention [B, Hkv, T, D].
        lists: The keys that count, those of `IndexHead.lists`; causal. None: all keys up to a query, as in warm-up.
        scale: The factor of q @ k.T; D**-0.5 by default.
        index_scale: The factor of index_q @ index_k.T; E**-0.5 by default.
        cu_seqlens: int32 or int64 [documents + 1], for packed documents [1, H, total, D].

    Raises:
        InvalidInput: For operands that do not fit together.

    Source: MiniMax Sparse Attention, Xu et al., arXiv:2606.13392.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 8, 500, 64), torch.randn(1, 2, 500, 64)
        >>> index_q, index_k = torch.randn(1, 2, 500, 32, requires_grad=True), torch.randn(1, 1, 500, 32)
        >>> lists = sk.policies.IndexHead(topk=2).lists(index_q, index_k)
        >>> loss = sk.policies.index_loss(index_q, index_k, q, k, lists)
        >>> loss.backward()
        >>> index_q.grad.shape
        torch.Size([1, 2, 500, 32])
    """
    for name, x in (("index_q", index_q), ("index_k", index_k)):
        arguments.tensor(name, x)
    if not isinstance(lists, TokenLists | None):
        raise InvalidInput(f"lists must be sk.TokenLists or None, got {arguments.shown(lists)}")
    listed = (None, None) if lists is None else (lists.indices, lists.counts)
    learns = tuple(wants_gradient(x) or watched(x) for x in (index_q, index_k))
    found = _loss(index_q, index_k, q, k, *listed, lists, (scale, index_scale), learns, cu_seqlens=cu_seqlens)
    return _IndexLoss.apply(index_q, index_k, *found)


@not_traced("an index loss")
@torch.no_grad()
def _loss(
    index_q: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    indices: Tensor | None,
    counts: Tensor | None,
    lists: TokenLists | None,
    scales: tuple[float | None, float | None],
    learns: tuple[bool, ...],
    *,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and its gradients of index_q and index_k, where these learn, in float32 or float64. `lists` with these
    indices and counts.
    """
    factors = checked(q, k, scales[0]), checked(index_q, index_k, scales[1])
    (batch, heads, keys, _), queries = k.shape, q.shape[2]
    right = [batch, heads, queries]
    if (
        list(index_q.shape[:3]) != right
        or list(index_k.shape[::2]) != [batch, keys]
        or index_k.shape[1] not in (1, heads)
    ):
        raise InvalidInput(
            f"index_q is {list(index_q.shape)} and index_k {list(index_k.shape)}; q {list(q.shape)} and k "
            f"{list(k.shape)} need index_q {[*right, 'E']} and index_k [{batch}, 1 or {heads}, {keys}, E]"
        )
    arguments.one_device("q is", q.device, "index_q", index_q.device)
    if lists is not None:
        assert indices is not None
        lists = replace(lists, indices=indices, counts=counts)
        arguments.one_device("q is", q.device, "the lists", lists.device)
        shape = lists.indices.shape
        if (
            shape[0] not in (1, batch)
            or shape[1] not in (1, heads)
            or shape[2] != queries
            or not lists.causal
        ):
            raise InvalidInput(
                f"lists are {lists!r}; they must be causal, of batch 1 or {batch}, heads 1 or {heads} and {queries} "
                "queries"
            )
    edges = [0, queries]
    if cu_seqlens is not None:
        edges = TokenGrid.of(q, k, LEAST, cu_seqlens).edges.tolist()
    kind = torch.promote_types(index_q.dtype, torch.float32)
    grads = [
        torch.zeros_like(x, dtype=kind) if need else None
        for x, need in zip((index_q, index_k), learns, strict=True)
    ]
    total, count = (torch.zeros((), dtype=each, device=q.device) for each in (kind, torch.int64))
    step = max(SCORES // (q.shape[0] * q.shape[1] * max(keys, 1)), 1)
    alone = len(edges) == 2
    parts = [(a, b, at, min(at + step, b)) for a, b in pairwise(edges) for at in range(a, b, step)]
    with dtypes.as_given(q.device):
        for first, _, start, end in parts:
            # Keys from the first of the document to that of the last query.
            left, right = (0, keys - q.shape[2] + end) if alone else (first, end)
            if left >= right:
                continue
            seen = _seen(lists, start, end, right - left, q.device)
            rows, near = q[:, :, start:end].unflatten(1, (heads, -1)), slice(left, right)
            scores = (
                products(rows.flatten(2, 3), k[:, :, near]).mul_(factors[0]).unflatten(2, rows.shape[2:4])
            )
            p = _masked_softmax(scores, seen[:, :, None]).mean(2)
            some, these = index_q[:, :, start:end], index_k[:, :, near]
            s = products(some, these).mul_(factors[1]).masked_fill_(~seen, -torch.inf)
            r = s - s.logsumexp(-1, keepdim=True)
            total += torch.where(p > 0, p * (p.log() - r), 0).sum()
            count += seen.any(-1).expand(batch, heads, -1).sum()
            d = factors[1] * torch.where(seen, r.exp() - p, 0)
            if grads[0] is not None:
                grads[0][:, :, start:end] = d @ these.to(d.dtype)
            if grads[1] is not None:
                found = d.mT @ some.to(d.dtype)
                grads[1][:, :, near] += found if index_k.shape[1] > 1 else found.sum(1, keepdim=True)
    count = count.clamp(min=1)
    of_q, of_k = (None if x is None else x.div_(count) for x in grads)
    return total / count, of_q, of_k


class _IndexLoss(torch.autograd.Function):
    """A loss with the gradients that were computed with it."""

    @staticmethod
    def forward(
        index_q: Tensor, index_k: Tensor, loss: Tensor, of_q: Tensor | None, of_k: Tensor | None
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        index_q, index_k, _, *grads = inputs
        save_for_backward(ctx, index_q, index_k, *grads)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return *_IndexLossBackward.apply(*saved_tensors(ctx), *upstream), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise InvalidInput("index_loss has no forward-mode derivative (jvp, jacfwd, torch.func.hessian)")


class _IndexLossBackward(torch.autograd.Function):
    """The gradients of index_q and index_k, which have no gradients themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        index_q: Tensor, index_k: Tensor, of_q: Tensor | None, of_k: Tensor | None, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        pairs = (index_q, of_q), (index_k, of_k)
        return tuple(None if x is None else (x * upstream).to(given.dtype) for given, x in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise InvalidInput("the gradients of index_loss have no gradients themselves")

    jvp = backward


def _seen(lists: TokenLists | None, start: int, end: int, keys: int, device: torch.device) -> Tensor:
    """The keys that queries `start` to `end` see, bool [1 or B, 1 or H, n, keys]; the last query stands at the last."""
    if lists is not None:
        counts = None if lists.counts is None else lists.counts[:, :, start:end]
        return replace(lists, indices=lists.indices[:, :, start:end], counts=counts).to_dense(keys)
    key = torch.arange(keys, dtype=torch.int64, device=device)
    own = torch.arange(keys - end + start, keys, dtype=torch.int64, device=device)
    return (key <= own[:, None])[None, None]


def _masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """The softmax over the seen; 0 for a row that sees none."""
    return scores.masked_fill_(~seen, -torch.inf).softmax(-1).masked_fill_(~seen, 0)


def each_of(q: Tensor, scores: int) -> int:
    """What a query [B, Hq, 1, D] has at once, of so many scores for a head: these, or itself in float32."""
    return q.shape[0] * q.shape[1] * max(scores, q.shape[3])


def checked(q: Any, k: Any, scale: float | None) -> float:
    """The factor of checked q and k."""
    check_tensors(q, k, k)
    for name, x in (("q", q), ("k", k)):
        arguments.tensor(name, x)
    if not q.shape[0]:
        raise InvalidInput(f"q is {list(q.shape)}; lists need a batch item")
    return checked_scale(scale, q.shape[3])


def check_compressed(compressed: Any, q: Tensor, k: Tensor, windows: int) -> None:
    """InvalidInput unless it has the compressed keys of k."""
    arguments.tensor("compressed", compressed, (q.dtype,), 4)
    arguments.one_device("q is", q.device, "compressed", compressed.device)
    right = [k.shape[0], k.shape[1], windows, k.shape[3]]
    if list(compressed.shape) != right:
        raise InvalidInput(f"compressed is {list(compressed.shape)}; k {list(k.shape)} needs {right}")


def means(x: Tensor, span: int, stride: int) -> Tensor:
    """The mean of rows i * stride to i * stride + span - 1 of x [B, H, T, D], [B, H, n, D] in float32 or float64.
    Differentiable.
    """
    dtype, parts = torch.promote_types(x.dtype, torch.float32), x.shape[2] // stride
    sums = x[:, :, : parts * stride].unflatten(2, (parts, stride)).sum(3, dtype=dtype)
    count = max(parts - span // stride + 1, 0)
    found = sums[:, :, :count]
    for at in range(1, span // stride):
        found = found + sums[:, :, at : at + count]
    return found / span
