"""portable.attention_bwd on a GPU: every case, config and layout; parts; the same bits; far offsets.

Inputs are fresh in every run; a failure prints the seed.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.core import dtypes
from sparsek.engine.table import load
from sparsek.testing.attention_cases import AttentionCase, random_bits
from sparsek.testing.poison import poisoned
from tests.attn.kernels.backward.grad_cases import (
    Inputs,
    cases,
    differentiate,
    hold,
    inputs,
    judged,
    poisoned_keys,
    problem,
)
from tests.engine.launch.drawn import any_mask, layouts_of_attention, randn
from tests.sampling import EVERY, half, sampled

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

HALF = torch.bfloat16
LOW = ("bf16", "fp16")
SMALL, LARGE = (64, 64), (128, 128)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return load("portable.attention_bwd")


def check(kernel: Any, given: Inputs, note: object, config: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, after the gate."""
    found = differentiate(kernel, given, config)
    gate = judged(given, found)
    assert gate.passed, f"{given.mask} {config}, {note}: {gate}"
    return found


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, dtype) for case in cases() for dtype in sampled(LOW, 1, of=str(case))], ids=str
)
def test_every_case_is_within_budget_and_gives_the_same_bits(
    kernel: Any, case: AttentionCase, dtype: str
) -> None:
    kind = dtypes.parse(dtype)
    q, k, v, mask = case.make("cuda", kind)
    assert kernel.why_not(problem(q, k, v, mask)) == []
    for with_lse in sampled((False, True), 1, of=f"lse {case}"):
        hold(kernel, case, device="cuda", dtype=kind, with_lse=with_lse)


@pytest.mark.parametrize(
    ("case", "part"),
    half(product([x for x in cases() if x.heads[0] > 2 or x.batch > 1], (1, 3, 10))),
    ids=str,
)
def test_cases_in_parts_are_within_budget(
    kernel: Any, case: AttentionCase, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek.attn.kernels.backward import bwd_walks

    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    q, k, v, mask = case.make("cuda", HALF)
    p = problem(q, k, v, mask)
    work = kernel.prepare(p, kernel.default(p), mask)
    assert (work.keys.slots > 0, work.queries.slots > 0) == (part < p.grid[0] * p.group, part < p.longest)
    hold(kernel, case, device="cuda", dtype=HALF, with_lse=True)


DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 64))


@pytest.mark.parametrize(
    ("dims", "block"), half(product(DIMS, (LARGE, SMALL, (128, 64), (64, 128)))), ids=str
)
def test_every_config_is_within_budget(
    kernel: Any, block: tuple[int, int], dims: tuple[int, int], seed: int
) -> None:
    mask = random_bits("cuda", (1000, 900), block, heads=2, density=0.8, seed=seed)
    mask = mask | BlockMask.sliding_window(q_len=1000, kv_len=900, window=200, block=block, device="cuda")
    d, dv = dims
    given = inputs(randn(1, 4, 1000, d), randn(1, 2, 900, d), randn(1, 2, 900, dv), mask, with_lse=True)
    for c in half(kernel.configs(problem(*given[:4])), of=(dims, block)):
        check(kernel, given, seed, c)


def test_any_layout_is_read_as_it_is(kernel: Any, seed: int) -> None:
    mask = BlockMask.sliding_window(q_len=300, kv_len=400, window=100, device="cuda")
    layouts = layouts_of_attention()
    turned = half(layouts, of="grad")
    for name, (q, k, v) in layouts.items():
        given = inputs(q, k, v, mask, with_lse=True)
        found = check(kernel, given, f"{name}, seed {seed}")
        repeated = differentiate(kernel, given)
        assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True)), (
            f"{name} repeated, seed {seed}"
        )
        if name not in turned:
            continue
        other = torch.empty_strided(
            given.grad.shape, q.stride() if q.stride(3) else (1, 1, 1, 1), dtype=HALF, device="cuda"
        )
        other.copy_(given.grad)
        # Other strides of grad give rowsum(grad * out) another order (prepare_rows), so the budget judges, not bits.
        check(kernel, given._replace(grad=other), f"{name} of grad too, seed {seed}")
    given = given._replace(
        grad=randn(1).expand(2, 4, 300, 64), grad_lse=torch.ones(1, device="cuda").expand(2, 4, 300)
    )
    check(kernel, given, f"the gradient of a sum, seed {seed}")


def test_nothing_beside_the_results_is_written(kernel: Any, seed: int) -> None:
    mask = BlockMask.causal(q_len=333, kv_len=500, device="cuda")
    given = inputs(randn(2, 4, 333, 96), randn(2, 2, 500, 96), randn(2, 2, 500, 64), mask)
    q, k, v = given[:3]
    p = problem(q, k, v, mask)
    for c in half(kernel.configs(p), of="beside"):
        rooms = [poisoned((2, 510, 5, 104), HALF, "cuda") for _ in range(3)]
        dq, dk, dv = (
            room[:, : x.shape[2], : x.shape[1], : x.shape[3]].transpose(1, 2)
            for room, x in zip(rooms, (q, k, v), strict=True)
        )
        kernel.launch(c, kernel.prepare(p, c, mask), AttentionGradCall(*given[:9], dq, dk, dv))
        gate = judged(given, (dq, dk, dv))
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        for room, x in zip(rooms, (dq, dk, dv), strict=True):
            x.fill_(torch.nan)
            assert room.isnan().all()


def test_keys_of_blocks_that_are_not_stored_are_never_read(kernel: Any) -> None:
    for case in cases():
        given = poisoned_keys(case, "cuda")
        if case.dtype != "fp32" and bool(given.k.isnan().any()):
            check(kernel, given, case)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [LARGE, SMALL], ids=str)
def test_fifty_runs_give_the_same_bits(kernel: Any, block: tuple[int, int], dim: int, seed: int) -> None:
    mask = random_bits("cuda", (2000, 2000), block, heads=8, density=0.5, seed=seed)
    given = inputs(
        randn(1, 8, 2000, dim), randn(1, 8, 2000, dim), randn(1, 8, 2000, dim), mask, with_lse=True
    )
    first = differentiate(kernel, given)
    for turn in range(50):
        for a, b in zip(differentiate(kernel, given), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"run {turn}, seed {seed}"


def test_neither_planning_nor_running_waits_for_the_device(kernel: Any, no_sync: Any, seed: int) -> None:
    q, k, v = randn(1, 4, 1024, 64), randn(1, 4, 1024, 64), randn(1, 4, 1024, 64)

    def fresh() -> BlockMask:
        return BlockMask.topk(torch.rand(1, 4, 16, 16, device="cuda"), 5, causal=True, seq_len=1024, block=64)

    mask = fresh()
    given = inputs(q, k, v, mask)
    differentiate(kernel, given)
    other = inputs(q, k, v, fresh())
    torch.cuda.synchronize()
    with no_sync():
        found, more = differentiate(kernel, given), differentiate(kernel, other)
    assert judged(given, found).passed, seed
    assert judged(other, more).passed, seed


def test_masks_and_lengths_that_are_new_compile_nothing(kernel: Any) -> None:
    """As long as blocks, rules, heads and the layout's strides along rows stay."""
    from sparsek.attn.kernels.backward import delta
    from sparsek.attn.kernels.backward import portable_bwd as portable

    device = torch.cuda.current_device()
    jits = (portable._keys, portable._queries, delta._prepare_rows)
    known = [jit.device_caches[device][0] for jit in jits]
    config = portable.Config(portable.Tile(64, 64, 4, 2), portable.Tile(64, 64, 4, 2))
    counts = []
    for length, window in ((512, 100), (515, 17), (1000, 300), (2, 1), (129, 200)):
        q, k, v = randn(1, 2, length, 64), randn(1, 2, length, 64), randn(1, 2, length, 64)
        mask = BlockMask.sliding_window(length, window, device="cuda")
        check(kernel, inputs(q, k, v, mask), (length, window), config)
        counts.append([len(x) for x in known])
    assert counts == counts[:1] * 5


def test_keys_past_31_bits_are_right(kernel: Any, seed: int) -> None:
    length = 2**19
    whole = torch.empty(1, length, 65, 64, dtype=HALF, device="cuda")
    assert whole.numel() > 2**31
    k, v = whole[:, :, 63:64].transpose(1, 2), whole[:, :, 64:65].transpose(1, 2)
    k.normal_()
    v.normal_()
    mask = BlockMask.sliding_window(q_len=200, kv_len=length, window=1000, sinks=4, device="cuda")
    near = inputs(randn(1, 1, 200, 64), k.contiguous(), v.contiguous(), mask)
    expected = differentiate(kernel, near)
    found = differentiate(kernel, near._replace(k=k, v=v))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), seed


def test_rows_of_a_tile_further_apart_than_31_bits_are_right(kernel: Any, seed: int) -> None:
    stride = 2**25 + 8
    memory = torch.empty(90 * stride, dtype=HALF, device="cuda")
    k, v, q, grad = (memory.as_strided((1, 1, 90, 64), (64, 64, stride, 1), 64 * i) for i in range(4))
    for x in (k, v, q, grad):
        x.normal_()
    mask = BlockMask.causal(q_len=70, kv_len=90, block=(64, 128), device="cuda")
    given = inputs(q[:, :, :70], k, v, mask)._replace(grad=grad[:, :, :70])
    check(kernel, given, seed)


def test_masks_at_random_are_within_budget(kernel: Any, seed: int) -> None:
    draw = random.Random(seed)
    for turn in range(25 if EVERY else 8):
        mask = any_mask(draw)
        batch, hkv, group = draw.randint(1, 2), 2, draw.choice((1, 3))
        d, dv, dtype = draw.choice((64, 128)), draw.choice((64, 128)), dtypes.parse(draw.choice(LOW))
        q = randn(batch, hkv * group, mask.q_len, d, dtype=dtype)
        k, v = (randn(batch, hkv, mask.kv_len, n, dtype=dtype) for n in (d, dv))
        given = inputs(q, k, v, mask, with_lse=draw.random() < 0.5, seed=draw.randrange(99))
        check(kernel, given, f"turn {turn} of seed {seed}")


def test_a_column_that_all_visit_does_not_outlast_the_rest(kernel: Any, seed: int) -> None:
    """One head: the sink's key tile is cut. Without parts it would take a third of all blocks."""
    mask = BlockMask.sliding_window(8192, 256, sinks=128, device="cuda")
    given = inputs(randn(1, 1, 8192, 128), randn(1, 1, 8192, 128), randn(1, 1, 8192, 128), mask)
    p = problem(*given[:4])
    work = kernel.prepare(p, kernel.default(p), mask)
    order = work.keys.order[0]
    assert work.keys.slots > 0
    assert int((order[:, 2] - order[:, 1]).max()) <= 8
    check(kernel, given, seed)


@pytest.mark.parametrize("columns", [64, 96, 256])
def test_rows_and_casts_are_those_of_torch(columns: int, seed: int) -> None:
    from sparsek.attn.kernels.backward.delta import cast_quantized, prepare_rows
    from tests.attn.kernels.backward.delta_interpreted import held

    out, grad = randn(2, 3, 1000, columns), randn(2, 1000, 3, columns).transpose(1, 2)
    lse, grad_lse = torch.randn(2, 3, 1000, device="cuda") * 9, torch.randn(2, 3, 1000, device="cuda")
    lse[:, :, ::7] = -torch.inf
    rows = prepare_rows(out, grad, lse, grad_lse, 1024)
    empty = lse == -torch.inf
    delta = ((out.double() * grad.double()).sum(-1) - grad_lse).masked_fill(empty, 0)
    torch.testing.assert_close(rows[1, :, :, :1000].double(), delta, rtol=1e-5, atol=1e-4)
    base2 = (lse.double() * 1.4426950408889634).masked_fill(empty, torch.inf)
    torch.testing.assert_close(rows[0, :, :, :1000].double(), base2, rtol=1e-6, atol=1e-6)
    assert (rows[0, :, :, 1000:] == torch.inf).all()
    assert (rows[1, :, :, 1000:] == 0).all()
    acc = torch.randn(2, 3, 1024, 256, device="cuda")
    dq = poisoned((2, 1000, 3, columns), HALF, "cuda").transpose(1, 2)
    cast_quantized(held(acc), 0.25, dq)
    assert torch.equal(dq, (acc[:, :, :1000, :columns] * 0.25).to(HALF)), seed
