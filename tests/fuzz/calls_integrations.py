"""The calls that stand in for other libraries', with valid arguments for the fuzz. See `engine.Call`."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from sparsek.integrations import block_sparse_attention as bsa
from sparsek.integrations import fastvideo, flash_attention, flashinfer, selected
from sparsek.integrations.flex import flex_attention
from sparsek.integrations.vllm import configured
from sparsek.integrations.vllm_omni import sparse_attention
from sparsek.integrations.xformers import memory_efficient_attention
from tests.fuzz.engine import Call, Made
from tests.integrations.xformers_biases import stand_ins


@lru_cache
def dense(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(*shape: int) -> dict[str, Tensor]:
    return {name: dense(*shape, seed=at) for at, name in enumerate("qkv")}


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Their sums are exact, whatever the order.
WHOLE = {name: x.round() for name, x in operands(1, 2, 128, 16).items()}
ENDS, TYPES, INFO = ints([0, 200]), ints([0, 1]), ints([1, 1, 1, 1])
SIZES, MAP = ints([64, 5]), torch.tensor([[True, False], [True, True]])[None, None]
COUNTS, INDICES = ints([[[1, 2]]]), ints([[[[1, 0], [0, 1]]]])
PACKED: dict[str, Any] = {
    **operands(200, 2, 16), "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q_": 200, "max_seqlen_k_": 200,
}  # fmt: skip
CHOSEN = torch.tensor([[[0, -1]] * 150 + [[1, 0]] * 50] * 2, dtype=torch.int32)  # blocks of 64 of each query
CSR = dict(
    zip(("k2q_row_ptr", "k2q_q_indices"), selected.build_k2q_csr(CHOSEN, ENDS, ENDS, 64), strict=False)
)
LISTS = flash_attention.BlockSparseTensorsTorch(COUNTS, INDICES, block_size=(64, 64))
SETTING: dict[str, Any] = {
    "num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 16, "causal": False, "pos_encoding_mode": "NONE",
    "sm_scale": 0.2, "logits_soft_cap": 0.0, "q_data_type": "float32",
}  # fmt: skip
ROWS = {"indptr": ints([0, 1, 3]), "indices": ints([0, 0, 1]), "M": 128, "N": 128, "R": 64, "C": 64}
SEVERAL = {
    "block_mask_map": MAP[0].repeat(2, 1, 1), "block_row_sz": ints([[60, 40]] * 2), "block_col_sz": ints([[9, 91]] * 2),
}  # fmt: skip


def _rows(random: Random) -> Made:
    return flashinfer.BlockSparseAttentionWrapper(torch.empty(0)).plan, {**ROWS, **SETTING, "mask": None}


def _several(random: Random) -> Made:
    return flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0)).plan, {**SEVERAL, **SETTING}


def _run_rows(random: Random) -> Made:
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(**ROWS, **SETTING, o_data_type="float32")
    return wrapper.run, {**operands(128, 2, 16), "scale_q": None, "out": None, "return_lse": True}


def _run_several(random: Random) -> Made:
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(**SEVERAL, **SETTING)
    return wrapper.run, {**operands(2, 100, 16), "out": None, "return_lse": True}


XFORMERS = stand_ins()
QUERIES = XFORMERS._SeqLenInfo(ints([0, 60, 100]), 60, 40, [0, 60, 100])


def gappy_attention(seqstart_py: Any, seqlen_py: Any, window_left: Any, window_right: Any) -> Tensor:
    """A call whose bias has these fields."""
    info = XFORMERS._GappySeqInfo(ints([0, 0, 0]), 60, 30, seqstart_py, ints([0, 0]), seqlen_py)
    bias = XFORMERS.BlockDiagonalLocalAttentionPaddedKeysMask(QUERIES, info, window_left, window_right)
    return memory_efficient_attention(*operands(1, 100, 2, 16).values(), attn_bias=bias)


def paged_attention(
    block_tables: Any, page_size: Any, seqstart: Any, seqstart_py: Any, seqlen: Any, seqlen_py: Any
) -> Tensor:
    """A call whose keys begin inside pages."""
    info = XFORMERS._GappySeqInfo(seqstart, 40, 30, seqstart_py, seqlen, seqlen_py)
    bias = XFORMERS.PagedBlockDiagonalCausalWithOffsetGappyKeysMask(QUERIES, info, block_tables, page_size)
    q, k, v = (dense(1, n, 2, 16, seed=n) for n in (100, 128, 128))
    return memory_efficient_attention(q, k, v, bias)


def function(called: Any, **arguments: Any) -> Any:
    """The same call each time."""
    return lambda random: (called, dict(arguments))


NAMES = {
    "q_data_type": "dtype text",
    "logits_soft_cap": "none int",
    "sm_scale": "none int",
    "pos_encoding_mode": "none",
}
CALLS: dict[str, Call] = {
    "block_sparse_attn_func": Call(
        function(
            bsa.block_sparse_attn_func, **PACKED, head_mask_type=TYPES, streaming_info=INFO,
            base_blockmask=MAP, p_dropout=0.0, is_causal=True, return_attn_probs=True,
        ),
        {"streaming_info": "none", "p_dropout": "none bool int"},
    ),
    "token_streaming_attn_func": Call(
        function(bsa.token_streaming_attn_func, **PACKED, head_mask_type=ints([0, -1]), streaming_info=INFO)
    ),
    "block_streaming_attn_func": Call(
        function(
            bsa.block_streaming_attn_func, **PACKED, head_mask_type=ints([0, -1]), streaming_info=INFO,
            p_dropout=0.0,
        ),
        {"p_dropout": "none bool int"},
    ),
    "video_sparse_attn": Call(
        function(
            fastvideo.video_sparse_attn, **WHOLE, variable_block_sizes=SIZES,
            q_variable_block_sizes=SIZES, topk=1, block_size=(4, 4, 4), compress_attn_weight=dense(1, 2, 128, 1),
        ),
        {
            "block_size": "int sequence", "compress_attn_weight": "none", "variable_block_sizes": "none",
            "q_variable_block_sizes": "none",
        },
    ),
    "block_sparse_attn": Call(
        function(
            fastvideo.block_sparse_attn, **operands(1, 2, 128, 16), block_map=MAP, variable_block_sizes=SIZES
        ),
        {"variable_block_sizes": "none"},
    ),
    "block_sparse_attn_from_indices": Call(
        function(
            fastvideo.block_sparse_attn_from_indices, **operands(1, 1, 128, 16), q2k_idx=INDICES,
            q2k_num=COUNTS, variable_block_sizes=SIZES,
        )
    ),
    "sliding_tile_attention": Call(
        function(
            fastvideo.sliding_tile_attention, **operands(1, 1, 390, 16), window_size=[(1, 1, 1)],
            text_length=4, has_text=True, seq_shape="6x8x8",
        )
    ),
    "flash_attn_func": Call(
        function(
            flash_attention.flash_attn_func, **operands(1, 128, 2, 16), softmax_scale=0.2, causal=True,
            softcap=0.0, block_sparse_tensors=LISTS, return_lse=True,
        ),
        {"softmax_scale": "none int", "softcap": "none int", "block_sparse_tensors": "none"},
    ),
    "flash_attn_varlen_func": Call(
        function(
            flash_attention.flash_attn_varlen_func, **operands(200, 2, 16), cu_seqlens_q=ENDS, cu_seqlens_k=ENDS,
            softmax_scale=0.2, causal=True, softcap=0.0, return_lse=True,
        ),
        {"softmax_scale": "none int", "softcap": "none int", "window_size": "any"},
    ),
    "parallel_nsa": Call(
        function(
            selected.parallel_nsa, **operands(1, 200, 2, 16), g_cmp=dense(1, 200, 2), g_slc=dense(1, 200, 2),
            g_swa=dense(1, 200, 2), block_counts=3, block_size=16, window_size=9, scale=0.2, cu_seqlens=ENDS,
        ),
        {"g_cmp": "none", "g_slc": "none", "g_swa": "none", "scale": "none int", "cu_seqlens": "none"},
    ),
    "parallel_nsa, listed": Call(
        function(
            selected.parallel_nsa, **operands(1, 200, 2, 16), block_indices=CHOSEN.transpose(0, 1)[None],
            block_counts=ints([[[1, 2]] * 200]), block_size=64,
        ),
        {"block_counts": "int"},
    ),
    "build_k2q_csr": Call(
        function(
            selected.build_k2q_csr, q2k_indices=CHOSEN, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, kv_block_size=64,
            return_schedule=True,
        ),
    ),
    "sparse_atten_func": Call(
        function(
            selected.sparse_atten_func, **operands(200, 2, 16), **CSR, topK=2, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS,
            blk_kv=64, causal=True, softmax_scale=0.2, return_softmax_lse=True,
        ),
        {"softmax_scale": "none int"},
    ),
    "selected.sparse_attention": Call(
        function(selected.sparse_attention, **operands(200, 2, 16), q2k=CHOSEN, msa=ENDS, return_lse=True)
    ),
    "infllmv2_attn_varlen_func": Call(
        function(
            selected.infllmv2_attn_varlen_func, **operands(200, 2, 16), cu_seqlens_q=ENDS, cu_seqlens_k=ENDS,
            dropout_p=0.0, softmax_scale=0.2, causal=True, softcap=0.0, deterministic=True, return_attn_probs=True,
            topk_idx=CHOSEN,
        ),
        {"dropout_p": "none int", "softmax_scale": "none int", "softcap": "int", "topk_idx": "none"},
    ),
    "flash_moba_varlen_func": Call(
        function(
            selected.flash_moba_varlen_func, **operands(200, 2, 16), cu_seqlens_q=ENDS, cu_seqlens_k=ENDS,
            max_seqlen_q=200, max_seqlen_k=200, moba_chunk_size=16, moba_topk=2, causal=True,
        ),
        {"max_seqlen_q": "any", "max_seqlen_k": "any"},
    ),
    "memory_efficient_attention": Call(
        function(
            memory_efficient_attention, query=dense(1, 100, 2, 16), key=dense(1, 100, 2, 16, seed=1),
            value=dense(1, 100, 2, 16, seed=2), attn_bias=XFORMERS.BlockDiagonalCausalMask(QUERIES, QUERIES), p=0.0,
            scale=0.2, op=None, output_dtype=None,
        ),
        {"attn_bias": "none", "p": "none int", "scale": "none int", "op": "any", "output_dtype": "dtype"},
    ),
    "memory_efficient_attention, gappy": Call(
        function(gappy_attention, seqstart_py=[3, 70, 100], seqlen_py=[60, 30], window_left=70, window_right=5),
        {"seqstart_py": "array", "seqlen_py": "array"},
    ),
    "memory_efficient_attention, paged": Call(
        function(
            paged_attention, block_tables=ints([[1, 0], [3, 2]]), page_size=32, seqstart=ints([5, 16, -1]),
            seqstart_py=[5, 16, -1], seqlen=ints([45, 50]), seqlen_py=[45, 50],
        ),
        {"seqstart_py": "array", "seqlen_py": "array"},
    ),
    "flex_attention": Call(
        function(
            flex_attention, query=dense(1, 2, 100, 16), key=dense(1, 2, 100, 16, seed=1),
            value=dense(1, 2, 100, 16, seed=2), score_mod=None, scale=0.2, enable_gqa=False, return_lse=True,
        ),
        {"scale": "none int"},
    ),
    "sparse_attention": Call(
        function(
            sparse_attention, **operands(1, 128, 2, 16), params={"policy": "MeanTopK", "options": {"topk": 1}},
            is_causal=False, softmax_scale=0.2,
        ),
        {"softmax_scale": "none int"},
    ),
    "configured": Call(
        function(configured, additional={"sparsek": {"policy": "MeanTopK", "options": {"topk": 1}}}),
        {"additional": "none"},
    ),
    "BlockSparseAttentionWrapper.plan": Call(_rows, NAMES),
    "BlockSparseAttentionWrapper.run": Call(_run_rows),
    "VariableBlockSparseAttentionWrapper.plan": Call(_several, NAMES),
    "VariableBlockSparseAttentionWrapper.run": Call(_run_several),
}  # fmt: skip
