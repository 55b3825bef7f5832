"""attn/kernels/paged/schedule.py in Triton's interpreter, against plain Python: the order, and the blocks
that are seen.
"""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.kernels.paged import schedule as scheduling
from sparsek.attn.kernels.paged.schedule import Shape, capacity, schedule
from sparsek.attn.plan.kernels import PagedCall

pytestmark = pytest.mark.usefixtures("one_thread")


class Batch(NamedTuple):
    queries: list[int]
    keys: list[int]
    page: int
    width: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    queries = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=9))
    page = draw(st.sampled_from((64, 128)))
    more = [draw(st.one_of(st.just(0), st.integers(0, 3000), st.integers(-200, 0))) for _ in queries]
    keys = [max(0, n + extra) for n, extra in zip(queries, more, strict=True)]
    return Batch(queries, keys, page, -(-max(*keys, 1) // page))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    window = draw(st.sampled_from((0, 0, 1, 30, 128, 500, 2000)))
    sinks = draw(st.sampled_from((0, 1, 4, 64, 128, 130, 1000))) if window else 0
    positions = draw(st.sampled_from((1, 2, 16, 32, 64, 128)))
    bound = draw(st.sampled_from((scheduling.FAR, window + sinks + positions if window else 700)))
    return Shape(positions, draw(st.sampled_from((64, 128))), draw(st.booleans()), window, sinks, 0, bound)


def called(batch: Batch, edges: Any = None) -> PagedCall:
    """The call whose lengths are those of `batch`; its tensors hold nothing else."""
    starts = [sum(batch.queries[:i]) for i in range(len(batch.queries) + 1)]
    ints: Any = {"dtype": torch.int32, "device": "cpu"}
    low: Any = {"dtype": torch.float16, "device": "cpu"}
    q = torch.empty(starts[-1], 1, 8, **low)
    pages = torch.empty(1, 1, batch.page, 8, **low)
    table = torch.zeros(len(batch.queries), batch.width, **ints)
    cu = torch.tensor(starts if edges is None else edges, **ints)
    lens = torch.tensor(batch.keys, **ints)
    return PagedCall(q, pages, pages, table, lens, cu, None, None, None, None, 1.0, 0.0, q, None)


def visible(shape: Shape, p: int, length: int) -> set[int]:
    """Keys that the query at position p sees."""
    hi = min(length, p + 1) if shape.causal else length
    sunk = set(range(min(hi, shape.sinks))) if shape.window else set[int]()
    if not shape.window:
        return set(range(hi))
    return set(range(max(0, p - shape.window + 1), min(hi, p + shape.window))) | sunk


def steps_of(record: list[int]) -> tuple[list[int], list[int]]:
    """Blocks of the masked and of the whole steps, as the kernel finds them."""
    masked, steps, a, n_a, c, n_c, s, f, blocks = record[5:14]
    first = [a + i if i < n_a else c + i - n_a if i < n_c else s + i - n_c for i in range(masked)]
    return first, [f + i if i < blocks else i - blocks for i in range(steps - masked)]


def hold(batch: Batch, shape: Shape) -> None:
    tiles, count = schedule(called(batch), shape)
    wanted = [
        (sum(batch.queries[:r]) + x, r, length - n + x, min(shape.positions, n - x), length)
        for r, (n, length) in enumerate(zip(batch.queries, batch.keys, strict=True))
        for x in range(0, n, shape.positions)
    ]
    found = tiles[: int(count)].tolist()
    assert sorted(tuple(record[:5]) for record in found) == sorted(wanted)
    assert len(tiles) == capacity(sum(batch.queries), len(batch.queries), shape.positions) >= len(wanted)

    def order(record: list[int]) -> tuple[int, int, int]:
        visited = max(record[2] + record[3], 0) if shape.causal else record[4]
        return -(max(min(visited, shape.bound) - 1, 0) // scheduling.QUANTUM), record[1], -record[2]

    assert found == sorted(found, key=order)
    for record in found:
        if shape.list_queries:
            before = sum(-(-n // shape.list_queries) for n in batch.queries[: record[1]])
            at = record[0] - sum(batch.queries[: record[1]])
            assert record[5] == before + at // shape.list_queries
            continue
        first, rest = steps_of(record)
        assert first or rest
        assert len(set(first + rest)) == len(first + rest)
        _, _, p, queries, length = record[:5]
        ends = {p, p + queries - 1}  # what all see, and what any sees, the outermost queries decide
        seen = [visible(shape, each, length) for each in ends]
        any_sees = {key // shape.keys for keys in seen for key in keys}
        middle = {p + queries // 2}
        any_sees |= {key // shape.keys for each in middle for key in visible(shape, each, length)}
        assert any_sees <= set(first + rest)
        for block in rest:
            keys = set(range(block * shape.keys, (block + 1) * shape.keys))
            assert all(keys <= each for each in seen)
        # No step without a key, but for a tile that sees nothing, and between window and sinks that touch.
        blind = set(first + rest) - any_sees
        if not any_sees:
            assert first == [-(-length // shape.keys)]
        elif queries <= shape.window or not shape.window:
            assert not blind


@settings(max_examples=30)
@given(batches(), shapes())
def test_drawn_batches(batch: Batch, shape: Shape) -> None:
    hold(batch, shape)


@pytest.mark.parametrize("list_queries", [64, 128])
def test_rows_of_lists(list_queries: int) -> None:
    batch = Batch([5, 0, 700, 128, 64, 65], [5, 7, 2000, 128, 1000, 65], 64, 32)
    hold(batch, Shape(64, 64, True, list_queries=list_queries, bound=512))


def test_more_requests_than_are_read_together() -> None:
    drawn = torch.randint(0, 70, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    batch = Batch(drawn, [n + 40 * (i % 60) for i, n in enumerate(drawn)], 64, 64)
    hold(batch, Shape(32, 128, True))


def test_many_tiles_stay_together_by_request_within_a_class() -> None:
    batch = Batch([4096] * 2, [4096] * 2, 128, 32)
    tiles, count = schedule(called(batch), Shape(128, 128, True))
    assert int(count) == 64
    assert tiles[:8, 1].tolist() == [0] * 8
    assert tiles[8:16, 1].tolist() == [1] * 8
    assert tiles[:9, 2].tolist() == [4096 - 128 * i for i in range(1, 9)] + [4096 - 128]


@pytest.mark.parametrize(
    "edges", [[0, 900, 100, 900], [5, -7, 2**30, -(2**31)], [900, 0, 900, 0], [0, 900, 0, 900]]
)
def test_lengths_that_are_wrong_write_nothing_out_of_bounds(edges: list[int]) -> None:
    """Either the tiles are a permutation, or there are none."""
    batch = Batch([300, 300, 300], [2**31 - 1, -5, 300], 128, 8)
    tiles, count = schedule(called(batch, edges), Shape(64, 128, True))
    found = tiles[: int(count)].tolist()
    assert len({tuple(record[:2]) for record in found}) == len(found) <= len(tiles)
    for record in found:
        assert 0 <= record[0] < 900
        assert 0 <= record[1] < 3
        assert 0 < record[3] <= 64
        assert 0 <= record[4] <= 8 * 128
        first, rest = steps_of(record)
        assert max(first + rest) <= 8
        assert min(first + rest) >= 0
