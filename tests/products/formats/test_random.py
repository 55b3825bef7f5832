"""random_bsr: seeded, as dense as asked, of unit scale."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import PATTERNS, Spread, powerlaw_lengths, random_bsr


@given(
    m=st.integers(0, 300),
    k=st.integers(0, 300),
    block=st.sampled_from(((16, 16), (48, 32))),
    density=st.floats(0, 1),
    pattern=st.sampled_from(tuple(PATTERNS)),
    seed=st.integers(0, 9),
)
def test_every_matrix_is_valid(
    m: int, k: int, block: tuple[int, int], density: float, pattern: Spread, seed: int
):
    a = random_bsr(m, k, block, density, pattern=pattern, seed=seed)
    p = BlockPattern(a.shape, a.block, a.pattern.indptr, a.pattern.indices)
    BSR(p, a.values)
    each = max(1, round(density * p.grid[1])) if density and p.grid[1] else 0
    assert a.nnzb == each * p.grid[0]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_seed_decides(pattern: Spread):
    first, again, other = (random_bsr(256, 256, 16, 0.3, pattern=pattern, seed=seed) for seed in (1, 1, 2))
    assert first.pattern.same_as(again.pattern)
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)
    assert first.pattern.same_as(other.pattern) == (pattern == "banded")


@pytest.mark.parametrize("seed", [0, np.int64(7), 2**64 - 1])
def test_any_int_that_torch_takes_is_a_seed(seed: int):
    assert random_bsr(64, 64, 16, 0.5, seed=seed).nnzb == 8


@pytest.mark.gpu
def test_the_pattern_does_not_depend_on_the_device():
    here, there = (random_bsr(256, 256, 16, 0.3, device=device) for device in ("cpu", "cuda"))
    assert here.pattern.same_as(there.pattern)


def test_bands_lie_around_the_diagonal():
    a = random_bsr(256, 128, 16, 0.25, pattern="banded")
    distance = a.pattern.block_rows / 2 - a.pattern.indices
    assert distance.abs().max() <= 2


def test_powerlaw_rows_follow_zipf_in_shuffled_order():
    lengths = powerlaw_lengths(64, 64, 512)
    assert lengths.sum() == 512
    assert lengths[0] == 64
    free = lengths[lengths < 64]
    assert (np.diff(free) <= 0).all()
    rank = np.arange(65 - free.size, 65)
    assert np.abs(free - free[0] * (rank / rank[0]) ** -1.2).max() <= 1.5
    a = random_bsr(64 * 16, 64 * 16, 16, 0.125, pattern="powerlaw")
    assert sorted(a.pattern.row_lengths.tolist(), reverse=True) == lengths.tolist()
    assert a.pattern.row_lengths.tolist() != lengths.tolist()


@given(st.integers(0, 40), st.integers(0, 40), st.floats(0, 1))
def test_powerlaw_lengths_always_add_up(rows: int, columns: int, share: float):
    total = round(share * rows * columns)
    lengths = powerlaw_lengths(rows, columns, total)
    assert lengths.sum() == total
    assert lengths.shape == (rows,)
    assert ((lengths >= 0) & (lengths <= columns)).all()


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_products_have_unit_scale(density: float):
    a = random_bsr(512, 512, 32, density)
    b = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    assert abs((a.to_dense() @ b).std() - 1) < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"density": 1.1}, "density is 1.1"),
        ({"density": float("nan")}, "density is nan"),
        ({"density": "0.5"}, "density is '0.5'; it must be a finite number from 0 to 1"),
        ({"density": None}, "density is None"),
        ({"pattern": "star"}, "use one of uniform, banded, powerlaw"),
        ({"pattern": ["a"]}, r"pattern is \['a'\]; use one of uniform, banded, powerlaw"),
        ({"seed": -1}, "seed is -1; it must be an int from 0 to"),
        ({"seed": 1.5}, "seed is 1.5; it must be an int"),
        ({"seed": "1"}, "seed is '1'; it must be an int"),
        ({"seed": None}, "seed is None; it must be an int"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"dtype": torch.int8}, "is torch.int8; use one of"),
        ({"device": "meta"}, "device is .meta.; use a CUDA device or the CPU"),
        ({"m": -16}, "m is -16; it must be an int of at least 0"),
        ({"block": 24}, "multiples of 16"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str):
    right: dict[str, object] = {"m": 64, "k": 64, "block": 16, "density": 0.5}
    with pytest.raises(InvalidInput, match=message):
        random_bsr(**(right | change))  # type: ignore[arg-type]
