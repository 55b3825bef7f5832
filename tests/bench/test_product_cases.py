"""Cases of A @ B, SDDMM, BSR x BSR, linear layers and MLPs: names, records, suites, what their operands are."""

from dataclasses import replace

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import named, parse_block
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine.case import block_name
from sparsek_bench.suites import spgemm
from sparsek_bench.suites.mlp import MlpDecodeCase
from sparsek_bench.suites.spgemm import SpgemmCase
from sparsek_bench.suites.spmm import FORMS, SUITES, SpmmCase
from tests.bench.runs import CPU, LINEAR, SDDMM, SPGEMM, TRAIN

DECODE = MlpDecodeCase(1, 64, 128, (32, 32), 0.5, dtype="fp32")


def test_names_are_short_and_tell_cases_apart() -> None:
    assert SpmmCase(8192, 8192, 8192, (128, 128), 0.125).name == "8192³ block 128 12.5 % bf16"
    assert SpmmCase(16384, 16384, 16, (64, 64), 0.25).name == "16384²×16 block 64 25 % bf16"
    assert (
        SpmmCase(64, 32, 16, (32, 16), 1.0, "banded", "fp16").name == "64×32×16 block 32x16 100 % banded fp16"
    )
    assert SpmmCase(64, 32, 16, (16, 16), 0.5, form="B@A.T").name == "B @ A.T 64×32×16 block 16 50 % bf16"
    assert SDDMM.name == "64×96×80 block 32x16 50 % fp32"
    assert replace(SDDMM, pattern="powerlaw").name == "64×96×80 block 32x16 50 % powerlaw fp32"
    assert SPGEMM.name == "64×96×80 block 32x48·48x16 50 % fp32 to dense"
    assert spgemm.SPARSE[0].name == "8192³ block 64 3 % bf16 to bsr"
    assert LINEAR.name == "24 tokens, 64 to 96, block 32 50 % fp32, bias + gelu + residual"
    assert replace(LINEAR, epilogue="").name.endswith("fp32, plain")
    assert DECODE.name == "64 to 128 to 64 gelu, block 32 50 % fp32, 1 token"
    assert (
        replace(TRAIN, mode="compiled").name
        == "64 to 128 to 64 gelu, block 32 50 % fp32, 24 tokens, compiled"
    )


def test_useful_flops_count_what_is_stored() -> None:
    (one, *_) = SDDMM.operands(CPU)
    assert one.useful_flops == 2 * one.given[2].nnzb * 32 * 16 * 96
    (both, *_) = SPGEMM.operands(CPU)
    rows, columns = both.a.to_dense() != 0, both.b.to_dense() != 0
    assert both.useful_flops == 2 * float((rows.double() @ columns.double()).sum())
    (layer, *_) = LINEAR.operands(CPU)
    assert layer.useful_flops == 2 * layer.a.values.numel() * 24
    (step, *_), (decode, *_) = TRAIN.operands(CPU), DECODE.operands(CPU)
    assert step.useful_flops == 6 * 24 * (step.w1.values.numel() + step.w2.values.numel())
    assert decode.useful_flops == 2 * (decode.w1.values.numel() + decode.w2.values.numel())
    assert TRAIN.dense_flops / step.useful_flops == DECODE.dense_flops / decode.useful_flops == 2


def test_every_block_column_of_b_holds_as_many_blocks_as_every_block_row_of_a() -> None:
    case = SpgemmCase(512, 112 * 12, 512, (128, 112), (112, 128), 4 / 12, dtype="fp32")
    one = case.operands(CPU)[0]
    a, b = one.a, one.b
    assert a.pattern.row_lengths.tolist() == [4] * 4
    assert b.pattern.T.row_lengths.tolist() == [4] * 4
    assert b.block == (112, 128)
    assert b.order is None


def test_products_of_lists_take_every_combination() -> None:
    sizes = {"m": "64", "k": "64,128", "n": "64", "dtype": "fp16"}
    assert len(set(BENCHES["sddmm"].cases(sizes | {"block": "16", "density": "0.5,1.0"}))) == 4
    blocks = {"block": "32:32,32x16:16x64", "density": "0.5", "result": "dense,bsr"}
    assert len(set(BENCHES["spgemm"].cases(sizes | blocks))) == 8
    layers = {"tokens": "64", "k": "64,128", "n": "64", "block": "16", "density": "0.5", "dtype": "fp16"}
    assert len(set(BENCHES["linear"].cases(layers | {"epilogue": ",bias"}))) == 4
    few = {"tokens": "1,8", "width": "64", "hidden": "64", "block": "16", "density": "0.5", "dtype": "fp16"}
    made = BENCHES["mlp"].cases(few | {"measure": "train,compiled,decode"})
    assert [(case.op, case.tokens) for case in made[::2]] == [
        ("mlp_train", 1),
        ("mlp_train", 1),
        ("mlp_decode", 1),
    ]
    assert [getattr(case, "mode", "") for case in made] == ["eager"] * 2 + ["compiled"] * 2 + [""] * 2
    assert {case.dtype for case in made} == {"fp16"}
    with pytest.raises(InvalidInput, match="measure is one of train, compiled, decode, got 'serve'"):
        BENCHES["mlp"].cases(few | {"measure": "serve"})


def test_blocks_of_both_matrices_are_read_as_people_write_them() -> None:
    assert spgemm.parse_blocks("128") == ((128, 128), (128, 128))
    assert spgemm.parse_blocks("512x112:112x128") == ((512, 112), (112, 128))
    for text in ("", ":", "128:", "x:16"):
        with pytest.raises(InvalidInput, match="a block is written as"):
            spgemm.parse_blocks(text)
    with pytest.raises(InvalidInput, match="for A and B, got '16:16:16'"):
        spgemm.parse_blocks("16:16:16")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_product_it_is_named_after(form: str) -> None:
    """The gate judges the form; here dense matrices say what it is."""
    case = SpmmCase(64, 96, 48, (32, 32), 0.5, dtype="fp32", form=form)
    (one, *_) = case.operands(CPU)
    dense = one.a.to_dense()
    named = {"A@B": dense, "A.T@B": dense.T, "B@A": dense, "B@A.T": dense.T}[form]
    wanted = one.b @ named if form.startswith("B") else named @ one.b
    assert one.out.shape == case.out_shape == wanted.shape
    assert one.judge(wanted).passed
    assert not one.judge(wanted * 1.01).passed
    one.planned(one.plan(None))()
    torch.testing.assert_close(one.out, wanted)
    assert one.useful_flops == 2 * one.a.nnzb * 32 * 32 * 48
    full = one.dense(7)
    full()
    assert torch.isfinite(one.out).all()
    assert not torch.allclose(one.out, wanted)


def test_blocks_of_512x112_are_compared_with_as_many_values_in_blocks_of_128() -> None:
    cases = {
        block_name(entry.case.block): entry.case for entry in SUITES["blocks"] if entry.case.density > 0.2
    }
    odd = cases["512x112"]
    rows, columns = 8192 // 512, -(-8192 // 112)
    each = round(odd.density * columns)
    assert each == 16
    even = next(e.case for e in SUITES["blocks"] if e.case.block == (128, 128) and e.case.density == 14 / 64)
    assert rows * each * 512 * 112 == 64 * round(even.density * 64) * 128 * 128


def test_the_same_seed_gives_the_same_bits() -> None:
    case = SpmmCase(64, 96, 24, (32, 32), 0.5, dtype="fp32")
    one, again, other = (case.operands(CPU, seed)[0] for seed in (3, 3, 4))
    assert torch.equal(one.a.values, again.a.values)
    assert torch.equal(one.b, again.b)
    assert not torch.equal(one.b, other.b)


@pytest.mark.parametrize(
    ("text", "block"), [("128", (128, 128)), ("512x112", (512, 112)), ("48X96", (48, 96))]
)
def test_blocks_are_read_as_people_write_them(text: str, block: tuple[int, int]) -> None:
    assert parse_block(text) == block


@pytest.mark.parametrize("text", ["", "x", "128x", "1x2x3", "a", "-16"])
def test_other_blocks_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="a block is written as"):
        parse_block(text)


def test_an_unknown_suite_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="known: density, blocks, forms, ragged"):
        named(SUITES, "issue2")
