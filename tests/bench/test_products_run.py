"""SDDMM, BSR x BSR, linear layers and MLPs through the run, with the peers of a CPU: gates, rounds, records."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core import clock
from sparsek.products.formats.bsr import BSR
from sparsek.testing.budget import Gate
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import records, run
from sparsek_bench.engine.peer import Peer, ReadyPeer, UnavailableError, peers_named
from sparsek_bench.suites import mlp, spgemm
from sparsek_bench.suites.mlp import MlpDecodeCase
from sparsek_bench.suites.sddmm import SddmmCase
from sparsek_bench.suites.spgemm import SpgemmCase
from tests.bench.runs import CPU, LINEAR, SDDMM, SPGEMM, TRAIN, measured

CUDA = torch.device("cuda")
DENSE, SPARSE = SPGEMM, replace(SPGEMM, out="bsr")
DECODE = MlpDecodeCase(1, 64, 128, (32, 32), 0.5, dtype="fp32")
MLP_KERNELS = {"mlp_train": "cpu.spmm + reference.sddmm", "mlp_decode": "cpu.spmm"}


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer calls of the symbolic phase."""
    monkeypatch.setattr(clock, "WALL_CALLS", 2)
    monkeypatch.setattr(spgemm, "SYMBOLIC_ROUNDS", 2)


@pytest.mark.parametrize("case", [DENSE, SPARSE], ids=["dense", "bsr"])
def test_bsr_times_bsr_is_measured_with_its_symbolic_phase(case: SpgemmCase) -> None:
    (record,) = measured(case, "reference.spgemm").records
    assert record["symbolic_ms"] > 0
    assert record["symbolic_share"] > 0


def test_the_symbolic_phase_is_timed_on_patterns_that_keep_nothing() -> None:
    (one, *_) = SPARSE.operands(CPU)
    one.planned(one.plan(None))()
    first, second = spgemm.new_pattern(one.a), spgemm.new_pattern(one.a)
    assert first.same_as(one.a.pattern)
    assert first is not second
    built: list[str] = []
    for pattern in (first, one.a.pattern):
        pattern.derived("matches", lambda: built.append("made anew"))
    assert built == ["made anew"]


@pytest.mark.parametrize(
    "epilogue", ["", "bias+gelu", "bias+gelu_tanh", "silu", "relu", "bias+gelu+residual"]
)
def test_linear_is_measured_beside_the_plain_product(epilogue: str) -> None:
    outcome = measured(replace(LINEAR, epilogue=epilogue), "cpu.spmm")
    (record,) = outcome.records
    assert set(record["peers"]) == {"torch_dense"} | ({"plain"} if epilogue else set())
    if epilogue:
        plain = record["peers"]["plain"]["ms"]["median"]
        assert record["ratio"]["plain"] == pytest.approx(plain / record["ms"]["median"], rel=0.02, abs=1e-4)
        assert outcome.notes["plain"] == "cpu.spmm"
    else:
        assert outcome.unavailable["plain"] == ["the case is the plain product itself"]


def test_the_dense_twin_of_a_linear_layer_does_the_same_after_its_product() -> None:
    (one, *_) = LINEAR.operands(CPU)
    full, _ = one.dense(3)(), one.planned(one.plan(None))()
    assert full.shape == one.out.shape
    assert one.bias is not None
    assert one.residual is not None
    dense = torch.nn.functional.gelu(one.b @ one.a.to_dense().T + one.bias) + one.residual
    assert one.judge(dense).passed
    assert one.judge(one.out).passed
    assert not one.judge(full).passed
    torch.testing.assert_close(one.planned(one.plan(None))(), one.out)


def test_a_step_is_recorded_under_every_kernel_it_runs() -> None:
    (record,) = measured(TRAIN).records
    assert record["kernel"] == MLP_KERNELS["mlp_train"]
    assert set(record["config"]) == {
        "up",
        "down",
        "gradient of hidden",
        "gradient of W2",
        "gradient of x",
        "gradient of W1",
    }


def test_a_step_gives_the_output_and_the_gradients_of_both_weights_and_of_x() -> None:
    (one, *_) = replace(TRAIN, dtype="fp64").operands(CPU)
    y, dx, d1, d2 = one.plan(None).call()
    x = one.x.detach().requires_grad_()
    w1, w2 = (w.to_dense().detach().requires_grad_() for w in (one.w1, one.w2))
    exact = torch.nn.functional.gelu(x @ w1.T) @ w2.T
    torch.testing.assert_close(y, exact)
    exact.backward(one.dy)
    torch.testing.assert_close(dx, x.grad)
    for values, w, dense in ((d1, one.w1, w1), (d2, one.w2, w2)):
        grad = BSR.unchecked(w.pattern, values).to_dense()
        torch.testing.assert_close(grad, torch.where(w.to_dense() != 0, dense.grad, 0))


@pytest.mark.parametrize("place", range(4))
def test_one_wrong_gradient_fails_the_gate_of_a_step(place: int) -> None:
    (one, *_) = TRAIN.operands(CPU)
    out = list(one.plan(None).call())
    assert one.judge(out).passed
    out[place] = out[place] * 1.01
    gate = one.judge(out)
    assert not gate.passed
    assert gate.error > gate.budget


def test_a_compiled_step_calls_a_function_compiled_once_for_all_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    mlp._compiled.cache_clear()
    (record,) = measured(replace(TRAIN, mode="compiled")).records
    mlp._compiled.cache_clear()
    assert record["case"]["mode"] == "compiled"
    assert compiled == [{"fullgraph": True, "dynamic": False}]


def test_a_replay_that_holds_several_calls_is_timed_by_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is pretended: a replay runs every call and fills its results."""
    replays: list[int] = []

    def captured(calls: Any, device: torch.device) -> Any:
        results = tuple(torch.full_like(torch.as_tensor(call()), torch.nan) for call in calls)

        def replay() -> None:
            replays.append(len(calls))
            for call, result in zip(calls, results, strict=True):
                result.copy_(torch.as_tensor(call()))

        return replay, results

    monkeypatch.setattr(run, "captured", captured)
    sets = DECODE.operands(CPU)
    turn = run.Turn.of(DECODE, [one.plan(None).call for one in sets], CPU)
    assert turn.count == len(turn.results) == 2
    turn.call()
    assert sets[1].judge(turn.results[1]).passed
    assert replays == [2]
    times = run.Times.of([8.0, 4.0, 16.0])
    assert turn.per_call(times) == run.Times(4.0, 2.0, 8.0, 3)


def test_a_graph_whose_replay_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        type = "cuda"

    def captured(calls: Any, device: Any) -> Any:
        return lambda: None, tuple(torch.zeros_like(torch.as_tensor(call())) for call in calls)

    monkeypatch.setattr(run, "captured", captured)
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong graph"))
    sets = DECODE.operands(CPU)[:2]
    monkeypatch.setattr(MlpDecodeCase, "operands", lambda self, device: sets)
    pretended: Any = Gpu()
    with pytest.raises(run.GateError, match="exceeds the budget"):
        run.run_case(DECODE, device=pretended)


@pytest.mark.parametrize("case", [TRAIN, DECODE], ids=["train", "decode"])
def test_the_kernels_of_an_mlp_are_not_named(case: Any) -> None:
    (one, *_) = case.operands(CPU)
    plan = one.plan(None)
    assert plan.kernel == MLP_KERNELS[case.op]
    assert plan.bound_seconds == sum(each.bound_seconds for each in plan.plans.values())
    assert plan.problem.compulsory_bytes == sum(each.problem.compulsory_bytes for each in plan.plans.values())


@pytest.mark.parametrize(
    ("peers", "name", "case", "device", "said"),
    [
        (BENCHES["sddmm"].peers, "cublas", SDDMM, CPU, "runs on cuda"),
        (BENCHES["sddmm"].peers, "torch_sparse", SDDMM, CPU, "runs on cuda"),
        (BENCHES["sddmm"].peers, "torch_sparse", replace(SDDMM, m=65), CUDA, "multiples of the block 32x16"),
        (
            BENCHES["sddmm"].peers,
            "torch_sparse",
            replace(SDDMM, block=(48, 16)),
            CUDA,
            "powers of 2, not 48x16",
        ),
        (BENCHES["sddmm"].peers, "torch_sparse", replace(SDDMM, dtype="fp64"), CUDA, "no fp64"),
        (BENCHES["mlp"].peers, "torch_dense_compiled", TRAIN, CPU, "runs on cuda"),
    ],
)
def test_a_peer_that_cannot_run_says_why(
    peers: Sequence[Peer], name: str, case: Any, device: torch.device, said: str
) -> None:
    (peer,) = [peer for peer in peers if peer.name == name]
    assert said in "; ".join(peer.why_not(case, device))


@pytest.mark.parametrize(
    ("peers", "case", "able"),
    [
        (BENCHES["sddmm"].peers, SddmmCase(8192, 8192, 8192, (128, 128), 0.125), ["cublas", "torch_sparse"]),
        (BENCHES["spgemm"].peers, spgemm.SPARSE[0], ["cublas"]),
        (BENCHES["spgemm"].peers, spgemm.TOPK[0], ["cublas"]),
        (BENCHES["linear"].peers, replace(LINEAR, dtype="bf16"), ["cublas", "plain"]),
        (BENCHES["mlp"].peers, TRAIN, ["torch_dense", "torch_dense_compiled"]),
    ],
)
def test_the_peers_of_a_gpu_take_the_main_cases(peers: Sequence[Peer], case: Any, able: list[str]) -> None:
    assert [peer.name for peer in peers_named(peers, None, CUDA) if not peer.why_not(case, CUDA)] == able


def test_a_peer_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = [peer for peer in BENCHES["linear"].peers if peer.name == "plain"]
    sets = LINEAR.operands(CPU)[:1]
    monkeypatch.setattr(type(sets[0]), "judge", lambda self, out, tf32=False: Gate(1.0, 0.5, False))
    with pytest.raises(UnavailableError, match="is wrong here: error 1"):
        plain.ready(LINEAR, sets, lambda text: None)


def test_a_peer_that_cannot_be_captured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        type = "cuda"

    class Syncs(Peer):
        def ready(self, case: Any, sets: Any, tried: Any) -> ReadyPeer:
            return ReadyPeer((lambda: "sync",))

    def captured(calls: Any, device: Any) -> Any:
        if calls[0]() == "sync":
            raise RuntimeError("operation not permitted when stream is capturing")
        return (lambda: None), tuple(call() for call in calls)

    sets = DECODE.operands(CPU)[:2]
    monkeypatch.setattr(MlpDecodeCase, "operands", lambda self, device: sets)
    monkeypatch.setattr(run, "captured", captured)
    monkeypatch.setattr(
        run, "time_rounds", lambda calls, **options: {name: run.Times.of([1.0]) for name in calls}
    )
    monkeypatch.setattr(records, "environment", lambda *args: dict.fromkeys(records.ENV_FIELDS))
    pretended: Any = Gpu()
    outcome = run.run_case(DECODE, peers=[Syncs("syncs", "a peer that syncs")], device=pretended)
    assert outcome.unavailable["syncs"] == [
        "cannot be captured in a CUDA graph: operation not permitted when stream is capturing"
    ]
    assert [record["ms"]["median"] for record in outcome.records] == [0.5]
