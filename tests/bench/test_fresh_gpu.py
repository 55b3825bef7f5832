"""New masks on a GPU: calls and FlexAttention's beside them are right for every set, and the clock has records."""

import pytest
import torch

from sparsek_bench.engine import records, run
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.suites.fresh import BENCH, FreshCase, PlannedMaskCase

pytestmark = pytest.mark.gpu
FIELDS = (1, 2, 2, 1024, 1024, 64, 64)


def test_flex_attention_computes_every_set_within_the_budget() -> None:
    device = torch.device("cuda", 0)
    case = FreshCase(*FIELDS, "documents:300")
    sets = case.operands(device)[:2]
    (flex,) = (peer for peer in BENCH.peers if peer.name == "flex")
    assert flex.why_not(case, device) == []
    for call, one in zip(flex.ready(case, sets, lambda text: None).calls, sets, strict=True):
        assert one.judge(call()).passed


@pytest.mark.parametrize(
    "case",
    [
        FreshCase(*FIELDS, "topk:2"),
        FreshCase(*FIELDS, "topk:2", trains=True),
        FreshCase(*FIELDS, "documents:300"),
        PlannedMaskCase(*FIELDS, "window:300"),
    ],
    ids=lambda case: f"{case.op} {case.name}",
)
def test_new_masks_are_timed_beside_kept_ones(case: FreshCase) -> None:
    device, kept = torch.device("cuda", 0), BENCH.peers[:1]
    outcome = run.measure(SuiteRow(case), peers=kept, rounds=3, device=device, report=lambda text: None)
    (record,) = outcome.records
    assert records.faults(record) == []
    assert set(record["peers"]) == {"kept"}
