"""Cases of 2:4 and FP8 products, of packing and of equal stored values: names, records, suites, operands, a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core.errors import Unsupported
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.semi24 import Semi24
from sparsek_bench.engine.bench import TABLES
from sparsek_bench.engine.case import Bar
from sparsek_bench.engine.pack_budget import block_norms
from sparsek_bench.suites import fp8, pack, semi24, story
from sparsek_bench.suites.pack import PackCase
from tests.bench.runs import (
    BLOCKS,
    CPU,
    EQUAL,
    HYBRID_FP8,
    IN_FP8,
    PACKED,
    TWO_FOUR_FP8,
    WHOLE,
    measured,
)


def test_names_are_short_and_tell_cases_apart() -> None:
    assert semi24.WHOLE[0].name == "x @ W.T 8192³ 2:4 bf16"
    assert semi24.IN_BLOCKS[1].name == "A @ B 8192³ 2:4 in block 128 12.5 % bf16"
    assert story.STORY[2].case.name == "8192³, 12.5 % of the values, bf16"
    assert EQUAL.name == "128×256×24, 50 % of the values, block 64, fp32"
    assert [case.name for case in pack.CASES] == [
        "8192² bf16 to 2:4",
        "8192² bf16 to BSR, block 128, 12.5 % kept",
    ]
    assert fp8.BLOCKS[0].name == "x @ W.T 8192³ block 128 12.5 % e4m3"
    assert fp8.WHOLE[1].name == "A @ B 8192³ 2:4 e4m3"
    assert TWO_FOUR_FP8.name == "A @ B 64×96×32 2:4 e5m2 scale per tensor"
    assert HYBRID_FP8.name == "x @ W.T 128²×32 2:4 in block 64 50 % e4m3 scale per block"
    assert fp8.FAST_WHOLE[0].name == "x @ W.T 8192³ 2:4 e4m3 fast_accum"


def test_flops_are_those_of_the_dense_blocks_or_of_the_stored_values() -> None:
    assert WHOLE.operands(CPU)[0].useful_flops == WHOLE.dense_flops
    assert BLOCKS.operands(CPU)[0].useful_flops == BLOCKS.dense_flops / 2
    assert IN_FP8.operands(CPU)[0].useful_flops == 2 * 32 * IN_FP8.operands(CPU)[0].a.matrix.values.numel()
    assert TWO_FOUR_FP8.operands(CPU)[0].useful_flops == TWO_FOUR_FP8.dense_flops
    assert HYBRID_FP8.operands(CPU)[0].useful_flops == HYBRID_FP8.dense_flops / 2
    equal = EQUAL.operands(CPU)[0]
    for format_ in equal.formats.values():
        assert 2.0 * format_.values.numel() * EQUAL.n == equal.useful_flops == EQUAL.dense_flops / 2
    assert set(replace(EQUAL, stored=0.25).operands(CPU)[0].formats) == {"bsr", "bsr24"}


def test_the_suites_hold_every_row_of_the_speed_table() -> None:
    assert [(bar.peer, bar.must, bar.aim) for bar in semi24.BARS[semi24.WHOLE[0]]] == [
        ("cusparselt", 1.05, 1.25),
        ("cublas", 1.45, 1.7),
    ]
    assert semi24.BARS[semi24.IN_BLOCKS[0]] == (Bar("bsr", 1.25, 1.45),)
    assert pack.BARS[pack.CASES[1]] == (Bar("copy", 0.5, 0.8),)
    assert fp8.BARS[fp8.BLOCKS[0]] == (Bar("cublas_fp8", 0.75, 0.9),)
    assert fp8.BARS[fp8.WHOLE[1]] == fp8.BARS[fp8.FAST_WHOLE[1]] == (Bar("cusparselt", 0.95, 1.1),)
    for module in (semi24, pack, fp8):
        assert set(module.BARS) == {entry.case for entry in module.BENCH.suites["published"]}
    for op, bars in (("semi24", semi24.BARS), ("pack", pack.BARS), ("fp8", fp8.BARS)):
        assert {bar.peer for row in bars.values() for bar in row} <= set(TABLES[op].peers)


def test_every_format_is_measured_at_equal_stored_values() -> None:
    kernels = ("reference.semi24", "cpu.bsr24", "cpu.spmm")
    half = measured(EQUAL, *kernels)
    assert [record["kernel"] for record in half.records] == list(kernels)
    rates = [record["tflops"]["useful"] / record["tflops"]["dense_equivalent"] for record in half.records]
    assert rates == pytest.approx([0.5] * 3, rel=1e-6)
    quarter = measured(replace(EQUAL, stored=0.25), *kernels)
    assert [record["kernel"] for record in quarter.records] == list(kernels[1:])
    assert quarter.unavailable["reference.semi24"] == ["a Semi24 cannot store 25 % of the values"]


def test_a_gate_of_packing_finds_what_is_wrong() -> None:
    (to_bsr, *_), (to_24, *_) = PACKED.operands(CPU), PackCase(64, 96, "semi24").operands(CPU)
    packed: Any = to_24.planned(to_24.plan(None))()
    assert to_24.judge(packed).passed
    assert not to_24.judge(Semi24.from_dense(packed.to_dense() * torch.tensor([1.0, 0.0] * 48))).passed
    assert to_bsr.judge(to_bsr.planned(to_bsr.plan(None))()).passed
    (w,) = to_bsr.given
    assert not to_bsr.judge(BSR.from_dense(w, PACKED.block or 0, keep=0.5, scope="global")).passed
    assert not to_bsr.judge(BSR.from_dense(-w, PACKED.block or 0, keep=PACKED.keep, scope="global")).passed
    least = block_norms(w, (32, 16)).flatten().argsort()[:3]
    mask = torch.zeros(12, dtype=torch.bool).scatter(0, least, True).view(2, 6)
    assert not to_bsr.judge(BSR.from_dense(w, PACKED.block or 0, mask=mask)).passed
    with pytest.raises(Unsupported, match=r"matrix\.two_four packs here"):
        to_24.plan("reference.semi24")


def test_a_gate_of_fp8_finds_what_is_wrong() -> None:
    for case in (IN_FP8, TWO_FOUR_FP8, HYBRID_FP8):
        one = case.operands(CPU)[0]
        c = one.planned(one.plan(None))()
        assert one.judge(c).passed
        assert not one.judge(c * 1.01).passed
        if case.scale != "block":
            scale = one.a.scale[:, None] if one.a.scale.ndim else one.a.scale
            assert torch.equal(
                one.dense_factors[0].float() * scale, one.a.dequantize(torch.float32).to_dense()
            )


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.0, "missed: 1.00"), (1.0499, "missed: 1.050"), (1.05, "met: 1.05"), (1.3, "met: 1.30")],
)
def test_a_table_says_whether_a_target_is_met(make_record: Any, ratio: float, said: str) -> None:
    peer = {"ms": {"median": 1.6, "min": 1.5, "max": 1.7, "rounds": 7}, "tflops": 900.0}
    shown = {"peers": {"cusparselt": peer}, "ratio": {"cusparselt": ratio}}
    (column,) = [column for column in TABLES["semi24"].columns if column.heading == "target"]
    cell = column.cell(make_record(semi24.WHOLE[0], "hopper.semi24", **shown))
    assert cell == f"1.05 over cuSPARSELt, {said}"
    assert column.cell(make_record(semi24.WHOLE[0], "reference.semi24", **shown)) == ""
    assert column.cell(make_record(WHOLE, "hopper.semi24", **shown)) == ""


def test_the_story_names_the_kernel_of_each_row(make_record: Any) -> None:
    (case, *_) = TABLES["story"].columns
    record = make_record(story.STORY[0].case)
    assert case.cell(record) == "8192³, 50 % of the values, cpu.spmm"
