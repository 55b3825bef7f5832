"""The softmax of rows of scores, in place: a program per row, which reads it twice and writes it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch.launch import launch

CHUNK, WARPS = 1024, 4

_NUMBERS = ("rows", "columns", "q_len", "offset")


@triton.jit(do_not_specialize=_NUMBERS)
def _mass(
    scores, rows, columns, q_len, offset,
    BM: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    scores += program.to(tl.int64) * columns
    edge = columns
    if CAUSAL:
        last = tl.minimum((program % rows + 1) * BM, q_len) + offset - 1
        edge = tl.minimum(tl.where(last < 0, 0, last // BK + 1), columns)
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, edge, CHUNK):
        at = start + tl.arange(0, CHUNK)
        score = tl.load(scores + at, mask=at < edge, other=float("-inf"))
        most = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(most == float("-inf"), 0.0, most)
        total = total * tl.exp(top - base) + tl.exp(score - base)
        top = most
    most = tl.max(top, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(total * tl.exp(top - most), 0)
    factor = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    for start in range(0, columns, CHUNK):
        at = start + tl.arange(0, CHUNK)
        score = tl.load(scores + at, mask=at < edge, other=float("-inf"))
        tl.store(scores + at, tl.exp(score - most) * factor, mask=at < columns)


def to_mass(scores: Tensor, block: tuple[int, int], q_len: int, causal_from: int | None = None) -> Tensor:
    """`block_mass` of attn/reference/estimates.py in place: scores float32 [B, H, Mb, Nb], contiguous. No sync."""
    batch, heads, rows, columns = scores.shape
    with torch.cuda.device_of(scores):
        launch(
            _mass, (batch * heads * rows,), scores, rows, columns, q_len, causal_from or 0,
            BM=block[0], BK=block[1], CAUSAL=causal_from is not None, CHUNK=CHUNK, num_warps=WARPS,
        )  # fmt: skip
    return scores
