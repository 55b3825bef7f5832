"""BlockPattern: what it accepts, what it refuses, and what it derives."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern, HostPattern
from sparsek.products.formats.random import random_bsr


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def small() -> BlockPattern:
    """4 x 4 blocks, ragged below: rows {0, 3}, {}, {1}, {2, 3}."""
    return BlockPattern((100, 64), (32, 16), ints(0, 2, 2, 3, 5), ints(0, 3, 1, 2, 3))


@st.composite
def patterns(draw: st.DrawFn) -> BlockPattern:
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    block = (draw(st.sampled_from((16, 48, 512))), draw(st.sampled_from((16, 112))))
    below, beside = draw(st.integers(0, 15)), draw(st.integers(0, 15))
    cells = np.array(
        draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)), dtype=bool
    )
    stored = cells.reshape(rows, columns)
    shape = (max(0, rows * block[0] - below), max(0, columns * block[1] - beside))
    indptr = np.concatenate(([0], np.cumsum(stored.sum(1))))
    return BlockPattern(shape, block, ints(*indptr.tolist()), ints(*np.nonzero(stored)[1].tolist()))


def cells(pattern: BlockPattern) -> np.ndarray:
    stored = np.zeros(pattern.grid, dtype=bool)
    indptr, indices = pattern.host
    stored[np.repeat(np.arange(pattern.grid[0]), np.diff(indptr)), indices] = True
    return stored


def test_sizes_follow_from_shape_and_block():
    p = small()
    assert (p.grid, p.padded_shape, p.nnzb, p.density, p.is_ragged) == ((4, 4), (128, 64), 5, 5 / 16, True)
    assert p.row_lengths.tolist() == [2, 0, 1, 2]
    assert p.block_rows.tolist() == [0, 0, 2, 3, 3]
    assert p.row_lengths.dtype == p.block_rows.dtype == torch.int32


def test_repr_is_one_line_of_facts():
    assert repr(small()) == "BlockPattern(100x64, block 32x16, 5 of 16 blocks, 31.2 %, rows 0..2, cpu)"


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_zero_sides_are_allowed(shape: tuple[int, int]):
    p = BlockPattern(shape, (16, 16), torch.zeros(shape[0] // 16 + 1, dtype=torch.int32), ints())
    assert (p.nnzb, p.density) == (0, 0.0)
    assert p.T.shape == shape[::-1]
    assert repr(p)


def test_an_int_means_square_blocks():
    assert BlockPattern((16, 16), 16, ints(0, 0), ints()).block == (16, 16)  # type: ignore[arg-type]


@given(patterns())
def test_transposing_flips_the_cells_and_perm_names_the_blocks(p: BlockPattern):
    flipped, perm = p.transposed
    assert np.array_equal(cells(flipped), cells(p).T)
    BlockPattern(flipped.shape, flipped.block, flipped.indptr, flipped.indices)
    assert perm.dtype == torch.int32
    assert torch.equal(flipped.block_rows, p.indices[perm])
    assert torch.equal(flipped.indices, p.block_rows[perm])


@given(patterns())
def test_transposing_twice_gives_the_very_same_object(p: BlockPattern):
    assert p.T.T is p
    assert p.T is p.T
    assert torch.equal(p.transposed[1][p.T.transposed[1]], torch.arange(p.nnzb, dtype=torch.int32))


def test_derived_builds_once():
    p, built = small(), []
    for _ in range(2):
        assert p.derived("plan", lambda: built.append(1) or "made") == "made"
    assert built == [1]


def test_what_is_derived_in_inference_mode_can_be_saved_for_backward():
    p = small()
    with torch.inference_mode():
        perm, rows = p.transposed[1], p.block_rows
    assert not perm.is_inference()
    assert not rows.is_inference()


def test_host_arrays_are_read_only():
    assert isinstance(small().host, HostPattern)
    with pytest.raises(ValueError, match="read-only"):
        small().host.indices[0] = 7


def test_same_as_compares_blocks_and_not_objects():
    p = small()
    assert p.same_as(p)
    assert p.same_as(small())
    assert not p.same_as(p.T)
    assert not p.same_as(BlockPattern((100, 64), (32, 16), ints(0, 2, 2, 3, 5), ints(0, 2, 1, 2, 3)))


def test_to_the_same_device_is_the_same_object():
    p = small()
    assert p.to("cpu") is p


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:99", None, torch.float32])
def test_to_refuses_other_devices(device: object):
    with pytest.raises(InvalidInput, match="device"):
        small().to(device)  # type: ignore[arg-type]


def test_pytree_leaves_are_the_indices():
    p = small()
    leaves, spec = _pytree.tree_flatten(p)
    assert [id(leaf) for leaf in leaves] == [id(p.indptr), id(p.indices)]
    assert _pytree.tree_unflatten(leaves, spec).same_as(p)
    assert repr(_pytree.tree_unflatten([None, None], spec)).startswith("BlockPattern(100x64")


def test_pickle_and_copy_keep_the_pattern():
    p = small()
    assert pickle.loads(pickle.dumps(p)).same_as(p)  # noqa: S301
    assert copy.deepcopy(p) is p


def faulty(**change: object) -> dict[str, object]:
    right = {
        "shape": (100, 64),
        "block": (32, 16),
        "indptr": ints(0, 2, 2, 3, 5),
        "indices": ints(0, 3, 1, 2, 3),
    }
    return right | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (100,)}, "shape.* must be"),
        ({"shape": (100.0, 64)}, "shape.* must be"),
        ({"shape": (True, 64)}, "shape.* must be"),
        ({"shape": (-1, 64)}, r"shape\[0\] is -1; it must be an int of at least 0"),
        ({"shape": (100, 2**31)}, "K in whole blocks must fit int32"),
        ({"shape": (2**31 - 1, 64)}, "M in whole blocks must fit int32"),
        ({"block": (32, 17)}, "multiples of 16"),
        ({"block": (0, 16)}, "multiples of 16"),
        ({"block": (528, 16)}, "multiples of 16"),
        *(
            (
                {"block": block},
                f"block is {block!r}; it must be one or two ints, multiples of 16 from 16 to 512",
            )
            for block in ("32", -32, 0, 32.0, True, None)
        ),
        ({"indptr": [0, 2, 2, 3, 5]}, "indptr must be a dense torch.Tensor, got list"),
        ({"indptr": torch.tensor([0, 2, 2, 3, 5])}, "dtype of indptr is torch.int64; it must be torch.int32"),
        ({"indices": torch.zeros(5)}, "dtype of indices is torch.float32; it must be torch.int32"),
        ({"indices": ints(0, 3, 1, 2, 3)[:, None]}, r"indices has shape \[5, 1\]; it must be 1-D"),
        ({"indices": ints(0, 0, 3, 3, 1, 1, 2, 2, 3, 3)[::2]}, "indices must be contiguous"),
        ({"indices": ints(0, 3, 1, 2, 3).to("meta")}, "indices is on meta, which is not supported"),
        (
            {"indptr": ints(0, 2, 2, 5)},
            "indptr has 4 entries; 100 rows in blocks of 32 are 4 block rows and need 5",
        ),
        ({"indptr": ints(1, 2, 2, 3, 5)}, r"indptr\[0\] is 1"),
        ({"indptr": ints(0, 2, 1, 3, 5)}, "indptr falls from 2 to 1 at block row 1"),
        ({"indptr": ints(0, 2, 2, 3, -5)}, "indptr falls from 3 to -5 at block row 3"),
        ({"indptr": ints(0, 2, 2, 3, 4)}, r"indptr\[-1\] is 4; it must be the number of indices, 5"),
        (
            {"indices": ints(0, 4, 1, 2, 3)},
            r"indices\[1\] is 4, entry 1 of block row 0; block columns are 0 to 3",
        ),
        ({"indices": ints(0, 3, -1, 2, 3)}, r"indices\[2\] is -1, entry 0 of block row 2"),
        ({"indices": ints(3, 0, 1, 2, 3)}, r"indices\[1\] is 0, entry 1 of block row 0, and is smaller than"),
        ({"indices": ints(0, 3, 1, 2, 2)}, r"indices\[4\] is 2, entry 1 of block row 3, and repeats"),
    ],
)
def test_every_fault_is_named(change: dict[str, object], message: str):
    with pytest.raises(InvalidInput, match=message):
        BlockPattern(**faulty(**change))  # type: ignore[arg-type]


@given(st.lists(st.integers(-2, 6), max_size=6), st.lists(st.integers(-1, 5), max_size=6))
def test_whatever_is_accepted_is_right(starts: list[int], columns: list[int]):
    try:
        p = BlockPattern((64, 64), (16, 16), ints(*starts), ints(*columns))
    except InvalidInput:
        return
    assert [p.indptr[0], p.indptr[-1]] == [0, len(columns)]
    for row in range(4):
        here = columns[starts[row] : starts[row + 1]]
        assert here == sorted(set(here))
        assert all(0 <= j < 4 for j in here)


@pytest.mark.gpu
def test_derivation_does_not_sync(no_sync):
    p = small().to("cuda")
    with no_sync():
        assert p.T.T is p
        assert p.row_lengths.device == p.block_rows.device == p.T.device
    assert p.T.same_as(small().T)


@pytest.mark.gpu
def test_indices_on_two_devices_are_refused():
    with pytest.raises(InvalidInput, match="use one device"):
        BlockPattern(**faulty(indices=ints(0, 3, 1, 2, 3).cuda()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["nothing", "the flipped one"])
def test_a_pattern_goes_with_the_last_who_has_it(kept: str) -> None:
    pattern = random_bsr(64, 96, 16, 0.5).pattern
    flipped, perm = pattern.transposed
    indices, gone = pattern.indices.clone(), weakref.ref(pattern)
    assert flipped.T is pattern
    if kept == "nothing":
        del flipped
    gc.disable()
    try:
        del pattern
        assert gone() is None
    finally:
        gc.enable()
    if kept != "nothing":
        again, back = flipped.transposed
        assert torch.equal(again.indices, indices)
        assert torch.equal(back[perm.long()], torch.arange(len(indices), dtype=torch.int32))
