"""portable.attention_paged in Triton's interpreter: every option beside the reference, hostile tables, equal bits."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.attn.kernels.paged import portable
from tests.attn.kernels.paged.calls import (
    PagedRun,
    attend_paged,
    check_alone,
    check_beyond_windows,
    check_cleared,
    check_paged,
    hostile,
    paged_problem,
)
from tests.attn.paged_cases import FORMS, ListForm, PagedCase, drawn_case
from tests.sampling import half

KERNEL: Any = portable.KERNEL
TINY = portable.Config(16, 16, 4, 1)
SMALL = portable.Config(16, 32, 4, 2)


def batch(*lengths: tuple[int, int], **more: Any) -> PagedCase:
    """4 heads of 32 to 2 of keys, in fp16, with tight bounds."""
    return PagedCase("interpreted", lengths, **{"heads": (4, 2), "dims": (32, 32), "dtype": "fp16", "form": "pair",
                                                **more})  # fmt: skip


def fp8(*lengths: tuple[int, int], **more: Any) -> PagedCase:
    return batch(*lengths, kv_dtype="e4m3", **more)


CASES = {
    "decode": (batch((1, 40), (1, 0), (1, 17)), SMALL),
    "cut": (batch((1, 1100), (1, 3), (1, 520), heads=(4, 1)), portable.Config(16, 128, 4, 2)),
    "cut sinks": (batch((1, 1100), (2, 2), heads=(2, 1), sink_logits=True), portable.Config(16, 64, 4, 2)),
    "prefill": (batch((20, 20), (0, 5), (9, 60), tail=3, loose=True), SMALL),
    "two loops": (batch((37, 150), (5, 8), heads=(2, 1)), portable.Config(64, 32, 4, 2)),
    "more queries than keys": (batch((9, 4), (3, 0)), SMALL),
    "odd group": (batch((6, 33), heads=(6, 2), page=32), SMALL),
    "every key": (batch((9, 40), (1, 30), causal=False), SMALL),
    "window": (batch((20, 90), (1, 200), window=23, sinks=5, heads=(2, 2)), SMALL),
    "window in two loops": (
        batch((60, 300), window=150, sinks=40, heads=(2, 2)),
        portable.Config(64, 16, 4, 2),
    ),
    "window both ways": (batch((20, 90), window=9, sinks=30, causal=False, heads=(2, 2)), TINY),
    "window both ways in two loops": (
        batch((70, 250), window=90, causal=False, heads=(1, 1)),
        portable.Config(64, 16, 4, 2),
    ),
    "window both ways beyond int32, cut": (
        batch((1, 1100), (1, 3), window=2**31 - 1, sinks=3, causal=False, heads=(2, 1)),
        portable.Config(16, 128, 4, 2),
    ),
    "softcap": (batch((3, 50), (1, 90), softcap=3.0, sink_logits=True), SMALL),
    "fp8": (fp8((3, 50), (1, 90), scale_per="head", page=32, form="one"), SMALL),
    "fp8 cut": (fp8((1, 700), scale_per="tensor", heads=(4, 1)), portable.Config(16, 64, 4, 2)),
    "fp8 softcap": (fp8((1, 50), softcap=2.0, dims=(64, 48)), SMALL),
    "scales": (batch((3, 50), (1, 90), scale_per="head", form="pair by rows"), SMALL),
    "dims": (batch((3, 40), dims=(40, 8), form="one"), SMALL),
    "wide dims": (batch((2, 20), dims=(256, 192), heads=(2, 1)), TINY),
    "large pages": (batch((1, 300), (4, 30), page=256), SMALL),
    "lists of queries": (batch((3, 300), (1, 90), lists=ListForm((1, 32)), loose=True), SMALL),
    "lists of every head": (batch((1, 300), (2, 90), lists=ListForm((1, 16), "q")), TINY),
    "lists, cut": (
        batch((1, 1400), (1, 90), lists=ListForm((1, 64), "all", 20), heads=(2, 1)),
        portable.Config(16, 64, 4, 2),
    ),
    "lists of tiles": (
        batch((70, 260), (5, 90), lists=ListForm((64, 64), full=True), page=32, heads=(2, 1), loose=True),
        portable.Config(64, 32, 4, 2),
    ),
    "lists of tiles, odd group": (
        batch((70, 90), lists=ListForm((64, 64), full=True), heads=(3, 1)),
        portable.Config(64, 64, 4, 2),
    ),
    "lists, every key": (
        batch((70, 200), lists=ListForm((64, 32), full=True), causal=False, heads=(2, 2)),
        portable.Config(64, 32, 4, 2),
    ),
    **{form: (batch((3, 50), (1, 90), form=form), SMALL) for form in FORMS},
}


@pytest.mark.parametrize("name", half(CASES))
def test_every_option_is_within_budget(name: str, seed: int) -> None:
    case, c = CASES[name]
    check_paged(KERNEL, case, c, seed=seed)


@pytest.mark.parametrize(
    ("case", "c"),
    [
        (batch((1, 40), (0, 0), (1, 17), tail=40, heads=(6, 2), dims=(32, 24)), SMALL),
        (batch((1, 1100), (1, 3), heads=(4, 1), tail=3), portable.Config(16, 128, 4, 2)),
        (batch((0, 7), tail=2, heads=(2, 1), loose=True), SMALL),
        (fp8((3, 50), tail=5, dims=(64, 48)), SMALL),
    ],
    ids=["decode", "cut", "no query", "fp8"],
)
def test_rows_behind_the_last_request_are_cleared(case: PagedCase, c: portable.Config) -> None:
    check_cleared(KERNEL, case.make(), c)


def test_random_batches_are_within_budget(seed: int) -> None:
    draw = random.Random(seed)
    for turn in range(4):
        kv = draw.choice([1, 2])
        case = drawn_case(
            seed + turn, requests=4, queries=20, keys=80, heads=[(group * kv, kv) for group in (1, 2, 3, 4)],
            dims=[(d, dv) for d in (16, 32, 64) for dv in (16, 32, 80)], page=[16, 32, 64], dtype=["fp16"],
            kv_dtype=["", "", "e4m3"], form=list(FORMS), window=[0, 0, 13], sinks=[0, 3], softcap=[0.0, 0.0, 4.0],
            lists=[None, None, *(ListForm((bq, 32), heads) for bq in (1, 64) for heads in ("all", "kv"))], tail=[2],
        )  # fmt: skip
        check_paged(KERNEL, case, draw.choice([SMALL, TINY, portable.Config(64, 32, 4, 2)]), seed=seed)


@pytest.mark.parametrize("kv_dtype", ["", "e4m3"])
def test_each_request_alone_has_the_same_bits(kv_dtype: str) -> None:
    """In a batch of 130, which takes two turns through the lengths, and of which two are cut."""
    lengths = [(1, 5)] * 20 + [(0, 0)] * 108 + [(1, 1200), (2, 600)]
    inputs = batch(*lengths, heads=(2, 1), kv_dtype=kv_dtype, sink_logits=True).make()
    c = portable.Config(16, 128, 4, 1)
    assert portable.parts(paged_problem(inputs), c) == 3
    check_alone(KERNEL, inputs, (0, 128, 129), c)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of numpy, for a table of poisoned pages alone
def test_tables_lengths_and_lists_that_are_wrong_end_in_some_numbers(seed: int) -> None:
    """The interpreter reads memory by address: what is outside a tensor may end the process."""
    for lists in (None, ListForm((1, 32), full=True), ListForm((64, 64), "all", full=True)):
        inputs = batch((3, 200), (1, 90), (2, 30), lists=lists).make(seed=seed)
        lengths = ("seq_lens", "cu_seqlens_q")
        for names in (("block_table", *(lengths if lists else ())), ("block_table", *lengths, "lists")):
            attend_paged(KERNEL, hostile(inputs, seed, *names), SMALL)


def test_offsets_of_64_bits_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch((3, 200), (1, 90), form="pair by rows").make()
    narrow = attend_paged(KERNEL, inputs, SMALL)
    known = portable._constants
    monkeypatch.setattr(portable, "_constants", lambda *given: {**known(*given), "WIDE": True})
    assert all(torch.equal(a, b) for a, b in zip(narrow, attend_paged(KERNEL, inputs, SMALL), strict=True))


def test_pages_that_no_window_reaches_may_hold_nan() -> None:
    for more in ({"sinks": 20}, {"causal": False}):
        case = batch((3, 300), (1, 200), (20, 250), window=50, dims=(16, 16), page=16, **more)
        for c in (SMALL, portable.Config(64, 64, 4, 2)):
            check_beyond_windows(KERNEL, case.make(), c)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul", "ignore:All-NaN slice")  # of numpy
def test_scores_of_minus_infinity_are_those_of_keys_that_nobody_sees() -> None:
    """The first step of each part, whose every key is seen, has no finite score."""
    inputs = batch((1, 1200), heads=(2, 1)).make()
    inputs.q.abs_()
    pages = inputs.block_table[0].tolist()
    for first in (0, 512):
        for key in range(first, first + 32):
            inputs.k[pages[key // inputs.k.shape[2]], :, key % inputs.k.shape[2], 0] = -torch.inf
    for c in (SMALL, portable.Config(64, 32, 4, 2)):
        made = PagedRun(KERNEL, inputs, c)
        made.run()
        assert made.out.isfinite().all()
        assert made.lse.isfinite().all()


@pytest.mark.parametrize("longest", [2**29, 2**31 - 1])
def test_a_bound_of_lists_may_be_of_any_size(longest: int) -> None:
    inputs = batch((1, 1400), (1, 90), lists=ListForm((1, 64), "all", 20), heads=(2, 1)).make()
    c = portable.Config(16, 64, 4, 2)
    found = attend_paged(KERNEL, inputs, c)
    assert inputs.lists is not None
    inputs = inputs._replace(lists=replace(inputs.lists, longest=longest))
    assert all(
        torch.allclose(a, b, atol=1e-3) for a, b in zip(found, attend_paged(KERNEL, inputs, c), strict=True)
    )


def test_large_scores_do_not_overflow() -> None:
    for kv_dtype in ("", "e4m3"):
        out, lse = attend_paged(
            KERNEL, batch((3, 200), (1, 90), kv_dtype=kv_dtype, spread=1000.0).make(), SMALL
        )
        assert out.isfinite().all()
        assert lse.isfinite().all()


def test_every_e4m3_becomes_its_own_fp16() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    inputs = fp8(*[(1, 16)] * 16, heads=(1, 1), dims=(16, 16)).make()
    v = codes.view(torch.float8_e4m3fn).view(16, 1, 1, 16).expand(16, 1, 16, 16).contiguous()
    table = torch.arange(16, dtype=torch.int32)[:, None]
    inputs = inputs._replace(k=torch.zeros_like(v), v=v, block_table=table, max_k=16)
    out, _ = attend_paged(KERNEL, inputs, TINY)
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float16).view(16, 1, 16)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
