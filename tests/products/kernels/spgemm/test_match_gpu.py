"""products/kernels/spgemm/match.py and spgemm_tiles.py on a GPU: the lists of torch bit for bit, every time; one wait
for the matches and none for the tiles; no list past 2^31 pairs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spgemm import match as portable
from sparsek.products.kernels.spgemm.tiles import _deal, spgemm_tiles
from sparsek.products.plan import matches, spgemm_schedule
from tests.products.kernels.spgemm.matched import assert_same, drawn, full

pytestmark = pytest.mark.gpu


@contextmanager
def poisoned() -> Iterator[None]:
    """Integers that torch allocates here are the largest there are."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(a: BlockPattern, b: BlockPattern, wanted: BlockPattern | None = None) -> matches.Matches:
    assert portable.why_not(a, b) == []
    right = matches.match(a, b, wanted)
    with poisoned():
        found = portable.match(a, b, wanted)
    assert_same(found, right)
    assert_same(portable.match(a, b, wanted), right)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_patterns_match_as_torch_matches_them(seed):
    draw = torch.Generator().manual_seed(seed)
    rows, inner, columns = (int(torch.randint(1, 600, (1,), generator=draw)) for _ in range(3))
    densities = [float(torch.rand(1, generator=draw)) ** 4 for _ in range(3)]
    m, k, n = 16 * rows - 5, 32 * inner - 9, 48 * columns - 7
    a = drawn((m, k), (16, 32), densities[0], seed, "cuda")
    b = drawn((k, n), (32, 48), densities[1], seed + 1, "cuda")
    check(a, b)
    check(a, b, drawn((m, n), (16, 48), densities[2], seed + 2, "cuda"))


@pytest.mark.parametrize("pattern", ["uniform", "banded", "powerlaw"])
def test_the_case_of_the_issue(pattern):
    """32768 squared in blocks of 64, 3 % stored."""
    a, b = (
        random_bsr(
            32768, 32768, 64, 0.03, pattern=pattern, dtype=torch.bfloat16, device="cuda", seed=s
        ).pattern
        for s in (0, 1)
    )
    found = check(a, b)
    check(a, b, found.pattern)
    check(a, b, a)
    check(a.T, b.T)


@pytest.mark.parametrize("grid", [(1, 3000, 1), (3000, 1, 3000), (1, 1, 1), (5, 4000, 700)], ids=str)
def test_rows_and_columns_of_any_length(grid):
    (m, k, n) = (16 * side for side in grid)
    a, b = full((m, k), 16, "cuda"), drawn((k, n), 16, 0.5, 0, "cuda")
    check(a, b)
    check(a, b, drawn((m, n), 16, 0.5, 1, "cuda"))


def test_sides_without_blocks():
    some, none = drawn((500, 500), 16, 0.3, 0, "cuda"), drawn((500, 500), 16, 0.0, 0, "cuda")
    for a, b in ((some, none), (none, some), (none, none)):
        assert check(a, b).pairs == 0
        assert check(a, b, some).pairs == 0
        assert check(some, some, none).pairs == 0
    for a, b in ((full((0, 500), 16, "cuda"), some), (some, full((500, 0), 16, "cuda"))):
        assert_same(portable.match(a, b), matches.match(a, b))


def waits(call: Callable[[], object]) -> list[str]:
    """What torch says of a call that waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The first use of the mode in a process warns of the mode itself, with the word "synchronizing" too.
    return [said for each in caught if "called a synchronizing" in (said := str(each.message))]


def test_it_waits_for_the_device_once():
    a, b = drawn((4000, 4000), 16, 0.05, 0, "cuda"), drawn((4000, 4000), 16, 0.05, 1, "cuda")
    for wanted in (None, a):
        portable.match(a, b, wanted)
        said = waits(lambda at=wanted: portable.match(a, b, at))
        assert len(said) == 1, said


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "bsr"])
@pytest.mark.parametrize("ctas", [1, 100, 132, 264, 1000])
def test_tiles_are_those_of_torch_and_wait_for_nothing(ctas, dense):
    for seed, (rows, columns) in enumerate(((1, 1), (3, 700), (600, 2), (130, 129), (400, 500))):
        a = drawn((32 * rows - 5, 64 * 30), (32, 64), 0.1, seed, "cuda")
        b = drawn((64 * 30, 48 * columns - 7), (64, 48), 0.1, seed + 1, "cuda")
        found = portable.match(a, b)
        for height, width, sweeps in ((64, 64, 1), (16, 16, 1), (64, 64, 3), (64, 16, 60)):
            given = found, dense, height, width, ctas, sweeps
            right = spgemm_schedule.spgemm_tiles(*given)
            with poisoned():
                ours = spgemm_tiles(*given)
            for one, other in zip(ours, right, strict=True):
                assert (one.dtype, one.device) == (other.dtype, other.device)
                assert torch.equal(one, other)
            assert waits(lambda given=given: spgemm_tiles(*given)) == []


def test_new_sizes_and_patterns_compile_nothing():
    found = portable.match(*(drawn((320, 320), 16, 0.5, seed, "cuda") for seed in (0, 1)))
    spgemm_tiles(found, False, 64, 16, 132)
    kernels = portable._count, portable._sum, portable._fill, _deal
    before = [sum(len(each[0]) for each in kernel.device_caches.values()) for kernel in kernels]
    for side in (1, 16, 17, 333, 2048):
        a = drawn((side, 1000), 16, 0.5, side, "cuda")
        b = drawn((1000, 16 * side), 16, 0.5, side, "cuda")
        view = BlockPattern.unchecked(
            b.shape, b.block, b.indptr, b.indices.new_empty(b.nnzb + 1)[1:].copy_(b.indices)
        )
        check(a, b)
        spgemm_tiles(check(a, view), False, 16 + side, 16, 132)
    assert [sum(len(each[0]) for each in kernel.device_caches.values()) for kernel in kernels] == before


def test_two_to_the_31_pairs_are_refused_as_by_torch():
    a = full((1300 * 16, 1300 * 16), 16, "cuda")
    assert portable.why_not(a, a) == []
    for match in (portable.match, matches.match):
        with pytest.raises(InvalidInput, match=f"{1300**3} pairs of blocks meet; at most 2147483647"):
            match(a, a)
