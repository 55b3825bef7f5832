"""What holds for the cases of every benchmark: names, records, operand sets, gates, and a measurement on a CPU."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.testing.budget import Gate
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import case as case_module
from sparsek_bench.engine import run
from sparsek_bench.engine.data import tensors
from sparsek_bench.suites.attention import AttentionCase
from sparsek_bench.suites.host import HostCase
from sparsek_bench.suites.mlp import MlpDecodeCase
from sparsek_bench.suites.spmm import SpmmCase
from tests.bench.runs import (
    BLOCKS,
    CPU,
    EQUAL,
    HYBRID_FP8,
    IN_FP8,
    LINEAR,
    PACKED,
    SDDMM,
    SMALL,
    SPGEMM,
    TRAIN,
    TWO_FOUR_FP8,
    WHOLE,
    SmallCase,
    measured,
)

EACH = pytest.mark.parametrize("small", SMALL, ids=str)


@pytest.mark.parametrize("name", BENCHES)
def test_every_row_survives_a_record_and_has_a_name_of_its_own(name: str) -> None:
    cases = [row.case for row in BENCHES[name].rows]
    assert [type(case).from_record(json.loads(json.dumps(case.as_record()))) for case in cases] == cases
    assert len({(case.op, case.name) for case in cases}) == len(cases)


@EACH
def test_every_small_case_survives_a_record(small: SmallCase) -> None:
    case = small.case
    assert type(case).from_record(json.loads(json.dumps(case.as_record()))) == case


@EACH
def test_operand_sets_share_their_structure_and_no_memory(small: SmallCase) -> None:
    first, second = small.case.operands(CPU)

    def floats(one: Any) -> list[torch.Tensor]:
        return [x for x in tensors(list(vars(one).values())) if x.is_floating_point()]

    places = [{x.data_ptr() for x in floats(one)} for one in (first, second)]
    assert len(places[0]) == len(places[1]) >= 1
    assert places[0].isdisjoint(places[1])
    again = small.case.operands(CPU)[0]
    ragged: set[int] = set()  # whose blocks stay where they are
    for name, value in vars(first).items():
        if isinstance(value, BSR | BSR24):
            assert value.pattern is getattr(second, name).pattern
            ragged |= {value.values.data_ptr()} if value.pattern.is_ragged else set()
        if name == "mask":
            assert value is second.mask
    for one, other, same in zip(floats(first), floats(second), floats(again), strict=True):
        poison = bool(one.isnan().all())
        assert poison or torch.equal(one.float(), same.float())
        if one.ndim:  # one scale may be that of both
            assert poison or one.data_ptr() in ragged or not torch.equal(one.float(), other.float())


@EACH
def test_a_case_is_measured_with_its_peers(small: SmallCase) -> None:
    (record,) = measured(small.case, small.kernel).records
    assert (record["op"], record["kernel"]) == (small.case.op, small.recorded or small.kernel)
    assert set(record["peers"]) == small.peers
    assert (record["tflops"] is None) == (not small.case.rated)
    one, ms = small.case.operands(CPU)[0], record["ms"]["median"]
    if small.case.rated:
        assert record["tflops"]["useful"] == pytest.approx(one.useful_flops / ms / 1e9, rel=0.02, abs=2e-6)
        equivalent = record["tflops"]["dense_equivalent"]
        assert equivalent == pytest.approx(small.case.dense_flops / ms / 1e9, rel=0.02, abs=2e-6)
        for name, peer in record["peers"].items():
            ratio = record["tflops"]["useful"] / peer["tflops"]
            assert record["ratio"][name] == pytest.approx(ratio, rel=0.02, abs=2e-4)
    extra = {name for name in (*small.case.extra, *small.case.peer_extra) if name in ("memory", "peak_gb")}
    assert all(each[name] is None for name in extra for each in (record, *record["peers"].values()))


@EACH
def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch, small: SmallCase) -> None:
    (one, *_) = small.case.operands(CPU)
    monkeypatch.setattr(type(one), "gate", lambda self, plan: Gate(1.0, 0.5, False))
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong kernel"))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        measured(small.case, small.kernel)


@EACH
def test_results_begin_as_nan(monkeypatch: pytest.MonkeyPatch, small: SmallCase) -> None:
    """A run right before the judged one leaves NaN in memory of every result's size."""
    (one, *_) = small.case.operands(CPU)
    spoilt: list[Any] = []
    real = case_module.spoil
    monkeypatch.setattr(case_module, "spoil", lambda results: (real(results), spoilt.append(results)))
    plan = one.plan(None if small.kernel == "auto" else small.kernel)
    assert one.gate(plan).passed
    (before,) = (tensors(each) for each in spoilt)
    after = tensors(one.planned(plan)())
    assert [x.shape for x in before] == [x.shape for x in after]
    spoilt_floats = [x for x in before if x.is_floating_point() and all(x is not y for y in after)]
    assert all(x.isnan().all() for x in spoilt_floats)


HOST = HostCase("A @ B", (64, 64, 64))
ATTENTION = AttentionCase(1, 2, 1, 256, 256, 32, 32, "causal", (64, 64), "fp32")
SPMM = SpmmCase(64, 64, 8, (16, 16), 0.5)
DECODE = MlpDecodeCase(1, 64, 128, (32, 32), 0.5, dtype="fp32")
REFUSED: tuple[tuple[Any, dict[str, Any], str], ...] = (
    (HOST, {"call": "A + B"}, "call is one of"),
    (HOST, {"sides": (1, 2)}, "A @ B measures m x k x n, got 1x2"),
    (HOST, {"sides": (1, 2, 0)}, "A @ B measures m x k x n, got 1x2x0"),
    (HOST, {"storage": "csr"}, "storage is one of"),
    (HOST, {"storage": "fp8"}, "A @ B is measured of blocks, not of fp8"),
    (HOST, {"caches": "cold"}, "caches are empty or filled"),
    (HOST, {"density": 2.0}, "density is a fraction"),
    (HOST, {"block": (24, 24)}, "multiples of 16"),
    (ATTENTION, {"batch": 0}, "needs batch >= 1"),
    (ATTENTION, {"heads": 3, "kv_heads": 2}, "3 query heads do not divide among 2"),
    (ATTENTION, {"block": (32, 64)}, "64 or 128, got 32x64"),
    (ATTENTION, {"mask": "all"}, "no mask is written 'all'"),
    (ATTENTION, {"dtype": "fp8"}, "unknown dtype"),
    (SPMM, {"m": 0}, "needs m >= 1"),
    (SPMM, {"block": (24, 16)}, "multiples of 16 from 16 to 512"),
    (SPMM, {"density": 0.0}, r"fraction in \(0, 1\]"),
    (SPMM, {"pattern": "stripes"}, "pattern is one of uniform"),
    (SPMM, {"dtype": "fp8"}, "unknown dtype"),
    (SPMM, {"form": "A@A"}, "form is one of A@B, A.T@B, B@A, B@A.T, got 'A@A'"),
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
    (WHOLE, {"form": "A.T@B"}, "form is one of x@W.T, A@B"),
    (WHOLE, {"k": 60}, "a multiple of 8, got 60"),
    (BLOCKS, {"block": (96, 64)}, "multiples of 64, got 96x64"),
    (EQUAL, {"stored": 0.6}, "a share of at most 0.5"),
    (EQUAL, {"stored": 0.3}, "whole blocks of a block row, got 0.3 of 4 blocks"),
    (EQUAL, {"m": 100}, "100 x 256 is not a multiple of 64"),
    (PACKED, {"to": "coo"}, "to is one of semi24, bsr, got 'coo'"),
    (PACKED, {"block": None}, "a BSR is packed in blocks"),
    (PACKED, {"keep": 0.0}, r"keep is a fraction in \(0, 1\]"),
    (PACKED, {"m": 60}, "60 x 96 is not a multiple of 32x16"),
    (IN_FP8, {"dtype": "fp8"}, "dtype is one of e4m3, e5m2, got 'fp8'"),
    (IN_FP8, {"stored": "coo"}, "stored is one of bsr, semi24, bsr24"),
    (IN_FP8, {"block": None}, "bsr and bsr24 have blocks"),
    (IN_FP8, {"k": 56}, "a multiple of 16 here, got 56"),
    (IN_FP8, {"stored": "bsr24"}, "multiples of 64, got 32"),
    (TWO_FOUR_FP8, {"scale": "block"}, "neither a density nor a scale of blocks"),
    (HYBRID_FP8, {"fast_accum": True}, "which fast_accum does without"),
)


@pytest.mark.parametrize(("case", "change", "said"), REFUSED)
def test_a_case_that_cannot_be_is_refused(case: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        replace(case, **change)
