"""The gate that judges attention: what it lets pass, what it refuses, and what it looks at."""

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.refusals import refused

SMALL = (64, 64)
# Of 300 queries over 200 keys the first 100 see nothing.
MASK = BlockMask.causal(q_len=300, kv_len=200, block=SMALL, device="cpu")


def inputs(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 4, 300, 32), (1, 2, 200, 32), (1, 2, 200, 32)
    return tuple(torch.randn(shape, generator=draw).to(dtype) for shape in shapes)  # type: ignore[return-value]


def test_the_reference_passes_and_reports_its_errors() -> None:
    q, k, v = inputs()
    gate = check_attention(q, k, v, MASK, *attention(q, k, v, MASK))
    assert gate.passed
    assert 0 < gate.error <= gate.budget < 1e-3
    assert 0 < gate.largest < 2e-3
    assert 0 < gate.lse_largest < 1e-4
    assert gate.empty_rows_hold


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_reference_passes_in_every_dtype_and_without_lse(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    gate = check_attention(q, k, v, MASK, attention(q, k, v, MASK, scale=0.3)[0], scale=0.3)
    assert gate.passed
    assert gate.lse_largest == 0


def test_poison_and_faults_are_refused() -> None:
    q, k, v = inputs()
    out, lse = attention(q, k, v, MASK)

    def verdict(change_out: Tensor | None = None, change_lse: Tensor | None = None) -> bool:
        return check_attention(
            q,
            k,
            v,
            MASK,
            out if change_out is None else change_out,
            lse if change_lse is None else change_lse,
        ).passed

    assert verdict()
    assert not verdict(poisoned(out.shape, out.dtype))
    assert not verdict(change_lse=poisoned(lse.shape, lse.dtype))
    assert not verdict(change_lse=lse + 0.01)
    for query, wrong in ((200, 0.5), (5, 1e-7), (5, torch.nan)):
        faulty = out.clone()
        faulty[0, 1, query, 3] += wrong
        assert not verdict(faulty), (query, wrong)
    for query, wrong in ((5, -100.0), (5, torch.nan), (200, -torch.inf), (200, torch.nan)):
        faulty = lse.clone()
        faulty[0, 1, query] = wrong
        assert not verdict(change_lse=faulty), (query, wrong)


def test_only_the_chosen_tiles_are_looked_at() -> None:
    q, k, v = inputs()
    out, lse = attention(q, k, v, MASK)
    out[:, :, 130] = torch.nan
    assert check_attention(q, k, v, MASK, out, lse, rows=[0, 1, 4]).passed
    assert not check_attention(q, k, v, MASK, out, lse, rows=[4, 2]).passed


def test_keys_that_no_query_of_a_tile_sees_may_hold_anything() -> None:
    mask = BlockMask.sliding_window(256, 1, block=SMALL, device="cpu")
    q = torch.randn(1, 1, 256, 32)
    k, v = q.clone(), q.clone()
    k[:, :, 64:128] = v[:, :, 64:128] = torch.nan
    out, lse = attention(q, k, v, mask)
    assert check_attention(q, k, v, mask, out, lse, rows=[0, 2, 3]).passed
    assert not check_attention(q, k, v, mask, out, lse).passed


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = inputs()
    out, lse = attention(q, k, v, MASK)
    words = r"out must be \[1, 4, 300, 32\] and lse \[1, 4, 300\], got out \[1, 4, 299"
    refused(words, check_attention, q, k, v, MASK, out[:, :, 1:], lse)
    refused(r"lse \[4, 300\]", check_attention, q, k, v, MASK, out, lse[0])
    words = "the mask is for 300 queries and 200 keys, got 299"
    refused(words, check_attention, q[:, :, 1:], k, v, MASK, out, lse)
    for rows in ([], [5], [-1]):
        refused(
            "rows must name tiles of queries, 0 to 4", check_attention, q, k, v, MASK, out, lse, rows=rows
        )
