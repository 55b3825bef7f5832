"""Cases of SDDMM, BSR x BSR, linear layers and MLPs: names, records, suites, what their operands are."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine.case import Case, OperandSet
from sparsek_bench.suites import linear, mlp, sddmm, spgemm
from sparsek_bench.suites.linear import LinearCase
from sparsek_bench.suites.mlp import MlpDecodeCase, MlpTrainCase
from sparsek_bench.suites.sddmm import SddmmCase
from sparsek_bench.suites.spgemm import SpgemmCase

CPU = torch.device("cpu")
SDDMM = SddmmCase(64, 96, 80, (32, 16), 0.5, dtype="fp32")
SPGEMM = SpgemmCase(64, 96, 80, (32, 48), (48, 16), 0.5, dtype="fp32")
LINEAR = LinearCase(24, 64, 96, (32, 32), 0.5, "bias+gelu+residual", "fp32")
TRAIN = MlpTrainCase(24, 64, 128, (32, 32), 0.5, dtype="fp32")
DECODE = MlpDecodeCase(1, 64, 128, (32, 32), 0.5, dtype="fp32")
SMALL = (SDDMM, SPGEMM, LINEAR, TRAIN, DECODE)
SUITES = {
    "sddmm": sddmm.BENCH.suites,
    "spgemm": spgemm.BENCH.suites,
    "linear": linear.BENCH.suites,
    "mlp": mlp.BENCH.suites,
}
PUBLISHED = [entry for suites in SUITES.values() for entry in suites["published"]]


def tensors_of(one: Any) -> Iterable[torch.Tensor]:
    """The tensors of an operand set, those inside a BSR too, but for indices."""
    for value in one.given if isinstance(one, OperandSet) else vars(one).values():
        value = value.values if isinstance(value, BSR) else value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


def test_names_are_short_and_tell_cases_apart() -> None:
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
    names = [(entry.case.op, entry.case.name) for entry in PUBLISHED]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", [*SMALL, *(entry.case for entry in PUBLISHED)], ids=lambda case: case.name)
def test_every_case_survives_a_record(case: Case) -> None:
    assert type(case).from_record(json.loads(json.dumps(case.as_record()))) == case


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_operand_sets_share_patterns_and_no_memory(case: Any) -> None:
    first, second, *_ = case.operands(CPU)
    places = [{x.data_ptr() for x in tensors_of(one)} for one in (first, second)]
    assert len(places[0]) == len(places[1]) >= 2
    assert places[0].isdisjoint(places[1])
    assert len(case.operands(CPU)) >= 2
    for name, value in vars(first).items():
        if isinstance(value, BSR):
            assert value.pattern is getattr(second, name).pattern
    again = case.operands(CPU)[0]
    for one, other in zip(tensors_of(first), tensors_of(again), strict=True):
        assert torch.equal(one, other) or bool(torch.isnan(one).all())


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


def test_the_suites_hold_every_row_of_the_speed_table() -> None:
    assert [(e.case.block[0], e.case.density) for e in sddmm.BENCH.suites["published"]] == [
        (128, 0.125),
        (64, 0.125),
    ]
    dense = spgemm.PUBLISHED[0].case
    assert (dense.a_block, dense.b_block, dense.density, dense.out) == (
        (128, 128),
        (128, 128),
        0.125,
        "dense",
    )
    assert [round(case.density * 72) for case in spgemm.TOPK] == [8, 16, 32, 64]
    assert {(case.a_block, case.b_block, case.k // 112) for case in spgemm.TOPK} == {
        ((512, 112), (112, 128), 72)
    }
    assert [(case.m, case.out, case.density) for case in spgemm.SPARSE] == [
        (8192, "bsr", 0.03),
        (32768, "bsr", 0.03),
    ]
    after = {entry.case.epilogue for entry in linear.PUBLISHED}
    assert after == {"bias+gelu", "bias+gelu_tanh", "bias+silu", "bias+residual"}
    steps = [entry.case for entry in mlp.PUBLISHED]
    layer = (4096, 16384, (128, 128), 0.125, "gelu")
    assert {(c.width, c.hidden, c.block, c.density, c.activation) for c in steps} == {layer}
    assert [(c.op, c.tokens) for c in steps] == [
        *[("mlp_train", 8192)] * 2,
        *(("mlp_decode", tokens) for tokens in (1, 16, 64)),
    ]
    assert [c.mode for c in steps if isinstance(c, MlpTrainCase)] == ["eager", "compiled"]


def test_the_suites_have_every_operation() -> None:
    assert {entry.case.op for entry in PUBLISHED} == {"sddmm", "spgemm", "linear", "mlp_train", "mlp_decode"}


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        (SDDMM, {"k": 0}, "needs k >= 1"),
        (SDDMM, {"pattern": "stripes"}, "pattern is one of uniform"),
        (SDDMM, {"block": (24, 16)}, "multiples of 16"),
        (SPGEMM, {"b_block": (32, 16)}, "blocks of 32x48 meet blocks with 48 rows, not 32x16"),
        (SPGEMM, {"out": "coo"}, "out is one of dense, bsr, got 'coo'"),
        (SPGEMM, {"density": 0.0}, r"fraction in \(0, 1\]"),
        (LINEAR, {"epilogue": "bias+tanh"}, r"each optional, joined by \+; got 'bias\+tanh'"),
        (LINEAR, {"epilogue": "relu+gelu"}, "one of relu, gelu, gelu_tanh, silu"),
        (LINEAR, {"epilogue": "bias+bias"}, "an epilogue is bias"),
        (LINEAR, {"epilogue": "gelu+bias"}, "in this order"),
        (TRAIN, {"activation": ""}, "activation is one of relu"),
        (TRAIN, {"mode": "graph"}, "mode is one of eager, compiled, got 'graph'"),
        (DECODE, {"tokens": 0}, "needs tokens >= 1"),
        (DECODE, {"dtype": "fp8"}, "unknown dtype"),
    ],
)
def test_a_case_that_cannot_be_is_refused(case: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        replace(case, **change)


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
