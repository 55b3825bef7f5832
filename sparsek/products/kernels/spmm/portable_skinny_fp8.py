"""C = A @ B in FP8 for a BSR A and up to 8 columns of B, in plain Triton: B may come in bf16, fp16 or float32.

The kernel of portable.spmm (`spmm/portable.py`) with the parts of `spmm/portable_skinny.py` and the sums of
`spmm/portable_fp8.py`: a step lies in one block. Of a B that is not in FP8 every program finds the scales of all
columns, and then rounds what it multiplies, to the bits of the launch that other kernels need before them
(`kernels/pack/to_fp8.py`). That launch takes as long as the product of one column. But each program reads all of B, so
it pays for few columns only: a program of 4 warps reads 28 bytes a nanosecond.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sparsek.core import dtypes
from sparsek.engine.plan.kernel import beside
from sparsek.engine.plan.ring import DRIVER_LAUNCHES
from sparsek.products.kernels.spmm.portable import Config
from sparsek.products.kernels.spmm.portable_fp8 import KERNEL as WIDE
from sparsek.products.kernels.spmm.portable_fp8 import LEAST_K
from sparsek.products.kernels.spmm.portable_skinny import (
    PortableSpmmSkinny,
    _counts,
    _most_parts,
    _resident,
    _subs,
)
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem

# Of six tiles that were timed none was over 3 % faster with the parts that are chosen. Lower ones round B for each
# slice of a block again (H200, 2026-11-30).
TILE = Config(64, 16, 128, 4, 5, group=1)
FIRST_SECONDS, NUMBER_SECONDS = 1.2e-6, 0.07e-9  # until a column's scale is found, beside reading it
STEP_SECONDS = 0.31e-6  # of a program, in which other programs of its SM have steps too
WAVE_SECONDS, COMBINE_SECONDS = 2.5e-6, 1.7e-6


class PortableSpmmSkinnyFp8(PortableSpmmSkinny):
    """Up to 8 columns of B, in FP8."""

    name = "portable.spmm_skinny_fp8"
    storage = "bsr_fp8"
    widest = 8
    rounds = True

    def unable(self, p: SpmmProblem) -> list[str]:
        return WIDE.unable(p)

    def table(self, p: SpmmProblem) -> Iterator[Config]:
        deepest = max(LEAST_K, 1 << (p.block[1] - 1).bit_length())
        yield replace(TILE, tile_k=min(TILE.tile_k, deepest))

    def default(self, p: SpmmProblem) -> Any:
        """The fastest by prediction."""
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def seconds(self, p: SpmmProblem, c: Any) -> float:
        """Launch + finding the scales, where a program reads B at a third of an SM's share of L2, and all of an SM at
        0.87 of it + two beside each other: the steps of the longest part, and compulsory bytes at 92 % of copy
        bandwidth. Plus what further waves of programs and combining parts take.

        Fitted to four layers of 1 to 8 tokens in blocks of 128, 25 % stored: their times with cold weights in graphs,
        and 1.2 us (docs/notes/fp8-products.md). All predictions are of queued launches (core/clock.py), where a dense
        product of these layers takes so much longer, and the two launches of hopper.spmm_fp8 1.7 to 2.9 us. Other
        blocks and sizes are a guess on the side of too long.
        """
        if p.on_cpu:
            return super().seconds(p, c)
        if p.rounded_before:
            rounded = replace(p, b=replace(p.b, rounds=""), rounded_before=False)
            return rounding_seconds(p) + self.seconds(rounded, c)
        parts, slots = _counts(p, c)
        blocks = -(-p.row_max // _most_parts(p.row_max, c.part))
        programs, sms = parts * _subs(p, c) * p.batch, p.card.sm_count
        waves, share = -(-programs // (sms * _resident(p, c))), -(-programs // sms)
        scales = FIRST_SECONDS
        if p.b.rounds:
            row = p.n * dtypes.itemsize(p.b.rounds) * sms / p.card.fabric
            scales += p.k * (NUMBER_SECONDS + row * max(3 * waves, 1.15 * share))
        steps = waves * blocks * -(-p.block[1] // c.tile_k) * STEP_SECONDS
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        late = WAVE_SECONDS * (waves - 1) + COMBINE_SECONDS * (slots > 0)
        return DRIVER_LAUNCHES * p.card.launch_seconds + scales + beside(steps, moved) + late


KERNEL: SpmmKernel = PortableSpmmSkinnyFp8()
