"""Reports of whole models: the page with its pictures, measured times, and what the planner picks."""

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
from sparsek.products.ops import choose

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


def wide() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 8))


def test_the_planner_picks_the_fastest_form_within_an_error() -> None:
    model: Any = wide()
    options: Any = {"card": "h200", "tokens": 65536}
    report = sk.sparsify_(model, "auto", max_error=0.5, **options)
    assert [row.name for row in report.replaced] == ["0", "2"]
    for row in report.replaced:
        assert f"within an error of 0.5: {row.speed:.2f}x at an error of {row.error:.3g}" in row.why
        weight = wide()[int(row.name)].weight.detach()
        alone = choose.choose_format((65536, weight.shape[1]), weight, max_error=0.5, device="h200").choice
        assert alone.name == row.format
        assert alone.error == pytest.approx(row.error, rel=0.1)
        assert isinstance(model[int(row.name)], sk.nn.SparseLinear)
    assert report.rows[2].why_not == "no form is predicted to be faster on NVIDIA H200"
    close = sk.sparsify_(wide(), "auto", max_error=0.001, **options)
    assert not close.replaced
    assert "no faster form is within an error of 0.001; dense fp8, " in close.rows[0].why_not


def test_the_planner_reaches_a_speed_with_small_errors() -> None:
    losses = []
    for speedup in (1.2, 1.6):
        report = sk.sparsify_(wide(), "auto", speedup=speedup, card="h200", tokens=65536)
        assert (report.speed or 0) > speedup * 0.98  # of which layers that stay dense are no part
        losses.append(sum(row.error or 0 for row in report.replaced))
    assert 0 < losses[0] < losses[1]
    rules: Any = {"0": "auto", "2": HALF}
    mixed = sk.sparsify_(wide(), rules, max_error=0.05, card="h200", tokens=65536)
    assert [row.format for row in mixed.rows] == ["dense fp8", "BSR 32 50 %", ""]
    with pytest.raises(InvalidInput, match=r"speedup=50 is out of reach: .* predicted at \d"):
        sk.sparsify_(wide(), "auto", speedup=50, card="h200", tokens=65536)
    with pytest.raises(InvalidInput, match='max_error is for the config "auto"'):
        sk.sparsify_(wide(), HALF, max_error=0.5)
    with pytest.raises(InvalidInput, match="0 is on the meta device"):
        sk.sparsify_(wide().to("meta"), "auto", max_error=0.5)


def test_a_report_names_the_dtype_of_predictions_and_layers_without_one() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    rules = {"0": sk.BlockSparse(128, 0.25), "1": sk.BlockSparse(64, 0.05)}
    report = sk.sparsify_(copy.deepcopy(model), rules, card="h200")
    assert [row.seconds is None for row in report.rows] == [True, False]
    assert report.rows[0].why == (
        "no kernel for GPUs is predicted to beat plain torch in fp32 on NVIDIA H200; cast the model to bf16"
    )
    assert "; the products of the 1 whose time is predicted take " in str(report)
    assert " tokens in fp32, predicted for NVIDIA H200" in str(report)
    low = sk.sparsify_(model.to(torch.bfloat16), rules, card="h200")
    assert {row.dtype for row in low.rows} == {"bf16"}
    assert "; their products take " in str(low)


@pytest.mark.parametrize(
    ("sides", "config"),
    [
        ((160, 320), sk.BlockSparse(128, 0.5)),
        ((128, 256), sk.BlockSparse(96, 0.5)),
        ((160, 320), sk.BlockSemiSparse(128, 0.5)),
        ((128, 256), sk.BlockSparse(64, 0.5)),
    ],
    ids=str,
)
def test_the_kept_share_leaves_out_what_blocks_hold_beyond_the_edge(
    sides: tuple[int, int], config: Any
) -> None:
    model = nn.Sequential(nn.Linear(sides[1], sides[0]))
    (row,) = sk.sparsify_(model, config).rows
    layer: Any = model[0]
    assert row.kept == pytest.approx(float((layer.weight.to_dense() != 0).float().mean()), abs=1e-3)


def test_dense_layers_in_fp8_are_not_called_sparse_and_numbers_in_names_are_kept() -> None:
    block = nn.ModuleDict({"fc1": nn.Linear(128, 128), "fc2": nn.Linear(128, 128)})
    model: Any = nn.Sequential(block, copy.deepcopy(block))
    text = str(sk.sparsify_(copy.deepcopy(model), {"*fc1": sk.Float8()}))
    assert text.startswith("2 of 4 layers are dense in FP8\n")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["*.fc1", "*.fc2"]
    text = str(sk.sparsify_(model, {"*fc1": sk.Float8(), "*fc2": HALF}))
    assert text.startswith("2 of 4 layers are sparse, 2 dense in FP8\n")


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (HALF, "BSR 32 50 %"),
        (sk.SemiSparse(), "2:4"),
        (sk.BlockSemiSparse((64, 128), 0.5), "BSR24 64x128 50 %"),
        (sk.Float8(HALF), "BSR 32 50 % fp8"),
        (sk.Float8(sk.SemiSparse()), "2:4 fp8"),
    ],
    ids=str,
)
def test_layers_that_were_sparse_before_are_not_called_dense(config: Any, form: str) -> None:
    model = wide()
    sk.sparsify_(model, {"0": config})
    report = sk.sparsify_(model, {"2": HALF, "0": sk.SemiSparse()})
    assert [row.format for row in report.rows] == [form, "BSR 32 50 %", ""]
    assert [row.name for row in report.replaced] == ["2"]
    assert [row.name for row in report.skipped] == ["0", "3"]
    assert str(report).startswith("2 of 3 layers are sparse\n")
    line = str(report).splitlines()[2]
    assert form in line
    assert line.endswith("is sparse already; sk.densify_ makes it dense")
    assert f"<td>{form}</td>" in report.html()
    with pytest.raises(InvalidInput, match="no more layer to prune; 2 are sparse already"):
        sk.prune(model[:3], HALF, method="magnitude", reconstruct=None)


def test_a_report_says_why_a_named_kernel_does_not_run() -> None:
    report = sk.sparsify_(nn.Sequential(nn.Linear(1024, 1000)).bfloat16(), sk.Float8(), card="h200")
    assert report.rows[0].why == "vendor.cublas_fp8: K and M must be multiples of 16, not 1024 and 1000"


def test_a_rule_for_an_embedding_has_a_row_that_says_why_it_stays() -> None:
    for rule in ("0", "?", nn.Embedding):
        model = nn.Sequential(nn.Embedding(16, 256), nn.Linear(256, 256))
        report = sk.prune(model, {rule: HALF, "1": HALF, "*": None}, method="magnitude", reconstruct=None)
        rows = {row.name: row.why_not for row in report.skipped}
        assert rows == ({} if rule == "?" else {"0": "is no linear layer, but of Embedding"})
