"""xFormers' `memory_efficient_attention` (0.0.35) with its attention biases, on SparseK's kernels.

    from sparsek.integrations.xformers import memory_efficient_attention    # was: from xformers.ops

Biases are known by the names and fields of their classes. Their lengths are read from the lists on the host, so nothing
waits for a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import documents_mask
from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.convert.xformers import GAPPED, PAGED, WHOLE, Sequences, sequences_of
from sparsek.attn.mask.lists import upload
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.tracing import wants_gradient, watched
from sparsek.integrations.foreign_options import absent, refusing
from sparsek.integrations.xformers_pages import kept_with, padded_pages, paged, pages_of

CALL = "memory_efficient_attention"
NAMES = {"bias": "attn_bias", "q_len": "the length of query", "kv_len": "the length of key"}
DIMS = "[B, M, H, K], [B, M, G, H, K] or [B, M, K]"

__getattr__ = absent(
    __name__,
    memory_efficient_attention_forward=f"call {CALL} under torch.no_grad",
    memory_efficient_attention_forward_requires_grad="call sparsek.attention with return_lse=True",
    memory_efficient_attention_partial="call sparsek.attention with return_lse=True",
    memory_efficient_attention_backward=f"call backward on the result of {CALL}",
    merge_attentions="call sparsek.merge_attention, which merges two results and their lse",
    LowerTriangularMask="import it from xformers.ops; any object of a class of that name works too",
    fmha="import it from xformers.ops",
)


@refusing(CALL, p=(0.0, "attention drops no weights"))
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return attention over the keys that a bias of xFormers admits, in its layouts.

    Padded and gappy biases: only the keys of the sequences are read, and what lies between may be NaN. Where no
    gradient is wanted, padded keys are read in place by `attention_paged`, if `padding` is a multiple of 16 and the
    window causal or of equal sides. In other cases the call first copies the keys and values of all sequences into one
    tensor, unless the sequences adjoin.

    The mask of a bias is made once for equal lengths and kept, with its plans, as those of a `MaskPolicy`. A captured
    CUDA graph keeps the lengths of its capture; where `attention_paged` runs, it follows the tensors of the bias.

    Args:
        query: [B, M, H, K], [B, M, G, H, K] (G groups of H heads) or [B, M, K] (one head). Block-diagonal and paged
            biases: B is 1, and M all queries. G and H that do not collapse into one dim are copied.
        key: [B, N, H, K], [B, N, G, H, K] or [B, N, K]. Heads that `expand` has repeated are read once. H may also
            divide that of query, or with groups be 1. Paged biases: N is pages * page_size.
        value: The same with Kv in place of K.
        attn_bias: Any class of xformers.ops.fmha.attn_bias but those with a tensor; every key for None.
        p: Must be 0: no weights are dropped.
        scale: The factor of the scores; K**-0.5 for None.
        op: Not read: it chooses a kernel of xFormers.
        output_dtype: Must be None or the dtype of query.

    Returns:
        out [B, M, H, Kv], with G or without H as query; 0 where a query sees no key. Gradients for query, key and
        value, except with paged biases.

    Raises:
        InvalidInput: For dropout, tensors as biases, and operands whose lengths are not those of the bias.

    Source: Rabe and Staats, arXiv:2112.05682.

    Example:
        >>> import torch
        >>> from sparsek.integrations.xformers import memory_efficient_attention
        >>> class LowerTriangularMask:  # as in xformers.ops.fmha.attn_bias
        ...     pass
        >>> q, k, v = torch.randn(3, 2, 300, 8, 64).unbind()
        >>> memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()).shape
        torch.Size([2, 300, 8, 64])
    """
    q, k, v = _operands(query, key, value)
    if output_dtype is not None:
        arguments.dtype("output_dtype", output_dtype, (query.dtype,))
    if attn_bias is None:
        out = _attention(q, k, v, None, scale)
    else:
        out = _biased(q, k, v, attn_bias, scale)
    return out if query.ndim == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, mask, scale=scale).transpose(1, 2)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float | None) -> Tensor:
    """out [B, M, Hq, Kv] for q [B, M, Hq, K], k [B, N, Hkv, K] and v [B, N, Hkv, Kv]."""
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "torch.compile cannot read the lists of attn_bias: make the mask outside, by BlockMask.from_xformers, and "
            "call sparsek.attention"
        )
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return _by_lengths(q, k, v, bias, scale)
    return _untraced()(q, k, v, bias, scale)


@lru_cache(maxsize=1)
def _untraced() -> Callable[..., Tensor]:
    """Behind a break of a compiled graph, all of it as Python."""
    disabled: Any = torch.compiler.disable
    return disabled(_by_lengths)


def _by_lengths(q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: float | None) -> Tensor:
    found = _sequences(bias, q.shape[1], k.shape[1])
    keys = found.kind.keys
    if keys != WHOLE and (q.shape[0], k.shape[0]) != (1, 1):
        raise InvalidInput(
            f"query has {q.shape[0]} and key {k.shape[0]} batch items; {found.name} is for sequences in one: "
            "x.flatten(0, 1)[None]"
        )
    if keys == PAGED:
        return paged(q, k, v, bias, found, pages_of(bias, found, q.device), scale)
    pages = None
    if keys == GAPPED and not (wants_gradient(q, k, v) or watched(q)):
        pages = padded_pages(bias, found, q.device)
    if pages is not None:
        with suppress(Unsupported):  # no kernel takes these pages: the keys are copied
            return paged(q, k, v, bias, found, pages, scale)
    mask = _mask(bias, found, q.device)
    if keys == GAPPED:
        k, v = (_joined(x, found, mask) for x in (k, v))
    return _attention(q, k, v, mask, scale)


def _sequences(bias: Any, q_len: int, kv_len: int) -> Sequences:
    """The sequences of a bias. Messages have the names of this call's arguments."""
    try:
        return sequences_of(bias, q_len, kv_len)
    except InvalidInput as error:
        name, _, rest = str(error).partition(" ")
        if name not in NAMES:
            raise
        raise InvalidInput(f"{NAMES[name]} {rest}") from error


def _operands(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, M, Hq, K], k [B, N, Hkv, K] and v [B, N, Hkv, Kv]."""
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if arguments.dense(name, x).ndim not in (3, 4, 5) or x.ndim != query.ndim:
            raise InvalidInput(f"{name} is {list(x.shape)}; all three must be {DIMS}")
    if key.shape[:2] != value.shape[:2]:
        raise InvalidInput(
            f"key is {list(key.shape)} and value {list(value.shape)}; every key needs one value"
        )
    if query.ndim == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.ndim == 4:
        return query, key, value
    groups, heads = query.shape[2:4]
    for name, x in (("key", key), ("value", value)):
        if x.shape[2] != groups or x.shape[3] not in (1, heads):
            raise InvalidInput(
                f"{name} is {list(x.shape)} and query {list(query.shape)}; groups and heads must be equal, or the "
                f"heads of {name} 1"
            )
    if all(x.shape[3] == 1 or x.stride(3) == 0 for x in (key, value)):
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), *(x.expand(-1, -1, -1, heads, -1).flatten(2, 3) for x in (key, value))


def _mask(bias: Any, found: Sequences, device: torch.device) -> BlockMask:
    """The mask of a bias, of keys one sequence behind the other: the same object for equal lengths."""

    def build() -> BlockMask:
        if found.kind.keys == WHOLE:
            return BlockMask.from_xformers(bias, found.q_len, found.kv_len, device=device)
        label = f"{found.name}, {found.k_start.size} sequences"
        return documents_mask(BlockMask, found.packed(), found.near, 128, device, label)

    return kept_mask(("xformers", *found.key, device), build)


def _joined(x: Tensor, found: Sequences, mask: BlockMask) -> Tensor:
    """The rows of all sequences of x [1, N, H, E], one sequence behind the other: a view if they adjoin."""
    there = np.flatnonzero(found.k_start < found.k_end)
    start, end = found.k_start[there], found.k_end[there]
    if not start.size:
        return x[:, :0]
    if (start[1:] == end[:-1]).all():
        return x[:, int(start[0]) : int(end[-1])]

    def rows() -> list[Tensor]:
        lengths = end - start
        first, count = upload([start - np.cumsum(lengths) + lengths, lengths], x.device)
        total = int(lengths.sum())
        place = torch.arange(total, dtype=torch.int32, device=x.device)
        return [place + torch.repeat_interleave(first, count, output_size=total)]

    return x.index_select(1, kept_with(mask, "rows of keys", rows)[0])
