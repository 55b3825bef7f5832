"""Attention over blocks that each query chooses, and its gradients, as a benchmark: cases and suites.

Neighbours agree mostly (noise 15 %), almost always (3 %) or not at all (100 %); or the lists are those of a small model
that benchmarks/token_lists trained for 100 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from sparsek_bench.engine.bench import Bench
from sparsek_bench.engine.case import SuiteRow, rows
from sparsek_bench.engine.tables import CASE, MS, RATE, SPEEDUP
from sparsek_bench.peers.attention import GRAD_PEERS, SelectedBlocks
from sparsek_bench.suites.attention import HOPPER, TABLE, AttentionCase
from sparsek_bench.suites.attention_grad import BACKWARD_TABLE, AttentionGradCase, AttentionTrainCase


@dataclass(frozen=True)
class TokensCase(AttentionCase):
    """Attention of a mask "tokens:K:N": K blocks of each query, of the keys of `block`."""

    op: ClassVar[str] = "attention_tokens"
    deterministic: ClassVar[bool] = False  # peers of the gradients ask


@dataclass(frozen=True)
class TokensGradCase(AttentionGradCase):
    """Its gradients, from its out and lse."""

    op: ClassVar[str] = "attention_tokens_backward"


@dataclass(frozen=True)
class TokensTrainCase(AttentionTrainCase):
    """A step of both passes."""

    op: ClassVar[str] = "attention_tokens_train"


LISTS = [
    (f"tokens:16:{noise}", kilo, block) for block in (128, 64) for kilo in (8, 32) for noise in (15, 3, 100)
]
FORWARD: tuple[SuiteRow, ...] = (
    *rows(HOPPER, *(TokensCase.square(*each, heads=(64, 4)) for each in LISTS)),
    *rows(HOPPER, *(TokensCase.square("tokens:16:15", 32, heads=(heads, 4)) for heads in (32, 16))),
    *rows(HOPPER, TokensCase.square("tokens:16:15", 128, heads=(64, 4))),
    *rows(HOPPER, TokensCase.square("tokens:recorded", 8, 64, heads=(64, 4))),
)
MOSTLY = [each for each in LISTS if each[0].endswith(":15")]
BACKWARD = rows(
    "auto", *(TokensGradCase.square(*each, heads=(64, 4)) for each in (*MOSTLY, ("tokens:recorded", 8, 64)))
)
TRAIN = rows("auto", *(TokensTrainCase.square("tokens:16:15", kilo, heads=(64, 4)) for kilo in (8, 32, 128)))
NOTE = (
    "Useful TFLOPS count the keys that each query sees, the roofline whole blocks of the unions. Dense is cuDNN; all "
    "dense peers are causal. Over a peer: 1.50 means 1.5 times as fast."
)
FORWARD_TABLE = replace(
    TABLE,
    op="attention_tokens",
    title="attention over blocks of each token",
    columns=(CASE, MS, SPEEDUP, RATE),
    note=NOTE,
    beside=("fa4", "flex", "fla"),
    usual=("block 128", "64:4 heads", "D 128", "bf16"),
)
GRAD_TABLE, STEP_TABLE = (
    replace(FORWARD_TABLE, op=op, title=title, kernels=kernels)
    for op, title, kernels in (
        (
            "attention_tokens_backward",
            "gradients of attention over blocks of each token",
            BACKWARD_TABLE.kernels,
        ),
        ("attention_tokens_train", "training step of attention over blocks of each token", None),
    )
)
BENCH = Bench(
    "tokens",
    suites={"published": FORWARD, "backward": BACKWARD, "train": TRAIN},
    kinds=(TokensCase, TokensGradCase, TokensTrainCase),
    measures={"forward": TokensCase, "backward": TokensGradCase, "train": TokensTrainCase},
    peers=(*GRAD_PEERS, SelectedBlocks("fla", "fla's selected attention", "cuda")),
    tables=(FORWARD_TABLE, GRAD_TABLE, STEP_TABLE),
    small="--mask tokens:3:15 --seq 1K --heads 4:2 --dim 64 --dtype fp32",
    slowest=90.0,
)
