"""A few small products by the kernel that is named, for `compute-sanitizer --tool memcheck`.

Together they use both shapes of warpgroups, the 1x1 one, merged rows, overlapping slices, several pieces in a stage,
column-major B, ragged sides, empty rows, and rings that wrap. Outputs and inputs have no room to spare.
"""

import sys

import torch

from sparsek.engine import table as kernels
from sparsek.products.formats.random import random_bsr
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import problem
from tests.sampling import sampled

# m, k, n, block, density, B's layout
CASES = (
    (256, 384, 264, (128, 128), 0.5, "row"),
    (256, 384, 264, (128, 128), 0.5, "col"),
    (300, 320, 128, (64, 64), 0.5, "row"),
    (128, 128, 136, (16, 16), 0.4, "row"),
    (192, 288, 64, (48, 96), 0.5, "row"),
    (160, 160, 72, (80, 80), 0.7, "row"),
    (100, 120, 16, (32, 32), 0.3, "row"),
    (512, 224, 16, (512, 112), 1.0, "col"),
)
PAIRED = (
    (300, 320, 128, (64, 64), 0.5, "row"),
    (104, 120, 72, (32, 32), 0.3, "col"),
    (1040, 512, 576, (16, 16), 0.2, "row"),
    (1040, 512, 576, (16, 32), 0.2, "col"),
)
MMA = (
    (1040, 512, 584, (16, 16), 0.2, "row"),
    (104, 120, 72, (16, 16), 0.3, "col"),
    (1000, 4112, 136, (16, 16), 1.0, "col"),
)
OWN = {"hopper.spmm_paired": PAIRED, "hopper.spmm_mma": MMA}


def main(name: str) -> None:
    kernel = kernels.load(name)
    for m, k, n, block, density, layout in OWN.get(name, CASES):
        a = random_bsr(
            m, k, block, density, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=m + n
        )
        b = torch.randn(k, n, device="cuda").bfloat16()
        if layout == "col":
            b = b.mT.contiguous().mT
        p = problem(a, b)
        every = list(kernel.configs(p))
        chosen = sampled(every, 3, of=(m, n, block)) if name == "hopper.spmm_paired" else [kernel.default(p)]
        if kernel.name == "hopper.spmm":
            # With several merged rows and with none; the widest tile of each.
            for merge in {c.joined_rows for c in every}:
                chosen.append(max((c for c in every if c.joined_rows == merge), key=lambda c: c.block_cols))
        for c in dict.fromkeys(chosen):
            out = poisoned((m, n), b.dtype, "cuda")
            kernel.launch(c, kernel.prepare(p, c, a), a, b, out)
            torch.cuda.synchronize()
            gate = check_spmm(a, b, out)
            assert gate.passed, (kernel.name, c, gate)
            print(kernel.name, c)
    print("every result is within its budget")


if __name__ == "__main__":
    main(sys.argv[1])
