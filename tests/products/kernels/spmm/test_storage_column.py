"""The last column of KERNELS: which storage a kernel of spmm multiplies, as its `why_not` says too."""

from typing import Any

import pytest

from sparsek.core.device import CPU, H200
from sparsek.engine.table import load, names_for
from sparsek.products.formats.storage import FP8, TITLES
from sparsek.products.kernels import KERNELS
from sparsek.products.plan.problems import SpmmProblem
from tests.problems import fp8_problem, spmm_problem

FACTS: dict[str, dict[str, Any]] = {
    "bsr": {"block": (128, 128), "nnzb": 3},
    "semi24": {"two_four": True},
    "bsr24": {"block": (128, 128), "nnzb": 3, "two_four": True},
}
ROWS = [(name, kind) for op, name, _, kind in KERNELS if op == "spmm"]


def plain(kind: str, card: Any) -> SpmmProblem:
    """A @ B of 256 x 256 x 256 and that storage, as every kernel would have it."""
    facts = {"m": 256, "k": 256, "n": 256, "card": card, **FACTS[kind.removesuffix("_fp8")]}
    return fp8_problem(**facts, dtype="e4m3") if kind in FP8 else spmm_problem(**facts, dtype="bf16")


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_a_kernel_refuses_exactly_the_storages_that_it_is_not_listed_for(name: str, kind: str) -> None:
    kernel, own = load(name), FP8 if kind == "fp8" else (kind,)
    for each in TITLES:
        for card in (H200, CPU):
            p = plain(each, card)
            assert p.a.kind == each
            foreign, found = p.a.unless(*own), kernel.why_not(p)
            if each in own:
                assert foreign == []
                assert not any(f"not {TITLES[each]}" in reason for reason in found), found
                assert name in names_for("spmm", each)
            else:
                assert found == foreign
                assert name not in names_for("spmm", each)


@pytest.mark.parametrize("kind", TITLES)
def test_every_storage_has_kernels_on_a_gpu_and_on_a_cpu(kind: str) -> None:
    for card, family in ((H200, "hopper"), (CPU, "cpu" if kind in ("bsr", "bsr24") else "reference")):
        able = [name for name in names_for("spmm", kind) if not load(name).why_not(plain(kind, card))]
        assert any(name.startswith(family) for name in able), able
        assert any(name.startswith("reference") for name in able), able


def test_the_column_is_for_spmm_alone() -> None:
    kinds = {kind for op, _, _, kind in KERNELS if op == "spmm"}
    assert kinds == {*TITLES, "fp8"}
    assert {kind for op, _, _, kind in KERNELS if op != "spmm"} == {""}
