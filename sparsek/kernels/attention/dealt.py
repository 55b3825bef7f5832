"""Which CTA takes which tile of a line, on the GPU: plan/attention_grad_schedule.py's `deal` in plain Triton.

One warp goes along the line. It holds when each CTA is through, finds the first, gives it the tile, and goes on,
without a sync.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.kernels.lang.launch import launch
from sparsek.plan import attention_grad_schedule as schedule


@triton.jit(do_not_specialize=("tiles", "ctas"))
def _deal(ticks, cta, start, tiles, ctas, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    through = tl.where(lane < ctas, 0, 2147483647)
    following = tl.load(ticks, mask=tiles > 0, other=0)
    for tile in range(tiles):
        took = following
        following = tl.load(ticks + tile + 1, mask=tile + 1 < tiles, other=0)
        began, first = tl.min(through, 0, return_indices=True)  # the leftmost of several
        tl.store(cta + tile, first)
        tl.store(start + tile, began)
        through = tl.where(lane == first, began + took, through)


def deal(ticks: Tensor, ctas: int) -> tuple[Tensor, Tensor]:
    """The CTA of every tile and when it begins, int32: bit for bit what the plan's `deal` gives. No sync on a GPU.

    ticks: int32 [tiles], contiguous, what each tile takes; their sum is below 2^31.
    """
    if not ticks.is_cuda and not env.interpreting():
        return schedule.deal(ticks, ctas)
    cta, start = torch.empty_like(ticks), torch.empty_like(ticks)
    options: dict[str, Any] = {"num_warps": 1}
    with torch.cuda.device_of(ticks):
        launch(
            _deal, (1,), ticks, cta, start, len(ticks), ctas, LANES=triton.next_power_of_2(ctas), **options
        )
    return cta, start
