"""The attention calls of FastVideo's fastvideo_kernel, on SparseK's kernels.

    from sparsek.integrations.fastvideo import video_sparse_attn    # was: from fastvideo_kernel

Tokens are in the order of tiles: a block is a cube of a video, padded to its full size at its end. GQA works too: k and
v may have fewer heads than q.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsek.attn.mask.cache import kept_mask, values_of
from sparsek.attn.mask.lists import BLOCK_SIZES, CHOSEN_SIZES
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.ops.attention import attention
from sparsek.attn.policies.video import near_tiles
from sparsek.attn.policies.vsa import VSA, coarse, only
from sparsek.attn.reference.estimates import block_means
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant
from sparsek.integrations.foreign_options import (
    absent,
    check_operands,
    check_shape,
    check_values,
    cut_map,
    ints_on,
    readable,
    refusing,
)

TILE = (6, 8, 8)  # of sliding_tile_attention: 384 tokens
DIMS = "[B, H, S, D]"
# What follows q, k and v, in FastVideo, in its package vsa, and in the first version of that.
ORDER = "variable_block_sizes", "q_variable_block_sizes", "topk", "block_size", "compress_attn_weight"
VSA_ORDER = "variable_block_sizes", "topk", "block_size", "compress_attn_weight", "q_variable_block_sizes"
FIRST_ORDER = "topk", "block_size", "compress_attn_weight"
Given = ParamSpec("Given")
Made = TypeVar("Made")

__getattr__ = absent(
    __name__,
    moba_attn_varlen="call sparsek.attention for each sequence, with the mask sparsek.policies.MeanTopK()",
    sliding_tile_attention_triton="call sliding_tile_attention",
    block_sparse_attn_triton="call block_sparse_attn",
)


def _in_any_order(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """`video_sparse_attn` with the positional arguments of any version, known by the place of the int `topk`."""

    renamed: Any = call

    @functools.wraps(call)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        counts = [isinstance(x, int) for x in args[3:5]]
        if not any(counts):
            return call(*args, **kwargs)
        order = FIRST_ORDER if counts[0] else VSA_ORDER
        named = dict(zip(order, args[3:], strict=False))
        again = [name for name in named if name in kwargs]
        if again or len(args) > 3 + len(order):
            what = f"{again[0]} is given twice" if again else f"it has {len(args)} arguments"
            raise InvalidInput(
                f"video_sparse_attn takes (q, k, v, {', '.join(order)}) with topk there; {what}"
            )
        given: Any = {**named, **kwargs}
        return renamed(*args[:3], **given)

    return called


@refusing("video_sparse_attn", sm_scale=(None, "scale q before the call"), return_aux=(False, "leave it out"))
@_in_any_order
def video_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variable_block_sizes: Tensor | None = None,
    q_variable_block_sizes: Tensor | None = None,
    topk: int | None = None,
    block_size: int | Sequence[int] = 64,
    compress_attn_weight: Tensor | None = None,
) -> Tensor:
    """Return video sparse attention: a coarse branch over the means of blocks, plus attention in the best blocks.

    The mean of a block is that of its valid rows. The coarse branch is softmax(mean q . mean k / sqrt(D)) times the
    means of v, the same for all queries of a block. The sparse branch visits the `topk` blocks of keys with the highest
    coarse scores, of equal ones the first. The original rounds means and scores to the dtype of q; here they are in
    float32. Blocks of size 0 are not seen. Padded rows of q, k and v must be finite; those of the result are 0.

    The positional order of the package vsa, (q, k, v, variable_block_sizes, topk, block_size, compress_attn_weight,
    q_variable_block_sizes), and of its first version, (q, k, v, topk, block_size, compress_attn_weight), work too.

    Args:
        q: [B, Hq, S, D]; S is a multiple of the block.
        k: [B, Hkv, T, D]; Hq is a multiple of Hkv.
        v: [B, Hkv, T, D].
        variable_block_sizes: int32 [T / block]: the valid keys of each block, its first ones; None: all.
        q_variable_block_sizes: int32 [S / block]: the valid queries of each block. None: those of the keys, for as many
            blocks.
        topk: Key blocks of each query block; all of them where there are fewer. Must be given.
        block_size: The cube (frames, height, width), or its side; 64, 128 or 256 tokens in all. An int from 64 on is
            the number of tokens, because a cube of that side has no kernel.
        compress_attn_weight: A factor of the coarse branch that broadcasts to [B, Hq, S, D]; 1 for None.

    Returns:
        [B, Hq, S, D], with gradients for q, k, v and compress_attn_weight. The choice of blocks has none.

    Raises:
        InvalidInput: For tensors that do not fit together, and for other blocks.

    Source: VSA, Zhang et al., arXiv:2505.13389.

    Example:
        >>> import torch
        >>> from sparsek.integrations.fastvideo import video_sparse_attn
        >>> q, k, v = torch.randn(3, 1, 2, 256, 64).unbind()
        >>> sizes = torch.full((4,), 64, dtype=torch.int32)
        >>> video_sparse_attn(q, k, v, sizes, sizes, topk=2, block_size=(4, 4, 4)).shape
        torch.Size([1, 2, 256, 64])
    """
    check_operands(q, k, v, DIMS)
    check_tensors(q, k, v)
    side = _tokens(block_size)
    gate = _gate(compress_attn_weight, q)
    best = arguments.integer("topk", topk, 1)
    if q_variable_block_sizes is None and variable_block_sizes is not None:
        if q.shape[2] != k.shape[2]:
            raise InvalidInput(
                f"q has {q.shape[2]} tokens and k {k.shape[2]}; give q_variable_block_sizes beside variable_block_sizes"
            )
        q_variable_block_sizes = variable_block_sizes
    given = (
        ("variable_block_sizes", variable_block_sizes, k),
        ("q_variable_block_sizes", q_variable_block_sizes, q),
    )
    keys, queries = (
        _sizes(name, _whole(x, side) if sizes is None else sizes, x, side) for name, sizes, x in given
    )
    if not q.shape[0]:
        return attention(q, k, v)
    lengths = None if q_variable_block_sizes is None else queries[None]
    if side in BLOCK_SIZES:
        return VSA(best, side).attention(q, k, v, gate, kv_lengths=keys, q_lengths=lengths)
    q_mean, k_mean = (block_means(q.detach(), side, queries[None]), block_means(k.detach(), side, keys[None]))
    scores = q_mean @ k_mean.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    chosen = scores.masked_fill(keys == 0, -torch.inf).topk(min(best, keys.numel())).indices
    mask = BlockMask.from_indices(chosen, q_len=q.shape[2], kv_len=k.shape[2], block=side, kv_lengths=keys)
    means = coarse(q, k, v, (side, side), q.shape[3] ** -0.5, queries[None], keys[None])
    spread = means.to(q.dtype).repeat_interleave(side, 2)
    out = attention(q, k, v, mask) + (spread if gate is None else gate * spread)
    return only(out, side, lengths)


@refusing("block_sparse_attn")
def block_sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, block_map: Tensor, variable_block_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention in the blocks of a map, and its lse. A query with no key gets 0 and -inf.

    Args:
        q: [B, Hq, S, D]; S is a multiple of the block.
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, D].
        block_map: bool [B, Hq, S / block, T / block] or [Hq, S / block, T / block], for blocks of 64, 128 or 256: true
            where a block is visited.
        variable_block_sizes: int32 [T / block]: the valid keys of each block, its first ones.

    Returns:
        (out, lse): out [B, Hq, S, D], with gradients for q, k and v; lse float32 [B, Hq, S], natural logarithm. The
        lse of the original has another base in each of its kernels.

    Raises:
        InvalidInput: For tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.fastvideo import block_sparse_attn
        >>> q, k, v = torch.randn(3, 1, 2, 256, 64).unbind()
        >>> out, lse = block_sparse_attn(q, k, v, torch.eye(4).bool().expand(1, 2, 4, 4), torch.full((4,), 64))
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 256, 64]), torch.Size([1, 2, 256]))
    """
    check_operands(q, k, v, DIMS)
    arguments.tensor("block_map", block_map, (torch.bool,))
    if block_map.ndim not in (3, 4) or 0 in block_map.shape[-3:]:
        raise InvalidInput(
            f"block_map is {list(block_map.shape)}; it must be [B, H, query blocks, key blocks]"
        )
    block_map = block_map[None] if block_map.ndim == 3 else block_map
    side = _side_of(q.shape[2], block_map.shape[2], "query blocks of block_map")
    keys = _sizes("variable_block_sizes", variable_block_sizes, k, side)
    check_shape("block_map", block_map, (*block_map.shape[:3], keys.numel()), "by the sizes of key blocks")
    if not q.shape[0]:
        return attention(q, k, v, return_lse=True)
    mask = BlockMask.from_block_map(
        block_map, q_len=q.shape[2], kv_len=k.shape[2], block=side, kv_lengths=keys
    )
    return attention(q, k, v, mask, return_lse=True)


@refusing("block_sparse_attn_from_indices")
def block_sparse_attn_from_indices(
    q: Tensor, k: Tensor, v: Tensor, q2k_idx: Tensor, q2k_num: Tensor, variable_block_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention in listed blocks, and its lse, as block_sparse_attn.

    Args:
        q: [B, Hq, S, D]; S is a multiple of the block.
        k: [B, Hkv, T, D].
        v: [B, Hkv, T, D].
        q2k_idx: int32 [B, Hq, S / block, n]: key blocks, for blocks of 64, 128 or 256. Any order; none twice.
        q2k_num: int32 [B, Hq, S / block]: how many of them count. Lists on a GPU are checked there; `verify` reports.
        variable_block_sizes: int32 [T / block]: the valid keys of each block, its first ones.

    Returns:
        (out, lse), as block_sparse_attn.

    Raises:
        InvalidInput: For tensors that do not fit together, and for entries that repeat or point outside.
    """
    check_operands(q, k, v, DIMS)
    q2k_idx = ints_on("q2k_idx", q2k_idx, q.device, 4)
    q2k_num = ints_on("q2k_num", q2k_num, q.device, 3)
    check_shape("q2k_num", q2k_num, tuple(q2k_idx.shape[:3]), "as q2k_idx")
    side = _side_of(q.shape[2], q2k_idx.shape[2], "query blocks of q2k_idx")
    keys = _sizes("variable_block_sizes", variable_block_sizes, k, side)
    if not q.shape[0]:
        return attention(q, k, v, return_lse=True)
    mask = BlockMask.from_indices(
        q2k_idx, q2k_num, q_len=q.shape[2], kv_len=k.shape[2], block=side, kv_lengths=keys
    )
    return attention(q, k, v, mask, return_lse=True)


@refusing("sliding_tile_attention")
def sliding_tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: Sequence[Sequence[int]],
    text_length: int,
    has_text: bool = True,
    seq_shape: str = "30x48x80",
) -> Tensor:
    """Return attention of a video in tiles of 6 x 8 x 8 tokens, each of which sees a window of tiles, and of a text.

    The window of a tile is centred on it, and shifted to lie inside the video. Queries of the video also see the first
    `text_length` tokens after the video; queries there see all of the video and these tokens, also those of padding.

    Args:
        q: [B, Hq, S, D]: the video in the order of its tiles, then text, with padding at its end.
        k: [B, Hkv, S, D].
        v: [B, Hkv, S, D].
        window_size: (frames, height, width) in tiles, for each head of q. The window has size // 2 tiles to each side.
        text_length: Tokens of the text.
        has_text: Whether there are tokens after the video.
        seq_shape: "TxHxW" of the video in tokens, multiples of 6, 8 and 8. The original has "30x48x80", "36x48x48" and
            "18x48x80" only.

    Returns:
        [B, Hq, S, D], with gradients, which the original lacks. The mask is made once for all calls like this one.

    Raises:
        InvalidInput: For shapes that do not fit together.

    Source: sliding tile attention, Zhang et al., arXiv:2502.04507.

    Example:
        >>> import torch
        >>> from sparsek.integrations.fastvideo import sliding_tile_attention
        >>> q, k, v = torch.randn(3, 1, 2, 2 * 384, 64).unbind()
        >>> sliding_tile_attention(q, k, v, [(1, 1, 1), (1, 3, 3)], 0, False, "6x8x16").shape
        torch.Size([1, 2, 768, 64])
    """
    check_operands(q, k, v, DIMS)
    check_tensors(q, k, v)
    arguments.flag("has_text", has_text)
    sides = _video(seq_shape)
    tiles = tuple(side // tile for side, tile in zip(sides, TILE, strict=True))
    given = window_size if isinstance(window_size, Sequence) else ()
    if len(given) != q.shape[1] or any(not isinstance(x, Sequence) or len(x) != 3 for x in given):
        raise InvalidInput(
            f"window_size is {arguments.shown(window_size)}; it must be (t, h, w) for each head of q"
        )
    windows = tuple(tuple(arguments.integer("window_size", n, 1) for n in each) for each in given)
    video, tokens = math.prod(sides), q.shape[2]
    text = arguments.integer("text_length", text_length, 0, max(tokens - video, 0)) if has_text else 0
    if tokens < video or (not has_text and tokens != video) or k.shape[2] != tokens:
        raise InvalidInput(
            f"q has {tokens} tokens and k {k.shape[2]}; a video of {seq_shape} has {video}, and only a text follows it"
        )

    mask = _tile_mask(tiles, windows, tokens, video + text, text, q.device)
    return attention(q, k[:, :, : video + text], v[:, :, : video + text], mask)


@constant
def _tile_mask(
    tiles: tuple[int, ...], windows: Any, tokens: int, keys: int, text: int, device: torch.device
) -> BlockMask:
    def build() -> BlockMask:
        block_map = _tile_map(tiles, windows, tokens, text)
        return BlockMask.from_block_map(block_map.to(device), q_len=tokens, kv_len=keys, block=128)

    return kept_mask(("sliding tiles", tiles, windows, tokens, text, device), build)


def _tile_map(tiles: Sequence[int], windows: Sequence[Sequence[int]], tokens: int, text: int) -> Tensor:
    """The key blocks of 128 that each query block of 128 sees, bool [1, H, Mb, Nb], on the CPU."""
    near = [torch.from_numpy(near_tiles(tiles, window, clamped=True)) for window in windows]
    seen = torch.stack([cut_map(each, (3, 3)) for each in near])
    rows, columns = -(-tokens // 128) - seen.shape[1], -(-text // 128)
    return torch.nn.functional.pad(seen, (0, columns, 0, rows), value=True)[None]


def _video(seq_shape: Any) -> tuple[int, ...]:
    sides = tuple(int(each) for each in arguments.text("seq_shape", seq_shape).split("x") if each.isdecimal())
    if len(sides) != 3 or any(side % tile or not side for side, tile in zip(sides, TILE, strict=True)):
        raise InvalidInput(
            f'seq_shape is {arguments.shown(seq_shape)}; it must be "TxHxW", multiples of 6, 8 and 8, as "18x48x80"'
        )
    return sides


def _gate(gate: Any, q: Tensor) -> Tensor | None:
    """A factor of the coarse branch that broadcasts to q, or None."""
    if gate is None:
        return None
    arguments.tensor("compress_attn_weight", gate, dtypes.FLOATS)
    arguments.one_device("compress_attn_weight is", gate.device, "q is", q.device)
    wide = (1,) * (4 - gate.ndim) + tuple(gate.shape)
    if len(wide) > 4 or any(n not in (1, m) for n, m in zip(wide, q.shape, strict=True)):
        raise InvalidInput(
            f"compress_attn_weight is {list(gate.shape)}; it must broadcast to q, {list(q.shape)}"
        )
    return gate


def _tokens(block_size: Any) -> int:
    """The tokens of a cube."""
    if isinstance(block_size, int) and not isinstance(block_size, bool):
        side = block_size if block_size >= 64 else block_size**3
    else:
        sides = tuple(block_size) if isinstance(block_size, Sequence) else ()
        side = math.prod(arguments.integer("block_size", each, 1) for each in sides) if len(sides) == 3 else 0
    if side not in CHOSEN_SIZES:
        raise InvalidInput(
            f"block_size is {arguments.shown(block_size)}; a block has 64, 128 or 256 tokens, as (4, 4, 4) has"
        )
    return side


def _side_of(length: int, blocks: int, what: str) -> int:
    """The tokens of a block, from the length and the number of blocks."""
    side = length // blocks if blocks else 0
    if side not in CHOSEN_SIZES or side * blocks != length:
        raise InvalidInput(f"q has {length} tokens for {blocks} {what}; a block has 64, 128 or 256 tokens")
    return side


def _whole(x: Tensor, side: int) -> Tensor:
    """The sizes of blocks that are not padded."""
    return torch.full((x.shape[2] // side,), side, dtype=torch.int32, device=x.device)


def _sizes(name: str, sizes: Tensor, x: Tensor, side: int) -> Tensor:
    """The valid tokens of each block of x, int32."""
    arguments.tensor(name, sizes, (torch.int32, torch.int64))
    arguments.one_device(f"{name} is", sizes.device, "q is", x.device)
    length = x.shape[2]
    if length % side:
        raise InvalidInput(
            f"{length} tokens are not whole blocks of {side}; pad them to {-(-length // side) * side}, and give the "
            f"valid tokens of each block in {name}"
        )
    if sizes.numel() != length // side:
        raise InvalidInput(
            f"{name} has {sizes.numel()} sizes; {length} tokens in blocks of {side} need {length // side}"
        )
    sizes = values_of(sizes, name).flatten()
    if readable(sizes):
        check_values(name, sizes, (sizes < 0) | (sizes > side), f"a block has 0 to {side} tokens")
    arguments.dtype("the dtype of q, k and v", x.dtype, dtypes.FLOATS)
    return sizes.to(torch.int32)
