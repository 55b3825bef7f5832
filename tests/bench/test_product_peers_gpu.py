"""Products on a GPU: their peers are set up, are right, and are measured in the same rounds; graphs and MLPs too."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import records
from sparsek_bench.engine.peer import peers_named
from sparsek_bench.engine.run import captured, run_case
from sparsek_bench.peers.torch_sparse import SAMPLED
from sparsek_bench.suites.linear import LinearCase
from sparsek_bench.suites.mlp import MlpDecodeCase, MlpTrainCase
from sparsek_bench.suites.sddmm import SddmmCase
from sparsek_bench.suites.spgemm import SpgemmCase
from sparsek_bench.suites.spmm import SpmmCase

pytestmark = pytest.mark.gpu
SDDMM = SddmmCase(1024, 768, 512, (64, 64), 0.25)
BSR = SpgemmCase(1024, 1024, 1024, (64, 64), (64, 64), 0.1, "bsr")
MLP = (1024, 2048, (128, 128), 0.25)


@pytest.mark.parametrize("case", [SDDMM, replace(SDDMM, block=(128, 128)), replace(SDDMM, dtype="fp16")])
def test_the_kernel_of_sampled_addmm_is_right_on_every_set(case: SddmmCase) -> None:
    device = torch.device("cuda", 0)
    sets = case.operands(device)[:2]
    tried: list[str] = []
    ready = SAMPLED.ready(case, sets, tried.append)
    assert "num_stages=" in ready.note
    assert any("ms" in text for text in tried)
    for call in ready.calls:
        call()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("case", "table", "wanted"),
    [
        (SpmmCase(1024, 768, 512, (128, 128), 0.25, form="A.T@B"), BENCHES["spmm"].peers, {"cublas"}),
        (SpmmCase(1024, 768, 512, (128, 128), 0.25, form="B@A"), BENCHES["spmm"].peers, {"cublas"}),
        (SDDMM, BENCHES["sddmm"].peers, {"cublas", "torch_sparse"}),
        (replace(BSR, out="dense"), BENCHES["spgemm"].peers, {"cublas"}),
        (BSR, BENCHES["spgemm"].peers, {"cublas"}),
        (
            LinearCase(512, 768, 1024, (128, 128), 0.25, "bias+gelu"),
            BENCHES["linear"].peers,
            {"cublas", "plain"},
        ),
        (MlpTrainCase(512, *MLP), BENCHES["mlp"].peers, {"torch_dense", "torch_dense_compiled"}),
        (
            MlpTrainCase(512, *MLP, mode="compiled"),
            BENCHES["mlp"].peers,
            {"torch_dense", "torch_dense_compiled"},
        ),
        (MlpDecodeCase(1, *MLP), BENCHES["mlp"].peers, {"torch_dense", "torch_dense_compiled"}),
        (MlpDecodeCase(16, *MLP), BENCHES["mlp"].peers, {"torch_dense", "torch_dense_compiled"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_all_peers_and_kernels_share_the_rounds_of_a_record(case: Any, table: Any, wanted: set[str]) -> None:
    device = torch.device("cuda", 0)
    outcome = run_case(case, peers=peers_named(table, None, device), rounds=3, device=device)
    (record,) = outcome.records
    assert records.faults(record) == []
    assert wanted <= set(record["peers"]), outcome.unavailable
    assert 0 < record["roofline"]["fraction"] < 1.1


def test_a_graph_holds_every_call_and_rewrites_its_results() -> None:
    device = torch.device("cuda", 0)
    sources = [torch.full((1024,), float(place), device=device) for place in range(3)]
    replay, results = captured([lambda x=x: x + 1 for x in sources], device)
    for source in sources:
        source.add_(10)
    held = [weakref.ref(source) for source in sources]
    del source, sources
    assert all(each() is not None for each in held)  # the graph reads them
    replay()
    torch.cuda.synchronize()
    assert [float(result[0]) for result in results] == [11.0, 12.0, 13.0]
