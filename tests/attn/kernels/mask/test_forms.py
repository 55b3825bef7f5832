"""Masks of closed form: their kernels compile, and sizes follow; on a GPU the masks of the CPU, one launch, graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.attn.mask.build.banded import (
    Band,
    Steps,
    bounded_band,
    counted_band,
    counted_documents,
    counted_steps,
)
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from tests.attn.kernels.mask.same import assert_same, frame, places
from tests.refusals import refused
from tests.sampling import sampled


@pytest.mark.parametrize("card", sampled(["sm_80", "sm_90"], 1))
def test_kernels_compile_and_spill_little(card: str):
    offline = pytest.importorskip("tests.attn.kernels.mask.forms_code")
    for name, code in offline.codes(card).items():
        assert code.stack <= 64, name


@given(places(40_000), st.integers(1, 50_000), st.integers(0, 1500), st.booleans())
def test_the_sizes_of_windows_are_those_of_their_lists(place: Place, window: int, sinks: int, causal: bool):
    band = Band.of(place, window, 1 if causal else window, sinks, not causal)
    mask = BlockMask.sliding_window(window=window, sinks=sinks, causal=causal, **frame(place))
    assert counted_band(place, band) == (mask.sizes, mask.heavy_blocks)
    assert bounded_band(place, band).sizes[:3] == (mask.sizes[0], mask.sizes[0], mask.sizes[2])


@given(places(40_000), st.booleans())
def test_the_sizes_of_causal_masks_are_those_of_their_lists(place: Place, causal: bool):
    mask = BlockMask.causal(**frame(place)) if causal else BlockMask.full(**frame(place))
    assert counted_band(place, Band.of(place, None, 1 if causal else None)) == (mask.sizes, mask.heavy_blocks)


@given(places(40_000), st.integers(1, 50), st.integers(1, 5000), st.booleans())
def test_the_sizes_of_steps_are_those_of_their_lists(place: Place, step: int, window: int, causal: bool):
    bk, both = place.block[1], not causal
    near = place.blocks(window)
    strided = BlockMask.strided(stride=step * bk, window=window, causal=causal, **frame(place))
    found = counted_steps(place, Steps.strided(place, step, near, both), causal)
    assert found == (strided.sizes, strided.heavy_blocks)
    dilated = BlockMask.dilated(window=window, dilation=step, causal=causal, **frame(place))
    found = counted_steps(place, Steps.dilated(place, step, near, both), causal)
    assert found == (dilated.sizes, dilated.heavy_blocks)


@given(
    st.lists(st.integers(0, 5000), max_size=9),
    st.integers(1, 5000),
    st.one_of(st.none(), st.integers(1, 900)),
    st.booleans(),
    st.sampled_from((64, 128, (64, 128), (128, 64))),
)
def test_the_sizes_of_documents_are_those_of_their_lists(
    cuts: list[int], total: int, window: int | None, causal: bool, block: Any
):
    edges = np.array([0, *sorted(min(each, total) for each in cuts), total])
    place = Place.of(total, block=block, device="cpu", q_offset=0)
    mask = BlockMask.documents(torch.from_numpy(edges), window=window, causal=causal, block=block)
    band = Band.of(place, window, 1 if causal else window)
    assert counted_documents(place, edges, band, 1) == (mask.sizes, mask.heavy_blocks)
    bound = bounded_band(place, band).sizes
    assert all(true <= said for true, said in zip(mask.sizes[:3], bound[:3], strict=True))


LONG = 512 * 1024

BUILDERS: dict[str, Callable[..., BlockMask]] = {
    "full": BlockMask.full,
    "causal": BlockMask.causal,
    "window": lambda s, **at: BlockMask.sliding_window(s, 4096, **at),
    "narrow window": lambda s, **at: BlockMask.sliding_window(s, 33, sinks=100, **at),
    "window both ways": lambda s, **at: BlockMask.sliding_window(s, 700, causal=False, **at),
    "sinks": lambda s, **at: BlockMask.sliding_window(s, 4096, sinks=128, **at),
    "cut sinks": lambda s, **at: BlockMask.sliding_window(s, 4096, sinks=100, **at),
    "sinks both ways": lambda s, **at: BlockMask.sliding_window(s, 999, sinks=500, causal=False, **at),
    "strided": lambda s, **at: BlockMask.strided(s, 16384, 4096, **at),
    "strided both ways": lambda s, **at: BlockMask.strided(s, 16384, 4096, causal=False, **at),
    "dilated": lambda s, **at: BlockMask.dilated(s, 4096, 4, **at),
    "dilated both ways": lambda s, **at: BlockMask.dilated(s, 4096, 4, causal=False, **at),
    "bigbird": lambda s, **at: BlockMask.bigbird(s, 512, 512, 3, **at),
    "bigbird of heads": lambda s, **at: BlockMask.bigbird(s, 300, 100, 5, seed=7, causal=True, heads=3, **at),
}

LAUNCHER = "sparsek.attn.kernels.mask.{}.launch_unspecialized"
LENGTHS = [500 + 37 * at % 900 for at in range(40)]

EDGES = [0, *accumulate(LENGTHS)]


def counted() -> mock.Mock:
    """A launcher that counts its calls."""
    from sparsek.engine.launch import launch

    return mock.Mock(side_effect=launch.launch_unspecialized)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [64, 128, (64, 128), (128, 64)])
@pytest.mark.parametrize("name", BUILDERS)
def test_builders_make_the_masks_of_the_cpu(name: str, block: Any):
    for length in (1, 127, 4096, 20_000):
        made, wanted = (BUILDERS[name](length, block=block, device=each) for each in ("cuda", "cpu"))
        assert made._base is not None
        assert_same(made, wanted, sizes=made.sizes.exact)
    assert_same(*(BlockMask.causal(q_len=300, kv_len=5000, block=block, device=at) for at in ("cuda", "cpu")))
    frame: Any = {"q_len": 300, "kv_len": 500, "q_offset": -100, "block": block}
    windows = (BlockMask.sliding_window(window=60, sinks=70, device=at, **frame) for at in ("cuda", "cpu"))
    assert_same(*windows)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [64, 128, (64, 128), (128, 64)])
def test_documents_are_those_of_the_cpu(causal: bool, block: Any):
    rows = [LENGTHS, LENGTHS[::-1]]
    both = [BlockMask.block_diagonal(rows, causal=causal, block=block, device=at) for at in ("cuda", "cpu")]
    assert both[0]._base is not None
    assert_same(*both)
    for dtype in (torch.int32, torch.int64):
        edges = torch.tensor(EDGES, dtype=dtype)
        for window in (None, 300):
            made, wanted = (
                BlockMask.documents(each, EDGES[-1] + 77, window=window, causal=causal, block=block)
                for each in (edges.cuda(), edges)
            )
            assert not made.sizes.exact
            assert_same(made, wanted, sizes=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_launches_that_are_repeated_make_the_same_masks(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    for length in (5000, 9000, 5000):
        wanted = BUILDERS[name](length, device="cpu")
        for _ in range(3):
            BUILDERS[name](length, device="cuda")
        torch.cuda.synchronize()
        launched = counted()
        ours = [mock.patch(LAUNCHER.format(each), launched) for each in ("forms", "bigbird")]
        with no_sync(), ours[0], ours[1]:
            made = BUILDERS[name](length, device="cuda")
        assert not launched.called
        assert_same(made, wanted, sizes=made.sizes.exact)


@pytest.mark.gpu
def test_repeated_documents_are_those_of_the_call_and_tell_their_faults():
    for shift in range(0, 250, 25):
        now = [0, *(each - shift for each in EDGES[1:-1]), EDGES[-1]]
        made, wanted = (
            BlockMask.documents(torch.tensor(now, device=at), EDGES[-1]) for at in ("cuda", "cpu")
        )
        assert_same(made, wanted, sizes=False)
    wrong = BlockMask.documents(torch.tensor([*now[:-2], EDGES[-1] + 9, EDGES[-1]], device="cuda"), EDGES[-1])
    refused(f"cu_seqlens is wrong at document {len(now) - 3}", wrong.verify, wait=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_512k_tokens_are_one_allocation_and_one_launch(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    build = BUILDERS[name]
    build(4096, device="cuda")
    torch.cuda.synchronize()
    launched = counted()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    ours = [mock.patch(LAUNCHER.format(each), launched) for each in ("forms", "bigbird")]
    with no_sync(), ours[0], ours[1]:
        mask = build(LONG, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1
    assert launched.call_count == 1
    assert mask.nbytes <= 12 * LONG
    assert_same(mask, build(LONG, device="cpu"))


@pytest.mark.gpu
def test_documents_wait_for_nothing(no_sync: Callable[[], AbstractContextManager[None]]):
    edges = torch.tensor(EDGES, dtype=torch.int32, device="cuda")
    BlockMask.documents(edges, EDGES[-1])
    launched = counted()
    with no_sync(), mock.patch(LAUNCHER.format("documents"), launched):
        BlockMask.documents(edges, EDGES[-1], max_seqlen=max(LENGTHS))
    assert launched.call_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_a_cuda_graph_captures_builders(name: str):
    build = BUILDERS[name]
    build(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = build(5000, device="cuda")
    assert mask._base is not None
    mask._base.fill_(-7)
    graph.replay()
    assert_same(mask, build(5000, device="cpu"), sizes=name != "bigbird")  # whose sizes are bounds here


@pytest.mark.gpu
def test_a_replay_makes_the_mask_of_the_documents_of_that_moment():
    edges = torch.tensor(EDGES, dtype=torch.int32, device="cuda")
    BlockMask.documents(edges, EDGES[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = BlockMask.documents(edges, EDGES[-1])
    for shift in (0, 100, 250):
        now = [0, *(each - shift for each in EDGES[1:-1]), EDGES[-1]]
        edges.copy_(torch.tensor(now))
        graph.replay()
        assert_same(mask, BlockMask.documents(torch.tensor(now), EDGES[-1]), sizes=False)


@pytest.mark.gpu
def test_wrong_edges_are_told_of_when_the_mask_is_used():
    for edges in ([0, 300, 200, 500], [3, 300, 500], [0, 300, 501]):
        mask = BlockMask.documents(torch.tensor(edges, dtype=torch.int32, device="cuda"), 500)
        refused("cu_seqlens is wrong at document", mask.verify, wait=True)
    BlockMask.documents(torch.tensor([0, 300, 300, 450], device="cuda"), 500).verify(wait=True)


@pytest.mark.gpu
def test_lengths_on_the_host_are_not_captured():
    BlockMask.block_diagonal(LENGTHS, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(1, device="cuda").fill_(0)  # torch warns of an empty graph
        refused("while a CUDA graph is captured", BlockMask.block_diagonal, LENGTHS, device="cuda")
