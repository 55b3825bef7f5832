"""reference.attention_paged, the kernel of a CPU, against float64, on every case."""

from dataclasses import replace

import pytest
import torch

from sparsek.engine.table import load
from sparsek.testing.paged_budget import check_attention_paged, expected_attention_paged
from tests.attn.kernels.paged.calls import attend_paged, check_alone, check_cleared
from tests.attn.paged_cases import PAGED_CASES, PagedCase
from tests.sampling import sampled

KERNEL = load("reference.attention_paged")
BY_NOTE = {case.note: case for case in PAGED_CASES}


@pytest.mark.parametrize("case", sampled(PAGED_CASES, 24), ids=str)
def test_every_case_is_within_budget(case: PagedCase) -> None:
    inputs = case.make()
    expected = expected_attention_paged(inputs)
    out, lse = attend_paged(KERNEL, inputs)
    gate = expected.judge(out, lse)
    assert gate.passed, gate
    assert bool(out[inputs.end :].isnan().all()), "rows of no request were written"
    assert bool(lse[:, inputs.end :].isnan().all())


@pytest.mark.parametrize("lengths", [((3, 9), (1, 20)), ((0, 9),)], ids=str)
def test_rows_behind_the_last_request_are_cleared(lengths: tuple[tuple[int, int], ...]) -> None:
    check_cleared(KERNEL, PagedCase("tail", lengths, tail=5, dims=(32, 24), loose=True).make())


@pytest.mark.parametrize("note", ["mixed", "window and sinks", "lists of tiles of 64", "fp8 per head"])
@pytest.mark.parametrize("dtype", sampled([torch.float16, torch.float32, torch.float64], 2), ids=str)
def test_every_dtype_is_within_budget(note: str, dtype: torch.dtype) -> None:
    inputs = BY_NOTE[note].make(dtype=dtype, seed=1)
    gate = check_attention_paged(inputs, *attend_paged(KERNEL, inputs, form="heads"))
    assert gate.passed, gate


@pytest.mark.parametrize(
    "note", ["mixed", "lists of several pages", "window of one", "more queries than keys"]
)
def test_a_wrong_result_fails(note: str) -> None:
    """The budget is no looser than one key too many, or one missing."""
    case = BY_NOTE[note]
    inputs = case.make()
    longer = inputs._replace(causal=False) if case.window != 1 else inputs._replace(window=2)
    assert not check_attention_paged(inputs, *attend_paged(KERNEL, longer)).passed
    out, lse = attend_paged(KERNEL, inputs)
    out[0, 0, 0] = torch.nan
    assert not check_attention_paged(inputs, out, lse).passed


def test_tables_and_lengths_out_of_range_read_nothing_outside() -> None:
    inputs = BY_NOTE["mixed"].make()
    bad = inputs._replace(block_table=inputs.block_table * 0 + 2**30, seq_lens=inputs.seq_lens + 10**6)
    attend_paged(KERNEL, bad)


def test_a_request_has_the_same_bits_alone() -> None:
    check_alone(KERNEL, replace(BY_NOTE["mixed"], heads=(4, 2)).make(), range(len(BY_NOTE["mixed"].lengths)))
