"""Attention through the run: records with memory, new masks, sampled gates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.testing.attention_budget import ExpectedAttention
from sparsek.testing.budget import Gate
from sparsek_bench.engine import records, run
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.peer import ReadyPeer, peers_named
from sparsek_bench.suites import attention
from sparsek_bench.suites.attention import PEERS, AttentionCase

CPU = torch.device("cpu")
SMALL = AttentionCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
KERNEL = ("cpu.attention",)


def measured(entry: SuiteRow, rounds: int = 2) -> records.Record:
    """The one record of an entry, on the CPU."""
    outcome = run.measure(
        entry, peers=peers_named(PEERS, None, CPU), rounds=rounds, device=CPU, report=lambda text: None
    )
    (record,) = outcome.records
    assert records.faults(record) == []
    assert list(record) == list(records.fields_of(entry.case.op))
    assert record["op"] == entry.case.op
    assert record["case"] == entry.case.as_record()
    return record


def test_a_run_gives_well_formed_records_with_the_dense_peer() -> None:
    record = measured(SuiteRow(SMALL, KERNEL), rounds=3)
    assert record["kernel"] == "cpu.attention"
    assert set(record["peers"]) == {"sdpa"}
    assert record["memory"] is None
    assert record["peers"]["sdpa"]["memory"] is None
    useful = SMALL.operands(CPU)[0].useful_flops
    assert record["tflops"]["useful"] == pytest.approx(
        useful / record["ms"]["median"] / 1e9, rel=0.02, abs=2e-6
    )
    dense = record["peers"]["sdpa"]
    assert dense["tflops"] == pytest.approx(
        SMALL.causal_flops / dense["ms"]["median"] / 1e9, rel=0.02, abs=2e-6
    )


def test_every_call_with_a_new_mask_builds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, *_) = replace(SMALL, mask="causal").operands(CPU)
    made: list[BlockMask] = []

    def make() -> BlockMask:
        made.append(one.make())
        return made[-1]

    call = replace(one, make=make).anew("cpu.attention")
    first, second = call(), call()
    assert len({id(mask) for mask in made}) == 2
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def test_long_sequences_are_gated_by_a_sample_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = attention.expected_attention

    def check(*args: Any, rows: Any) -> ExpectedAttention:
        seen.append(rows)
        return real(*args, rows=rows)

    monkeypatch.setattr(attention, "expected_attention", check)
    monkeypatch.setattr(attention, "GATED_WHOLE", 2**20)
    for length in (256, 2048):
        (one, *_) = replace(SMALL, q_len=length, kv_len=length).operands(CPU)
        assert one.gate(one.plan("cpu.attention")).passed
        assert one.gate(one.plan("reference.attention")).passed
    assert len(seen) == 2  # the reference is computed once, whoever is judged by it
    assert seen[0] is None
    assert len(seen[1]) == len(set(seen[1])) == attention.GATED_TILES
    assert (seen[1][0], seen[1][-1]) == (0, 31)


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Gate(1.0, 0.5, False)
    monkeypatch.setattr(ExpectedAttention, "judge", lambda *args: wrong)
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong kernel"))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        measured(SuiteRow(replace(SMALL, mask="causal"), KERNEL))


def test_the_densest_peer_that_is_not_too_long_heats_the_card() -> None:
    ready = {
        "sparse": ReadyPeer(()),
        "dense": ReadyPeer((), flops=1e12),
        "denser": ReadyPeer((), flops=2e12),
        "long": ReadyPeer((), flops=1e15),
    }
    assert run._heater(ready) == "peer denser"
    assert run._heater({"sparse": ready["sparse"], "long": ready["long"]}) is None
