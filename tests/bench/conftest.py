"""A well-formed record to start from."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sparsek_bench.engine import data, records
from sparsek_bench.engine.bench import TABLES
from sparsek_bench.engine.case import Case
from sparsek_bench.suites.attention import AttentionCase
from sparsek_bench.suites.spmm import SpmmCase

GOOD_CASE = SpmmCase(8192, 8192, 8192, (128, 128), 0.125)
KERNELS = {
    "spmm": "cpu.spmm",
    "attention": "cpu.attention",
    "attention_fp8": "reference.attention_fp8",
    "attention_backward": "reference.attention_bwd",
    "attention_train": "reference.attention + reference.attention_bwd",
    "attention_tokens": "cpu.attention",
    "attention_tokens_backward": "reference.attention_bwd",
    "attention_tokens_train": "reference.attention + reference.attention_bwd",
    "sddmm": "reference.sddmm",
    "spgemm": "reference.spgemm",
    "linear": "cpu.spmm",
    "semi24": "reference.semi24",
    "story": "cpu.spmm",
    "fp8": "reference.spmm_fp8",
    "pack": "matrix.convert",
    "mlp_train": "cpu.spmm + reference.sddmm",
    "mlp_decode": "cpu.spmm",
    "serving": "reference.attention_paged",
    "fresh": "cpu.attention",
    "policy": "policies.xattention",
    "policy_estimate": "policies.xattention",
    "policy_recall": "policies.xattention",
    "planner": "ops.weight_formats",
    "model": "models.sparsify",
    "pattern_steps": "nn.regrow",
    "generate": "integrations.transformers",
    "prune_memory": "models.prune",
    "fresh_product": "ops.spmm",
    "mesh": "distributed.attention",
    "mesh_memory": "distributed.attention",
    "mesh_model": "distributed.styles",
    "host": "ops.spmm",
}
WINDOW_CASE = AttentionCase(1, 16, 16, 32768, 32768, 128, 128, "window:2048")


RAN = ["sparsek.core.clock:Times.of"]


def _record(case: Case = GOOD_CASE, kernel: str = "", **changes: Any) -> records.Record:
    """A record of the given case and kernel whose source is today's, with fields replaced by `changes`."""
    kernel = kernel or KERNELS[case.op]
    kind = records.OPS[case.op]
    (dense,) = TABLES[case.table or case.op].dense[:1] or ("attention",)
    extra = dict.fromkeys(kind.extra, 0.01)
    peer = {"ms": {"median": 1.6, "min": 1.5, "max": 1.7, "rounds": 7}, "tflops": 687.0}
    record: records.Record = {
        "op": case.op,
        "case": case.as_record(),
        "kernel": kernel,
        "config": {"tile": 128},
        "ms": {"median": 0.2, "min": 0.19, "max": 0.25, "rounds": 7},
        "tflops": {"useful": 687.0, "dense_equivalent": 5496.0},
        "gbps": 1500.0,
        "roofline": {"bound_ms": 0.199, "fraction": 0.995},
        "gate": {"error": 0.001, "budget": 0.004, "passed": True},
        "peers": {dense: peer | dict.fromkeys(kind.peer_extra, 0.01)},
        "ratio": {dense: 1.0},
        "env": {
            "gpu": "NVIDIA H200",
            "driver": "580.1",
            "power_limit_w": 700.0,
            "torch": "2.11.0",
            "triton": "3.6.0",
            "cuda": "13.0",
        },
        "source_hash": records.hash_of(case.op, kernel, RAN),
        "date": "2026-11-20T10:00:00+00:00",
    }
    return record | extra | ({"ran": RAN} if kind.hosted else {}) | changes


@pytest.fixture(autouse=True)
def few_sets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operand sets are enough on a CPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(data, "MAX_SETS", 2)


@pytest.fixture
def make_record() -> Callable[..., records.Record]:
    """Makes a good record of a case and a kernel, with fields replaced by keyword."""
    return _record


@pytest.fixture
def record() -> records.Record:
    return _record()


@pytest.fixture
def attention_record() -> records.Record:
    return _record(WINDOW_CASE)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module with the given names where an import finds it."""

    def install(name: str, **names: Any) -> None:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            parent = ".".join(parts[:count])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        for key, value in names.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)

    return install
