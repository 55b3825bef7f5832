"""Attention through the run: records with memory, new masks, sampled gates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.testing.attention_budget import ExpectedAttention
from sparsek_bench.engine import run
from sparsek_bench.engine.peer import ReadyPeer
from sparsek_bench.suites import attention
from sparsek_bench.suites.attention import AttentionCase

CPU = torch.device("cpu")
SMALL = AttentionCase(1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
KERNEL = ("cpu.attention",)


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


def test_the_densest_peer_that_is_not_too_long_heats_the_card() -> None:
    ready = {
        "sparse": ReadyPeer(()),
        "dense": ReadyPeer((), flops=1e12),
        "denser": ReadyPeer((), flops=2e12),
        "long": ReadyPeer((), flops=1e15),
    }
    assert run._heater(ready) == "peer denser"
    assert run._heater({"sparse": ready["sparse"], "long": ready["long"]}) is None
