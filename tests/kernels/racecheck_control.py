"""The smallest warp-specialized Gluon kernels: one warp writes shared memory, four wait for it and read.

compute-sanitizer's racecheck (CUDA 13.0) reports a race all the same in some runs, in the code with which Triton
3.6 starts its worker warps. There is none; the kernel of `python racecheck_control.py race` has one, because its
readers do not wait.
"""

import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

READERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WRITER = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def write(shared, bar):
    shared.store(gl.arange(0, 32, WRITER))
    mbarrier.arrive(bar, count=1)


@gluon.jit
def read(shared, bar, out, WAITS: gl.constexpr):
    if WAITS:
        mbarrier.wait(bar, 0)  # until all numbers are there
    gl.store(out + gl.arange(0, 32, READERS), shared.load(READERS))


@gluon.jit
def control_kernel(out, WAITS: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(read, (shared, bar.index(0), out, WAITS)), (write, (shared, bar.index(0)))], [1], [24]
    )


def main() -> None:
    waits = "race" not in sys.argv
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    jit: Any = control_kernel
    jit[(4,)](out, waits, num_warps=4)
    assert not waits or out.tolist() == list(range(32))
    print("the control ran")


if __name__ == "__main__":
    main()
