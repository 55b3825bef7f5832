"""spmm/tiles.py and pack/transpose.py on a GPU: the lists of the host bit for bit; products with new patterns wait for
nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern, _transposed_lists
from sparsek.products.formats.random import Spread, random_bsr
from sparsek.products.ops.spmm import plan_spmm, spmm
from sparsek.products.plan.schedule import balance, walk
from sparsek.products.plan.sddmm_schedule import sddmm_tiles

pytest.importorskip("triton")

from sparsek.products.kernels.pack.transpose import transposed_lists
from sparsek.products.kernels.sddmm.tiles import tiles_of
from sparsek.products.kernels.spmm.parts import records
from sparsek.products.kernels.spmm.tiles import device_tiles

pytestmark = pytest.mark.gpu


def passing(known: BSR) -> BSR:
    """The same matrix, whose indices the device has just computed."""
    p = known.pattern
    return BSR.unchecked(
        BlockPattern.unchecked(p.shape, p.block, p.indptr.clone(), p.indices.clone()), known.values
    )


@pytest.mark.parametrize("spread", ["uniform", "powerlaw"])
def test_a_new_pattern_waits_for_nothing_and_gives_the_bits_of_the_host(
    spread: Spread, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    n = 4096
    b = torch.randn(n, n, dtype=torch.bfloat16, device="cuda")
    for seed in range(4):
        known = random_bsr(n, n, 128, 0.2, dtype=torch.bfloat16, device="cuda", seed=seed, pattern=spread)
        a, right = passing(known), plan_spmm(passing(known), b)
        assert right.kernel == "hopper.spmm"
        host = plan_spmm(known, b, kernel="hopper.spmm", config=right.config)(known, b)
        a @ b if seed == 0 else None  # compiled
        with no_sync():
            made = [a @ b for _ in range(6)]
        assert all(torch.equal(each, host) for each in made), "recorded calls, and those of the pattern alone"


@pytest.mark.parametrize("spread", ["uniform", "powerlaw"])
def test_the_device_deals_as_the_host_does(spread: Spread) -> None:
    for side, tile in ((64, (64, 512)), (128, (128, 256)), (256, (128, 256))):
        known = random_bsr(8192, 4000, side, 0.125, device="cuda", pattern=spread).pattern
        for pattern in (known, known.T):
            made, deal = (
                device_tiles(pattern, 8192, *tile, 132),
                balance(walk(pattern, tile[0]), 8192, tile[1], 132),
            )
            assert made is not None
            assert torch.equal(made.tiles.cpu(), torch.from_numpy(records(deal, side, -1)))
            assert torch.equal(made.starts[: deal.ctas + 1].cpu(), torch.from_numpy(deal.starts))
        ours = transposed_lists(known.indptr, known.indices, known.grid)
        assert ours is not None
        assert all(map(torch.equal, ours, _transposed_lists(known)))
        sizes = 128, 128, side, 256 // side, 132
        assert all(map(torch.equal, tiles_of(known, *sizes), sddmm_tiles(known, *sizes)))


def test_a_graph_follows_new_indices() -> None:
    first, second = (
        random_bsr(1024, 1024, 64, 0.2, dtype=torch.bfloat16, device="cuda", seed=each) for each in (0, 1)
    )
    b, a = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda"), passing(first)
    spmm(passing(second), b)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = a @ b
    for known in (second, first):
        a.pattern.indptr.copy_(known.pattern.indptr)
        a.pattern.indices.copy_(known.pattern.indices)
        graph.replay()
        assert torch.equal(out, passing(BSR.unchecked(known.pattern, a.values)) @ b)
