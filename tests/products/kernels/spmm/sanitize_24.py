"""A few small products by the kernel that is named, for `compute-sanitizer --tool memcheck`.

Together they use every tile, clusters, ragged sides, empty block rows, other matrices, and rings that wrap.
"""

import sys
from typing import Any

import torch

from sparsek.engine import table as kernels
from tests.attn.kernels.planned import default_and, hold, problem
from tests.products.cases import COL, ROW, Case

WHOLE = (
    Case(72, 48, 16, None, "small"),
    Case(300, 528, 264, None, "ragged", combine="add"),
    Case(296, 1040, 300, None, "layer", bias=True, activation="gelu", layouts=COL),
)
FEW = (
    Case(72, 128, 8, None, "small"),
    Case(300, 640, 13, None, "ragged", combine="add"),
    Case(296, 4224, 29, None, "layer", bias=True, activation="gelu", layouts=COL),
)
BLOCKS = (
    Case(64, 64, 8, (64, 64), "small", 1.0, two_four=True),
    Case(300, 512, 264, (64, 64), "ragged", 0.4, two_four=True),
    Case(
        504,
        512,
        264,
        (128, 128),
        "layer",
        0.4,
        two_four=True,
        bias=True,
        activation="gelu",
        combine="mul",
        layouts=COL,
    ),
)
MORE: dict[str, Any] = {"layouts": COL, "bias": True, "activation": "gelu"}
WHOLE_FP8 = (
    Case(200, 480, 264, None, "ragged", scales=ROW),
    Case(296, 1056, 77, None, "layer", scales=ROW, **MORE),
)
BLOCKS_FP8 = (
    Case(300, 512, 264, (64, 128), "ragged", 0.4, two_four=True, scales=ROW),
    Case(504, 512, 77, (128, 128), "layer", 0.4, two_four=True, scales=ROW, **MORE),
)
CASES: dict[str, Any] = {
    "hopper.semi24": WHOLE,
    "hopper.semi24_skinny": FEW,
    "hopper.bsr24": BLOCKS,
    "hopper.semi24_fp8": WHOLE_FP8,
    "hopper.bsr24_fp8": BLOCKS_FP8,
}


def main(name: str) -> None:
    kernel = kernels.load(name)
    for case in CASES[name]:
        a, b, epilogue, out = case.make("cuda", torch.bfloat16)
        p = problem(a, b, out, epilogue)
        for seed, c in enumerate(default_and(2, kernel, p, of=str(case))):
            hold(kernel, case, torch.bfloat16, "cuda", seed, c)
            torch.cuda.synchronize()
            print(kernel.name, c)
    print("every result is within its budget")


if __name__ == "__main__":
    main(sys.argv[1])
