"""portable.attention_paged on a GPU: every option and config, CUDA graphs over growing lengths, hostile tables.

Inputs are fresh in every run; a failure prints the seed.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.kernels import load
from sparsek.mask.lists import BlockLists
from tests.kernels.paged.portable_inputs import Batch, attend, check, expected, hold

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return load("portable.attention_paged")


def decode(**more: Any) -> Batch:
    return Batch(**{"lengths": [(1, 3000), (1, 0), (1, 129), (1, 700)], "heads": (8, 2), "dims": (128, 128),
                    "dtype": torch.bfloat16, "page": 128, "device": "cuda", **more})  # fmt: skip


def mixed(**more: Any) -> Batch:
    return decode(**{"lengths": [(300, 700), (1, 900), (0, 40), (5, 5), (70, 33)], "spare": 3, **more})


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_every_page_and_dtype(kernel: Any, page: int, dtype: torch.dtype, fp8: bool, seed: int) -> None:
    for make in (decode, mixed):
        check(
            kernel, make(page=page, dtype=dtype, fp8=fp8, scales=2 if fp8 else 0, seed=seed, layout="joined")
        )


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256), (40, 8)], ids=str)
def test_every_head_dim(kernel: Any, dims: tuple[int, int], seed: int) -> None:
    for make in (decode, mixed):
        check(kernel, make(dims=dims, seed=seed))
        check(kernel, make(dims=dims, seed=seed, fp8=dims != (40, 8), layout="rows"))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (64, 4), (32, 1), (64, 1)], ids=str)
def test_every_group(kernel: Any, heads: tuple[int, int], seed: int) -> None:
    for make in (decode, mixed):
        check(kernel, make(heads=heads, dims=(64, 64), seed=seed))


@pytest.mark.parametrize(
    "more",
    [
        {"window": 150, "sinks": 20},
        {"window": 150, "causal": False},
        {"causal": False, "sink_logits": True},
        {"softcap": 10.0, "sink_logits": True},
        {"softcap": 10.0, "fp8": True, "scales": 1},
        {"window": 600, "sinks": 3, "fp8": True, "sink_logits": True},
    ],
    ids=str,
)
def test_every_option(kernel: Any, more: dict[str, Any], seed: int) -> None:
    for make in (decode, mixed):
        for layout in ("pair", "rows"):
            check(kernel, make(**more, layout=layout, seed=seed, page=64))


@pytest.mark.parametrize(
    "lists", [(1, 1, 128), (2, 1, 64), (8, 1, 16), (2, 64, 64), (1, 128, 128), (8, 64, 32)], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
def test_lists(kernel: Any, lists: tuple[int, int, int], causal: bool, seed: int) -> None:
    page = min(128, max(16, lists[2]))
    for make in (decode, mixed):
        for fp8 in (False, True):
            check(
                kernel, make(lists=lists, listed=15, full=True, causal=causal, page=page, fp8=fp8, seed=seed)
            )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_config_and_again_the_same_bits(kernel: Any, dim: int, seed: int) -> None:
    for make in (decode, mixed):
        batch = make(dims=(dim, dim), seed=seed)
        p, call = batch.make()
        for c in kernel.configs(p):
            out, lse = attend(kernel, p, call, c)
            hold(batch, p, call, out, lse, c)
            first = out.clone(), lse.clone()
            for _ in range(10):
                for a, b in zip(attend(kernel, p, call, c), first, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{c}, seed {seed}"


def test_random_batches(kernel: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        lengths = []
        for _ in range(draw.choice([1, 7, 150])):
            n = draw.choice([0, 1, 1, 1, draw.randint(2, 200)])
            lengths.append((n, max(0, n + draw.randint(-2, 900))))
        check(kernel, decode(
            lengths=lengths, page=draw.choice([16, 128]), window=draw.choice([0, 300]), fp8=draw.random() < 0.5,
            layout=draw.choice(["pair", "joined", "rows"]), seed=seed,
        ))  # fmt: skip


def test_each_request_alone_has_the_same_bits(kernel: Any, seed: int) -> None:
    lengths = [(1, 1 + 37 * i % 5000) for i in range(140)]
    p, call = decode(lengths=lengths, seed=seed).make()
    c = kernel.default(p)
    out, lse = (x.clone() for x in attend(kernel, p, call, c))
    for r in range(0, 140, 9):
        own = call._replace(
            q=call.q[r : r + 1], block_table=call.block_table[r : r + 1], seq_lens=call.seq_lens[r : r + 1],
            cu_seqlens_q=call.cu_seqlens_q[:2].clone(), out=torch.empty_like(out[:1]),
            lse=lse.new_empty(len(lse), 1),
        )  # fmt: skip
        alone = attend(kernel, replace(p, tokens=1, requests=1), own, c)
        assert torch.equal(alone[0], out[r : r + 1]), r
        assert torch.equal(alone[1], lse[:, r : r + 1]), r


def test_a_graph_stays_right_while_lengths_grow_over_edges_of_pages_and_parts(kernel: Any, seed: int) -> None:
    batch = decode(lengths=[(1, 2100), (1, 600), (1, 300)], seed=seed)
    p, call = batch.make()
    c, final = kernel.default(p), call.seq_lens.clone()
    work = kernel.prepare(p, c, call.q.device)
    call.seq_lens.fill_(1)
    kernel.launch(c, work, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(c, work, call)
    for turn in range(40):
        shorter = torch.randint(0, 600, (3,), device="cuda", dtype=torch.int32)
        call.seq_lens.copy_((final - (shorter if turn % 2 else shorter % 140)).clamp(min=0))
        call.q.normal_()
        call.out.fill_(torch.nan)
        call.lse.fill_(torch.nan)  # type: ignore[union-attr]
        graph.replay()
        hold(batch, p, call, call.out, call.lse)  # type: ignore[arg-type]


def test_nothing_waits_for_the_device(kernel: Any, no_sync: Any, seed: int) -> None:
    batch = mixed(seed=seed)
    p, call = batch.make()
    attend(kernel, p, call)
    torch.cuda.synchronize()
    with no_sync():
        out, lse = attend(kernel, p, call)
    hold(batch, p, call, out, lse)


def test_new_lengths_and_tables_compile_nothing(kernel: Any, seed: int) -> None:
    from sparsek.kernels.paged import portable

    known = portable._attention.device_caches[torch.cuda.current_device()][0]
    counts = []
    for length in (2000, 2001, 5000, 1500):
        check(kernel, decode(lengths=[(1, length), (1, length // 3)], seed=seed))
        counts.append(len(known))
    assert counts == counts[:1] * 4


def test_hostile_tables_lengths_and_lists_write_nothing_beside_out(kernel: Any, seed: int) -> None:
    torch.manual_seed(seed)

    def hostile(x: Tensor) -> Tensor:
        made = torch.randint(-(2**31), 2**31 - 1, x.shape, device=x.device).to(torch.int32)
        return torch.where(torch.rand(x.shape, device=x.device) < 0.5, made, x)

    for lists in (None, (2, 1, 128), (1, 64, 64)):
        for make in (decode, mixed):
            p, call = make(lists=lists, full=True, page=64, seed=seed).make()
            room = torch.full((3 * call.out.numel(),), 7.0, dtype=call.out.dtype, device="cuda")
            beside = torch.full((3 * call.lse.numel(),), 7.0, device="cuda")  # type: ignore[union-attr]
            out = room[call.out.numel() : 2 * call.out.numel()].view(call.out.shape)
            lse = beside[beside.numel() // 3 : 2 * beside.numel() // 3].view(call.lse.shape)  # type: ignore[union-attr]
            for turn in range(6):
                wrong = call._replace(block_table=hostile(call.block_table), out=out, lse=lse)
                if turn > 1:
                    wrong = wrong._replace(seq_lens=hostile(call.seq_lens))
                if turn > 2:
                    wrong = wrong._replace(cu_seqlens_q=hostile(call.cu_seqlens_q))
                if turn > 3 and call.lists is not None:
                    parts = [
                        BlockLists(*map(hostile, each)) for each in (call.lists.full, call.lists.partial)
                    ]
                    wrong = wrong._replace(lists=replace(call.lists, full=parts[0], partial=parts[1]))
                attend(kernel, p, wrong)
            torch.cuda.synchronize()
            for edge in (
                room[: out.numel()],
                room[-out.numel() :],
                beside[: lse.numel()],
                beside[-lse.numel() :],
            ):
                assert (edge == 7.0).all(), f"{lists}, seed {seed}"


def test_a_long_request_beside_short_ones(kernel: Any, seed: int) -> None:
    batch = decode(lengths=[(1, 131072), (1, 5)], seed=seed)
    p, call = batch.make()
    hold(batch, p, call, *attend(kernel, p, call))
    assert expected(p, call)[1].isfinite().all()
