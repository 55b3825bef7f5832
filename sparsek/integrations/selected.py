"""Calls of libraries with selected-block attention, in which each query token has its blocks of keys: `TokenLists`.

from sparsek.integrations.selected import parallel_nsa  # was: from fla.ops.nsa import parallel_nsa
from sparsek.integrations.selected import build_k2q_csr, sparse_atten_func  # was: from fmha_sm100.sparse
from sparsek.integrations.selected import sparse_attention  # was: MiniMax-M3's sparse attention of NeMo AutoModel
from sparsek.integrations.selected import infllmv2_attn_varlen_func  # was: from infllm_v2
from sparsek.integrations.selected import flash_moba_varlen_func  # was: from flash_moba
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.cache import ByTensor, edges_of, values_of
from sparsek.attn.mask.convert.argument import MaskLike
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.mask.token_lists import LEAST, MOST, TokenLists
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.attn.policies.selected import NSA, MoBAGate
from sparsek.attn.policies.token import LONGEST, TokenGrid, compressed_mask, mask_of
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.dtypes import FLOATS
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced, wants_gradient
from sparsek.integrations.block_rows import BlockRows
from sparsek.integrations.flash_attention import flash_attn_varlen_func, window_bounds
from sparsek.integrations.foreign_options import absent, check_operands, check_shape, refusing
from sparsek.nn.selected import compressed

INTS = (torch.int32, torch.int64)
ALWAYS = (1, 2)  # blocks that fla's selection always has: the first, the query's own and the one before
M3_BLOCK, INFLLM_BLOCK = 128, 64
IN_PAGES = "call sparsek.attention_paged with TokenLists, which reads pages"
NO_DROPOUT = (0.0, "attention drops no weights")
REFUSED_MSA: dict[str, tuple[Any, str]] = {
    "return_temperature_lse": (False, "call again with softmax_scale / lse_temperature_scale"),
    **dict.fromkeys(("page_table", "seqused_k"), (None, IN_PAGES)),
    **dict.fromkeys(("qk_dtype", "pv_dtype"), (None, "cast q, k and v")),
}
REFUSED_INFLLM: dict[str, tuple[Any, str]] = {
    "dropout_p": NO_DROPOUT,
    "block_table": (None, IN_PAGES),
    "alibi_slopes": (None, "call sparsek.attention for each document, which has alibi_slopes"),
    "block_window_size": (0, "list these blocks in topk_idx too"),
}

__getattr__ = absent(
    __name__,
    sparse_decode_atten_func=IN_PAGES,
    sparse_atten_nvfp4_kv_func="call sparse_atten_func with keys and values in bf16",
    infllmv2_attn_stage1="choose blocks by sparsek.policies.InfLLMv2",
    infllmv2_attn_with_kvcache=IN_PAGES,
    flash_topk_varlen_func="choose blocks by sparsek.policies.MoBAGate",
    flash_moba_attn_varlen_func="call sparsek.attention_varlen with TokenLists, which take the blocks of each query",
    parallel_nsa_topk="choose blocks by sparsek.policies.NSA",
    parallel_nsa_compression="call parallel_nsa with g_cmp",
)


@refusing("parallel_nsa", head_first=(False, "pass tensors of [B, T, H, ..], as x.transpose(1, 2)"))
def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: int | Tensor = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return native sparse attention as fla-core 0.6: g_slc * selected + g_cmp * compressed + g_swa * sliding.

    The compressed attention is to the means of blocks that end before the query or at it. Without `block_indices` its
    weights choose: the first, the query's own and the block before, and those of the largest sums over the group.
    Gradients go through q, k, v and the gates, and not through the choice.

    Args:
        q: [B, S, Hq, D].
        k: [B, T, Hkv, D]. Hq is any multiple of Hkv. The last query stands at the last key.
        v: [B, T, Hkv, Dv].
        g_cmp: [B, S, Hq], the gate of the compressed attention; no such attention for None.
        g_slc: [B, S, Hq], the gate of the selected attention; 1 for None.
        g_swa: [B, S, Hq], the gate of the sliding attention; needed with `window_size`.
        block_indices: int32 or int64 [B, S, Hkv, n], the blocks of each query, -1 for none; chosen for None.
        block_counts: How many blocks are chosen, at least 3. With `block_indices` a tensor [B, S, Hkv] is how many
            first entries count, and an int is not read.
        block_size: Keys of a block: a power of two from 4, or with `block_indices` any multiple of 128.
        window_size: Keys of the sliding attention, the query's own included; 0 for none.
        scale: The factor of the scores; D**-0.5 for None. The sliding attention has D**-0.5 always, as in fla.
        cu_seqlens: int32 or int64 [documents + 1], for packed documents with B = 1; blocks count from the first key of
            a document. A pair is that of the queries and that of the keys, which may differ without `g_cmp`.

    Returns:
        [B, S, Hq, Dv]. A query without a block gets 0, where fla gives NaN.

    Raises:
        InvalidInput: For operands that do not fit together, and without both `block_indices` and `g_cmp`.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import parallel_nsa
        >>> q, k, v = torch.randn(1, 300, 32, 16), torch.randn(1, 300, 2, 16), torch.randn(1, 300, 2, 16)
        >>> gates = torch.rand(3, 1, 300, 32)
        >>> parallel_nsa(q, k, v, *gates, block_counts=4, block_size=16, window_size=32).shape
        torch.Size([1, 300, 32, 16])
    """
    check_operands(q, k, v, "[B, T, H, D]")
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is not None:
            arguments.tensor(name, gate, FLOATS)
            check_shape(name, gate, tuple(q.shape[:3]), "a gate of each query and head")
            if wants_gradient(q, k, v, gate):
                arguments.kept(name, gate)
    window = arguments.integer("window_size", window_size)
    if window and g_swa is None:
        raise InvalidInput(f"window_size is {window} and g_swa None; give the gate, or window_size=0")
    packed = _pair(cu_seqlens)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check_tensors(q, k, v)
    total = 0
    if g_cmp is not None:
        policy = _fla_policy(block_counts if block_indices is None else 16, block_size)
        edges = None if packed is None else _shared_edges(packed, q, k)
        keys = k, v
        if edges is not None:
            grid = TokenGrid.of(q, k, policy.block, edges)
            keys = grid.aligned(k), grid.aligned(v)
        k_c, v_c = (compressed(x, policy, None) for x in keys)
        seen = compressed_mask(policy.spans, q.shape[2], k.shape[2], q.device, edges)
        total = attention(q, k_c, v_c, seen, scale=scale) * _of_rows(g_cmp)
        if block_indices is None:
            options: dict[str, Any] = {"scale": scale, "compressed": k_c}
            lists: MaskLike = (
                mask_of(policy, q, k, **options)
                if edges is None
                else policy.lists(q, k, cu_seqlens=edges, **options)
            )
    if block_indices is not None:
        batch, queries, heads = arguments.tensor("block_indices", block_indices, INTS, 4).shape[:3]
        if batch not in (1, q.shape[0]) or queries != q.shape[2] or heads not in (1, k.shape[1], q.shape[1]):
            right = f"[{q.shape[0]}, {q.shape[2]}, {k.shape[1]}, n], the blocks of each query and head of k"
            raise InvalidInput(f"block_indices is {list(block_indices.shape)}; it must be {right}")
        counts = None
        if isinstance(block_counts, Tensor):
            arguments.tensor("block_counts", block_counts, INTS)
            check_shape("block_counts", block_counts, (batch, queries, heads), "one for each list of blocks")
            counts = block_counts.transpose(1, 2)
        else:
            arguments.integer("block_counts", block_counts)
        lists = _lists("block_size", block_size, block_indices.transpose(1, 2), k.shape[2], counts)
    elif g_cmp is None:
        raise InvalidInput(
            "block_indices and g_cmp are None; give blocks, or g_cmp, whose attention chooses them"
        )
    selected = _attention(q, k, v, packed, lists, scale)
    total = total + (selected if g_slc is None else selected * _of_rows(g_slc))
    if window:
        assert g_swa is not None
        total = total + _attention(q, k, v, packed, MaskPolicy(window=window), None) * _of_rows(g_swa)
    return total.transpose(1, 2)


def _fla_policy(count: Any, block: int) -> NSA:
    """The choice of fla: of compressed keys that are the blocks themselves."""
    if isinstance(count, Tensor):
        raise InvalidInput("block_counts is a tensor and block_indices None; pass an int, or the blocks too")
    block = arguments.power_of_two("block_size", block, 4, LONGEST)
    return NSA(arguments.integer("block_counts", count, sum(ALWAYS)), block, ALWAYS, block, block)


def _pair(cu_seqlens: Any) -> tuple[Tensor, Tensor] | None:
    """That of the queries and that of the keys."""
    if isinstance(cu_seqlens, tuple):
        if len(cu_seqlens) != 2:
            raise InvalidInput(
                f"cu_seqlens has {len(cu_seqlens)} parts; a pair is (cu_seqlens_q, cu_seqlens_k)"
            )
        return cu_seqlens
    return None if cu_seqlens is None else (cu_seqlens, cu_seqlens)


def _shared_edges(packed: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> Tensor:
    """The documents of queries and keys, which must be the same."""
    _check_packed(q, k)
    one, other = edges_of(packed[0], "cu_seqlens_q", q.shape[2]), edges_of(packed[1], "cu_seqlens_k")
    if not np.array_equal(one, other):
        raise InvalidInput(
            "cu_seqlens of queries and keys differ; a choice needs documents of as many queries as keys: call for "
            "each document, or pass the blocks of each query"
        )
    return packed[0]


def _check_packed(q: Tensor, k: Tensor) -> None:
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise InvalidInput(
            f"q has batch {q.shape[0]} and k {k.shape[0]}; with cu_seqlens documents are packed in a batch of 1"
        )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, packed: tuple[Tensor, Tensor] | None, mask: MaskLike, scale: float | None
) -> Tensor:
    """out [B, Hq, S, Dv]."""
    if packed is None:
        return attention(q, k, v, mask, scale=scale)
    _check_packed(q, k)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return attention_varlen(q, k, v, *packed, mask, scale=scale).transpose(0, 1)[None]


def _of_rows(gate: Tensor) -> Tensor:
    """A gate [B, S, H] for [B, H, S, D]."""
    return gate.transpose(1, 2)[..., None]


def _lists(
    name: str, side: Any, indices: Tensor, keys: int, counts: Tensor | None = None, causal: bool = True
) -> TokenLists:
    """TokenLists of blocks of `side` keys, the argument `name`: a power of two up to 128, or a multiple of 128. No
    document has more than `keys` keys.
    """
    side = arguments.integer(name, side, 1, INT32_MAX)
    if side % MOST and (side < LEAST or side > MOST or side & (side - 1)):
        raise InvalidInput(
            f"{name} is {side}; it must be a power of two from {LEAST} to {MOST}, or a multiple of {MOST}"
        )
    parts = min(side // MOST, -(-keys // MOST))  # parts beyond the keys have none
    if parts <= 1:
        return TokenLists(indices, min(side, MOST), counts, causal)
    one = indices.clamp(-1, INT32_MAX // parts - 1)[..., None] * parts
    split = one + torch.arange(parts, dtype=indices.dtype, device=indices.device)
    counts = None if counts is None else counts.clamp(0, indices.shape[3]) * parts
    return TokenLists(split.flatten(3), MOST, counts, causal)


# The q2k of a CSR that `build_k2q_csr` made, beside the row_ptr and its version.
_LISTS: ByTensor[tuple[Any, int, Tensor]] = ByTensor()


@refusing("build_k2q_csr")
@not_traced("the lists of queries")
@torch.no_grad()
def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    kv_block_size: int,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[Any, ...]:
    """Return for each block of keys the queries that listed it, as MSA's `build_k2q_csr`.

    `sparse_atten_func` finds q2k_indices again by these two tensors, as long as nothing writes to them. A row is a
    block of a document: first the first blocks of all documents, then the second ones. Its queries ascend. The edges
    of documents are read on the host, with one sync for a new tensor on a GPU.

    Args:
        q2k_indices: int32 [Hkv, total_q, n]: the blocks of each query, -1 for none, counted in its document.
        cu_seqlens_q: int32 [documents + 1]: 0, then the end of each document.
        cu_seqlens_k: The same for the keys.
        kv_block_size: Keys of a block.
        total_k: Not read.
        max_seqlen_k: Not read.
        max_seqlen_q: Not read.
        total_rows: Not read: there are as many rows as blocks.
        qhead_per_kv: Not read.
        return_schedule: Whether to return None as a third result, which stands for MSA's schedule.

    Returns:
        (row_ptr, q_indices): int32 [Hkv, rows + 1] and [Hkv, total_q * n], queries counted in their document and -1
        at the end. Blocks that a document does not have are left out.

    Raises:
        InvalidInput: For tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import build_k2q_csr
        >>> ends = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 256], dtype=torch.int32)
        >>> build_k2q_csr(torch.tensor([[[0, 1], [1, -1]]], dtype=torch.int32), *ends, 128, total_k=256)
        (tensor([[0, 1, 3]], dtype=torch.int32), tensor([[ 0,  0,  1, -1]], dtype=torch.int32))
    """
    q2k = values_of(arguments.tensor("q2k_indices", q2k_indices, INTS, 3), "q2k_indices")
    _, queries, topk = q2k.shape
    block = arguments.integer("kv_block_size", kv_block_size, 1, INT32_MAX)
    rows = BlockRows(cu_seqlens_q, cu_seqlens_k, block, queries)
    arguments.flag("return_schedule", return_schedule)
    row_ptr, q_indices = rows.reversed(q2k)
    kept = weakref.ref(row_ptr), row_ptr._version, q2k.clone()
    _LISTS.get(q_indices, rows.key(topk), lambda: kept)
    return (row_ptr, q_indices, None) if return_schedule else (row_ptr, q_indices)


@refusing("sparse_atten_func", **REFUSED_MSA)
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: Any = None,
    usable_SM_count: int = -1,
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
) -> Any:
    """Return attention of packed documents over the blocks that each query listed, as MSA's `sparse_atten_func`.

    The lists are those that `build_k2q_csr` got, or the inverse of another CSR of its form. With gradients for q, k
    and v, and any dtypes, head dims and groups of `sparsek.attention`.

    Args:
        q: [total_q, Hq, D].
        k: [total_k, Hkv, D].
        v: [total_k, Hkv, Dv].
        k2q_row_ptr: int32 [Hkv, rows + 1].
        k2q_q_indices: int32 [Hkv, n].
        topK: The most blocks of a query.
        cu_seqlens_q: int32 [documents + 1]: 0, then the end of each document.
        cu_seqlens_k: The same for k and v. The last query of a document stands at its last key.
        max_seqlen_q: Not read.
        max_seqlen_k: Not read.
        blk_kv: Keys of a block.
        causal: Whether a query sees no key after its own.
        softmax_scale: The factor of the scores; D**-0.5 for None.
        lse_temperature_scale: Not read.
        return_temperature_lse: Must be False.
        partial_dtype: Not read: sums are in float32.
        return_softmax_lse: Whether to return the lse too, float32 [total_q, Hq].
        page_table: Must be None: `sparsek.attention_paged` reads pages.
        seqused_k: Must be None.
        schedule: Not read.
        usable_SM_count: Not read.
        qk_dtype: Must be None.
        pv_dtype: Must be None.

    Returns:
        out [total_q, Hq, Dv] in the dtype of q, or (out, lse).

    Raises:
        InvalidInput: For options that SparseK does not have, and for tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import build_k2q_csr, sparse_atten_func
        >>> q, k, v = torch.randn(300, 16, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> ends = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> csr = build_k2q_csr(torch.zeros(2, 300, 4, dtype=torch.int32), ends, ends, 128, total_k=300)
        >>> sparse_atten_func(q, k, v, *csr, 4, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True).shape
        torch.Size([300, 16, 64])
    """
    check_operands(q, k, v, "[total, H, D]")
    topk = arguments.integer("topK", topK)
    row_ptr, q_indices = (
        values_of(arguments.tensor(name, x, INTS, 2), name)
        for name, x in (("k2q_row_ptr", k2q_row_ptr), ("k2q_q_indices", k2q_q_indices))
    )
    rows = BlockRows(
        cu_seqlens_q, cu_seqlens_k, arguments.integer("blk_kv", blk_kv, 1, INT32_MAX), q.shape[0]
    )
    for name, x in (("k2q_row_ptr", row_ptr), ("k2q_q_indices", q_indices)):
        arguments.one_device("q is", q.device, name, x.device)
        if x.shape[0] != k.shape[1]:
            raise InvalidInput(
                f"{name} is {list(x.shape)}; it must be [{k.shape[1]}, ..], a row of each head of k"
            )
    if row_ptr.shape[1] <= rows.count:
        raise InvalidInput(
            f"k2q_row_ptr is {list(row_ptr.shape)}; {rows.count} blocks of {blk_kv} keys need {rows.count + 1} or more"
        )
    kept = None if q_indices.is_inference() else _LISTS.find(q_indices, rows.key(topk))
    if kept is not None and kept[0]() is row_ptr and kept[1] == row_ptr._version:
        lists = kept[2]
    else:
        with torch.no_grad():
            lists = rows.lists(row_ptr, q_indices, topk)
    made = _lists("blk_kv", blk_kv, lists[None], k.shape[0], causal=arguments.flag("causal", causal))
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, made, scale=softmax_scale, return_lse=True
    )
    return (out, lse.transpose(0, 1)) if arguments.flag("return_softmax_lse", return_softmax_lse) else out


@refusing("sparse_attention")
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, q2k: Tensor, msa: Any, *, return_lse: bool = False
) -> Any:
    """Return causal attention of packed documents over blocks of 128 keys, as NeMo AutoModel's for MiniMax-M3.

    With gradients for q, k and v, the same bits each time, and any dtypes, head dims and groups of `sparsek.attention`.

    Args:
        q: [tokens, Hq, D].
        k: [tokens, Hkv, D].
        v: [tokens, Hkv, Dv].
        q2k: int32 [Hkv, tokens, n]: the blocks of each query, -1 for none, counted from its document's first token.
        msa: NeMo's microbatch, whose `cu_seqlens` is read; or cu_seqlens, int32 [documents + 1].
        return_lse: Whether to return the lse too, float32 [Hq, tokens].

    Returns:
        out [tokens, Hq, Dv], or (out, lse).

    Raises:
        InvalidInput: For tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import sparse_attention
        >>> q, k, v = torch.randn(300, 16, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> q2k = torch.zeros(2, 300, 4, dtype=torch.int32)
        >>> sparse_attention(q, k, v, q2k, torch.tensor([0, 100, 300], dtype=torch.int32)).shape
        torch.Size([300, 16, 64])
    """
    check_operands(q, k, v, "[total, H, D]")
    ends = msa if isinstance(msa, Tensor) else getattr(msa, "cu_seqlens", None)
    if not isinstance(ends, Tensor):
        raise InvalidInput(f"msa is {arguments.shown(msa)}; it must have cu_seqlens, a tensor, or be one")
    lists = TokenLists(arguments.tensor("q2k", q2k, INTS, 3)[None], M3_BLOCK)
    out, lse = attention_varlen(q, k, v, ends, mask=lists, return_lse=True)
    return (out, lse) if arguments.flag("return_lse", return_lse) else out


@refusing("infllmv2_attn_varlen_func", **REFUSED_INFLLM)
def infllmv2_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    topk_idx: Tensor | None = None,
    block_window_size: int = 0,
) -> Any:
    """Return attention of packed documents over listed blocks of 64 keys, as InfLLM-v2's call of this name.

    Args:
        q: [total_q, Hq, D].
        k: [total_k, Hkv, D].
        v: [total_k, Hkv, Dv].
        cu_seqlens_q: int32 [documents + 1]: 0, then the end of each document.
        cu_seqlens_k: The same for k and v. The last query of a document stands at its last key.
        max_seqlen_q: Not read.
        max_seqlen_k: Not read.
        dropout_p: Must be 0.
        softmax_scale: The factor of the scores; D**-0.5 for None.
        causal: Whether a query sees no key after its own.
        window_size: (left, right) keys around a query's position, -1 for no bound; (-1, -1) with `topk_idx`.
        softcap: Scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: Must be None.
        deterministic: As in `sparsek.attention`.
        return_attn_probs: Whether to return (out, lse, None), where the original has the weights.
        block_table: Must be None: `sparsek.attention_paged` reads pages.
        topk_idx: int32 [Hkv, total_q, n]: the blocks of each query, -1 for none, counted in its document; all keys for
            None.
        block_window_size: Must be 0.

    Returns:
        out [total_q, Hq, Dv], or (out, lse, None), lse float32 [Hq, total_q]. With gradients for q, k and v.

    Raises:
        InvalidInput: For options that SparseK does not have, and for tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import infllmv2_attn_varlen_func
        >>> q, k, v = torch.randn(300, 16, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> ends, blocks = torch.tensor([0, 100, 300], dtype=torch.int32), torch.zeros(2, 300, 4, dtype=torch.int32)
        >>> infllmv2_attn_varlen_func(q, k, v, ends, ends, 200, 200, causal=True, topk_idx=blocks).shape
        torch.Size([300, 16, 64])
    """
    check_operands(q, k, v, "[total, H, D]")
    arguments.flag("causal", causal)
    settings: dict[str, Any] = {
        "softcap": softcap, "deterministic": deterministic, "return_lse": True
    }  # fmt: skip
    arguments.tensor("cu_seqlens_k", cu_seqlens_k, INTS, 1)
    if topk_idx is None:
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, **settings,
        )  # fmt: skip
    else:
        if window_bounds(window_size, causal) != window_bounds((None, None), causal):
            raise InvalidInput(
                f"window_size is {arguments.shown(window_size)} beside topk_idx; it must be (-1, -1): for a window "
                "beside the blocks, call sparsek.attention_varlen with TokenLists(..., window=)"
            )
        indices = arguments.tensor("topk_idx", topk_idx, INTS, 3)[None]
        lists = TokenLists(indices, INFLLM_BLOCK, causal=causal)
        out, lse = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, lists, scale=softmax_scale, **settings
        )
    return (out, lse, None) if arguments.flag("return_attn_probs", return_attn_probs) else out


@refusing("flash_moba_varlen_func")
def flash_moba_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    moba_chunk_size: int,
    moba_topk: int,
    causal: bool = True,
) -> Tensor:
    """Return MoBA of packed documents, as FlashMoBA's call of this name: each head of q chooses its chunks of keys.

    A query keeps its own chunk and those before it whose mean key has the largest products with it, `moba_topk` in
    all. Gradients go through q, k and v, and not through the choice. Means are in float32. Heads of q that share a head
    of k choose for themselves, so k and v are copied for each.

    Args:
        q: [total, Hq, D].
        k: [total, Hkv, D].
        v: [total, Hkv, Dv].
        cu_seqlens_q: int32 [documents + 1]: 0, then the end of each document.
        cu_seqlens_k: The same values.
        max_seqlen_q: Not read.
        max_seqlen_k: Not read.
        moba_chunk_size: Keys of a chunk, a power of two from 4.
        moba_topk: Chunks that each query keeps, its own among them.
        causal: Must be True.

    Returns:
        [total, Hq, Dv].

    Raises:
        InvalidInput: For documents of more keys than queries, causal=False, and tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.selected import flash_moba_varlen_func
        >>> q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> ends = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> flash_moba_varlen_func(q, k, v, ends, ends, 200, 200, 64, 2).shape
        torch.Size([300, 4, 64])
    """
    check_operands(q, k, v, "[total, H, D]")
    if not arguments.flag("causal", causal):
        raise InvalidInput(
            "flash_moba_varlen_func has no causal=False; choose chunks by their products with the means of k, and call "
            "sparsek.attention_varlen with TokenLists(..., causal=False)"
        )
    block = arguments.power_of_two("moba_chunk_size", moba_chunk_size, 4, LONGEST)
    policy = MoBAGate(arguments.integer("moba_topk", moba_topk, 1), block)
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InvalidInput(f"q has {q.shape[1]} heads and k {k.shape[1]}; q needs a multiple")
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    by_head = [x.transpose(0, 1)[None] for x in (q, k)]
    ends = _shared_edges((cu_seqlens_q, cu_seqlens_k), by_head[0], by_head[1])
    return attention_varlen(q, k, v, ends, mask=policy)
