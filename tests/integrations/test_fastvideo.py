"""The calls of FastVideo against its documented semantics in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek import InvalidInput
from sparsek.integrations.fastvideo import (
    block_sparse_attn,
    block_sparse_attn_from_indices,
    sliding_tile_attention,
    video_sparse_attn,
)
from tests.integrations.dense import coin, dense, expanded, operands, randn, same, same_gradients
from tests.refusals import refused
from tests.sampling import sampled


def valid(sizes: Tensor, side: int) -> Tensor:
    """Which tokens of padded blocks exist, bool [tokens]."""
    return (torch.arange(side) < sizes[:, None]).flatten()


def padded(x: Tensor, sizes: Tensor, side: int) -> Tensor:
    return (x.detach() * valid(sizes, side)[:, None]).requires_grad_()


@pytest.mark.parametrize("side", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_block_map(side: int, kv_heads: int) -> None:
    shape = (2, 4, 3 * side, 16)
    leaves = operands(shape, (2, kv_heads, 2 * side, 16), (2, kv_heads, 2 * side, 16))
    blocks, sizes = coin(2, 4, 3, 2), torch.tensor([side, side // 3])
    blocks[0, 0, 0] = False
    out, lse = block_sparse_attn(*leaves, blocks, sizes)
    wanted, right = dense(*leaves, expanded(blocks, (side, side), (3 * side, 2 * side)) & valid(sizes, side))
    same(out, wanted)
    same(lse, right)
    same_gradients(out, wanted, leaves)


@pytest.mark.parametrize("side", [64, 128, 256])
def test_indices_in_any_order(side: int) -> None:
    leaves = operands((1, 2, 3 * side, 16))
    counts = torch.tensor([[[0, 2, 3], [1, 3, 2]]], dtype=torch.int32)
    indices = torch.stack([torch.randperm(3) for _ in range(6)]).view(1, 2, 3, 3).to(torch.int32)
    sizes = torch.tensor([side - 1, 0, side], dtype=torch.int32)
    blocks = torch.zeros(1, 2, 3, 3, dtype=torch.bool)
    blocks.scatter_(3, indices.long(), torch.arange(3) < counts[..., None])
    out, lse = block_sparse_attn_from_indices(*leaves, indices, counts, sizes)
    wanted, right = dense(*leaves, expanded(blocks, (side, side), (3 * side, 3 * side)) & valid(sizes, side))
    same(out, wanted)
    same(lse, right)


def video_right(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, q_sizes: Tensor, topk: int, side: int, gate: Tensor | None
) -> Tensor:
    """Video sparse attention row by row; 0 in padded rows."""
    group = q.shape[1] // k.shape[1]
    means = [
        (x * valid(n, side)[:, None]).unflatten(2, (-1, side)).sum(3) / n[:, None]
        for x, n in ((q, q_sizes), (k, sizes), (v, sizes))
    ]
    q_mean, k_mean, v_mean = means[0], *(x.repeat_interleave(group, 1) for x in means[1:])
    scores = q_mean @ k_mean.mT / math.sqrt(q.shape[3])
    coarse = (scores.softmax(-1) @ v_mean).repeat_interleave(side, 2)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(3, scores.topk(min(topk, scores.shape[3])).indices, True)
    seen = expanded(chosen, (side, side), (q.shape[2], k.shape[2])) & valid(sizes, side)
    out = dense(q, k, v, seen)[0] + (coarse if gate is None else coarse * gate)
    return out * valid(q_sizes, side)[:, None]


@pytest.mark.parametrize(
    ("block_size", "side"), [((4, 4, 4), 64), (4, 64), (64, 64), ((2, 8, 8), 128), ((4, 8, 8), 256)]
)
@pytest.mark.parametrize("with_gate", [False, True])
def test_video_sparse_attention(block_size: int | tuple[int, ...], side: int, with_gate: bool) -> None:
    sizes = torch.tensor([side, side, side // 2, 1], dtype=torch.int32)
    q_sizes = torch.tensor([side, side // 4, side], dtype=torch.int32)
    q = padded(randn(1, 4, 3 * side, 16), q_sizes, side)
    k, v = (padded(randn(1, 2, 4 * side, 16, seed=at), sizes, side) for at in (1, 2))
    gate = randn(1, 4, 3 * side, 16, seed=3).requires_grad_() if with_gate else None
    out = video_sparse_attn(q, k, v, sizes, q_sizes, 2, block_size, gate)
    wanted = video_right(q, k, v, sizes, q_sizes, 2, side, gate)
    same(out, wanted)
    same_gradients(out, wanted, [q, k, v, *([gate] if gate is not None else [])])


@pytest.mark.parametrize("side", [64, 128, 256])
def test_gradients_in_padded_rows_go_nowhere(side: int) -> None:
    sizes, q_sizes = torch.tensor([side, side // 3, 0]), torch.tensor([side // 2, side, 0])
    q, k, v, gate = (randn(1, 2, 3 * side, 16, seed=at).requires_grad_() for at in range(4))
    out = video_sparse_attn(q, k, v, sizes, q_sizes, 2, side, gate)
    there, weight = valid(q_sizes, side)[:, None], randn(1, 2, 3 * side, 16, seed=9)
    assert not (out * ~there).any()
    found = torch.autograd.grad(out, (q, k, v, gate), weight, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(out, (q, k, v, gate), weight * there), strict=True):
        same(one, other)
    for grad, rows in zip(found, (q_sizes, sizes, sizes, q_sizes), strict=True):
        assert not (grad * ~valid(rows, side)[:, None]).any()


def test_calls_of_other_versions() -> None:
    q, k, v = operands((1, 2, 256, 16))
    gate, sizes = randn(1, 2, 256, 16, seed=5), torch.tensor([64, 20, 64, 1])
    full = torch.full((4,), 64)
    right = video_right(q, k, v, sizes, sizes, 2, 64, None), video_right(q, k, v, sizes, sizes, 2, 64, gate)
    cube: Any = (4, 4, 4)
    any_call: Any = video_sparse_attn
    same(any_call(q, k, v, sizes, topk=2), right[0])
    same(any_call(q, k, v, variable_block_sizes=sizes, topk=2, block_size=cube), right[0])
    same(any_call(q, k, v, sizes, 2, cube), right[0])
    same(any_call(q, k, v, sizes, 2, block_size=cube, compress_attn_weight=gate), right[1])
    same(any_call(q, k, v, sizes, 2, cube, gate), right[1])
    same(any_call(q, k, v, sizes, 2, cube, gate, sizes), right[1])
    same(
        any_call(q, k, v, sizes, 2, cube, gate, q_variable_block_sizes=full),
        video_right(q, k, v, sizes, full, 2, 64, gate),
    )
    for found in (any_call(q, k, v, 2, cube, gate), any_call(q, k, v, 2, 4, compress_attn_weight=gate)):
        same(found, video_right(q, k, v, full, full, 2, 64, gate))
    same(any_call(q, k, v, topk=2), video_right(q, k, v, full, full, 2, 64, None))
    same(any_call(q=q, k=k, v=v, topk=2, block_size=cube), video_right(q, k, v, full, full, 2, 64, None))
    same(any_call(q[:, :, :64], k, v, topk=2), video_right(q[:, :, :64], k, v, full, full[:1], 2, 64, None))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((sizes, 2, cube), {"topk": 2}, "topk is given twice"),
        ((2, cube, gate, sizes), {}, "it has 7 arguments"),
        ((sizes,), {}, "topk is None"),
        ((sizes, sizes, 2), {"sm_scale": 0.3}, "has no sm_scale"),
        (
            (sizes, sizes, 2),
            {"sparsity": 0.3},
            "has no argument sparsity; it has q, k, v, variable_block_sizes",
        ),
    ]
    for args, options, message in wrong:
        refused(message, any_call, q, k, v, *args, **options)
    with pytest.raises(InvalidInput, match="q has 64 tokens and k 256; give q_variable_block_sizes"):
        any_call(q[:, :, :64], k, v, sizes, topk=2)
    with pytest.raises(ImportError, match=r"moba_attn_varlen.*: call sparsek\.attention"):
        exec("from sparsek.integrations.fastvideo import moba_attn_varlen")


def test_more_blocks_than_there_are_is_all_of_them() -> None:
    q, k, v = operands((1, 1, 128, 16))
    sizes = torch.tensor([64, 64])
    same(video_sparse_attn(q, k, v, sizes, sizes, 9), video_right(q, k, v, sizes, sizes, 9, 64, None))


def sliding_tiles(shape: Sequence[int], window: Sequence[int], tokens: int, text: int) -> Tensor:
    """The mask of one head, from the tile coordinates of every query and key."""
    tiles = [side // tile for side, tile in zip(shape, (6, 8, 8), strict=True)]
    video = math.prod(shape)
    at = torch.arange(tokens)
    tile = torch.stack(torch.unravel_index((at // 384).clamp(max=math.prod(tiles) - 1), tiles))
    near = torch.ones(tokens, tokens, dtype=torch.bool)
    for place, count, size in zip(tile, tiles, window, strict=True):
        centre = place.clamp(size // 2, count - 1 - size // 2)
        near &= (centre[:, None] - place).abs() <= size // 2
    is_text = (at >= video) & (at < video + text)
    of_video = at < video
    return (near & of_video[:, None] & of_video) | is_text | ((at >= video)[:, None] & of_video)


@pytest.mark.parametrize(
    ("shape", "windows", "tokens", "text"),
    [
        ((6, 8, 24), [(1, 1, 1), (1, 3, 3)], 1152, 0),
        ((12, 8, 16), [(3, 1, 1), (1, 1, 2)], 1536 + 77, 30),
        ((6, 16, 8), [(1, 1, 1), (3, 3, 3)], 768 + 5, 5),
    ],
)
def test_sliding_tiles(
    shape: tuple[int, ...], windows: list[tuple[int, ...]], tokens: int, text: int
) -> None:
    leaves = operands((1, 2, tokens, 8))
    name = "x".join(map(str, shape))
    out = sliding_tile_attention(*leaves, windows, text, tokens > math.prod(shape), name)
    seen = torch.stack([sliding_tiles(shape, window, tokens, text) for window in windows])
    wanted, _ = dense(*leaves, seen)
    same(out, wanted)
    same_gradients(out, wanted, leaves)


def test_what_is_refused() -> None:
    q, k, v = operands((1, 2, 256, 16))
    sizes, four = torch.full((4,), 64), coin(1, 2, 4, 4)
    refused("block_size is 5", video_sparse_attn, q, k, v, sizes, sizes, 1, 5)
    refused("variable_block_sizes has 3 sizes", video_sparse_attn, q, k, v, sizes[:3], sizes, 1)
    for side, wrong in ((64, torch.tensor([64, 65, 64, 64])), (256, torch.tensor([-1]))):
        good = wrong.clamp(0, side)
        at = int((wrong != good).nonzero()[0])
        for given, name in (((wrong, good), "variable"), ((good, wrong), "q_variable")):
            with pytest.raises(InvalidInput, match=rf"^{name}_block_sizes\[{at}\] is {wrong[at]}"):
                video_sparse_attn(q, k, v, *given, 1, side)
    with pytest.raises(InvalidInput, match="250 tokens are not whole blocks of 64; pad them to 256"):
        video_sparse_attn(q, k[:, :, :250], v[:, :, :250], sizes, sizes, 1)
    refused("256 tokens for 3 query blocks", block_sparse_attn, q, k, v, four[:, :, :3], sizes)
    refused("block_map is", block_sparse_attn, q, k, v, four[..., :3], sizes)
    with pytest.raises(InvalidInput, match="q2k_num has shape"):
        block_sparse_attn_from_indices(q, k, v, four.int(), four.int()[..., 0, 0], sizes)
    refused("seq_shape", sliding_tile_attention, q, k, v, [(1, 1, 1)] * 2, 0, False, "5x8x8")
    refused("has 256 tokens", sliding_tile_attention, q, k, v, [(1, 1, 1)] * 2, 0, False, "6x8x8")
    long = operands((1, 1, 390, 16))
    with pytest.raises(InvalidInput, match="390 keys and v 388 values"):
        sliding_tile_attention(long[0], long[1], long[2][:, :, :388], [(1, 1, 1)], 4, True, "6x8x8")
    refused("for each head", sliding_tile_attention, q, k, v, [(1, 1, 1)], 0, False, "6x8x8")


def test_an_empty_batch_has_an_empty_result() -> None:
    q, k, v = operands((0, 4, 256, 16), (0, 2, 192, 16), (0, 2, 192, 16))
    ones, sizes, queries = torch.ones(0, 4, 4, 3), torch.tensor([64, 10, 0]), torch.full((4,), 64)
    found = video_sparse_attn(q, k, v, sizes, queries, 2, compress_attn_weight=q)
    calls = (
        block_sparse_attn(q, k, v, ones.bool(), sizes),
        block_sparse_attn_from_indices(q, k, v, ones.int(), ones.int()[..., 0], sizes),
    )
    assert all((out.shape, lse.shape) == (q.shape, q.shape[:3]) for out, lse in calls)
    for out in (found, *(out for out, _ in calls)):
        assert torch.autograd.grad(out.sum(), q)[0].shape == out.shape == q.shape
    refused("block_map is", block_sparse_attn, q, k, v, ones.bool()[..., :2], sizes)


CALLS: dict[str, Callable[..., Any]] = {
    "video_sparse_attn": lambda q, k, v, sizes, chosen: video_sparse_attn(q, k, v, sizes, sizes, 3, 64),
    "block_sparse_attn": lambda q, k, v, sizes, chosen: block_sparse_attn(q, k, v, chosen, sizes)[0],
    "sliding_tile_attention": lambda q, k, v, sizes, chosen: sliding_tile_attention(
        q, k, v, [(1, 1, 1), (1, 3, 3)], 0, False, "6x8x16"
    ),
}


@pytest.mark.parametrize("name", sampled(CALLS, 2))
def test_a_call_is_one_graph(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    for _ in range(2):
        q, k, v = torch.randn(3, 1, 2, 768, 16).unbind()
        sizes, chosen = torch.randint(1, 65, (12,)).int(), torch.rand(1, 2, 12, 12) > 0.5
        wanted = CALLS[name](q, k, v, sizes, chosen)
        torch.testing.assert_close(compiled(q, k, v, sizes, chosen), wanted, rtol=1e-4, atol=1e-5)
