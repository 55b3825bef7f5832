"""Products of a BSR and a dense matrix as a benchmark: its cases, peers and suites."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparsek.products.formats.bsr import BSR
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import CUBLAS, TORCH_DENSE, Peer
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, USEFUL_NOTE
from sparsek_bench.peers.cusparse import CuSparse
from sparsek_bench.peers.torch_sparse import TorchSparse, addmm, addmm_space, stage_space
from sparsek_bench.suites.product import A_AT_B, BlocksCase, ProductCase, form_name

FORMS = (A_AT_B, "A.T@B", "B@A", "B@A.T")


@dataclass(frozen=True)
class SpmmCase(BlocksCase, ProductCase):
    """A product of A [m, k], `density` of whose blocks are stored in a seeded random pattern, and a dense B.

    `form` is which product; `n` is the side of B that A does not meet. "A@B": B is [k, n]. "A.T@B": B is [m, n].
    "B@A": B is [n, m]. "B@A.T": B is [n, k].
    """

    op: ClassVar[str] = "spmm"
    later: ClassVar[tuple[str, ...]] = ("form",)

    form: str = options.choice("Products", FORMS, usual=A_AT_B)

    @property
    def name(self) -> str:
        """As for all such cases, after the form unless it is A @ B."""
        return super().name if self.form == A_AT_B else f"{form_name(self.form)} {super().name}"

    def make(self, device: torch.device, seed: int = 0) -> tuple[BSR, torch.Tensor]:
        """A, scaled so that A @ B has unit scale, and B, N(0, 1) values; one seed one pair."""
        draw = Draw(device, self.drawn, 10 * seed)
        return self.matrix(draw), draw.normal(*self.b_shape)


def _only_a_at_b(case: SpmmCase) -> list[str]:
    return [] if case.form == A_AT_B else [f"multiplies A @ B, not {form_name(case.form)}"]


PEERS: tuple[Peer, ...] = (
    CUBLAS,
    TorchSparse(
        "torch_sparse",
        "torch.sparse",
        spaces=lambda case: [stage_space(case), addmm_space(case)],
        unless=_only_a_at_b,
        prepare=addmm,
    ),
    CuSparse("cusparse", "cuSPARSE", "cuda", unless=_only_a_at_b),
    TORCH_DENSE,
)


def _square(block: int, density: float, **more: Any) -> SpmmCase:
    return SpmmCase(8192, 8192, 8192, (block, block), density, **more)


BOTH = ("auto", "portable.spmm")
DENSITIES = (0.5, 0.25, 0.125, 0.0625, 0.03125)
# A @ B by block and density. 512x112 with 16 blocks in each of 16 rows holds as many values as
# block 128 with 14 blocks in each of 64 rows: 14,680,064.
BY_BLOCK = (
    *rows("auto", _square(128, 0.5), _square(128, 0.25)),
    *rows(BOTH, _square(128, 0.125)),
    *rows("auto", _square(128, 0.0625)),
    *rows(BOTH, _square(64, 0.125), _square(32, 0.125)),
    *rows(
        "auto",
        _square(16, 0.125),
        SpmmCase(8192, 8192, 8192, (512, 112), 16 / 74),
        _square(128, 14 / 64),
        _square(128, 0.125, pattern="powerlaw"),
        SpmmCase(16384, 16384, 16, (64, 64), 0.25),
        SpmmCase(16384, 16384, 16, (128, 128), 0.25),
    ),
)
SUITES = {
    # Speed over density, one line for each block.
    "density": rows("auto", *(_square(block, share) for block in (128, 64, 32, 16) for share in DENSITIES)),
    "blocks": BY_BLOCK,
    # The other three products of the same size, next to A @ B and its tuned peers.
    "forms": rows("auto", *(_square(block, 0.125, form=form) for block in (128, 16) for form in FORMS)),
    # Sides that no tile divides, and uneven rows: the schedule must hold up here too.
    "ragged": rows(
        "auto",
        SpmmCase(8200, 8136, 8104, (128, 128), 0.125),
        SpmmCase(5000, 7000, 3000, (64, 64), 0.125, "powerlaw"),
        SpmmCase(4096, 11008, 4096, (128, 128), 0.125),
    ),
}
BENCH = Bench(
    "spmm",
    suites=SUITES,
    kinds=(SpmmCase,),
    peers=PEERS,
    tables=(
        Table(
            op="spmm",
            title="BSR x dense",
            columns=(CASE, MS, SPEEDUP, USEFUL, ROOF),
            note=(
                f"{USEFUL_NOTE} Dense is cuBLAS on dense random data. torch.sparse runs with the best of all four "
                "parameters of its kernel, cuSPARSE on Blocked-ELL."
            ),
            beside=("torch_sparse", "cusparse"),
            kernels=("hopper.spmm",),
        ),
    ),
)
