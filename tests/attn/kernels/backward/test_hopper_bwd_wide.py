"""hopper.attention_bwd_wide without a GPU: both passes compiled for sm_90a, their texts, reasons and predictions."""

from itertools import product
from typing import Any

import pytest

from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core.device import H100, H200
from sparsek.engine.table import load

pytest.importorskip("triton")

from sparsek.attn.kernels.backward.hopper_bwd_wide import Config
from tests.attn.kernels.forward.problems import attention_problem, hold_code
from tests.engine.launch import newest
from tests.engine.launch.covering import covering
from tests.engine.launch.hopper_code import Code, WidePass, compiled
from tests.sampling import sampled

KERNEL = load("hopper.attention_bwd_wide")
DIMS = ((256, 256), (192, 192), (256, 128), (192, 128), (128, 256), (256, 32), (64, 256))


def problem(dim: int = 256, v_dim: int | None = None, **more: Any) -> AttentionGradProblem:
    return attention_problem(AttentionGradProblem, dim, v_dim, **{"mask_heads": 1, "lse": True} | more)


PROBLEMS = [
    problem(*dims, block=(128, keys), by_interval=interval, by_bits=bits)
    for dims, keys, interval, bits in product(DIMS, (64, 128), (False, True), (False, True))
]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p)))
FULLEST = (WidePass(Config(256, 256, (128, 128), interval=True, bits=True), True), "bf16")


def choices(case: tuple[WidePass, str]) -> list[Any]:
    (c, over_keys), dtype = case
    return [("heads", c.dim, c.v_dim), c.block, ("rules", c.interval, c.bits), over_keys, dtype]


CASES = [
    *covering(
        [(WidePass(c, side), dtype) for c in CONFIGS for side in (True, False) for dtype in ("bf16", "fp16")],
        choices,
    ),
    FULLEST,
    (FULLEST[0]._replace(over_keys=False), "bf16"),
]
CORE = CASES[-2:]  # each of the two kernels
NEXT_CASES = sampled(CORE, 1, of="the newest Triton")


def check(given: WidePass, dtype: str, code: Code) -> None:
    """What both kernels must show: wgmma of the right shapes, no waits that ptxas added, registers and memory."""
    c, over_keys = given
    sums = {c.dim, c.v_dim} if over_keys else {c.dim}
    # Over keys each warpgroup has one product of scores and one sum; over queries both have all three.
    products = (1 if over_keys else 2) * (c.dim // 16 + c.v_dim // 16 + (8 if over_keys else 4))
    where = hold_code(given, code, dtype, {64} | sums, products)
    said = c.keys_bytes if over_keys else c.queries_bytes
    assert said - 1024 <= code.shared <= said + 512, f"the config says {said}: {where}"
    # Words of bits are loaded for a whole tile of scores, which spills there only: in partial blocks.
    assert c.bits or max(loop.local for loop in code.loops) <= 4, where


@pytest.mark.parametrize(("given", "dtype"), [*sampled(CORE, 1), *sampled(CASES[:-2], 1)], ids=str)
def test_it_compiles(given: WidePass, dtype: str) -> None:
    check(given, dtype, compiled(given, dtype))


def test_it_compiles_under_the_newest_triton() -> None:
    codes = newest.calls(compiled, [(*case, False) for case in NEXT_CASES])
    for (given, dtype), code in zip(NEXT_CASES, codes, strict=True):
        check(given, dtype, code)


def test_every_ring_fits() -> None:
    for c in CONFIGS:
        assert max(c.keys_bytes, c.queries_bytes) <= H200.smem_bytes, c


@pytest.mark.parametrize(
    ("length", "blocks", "longest", "milliseconds"),
    [(8192, 4096, 64, 5.600), (8192, 2080, 64, 2.954), (8192, 512, 8, 0.923), (32768, 8192, 32, 12.158)],
    ids=["full", "causal", "random", "random 32K"],
)
def test_predictions_are_those_that_were_measured(
    length: int, blocks: int, longest: int, milliseconds: float
) -> None:
    """16 heads on an H100 (2026-11-26, script)."""
    p = problem(card=H100, q_len=length, kv_len=length, stored=blocks, longest=longest)
    assert KERNEL.seconds(p, KERNEL.default(p)) == pytest.approx(milliseconds * 1e-3, rel=0.1)
