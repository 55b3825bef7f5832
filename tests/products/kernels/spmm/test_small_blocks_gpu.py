"""hopper.spmm_paired and hopper.spmm_mma on a GPU: right on ragged and uneven matrices with every epilogue that they
have, the same bits, graphs and recorded calls.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.engine import table as kernels
from sparsek.engine.launch.recorder import MISS, Recorded
from sparsek.products.formats.bsr import BSR
from sparsek.products.plan.operands import layout
from sparsek.products.reference.epilogue import PLAIN, Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import problem
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh, randn
from tests.sampling import sampled

pytestmark = pytest.mark.gpu
PAIRED, MMA = "hopper.spmm_paired", "hopper.spmm_mma"
LAYOUTS = ("row", "col")
LOW = (torch.bfloat16, torch.float16)
# m, k, n, density, pattern; a row of B in panels of 64
SIDES = (
    (256, 512, 512, 0.5, "uniform"),
    (1000, 1016, 576, 0.2, "powerlaw"),
    (4096, 2048, 2048, 0.02, "powerlaw"),
    (1040, 2048, 1024, 0.9, "uniform"),
    (2048, 1000, 64, 0.004, "powerlaw"),
    (2048, 2048, 1088, 0.1, "banded"),
)
BLOCKS = (
    *((PAIRED, block) for block in ((64, 64), (32, 32), (16, 16), (64, 16), (32, 64), (16, 32))),
    (MMA, (16, 16)),
)
SQUARES = ((PAIRED, 16), (PAIRED, 32), (PAIRED, 64), (MMA, 16))


def multiplied(
    name: str, a: Any, b: Tensor, c: Any = None, epilogue: Epilogue = PLAIN, lies: str = ""
) -> Tensor:
    """A @ B in a tensor that was full of NaN, which `lies` as B does if not said, inside one that must stay so."""
    col = (lies or layout(b)) == "col"
    rows, columns = (b.shape[1], a.shape[0]) if col else (a.shape[0], b.shape[1])
    whole = poisoned((rows, columns + 8), b.dtype, "cuda")
    out = whole[:, :columns].mT if col else whole[:, :columns]
    p, kernel = problem(a, b, out, epilogue), kernels.load(name)
    assert kernel.why_not(p) == []
    c = c or kernel.default(p)
    kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    assert bool(whole[:, columns:].isnan().all()), "wrote beside C"
    return out


def configs(name: str, a: Any, b: Tensor, lies: str, epilogue: Epilogue = PLAIN) -> list[Any]:
    return list(kernels.load(name).configs(problem(a, b, epilogue=epilogue, lies=lies)))


def drawn(k: int, n: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return randn(n, k, dtype=dtype).mT if layout == "col" else randn(k, n, dtype=dtype)


@pytest.mark.parametrize(
    ("sides", "kernel", "layout"), once(product(SIDES, BLOCKS, LAYOUTS), together=2), ids=str
)
def test_every_config_is_right_and_writes_nothing_beside_c(
    sides: Any, kernel: tuple[str, tuple[int, int]], layout: str
) -> None:
    m, k, n, density, spread = sides
    name, block = kernel
    n += 8 * (name == MMA)  # panels of 64 are the other's
    if layout == "col":
        m, k = -(-m // 8) * 8, -(-k // 8) * 8
    seed = fresh()
    for dtype in sampled(LOW, 1, of=(sides, kernel, layout)):
        a = sk.random_bsr(m, k, block, density, pattern=spread, dtype=dtype, device="cuda", seed=seed)
        b = drawn(k, n, layout, dtype)
        for c in configs(name, a, b, layout):
            for each in (c, replace(c, stages=4)):
                gate = check_spmm(a, b, multiplied(name, a, b, each))
                assert gate.passed, (seed, dtype, each, gate)


@pytest.mark.parametrize("name", [PAIRED, MMA])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_whose_steps_are_loaded_in_whole_portions(layout: str, name: str) -> None:
    """A warp loads 32 steps together. After the last of a tile come those of the CTA's next tile."""
    seed = fresh()
    depth = 512 if name == PAIRED else 4096  # 32 slots of 128
    a = sk.random_bsr(4096, depth, 16, 1.0, dtype=torch.bfloat16, device="cuda", seed=seed)
    b = drawn(depth, 2048, layout)
    for c in configs(name, a, b, layout):
        gate = check_spmm(a, b, multiplied(name, a, b, c))
        assert gate.passed, (seed, c, gate)


@pytest.mark.parametrize(("name", "side"), SQUARES)
@pytest.mark.parametrize("of_c", LAYOUTS)
@pytest.mark.parametrize("of_b", LAYOUTS)
def test_b_and_c_lie_in_any_layouts(of_b: str, of_c: str, side: int, name: str) -> None:
    seed = fresh()
    a = sk.random_bsr(
        1000, 1016, side, 0.2, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=seed
    )
    b = drawn(1016, 576, of_b)
    for c in configs(name, a, b, of_c):
        assert (c.b_row, c.c_col) == (of_b == "row", of_c == "col")
        gate = check_spmm(a, b, multiplied(name, a, b, c, lies=of_c))
        assert gate.passed, (seed, c, gate)


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("name", "side"), SQUARES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_with_bias_and_activation(layout: str, side: int, name: str, activation: Any) -> None:
    seed = fresh()
    for dtype in sampled(LOW, 1, of=(layout, name, side, activation)):
        a = sk.random_bsr(1040, 512, side, 0.2, pattern="powerlaw", dtype=dtype, device="cuda", seed=seed)
        epilogue = Epilogue(alpha=-0.5, bias=randn(1040, dtype=dtype), activation=activation)
        b = drawn(512, 576, layout, dtype)
        for c in configs(name, a, b, layout, epilogue):
            gate = check_spmm(a, b, multiplied(name, a, b, c, epilogue), epilogue)
            assert gate.passed, (seed, dtype, c, gate)


@pytest.mark.parametrize(("name", "side"), SQUARES)
def test_what_no_block_needs_is_not_multiplied(side: int, name: str) -> None:
    a = sk.random_bsr(1024, 1024, side, 0.02, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=3)
    b = drawn(1024, 512, "row")
    met = torch.zeros(a.grid[1], dtype=torch.bool, device="cuda")
    met[a.pattern.indices.long()] = True
    assert not bool(met.all())
    b[~met.repeat_interleave(side)] = torch.nan
    assert check_spmm(a, b, multiplied(name, a, b)).passed


@pytest.mark.parametrize(("name", "side"), SQUARES)
def test_ten_thousand_launches_on_uneven_rows_give_the_same_bits(side: int, name: str) -> None:
    a = sk.random_bsr(
        2048, 2048, side, 0.1, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=fresh()
    )
    b = drawn(2048, 1024, "row")
    first, again = (torch.empty(2048, 1024, dtype=b.dtype, device="cuda") for _ in range(2))
    p, kernel = problem(a, b, first), kernels.load(name)
    c = kernel.default(p)
    work = kernel.prepare(p, c, a)
    kernel.launch(c, work, a, b, first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        kernel.launch(c, work, a, b, again)
        differing += (first != again).any()
    assert int(differing) == 0


@pytest.mark.parametrize(("name", "side"), SQUARES)
def test_layers_and_batches_go_through_the_planner(name: str, side: int) -> None:
    w = sk.random_bsr(1024, 512, side, 0.2, dtype=torch.bfloat16, device="cuda", seed=fresh())
    x, bias = randn(640, 512), randn(1024)
    y = sk.linear(x, w, bias, "gelu", kernel=name)
    epilogue = Epilogue(bias=bias, activation="gelu")
    assert check_spmm(w, x.mT, y.mT, epilogue).passed
    b = randn(2, 512, 256)
    c = sk.spmm(w, b, kernel=name)
    assert all(check_spmm(w, b[i], c[i]).passed for i in range(2))


@pytest.mark.parametrize(("name", "side"), SQUARES)
def test_a_recorded_call_follows_new_values(name: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated, repeat = [], Recorded.repeat

    def counted(self: Recorded, operands: Sequence[Tensor]) -> Any:
        made = repeat(self, operands)
        repeated.append(made is not MISS)
        return made

    monkeypatch.setattr(Recorded, "repeat", counted)
    first = sk.random_bsr(1024, 512, side, 0.2, dtype=torch.bfloat16, device="cuda", seed=fresh())
    kept = []
    for _ in range(5):
        a, b = BSR(first.pattern, randn(*first.values.shape)), randn(512, 576)
        kept.append((a, b))  # so that every call has other addresses
        assert check_spmm(a, b, sk.spmm(a, b, kernel=name)).passed
    assert sum(repeated) == 3, "from the third call on"


@pytest.mark.parametrize(("name", "side"), SQUARES)
def test_a_plan_follows_moved_blocks_with_another_kernel(name: str, side: int) -> None:
    first = sk.random_bsr(1024, 1024, side, 0.2, dtype=torch.bfloat16, device="cuda", seed=1)
    moved = sk.random_bsr(1024, 1024, side, 0.1, dtype=torch.bfloat16, device="cuda", seed=2)
    b = randn(1024, 512)
    plan = sk.plan_spmm(first, b, kernel=name)
    followed = plan.retarget(moved)
    assert followed.kernel == "hopper.spmm"
    assert check_spmm(moved, b, followed(moved, b)).passed


@pytest.mark.parametrize("of_b", LAYOUTS)
@pytest.mark.parametrize("of_c", LAYOUTS)
def test_a_transposed_view_is_read_as_it_is_stored(of_b: str, of_c: str) -> None:
    seed = fresh()
    for dtype in LOW:
        stored = sk.random_bsr(1016, 1000, 16, 0.2, pattern="powerlaw", dtype=dtype, device="cuda", seed=seed)
        b = drawn(1016, 328, of_b, dtype)
        gate = check_spmm(stored.T, b, multiplied(MMA, stored.T, b, lies=of_c))
        assert gate.passed, (seed, dtype, gate)


def test_no_row_of_b_reaches_a_block_row_without_that_column() -> None:
    """Where spmm_paired joins rows, a NaN fills their tile. Here it fills the rows of C that need it."""
    a = sk.random_bsr(1024, 1024, 16, 0.1, dtype=torch.bfloat16, device="cuda", seed=fresh())
    b = drawn(1024, 256, "row")
    b[160:176] = torch.nan
    out = multiplied(MMA, a, b)
    meets = torch.zeros(a.grid[0], dtype=torch.bool, device="cuda")
    meets[a.pattern.block_rows[a.pattern.indices == 10].long()] = True
    assert torch.equal(out.isnan().all(1), meets.repeat_interleave(16))
    assert torch.equal(out.isnan().any(1), meets.repeat_interleave(16))
