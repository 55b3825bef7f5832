"""Products of 2:4 matrices, whole or in stored blocks, with dense ones as a benchmark: cases, peers, suites.

Rates count what a dense product does: 2 * m * k * n FLOPs of a Semi24, 2 * n for every value in the blocks of a BSR24,
stored or not. Half of that is multiplied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import parse_block
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr import BSR
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Table
from sparsek_bench.engine.case import Bar, Case, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import CUBLAS, TORCH_DENSE, Own, Peer
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, target, useful
from sparsek_bench.peers.cusparselt import CuSparseLt
from sparsek_bench.suites import story
from sparsek_bench.suites.product import A_AT_B, LINEAR, ProductCase, ProductOperands, check_24_sides

FORMS = (LINEAR, A_AT_B)


@dataclass(frozen=True)
class Semi24Case(ProductCase):
    """A 2:4 matrix [m, k] times a dense one: "x@W.T", a layer of n tokens, or "A@B" with B [k, n].

    Without `block` it is a Semi24, with one a BSR24 that stores `density` of its blocks.
    """

    op: ClassVar[str] = "semi24"

    m: int = options.size("Rows of the 2:4 matrix")
    k: int = options.size("Its columns")
    n: int = options.size("Rows of x, or columns of B")
    form: str = options.choice("Products", FORMS, usual=LINEAR)
    block: tuple[int, int] | None = options.block(
        default="none",
        help="Stored blocks, or none: none,128.",
        parse=lambda text: None if text == "none" else parse_block(text),
        usual=None,
    )
    density: float = options.share(default="1", usual=1.0)
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.block is not None:
            check_24_sides(self.block)
        if self.k % two_four.STEP:
            raise InvalidInput(f"K of a 2:4 matrix is a multiple of {two_four.STEP}, got {self.k}")

    @property
    def stored(self) -> str:
        return "semi24" if self.block is None else "bsr24"


def _own_blocks(case: Semi24Case, one: ProductOperands, index: int) -> ProductOperands:
    """This library's BSR of the same pattern, all values of its blocks random."""
    pattern, b = one.a.pattern, one.b
    values = Draw(b.device, b.dtype, 3000 + index).normal(pattern.nnzb, *pattern.block)
    a = BSR.unchecked(pattern, values.mul_(pattern.shape[1] ** -0.5)).zero_padding_()
    return replace(one, a=a, out=b.new_empty(case.out_shape))


PEERS: tuple[Peer, ...] = (
    CUBLAS,
    CuSparseLt("cusparselt", "cuSPARSELt", "cuda"),
    Own(
        "bsr",
        "this library's BSR",
        other=_own_blocks,
        unless=lambda case: [] if case.stored == "bsr24" else ["is of blocks, and the case has none"],
    ),
    TORCH_DENSE,
)
SQUARE = (8192, 8192, 8192)
WHOLE = tuple(Semi24Case(*SQUARE, form) for form in FORMS)
IN_BLOCKS = tuple(Semi24Case(*SQUARE, form, (128, 128), 0.125) for form in FORMS)
PUBLISHED = (
    *rows(("hopper.semi24", "unpacked.semi24"), *WHOLE),
    *rows(("hopper.bsr24", "unpacked.bsr24"), *IN_BLOCKS),
)
BARS: Mapping[Case, tuple[Bar, ...]] = {
    **dict.fromkeys(WHOLE, (Bar("cusparselt", 1.05, 1.25), Bar("cublas", 1.45, 1.7))),
    **dict.fromkeys(IN_BLOCKS, (Bar("bsr", 1.25, 1.45),)),
}
TABLE = Table(
    op="semi24",
    title="2:4",
    columns=(CASE, MS, SPEEDUP, Column("dense-equivalent TFLOPS", useful), ROOF, target(BARS)),
    note=(
        "TFLOPS are dense-equivalent: they count all four values of a group, two of them not stored. "
        "Dense is cuBLAS. A target of 1.10 over a peer means 1.1 times as fast. cuSPARSELt is the fastest of its "
        "algorithms in all layouts of B and C; its B is in that layout before it is timed. The BSR stores all values "
        "of the same blocks. The roofline counts the stored values at the dense rate."
    ),
    kernels=("hopper.semi24", "hopper.bsr24"),
)
BENCH = Bench(
    "semi24",
    suites={"published": PUBLISHED, "story": story.STORY},
    kinds=(Semi24Case, story.StoryCase),
    peers=PEERS,
    tables=(TABLE, story.TABLE),
)
