"""The gradient of attention's learned sinks: a sum over the rows of each head.

    d sink[b, h] = - sum_i exp(sink[h] - lse_i) (rowsum(grad_i * out_i) - grad_lse_i)

A program adds the rows of one chunk, and a second kernel the chunks of a head in order, so the bits repeat. out and
grad are read once. Only calls with a gradient of the sinks launch this; the other gradients see the sinks in lse.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.backward.delta import ELEMENTS, WARPS, deltas
from sparsek.engine.launch.launch import launch

STEPS = 16  # tiles of rows in a chunk
CHUNKS = 128  # added together


@triton.jit(do_not_specialize=("q_len", "heads", "chunks", "sl_b", "sl_h", "sn_b", "sn_h", "step"))
def _add_rows(
    out, grad, lse, grad_lse, sinks, sums, q_len, heads, chunks, step,
    so_b, so_h, so_m, so_d, sg_b, sg_h, sg_m, sg_d, sl_b, sl_h, sl_m, sn_b, sn_h, sn_m,
    DV: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // chunks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    sink = tl.load(sinks + h * step).to(tl.float32)
    out += b * so_b + h * so_h
    grad += b * sg_b + h * sg_h
    lse += b * sl_b + h * sl_h
    if grad_lse is not None:
        grad_lse += b * sn_b + h * sn_h
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for i in range(STEPS):
        at = ((tl.program_id(0) % chunks * STEPS + i) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = at < q_len
        delta = deltas(out, grad, grad_lse, at * so_m, at * sg_m, at * sn_m, there, so_d, sg_d, DV)
        lg = tl.load(lse + at * sl_m, mask=there, other=float("inf"))
        lg = tl.where(lg == float("-inf"), float("inf"), lg)  # no key and no sink: -inf - -inf is NaN
        weight = tl.exp2((sink - lg) * 1.4426950408889634)
        total += tl.where(lg == float("inf"), 0.0, weight * delta)
    tl.store(sums + tl.program_id(0), -tl.sum(total, 0))


@triton.jit(do_not_specialize=("chunks",))
def _add_chunks(sums, found, chunks, CHUNKS: tl.constexpr):
    sums += tl.program_id(0).to(tl.int64) * chunks
    total = tl.zeros((CHUNKS,), dtype=tl.float32)
    for first in range(0, chunks, CHUNKS):
        at = first + tl.arange(0, CHUNKS)
        total += tl.load(sums + at, mask=at < chunks, other=0.0)
    tl.store(found + tl.program_id(0), tl.sum(total, 0))


def launched(out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, sinks: Tensor) -> Tensor:
    """float32 [B, Hq]: the gradient of `sinks` [Hq] for each batch item, by two launches. No sync.

    out, grad: [B, Hq, S, Dv] in bf16, fp16 or float32, lse and grad_lse: float32 [B, Hq, S], sinks float32 or of out's
    dtype; any strides.
    """
    batch, heads, q_len, v_dim = out.shape
    if out.numel() == 0:
        return torch.zeros((batch, heads), dtype=torch.float32, device=out.device)
    found = torch.empty((batch, heads), dtype=torch.float32, device=out.device)
    rows = max(1, ELEMENTS // triton.next_power_of_2(v_dim))
    chunks = triton.cdiv(q_len, rows * STEPS)
    sums = (
        found if chunks == 1 else torch.empty((batch * heads, chunks), dtype=torch.float32, device=out.device)
    )
    with torch.cuda.device_of(out):
        launch(
            _add_rows, (batch * heads * chunks,),
            out, grad, lse, grad_lse, sinks, sums, q_len, heads, chunks, sinks.stride(0),
            *out.stride(), *grad.stride(), *lse.stride(), *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            DV=v_dim, ROWS=rows, STEPS=STEPS, num_warps=WARPS,
        )  # fmt: skip
        if chunks > 1:
            launch(_add_chunks, (batch * heads,), sums, found, chunks, CHUNKS=CHUNKS, num_warps=WARPS)
    return found
