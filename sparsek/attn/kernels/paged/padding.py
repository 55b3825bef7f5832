"""Rows of out and lse after the last request, the padding: 0 and -inf, without a host sync.

portable.attention_paged clears them beside its own work: where q ends with its last request, as in decode, its programs
read one more number. hopper.attention_paged, which is for prompts, launches a kernel for it.
"""

import triton
import triton.language as tl

from sparsek.attn.plan.kernels import PagedCall
from sparsek.engine.launch.launch import launch_unspecialized

COLUMNS = tl.constexpr(512)  # written together
PROGRAMS = 128
WARPS = 4


@triton.jit
def clear_padding(
    out, lse, cu_seqlens_q, tokens, requests, out_end, lse_end, heads, dim, so_m, so_h, so_d, LSE: tl.constexpr
):  # fmt: skip
    """Writes 0 to the rows of out from the end of the last request to `out_end`, -inf to those of lse to `lse_end`.

    out [tokens, heads, dim] by its strides, lse [heads, tokens] contiguous, if LSE. Every program takes every n-th row.
    """
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + requests), 0), tokens) + tl.program_id(0)
    index = tl.arange(0, COLUMNS)
    for row in tl.range(first, tl.maximum(out_end, lse_end), tl.num_programs(0)):
        here = (row + 0 * index).to(tl.int64)
        for start in tl.range(0, tl.where(row < out_end, heads * dim, 0), COLUMNS):
            at = start + index
            where = here * so_m + (at // dim).to(tl.int64) * so_h + (at % dim).to(tl.int64) * so_d
            tl.store(out + where, tl.zeros((COLUMNS,), dtype=out.dtype.element_ty), mask=at < heads * dim)
        if LSE:
            for start in tl.range(0, tl.where(row < lse_end, heads, 0), COLUMNS):
                at = start + index
                minus = tl.full((COLUMNS,), float("-inf"), dtype=lse.dtype.element_ty)
                tl.store(lse + at.to(tl.int64) * tokens + here, minus, mask=at < heads)


@triton.jit(
    do_not_specialize=("tokens", "requests", "out_end", "lse_end", "heads", "dim"),
    do_not_specialize_on_alignment=("out", "lse", "cu_seqlens_q"),
)
def _clear(out, lse, cu_seqlens_q, tokens, requests, out_end, lse_end, heads, dim, LSE: tl.constexpr):
    """`clear_padding` for a contiguous out."""
    clear_padding(
        out, lse, cu_seqlens_q, tokens, requests, out_end, lse_end, heads, dim, heads * dim, dim, 1, LSE
    )


def clear(call: PagedCall) -> None:
    """One launch, if anything is to be cleared. The out that is cleared is contiguous, because the call has made it."""
    if not call.out_end and not call.lse_end:
        return
    out, lse = call.out, call.out if call.lse is None else call.lse
    sizes = out.shape[0], call.seq_lens.shape[0], call.out_end, call.lse_end, *out.shape[1:]
    launch_unspecialized(
        _clear, out.device, PROGRAMS, (out, lse, call.cu_seqlens_q, *sizes), (call.lse is not None,), WARPS
    )
