"""2:4, FP8, packing and equal stored values on a GPU: peers are set up, are right, and share the rounds of a record."""

from typing import Any

import pytest
import torch

from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import records
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.peer import peers_named
from sparsek_bench.engine.run import measure
from sparsek_bench.peers import cusparselt
from sparsek_bench.suites.fp8 import Fp8Case
from sparsek_bench.suites.pack import PackCase
from sparsek_bench.suites.semi24 import Semi24Case
from sparsek_bench.suites.story import StoryCase
from tests.engine.launch.covering import once

pytestmark = pytest.mark.gpu
PEERS = {
    "semi24": BENCHES["semi24"].peers,
    "story": BENCHES["semi24"].peers,
    "pack": BENCHES["pack"].peers,
    "fp8": BENCHES["fp8"].peers,
}


Row = tuple[Any, tuple[str, ...], set[str]]


def kinds(at: int) -> list[tuple[object, ...]]:
    """What each run measures: every operation with every peer and kernel, in every form, format and kind of sums."""
    case, kernels, wanted = ROWS[at]
    facts = ("form", "stored", "to", "dtype", "fast_accum")
    how = [(name, str(getattr(case, name, ""))) for name in facts]
    return [(case.op, each) for each in (*wanted, *kernels, *how, getattr(case, "block", None) is None)]


ROWS: list[Row] = [
    (Semi24Case(1024, 2048, 512), ("auto", "unpacked.semi24"), {"cublas", "cusparselt"}),
    (Semi24Case(1024, 2048, 512, "A@B", dtype="fp16"), ("auto",), {"cublas", "cusparselt"}),
    (Semi24Case(1024, 2048, 512, block=(128, 128), density=0.25), ("auto",), {"cublas", "bsr"}),
    (Semi24Case(1024, 2048, 512, "A@B", (128, 128), 0.25), ("auto",), {"cublas", "bsr"}),
    (
        StoryCase(1024, 2048, 512, 0.5),
        ("unpacked.semi24", "unpacked.bsr24", "auto"),
        {"cublas", "cusparselt"},
    ),
    (StoryCase(1024, 2048, 512, 0.25), ("unpacked.bsr24", "auto"), {"cublas"}),
    (PackCase(2048, 4096, "semi24"), ("auto",), {"copy"}),
    (PackCase(2048, 4096, "bsr", (128, 128), 0.25), ("auto",), {"copy"}),
    (Fp8Case(1024, 2048, 512, density=0.25), ("auto",), {"cublas_fp8", "cublas_fp8_float32", "bf16"}),
    (Fp8Case(1024, 2048, 512, density=0.25, form="A@B"), ("auto",), {"cublas_fp8", "bf16"}),
    (Fp8Case(1024, 2048, 512, "semi24", None), ("auto",), {"cublas_fp8", "bf16"}),
    (Fp8Case(1024, 2048, 512, density=0.25, fast_accum=True), ("auto",), {"cublas_fp8", "bf16"}),
    (Fp8Case(1024, 2048, 512, "semi24", None, fast_accum=True), ("auto",), {"cublas_fp8", "bf16"}),
]


@pytest.mark.parametrize(
    ("case", "kernels", "wanted"),
    [ROWS[at] for at in once(range(len(ROWS)), kinds)],
    ids=lambda value: getattr(value, "name", None),
)
def test_all_peers_and_kernels_share_the_rounds_of_a_record(
    case: Any, kernels: tuple[str, ...], wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In fp16 algorithms of cuSPARSELt are fatal, and some never return: two children took two minutes beside other
    # tests. What children answered before their time is over counts.
    monkeypatch.setattr(cusparselt, "LIMIT", 40.0)
    if not torch.backends.cusparselt.is_available():
        wanted = wanted - {"cusparselt"}
    device = torch.device("cuda", 0)
    outcome = measure(
        SuiteRow(case, kernels),
        peers=peers_named(PEERS[case.op], None, device),
        rounds=3,
        device=device,
        report=lambda text: None,
    )
    assert outcome.records
    for record in outcome.records:
        assert records.faults(record) == []
        assert wanted <= set(record["peers"]), outcome.unavailable
        assert record["roofline"]["fraction"] > 0
