"""Masks by members, from drawn lists of key blocks for each token, and their dense form from the definition."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.lists import WORD, BlockLists, Members
from sparsek.attn.mask.mask import BlockMask


class TokenMask(NamedTuple):
    """A mask by members, and which keys each token sees, bool [batch, heads, S, T]."""

    mask: BlockMask
    seen: Tensor


def drawn(
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    *,
    chosen: int = 2,
    batch: int = 1,
    heads: int = 1,
    window: int = 0,
    sinks: int = 0,
    causal: bool = True,
    turned: bool = False,
    alike: float = 0.4,
    seed: int = 0,
    device: str = "cpu",
) -> TokenMask:
    """Tokens that choose `chosen` blocks of keys at random, as the one before with a chance of `alike`; below 1 every
    eleventh chooses none. `turned`: intervals of at most 70 keys, those of later tokens before those of earlier ones.
    """
    draw = torch.Generator("cpu").manual_seed(seed)
    columns = -(-kv_len // block[1])
    scores = torch.rand(batch, heads, q_len, columns, generator=draw, dtype=torch.float32, device="cpu")
    member = scores.argsort(-1).argsort(-1) < chosen
    same = torch.rand(batch, heads, q_len, generator=draw, dtype=torch.float32, device="cpu") < alike
    for token in range(1, q_len):
        again = same[:, :, token, None]
        member[:, :, token] = torch.where(again, member[:, :, token - 1], member[:, :, token])
    if alike < 1:
        member[:, :, 5::11] = False
    hi = torch.full((1, q_len), kv_len, dtype=torch.int32, device="cpu")
    if causal:
        hi = (torch.arange(q_len, dtype=torch.int32, device="cpu")[None] + (kv_len - q_len + 1)).clamp(
            0, kv_len
        )
    lo = torch.zeros_like(hi)
    if turned:
        hi = hi.flip(1)
        lo = (hi - 70).clamp(0)
    return of_members(member, lo, hi, kv_len, block, window, sinks, device)


def of_members(
    member: Tensor,
    lo: Tensor,
    hi: Tensor,
    kv_len: int,
    block: tuple[int, int],
    window: int = 0,
    sinks: int = 0,
    device: str = "cpu",
) -> TokenMask:
    """member: bool [batch, heads, S, blocks]. lo, hi: int32 [1 or batch * heads, S]."""
    (bq, bk), (batch, heads, q_len, columns) = block, member.shape
    key = torch.arange(columns * bk, device="cpu")
    low, high = (
        x.long().view(-1 if len(x) == 1 else batch, 1 if len(x) == 1 else heads, q_len, 1) for x in (lo, hi)
    )
    chosen = member.repeat_interleave(bk, -1)
    seen = (low <= key) & (key < high) & (chosen | (key >= high - window) | (key < low + sinks))
    lists: tuple[list[list[int]], list[list[int]]] = ([], [])  # full, partial
    words: list[int] = []
    for group in range(batch * heads):
        b, h = divmod(group, heads)
        for first in range(0, q_len, bq):
            tile, bits = seen[b, h, first : first + bq], member[b, h, first : first + bq]
            for rows in lists:
                rows.append([])
            for j in range(columns):
                inside = tile[:, j * bk : (j + 1) * bk]
                if inside.all():
                    lists[0][-1].append(j)
                elif inside.any():
                    lists[1][-1].append(j)
                    ones = sum(1 << t for t in bits[:, j].nonzero().flatten().tolist())
                    for w in range(math.ceil(bq / WORD)):
                        word = ones >> (w * WORD) & 0xFFFFFFFF
                        words.append(word - (1 << 32) if word >= 1 << 31 else word)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def rows_of(rows: list[list[int]]) -> BlockLists:
        counts = [len(row) for row in rows]
        starts = [sum(counts[:at]) for at in range(len(counts))]
        return BlockLists(ints(starts), ints(counts), ints([j for row in rows for j in row]))

    mask = BlockMask(
        q_len, kv_len, block, batch, heads, rows_of(lists[0]), rows_of(lists[1]), lo=lo.to(device), hi=hi.to(device),
        rules=ints(words), label="members", members=Members(1, window, sinks),
    )  # fmt: skip
    return TokenMask(mask, seen[..., :kv_len].to(device))
