"""Attention over paged keys as a benchmark: what its sets hold, their gates, peers, and what the run records."""

from typing import Any

import pytest
import torch

from sparsek.attn.ops.attention_paged import attention_paged
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine import run
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.peers.paged import PEERS
from sparsek_bench.suites.serving import BARS, BENCH, ServingCase
from tests.bench.runs import measured

CPU = torch.device("cpu")
FORMS = ["causal", "window:100", "window:100+sinks:5", "pages:3", "blocks:0.5"]


def small(sees: str = "causal", q_len: int = 150, kv: str = "fp32", requests: int = 2) -> ServingCase:
    return ServingCase(requests, q_len, 512, 4, 2, sees, 32, 32, kv, "fp32")


@pytest.mark.parametrize("sees", FORMS)
@pytest.mark.parametrize("q_len", [1, 150])
@pytest.mark.parametrize("kv", ["fp32", "e4m3"])
def test_sets_pass_their_gates_and_wrong_results_do_not(sees: str, q_len: int, kv: str) -> None:
    one, other = small(sees, q_len, kv).operands(CPU)
    plan = one.plan(None)
    assert one.gate(plan).passed
    assert not other.judge(one.planned(plan)()).passed
    assert one.moved > 0


@pytest.mark.parametrize("sees", FORMS)
def test_useful_flops_count_the_pairs_that_are_seen(sees: str) -> None:
    """With queries of 0 lse is the logarithm of the number of keys that a query sees."""
    case = small(sees)
    one = case.operands(CPU)[0]
    given = (torch.zeros_like(one.q), *one.given[1:])
    _, lse = attention_paged(*given, **one.options, return_lse=True)
    pairs = float(lse.double().exp().round().sum())
    assert one.useful_flops == pytest.approx(4 * case.dim * pairs)


@pytest.mark.parametrize(
    "case", [small(), small("window:100+sinks:5"), small("blocks:0.5"), small("pages:3", 20)]
)
def test_a_run_has_records_with_the_peers_that_can_run(case: ServingCase) -> None:
    outcome = measured(case, peers=BENCH.peers, rounds=1)
    (record,) = outcome.records
    there = {"copy", "sdpa"} | ({"unpaged"} if not case.listed else set())
    assert set(record["peers"]) == there
    assert outcome.unavailable["fa4"][0] == "runs on cuda, the case is on cpu"


def test_pages_in_fp8_stand_beside_the_same_in_the_dtype_of_q() -> None:
    outcome = run.measure(
        SuiteRow(small(kv="e4m3")), peers=BENCH.peers, rounds=1, device=CPU, report=lambda text: None
    )
    assert set(outcome.records[0]["peers"]) == {"copy", "bf16"}


def test_decoding_is_measured_in_a_graph_and_needs_a_gpu() -> None:
    outcome = run.measure(SuiteRow(small(q_len=1)), peers=(), rounds=1, device=CPU, report=lambda text: None)
    assert "CUDA graph" in outcome.unavailable["auto"][0]


def test_every_bar_is_of_a_case_of_a_suite_and_of_a_peer() -> None:
    cases = {row.case for row in BENCH.rows}
    assert set(BARS) == cases
    assert {bar.peer for bars in BARS.values() for bar in bars} <= {peer.name for peer in PEERS}
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "changed",
    [{"sees": "dense"}, {"kv": "fp16"}, {"page": 48}, {"kv_len": 500}, {"kv_heads": 3}, {"q_len": 600}],
)
def test_fields_that_do_not_go_together_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ServingCase.from_record(small().as_record() | changed)
