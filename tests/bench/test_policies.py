"""Policies through the run: choices held to the specification, results to attention over the choice, what is shown."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.core import clock
from sparsek_bench.engine import records, report, run
from sparsek_bench.engine.data import Draw
from sparsek_bench.suites import policies
from sparsek_bench.suites.policies import BENCH, EstimateCase, PolicyCase, RecallCase
from tests.bench.runs import measured
from tests.refusals import refused

CPU = torch.device("cpu")
FIELDS = (1, 2, 1, 512, 512, 64, 64)
BLOCK = ((64, 64), "fp32")
CASES = (
    *(EstimateCase(*FIELDS, mask, *BLOCK) for mask in ("xattention:0.5", "subblock:0.25", "mean-topk:0.25")),
    PolicyCase(*FIELDS, "causal-xattention:0.9", *BLOCK, "topics"),
    PolicyCase(*FIELDS, "vsa:2", *BLOCK),
)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "WALL_CALLS", 1)
    monkeypatch.setattr(PolicyCase, "wall", 1)
    monkeypatch.setattr(clock, "WALL_WARMUP", 0)


def outcome_of(case: Any) -> run.Outcome:
    return measured(case, peers=BENCH.peers, rounds=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_policy_is_checked_and_timed(case: PolicyCase) -> None:
    outcome = outcome_of(case)
    (record,) = outcome.records
    assert record["kernel"].startswith("policies.")
    assert set(record["peers"]) == ({"attention"} if case.alone else set())
    assert {"cudnn", "cudnn_bsa"} <= set(outcome.unavailable)
    kept = {"xattention": 0.5, "subblock": 0.25, "mean-topk": 0.25, "vsa": 0.25}.get(case.mask.split(":")[0])
    if kept is None:
        assert record["recall"] > 0.9 > record["kept"]
    else:
        assert record["kept"] == pytest.approx(kept, abs=0.02)
        assert record["recall"] == pytest.approx(kept, abs=0.05)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_is_rated_as_the_dense_attention_that_it_stands_for(case: PolicyCase) -> None:
    whole = case.causal_flops if case.mask.startswith("causal") else case.dense_flops
    assert case.operands(CPU)[0].useful_flops == whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_choice_fails_its_gate(case: PolicyCase) -> None:
    (one, *_) = case.operands(CPU)
    assert one.choice().passed
    other = replace(one, mask=BlockMask.sliding_window(512, window=64, block=64))
    assert not other.choice().passed


@pytest.mark.parametrize("case", CASES[3:], ids=lambda case: case.name)
def test_a_wrong_result_fails_its_gate(case: PolicyCase) -> None:
    (one, *_) = case.operands(CPU)
    assert one.result().passed

    def other(**weight: Any) -> torch.Tensor:
        right = one.run(**weight)
        return right + 0.1 * right.roll(1, 2)

    wrong = replace(one, run=other)
    assert not wrong.result().passed
    with pytest.raises(run.GateError, match="exceeds the budget"):
        run.passed(case, "policy", wrong.gate(None))


def test_topics_have_few_blocks_with_most_of_the_mass() -> None:
    case = PolicyCase(1, 4, 2, 8192, 8192, 128, 128, "causal-xattention:0.9", data="topics")
    q, k = policies.DATA["topics"](case, Draw(CPU, torch.bfloat16, 1))
    assert (q.shape, k.shape, q.dtype) == (
        torch.Size(case.shapes[0]),
        torch.Size(case.shapes[1]),
        torch.bfloat16,
    )
    q, k = q[:, :2, -256:], k[:, :1]
    mask = policies.XAttention(0.9).mask(q, k)
    assert mask.density < 0.5
    assert float(policies.recall(mask, q, k, causal=True).min()) > 0.8


@pytest.mark.parametrize(
    ("policy", "data"), [("XAttention", "smooth"), ("SubBlock", "needle"), ("MeanTopK", "white")]
)
def test_recall_stands_beside_the_best_mask_of_as_many_blocks(policy: str, data: str) -> None:
    case = RecallCase(policy, data, (8, 8, 8), 1, "fp32")
    (record,) = outcome_of(case).records
    assert records.faults(record) == []
    assert records.case_of(record) == case
    for sparsity in (50, 75, 90):
        assert 0 < record[f"mass_{sparsity}"] <= record[f"best_{sparsity}"] + 1e-4
    assert record["mass_50"] > record["mass_90"]
    assert record["kept_75"] == pytest.approx(0.25, abs=0.05)
    shown = report.markdown([record], "policy_recall").splitlines()
    assert shown[0].startswith("| case | at 50 % sparsity | at 75 %")
    assert f" %: {record['mass_50'] * 100:.1f} % ({record['best_50'] * 100:.1f} %) |" in shown[2]


def test_more_mass_than_the_best_mask_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    found = policies.qualities

    def wrong(*args: Any, **named: Any) -> Any:
        return [each._replace(oracle=each.recall - 0.01) for each in found(*args, **named)]

    monkeypatch.setattr(policies, "qualities", wrong)
    with pytest.raises(run.GateError, match="SubBlock, white, 8x8x8, 1 heads, fp32: error"):
        outcome_of(RecallCase("SubBlock", "white", (8, 8, 8), 1, "fp32"))


def test_a_policy_that_is_not_known_is_refused() -> None:
    refused(r"no mask is written 'causal'; known, .*: xattention:T", PolicyCase, *FIELDS, "causal")
    refused("data is one of white, topics", PolicyCase, *FIELDS, "vsa:2", data="grey")


def test_the_peer_of_videos_takes_the_published_one() -> None:
    case = BENCH.suites["video"][0].case
    assert [p.why_not(case, torch.device("cuda")) for p in BENCH.peers if p.name == "cudnn_bsa"] == [[]]


def test_tables_show_shares_and_targets(make_record: Callable[..., records.Record]) -> None:
    nulls = {"tflops": None, "gbps": None, "roofline": None, "kept": 0.125, "recall": 0.31}
    peer = {"ms": {"median": 2.0, "min": 1.9, "max": 2.1, "rounds": 5}, "tflops": None}
    estimate, call = next(iter(policies.ESTIMATES)), policies.PREFILL
    alone = make_record(
        estimate, "policies.xattention", peers={"attention": peer}, ratio={"attention": 10.0}, **nulls
    )
    whole = make_record(call, "policies.xattention", peers={"cudnn": peer}, ratio={"cudnn": 5.5}, **nulls)
    assert records.faults(alone) == records.faults(whole) == []
    shown = report.markdown([alone], "policy_estimate").splitlines()[2]
    assert shown == (
        "| 32K XAttention 0.125 | 0.200 ± 0.030 | 10.0 % | 12.5 % | 31.0 % | at most 0.25 of attention, met: 0.10 |"
    )
    shown = report.markdown([whole], "policy").splitlines()[2]
    assert "| 12.5 % | 31.0 % | 4 over cuDNN dense, met: 5.50 |" in shown
