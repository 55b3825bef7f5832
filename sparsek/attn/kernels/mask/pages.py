"""Lists over pages from those of each token, in one launch of plain Triton: the entries of a list ascend, and one that
occurs again is -1. `pass_lists` in plan/attention_paged.py is the specification. Any CUDA GPU, and Triton's
interpreter.

Bottleneck: the host, with one launch and one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from sparsek.core.arguments import INT32_MAX
from sparsek.core.memory import carved
from sparsek.engine.launch.launch import launch_unspecialized

MOST = 4096  # entries of a list
_LAST = tl.constexpr(INT32_MAX)
_POINTERS = ("indices", "counts", "none", "full_starts", "full_counts", "starts", "many", "entries")
_SIZES = ("tokens", "listed", "end", "si_h", "si_m", "si_n", "sc_h", "sc_m")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _lists(
    indices, counts, none, full_starts, full_counts, starts, many, entries, tokens, listed, end, si_h, si_m, si_n, sc_h,
    sc_m, COUNTED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One list. `end`: the first block that no request can have."""
    row = tl.program_id(0)
    h, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    each = tl.arange(0, EACH)
    used = each < listed
    if COUNTED:
        used = used & (each < tl.load(counts + h * sc_h + token * sc_m))
    of = indices + h * si_h + token * si_m
    block = tl.load(of + each.to(tl.int64) * si_n, mask=used, other=-1)
    block = tl.where((block >= 0) & (block < end), block, -1).to(tl.int32)
    block = tl.sort(tl.where(each < listed, block, _LAST))
    before = tl.gather(block, tl.maximum(each - 1, 0), 0)
    block = tl.where((each > 0) & (block == before), -1, block)
    start = row * listed
    tl.store(entries + start + each, block, mask=each < listed)
    tl.store(starts + row, start)
    tl.store(many + row, listed)
    tl.store(full_starts + row, 0)
    tl.store(full_counts + row, 0)
    if row == 0:
        tl.store(none, -1)


def page_lists(indices: Tensor, counts: Tensor | None, block: int) -> Sequence[Tensor] | None:
    """Starts, counts and entries of no full and of partial blocks, int32, from ints [heads, tokens, n] and [heads,
    tokens]. None for sizes that int32 does not hold, and for lists that are long or empty.
    """
    heads, tokens, n = indices.shape
    steps = *indices.stride(), *((0, 0) if counts is None else counts.stride())
    if not heads * tokens * n or n > MOST or max(indices.numel(), *steps) > INT32_MAX:
        return None
    rows = heads * tokens
    _, made = carved([1, rows, rows, rows, rows, indices.numel()], indices.device)
    counted = counts is not None
    args = indices, counts if counted else indices, *made, tokens, n, INT32_MAX // block + 1, *steps
    each = triton.next_power_of_2(n)
    constants = counted, each
    launch_unspecialized(_lists, indices.device, rows, args, constants, min(max(each // 128, 1), 8))
    none, full_starts, full_counts, starts, many, entries = made
    return full_starts, full_counts, none, starts, many, entries
