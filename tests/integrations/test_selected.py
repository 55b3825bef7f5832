"""Calls of libraries with selected-block attention against those libraries' meaning in plain torch, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.integrations import selected
from sparsek.integrations.selected import (
    build_k2q_csr,
    flash_moba_varlen_func,
    infllmv2_attn_varlen_func,
    parallel_nsa,
    sparse_atten_func,
    sparse_attention,
)
from tests.integrations.dense import dense, operands, randn, same, same_gradients
from tests.refusals import refused

ENDS = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
FEWER = torch.tensor([0, 9, 9, 81], dtype=torch.int32)  # queries, of keys to ENDS
WHOLE = torch.tensor([0, 200])


def lists(heads: int, queries: int, n: int, blocks: int, seed: int = 0) -> Tensor:
    """int32 [heads, queries, n]: distinct blocks, and -1 for some."""
    random = torch.Generator().manual_seed(seed)
    order = torch.rand((heads, queries, max(n, blocks)), generator=random).argsort(-1)[..., :n]
    return order.masked_fill(order >= blocks, -1).int()


def spans(ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def admitted(blocks: Tensor, side: int, ends_q: Tensor, ends_k: Tensor, causal: bool = True) -> Tensor:
    """What queries with these blocks [H, S, n] of their documents see, bool [1, H, S, T]."""
    seen = torch.zeros((*blocks.shape[:2], int(ends_k[-1])), dtype=torch.bool)
    for (q, q_end), (k, k_end) in zip(spans(ends_q), spans(ends_k), strict=True):
        key, own = torch.arange(k_end - k), torch.arange(q_end - q)[:, None] + (k_end - k) - (q_end - q)
        there = (key[:, None] // side == blocks[:, q:q_end, None]).any(-1)
        seen[:, q:q_end, k:k_end] = there & (key <= own) if causal else there
    return seen[None]


def right(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out [S, Hq, Dv] and lse [Hq, S] of packed documents; `seen` has a mask for each head of k, or of q."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if seen.shape[1] == k.shape[1]:
        seen = seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    out, lse = dense(q, k, v, seen, scale)
    return out[0].transpose(0, 1), lse[0]


def packed(queries: int = 200, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return operands((queries, heads, 16), (200, 2, 16), (200, 2, 8))


def means(x: Tensor, side: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole blocks of packed documents [T, H, D]: the means, the document and the last key of each."""
    found = [
        (x[at : at + side].mean(0), document, at + side - 1)
        for document, (start, end) in enumerate(spans(ends))
        for at in range(start, end - side + 1, side)
    ]
    made, documents, last = zip(*found, strict=True)
    return torch.stack(made), torch.tensor(documents), torch.tensor(last)


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    blocks: Tensor | int,
    side: int,
    window: int,
    scale: float,
    ends: Tensor,
) -> Tensor:
    """fla's meaning, of packed documents [S, H, D] with gates [3, S, Hq] and blocks [Hkv, S, n] or their number."""
    total, heads = q.shape[0], k.shape[1]
    document = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    place = torch.arange(total)
    (k_c, of, last), (v_c, _, _) = (means(x, side, ends) for x in (k, v))
    before = (of == document[:, None]) & (last <= place[:, None])
    compressed, _ = right(q, k_c, v_c, before[None, None].expand(1, heads, -1, -1), scale)
    if isinstance(blocks, int):
        keys = k_c.repeat_interleave(q.shape[1] // heads, 1)
        scores = torch.einsum("shd,chd->hsc", q, keys).mul(scale).masked_fill(~before, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0).unflatten(0, (heads, -1)).sum(1)
        start = ends[:-1].long()[document]
        own, column = (place - start) // side, torch.arange(-(-total // side))
        table = torch.zeros(heads, total, len(column), dtype=weights.dtype)
        level = (last - side + 1 - ends[:-1].long()[of]) // side
        for at, (doc, block) in enumerate(zip(of.tolist(), level.tolist(), strict=True)):
            table[:, document == doc, block] = weights[:, document == doc, at]
        held = (column == 0) | (column == own[:, None]) | (column == own[:, None] - 1)
        table = table.masked_fill(column > own[:, None], -1).masked_fill(held, 99)
        best = table.topk(blocks, -1)
        blocks = best.indices.masked_fill(best.values < 0, -1)
    out = g[0, ..., None] * compressed
    out = out + g[1, ..., None] * right(q, k, v, admitted(blocks, side, ends, ends), scale)[0]
    if window:
        near = (document == document[:, None]) & (place <= place[:, None]) & (place > place[:, None] - window)
        out = out + g[2, ..., None] * right(q, k, v, near[None, None].expand(1, heads, -1, -1))[0]
    return out


@pytest.mark.parametrize("ends", [None, ENDS], ids=["whole", "packed"])
@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "listed"])
def test_fla(ends: Tensor | None, chosen: bool) -> None:
    q, k, v = leaves = packed(heads=8)
    g = randn(3, 200, 8, seed=5).sigmoid().requires_grad_()
    listed = lists(2, 200, 3, 13)
    given: dict[str, Any] = {"block_counts": 4} if chosen else {"block_indices": listed.transpose(0, 1)[None]}
    gates: dict[str, Any] = dict(zip(("g_cmp", "g_slc", "g_swa"), g[:, None], strict=True))
    out = parallel_nsa(
        q[None], k[None], v[None], **gates, **given, block_size=16, window_size=30, scale=0.4, cu_seqlens=ends
    )
    wanted = nsa(q, k, v, g, 4 if chosen else listed, 16, 30, 0.4, WHOLE if ends is None else ends)
    same(out[0], wanted)
    same_gradients(out[0], wanted, [*leaves, g])


def test_fla_without_gates() -> None:
    """With counts of each query, blocks of 256, and keys before the first query."""
    q, k, v = leaves = operands((2, 100, 4, 16), (2, 600, 2, 16))
    counts = torch.randint(0, 4, (2, 100, 2), generator=torch.Generator().manual_seed(1))
    blocks = torch.stack([lists(2, 100, 3, 3, seed=at) for at in range(2)]).transpose(1, 2)
    out = parallel_nsa(q, k, v, block_indices=blocks, block_counts=counts, block_size=256)
    kept = blocks.masked_fill(torch.arange(3) >= counts[..., None], -1)
    ends_q, ends_k = torch.tensor([0, 100, 200]), torch.tensor([0, 600, 1200])
    seen = admitted(kept.flatten(0, 1).transpose(0, 1), 256, ends_q, ends_k)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    wanted = right(flat_q, flat_k, flat_v, seen)[0].unflatten(0, (2, 100))
    same(out, wanted)
    same_gradients(out, wanted, leaves)
    flat: dict[str, Any] = {"block_indices": kept.flatten(0, 1)[None], "block_size": 256}
    found = parallel_nsa(flat_q[None], flat_k[None], flat_v[None], **flat, cu_seqlens=(ends_q, ends_k))
    same(found[0], wanted.flatten(0, 1))


def test_what_fla_refuses() -> None:
    q, k, v = (x[None] for x in packed())
    gate = torch.ones(1, 200, 4, dtype=q.dtype)
    refused("block_indices and g_cmp are None", parallel_nsa, q, k, v)
    refused("window_size is 9 and g_swa None", parallel_nsa, q, k, v, gate, window_size=9)
    refused("g_slc is .* a gate of each query and head", parallel_nsa, q, k, v, g_slc=gate[..., :2])
    refused("block_counts is 2; .*3", parallel_nsa, q, k, v, gate, block_counts=2)
    counts = torch.ones(1, 200, 2, dtype=torch.int32)
    refused(
        "block_counts is a tensor and block_indices None", parallel_nsa, q, k, v, gate, block_counts=counts
    )
    ends = ENDS, torch.tensor([0, 60, 70, 200])
    refused("cu_seqlens of queries and keys differ", parallel_nsa, q, k, v, gate, cu_seqlens=ends)
    refused("no head_first, got True.*transpose", parallel_nsa, q, k, v, gate, head_first=True)
    blocks = torch.zeros(1, 200, 2, 3, dtype=torch.int32)
    sides = "block_size is 192; .* power of two from 4 to 128, or a multiple of 128"
    refused(sides, parallel_nsa, q, k, v, block_indices=blocks, block_size=192)
    layout = r"block_indices is \[1, 2, 200, 3\]; it must be \[1, 200, 2, n\]"
    refused(layout, parallel_nsa, q, k, v, block_indices=blocks.transpose(1, 2))
    layout = r"block_counts is \[1, 2, 200\]; it must be \[1, 200, 2\]"
    refused(layout, parallel_nsa, q, k, v, block_indices=blocks, block_counts=counts.mT)


def test_blocks_may_be_longer_than_the_keys() -> None:
    q, k, v = (x[None] for x in packed())
    blocks = torch.tensor([0, 1]).expand(1, 200, 2, 2)
    out = parallel_nsa(q, k, v, block_indices=blocks, block_size=1 << 30)
    same(out, parallel_nsa(q, k, v, block_indices=blocks, block_size=128))


def test_fla_in_a_compiled_graph_of_no_batch_items_and_with_the_last_argument_of_before() -> None:
    q, k, v = (x.detach()[None] for x in packed())
    gate = torch.ones(1, 200, 4, dtype=q.dtype)
    options: Any = {"block_counts": 3, "block_size": 16}

    def chosen(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return parallel_nsa(q, k, v, gate, head_first=False, **options)  # type: ignore[call-arg]

    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, gate), parallel_nsa(q, k, v, gate, **options))
    assert chosen(q[:0], k[:0], v[:0], gate[:0]).shape == (0, 200, 4, 8)
    blocks = torch.zeros(0, 200, 2, 3, dtype=torch.int32)
    assert parallel_nsa(q[:0], k[:0], v[:0], block_indices=blocks).shape == (0, 200, 4, 8)


def rows_of(q2k: Tensor, side: int, ends_q: Tensor, ends_k: Tensor) -> tuple[Tensor, Tensor]:
    """MSA's CSR by its definition, without blocks that a document lacks."""
    documents = list(zip(spans(ends_q), spans(ends_k), strict=True))
    levels = max(-(-(end - start) // side) for start, end in spans(ends_k))
    starts, queries = [[0] for _ in q2k], [[] for _ in q2k]
    for level in range(levels):
        for (q, q_end), (k, k_end) in documents:
            if level * side < k_end - k:
                for head, blocks in enumerate(q2k[:, q:q_end]):
                    queries[head] += (blocks == level).nonzero()[:, 0].tolist()
                    starts[head].append(len(queries[head]))
    room = q2k.shape[1] * q2k.shape[2]
    return torch.tensor(starts), torch.tensor([each + [-1] * (room - len(each)) for each in queries])


@pytest.mark.parametrize(("ends_q", "causal"), [(ENDS, True), (FEWER, True), (FEWER, False)])
def test_msa(ends_q: Tensor, causal: bool) -> None:
    total = int(ends_q[-1])
    q, k, v = leaves = packed(total)
    q2k = lists(2, total, 4, 6)  # among them blocks that a document lacks
    lengths: dict[str, Any] = {
        "cu_seqlens_q": ends_q,
        "cu_seqlens_k": ENDS,
        "max_seqlen_q": 130,
        "max_seqlen_k": 130,
    }
    sizes: dict[str, Any] = {"total_k": 200, "max_seqlen_k": 130, "max_seqlen_q": 130, "qhead_per_kv": 2}
    csr: Any = build_k2q_csr(q2k, ends_q, ENDS, 32, **sizes)
    for found, wanted in zip(csr, rows_of(q2k, 32, ends_q, ENDS), strict=True):
        assert torch.equal(found, wanted.int())
    wide = build_k2q_csr(q2k, ends_q, ENDS, 32, **sizes, return_schedule=True)
    assert wide[2] is None
    more = torch.cat((wide[0], wide[0][:, -1:].expand(2, 9)), 1), wide[1]  # room for more rows
    options: dict[str, Any] = {**lengths, "blk_kv": 32, "causal": causal, "softmax_scale": 0.3}
    out, lse = sparse_atten_func(
        q, k, v, csr[0], csr[1], 4, **options, return_softmax_lse=True, schedule=wide[2]
    )
    wanted, sums = right(q, k, v, admitted(q2k, 32, ends_q, ENDS, causal), 0.3)
    same(out, wanted)
    same(lse, sums.T)
    same_gradients(out, wanted, leaves)
    for row_ptr, q_indices in ([x.clone() for x in csr], more, [csr[0].clone(), csr[1]]):
        same(sparse_atten_func(q, k, v, row_ptr, q_indices, 4, **options), wanted)


def test_a_changed_csr_counts() -> None:
    """The lists of a CSR are found again only as long as nothing writes to either of its tensors."""
    q, k, v = packed()
    q2k = lists(2, 200, 4, 5)
    options: dict[str, Any] = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "blk_kv": 32}
    with torch.inference_mode():
        row_ptr, q_indices = build_k2q_csr(q2k, ENDS, ENDS, 32)
    before = sparse_atten_func(q, k, v, row_ptr, q_indices, 4, **options)
    q2k.fill_(-1)
    same(sparse_atten_func(q, k, v, row_ptr, q_indices, 4, **options), before)
    q_indices.fill_(-1)
    assert not sparse_atten_func(q, k, v, row_ptr, q_indices, 4, **options).any()
    row_ptr, q_indices = build_k2q_csr(lists(2, 200, 4, 5), ENDS, ENDS, 32)
    row_ptr.zero_()
    assert not sparse_atten_func(q, k, v, row_ptr, q_indices, 4, **options).any()


def test_what_msa_refuses() -> None:
    q, k, v = packed()
    csr: Any = build_k2q_csr(lists(2, 200, 4, 5), ENDS, ENDS, 32)
    options: dict[str, Any] = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "blk_kv": 32}
    for name, cure in (
        ("page_table", "attention_paged"),
        ("seqused_k", "attention_paged"),
        ("qk_dtype", "cast q"),
    ):
        refused(
            f"no {name}.*{cure}", sparse_atten_func, q, k, v, *csr, 4, **options, **{name: torch.zeros(1)}
        )
    refused(
        "return_temperature_lse", sparse_atten_func, q, k, v, *csr, 4, **options, return_temperature_lse=True
    )
    refused("need 15 or more", sparse_atten_func, q, k, v, *csr, 4, **options | {"blk_kv": 16})
    beyond = "queries after its 5 blocks of 64 keys.*build_k2q_csr"
    refused(beyond, sparse_atten_func, q, k, v, *csr, 4, **options | {"blk_kv": 64})
    with pytest.raises(ImportError, match="attention_paged"):
        from sparsek.integrations.selected import sparse_decode_atten_func  # noqa: F401


def test_nemo() -> None:
    ends = torch.tensor([0, 150, 400], dtype=torch.int32)
    leaves = operands((400, 16, 16), (400, 4, 16))
    q2k = lists(4, 400, 2, 2)
    out, lse = sparse_attention(*leaves, q2k, SimpleNamespace(cu_seqlens=ends), return_lse=True)
    wanted, sums = right(*leaves, admitted(q2k, 128, ends, ends))
    same(out, wanted)
    same(lse, sums)
    same_gradients(out, wanted, leaves)
    same(sparse_attention(*leaves, q2k, ends), wanted)
    refused("msa is None; it must have cu_seqlens", sparse_attention, *leaves, q2k, None)


@pytest.mark.parametrize("causal", [True, False])
def test_infllm(causal: bool) -> None:
    q, k, v = leaves = packed(81)
    blocks = lists(2, 81, 2, 3)
    given: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": 0.3,
        "return_attn_probs": True,
        "topk_idx": blocks,
    }
    out, lse, none = infllmv2_attn_varlen_func(*leaves, FEWER, ENDS, 72, 130, **given)
    wanted, sums = right(q, k, v, admitted(blocks, 64, FEWER, ENDS, causal), 0.3)
    same(out, wanted)
    same(lse, sums)
    assert none is None
    same_gradients(out, wanted, leaves)
    every = torch.arange(3).expand(2, 81, 3)
    dense_out = infllmv2_attn_varlen_func(*leaves, FEWER, ENDS, causal=causal)
    same(dense_out, right(q, k, v, admitted(every, 64, FEWER, ENDS, causal))[0])


def test_what_infllm_refuses() -> None:
    leaves, blocks = packed(), lists(2, 200, 2, 3)
    wanted = infllmv2_attn_varlen_func(*leaves, ENDS, ENDS, topk_idx=blocks, causal=True)
    for window in ([-1, -1], (None, None), (-1, 0)):  # no bound
        given: Any = {"topk_idx": blocks, "causal": True, "window_size": window}
        assert torch.equal(infllmv2_attn_varlen_func(*leaves, ENDS, ENDS, **given), wanted)
    for given, words in (
        ({"dropout_p": 0.1}, "dropout_p.*drops no weights"),
        ({"block_table": torch.zeros(1)}, "attention_paged"),
        ({"alibi_slopes": torch.ones(4)}, "sparsek.attention for each document"),
        ({"block_window_size": 3}, "list these blocks"),
        ({"window_size": (64, 0)}, "TokenLists"),
    ):
        refused(
            words,
            infllmv2_attn_varlen_func,
            *leaves,
            ENDS,
            ENDS,
            **{"topk_idx": blocks, "causal": True, **given},
        )


@pytest.mark.parametrize(("side", "heads"), [(16, 4), (256, 2)])
def test_flash_moba(side: int, heads: int) -> None:
    """Every head of q chooses: its own chunk, and the best means before it."""
    ends = torch.tensor([0, 70, 70, 600], dtype=torch.int32)
    q, k, v = leaves = operands((600, heads, 16), (600, 2, 16))
    out = flash_moba_varlen_func(*leaves, ends, ends.clone(), 530, 530, side, 2)
    blocks = torch.full((heads, 600, 2), -1)
    for start, end in spans(ends):
        keys = k[start:end].repeat_interleave(heads // 2, 1)
        parts = [part.mean(0) for part in keys.split(side)]
        if parts:
            scores = torch.einsum("shd,chd->hsc", q[start:end], torch.stack(parts))
            own, column = torch.arange(end - start)[:, None] // side, torch.arange(len(parts))
            scores = scores.masked_fill(column > own, -torch.inf).masked_fill(column == own, torch.inf)
            best = scores.topk(min(2, len(parts)), -1)
            blocks[:, start:end, : len(parts)] = best.indices.masked_fill(best.values == -torch.inf, -1)
    k_all, v_all = (x.repeat_interleave(heads // 2, 1) for x in (k, v))
    wanted = right(q, k_all, v_all, admitted(blocks, side, ends, ends))[0]
    same(out, wanted)
    same_gradients(out, wanted, leaves)
    refused("no causal=False.*TokenLists", flash_moba_varlen_func, *leaves, ends, ends, 1, 1, side, 2, False)
    refused("moba_chunk_size is 48", flash_moba_varlen_func, *leaves, ends, ends, 1, 1, 48, 2)
    refused("cu_seqlens_q must be a dense", flash_moba_varlen_func, *leaves, None, None, 1, 1, side, 2)


def test_entries_that_do_not_exist_are_left_out() -> None:
    """Of any size: also in blocks that are cut into parts of 128 keys."""
    q, k, v = (x.detach()[None] for x in packed())
    good = torch.zeros(1, 200, 2, 1, dtype=torch.int32)
    for entry in (-(2**31), -5, 1, 2**23 + 1, 2**24, 2**31 - 1):
        bad = torch.cat((torch.full_like(good, entry), good), -1)
        same(
            parallel_nsa(q, k, v, block_indices=bad, block_size=256),
            parallel_nsa(q, k, v, block_indices=good, block_size=256),
        )


def test_an_unknown_option_is_refused_by_its_name() -> None:
    for call in (
        parallel_nsa, build_k2q_csr, sparse_atten_func, sparse_attention, infllmv2_attn_varlen_func,
        flash_moba_varlen_func,
    ):  # fmt: skip
        refused(f"{call.__name__} has no argument odd", call, odd=1)


def test_names_that_lack_say_what_to_use() -> None:
    for name in ("flash_topk_varlen_func", "infllmv2_attn_stage1", "parallel_nsa_topk"):
        with pytest.raises(AttributeError, match=r"sparsek\.policies"):
            getattr(selected, name)
