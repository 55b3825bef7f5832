"""The models that kernels share: the fullest worker, the power limit, and dense products beside their records."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sparsek.core.device import CPU, H200
from sparsek.engine.plan.dense import dense_seconds
from sparsek.engine.plan.ring import fullest, norm, throttled
from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.schedule import balance, walk

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "planner.jsonl"


@pytest.mark.parametrize("columns", [1, 2, 4, 9, 32])
@pytest.mark.parametrize("blocks", [16, 32, 128])
def test_the_fullest_worker_is_near_that_of_the_schedule(blocks: int, columns: int) -> None:
    rng = np.random.default_rng(blocks)
    pattern = random_bsr(blocks * 128, 4096, 128, 0.25).pattern
    units = walk(pattern, 128)
    steps = rng.binomial(100, 0.2, len(units.begin)) + 1
    end = np.cumsum(steps)
    uneven = units._replace(begin=end - steps, end=end)
    deal = balance(uneven, columns * 256, 256, 132)
    made = (
        deal.imbalance * steps.sum() * columns / deal.ctas + deal.imbalance * len(steps) * columns / deal.ctas
    )
    cost = steps + 1.0
    assert fullest(len(cost), columns, 132, cost.mean(), cost.max()) == pytest.approx(made, rel=0.12)


def test_even_tiles_take_whole_rounds() -> None:
    assert fullest(66, 2, 132, 3.0, 3.0) == 3.0
    assert fullest(67, 2, 132, 3.0, 3.0) == 6.0
    assert fullest(1, 1, 132, 3.0, 5.0) == 5.0


def test_a_norm_is_between_the_larger_one_and_the_sum() -> None:
    assert 3.0 < norm(3, 3.0, 2.0) < norm(1.5, 3.0, 2.0) < 5.0
    assert norm(2, 3.0, 4.0) == pytest.approx(5.0)


def test_the_power_limit_slows_long_products_alone() -> None:
    assert throttled(1e-6) == pytest.approx(1e-6, rel=1e-3)
    assert 1.2 < throttled(2e-3) / 2e-3 < 1.39
    assert throttled(2e-3, share=0.0) == 2e-3


def recorded() -> list[tuple[int, int, int, float]]:
    """Tokens, K, N and microseconds of the dense layers of the newest records."""
    newest = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        for layer in json.loads(line)["config"]["layers"]:
            if "dense" in layer["us"]:
                newest[layer["layer"].split(",")[0]] = layer["us"]["dense"][1]
    return [(*map(int, re.findall(r"\d+", name)), us) for name, us in newest.items()]  # type: ignore[misc]


def test_dense_layers_are_predicted_within_15_percent_of_their_records() -> None:
    found = recorded()
    assert len(found) >= 41
    for tokens, k, n, us in found:
        assert dense_seconds(H200, "bf16", tokens, n, k) * 1e6 == pytest.approx(us, rel=0.15), (tokens, k, n)


def test_a_cpu_has_a_rate_and_a_bandwidth() -> None:
    assert dense_seconds(CPU, "fp32", 512, 512, 512) > 2 * 512**3 / (CPU.tflops["fp32"] * 1e12)
