"""Pictures: what they show of the records, and how they are drawn."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import report as pages
from sparsek_bench import charts, figures
from sparsek_bench.engine.records import Record
from sparsek_bench.figures import Line, Panel, Picture
from sparsek_bench.suites.attention import AttentionCase
from sparsek_bench.suites.host import HOST
from sparsek_bench.suites.spmm import SpmmCase

Make = Callable[..., Record]
WINDOW = AttentionCase(1, 8, 8, 8192, 8192, 128, 128, "window:4096+sinks:128")
RANDOM = AttentionCase(1, 16, 16, 8192, 8192, 128, 128, "blocks:0.125")


def times(median: float) -> dict[str, float]:
    return {"median": median, "min": median, "max": median, "rounds": 7}


def product(make: Make, block: int, density: float, ms: float, torch_ms: float | None = None) -> Record:
    """A record beside a dense peer of 1.6 ms, and torch.sparse if a time is given."""
    record = make(SpmmCase(8192, 8192, 8192, (block, block), density), ms=times(ms))
    if torch_ms is None:
        return record
    peer = {"torch_sparse": {"ms": times(torch_ms), "tflops": 1.0}}
    return record | {
        "peers": record["peers"] | peer,
        "ratio": record["ratio"] | {"torch_sparse": torch_ms / ms},
    }


def attended(make: Make, case: AttentionCase, rate: float, peers: dict[str, float]) -> Record:
    record = make(case, tflops={"useful": rate, "dense_equivalent": rate})
    more = {name: {"ms": times(1.0), "tflops": each, "memory": 0.02} for name, each in peers.items()}
    return record | {"peers": more, "ratio": dict.fromkeys(more, 1.0), "memory": 0.01}


def lines_of(panel: Panel) -> dict[str, Line]:
    return {line.label: line for line in panel.lines}


@pytest.fixture
def found(make_record: Make) -> list[Record]:
    """Records that fill every picture."""
    products = [
        product(make_record, block, density, 0.8 * density * (128 / block) ** 0.5, density)
        for block in (128, 32)
        for density in (0.5, 0.125, 0.25)
    ]
    attentions = [
        attended(
            make_record, replace(case, q_len=length, kv_len=length), 600.0, {"fa4": 500.0, "flex": 200.0}
        )
        for case in (RANDOM, WINDOW, replace(RANDOM, mask="causal"))
        for length in (8192, 2048)
    ]
    attentions.append(attended(make_record, replace(RANDOM, mask="blocks:0.5"), 650.0, {"cudnn_bsa": 600.0}))
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    host = make_record(HOST[0].case, ms=times(0.015), **nulls)
    return [*products, *attentions, host | {"peers": {"torch": {"ms": times(0.012), "tflops": None}}}]


def test_speedup_is_the_dense_time_over_each_time(make_record: Make) -> None:
    rows = [product(make_record, 128, 0.25, 0.4, 0.8), product(make_record, 128, 0.5, 0.8)]
    panels, shown = figures.speedups(rows)
    assert [panel.title for panel in panels] == ["Block 128"]
    lines = lines_of(panels[0])
    assert lines["SparseK"] == Line("SparseK", ((0.5, 2.0), (0.25, 4.0)), "4.0×")
    assert lines["torch.sparse"] == Line("torch.sparse", ((0.25, 2.0),), "2.0×")
    assert lines["dense"].points == ((0.5, 1.0), (0.25, 1.0))
    assert lines["1/density"].points == ((0.5, 2.0), (0.25, 4.0))
    assert len(shown) == 2


def test_blocks_stand_side_by_side_over_the_same_axes(make_record: Make) -> None:
    rows = [
        product(make_record, block, density, density, 4.0) for block in (16, 128) for density in (0.5, 0.25)
    ]
    picture = figures.density([*rows, product(make_record, 64, 0.5, 1.0)])
    assert picture is not None
    assert [panel.title for panel in picture.panels] == ["Block 128", "Block 16"]
    assert [panel.labelled for panel in picture.panels] == [False, True]
    assert len({(panel.x, panel.y) for panel in picture.panels}) == 1
    low, high = picture.panels[0].y.limits
    assert all(low <= y <= high for panel in picture.panels for line in panel.lines for _, y in line.points)


def test_only_the_newest_record_of_the_fastest_kernel_is_shown(make_record: Make) -> None:
    old = product(make_record, 128, 0.5, 0.1) | {"date": "2020-01-01T00:00:00+00:00"}
    slow = product(make_record, 128, 0.5, 1.6) | {"kernel": "reference.spmm"}
    rows = [old, slow, product(make_record, 128, 0.5, 0.8), product(make_record, 128, 0.25, 0.4)]
    (panel,), _ = figures.speedups(rows)
    assert lines_of(panel)["SparseK"].points == ((0.5, 2.0), (0.25, 4.0))


def test_without_a_second_density_or_a_dense_time_nothing_is_drawn(make_record: Make, tmp_path: Path) -> None:
    one = product(make_record, 128, 0.5, 0.8)
    alone = product(make_record, 128, 0.25, 0.4) | {"peers": {}, "ratio": {}}
    assert figures.density([one]) is None
    assert figures.density([one, alone]) is None
    assert charts.stamps([one, alone]) == {}
    assert charts.draw([one, alone], tmp_path / "pictures") == []
    assert not (tmp_path / "pictures").exists()


def test_densities_that_lie_close_share_no_axis(make_record: Make) -> None:
    rows = [product(make_record, 128, density, 0.8) for density in (0.5, 0.25, 14 / 64, 0.03125)]
    (panel,), _ = figures.speedups(rows)
    assert panel.x.ticks == ((0.5, "50"), (0.25, "25"), (0.03125, "3.1"))
    assert [x for x, _ in lines_of(panel)["SparseK"].points] == [0.5, 0.25, 0.03125]


def test_attention_is_shown_over_length_and_over_density(found: list[Record]) -> None:
    picture = figures.attention(found)
    assert picture is not None
    assert [panel.title for panel in picture.panels] == [
        "Causal mask", "12.5 % of the blocks", "8K tokens, random blocks"
    ]  # fmt: skip
    causal, random, shares = map(lines_of, picture.panels)
    assert causal["SparseK"].points == random["SparseK"].points == ((2048, 600.0), (8192, 600.0))
    assert random["FlashAttention-4"].points == ((2048, 500.0), (8192, 500.0))
    assert shares["SparseK"].points == ((0.5, 650.0), (0.125, 600.0))
    assert shares["cuDNN"].points == ((0.5, 600.0),)


def test_memory_is_in_megabytes(found: list[Record]) -> None:
    picture = figures.memory(found)
    assert picture is not None
    lines = lines_of(picture.panels[0])
    operands = 4 * 8 * 8192 * 128 * 2 / 1e6
    assert lines["q, k, v, output"].points[-1] == (8192, pytest.approx(operands))
    assert lines["SparseK"].points[-1] == (8192, pytest.approx(0.01 * operands))
    assert lines["FlexAttention"].points[-1] == (8192, pytest.approx(0.02 * operands))
    assert lines["bool mask"].points[-1] == (8192, 8192**2 / 1e6)


def test_host_times_stand_in_pairs(found: list[Record]) -> None:
    picture = figures.host(found)
    assert picture is not None
    (panel,) = picture.panels
    assert panel.pairs
    assert lines_of(panel)["SparseK"].points == ((pytest.approx(15.0), 1.0),)
    assert lines_of(panel)["torch"].points == ((pytest.approx(12.0), 1.0),)
    assert panel.y.ticks == ((1.0, "A @ B, 1024³ block 64 25 %"),)


def test_every_picture_is_drawn_for_light_and_dark_pages(found: list[Record], tmp_path: Path) -> None:
    drawn = charts.draw(found, tmp_path)
    assert {path.name for path in drawn} == {
        f"{name}-{theme}.svg" for name in figures.PICTURES for theme in ("light", "dark")
    }
    for path in drawn:
        text = path.read_text()
        root = ElementTree.fromstring(text)
        width, height = (float(root.attrib[side]) for side in ("width", "height"))
        assert 2 * height <= 3 * width <= 4 * 1080
        assert "SparseK" in text
        assert charts.stamp_in(text) == charts.stamps(found)[path.name]
    light, dark = (tmp_path / f"front-{theme}.svg" for theme in ("light", "dark"))
    assert light.read_text() != dark.read_text()
    before = light.read_bytes()
    charts.draw(found, tmp_path)
    assert light.read_bytes() == before
    assert [question for question, _ in charts.pictures(found)] == [
        picture.question for make in list(figures.PICTURES.values())[1:] if (picture := make(found))
    ]


def test_a_stamp_follows_the_numbers_and_the_code(
    found: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = charts.stamps(found)
    slower = [found[0] | {"ms": times(found[0]["ms"]["median"] * 1.01)}, *found[1:]]
    changed = {name for name, stamp in charts.stamps(slower).items() if stamp != before[name]}
    assert changed == {
        f"{name}-{theme}.svg" for name in ("front", "spmm-density") for theme in ("light", "dark")
    }
    monkeypatch.setattr(charts, "code_hash", lambda: "other")
    assert not set(charts.stamps(found).items()) & set(before.items())
    assert charts.stamp_in("<svg/>") == ""


def test_pictures_that_differ_from_the_records_are_found(found: list[Record], tmp_path: Path) -> None:
    folder = tmp_path / pages.PICTURES
    assert len(pages.differing_pictures(tmp_path, found)) == 2 * len(figures.PICTURES)
    charts.draw(found, folder)
    (folder / "by-hand.svg").write_text("<svg/>")
    assert pages.differing_pictures(tmp_path, found) == []
    few = [record for record in found if record["op"] != "host"]
    assert [path.name for path in pages.differing_pictures(tmp_path, few)] == [
        "host-time-dark.svg",
        "host-time-light.svg",
    ]
    (folder / "front-dark.svg").write_text("<svg/>")
    assert [path.name for path in pages.differing_pictures(tmp_path, found)] == ["front-dark.svg"]


def test_names_behind_lines_do_not_touch() -> None:
    """Lines that end at the same place: their names keep 18 pixels, inside the panel."""
    x = figures.Axis("x", ((1, "1"), (2, "2")), (1, 2))
    y = figures.Axis("y", (), (0.0, 10.0), log=False)
    lines = tuple(Line(f"line {index}", ((1, 9.0), (2, 9.9))) for index in range(4))
    text = charts.svg(Picture("?", (400, 380), (Panel("t", x, y, lines),), "note"), "light")
    root = ElementTree.fromstring(text)
    named = [
        each
        for each in root.iter("{http://www.w3.org/2000/svg}text")
        if (each.text or "").startswith("line ")
    ]
    places = sorted(float(each.attrib["y"]) for each in named)
    assert len(places) == 4
    assert all(b - a >= 17.9 for a, b in pairwise(places))
    assert places[0] >= charts.TOP - 1
