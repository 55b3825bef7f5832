"""Cases and suites."""

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import named, parse_block
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine.case import block_name
from sparsek_bench.suites.spmm import FORMS, SUITES, SpmmCase

CPU = torch.device("cpu")


def test_names_are_short_and_tell_cases_apart() -> None:
    assert SpmmCase(8192, 8192, 8192, (128, 128), 0.125).name == "8192³ block 128 12.5 % bf16"
    assert SpmmCase(16384, 16384, 16, (64, 64), 0.25).name == "16384²×16 block 64 25 % bf16"
    assert (
        SpmmCase(64, 32, 16, (32, 16), 1.0, "banded", "fp16").name == "64×32×16 block 32x16 100 % banded fp16"
    )
    assert SpmmCase(64, 32, 16, (16, 16), 0.5, form="B@A.T").name == "B @ A.T 64×32×16 block 16 50 % bf16"


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


def test_a_product_of_lists_takes_every_combination() -> None:
    sizes = {"m": "64", "k": "64", "n": "8", "block": "16", "density": "0.5", "dtype": "fp16"}
    cases = BENCHES["spmm"].cases(sizes | {"m": "64,128", "n": "8,16", "block": "16,32"})
    assert len(cases) == len(set(cases)) == 8
    assert {case.form for case in cases} == {"A@B"}
    forms = BENCHES["spmm"].cases(sizes | {"form": ",".join(FORMS)})
    assert [case.form for case in forms] == list(FORMS)


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
