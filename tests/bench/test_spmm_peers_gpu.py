"""Peers on a GPU: each is set up, is right, and is measured in the same rounds."""

import pytest
import torch

from sparsek.testing.budget import check_spmm
from sparsek_bench.engine import records
from sparsek_bench.engine.peer import peers_named
from sparsek_bench.engine.run import run_case
from sparsek_bench.suites.spmm import PEERS, SpmmCase

pytestmark = pytest.mark.gpu
CASES = [
    SpmmCase(1024, 768, 256, (64, 64), 0.25),
    SpmmCase(512, 1024, 128, (32, 32), 0.25, "powerlaw", "fp16"),
    SpmmCase(512, 1024, 16, (128, 128), 0.5),
]


@pytest.mark.parametrize("name", ["torch_sparse", "cusparse"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sparse_peer_multiplies_every_set_within_the_budget(case: SpmmCase, name: str) -> None:
    device = torch.device("cuda", 0)
    sets = case.operands(device)[:3]
    (peer,) = [peer for peer in PEERS if peer.name == name]
    ready = peer.ready(case, sets, lambda text: None)
    for call, one in zip(ready.calls, sets, strict=True):
        one.out.fill_(float("nan"))
        call()
        assert check_spmm(one.a, one.b, one.out).passed


def test_all_peers_and_kernels_share_the_rounds_of_a_record() -> None:
    device = torch.device("cuda", 0)
    outcome = run_case(CASES[0], peers=peers_named(PEERS, None, device), rounds=3, device=device)
    (record,) = outcome.records
    assert records.faults(record) == []
    assert {"cublas", "torch_sparse"} <= set(record["peers"])
    assert record["env"]["driver"]
    assert record["env"]["power_limit_w"]
