"""Policies on a GPU: every suite's kind of case is checked and timed, and cuDNN is given the same blocks."""

import pytest
import torch

from sparsek_bench.engine import records, run
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.suites.policies import BENCH, EstimateCase, PolicyCase

pytestmark = pytest.mark.gpu
SHAPE = (1, 4, 2, 4096, 4096, 128, 128)


@pytest.mark.parametrize(
    "case",
    [
        *(EstimateCase(*SHAPE, mask) for mask in ("xattention:0.125", "mean-topk:0.125")),
        EstimateCase(*SHAPE, "subblock:0.125", (64, 64)),
        PolicyCase(*SHAPE, "causal-xattention:0.9", data="topics"),
        PolicyCase(*SHAPE, "vsa:16", (64, 64)),
    ],
    ids=lambda case: f"{case.op} {case.name}",
)
def test_a_policy_is_checked_and_timed(case: PolicyCase) -> None:
    device = torch.device("cuda", 0)
    outcome = run.measure(
        SuiteRow(case), peers=BENCH.peers, rounds=3, device=device, report=lambda text: None
    )
    (record,) = outcome.records
    assert records.faults(record) == []
    assert set(record["peers"]) >= ({"attention"} if case.alone else {"cudnn"})
    assert 0 < record["kept"] < 0.6
    assert 0 < record["recall"] <= 1
