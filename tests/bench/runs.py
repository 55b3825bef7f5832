"""Small cases of operations, and a measurement of a case on a CPU."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsek_bench.engine import records
from sparsek_bench.engine.bench import BY_OP
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.peer import Peer, peers_named
from sparsek_bench.engine.run import Outcome, measure
from sparsek_bench.suites.attention import AttentionCase
from sparsek_bench.suites.attention_fp8 import AttentionFp8Case
from sparsek_bench.suites.attention_grad import AttentionGradCase, AttentionTrainCase
from sparsek_bench.suites.fp8 import Fp8Case
from sparsek_bench.suites.linear import LinearCase
from sparsek_bench.suites.mlp import MlpTrainCase
from sparsek_bench.suites.pack import PackCase
from sparsek_bench.suites.sddmm import SddmmCase
from sparsek_bench.suites.semi24 import Semi24Case
from sparsek_bench.suites.spgemm import SpgemmCase
from sparsek_bench.suites.spmm import SpmmCase
from sparsek_bench.suites.story import StoryCase
from sparsek_bench.suites.tokens import TokensCase

CPU = torch.device("cpu")


def measured(
    case: Any, *kernels: str, peers: Iterable[Peer] | None = None, rounds: int = 2, **more: Any
) -> Outcome:
    """The outcome of a case beside those of its peers, or of the given ones, that are meant for a CPU."""
    beside = peers_named(BY_OP[case.op].peers, None, CPU) if peers is None else tuple(peers)
    given = {"rounds": rounds, "device": CPU, "report": lambda text: None} | more
    outcome = measure(SuiteRow(case, kernels or ("auto",)), peers=beside, **given)
    for record in outcome.records:
        assert records.faults(record) == []
        assert list(record) == list(records.fields_of(case.op))
        assert records.case_of(json.loads(json.dumps(record))) == case
        assert records.is_fresh(record)
    return outcome


@dataclass(frozen=True)
class SmallCase:
    """A case, the kernel that is asked for, the kernel of its record, and its peers on a CPU."""

    case: Any
    kernel: str
    peers: set[str]
    recorded: str = ""

    def __str__(self) -> str:
        return f"{self.case.op}: {self.case.name}"


_ATTENTION = (1, 2, 1, 256, 256, 32, 32, "window:100+sinks:10", (64, 64), "fp32")
TOKENS = TokensCase(1, 2, 1, 256, 256, 32, 32, "tokens:2:15", (64, 64), "fp32")
SDDMM = SddmmCase(64, 96, 80, (32, 16), 0.5, dtype="fp32")
SPGEMM = SpgemmCase(64, 96, 80, (32, 48), (48, 16), 0.5, dtype="fp32")
LINEAR = LinearCase(24, 64, 96, (32, 32), 0.5, "bias+gelu+residual", "fp32")
TRAIN = MlpTrainCase(24, 64, 128, (32, 32), 0.5, dtype="fp32")
WHOLE = Semi24Case(96, 64, 40, dtype="fp32")
BLOCKS = Semi24Case(128, 256, 40, "A@B", (64, 64), 0.5, "fp32")
EQUAL = StoryCase(128, 256, 24, 0.5, (64, 64), "fp32")
PACKED = PackCase(64, 96, "bsr", (32, 16), 0.25, "fp32")
IN_FP8 = Fp8Case(96, 64, 32, "bsr", (32, 32), 0.5)
TWO_FOUR_FP8 = Fp8Case(64, 96, 32, "semi24", None, form="A@B", scale="tensor", dtype="e5m2")
HYBRID_FP8 = Fp8Case(128, 128, 32, "bsr24", (64, 64), 0.5, scale="block")
FAST_FP8 = replace(IN_FP8, fast_accum=True)
DENSE = {"torch_dense"}
SMALL = (
    SmallCase(AttentionCase(*_ATTENTION), "cpu.attention", {"sdpa"}),
    SmallCase(AttentionFp8Case(*_ATTENTION, scale="block"), "reference.attention_fp8", {"sdpa", "bf16"}),
    SmallCase(AttentionGradCase(*_ATTENTION), "reference.attention_bwd", {"sdpa"}),
    SmallCase(
        AttentionTrainCase(*_ATTENTION),
        "reference.attention",
        {"sdpa"},
        "reference.attention + reference.attention_bwd",
    ),
    SmallCase(TOKENS, "cpu.attention", {"sdpa"}),
    SmallCase(SpmmCase(64, 96, 32, (32, 32), 0.5, dtype="fp32"), "cpu.spmm", DENSE | {"torch_sparse"}),
    SmallCase(SDDMM, "reference.sddmm", DENSE),
    SmallCase(replace(SDDMM, dtype="bf16"), "reference.sddmm", DENSE),
    SmallCase(SPGEMM, "reference.spgemm", DENSE),
    SmallCase(replace(SPGEMM, out="bsr"), "reference.spgemm", DENSE),
    SmallCase(LINEAR, "cpu.spmm", DENSE | {"plain"}),
    SmallCase(TRAIN, "auto", DENSE, "cpu.spmm + reference.sddmm"),
    SmallCase(WHOLE, "reference.semi24", DENSE),
    SmallCase(replace(WHOLE, form="A@B"), "reference.semi24", DENSE),
    SmallCase(BLOCKS, "cpu.bsr24", DENSE | {"bsr"}),
    SmallCase(replace(BLOCKS, form="x@W.T", m=100), "cpu.bsr24", DENSE | {"bsr"}),
    SmallCase(EQUAL, "cpu.bsr24", DENSE),
    SmallCase(PACKED, "matrix.convert", {"copy"}),
    SmallCase(PackCase(16, 24, "semi24", dtype="bf16"), "matrix.two_four", {"copy"}),
    *(
        SmallCase(case, "reference.spmm_fp8", DENSE | {"bf16"})
        for case in (IN_FP8, TWO_FOUR_FP8, HYBRID_FP8, FAST_FP8)
    ),
)
