"""portable.attention_paged in Triton's interpreter: every option beside the reference, hostile tables, equal bits."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.kernels.paged import portable
from sparsek.mask.lists import BlockLists
from tests.kernels.paged.portable_inputs import Batch, attend, check
from tests.kernels.paged.ragged import Ragged, found_before, make

KERNEL: Any = portable.KERNEL
TINY = portable.Config(16, 16, 4, 1)
SMALL = portable.Config(16, 32, 4, 2)
CASES = {
    "decode": (Batch([(1, 40), (1, 0), (1, 17)]), SMALL),
    "cut": (Batch([(1, 1100), (1, 3), (1, 520)], heads=(4, 1)), portable.Config(16, 128, 4, 2)),
    "cut sinks": (Batch([(1, 1100), (2, 2)], heads=(2, 1), sink_logits=True), portable.Config(16, 64, 4, 2)),
    "prefill": (Batch([(20, 20), (0, 5), (9, 60)], spare=3), SMALL),
    "two loops": (Batch([(37, 150), (5, 8)], heads=(2, 1)), portable.Config(64, 32, 4, 2)),
    "more queries than keys": (Batch([(9, 4), (3, 0)]), SMALL),
    "odd group": (Batch([(6, 33)], heads=(6, 2), page=32), SMALL),
    "every key": (Batch([(9, 40), (1, 30)], causal=False), SMALL),
    "window": (Batch([(20, 90), (1, 200)], window=23, sinks=5, heads=(2, 2)), SMALL),
    "window in two loops": (
        Batch([(60, 300)], window=150, sinks=40, heads=(2, 2)),
        portable.Config(64, 16, 4, 2),
    ),
    "window both ways": (Batch([(20, 90)], window=9, sinks=30, causal=False, heads=(2, 2)), TINY),
    "window both ways in two loops": (
        Batch([(70, 250)], window=90, causal=False, heads=(1, 1)),
        portable.Config(64, 16, 4, 2),
    ),
    "window both ways beyond int32, cut": (
        Batch([(1, 1100), (1, 3)], window=2**31 - 1, sinks=3, causal=False, heads=(2, 1)),
        portable.Config(16, 128, 4, 2),
    ),
    "softcap": (Batch([(3, 50), (1, 90)], softcap=3.0, sink_logits=True), SMALL),
    "fp8": (Batch([(3, 50), (1, 90)], fp8=True, scales=2, page=32, layout="joined"), SMALL),
    "fp8 cut": (Batch([(1, 700)], fp8=True, scales=1, heads=(4, 1)), portable.Config(16, 64, 4, 2)),
    "fp8 softcap": (Batch([(1, 50)], fp8=True, softcap=2.0, dims=(64, 40)), SMALL),
    "scales": (Batch([(3, 50), (1, 90)], scales=2, layout="rows"), SMALL),
    "dims": (Batch([(3, 40)], dims=(40, 8), layout="joined"), SMALL),
    "wide dims": (Batch([(2, 20)], dims=(256, 192), heads=(2, 1), page=16), TINY),
    "large pages": (Batch([(1, 300), (4, 30)], page=256), SMALL),
    "lists of queries": (Batch([(3, 300), (1, 90)], lists=(2, 1, 32)), SMALL),
    "lists of every head": (Batch([(1, 300), (2, 90)], lists=(4, 1, 16), page=16), TINY),
    "lists, cut": (
        Batch([(1, 1400), (1, 90)], lists=(1, 1, 64), listed=14, heads=(2, 1)),
        portable.Config(16, 64, 4, 2),
    ),
    "lists of tiles": (
        Batch([(70, 260), (5, 90)], lists=(1, 64, 64), page=32, full=True, heads=(2, 1)),
        portable.Config(64, 32, 4, 2),
    ),
    "lists of tiles, odd group": (
        Batch([(70, 90)], lists=(1, 64, 64), heads=(3, 1), full=True),
        portable.Config(64, 64, 4, 2),
    ),
    "lists, every key": (
        Batch([(70, 200)], lists=(2, 64, 32), causal=False, full=True, heads=(2, 2)),
        portable.Config(64, 32, 4, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_option_is_within_budget(name: str) -> None:
    batch, c = CASES[name]
    check(KERNEL, batch, c)


def test_random_batches_are_within_budget(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(4):
        lengths = []
        for _ in range(draw.randint(1, 4)):
            n = draw.choice([0, 1, 1, draw.randint(2, 20)])
            lengths.append((n, n + draw.randint(0, 80)))
        group, hkv = draw.choice([1, 2, 3, 4]), draw.choice([1, 2])
        batch = Batch(
            lengths, heads=(group * hkv, hkv), dims=(draw.choice([8, 32, 64]), draw.choice([16, 32, 72])),
            page=draw.choice([16, 32, 64]), fp8=draw.random() < 0.3, causal=draw.random() < 0.7,
            window=draw.choice([0, 0, 13]), sinks=draw.choice([0, 3]), softcap=draw.choice([0.0, 0.0, 4.0]),
            sink_logits=draw.random() < 0.3, layout=draw.choice(["pair", "joined", "rows"]), seed=draw.randrange(999),
            lists=(draw.choice([1, hkv]), draw.choice([1, 64]), 32) if draw.random() < 0.3 else None, spare=2,
        )  # fmt: skip
        if batch.fp8 and batch.dims[0] + batch.dims[1] == 24:
            continue
        check(KERNEL, batch, draw.choice([SMALL, TINY, portable.Config(64, 32, 4, 2)]))


@pytest.mark.parametrize("fp8", [False, True])
def test_each_request_alone_has_the_same_bits(fp8: bool) -> None:
    """In a batch of 130, which takes two turns through the lengths, and of which two are cut."""
    lengths = [(1, 5)] * 20 + [(0, 0)] * 108 + [(1, 1200), (2, 600)]
    batch = Batch(lengths, heads=(2, 1), fp8=fp8, sink_logits=True)
    p, call = batch.make()
    c = portable.Config(16, 128, 4, 1)
    assert portable.parts(p, c) == 3
    out, lse = (x.clone() for x in attend(KERNEL, p, call, c))
    edges = call.cu_seqlens_q.tolist()
    for r in (0, 128, 129):
        first, last = edges[r], edges[r + 1]
        own = call._replace(
            q=call.q[first:last], block_table=call.block_table[r : r + 1], seq_lens=call.seq_lens[r : r + 1],
            cu_seqlens_q=call.cu_seqlens_q[r : r + 2] - first, out=out.new_empty(last - first, *out.shape[1:]),
            lse=lse.new_empty(len(lse), last - first),
        )  # fmt: skip
        alone = attend(KERNEL, replace(p, tokens=last - first, requests=1), own, c)
        assert torch.equal(alone[0], out[first:last]), r
        assert torch.equal(alone[1], lse[:, first:last]), r


def test_tables_lengths_and_lists_that_are_wrong_end_in_some_numbers(seed: int) -> None:
    """The interpreter reads memory by address: what is outside a tensor may end the process."""
    draw = torch.Generator().manual_seed(seed)

    def hostile(x: Any, large: int = 2**31 - 1) -> Any:
        made = torch.randint(-large - 1, large, x.shape, generator=draw).to(torch.int32)
        return torch.where(torch.rand(x.shape, generator=draw) < 0.5, made, x)

    for lists in (None, (2, 1, 32), (1, 64, 64)):
        p, call = Batch([(3, 200), (1, 90), (2, 30)], lists=lists, full=True).make()
        for turn in range(2):
            wrong = call._replace(block_table=hostile(call.block_table))
            if turn or lists:
                wrong = wrong._replace(
                    seq_lens=hostile(call.seq_lens), cu_seqlens_q=hostile(call.cu_seqlens_q)
                )
            if call.lists is not None and turn:
                parts = [BlockLists(*map(hostile, each)) for each in (call.lists.full, call.lists.partial)]
                wrong = wrong._replace(lists=replace(call.lists, full=parts[0], partial=parts[1]))
            attend(KERNEL, p, wrong, SMALL)


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    p, call = Batch([(3, 200), (1, 90)], layout="rows").make()
    narrow = [x.clone() for x in attend(KERNEL, p, call, SMALL)]
    known = portable._constants
    monkeypatch.setattr(portable, "_constants", lambda *given: {**known(*given), "WIDE": True})
    assert all(torch.equal(a, b) for a, b in zip(narrow, attend(KERNEL, p, call, SMALL), strict=True))


def test_pages_that_no_window_reaches_may_hold_nan() -> None:
    base = Ragged(
        (3, 1, 20), (300, 200, 250), window=50, sinks=20, page=16, dims=(16, 16), dtype=torch.float16
    )
    for batch in (base, replace(base, causal=False, sinks=0)):
        made = make(batch, 7, "cpu")
        for c in (SMALL, portable.Config(64, 64, 4, 2)):
            found_before(made, KERNEL, c)


def test_large_scores_do_not_overflow() -> None:
    for fp8 in (False, True):
        p, call = Batch([(3, 200), (1, 90)], fp8=fp8).make()
        out, lse = attend(KERNEL, p, call._replace(q=call.q * 1000), SMALL)
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_every_e4m3_becomes_its_own_fp16() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    p, call = Batch([(1, 16)] * 16, heads=(1, 1), dims=(16, 16), fp8=True).make()
    v = codes.view(torch.float8_e4m3fn).view(16, 1, 1, 16).expand(16, 1, 16, 16).contiguous()
    call = call._replace(k=torch.zeros_like(v), v=v, block_table=torch.arange(16, dtype=torch.int32)[:, None])
    p = replace(p, kv_dtype="e4m3")
    out, _ = attend(KERNEL, p, call, TINY)
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float16).view(16, 1, 16)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
