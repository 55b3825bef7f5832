"""The run: data, gate, rounds, records."""

from typing import Any

import pytest
import torch

from sparsek.core.device import H200
from sparsek_bench.engine import data, records, run
from sparsek_bench.engine.peer import ReadyPeer, peers_named
from sparsek_bench.suites import product
from sparsek_bench.suites.spmm import PEERS, SpmmCase

CPU = torch.device("cpu")
SMALL = SpmmCase(64, 96, 32, (32, 32), 0.5, dtype="fp32")


def test_a_run_gives_well_formed_records_with_peers_of_the_same_rounds() -> None:
    heard: list[str] = []
    peers = peers_named(PEERS, ["torch_dense", "torch_sparse", "cusparse"], CPU)
    outcome = run.run_case(
        SMALL, kernels=["cpu.spmm"], peers=peers, rounds=3, device=CPU, report=heard.append
    )
    (record,) = outcome.records
    assert records.faults(record) == []
    assert list(record) == list(records.FIELDS)
    assert record["case"] == SMALL.as_record()
    assert record["kernel"] == "cpu.spmm"
    assert set(record["peers"]) == {"torch_dense", "torch_sparse"}
    assert record["ms"]["rounds"] == record["peers"]["torch_sparse"]["ms"]["rounds"] == 3
    for name, peer in record["peers"].items():
        assert record["ratio"][name] == pytest.approx(record["tflops"]["useful"] / peer["tflops"], rel=0.02)
    assert outcome.unavailable == {"cusparse": ["runs on cuda, the case is on cpu"]}
    assert heard[-1] == "round 3 of 3"


def test_an_unsupported_kernel_is_listed_with_its_reasons() -> None:
    outcome = run.run_case(SMALL, kernels=["hopper.spmm", "cpu.spmm"], rounds=1, device=CPU)
    assert [record["kernel"] for record in outcome.records] == ["cpu.spmm"]
    assert list(outcome.unavailable) == ["hopper.spmm"]
    assert outcome.unavailable["hopper.spmm"]


def test_auto_and_the_kernel_it_chooses_give_one_record() -> None:
    chosen = run.run_case(SMALL, rounds=1, device=CPU).records[0]["kernel"]
    assert len(run.run_case(SMALL, kernels=["auto", chosen], rounds=1, device=CPU).records) == 1


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = product.plan_spmm

    class Wrong:
        def __init__(self, plan: Any) -> None:
            self.kernel, self.problem = plan.kernel, plan.problem

        def __call__(self, a: Any, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out.zero_()

    monkeypatch.setattr(product, "plan_spmm", lambda a, b, kernel=None: Wrong(real(a, b, kernel=kernel)))
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong kernel"))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        run.run_case(SMALL, kernels=["cpu.spmm"], rounds=1, device=CPU)


@pytest.mark.parametrize("tf32", [False, True])
def test_the_gate_allows_tf32_where_the_problem_does(monkeypatch: pytest.MonkeyPatch, tf32: bool) -> None:
    seen: list[bool] = []
    real = product.check_spmm

    def check(a: Any, b: torch.Tensor, out: torch.Tensor, *, tf32: bool = False) -> Any:
        seen.append(tf32)
        return real(a, b, out)

    monkeypatch.setattr(product, "check_spmm", check)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        run.run_case(SMALL, kernels=["cpu.spmm"], rounds=1, device=CPU)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert seen == [tf32]


def test_operand_sets_of_a_ragged_case_keep_zeros_in_the_padding() -> None:
    for one in SpmmCase(70, 90, 8, (32, 32), 0.5, dtype="fp32").operands(CPU):
        padded = one.a.logical_values()[one.a.pattern.block_rows == 2]
        assert not padded[:, 70 - 64 :].any()


def test_operand_sets_exceed_the_cache_several_times_or_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_SETS", 64)
    footprint = 10 << 20
    count = data.set_count(H200, footprint)
    assert count * footprint >= data.CACHE_MULTIPLE * H200.l2_bytes > (count - 1) * footprint
    assert data.set_count(H200, 1) == data.MAX_SETS
    assert data.set_count(H200, 10 * H200.l2_bytes) == 2
    assert len(SpmmCase(2048, 2048, 2048, (128, 128), 1.0, dtype="fp32").operands(CPU)) == 2


def test_the_densest_peer_that_is_not_too_long_heats_the_card() -> None:
    ready = {
        "sparse": ReadyPeer(()),
        "dense": ReadyPeer((), flops=1e12),
        "denser": ReadyPeer((), flops=2e12),
        "long": ReadyPeer((), flops=1e15),
    }
    assert run._heater(ready) == "peer denser"
    assert run._heater({"sparse": ready["sparse"], "long": ready["long"]}) is None
