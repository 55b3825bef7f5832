"""Assigns tiles to CTAs on the GPU: `deal` of plan/attention_grad_schedule.py in plain Triton.

One warp walks the tiles in order. It keeps the finish time of each CTA, and gives the next tile to the CTA that
finishes first, without a sync.
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
    """The CTA and the start time of every tile, int32: bit for bit those of the plan's `deal`. No sync on a GPU.

    ticks: int32 [tiles], contiguous, the duration of each tile; their sum is below 2^31.
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
