"""Kernels of masks, without a GPU: that they compile, and what closed forms of sizes say."""

from typing import Any

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
from tests.attn.kernels.mask.same import frame, places


@pytest.mark.parametrize("card", ["sm_80", "sm_90"])
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
    band, near = Band.of(place, None, 1 if causal else None), place.blocks(window)
    strided = BlockMask.strided(stride=step * bk, window=window, causal=causal, **frame(place))
    found = counted_steps(place, band, Steps.strided(place, step, near, both))
    assert found == (strided.sizes, strided.heavy_blocks)
    dilated = BlockMask.dilated(window=window, dilation=step, causal=causal, **frame(place))
    found = counted_steps(place, band, Steps.dilated(place, step, near, both))
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
