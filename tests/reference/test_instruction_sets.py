"""Numbers are judged alike on CPUs of other kinds: a few numeric tests, with instruction sets capped or sums moved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import odd_cpu
from tests.sampling import sampled
from tests.sums import alike

# How torch's own kernels, oneDNN and MKL are capped, from the least.
CAPS = {
    "SSE4": ("default", "SSE41", "SSE4_2"),
    "AVX2": ("avx2", "AVX2", "AVX2"),
    "AVX-512": ("avx512", "AVX512_CORE", "AVX512"),
}
# Every other test runs with it. What the CPU lacks cannot be asked for: torch would run it, and the process would end.
OWN = torch.backends.cpu.get_cpu_capability().upper().replace("DEFAULT", "SSE4")
TESTS = (
    "tests/ops/test_gradients.py::test_gradients_of_2_4_are_within_the_error_budget",
    "tests/products/kernels/spmm/test_cpu.py::test_every_config_is_within_budget",
    "tests/attn/kernels/test_cpu.py::test_gradients_of_every_case_are_within_budget_and_the_same_bits_again",
)
LEVELS = [name.replace("-", "") for name in CAPS]
OTHERS = sampled([*CAPS][: LEVELS.index(OWN)] if OWN in LEVELS else [], 1)


@pytest.mark.parametrize("name", OTHERS)
def test_budgets_hold_with_other_instruction_sets(name: str) -> None:
    names = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
    root = Path(__file__).parents[2]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "float32 and not gqa", *TESTS],
        cwd=root,
        env=own | dict(zip(names, CAPS[name], strict=True)) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_unwritten_memory_holds_what_no_result_may() -> None:
    with odd_cpu.asked_for("memory"):
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        assert all(each.isnan().all() for each in (x, torch.empty_like(x.mT), x.new_empty(2)))
        assert x.new_empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
        assert torch.zeros(2).tolist() == [0, 0]


def test_another_cpu_adds_in_another_order_for_other_layouts_only() -> None:
    plain = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(0))
    whole = torch.randint(-8, 8, (2, 30, 30)).float()
    with odd_cpu.asked_for("sums,addresses"):
        x, y = torch.randn(3, 40, 50), torch.randn(3, 50, 60)
        assert x.data_ptr() % 64 == y.data_ptr() % 64 == 16
        for run in (torch.matmul, lambda x, y: (x @ y).sum(-1), lambda x, y: (x @ y).softmax(-1)):
            assert torch.equal(run(x, y), run(x, y))
            assert not torch.equal(run(x, y)[0], run(x[0], y[0]))
            assert alike(run(x, y)[0], run(x[0], y[0]), terms=1 << 14)
        assert torch.equal((whole @ whole)[0], whole[0] @ whole[0])
        moved = plain.exp(), (plain @ plain.mT)
    assert torch.randn(3).data_ptr() % 64 == 0
    for found, right in zip(moved, (plain.exp(), plain @ plain.mT), strict=True):
        assert alike(found, right)
        assert not torch.equal(found, right)
