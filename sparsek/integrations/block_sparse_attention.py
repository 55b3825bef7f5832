"""The calls of mit-han-lab's Block-Sparse-Attention 0.0.2, on SparseK's kernels.

    from sparsek.integrations.block_sparse_attention import block_sparse_attn_func    # was: from block_sparse_attn

Dense, streaming and block-sparse heads are one mask and one call. Packed batch items of one length are one call too;
items of several lengths are a call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.cache import ByTensor, edges_of, kept_mask
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import reads_values
from sparsek.integrations.foreign_options import (
    absent,
    check_operands,
    check_shape,
    ints_on,
    readable,
    refusing,
)

BLOCK = 128
NO_DROPOUT = (0.0, "attention drops no weights")
OTHER_BLOCKS = (
    "for other blocks call sparsek.attention with BlockMask.from_block_map(map, seq_len, block=...)"
)
# Of forks.
FORKS: dict[str, tuple[Any, str]] = dict.fromkeys(
    ("q_block_size", "k_block_size", "kv_block_size", "sparse_block_size", "m_block_dim", "n_block_dim"),
    (BLOCK, OTHER_BLOCKS),
)
FORKS |= {"window_size_left": (-1, OTHER_BLOCKS), "window_size_right": (-1, OTHER_BLOCKS)}

__getattr__ = absent(
    __name__,
    flash_attn_func="import it from sparsek.integrations.flash_attention",
    flash_attn_varlen_func="import it from sparsek.integrations.flash_attention",
)


@refusing("block_sparse_attn_func", p_dropout=NO_DROPOUT, **FORKS)
def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor | None,
    base_blockmask: Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of packed batch items, with a mask of its own for each head, in blocks of 128 x 128.

    A head of type 0 is dense. A head of type m > 0 visits the blocks of base_blockmask[:, m - 1], where the heads of
    type 1 are numbered first: the n-th of them has type n. A head of type -1 has sinks and a window: `sink` first
    blocks and `local` last ones, up to its own tile if causal, else up to the last key. With `exact_streaming` they are
    tokens: a query sees the first `sink` keys and the `local` keys up to its own. If causal, a query sees no key after
    its own, and the last query of an item stands at its last key.

    Args:
        q: [total_q, Hq, D], batch items one after the other.
        k: [total_k, Hkv, D]. Hq is a multiple of Hkv.
        v: [total_k, Hkv, D].
        cu_seqlens_q: int32 [B + 1]: where each item starts, and the end. Not read on a GPU for one item; else once, as
            long as nothing writes to it.
        cu_seqlens_k: The same of k.
        head_mask_type: int32 [Hq], on the device of q. It is not read on the host, except for exact_streaming, where it
            is read once, like streaming_info. On a GPU a head sees nothing and gets out = 0 if its number has no mask,
            or is negative and not -1; on the CPU these are refused.
        streaming_info: int32 [2 * Hq]: sink and local of each head, from 0; None if no head streams.
        base_blockmask: bool [B, masks, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)]; None if none is sparse.
        max_seqlen_q_: The longest item of q.
        max_seqlen_k_: The longest item of k.
        p_dropout: Must be 0.
        deterministic: As in `sparsek.attention`.
        softmax_scale: The factor of the scores; D**-0.5 for None.
        is_causal: Whether a query sees no key after its own.
        exact_streaming: Whether sinks and windows are in tokens. Needs is_causal.
        return_attn_probs: Whether to return (out, lse, None), with lse float32 [B, Hq, max_seqlen_q_]. It is +inf, as
            in the original and in FlashAttention-2, where a query sees no key or there is none; `sparsek.attention` has
            -inf there, and `sparsek.merge_attention` takes both as an empty part. The third would be the weights, which
            are never in memory.

    Returns:
        out [total_q, Hq, D]; 0 where a query sees no key. It has gradients for q, k and v, also where the original has
        none (exact_streaming).

    Raises:
        InvalidInput: For dropout, and for tensors that do not fit together.

    Source: Guo et al., Block Sparse Attention, 2024, github.com/mit-han-lab/Block-Sparse-Attention.

    Example:
        >>> import torch
        >>> from sparsek.integrations.block_sparse_attention import block_sparse_attn_func
        >>> q, k, v = torch.randn(3, 300, 2, 64).unbind()
        >>> ends, types = torch.tensor([0, 300], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
        >>> blocks = torch.eye(3, dtype=torch.bool)[None, None]
        >>> block_sparse_attn_func(q, k, v, ends, ends, types, None, blocks, 300, 300, 0.0).shape
        torch.Size([300, 2, 64])
    """
    longest = (
        arguments.integer("max_seqlen_q_", max_seqlen_q_, 0, INT32_MAX),
        arguments.integer("max_seqlen_k_", max_seqlen_k_, 0, INT32_MAX),
    )
    check_operands(q, k, v, "[total, H, D] of packed batch items")
    arguments.flag("return_attn_probs", return_attn_probs)
    check_shape("v", v, (*k.shape[:2], v.shape[2]), "as many tokens and heads as k")
    items, batch = _items((cu_seqlens_q, cu_seqlens_k), q.shape[0], k.shape[0], longest)
    heads = _Heads(head_mask_type, streaming_info, base_blockmask, exact_streaming, is_causal)
    heads = _checked(heads, q, batch, longest)
    options: dict[str, Any] = {"scale": softmax_scale, "deterministic": deterministic, "return_lse": True}
    outs, lses = [], []
    for some in items:
        queries = _batched(q, some.q_start, some.count, some.q_len)
        keys, values = (_batched(x, some.k_start, some.count, some.k_len) for x in (k, v))
        mask = (_token_mask if heads.exact else _block_mask)(heads, some, q.device)
        out, lse = attention(queries, keys, values, mask, **options)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if not return_attn_probs:
        return out
    lse = torch.cat([functional.pad(x, (0, longest[0] - x.shape[2]), value=-torch.inf) for x in lses])
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None


@refusing("token_streaming_attn_func", **FORKS)
def token_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Any:
    """Return causal attention of dense and streaming heads, whose sinks and windows are in tokens.

    As block_sparse_attn_func, whose arguments these are, with exact_streaming=True, is_causal=True and no
    base_blockmask: streaming_info has tokens.

    Returns:
        out [total_q, Hq, D], or (out, lse, None).

    Raises:
        InvalidInput: For tensors that do not fit together.
    """
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
        0.0, deterministic, softmax_scale, True, True, return_attn_probs,
    )  # fmt: skip


@refusing("block_streaming_attn_func", **FORKS)
def block_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of dense and streaming heads, whose sinks and windows are in blocks of 128.

    As block_sparse_attn_func, whose arguments these are, without base_blockmask: streaming_info has blocks.

    Returns:
        out [total_q, Hq, D], or (out, lse, None).

    Raises:
        InvalidInput: For dropout, and for tensors that do not fit together.
    """
    return block_sparse_attn_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
        p_dropout, deterministic, softmax_scale, is_causal, False, return_attn_probs,
    )  # fmt: skip


class _Heads(NamedTuple):
    """What each head sees, as the caller gave it."""

    types: Tensor
    streaming: Tensor | None
    blocks: Tensor | None
    exact: bool
    causal: bool


class _Items(NamedTuple):
    """Adjacent batch items of one length: the first of them, how many, and the first token and the length of each."""

    first: int
    count: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int


def _batched(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """A view [count, H, length, D] of packed tokens [total, H, D]."""
    return x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _items(
    ends: tuple[Any, Any], q_total: int, k_total: int, longest: tuple[int, int]
) -> tuple[list[_Items], int]:
    """Adjacent batch items of equal lengths, and the number of all items."""
    names, totals = ("cu_seqlens_q", "cu_seqlens_k"), (q_total, k_total)
    for name, end in zip(names, ends, strict=True):
        arguments.tensor(name, end, (torch.int32, torch.int64), 1)
    if ends[0].shape != ends[1].shape or not ends[0].shape[0]:
        raise InvalidInput(
            f"cu_seqlens_q is {list(ends[0].shape)} and cu_seqlens_k {list(ends[1].shape)}; both must be [B + 1]"
        )
    batch = ends[0].shape[0] - 1
    if batch == 1 and all(end.is_cuda for end in ends):
        edges = [np.array((0, total)) for total in totals]
    else:
        edges = [edges_of(*each) for each in zip(ends, names, totals, strict=True)]
    lengths = np.stack([np.diff(each) for each in edges])
    for name, some, most in zip(("q", "k"), lengths, longest, strict=True):
        if batch and some.max() > most:
            raise InvalidInput(
                f"max_seqlen_{name}_ is {most}; the longest batch item has {some.max()} tokens"
            )
    if not batch:
        raise InvalidInput("cu_seqlens_q and cu_seqlens_k have no batch item; they must be [B + 1]")
    first = [0, *(np.flatnonzero((np.diff(lengths) != 0).any(0)) + 1).tolist(), batch]
    made = [
        _Items(at, end - at, *(int(n) for e, s in zip(edges, lengths, strict=True) for n in (e[at], s[at])))
        for at, end in pairwise(first)
    ]
    return made, batch


def _checked(heads: _Heads, q: Tensor, batch: int, longest: tuple[int, int]) -> _Heads:
    """What the heads see, if it fits to q."""
    count = q.shape[1]
    arguments.flag("is_causal", heads.causal)
    if arguments.flag("exact_streaming", heads.exact) and not (heads.causal and heads.streaming is not None):
        raise InvalidInput("exact_streaming=True needs is_causal=True and streaming_info, as in the original")
    types = ints_on("head_mask_type", heads.types, q.device, 1)
    check_shape("head_mask_type", types, (count,), f"for the {count} heads of q")
    info, masks = None, 0
    if heads.streaming is not None:
        info = ints_on("streaming_info", heads.streaming, q.device, 1)
        check_shape("streaming_info", info, (2 * count,), f"sink and local of the {count} heads of q")
    if heads.blocks is not None:
        arguments.tensor("base_blockmask", heads.blocks, (torch.bool,), 4)
        arguments.one_device("base_blockmask is", heads.blocks.device, "q is", q.device)
        masks, tiles = heads.blocks.shape[1], tuple(-(-each // BLOCK) for each in longest)
        right = (batch, masks, *tiles)
        check_shape(
            "base_blockmask", heads.blocks, right, "for max_seqlen_q_ and max_seqlen_k_ in blocks of 128"
        )
    if readable(types):
        _check_values(types.tolist(), info.tolist() if info is not None and readable(info) else None, masks)
        if info is None and bool((types < 0).any()):
            raise InvalidInput("head_mask_type has streaming heads (-1), and streaming_info is None")
    return heads._replace(types=types, streaming=info)


def _check_values(types: Sequence[int], info: Sequence[int] | None, masks: int) -> None:
    """InvalidInput for types and sinks and windows, as far as they are known, that no head has."""
    for head, (kind, number) in enumerate(zip(types, _numbers(types).tolist(), strict=True)):
        if kind < -1:
            raise InvalidInput(
                f"head_mask_type[{head}] is {kind}; it must be -1 for a streaming head, 0 for a dense one, or a mask's "
                "number"
            )
        if number > masks:
            raise InvalidInput(
                f"head_mask_type[{head}] is for mask {number}; base_blockmask has {masks} masks"
            )
        if kind == -1 and info is not None and min(info[2 * head : 2 * head + 2]) < 0:
            sink, local = info[2 * head : 2 * head + 2]
            raise InvalidInput(
                f"streaming_info has sink {sink} and local {local} for head {head}; both must be at least 0"
            )


def _numbers(types: Any) -> np.ndarray:
    """The mask of each head: ones are numbered first. From a tensor on the CPU, or a sequence."""
    types = np.asarray(types)
    return np.where(types == 1, np.cumsum(types == 1), types)


def _block_mask(heads: _Heads, some: _Items, device: torch.device) -> BlockMask:
    """The mask of these items: one block map for all heads, by operators on the device."""
    rows, columns = -(-some.q_len // BLOCK), -(-some.k_len // BLOCK)
    kinds = heads.types[:, None, None]
    seen = (kinds == 0).expand(-1, rows, columns)[None]
    if heads.blocks is not None and heads.blocks.shape[1]:
        ones = heads.types == 1
        numbers = torch.where(ones, ones.cumsum(0), heads.types)
        masks = heads.blocks.shape[1]
        blocks = heads.blocks[some.first : some.first + some.count, :, :rows, :columns]
        chosen = blocks.index_select(1, (numbers - 1).clamp(0, masks - 1))
        seen = seen | chosen & ((numbers > 0) & (numbers <= masks))[:, None, None]
    if heads.streaming is not None:
        sink, local = (each[:, None, None] for each in heads.streaming.view(-1, 2).unbind(1))
        row, column = (torch.arange(count, dtype=torch.int32, device=device) for count in (rows, columns))
        ahead = -((some.q_len - some.k_len) // BLOCK)  # blocks before the last one of tile 0
        end = row[:, None] + 1 + ahead if heads.causal else columns
        near = (column < sink) | (column >= end - local)
        seen = seen | near & (kinds == -1)
    frame = {"q_len": some.q_len, "kv_len": some.k_len, "block": BLOCK, "device": device}
    return BlockMask.from_block_map(seen, causal=heads.causal, **frame)


def _token_mask(heads: _Heads, some: _Items, device: torch.device) -> BlockMask:
    """The causal mask of these items with sinks and windows in tokens, which are read on the host once."""
    types = _read("head_mask_type", heads.types)
    info = (0,) * 2 * len(types) if heads.streaming is None else _read("streaming_info", heads.streaming)
    _check_values(types, info, 0 if heads.blocks is None else heads.blocks.shape[1])
    frame = {"q_len": some.q_len, "kv_len": some.k_len, "block": BLOCK, "device": device}
    masks = []
    for head, (kind, number) in enumerate(zip(types, _numbers(types).tolist(), strict=True)):
        sink, local = info[2 * head], info[2 * head + 1]
        if number > 0 and heads.blocks is not None:
            rows, columns = -(-some.q_len // BLOCK), -(-some.k_len // BLOCK)
            blocks = heads.blocks[some.first : some.first + some.count, number - 1 : number, :rows, :columns]
            masks.append(BlockMask.from_block_map(blocks, causal=True, **frame))
        else:
            masks.append(_kept(frame, window=local, sinks=sink) if kind else _kept(frame))
    return BlockMask.per_head(masks)


def _kept(frame: dict[str, Any], **window: int) -> BlockMask:
    """A causal mask with this window and sinks, or without; the same object each time."""

    def build() -> BlockMask:
        if not window:
            return BlockMask.causal(**frame)
        if window["window"]:
            return BlockMask.sliding_window(**window, **frame)
        rows, columns = (-(-frame[name] // BLOCK) for name in ("q_len", "kv_len"))
        first = torch.arange(columns, dtype=torch.int32, device=frame["device"]) * BLOCK
        every = torch.ones(rows, columns, dtype=torch.bool, device=frame["device"])
        lengths = (min(window["sinks"], frame["kv_len"]) - first).clamp(0, BLOCK)
        return BlockMask.from_block_map(every, causal=True, kv_lengths=lengths, **frame)

    return kept_mask(("streaming head", *frame.values(), *window.values()), build)


_READ: ByTensor[tuple[int, ...]] = ByTensor()


@reads_values("types, lengths and lists are read", "pass plain tensors")
def _read(name: str, x: Tensor) -> tuple[int, ...]:
    """The values of a tensor; of one on a GPU with one sync, as long as nothing writes to it."""
    if not x.is_cuda:
        return tuple(x.tolist())
    found = None if x.is_inference() else _READ.find(x, None)
    if found is None and torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            f"{name} is read while a CUDA graph is captured; call once with this tensor before the capture"
        )
    return _READ.get(x, None, lambda: tuple(x.tolist()))
