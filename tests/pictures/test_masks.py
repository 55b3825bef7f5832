"""Pictures of block masks: full, partial and absent blocks show where they are, also where the grid is binned."""

import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from sparsek.pictures import blocks as spy
from sparsek.pictures import masks
from sparsek.pictures.masks import MaskBins, plot
from tests.attn.attention_cases import ATTENTION_CASES, random_bits
from tests.pictures.test_blocks import panel

MASKS = {case.note: case.mask for case in ATTENTION_CASES}


def drawn(text: str) -> list[str]:
    """The lines between the frame."""
    return [line[1:-1] for line in text.splitlines() if line.startswith("│")]


def kinds(mask: BlockMask, head: int = 0, batch: int = 0) -> np.ndarray:
    """What each block of a head is: 0 absent, 1 partial, 2 full. [Mb, Nb]."""
    found = np.zeros(mask.grid, int)
    for kind, lists in ((1, mask.host.partial), (2, mask.host.full)):
        for i in range(mask.grid[0]):
            r = (batch * mask.heads + head) * mask.grid[0] + i
            found[i, lists.indices[lists.starts[r] : lists.starts[r] + lists.counts[r]]] = kind
    return found


def test_a_small_mask_is_drawn_block_by_block():
    mask = BlockMask.sliding_window(300, 100, block=64)
    assert plot(mask) == (
        "┌──────────┐\n"
        "│▒▒        │\n"
        "│▒▒▒▒      │\n"
        "│▒▒▒▒▒▒    │\n"
        "│  ▒▒▒▒▒▒  │\n"
        "│    ▒▒▒▒▒▒│\n"
        "└──────────┘\n"
        f"{mask!r}\n"
        "█ full, ▒ partial"
    )


@pytest.mark.parametrize("name", MASKS)
def test_every_block_is_drawn_as_what_it_is(name: str):
    mask = MASKS[name]("cpu")
    head, item = mask.heads - 1, mask.batch - 1
    shown = np.array([" ", "▒", "█"])[kinds(mask, head, item)]
    expected = shown.repeat(2 if mask.grid[1] <= 32 else 1, axis=1)
    text = mask.plot(head=head, batch=item)
    assert "blocks; ░▒▓█" in text or drawn(text) == ["".join(line) for line in expected]
    assert (f"head {head} of 0 to {head}" in text) == (mask.heads > 1)
    assert (f"batch item {item} of 0 to {item}" in text) == (mask.batch > 1)


def test_wide_grids_take_one_character_for_a_block():
    lines = drawn(plot(BlockMask.causal(q_len=128, kv_len=64 * 64, block=64)))
    assert lines == ["█" * 62 + "▒ ", "█" * 63 + "▒"]


def test_a_large_mask_is_binned_and_shaded():
    text = plot(BlockMask.causal(64 * 256, block=64))
    lines = drawn(text)
    assert (len(lines), {len(line) for line in lines}) == (32, {64})
    assert lines[0] == "▓░" + " " * 62
    assert lines[31] == "█" * 62 + "▓░"
    assert "one character is 8 x 4 blocks" in text


@given(tiles=st.integers(1, 200), columns=st.integers(1, 200), seed=st.integers(0, 99))
def test_a_single_block_of_any_grid_shows(tiles: int, columns: int, seed: int):
    rng = np.random.default_rng(seed)
    row, column = int(rng.integers(tiles)), int(rng.integers(columns))
    indptr = (torch.arange(tiles + 1) > row).to(torch.int32)
    indices = torch.tensor([column], dtype=torch.int32)
    lines = drawn(plot(BlockMask.from_blocks(indptr, indices, 64 * tiles, 64 * columns, 64)))
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 64
    assert len("".join(lines).replace(" ", "")) == (2 if columns <= 32 and tiles <= 32 else 1)


@pytest.mark.parametrize("entries", [1, 7, 1 << 22])
def test_blocks_are_counted_into_bins_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch, entries: int):
    monkeypatch.setattr(masks, "ENTRIES", entries)
    mask = random_bits("cpu", (1000, 800), (64, 64), heads=3, batch=2, density=0.6)
    for item, head in ((0, 0), (1, 1)):
        shown = mask.drawn(head, item)
        bins = MaskBins.counted(shown, spy.Bins(shown.blank, (3, 2), (6, 7), (1, 1)))
        blocks = np.zeros((18, 14), int)
        blocks[:16, :13] = kinds(mask, head, item)
        for kind, counts in ((1, bins.partial), (2, bins.full)):
            assert np.array_equal(counts, (blocks == kind).reshape(6, 3, 7, 2).sum((1, 3)))


def test_a_long_mask_needs_no_memory_for_all_its_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "ENTRIES", 1 << 16)
    mask = BlockMask.causal(1 << 18, block=64)  # 4096 x 4096 blocks, 8 million of them stored
    plot(mask)
    tracemalloc.start()
    plot(mask)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8_000_000


@pytest.mark.parametrize("lengths", [(0, 64), (64, 0)], ids=str)
def test_a_mask_without_blocks_is_an_empty_frame(lengths: tuple[int, int]):
    assert plot(BlockMask.full(q_len=lengths[0], kv_len=lengths[1])).startswith("┌┐\n└┘\nBlockMask(")


ABSENT, PARTIAL, FULL = [0xED, 0xEF, 0xF3], [0xD3, 0x43, 0x6E], [0x12, 0x35, 0x5B]


@pytest.mark.parametrize("name", ["causal", "bits per item and query head", "window and sinks", "no blocks"])
def test_the_svg_shows_every_block_as_what_it_is(tmp_path: Path, name: str):
    mask = MASKS[name]("cpu")
    head, item = mask.heads - 1, mask.batch - 1
    assert plot(mask, tmp_path / "a.svg", head, item) == plot(mask, head=head, batch=item)
    colours = np.array([ABSENT, PARTIAL, FULL])[kinds(mask, head, item)]
    assert np.array_equal(panel(tmp_path / "a.svg"), colours)


def test_a_binned_svg_shows_every_bin_with_a_block(tmp_path: Path):
    mask = BlockMask.sliding_window(64 * 300, 2000, sinks=4, block=64)
    plot(mask, tmp_path / "a.svg", max_pixels=240)
    cells = panel(tmp_path / "a.svg")
    blocks = kinds(mask).reshape(60, 5, 60, 5)
    assert np.array_equal((cells != ABSENT).any(2), (blocks > 0).any((1, 3)))
    assert cells[40, 37].tolist() == FULL
    assert cells[40, 0, 0] > cells[40, 0, 2]  # reddish: the sinks' column is partial


@pytest.mark.parametrize("name", ["causal", "one query", "one key", "documents per item"])
def test_any_mask_gives_a_picture(tmp_path: Path, name: str):
    plot(MASKS[name]("cpu"), tmp_path / "a.SVG", title="$x_{ " + 50 * "long ", max_pixels=64)
    assert ElementTree.parse(tmp_path / "a.SVG").getroot().tag.endswith("svg")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    mask = random_bits("cpu", (64, 64), (64, 64), heads=3)
    with pytest.raises(InvalidInput, match="head is 3; it must be an int from 0 to 2"):
        plot(mask, head=3)
    with pytest.raises(InvalidInput, match="batch is -1; it must be an int from 0 to 0"):
        plot(mask, batch=-1)
    with pytest.raises(InvalidInput, match=r"a\.pdf'; pictures are SVG, so its name must end in \.svg"):
        plot(mask, tmp_path / "a.pdf")
    with pytest.raises(InvalidInput, match=r"max_pixels is .*; it must be an int from 64 to 4096"):
        plot(mask, tmp_path / "a.svg", max_pixels=5000)
    assert not list(tmp_path.iterdir())
