"""portable.attention_fwd and the merge of parts on a GPU: every case, config and layout; the same bits; far offsets.

Inputs are fresh in every run; a failure prints the seed.
"""

import random
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.core import dtypes
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.attention_cases import ATTENTION_CASES, AttentionCase, random_bits
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem
from tests.engine.launch.drawn import any_mask, layouts_of_attention, randn
from tests.sampling import EVERY, half, sampled

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

HALF = torch.bfloat16
LOW = ("bf16", "fp16")
SMALL, LARGE = (64, 64), (128, 128)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return load("portable.attention_fwd")


def check(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, note: object, config: Any = None
) -> None:
    gate = check_attention(q, k, v, mask, *attend(kernel, q, k, v, mask, config))
    assert gate.passed, f"{mask} {config}, {note}: {gate}"


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in ATTENTION_CASES for dtype in sampled(LOW, 1, of=str(case))],
    ids=str,
)
def test_every_case_is_within_budget(kernel: Any, case: AttentionCase, dtype: str, seed: int) -> None:
    q, k, v, mask = case.make("cuda", dtypes.parse(dtype), seed)
    assert kernel.why_not(problem(q, k, v, mask)) == []
    check(kernel, q, k, v, mask, seed)


@pytest.mark.parametrize(
    ("dim", "block"), half(product((64, 128, 256), (LARGE, SMALL, (128, 64), (64, 128)))), ids=str
)
def test_every_config_is_within_budget(kernel: Any, block: tuple[int, int], dim: int, seed: int) -> None:
    mask = random_bits("cuda", (1000, 900), block, heads=2, density=0.8, seed=seed)
    q, k, v = randn(1, 4, 1000, dim), randn(1, 2, 900, dim), randn(1, 2, 900, dim)
    for c in half(kernel.configs(problem(q, k, v, mask)), of=(dim, block)):
        check(kernel, q, k, v, mask, seed, c)


def test_any_layout_is_read_as_it_is(kernel: Any, seed: int) -> None:
    mask = BlockMask.sliding_window(q_len=300, kv_len=400, window=100, device="cuda")
    for name, (q, k, v) in layouts_of_attention().items():
        check(kernel, q, k, v, mask, f"{name}, seed {seed}")


def test_nothing_beside_out_and_lse_is_written(kernel: Any, seed: int) -> None:
    mask = BlockMask.causal(q_len=333, kv_len=500, device="cuda")
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_blocks_that_are_not_stored_are_never_read(kernel: Any, bad: float, seed: int) -> None:
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
    check(kernel, q, k[:, :, :600], v[:, :, :600], mask, seed)


@pytest.mark.parametrize("block", [LARGE, SMALL], ids=str)
def test_fifty_runs_give_the_same_bits(kernel: Any, block: tuple[int, int], seed: int) -> None:
    mask = random_bits("cuda", (2000, 2000), block, heads=8, density=0.5, seed=seed)
    q, k, v = randn(1, 8, 2000, 64), randn(1, 8, 2000, 64), randn(1, 8, 2000, 64)
    first = attend(kernel, q, k, v, mask)
    for turn in range(50):
        for a, b in zip(attend(kernel, q, k, v, mask), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"run {turn}, seed {seed}"


def test_neither_planning_nor_running_waits_for_the_device(kernel: Any, no_sync: Any, seed: int) -> None:
    scores = torch.rand(1, 4, 16, 16, device="cuda")
    q, k, v = randn(1, 4, 1024, 64), randn(1, 4, 1024, 64), randn(1, 4, 1024, 64)
    mask = BlockMask.topk(scores, 5, causal=True, seq_len=1024, block=64)
    attend(kernel, q, k, v, mask)
    torch.cuda.synchronize()
    with no_sync():
        out, lse = attend(kernel, q, k, v, mask)
    assert check_attention(q, k, v, mask, out, lse).passed, seed


def test_masks_and_lengths_that_are_new_compile_nothing(kernel: Any) -> None:
    """As long as blocks, rules, heads and the layout's strides along keys stay."""
    from sparsek.attn.kernels.forward import portable_fwd as portable

    known = portable._attention.device_caches[torch.cuda.current_device()][0]
    counts = []
    for length, window in ((512, 100), (515, 17), (1000, 300), (1, 1), (129, 200)):
        q, k, v = randn(1, 2, length, 64), randn(1, 2, length, 64), randn(1, 2, length, 64)
        mask = BlockMask.sliding_window(length, window, device="cuda")
        check(kernel, q, k, v, mask, (length, window), portable.Config(64, 64, 4, 3))
        counts.append(len(known))
    assert counts == counts[:1] * 5


def test_keys_past_31_bits_are_right(kernel: Any, seed: int) -> None:
    length = 2**19
    whole = torch.empty(1, length, 65, 64, dtype=HALF, device="cuda")
    assert whole.numel() > 2**31
    k, v = whole[:, :, 63:64].transpose(1, 2), whole[:, :, 64:65].transpose(1, 2)
    k.normal_()
    v.normal_()
    mask = BlockMask.sliding_window(q_len=200, kv_len=length, window=1000, sinks=4, device="cuda")
    check(kernel, randn(1, 1, 200, 64), k, v, mask, seed)


def test_rows_of_a_tile_further_apart_than_31_bits_are_right(kernel: Any, seed: int) -> None:
    stride = 2**25 + 8
    memory = torch.empty(90 * stride, dtype=HALF, device="cuda")
    k = memory.as_strided((1, 1, 90, 64), (64, 64, stride, 1))
    v = memory.as_strided((1, 1, 90, 64), (64, 64, stride, 1), 64)
    k.normal_()
    v.normal_()
    mask = BlockMask.causal(q_len=70, kv_len=90, block=(64, 128), device="cuda")
    check(kernel, randn(1, 1, 70, 64), k, v, mask, seed)


def test_masks_at_random_are_within_budget(kernel: Any, seed: int) -> None:
    draw = random.Random(seed)
    for turn in range(25 if EVERY else 8):
        mask = any_mask(draw)
        batch, hkv, group = draw.randint(1, 2), 2, draw.choice((1, 3))
        d, dv, dtype = draw.choice((64, 128)), draw.choice((64, 128)), dtypes.parse(draw.choice(LOW))
        q = randn(batch, hkv * group, mask.q_len, d, dtype=dtype)
        k, v = (randn(batch, hkv, mask.kv_len, n, dtype=dtype) for n in (d, dv))
        check(kernel, q, k, v, mask, f"turn {turn} of seed {seed}")


@pytest.mark.parametrize(
    ("v_dim", "dtype"), [(v_dim, dtype) for v_dim in (64, 96, 256) for dtype in sampled(LOW, 1, of=v_dim)]
)
def test_parts_of_the_keys_merge_to_the_whole(kernel: Any, v_dim: int, dtype: str, seed: int) -> None:
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
        o, lse = attend(kernel, q, k[:, :, first:last], v[:, :, first:last], part)
        o_part[at::parts] = o.float().reshape(-1, 128, v_dim)
        lse_part[at::parts] = lse.reshape(-1, 128) / torch.tensor(2.0).log()
    o_part[lse_part == -torch.inf] = torch.nan
    table = [[parts * (h * tiles + i), parts, 0, h, 128 * i] for h in range(2) for i in range(tiles)]
    out, lse = poisoned((1, 2, length, v_dim), kind, "cuda"), poisoned((1, 2, length), torch.float32, "cuda")
    merge_parts(o_part, lse_part, torch.tensor(table, dtype=torch.int32, device="cuda"), out, lse, 1, 128)
    gate = check_attention(q, k, v, mask, out, lse)
    assert gate.passed, f"seed {seed}: {gate}"
