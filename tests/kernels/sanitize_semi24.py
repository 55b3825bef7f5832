"""A few small products by the kernel that is named, for `compute-sanitizer --tool memcheck`.

Together they use every tile, clusters, ragged sides, empty block rows, other matrices, and rings that wrap.
"""

import sys
from typing import Any

import torch

from sparsek import kernels
from sparsek.testing.cases24 import Case24
from sparsek.testing.cases_fp8 import CaseFp8
from tests.kernels import planned_24, planned_fp8

COL = ("col", "col", "col")
WHOLE = (
    Case24(72, 48, 16, "small"),
    Case24(300, 528, 264, "ragged", combine="add"),
    Case24(296, 1040, 300, "layer", layouts=COL, bias=True, activation="gelu"),
)
FEW = (
    Case24(72, 128, 8, "small"),
    Case24(300, 640, 13, "ragged", combine="add"),
    Case24(296, 4224, 29, "layer", layouts=COL, bias=True, activation="gelu"),
)
BLOCKS = (
    Case24(64, 64, 8, "small", (64, 64), 1.0),
    Case24(300, 512, 264, "ragged", (64, 64), 0.4),
    Case24(504, 512, 264, "layer", (128, 128), 0.4, layouts=COL, bias=True, activation="gelu", combine="mul"),
)
MORE = {"by_columns": True, "bias": True, "activation": "gelu"}
WHOLE_FP8 = (CaseFp8("semi24", 200, 480, 264, "ragged"), CaseFp8("semi24", 296, 1056, 77, "layer", **MORE))
BLOCKS_FP8 = (
    CaseFp8("bsr24", 300, 512, 264, "ragged", (64, 128), 0.4),
    CaseFp8("bsr24", 504, 512, 77, "layer", (128, 128), 0.4, **MORE),
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
        whole = isinstance(case, Case24)
        p = planned_24.problem(a, b, epilogue, out) if whole else planned_fp8.problem(a, b, out, epilogue)
        hold: Any = planned_24.hold if whole else planned_fp8.hold
        for seed, c in enumerate(dict.fromkeys([kernel.default(p), *kernel.configs(p)])):
            hold(kernel, case, torch.bfloat16, "cuda", seed, c)
            torch.cuda.synchronize()
            print(kernel.name, c)
    print("every product is within its budget")


if __name__ == "__main__":
    main(sys.argv[1])
