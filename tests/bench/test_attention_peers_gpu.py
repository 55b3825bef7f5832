"""Attention's peers on a GPU: each is set up, is right, and is measured in the same rounds, with its memory."""

from typing import Any

import pytest
import torch

from sparsek_bench.engine import records
from sparsek_bench.engine.peer import UnavailableError, peers_named
from sparsek_bench.engine.run import run_case
from sparsek_bench.suites.attention import PEERS, AttentionCase

pytestmark = pytest.mark.gpu
CASES = [
    AttentionCase(1, 4, 4, 1024, 1024, 128, 128, "blocks:0.25"),
    AttentionCase(1, 4, 4, 1024, 1024, 64, 64, "blocks:0.25", (64, 64), "fp16"),
    AttentionCase(1, 4, 4, 1024, 1024, 128, 128, "window:300"),
    AttentionCase(2, 4, 2, 1024, 1024, 128, 128, "causal"),
    AttentionCase(1, 4, 4, 1024, 1024, 128, 128, "bigbird:128:128:1"),
]


@pytest.mark.parametrize("name", ["cudnn", "fa4", "flex", "cudnn_bsa", "cudnn_flex"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_peer_computes_every_set_within_the_budget(case: AttentionCase, name: str) -> None:
    device = torch.device("cuda", 0)
    peer: Any = next(each for each in PEERS if each.name == name)
    if peer.why_not(case, device):
        pytest.skip("; ".join(peer.why_not(case, device)))
    sets = case.operands(device)[:2]
    try:
        ready = peer.ready(case, sets, lambda text: None)
    except UnavailableError as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    for call, one in zip(ready.calls, sets, strict=True):
        out: Any = call()
        if ready.flops is None:
            assert one.judge(peer.laid(out)).passed


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_all_peers_and_kernels_share_the_rounds_of_a_record(case: AttentionCase) -> None:
    device = torch.device("cuda", 0)
    outcome = run_case(case, peers=peers_named(PEERS, None, device), rounds=3, device=device)
    (record,) = outcome.records
    assert records.faults(record) == []
    assert "cudnn" in record["peers"]
    assert record["memory"] >= 0
    assert record["peers"]["cudnn"]["memory"] >= 0
