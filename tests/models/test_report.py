"""Reports of whole models: the page with its pictures, and measured times."""

import copy
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import sparsek as sk
from sparsek.core.errors import InvalidInput

HALF = sk.BlockSparse(block=32, keep=0.5)


def test_the_page_of_a_report_is_one_file_with_pictures(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64), nn.Linear(64, 3))
    model.add_module("<b>&", nn.Linear(64, 64))
    report = sk.sparsify_(
        model, {"2": HALF, "1": sk.SemiSparse(), "*": sk.BlockSparse(16, 0.25)}, card="h200"
    )
    page = report.html()
    assert page.count("<figure>") == 3
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert "1x2 blocks of 32x32" in page
    assert not re.findall(r"(?:src|href)=|<script", page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert [ElementTree.fromstring(each).attrib["width"] for each in pictures] == ["192"] * 3
    picture = report.rows[0].picture
    assert picture is not None
    assert picture.shape == (8, 8)
    assert picture.sum() == 16
    detail = report.rows[1].detail
    assert report.rows[1].picture is None
    assert detail is not None
    half: Any = model[1]
    assert (detail == (half.to_dense()[:16, :32] != 0).numpy()).all()
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    for wrong in ("report.pdf", tmp_path / "none" / "report.html"):
        with pytest.raises(InvalidInput):
            report.to_html(wrong)


def test_blocks_with_2_of_4_inside_have_both_pictures() -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    (row,) = sk.sparsify_(model, sk.Float8(sk.BlockSemiSparse(64, 0.5))).rows
    assert row.picture is not None
    assert row.detail is not None
    assert (row.detail.reshape(16, 8, 4).sum(-1) == 2).all()
    assert (
        sk.sparsify_(nn.Sequential(nn.Linear(128, 128, device="meta")), sk.SemiSparse()).rows[0].detail
        is None
    )


def test_a_model_is_measured_on_a_batch_beside_the_dense_one() -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64)).train()
    modes: list[bool] = []
    model[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    rules: Any = {"0": sk.BlockSparse(16, 0.5), "2": None}
    whole = sk.sparsify_(copy.deepcopy(model), rules, measure={"input": torch.ones(5, 64)})
    assert whole.measured is not None
    assert whole.measured.card == "cpu"
    assert min(whole.measured.seconds, whole.measured.dense_seconds) > 0
    assert [row.measured_speed is None for row in whole.rows] == [False, True]
    share = whole.measured.seconds / whole.measured.dense_seconds
    assert f"the model takes {share:.3g}x the time, measured on cpu" in str(whole)
    assert "  measured  " in str(whole)
    assert '<th class="n">measured speed</th>' in whole.html()
    weight = model[0].weight
    for batch, said in (
        (torch.ones(5, 3), "Sequential does not take the batch of measure="),
        (3, "measure is 3"),
    ):
        with pytest.raises(InvalidInput, match=said):
            sk.sparsify_(model, rules, measure=batch)
        assert model[0].weight is weight
    found = sk.sparsify_(model, rules, measure=(torch.ones(5, 64),))
    assert found.measured is not None
    assert model.training
    assert model[1].training
    assert not any(modes)
