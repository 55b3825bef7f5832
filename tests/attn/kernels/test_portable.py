"""portable.attention_fwd and portable.attention_bwd on a GPU: layouts, far offsets, parts; equal bits; no waits.

Inputs are fresh in every run; a failure prints the seed.
"""

import random
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionGradCall
from sparsek.core import dtypes
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import AttentionCase, random_bits
from tests.attn.kernels.backward import grad_cases
from tests.attn.kernels.backward.grad_cases import cases, hold, inputs, judged
from tests.attn.kernels.conformance import Pass, passes
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import any_mask, layouts_of_attention, randn
from tests.sampling import EVERY, half, sampled

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

HALF = torch.bfloat16
LOW = ("bf16", "fp16")
SMALL, LARGE = (64, 64), (128, 128)


PASSES = passes("portable.attention_fwd", "portable.attention_bwd")
FORWARD, BACKWARD = PASSES.values()
every_pass = pytest.mark.parametrize("of", PASSES.values(), ids=PASSES)


@pytest.mark.parametrize(
    ("dim", "block"), half(product((64, 128, 256), (LARGE, SMALL, (128, 64), (64, 128)))), ids=str
)
def test_every_config_is_within_budget(block: tuple[int, int], dim: int, seed: int) -> None:
    """Of the forward pass; test_attention_bwd.py has those of the gradients."""
    mask = random_bits("cuda", (1000, 900), block, heads=2, density=0.8, seed=seed)
    given = randn(1, 4, 1000, dim), randn(1, 2, 900, dim), randn(1, 2, 900, dim), mask
    for c in half(load(FORWARD.name).configs(problem(*given)), of=(dim, block)):
        FORWARD.check(given, seed, c)


@pytest.mark.parametrize(
    ("case", "part"),
    once(product([x for x in cases() if x.heads[0] > 2 or x.batch > 1], (1, 3, 10))),
    ids=str,
)
def test_cases_in_parts_are_within_budget(
    case: AttentionCase, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsek.attn.kernels.backward import bwd_walks

    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    kernel = load(BACKWARD.name)
    q, k, v, mask = case.make("cuda", HALF)
    p = grad_cases.problem(q, k, v, mask)
    work = kernel.prepare(p, kernel.default(p), mask)
    assert (work.keys.slots > 0, work.queries.slots > 0) == (part < p.grid[0] * p.group, part < p.longest)
    hold(kernel, case, device="cuda", dtype=HALF, with_lse=True)


@every_pass
def test_any_layout_is_read_as_it_is(of: Pass, seed: int) -> None:
    mask = BlockMask.sliding_window(q_len=300, kv_len=400, window=100, device="cuda")
    layouts = layouts_of_attention()
    turned = half(layouts, of="grad")
    for name, (q, k, v) in layouts.items():
        given = of.given(q, k, v, mask, with_lse=True)
        found = of.check(given, f"{name}, seed {seed}")
        if of is FORWARD:
            continue
        repeated = of.run(load(of.name), given)
        assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True)), (
            f"{name} repeated, seed {seed}"
        )
        if name in turned:
            other = torch.empty_strided(
                given.grad.shape, q.stride() if q.stride(3) else (1, 1, 1, 1), dtype=HALF, device="cuda"
            )
            other.copy_(given.grad)
            # Other strides of grad give rowsum(grad * out) another order (prepare_rows), so the budget judges.
            of.check(given._replace(grad=other), f"{name} of grad too, seed {seed}")
    if of is BACKWARD:
        given = given._replace(
            grad=randn(1).expand(2, 4, 300, 64), grad_lse=torch.ones(1, device="cuda").expand(2, 4, 300)
        )
        of.check(given, f"the gradient of a sum, seed {seed}")


def test_nothing_beside_out_and_lse_is_written(seed: int) -> None:
    kernel, mask = load(FORWARD.name), BlockMask.causal(q_len=333, kv_len=500, device="cuda")
    q, k, v = randn(2, 4, 333, 96), randn(2, 4, 500, 96), randn(2, 4, 500, 96)
    room, beside = (
        poisoned((2, 340, 4, 104), HALF, "cuda"),
        poisoned((2 * 4 * 333 + 64,), torch.float32, "cuda"),
    )
    out, lse = room[:, :333, :, :96].transpose(1, 2), beside[: 2 * 4 * 333].view(2, 4, 333)
    p = problem(q, k, v, mask)
    for c in half(kernel.configs(p), of="beside"):
        room.fill_(torch.nan)
        beside.fill_(torch.nan)
        kernel.launch(c, kernel.prepare(p, c, mask), AttentionCall(q, k, v, mask, 0.1, out, lse))
        gate = check_attention(q, k, v, mask, out, lse, scale=0.1)
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        assert room[:, 333:].isnan().all()
        assert room[..., 96:].isnan().all()
        assert beside[2 * 4 * 333 :].isnan().all()


def test_nothing_beside_the_gradients_is_written(seed: int) -> None:
    kernel, mask = load(BACKWARD.name), BlockMask.causal(q_len=333, kv_len=500, device="cuda")
    given = inputs(randn(2, 4, 333, 96), randn(2, 2, 500, 96), randn(2, 2, 500, 64), mask)
    q, k, v = given[:3]
    p = grad_cases.problem(q, k, v, mask)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_blocks_that_are_not_stored_are_never_read(bad: float, seed: int) -> None:
    mask = BlockMask.from_blocks(
        torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda"),
        torch.tensor([1, 4, 4], dtype=torch.int32, device="cuda"),
        q_len=256,
        kv_len=600,
        block=LARGE,
    )
    q, k, v = randn(1, 2, 256, 64), randn(1, 2, 700, 64), randn(1, 2, 700, 64)
    for x in (k, v):
        x[:, :, :128], x[:, :, 256:512], x[:, :, 600:] = bad, bad, bad
    FORWARD.check((q, k[:, :, :600], v[:, :, :600], mask), seed)


@pytest.mark.parametrize(("of", "dim"), [("fwd", 64), ("bwd", 64), ("bwd", 128)])
@pytest.mark.parametrize("block", [LARGE, SMALL], ids=str)
def test_fifty_runs_give_the_same_bits(of: str, block: tuple[int, int], dim: int, seed: int) -> None:
    kernel, some = load(PASSES[of].name), PASSES[of]
    mask = random_bits("cuda", (2000, 2000), block, heads=8, density=0.5, seed=seed)
    q, k, v = (randn(1, 8, 2000, dim) for _ in range(3))
    given = some.given(q, k, v, mask, with_lse=True)
    first = some.run(kernel, given)
    for turn in range(50):
        for a, b in zip(some.run(kernel, given), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"run {turn}, seed {seed}"


@every_pass
def test_neither_planning_nor_running_waits_for_the_device(of: Pass, no_sync: Any, seed: int) -> None:
    """The gradients of a mask that is new, too."""
    kernel = load(of.name)
    q, k, v = randn(1, 4, 1024, 64), randn(1, 4, 1024, 64), randn(1, 4, 1024, 64)
    masks = [
        BlockMask.topk(torch.rand(1, 4, 16, 16, device="cuda"), 5, causal=True, seq_len=1024, block=64)
        for _ in range(2 if of is BACKWARD else 1)
    ]
    given = [of.given(q, k, v, mask) for mask in masks]
    of.run(kernel, given[0])
    torch.cuda.synchronize()
    with no_sync():
        found = [of.run(kernel, each) for each in given]
    assert all(of.judge(*each).passed for each in zip(given, found, strict=True)), seed


@pytest.mark.parametrize("of", PASSES)
def test_masks_and_lengths_that_are_new_compile_nothing(of: str) -> None:
    """As long as blocks, rules, heads and the layout's strides along rows stay."""
    from sparsek.attn.kernels.backward import delta, portable_bwd
    from sparsek.attn.kernels.forward import portable_fwd

    tile = portable_bwd.Tile(64, 64, 4, 2)
    jits, config, shortest = {
        "fwd": ((portable_fwd._attention,), portable_fwd.Config(64, 64, 4, 3), 1),
        "bwd": (
            (portable_bwd._keys, portable_bwd._queries, delta._prepare_rows),
            portable_bwd.Config(tile, tile),
            2,
        ),
    }[of]
    known = [jit.device_caches[torch.cuda.current_device()][0] for jit in jits]
    counts = []
    for length, window in ((512, 100), (515, 17), (1000, 300), (shortest, 1), (129, 200)):
        q, k, v = randn(1, 2, length, 64), randn(1, 2, length, 64), randn(1, 2, length, 64)
        mask = BlockMask.sliding_window(length, window, device="cuda")
        PASSES[of].check(PASSES[of].given(q, k, v, mask), (length, window), config)
        counts.append([len(x) for x in known])
    assert counts == counts[:1] * 5


@every_pass
def test_keys_past_31_bits_are_right(of: Pass, seed: int) -> None:
    """Gradients have the bits of those of keys near each other."""
    length = 2**19
    whole = torch.empty(1, length, 65, 64, dtype=HALF, device="cuda")
    assert whole.numel() > 2**31
    k, v = whole[:, :, 63:64].transpose(1, 2), whole[:, :, 64:65].transpose(1, 2)
    k.normal_()
    v.normal_()
    mask = BlockMask.sliding_window(q_len=200, kv_len=length, window=1000, sinks=4, device="cuda")
    q = randn(1, 1, 200, 64)
    if of is FORWARD:
        of.check((q, k, v, mask), seed)
        return
    near = inputs(q, k.contiguous(), v.contiguous(), mask)
    pair = [of.run(load(of.name), each) for each in (near, near._replace(k=k, v=v))]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True)), seed


@every_pass
def test_rows_of_a_tile_further_apart_than_31_bits_are_right(of: Pass, seed: int) -> None:
    """Of k and v, and for gradients of q and grad."""
    stride = 2**25 + 8
    memory = torch.empty(90 * stride, dtype=HALF, device="cuda")
    k, v, q, grad = (memory.as_strided((1, 1, 90, 64), (64, 64, stride, 1), 64 * i) for i in range(4))
    for x in (k, v, q, grad):
        x.normal_()
    mask = BlockMask.causal(q_len=70, kv_len=90, block=(64, 128), device="cuda")
    if of is FORWARD:
        of.check((randn(1, 1, 70, 64), k, v, mask), seed)
        return
    of.check(inputs(q[:, :, :70], k, v, mask)._replace(grad=grad[:, :, :70]), seed)


@every_pass
def test_masks_at_random_are_within_budget(of: Pass, seed: int) -> None:
    draw = random.Random(seed)
    for turn in range(25 if EVERY else 8):
        mask = any_mask(draw)
        batch, hkv, group = draw.randint(1, 2), 2, draw.choice((1, 3))
        d, dv, dtype = draw.choice((64, 128)), draw.choice((64, 128)), dtypes.parse(draw.choice(LOW))
        q = randn(batch, hkv * group, mask.q_len, d, dtype=dtype)
        k, v = (randn(batch, hkv, mask.kv_len, n, dtype=dtype) for n in (d, dv))
        given = of.given(q, k, v, mask, with_lse=draw.random() < 0.5, seed=draw.randrange(99))
        of.check(given, f"turn {turn} of seed {seed}")


def test_a_column_that_all_visit_does_not_outlast_the_rest(seed: int) -> None:
    """One head: the sink's key tile is cut. Without parts it would take a third of all blocks."""
    kernel = load(BACKWARD.name)
    mask = BlockMask.sliding_window(8192, 256, sinks=128, device="cuda")
    given = inputs(randn(1, 1, 8192, 128), randn(1, 1, 8192, 128), randn(1, 1, 8192, 128), mask)
    p = grad_cases.problem(*given[:4])
    work = kernel.prepare(p, kernel.default(p), mask)
    order = work.keys.order[0]
    assert work.keys.slots > 0
    assert int((order[:, 2] - order[:, 1]).max()) <= 8
    BACKWARD.check(given, seed)


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


@pytest.mark.parametrize(
    ("v_dim", "dtype"), [(v_dim, dtype) for v_dim in (64, 96, 256) for dtype in sampled(LOW, 1, of=v_dim)]
)
def test_parts_of_the_keys_merge_to_the_whole(v_dim: int, dtype: str, seed: int) -> None:
    """Parts come from the kernel itself: a window of keys each. Rows of tiles are queries of one head."""
    from sparsek.attn.kernels.forward.merge import merge_parts

    kind, length, cuts = dtypes.parse(dtype), 640, (0, 128, 512, 640)
    q, k, v = (randn(1, 2, length, d, dtype=kind) for d in (64, 64, v_dim))
    mask = BlockMask.causal(length, device="cuda")
    tiles, parts = length // 128, len(cuts) - 1
    o_part, lse_part = (
        torch.full((2 * tiles * parts, 128, *more), torch.nan, device="cuda") for more in ((v_dim,), ())
    )
    for at, (first, last) in enumerate(pairwise(cuts)):
        part = BlockMask.causal(q_len=length, kv_len=last - first, q_offset=-first, device="cuda")
        o, lse = attend(load(FORWARD.name), q, k[:, :, first:last], v[:, :, first:last], part)
        o_part[at::parts] = o.float().reshape(-1, 128, v_dim)
        lse_part[at::parts] = lse.reshape(-1, 128) / torch.tensor(2.0).log()
    o_part[lse_part == -torch.inf] = torch.nan
    table = [[parts * (h * tiles + i), parts, 0, h, 128 * i] for h in range(2) for i in range(tiles)]
    out, lse = poisoned((1, 2, length, v_dim), kind, "cuda"), poisoned((1, 2, length), torch.float32, "cuda")
    merge_parts(o_part, lse_part, torch.tensor(table, dtype=torch.int32, device="cuda"), out, lse, 1, 128)
    gate = check_attention(q, k, v, mask, out, lse)
    assert gate.passed, f"seed {seed}: {gate}"
