"""A few small products by the kernel that is named, for `compute-sanitizer --tool memcheck`.

Together they use every tile, clusters, ragged sides, empty block rows, and rings that wrap.
"""

import sys

import torch

from sparsek import kernels
from sparsek.testing.cases24 import Case24
from tests.kernels.planned_24 import hold, problem

COL = ("col", "col", "col")
WHOLE = (
    Case24(72, 48, 16, "small"),
    Case24(300, 528, 264, "ragged"),
    Case24(296, 1040, 300, "layer", layouts=COL, bias=True, activation="gelu"),
)
BLOCKS = (
    Case24(64, 64, 8, "small", (64, 64), 1.0),
    Case24(300, 512, 264, "ragged", (64, 64), 0.4),
    Case24(504, 512, 264, "layer", (128, 128), 0.4, layouts=COL, bias=True, activation="gelu"),
)


def main(name: str) -> None:
    kernel = kernels.load(name)
    for case in WHOLE if name == "hopper.semi24" else BLOCKS:
        a, b, epilogue, out = case.make("cuda", torch.bfloat16)
        p = problem(a, b, epilogue, out)
        for seed, c in enumerate(dict.fromkeys([kernel.default(p), *kernel.configs(p)])):
            hold(kernel, case, torch.bfloat16, "cuda", seed, c)
            torch.cuda.synchronize()
            print(kernel.name, c)
    print("every product is within its budget")


if __name__ == "__main__":
    main(sys.argv[1])
