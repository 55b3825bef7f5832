"""Quest on a CPU: choice and summaries against loops, and what is refused."""

import re
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.reference import quest as reference
from sparsek.core.errors import InvalidInput
from tests.attn.kernels.paged import quest_cases as cases
from tests.attn.kernels.paged.quest_batches import batch
from tests.refusals import refused

Quest = sk.policies.Quest


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
@cases.choices
def test_pages_are_those_of_the_highest_bounds(case: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn:
        lengths, queries, page, topk, options = case
        b = batch(lengths, queries, page=page, **options)
        rounded = b._replace(summaries=b.summaries.to(dtype))
        right, found = (
            Quest(topk, page).lists(x.q, x.summaries, x.block_table, x.seq_lens, x.cu_seqlens_q)
            for x in (b, rounded)
        )
        assert torch.equal(right.full.indices, found.full.indices)
    else:
        cases.check_choice(case, "cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
@cases.updates
def test_summaries_follow_the_cache(page: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
    cases.check_update(page, dim, tokens, dtype, "cpu")


def test_a_request_grows() -> None:
    cases.check_steps("cpu", torch.float32)


def test_nan() -> None:
    cases.check_nan("cpu")


def test_the_bound_is_one() -> None:
    """No key of a page has a larger product with the query than its bound."""
    torch.manual_seed(0)
    keys, q = torch.randn(5, 2, 16, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    summaries = torch.stack((keys.amin(2), keys.amax(2)), 2)
    products = torch.einsum("hd,phrd->hpr", q, keys).amax(2)
    assert (reference.bounds(q, summaries) >= products).all()
    assert torch.equal(reference.bounds(q, keys[:, :, :1].repeat(1, 1, 2, 1)).argmax(1), (
        torch.einsum("hd,phd->hp", q, keys[:, :, 0]).argmax(1)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(3, 5, 16, dtype=torch.float16)}, "where Hkv divides 5"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int64)}, "torch.int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "needs [2]"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "needs [3]"),
        ({"summaries": torch.zeros(4, 2, 16, 2, dtype=torch.float16).mT}, "call summaries.contiguous()"),
        ({"block_table": torch.zeros(2, 16385, dtype=torch.int32)}, "use larger pages"),
        ({"q": torch.zeros(3, 4, 16)}, "the dtype of summaries"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    b = batch([20, 30], [1, 1])._replace(**changed)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Quest(page=16).lists(b.q, b.summaries, b.block_table, b.seq_lens, b.cu_seqlens_q)


def test_other_options_and_caches_are_refused() -> None:
    refused("topk is 1; it must be an int of at least 2", Quest, 1)
    refused("page is 48; use one of 16, 32", Quest, page=48)
    keys = torch.zeros(3, 2, 16, 8)
    refused("with 16 rows in a page; this Quest has pages of 32", Quest(page=32).summaries, keys)
    quest, slots = Quest(page=16), torch.zeros(1, dtype=torch.int64)
    refused(re.escape("need [3, 2, 2, 8]"), quest.update, keys, slots, torch.zeros(3, 2, 8, 2))
    refused(r"torch\.int64", quest.update, keys, slots.int(), quest.summaries(keys))


def test_summaries_of_inference_mode_and_torch_func_are_refused() -> None:
    keys, quest, slots = torch.zeros(3, 2, 16, 8), Quest(page=16), torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        made = quest.summaries(keys).clone()
        quest.update(keys, slots, made)
    refused("written to outside inference mode", quest.update, keys, slots, made)
    with pytest.raises(InvalidInput, match=r"no batching rule for torch\.func"):
        torch.vmap(lambda keys: quest.update(keys, slots, torch.zeros(3, 2, 2, 8)) or keys)(keys[None])
