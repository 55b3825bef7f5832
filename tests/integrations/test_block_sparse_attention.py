"""The calls of Block-Sparse-Attention against its documented masks, written out for every element."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.integrations import block_sparse_attention
from sparsek.integrations.block_sparse_attention import (
    block_sparse_attn_func,
    block_streaming_attn_func,
    token_streaming_attn_func,
)
from tests.integrations.dense import coin, dense, expanded, operands, same, same_gradients
from tests.refusals import refused

BLOCK = 128
TYPES = [1, 0, -1, 1]  # two block-sparse heads, one dense, one streaming
INFO = [9, 9, 9, 9, 1, 2, 9, 9]


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tiles(length: int) -> int:
    return -(-length // BLOCK)


def streaming_blocks(q_len: int, k_len: int, sink: int, local: int, causal: bool) -> Tensor:
    """The blocks of a streaming head, row by row: `local` up to the last one of the row, and `sink` first ones."""
    seen = torch.zeros(tiles(q_len), tiles(k_len), dtype=torch.bool)
    first_row = max((q_len - k_len) // BLOCK, 0) if causal else 0
    for row in range(first_row, tiles(q_len)):
        end = -(-max(k_len - q_len, 0) // BLOCK) + 1 + row - first_row if causal else tiles(k_len)
        seen[row, max(end - local, 0) : end] = True
        seen[row, :sink] = True
    return seen


def seen_by(
    lengths: tuple[int, int],
    types: list[int],
    info: list[int],
    blocks: Tensor | None,
    causal: bool,
    exact: bool,
) -> Tensor:
    """The mask of one batch item, bool [H, S, T]; `blocks` [masks, Mb, Nb]."""
    q_len, k_len = lengths
    q, k = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)
    numbers, found = iter(range(len(types))), []
    for head, kind in enumerate(types):
        sink, local = info[2 * head : 2 * head + 2]
        if kind == 0:
            seen = torch.ones(q_len, k_len, dtype=torch.bool)
        elif kind > 0:
            assert blocks is not None
            number = next(numbers) if kind == 1 else kind - 1
            seen = expanded(blocks[number, : tiles(q_len), : tiles(k_len)], (BLOCK, BLOCK), lengths)
        elif exact:
            seen = (k > q - local) | (k < sink)
        else:
            seen = expanded(streaming_blocks(q_len, k_len, sink, local, causal), (BLOCK, BLOCK), lengths)
        found.append(seen & (k <= q) if causal else seen)
    return torch.stack(found)


def right(
    q: Tensor, k: Tensor, v: Tensor, edges: tuple[list[int], list[int]], masks: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    outs, lses = [], []
    for at, seen in enumerate(masks):
        rows, columns = slice(*edges[0][at : at + 2]), slice(*edges[1][at : at + 2])
        of_q, of_k, of_v = (x[None].transpose(1, 2) for x in (q[rows], k[columns], v[columns]))
        out, lse = dense(of_q, of_k, of_v, seen)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), lses


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ([300], [300]),
        ([256, 256], [256, 256]),
        ([130, 130, 257], [200, 200, 129]),
        ([300], [130]),
        ([100], [390]),
    ],
)
def test_heads_of_all_kinds(q_lens: list[int], k_lens: list[int], causal: bool) -> None:
    edges = [0, *accumulate(q_lens)], [0, *accumulate(k_lens)]
    leaves = operands((edges[0][-1], 4, 16), (edges[1][-1], 2, 16), (edges[1][-1], 2, 16))
    most = max(q_lens), max(k_lens)
    blocks = coin(len(q_lens), 2, tiles(most[0]), tiles(most[1]))
    out, lse, weights = block_sparse_attn_func(
        *leaves, ints(edges[0]), ints(edges[1]), ints(TYPES), ints(INFO), blocks, *most, 0.0, is_causal=causal,
        return_attn_probs=True,
    )  # fmt: skip
    masks = [
        seen_by(lens, TYPES, INFO, some, causal, False)
        for lens, some in zip(zip(q_lens, k_lens, strict=True), blocks, strict=True)
    ]
    wanted, lses = right(*leaves, edges, masks)
    same(out, wanted)
    same_gradients(out, wanted, leaves)
    assert weights is None
    assert lse.shape == (len(q_lens), 4, most[0])
    for found, each in zip(lse, lses, strict=True):
        same(found[:, : each.shape[1]], each.masked_fill(each == -torch.inf, torch.inf))
        assert (found[:, each.shape[1] :] == torch.inf).all()


@pytest.mark.parametrize("k_len", [300, 520])
@pytest.mark.parametrize("info", [[3, 40, 0, 0, 0, 1], [130, 0, 0, 0, 0, 0], [600, 0, -1, -1, 0, 400]])
def test_token_streaming(k_len: int, info: list[int]) -> None:
    leaves = operands((300, 3, 16), (k_len, 1, 16), (k_len, 1, 16))
    types = [-1, 0, -1]
    ends = ints([0, 300]), ints([0, k_len])
    out = token_streaming_attn_func(*leaves, *ends, ints(types), ints(info), 300, k_len)
    wanted, _ = right(*leaves, ([0, 300], [0, k_len]), [seen_by((300, k_len), types, info, None, True, True)])
    same(out, wanted)
    same_gradients(out, wanted, leaves)


def test_exact_streaming_beside_block_sparse_heads() -> None:
    leaves = operands((2 * 200, 4, 16), (2 * 200, 4, 16), (2 * 200, 4, 16))
    info, blocks, ends = [0, 0, 0, 0, 5, 70, 0, 0], coin(2, 2, 2, 2), ints([0, 200, 400])
    out = block_sparse_attn_func(
        *leaves,
        ends,
        ends,
        ints(TYPES),
        ints(info),
        blocks,
        200,
        200,
        0.0,
        is_causal=True,
        exact_streaming=True,
    )
    masks = [seen_by((200, 200), TYPES, info, each, True, True) for each in blocks]
    same(out, right(*leaves, (ends.tolist(), ends.tolist()), masks)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_block_streaming(causal: bool) -> None:
    leaves, ends = operands((600, 2, 16), (600, 2, 16), (600, 2, 16)), ints([0, 600])
    types, info = [-1, 0], [1, 2, 0, 0]
    out = block_streaming_attn_func(
        *leaves, ends, ends, ints(types), ints(info), 600, 600, 0.0, is_causal=causal
    )
    masks = [seen_by((600, 600), types, info, None, causal, False)]
    same(out, right(*leaves, ([0, 600], [0, 600]), masks)[0])


def test_heads_may_share_a_mask_by_its_number() -> None:
    leaves, ends = operands((256, 3, 16), (256, 3, 16), (256, 3, 16)), ints([0, 256])
    types, blocks = [2, 1, 1], coin(1, 2, 2, 2)
    out = block_sparse_attn_func(*leaves, ends, ends, ints(types), None, blocks, 256, 256, 0.0)
    masks = [seen_by((256, 256), types, [0] * 6, blocks[0], False, False)]
    same(out, right(*leaves, ([0, 256], [0, 256]), masks)[0])


def test_what_is_refused() -> None:
    q, k, v = operands((256, 2, 16), (256, 2, 16), (256, 2, 16))
    ends, types, blocks = ints([0, 256]), ints([1, 1]), coin(1, 2, 2, 2)
    good: dict[str, Any] = {
        "cu_seqlens_q": ends, "cu_seqlens_k": ends, "head_mask_type": types, "streaming_info": None,
        "base_blockmask": blocks, "max_seqlen_q_": 256, "max_seqlen_k_": 256, "p_dropout": 0.0,
    }  # fmt: skip
    block_sparse_attn_func(q, k, v, **good)
    wrong = [
        ({"p_dropout": 0.1}, "p_dropout"),
        ({"base_blockmask": blocks[:, :1]}, r"head_mask_type\[1\] is for mask 2; base_blockmask has 1 masks"),
        ({"head_mask_type": ints([3, 0])}, r"head_mask_type\[0\] is for mask 3"),
        ({"base_blockmask": blocks[:, :, :1]}, "base_blockmask is"),
        ({"head_mask_type": ints([1])}, "head_mask_type is"),
        ({"head_mask_type": ints([-1, 0])}, "streaming_info is None"),
        ({"streaming_info": ints([1, 2])}, "streaming_info is"),
        ({"max_seqlen_q_": 100}, "max_seqlen_q_ is 100"),
        ({"cu_seqlens_q": ints([0, 200])}, "ends at 200"),
        ({"exact_streaming": True}, "needs is_causal"),
    ]
    for change, message in wrong:
        refused(message, block_sparse_attn_func, q, k, v, **{**good, **change})


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("with_blocks", [False, True])
def test_values_that_no_head_has(with_blocks: bool, exact: bool) -> None:
    q, k, v = operands((256, 2, 16), (256, 2, 16), (256, 2, 16))
    ends, types = ints([0, 256]), [1 if with_blocks else 0, -1]
    blocks = coin(1, 1, 2, 2) if with_blocks else None

    def call(types: list[int], info: list[int]) -> Tensor:
        given = ints(types), ints(info), blocks, 256, 256, 0.0
        return block_sparse_attn_func(q, k, v, ends, ends, *given, is_causal=True, exact_streaming=exact)

    call(types, [-9, -9, 1, 1])  # of a head that does not stream
    for kind in (-2, -7, -(2**31)):
        words = rf"^head_mask_type\[1\] is {kind}; it must be -1 for a streaming head"
        refused(words, call, [types[0], kind], [1, 1, 1, 1])
    for sink, local in ((-1, 1), (1, -1), (-(2**31), 0)):
        words = f"has sink {sink} and local {local} for head 1; both must be at least 0"
        refused(words, call, types, [1, 1, sink, local])


def test_values_are_checked_inside_torch_func() -> None:
    leaves, ends = operands((256, 2, 16), (256, 2, 16), (256, 2, 16)), ints([0, 256])
    q, k, v = (x.detach() for x in leaves)
    blocks = torch.eye(2, dtype=torch.bool)[None, None]

    def loss(q: Tensor, types: Tensor) -> Tensor:
        return block_sparse_attn_func(q, k, v, ends, ends, types, None, blocks, 256, 256, 0.0).square().sum()

    (wanted,) = torch.autograd.grad(loss(leaves[0], ints([1, 0])), leaves[:1])
    same(torch.func.grad(loss)(q, ints([1, 0])), wanted)
    refused(r"head_mask_type\[1\] is -3", torch.func.grad(loss), q, ints([1, -3]))


def test_values_on_a_device_that_no_head_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse_attention, "readable", lambda x: False)  # as on a GPU
    leaves, ends = operands((256, 5, 16), (256, 5, 16), (256, 5, 16)), ints([0, 256])
    types, info = [-7, 9, -1, -1, 1], [1, 1, 1, 1, -1, 1, 1, -4, 0, 0]
    blocks = torch.eye(2, dtype=torch.bool)[None, None]
    out = block_sparse_attn_func(*leaves, ends, ends, ints(types), ints(info), blocks, 256, 256, 0.0)
    near = torch.eye(2, dtype=torch.bool)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    seen = torch.stack(
        [nothing, nothing, torch.tensor([[False, True]] * 2), torch.tensor([[True, False]] * 2), near]
    )
    same(out, right(*leaves, ([0, 256], [0, 256]), [expanded(seen, (BLOCK, BLOCK), (256, 256))])[0])


def test_names_of_forks() -> None:
    leaves, ends = operands((256, 1, 16), (256, 1, 16), (256, 1, 16)), ints([0, 256])
    given: Any = (*leaves, ends, ends, ints([1]), None, coin(1, 1, 2, 2), 256, 256, 0.0)
    call: Any = block_sparse_attn_func
    same(call(*given, q_block_size=128, k_block_size=128, window_size_left=-1), call(*given))
    for name in ("q_block_size", "k_block_size"):
        refused(
            rf"has no {name}, got 64; it must be 128 or None: .*from_block_map", call, *given, **{name: 64}
        )
    refused("has no argument dropout; it has q, k, v", call, *given, dropout=0.0)
    with pytest.raises(
        ImportError, match=r"flash_attn_func.*: import it from sparsek\.integrations\.flash_attention"
    ):
        exec("from sparsek.integrations.block_sparse_attention import flash_attn_func")


def test_an_empty_part_is_merged() -> None:
    q, k, v = (x.detach() for x in operands((128, 2, 16), (256, 2, 16), (256, 2, 16)))
    ends, parts = (ints([0, 128]), ints([0, 256])), []
    for blocks in ([False, False], [False, True]):
        given = torch.tensor(blocks).expand(1, 2, 1, 2)
        out, lse, _ = block_sparse_attn_func(
            q, k, v, *ends, ints([1, 1]), None, given, 128, 256, 0.0, return_attn_probs=True
        )
        parts += [out.transpose(0, 1)[None], lse]
    assert (parts[1] == torch.inf).all()
    out, lse = sk.merge_attention(*parts)
    same(out, parts[2])
    same(lse, parts[3])
