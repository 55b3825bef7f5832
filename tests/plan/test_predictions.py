"""Predictions for an H200 stay near what was measured on one: near the newest records of every case and kernel."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsek as sk
from scripts import predictions
from sparsek.core import dtypes
from sparsek.core.device import CPU, H200, UNITS_OVER_FP32
from sparsek.engine import planning
from sparsek.engine import table as kernels
from sparsek.engine.launch import kinds
from sparsek.engine.plan.plan import Plan, bound_seconds
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.spmm import plan_spmm
from sparsek.products.plan.problems import SpgemmProblem
from sparsek_bench.engine import records
from sparsek_bench.suites.spgemm import SpgemmCase
from sparsek_bench.suites.spmm import SpmmCase

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


@cache
def measured() -> list[records.Record]:
    """The newest record of every row."""
    return list(records.newest(records.read(FOLDER)))


def newest(name: str, value: str) -> list[records.Record]:
    """Those of an op or a kernel."""
    return [record for record in measured() if record[name] == value]


def planned(case: SpmmCase, kernel: str, recorded: dict[str, Any] | None = None) -> Plan:
    """The plan of a case on the H200 card, with the recorded config if the kernel still has such a one.

    Operands are on the meta device: a plan reads their shapes alone.
    """
    dtype = dtypes.parse(case.dtype)
    pattern = random_bsr(case.m, case.k, case.block, case.density, pattern=case.pattern, dtype=dtype).pattern
    a = BSR.unchecked(pattern, torch.empty((pattern.nnzb, *case.block), dtype=dtype, device="meta"))
    b = torch.empty((case.k, case.n), dtype=dtype, device="meta")
    plan = plan_spmm(a, b, kernel=kernel, device="h200")
    if recorded is None:
        return plan
    return plan_spmm(a, b, kernel=kernel, config=predictions.config_like(recorded, plan), device="h200")


def test_there_are_records_of_both_gpu_kernels() -> None:
    assert {"hopper.spmm", "portable.spmm"} <= {record["kernel"] for record in newest("op", "spmm")}


def test_a_record_of_spmm_is_predicted_within_25_percent_and_four_of_five_within_10() -> None:
    near, every = 0, newest("op", "spmm")
    for record in every:
        plan = planned(SpmmCase.from_record(record["case"]), record["kernel"], record["config"])
        assert plan.seconds * 1e3 == pytest.approx(record["ms"]["median"], rel=0.25), plan.explain()
        near += abs(plan.seconds * 1e3 / record["ms"]["median"] - 1) <= 0.1
    assert near >= 0.8 * len(every)


def test_rows_are_those_that_a_plan_predicts() -> None:
    """Of SDDMM, of short attention and its gradients, and of the planner's layers."""
    some = [
        next(record for record in newest("op", op) if record["case"].get("kv_len", 0) <= 8192)
        for op in ("sddmm", "attention", "attention_backward", "planner", "host")
    ]
    found = list(predictions.rows(some))
    assert {row.op.split(",")[0] for row in found} == {"sddmm", "attention", "attention_backward", "planner"}
    assert all(0.7 < row.ratio < 1.3 for row in found if not row.op.startswith("planner"))


def test_a_config_of_an_older_record_is_known_again() -> None:
    case = SpmmCase(8192, 8192, 8192, (128, 128), 0.125)
    plan = planned(case, "hopper.spmm")
    assert plan.config.held
    older = {
        "block": [128, 128],
        "wg_m": 2,
        "wg_n": 1,
        "cols": 256,
        "width": 64,
        "pieces": 1,
        "stages": 3,
        "merge": 1,
    }
    config = predictions.config_like(older, plan)
    assert (config.stages, config.joined_rows, config.held) == (3, 1, 0)
    assert predictions.config_like(older | {"cols": 7}, plan) == plan.config


def test_shares_count_rows_within_10_percent() -> None:
    row = predictions.Row("spmm", "hopper.spmm", "a case", 1.0, 1.0)
    off = row._replace(measured=1.2)
    assert [row.near, off.near] == [True, False]
    assert off.ratio == pytest.approx(1 / 1.2)
    *_, last = predictions.table([row, row, off])
    assert last == "all: 2 of 3 within 10 %, 66.7 %"


def spgemm_problem(record: records.Record) -> SpgemmProblem:
    """Its pairs follow from its rate, and its blocks of C from their mean number, as places are drawn."""
    case, took = SpgemmCase.from_record(record["case"]), record["ms"]["median"]
    (bm, bk), (_, bn) = case.a_block, case.b_block
    rows, depth, columns = case.m // bm, case.k // bk, case.n // bn
    pairs = round(record["tflops"]["useful"] * took * 1e9 / (2 * bm * bk * bn))
    blocks = rows * columns
    some = round(-blocks * math.expm1(-pairs / blocks))
    return SpgemmProblem(
        case.m, case.k, case.n, case.a_block, case.b_block, round(case.density * rows * depth),
        round(case.density * depth * columns), some, pairs, 8, case.dtype, H200, case.out == "dense",
    )  # fmt: skip


def test_a_record_of_spgemm_is_predicted_within_12_percent() -> None:
    kernel, found = kernels.load("hopper.spgemm"), newest("kernel", "hopper.spgemm")
    for record in found:
        p = spgemm_problem(record)
        recorded = replace(kernel.default(p), direct=record["config"]["direct"])
        assert kernel.seconds(p, recorded) * 1e3 == pytest.approx(record["ms"]["median"], rel=0.12), p
    assert found


def test_a_bsr_product_in_sweeps_with_streaming_stores_is_predicted() -> None:
    """32768 squared, 3 % of blocks of 64, on an H200, 2026-11-26: 370 us, and 434 in one sweep with TMA stores."""
    record = next(each for each in newest("kernel", "hopper.spgemm") if each["case"]["m"] == 32768)
    p, kernel = spgemm_problem(record), kernels.load("hopper.spgemm")
    assert kernel.seconds(p, kernel.default(p)) == pytest.approx(370e-6, rel=0.05)


@pytest.mark.parametrize("name", ["hopper.spmm", "portable.spmm"])
def test_a_recorded_config_is_planned_again(name: str) -> None:
    case = SpmmCase(8192, 8192, 8192, (128, 128), 0.125)
    plan = planned(case, name)
    other = next(c for c in plan.implementation.configs(plan.problem) if c != plan.config)
    assert planned(case, name, records.config_of(other)).config == other
    assert planned(case, name, {"gone": 1}).config == plan.config


BY_REFERENCE = ("sddmm", "spgemm", "semi24", "bsr_fp8")  # which has no faster kernel there


def on_the_cpu(dtype: torch.dtype) -> dict[str, Plan]:
    """Plans of products of 2048 with an eighth of the blocks of 128, and of attention, for CPU tensors."""
    a = random_bsr(2048, 2048, 128, 0.125, dtype=dtype)
    b = torch.zeros(2048, 2048, dtype=dtype)
    q = torch.zeros(1, 2, 1024, 64, dtype=dtype)
    mask = sk.BlockMask.sliding_window(1024, 256)
    plans: dict[str, Plan] = {
        "bsr": plan_spmm(a, b),
        "thin": plan_spmm(a, b[:, :16]),
        "sddmm": sk.plan_sddmm(b, b, a.pattern),
        "spgemm": sk.plan_spgemm(a, a),
        "attention": sk.plan_attention(q, q, q, mask),
        "attention, backward": sk.plan_attention_backward(q, q, q, mask),
    }
    if dtype != torch.float64:
        plans["semi24"] = plan_spmm(sk.Semi24.from_dense(a.to_dense()), b)
        plans["bsr24"] = plan_spmm(sk.BSR24.from_bsr(a), b)
        plans["bsr_fp8"] = plan_spmm(sk.quantize(a), b)
    return plans


@pytest.mark.parametrize("units", [False, True], ids=["no units", "bf16 units"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_the_kernels_of_a_cpu_win_there_and_none_is_below_the_roofline(
    dtype: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "has_bf16_units", lambda: units)
    over_fp32 = UNITS_OVER_FP32 if units else 1
    card = replace(CPU, tflops={**CPU.tflops, "bf16": over_fp32 * CPU.tflops["fp32"]})
    for name, plan in on_the_cpu(dtypes.parse(dtype)).items():
        problem = replace(plan.problem, card=card)
        choice = planning._decide(problem, None)  # not a choice that is remembered
        family = "reference." if name in BY_REFERENCE else "cpu."
        assert choice.kernel.name.startswith(family), (name, choice.candidates)
        for each in choice.candidates:
            assert each.why_not or each.seconds >= bound_seconds(problem), (name, each)


@pytest.mark.parametrize("kernel", ["hopper.spmm", "portable.spmm", "vendor.dense"])
def test_no_prediction_falls_below_the_roofline(kernel: str) -> None:
    for block, density in ((128, 0.25), (32, 0.0625)):
        for n in (16, 512):
            plan = planned(SpmmCase(4096, 4096, n, (block, block), density), kernel)
            assert plan.seconds > plan.bound_seconds


@pytest.mark.parametrize("card", ["h200", "h100", "cpu"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_product_without_blocks_writes_c(fp8: bool, card: str) -> None:
    for block in (16, 128):
        a: Any = BSR.from_dense(torch.zeros(4096, 2048, dtype=torch.bfloat16), block, threshold=0)
        a = sk.quantize(a) if fp8 else a
        for n in (8, 512, 16384):
            b = torch.empty(2048, n, dtype=torch.bfloat16, device="meta")
            plan = plan_spmm(a, b, device=card)
            written = 4096 * n * 2 / plan.problem.card.bandwidth
            assert written < plan.bound_seconds, "C is all that moves, beside indices and scales"
            assert n < 512 or plan.bound_seconds < 1.05 * written
            for each in plan.candidates:
                assert each.why_not or each.seconds >= plan.bound_seconds, (block, n, each)
        if not fp8 and card != "cpu":
            plan = plan_spmm(a, torch.empty(2048, 16384, dtype=torch.bfloat16, device="meta"), device=card)
            assert plan.kernel == "hopper.spmm"
            assert plan.seconds == pytest.approx(plan.bound_seconds / 0.92 + plan.problem.card.launch_seconds)


def test_no_choice_is_predicted_below_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernels say; which of them runs follows from what they say."""
    plan = planned(SpmmCase(4096, 4096, 512, (128, 128), 0.25), "hopper.spmm")
    for name, seconds in (("portable.spmm", 2e-9), ("hopper.spmm", 1e-9)):
        monkeypatch.setattr(type(kernels.load(name)), "seconds", lambda self, p, c, seconds=seconds: seconds)
    choice = planning._decide(plan.problem, None)
    assert (choice.kernel.name, choice.seconds) == ("hopper.spmm", plan.bound_seconds)
