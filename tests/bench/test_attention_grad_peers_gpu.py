"""Peers of attention's gradients on a GPU: each is set up, is right, and is measured in the same rounds; memory."""

from typing import Any

import pytest
import torch

from sparsek_bench.engine import records
from sparsek_bench.engine.peer import UnavailableError, peers_named
from sparsek_bench.engine.run import run_case
from sparsek_bench.suites.attention_grad import GRAD_PEERS, AttentionGradCase, AttentionTrainCase

pytestmark = pytest.mark.gpu
SHAPES: list[tuple[Any, ...]] = [
    (1, 4, 4, 1024, 1024, 128, 128, "blocks:0.25"),
    (1, 4, 4, 1024, 1024, 128, 128, "blocks:0.25", (64, 64)),
    (1, 4, 4, 1024, 1024, 64, 64, "window:300"),
    (2, 4, 2, 1024, 1024, 128, 128, "causal"),
    (1, 4, 4, 1024, 1024, 128, 128, "full"),
]
CASES = [kind(*shape) for shape in SHAPES for kind in (AttentionGradCase, AttentionTrainCase)]
# Not installed on this machine, or refused by torch or the peer itself: no fault of how it is asked.
ELSEWHERE = ("cannot be imported", "No available kernel")
# torch 2.11 with Triton 3.6 compiles no tile of FlexAttention's backward pass for heads of 64.
UNCOMPILED = ("InductorError", "No valid triton configs")


@pytest.mark.parametrize("name", ["cudnn", "fa4", "fa4_ordered", "flex", "cudnn_bsa", "cudnn_flex"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_a_peer_computes_every_set_within_the_budget(case: AttentionGradCase, name: str) -> None:
    device = torch.device("cuda", 0)
    peer: Any = next(each for each in GRAD_PEERS if each.name == name)
    if peer.why_not(case, device):
        pytest.skip("; ".join(peer.why_not(case, device)))
    sets = case.operands(device)[:2]
    try:
        ready = peer.ready(case, sets, lambda text: None)
    except UnavailableError as error:
        known = ELSEWHERE + (UNCOMPILED if (name, case.dim) == ("flex", 64) else ())
        if not any(words in str(error) for words in known):
            raise
        pytest.skip(str(error))
    for call, one in zip(ready.calls, sets, strict=True):
        for _ in range(2):
            made: Any = call()
            if ready.flops is None or case.mask in ("full", "causal"):
                assert one.judge([peer.laid(x) for x in made]).passed


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.op)
def test_all_peers_and_kernels_share_the_rounds_of_a_record(case: AttentionGradCase) -> None:
    device = torch.device("cuda", 0)
    outcome = run_case(case, peers=peers_named(GRAD_PEERS, None, device), rounds=3, device=device)
    (record,) = outcome.records
    assert records.faults(record) == []
    assert "cudnn" in record["peers"]
    (extra,) = records.OPS[case.op].extra
    assert record[extra] >= 0
    assert record["peers"]["cudnn"][extra] >= 0
