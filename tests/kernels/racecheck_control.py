"""The smallest warp-specialized Gluon kernel: one warp arrives at a barrier, four wait for it. It has no race.

compute-sanitizer's racecheck (CUDA 13.0) reports one all the same, in the code with which Triton 3.6 starts its worker
warps. As long as it does, what racecheck says of hopper.spmm means nothing.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def arrive(bar):
    mbarrier.arrive(bar, count=1)


@gluon.jit
def wait(bar, out):
    mbarrier.wait(bar, 0)
    gl.store(out, 1)


@gluon.jit
def control_kernel(out):
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize([(wait, (bar.index(0), out)), (arrive, (bar.index(0),))], [1], [24])


def main() -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    jit: Any = control_kernel
    jit[(4,)](out, num_warps=4)
    assert out.item() == 1
    print("the control ran")


if __name__ == "__main__":
    main()
