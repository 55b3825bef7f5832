"""Kernels of masks in closed form, in Triton's interpreter: the same masks as numpy makes, list by list."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.integrations import flash_attention
from tests.attn.kernels.mask.same import assert_same, by_kernels, frame, places

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FEW = settings(max_examples=7)
TOKENS = st.integers(1, 500)


@given(places(), st.booleans())
@FEW
def test_causal_and_full(place: Place, causal: bool):
    build: Any = BlockMask.causal if causal else BlockMask.full
    assert_same(by_kernels(lambda: build(**frame(place))), build(**frame(place)))


@given(places(), TOKENS, st.one_of(st.just(0), st.sampled_from((64, 128, 256)), TOKENS), st.booleans())
@FEW
def test_windows_and_sinks(place: Place, window: int, sinks: int, causal: bool):
    def build() -> BlockMask:
        return BlockMask.sliding_window(window=window, sinks=sinks, causal=causal, **frame(place))

    assert_same(by_kernels(build), build())


@given(places(), st.one_of(st.none(), TOKENS), st.one_of(st.none(), TOKENS))
@FEW
def test_windows_of_other_sides(place: Place, left: int | None, right: int | None):
    def build() -> BlockMask:
        return flash_attention._uneven(BlockMask, left, right, **frame(place))

    assert_same(by_kernels(build), build())


@given(places(), st.integers(1, 5), TOKENS, st.booleans())
@FEW
def test_strided(place: Place, step: int, window: int, causal: bool):
    def build() -> BlockMask:
        return BlockMask.strided(stride=step * place.block[1], window=window, causal=causal, **frame(place))

    assert_same(by_kernels(build), build())


@given(places(), TOKENS, st.integers(1, 4), st.booleans())
@FEW
def test_dilated(place: Place, window: int, dilation: int, causal: bool):
    def build() -> BlockMask:
        return BlockMask.dilated(window=window, dilation=dilation, causal=causal, **frame(place))

    assert_same(by_kernels(build), build())


@given(places(), TOKENS, st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**64), st.booleans())
@FEW
def test_bigbird(place: Place, window: int, globals: int, random: int, seed: int, causal: bool):
    def build() -> BlockMask:
        return BlockMask.bigbird(
            window=window, globals=globals, random=random, seed=seed, causal=causal, heads=2, **frame(place)
        )

    made, wanted = by_kernels(build), build()
    assert_same(made, wanted, sizes=made.sizes.exact)
    assert all(true <= said for true, said in zip(wanted.sizes[:3], made.sizes[:3], strict=True))
    assert made.sizes.exact or place.kv_len % place.block[1]
