"""What sk.attention_paged refuses, with what was wrong and what would be right; and checks of values on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.plan.paged_operands import VisibleKeys, check_sizes
from tests.ops.paged import CASES, MIXED, arguments_of, attend
from tests.refusals import refused

ODD: Any = 64  # no pair
LISTS = torch.tensor([0, 1], dtype=torch.int32).repeat(1, 30, 1)
FLAT = BlockLists(LISTS.view(-1), LISTS.view(-1), LISTS.view(-1))

REFUSED: list[tuple[str, Any, str]] = [
    ("q", lambda x: x.q[0], r"q is \[4, 16\]; it must be \[tokens, Hq, D\]"),
    ("q", lambda x: x.q.int(), "use one of torch.bfloat16"),
    ("q", lambda x: x.q[:, :3], "q has 3 heads and the cache 2"),
    ("q", lambda x: x.q.half(), "q is torch.float16 and the pages torch.float32"),
    ("q", lambda x: x.q.clone().requires_grad_(), r"no gradient, and q requires one; use torch.no_grad\(\)"),
    ("cache", lambda x: x.cache[..., :20], r"one tensor \[pages, Hkv, page, 2 \* D\]"),
    ("cache", lambda x: x.cache.transpose(1, 2), r"16 heads of pages of 2 rows.*x.transpose\(1, 2\)"),
    ("cache", lambda x: (x.k, x.v[:2]), "cache is"),
    ("cache", lambda x: (x.k, x.v, x.v), "a pair"),
    ("cache", lambda x: (x.k, x.v.to(torch.float8_e4m3fn)), "pages torch.float8_e4m3fn"),
    (
        "block_table",
        lambda x: x.block_table.long(),
        r"block_table is torch.int64; it must be int32: block_table.int\(\)",
    ),
    ("block_table", lambda x: x.block_table[0], r"must be \[requests, width\]"),
    ("block_table", lambda x: x.block_table.T.contiguous().T, "contiguous"),
    ("seq_lens", lambda x: x.seq_lens[:-1], "requests, requests and requests"),
    ("cu_seqlens_q", lambda x: x.cu_seqlens_q[1:], "requests, requests and requests"),
    ("mask", lambda x: sk.MaskPolicy(window=64, stride=64, block=64), "option stride"),
    ("mask", lambda x: sk.BlockMask.causal(26), "PageLists.of_masks"),
    (
        "mask",
        lambda x: sk.PageLists.from_indices(LISTS.expand(3, -1, -1).contiguous(), (1, 16)),
        "lists for 3 heads",
    ),
    ("max_seqlen_q", lambda x: -1, "max_seqlen_q is -1"),
    ("scale", lambda x: 0.0, "scale is 0.0"),
    ("softcap", lambda x: -1.0, "softcap is -1.0"),
    ("sink_logits", lambda x: torch.zeros(4, dtype=torch.float16), r"float32 \[4\].*sink_logits.float\(\)"),
    (
        "sink_logits",
        lambda x: torch.full((4,), torch.nan),
        r"sink_logits\[0\] is nan; a sink is a finite number",
    ),
    ("sink_logits", lambda x: torch.tensor([0, 0, 0, torch.inf]), r"sink_logits\[3\] is inf"),
    ("k_scale", lambda x: 0.5, "only FP8 pages have a scale"),
    ("k_scale", lambda x: torch.ones(1), "only FP8 pages have a scale"),
    ("out", lambda x: torch.empty_like(x.q)[:3], r"must be torch.float32 \[26, 4, 16\]"),
    ("out", lambda x: torch.empty(26, 16, 4).mT, "last dim must be contiguous"),
    ("out", lambda x: torch.empty(1, 4, 16).expand(26, 4, 16), "share memory"),
    ("out", lambda x: x.q, "out overlaps the memory of q"),
    ("out", lambda x: x.cache.flatten()[: x.q.numel()].view(x.q.shape), "out overlaps the memory of cache"),
    ("cache", lambda x: torch.stack((x.k, x.v)), "of one 5-D tensor, pass keys and values apart"),
    ("cache", lambda x: x.cache.to(torch.uint8), r"x.view\(torch.float8_e4m3fn\)"),
    ("mask", lambda x: sk.policies.Quest(page=16), r"quest.lists\(...\)"),
    ("causal", lambda x: 1, "causal is 1; it must be True or False"),
    ("kernel", lambda x: "no.kernel", "no kernel of attention_paged is called 'no.kernel'"),
]


@pytest.mark.parametrize(("name", "make", "what"), REFUSED, ids=[f"{n}-{w[:24]}" for n, _, w in REFUSED])
def test_what_does_not_fit_is_refused_with_what_would_be_right(name: str, make: Any, what: str) -> None:
    x = MIXED.make()
    refused(what, attend, x, **{name: make(x)})


def test_causality_of_a_policy_and_of_the_call_must_agree() -> None:
    x = MIXED.make()
    refused("causal=False contradicts mask", attend, x, mask=sk.MaskPolicy(window=4), causal=False)
    both = sk.MaskPolicy(window=4, causal=False)
    assert torch.equal(attend(x, mask=both), attend(x, mask=both, causal=False))


def test_gradients_are_refused_only_where_autograd_is_on() -> None:
    x = MIXED.make()
    want = attend(x)
    q = x.q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(attend(x, q=q), want)
    refused("sink_logits requires one", attend, x, sink_logits=torch.zeros(4).requires_grad_())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda x: x.seq_lens.__setitem__(1, 10**6),
            r"seq_lens\[1\] is 1000000; block_table has room for 0 to 48 keys",
        ),
        (lambda x: x.seq_lens.__setitem__(2, -1), r"seq_lens\[2\] is -1"),
        (lambda x: x.seq_lens.__setitem__(1, 45), r"seq_lens\[1\] is 45, and max_seqlen_k is 40"),
        (
            lambda x: x.block_table.__setitem__((1, 2), 77),
            r"block_table\[1, 2\] is 77; request 1 has 33 keys",
        ),
        (lambda x: x.block_table.__setitem__((0, 0), -2), r"block_table\[0, 0\] is -2"),
        (
            lambda x: x.seq_lens.__setitem__(1, 3),
            r"seq_lens\[1\] is 3, and request 1 has 5 queries; with causal=True",
        ),
        (lambda x: x.cu_seqlens_q.__setitem__(0, 1), "cu_seqlens_q starts with 1"),
        (lambda x: x.cu_seqlens_q.__setitem__(-1, 99), "cu_seqlens_q ends with 99, and q has 26 rows"),
        (lambda x: x.cu_seqlens_q.__setitem__(1, 8), "cu_seqlens_q falls from 8 to 6 at request 1"),
    ],
)
def test_values_that_do_not_fit_are_found(change: Any, what: str) -> None:
    """On a CPU without check=True, which adds queries without a key of their own; by a plan and by the op too."""
    x = MIXED.make()
    given = arguments_of(x)
    plan = sk.plan_attention_paged(**given)

    def by_op() -> None:
        with FlopCounterMode(display=False):
            attend(x)

    attend(x, check=True)
    change(x)
    refused(what, attend, x, check=True)
    if "causal=True" in what:
        assert not attend(x)[1:3].any()
        return
    for call in (lambda: attend(x), lambda: plan(**given), by_op):
        refused(what, call)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k", "cache", "block_table", "mask"])
def test_sizes_without_room_are_refused_without_check(name: str) -> None:
    """On a CPU by the lengths; elsewhere by shapes and numbers, as the meta device shows."""
    x = MIXED.make()
    few = sk.PageLists.from_indices(LISTS[:, :25].contiguous(), (1, 16))
    wrong: dict[str, Any] = {
        "max_seqlen_q": 0, "max_seqlen_k": 39, "cache": x.cache[:0], "block_table": x.block_table[:, :0], "mask": few,
    }  # fmt: skip
    refused(name if name != "cache" else "the cache has no pages", attend, x, **{name: wrong[name]})
    if name == "max_seqlen_k":  # lengths alone show that it is too small
        return
    given = arguments_of(x) | {name: wrong[name]}
    meta: dict[str, Any] = {
        key: each.to("meta") if isinstance(each, torch.Tensor) else each for key, each in given.items()
    }
    elsewhere: Any = lambda: sk.plan_attention_paged(**meta, device="h200")  # noqa: E731
    if name == "mask":  # lists are not on the meta device
        none = sk.PageLists.from_indices(LISTS[:, :0], (1, 16))
        elsewhere = lambda: check_sizes(x.q, x.k, x.block_table, VisibleKeys(True, lists=none), 20)  # noqa: E731
        check_sizes(x.q, x.k, x.block_table, VisibleKeys(True, lists=few), 20)  # q may be padded
    refused(name, elsewhere)
    ones = arguments_of(x) | {name: wrong[name], "q": x.q[:0], "cu_seqlens_q": x.cu_seqlens_q * 0}
    ones["seq_lens"] = x.seq_lens * 0
    assert sk.attention_paged(**ones).shape == (0, 4, 16)


def test_check_finds_more_queries_than_the_bound() -> None:
    with pytest.raises(sk.InvalidInput, match="request 3 has 20 queries, and max_seqlen_q is 19"):
        attend(MIXED.make(), max_seqlen_q=19, check=True)


def test_check_finds_lists_that_do_not_fit() -> None:
    x = MIXED.make()
    few = sk.PageLists.from_indices(LISTS[:, :20].contiguous(), (1, 16))
    refused(
        "mask has 20 tiles for each head; the requests have 26 of 1 queries", attend, x, mask=few, check=True
    )
    lists = sk.PageLists.from_indices(LISTS, (1, 16), torch.full((1, 30), 2, dtype=torch.int32))
    attend(x, mask=lists, check=True)
    lists.partial.counts[7] = 3
    refused(r"row 7 of mask.partial has 3 entries from 14 on", attend, x, mask=lists, check=True)


def test_check_finds_blocks_that_occur_twice() -> None:
    x = MIXED.make()
    indices = torch.tensor([0, -1, -1, 77, 77], dtype=torch.int32).repeat(2, 30, 1)
    lists = sk.PageLists.from_indices(indices, (1, 16))
    attend(x, mask=lists, check=True)  # entries of no block may occur twice
    indices[1, 4, 2] = 0
    refused("row 34 of mask has key block 0 more than once", attend, x, mask=lists, check=True)
    indices[1, 4, 2] = -1
    indices[:, 26:] = 0
    attend(x, mask=lists, check=True)  # tiles after the last request
    both = BlockLists(*(each.clone() for each in lists.partial))
    whole = sk.PageLists(both, lists.partial, 2, 30, (1, 16), 10)
    refused("row 0 of mask has key block 0 more than once", attend, x, mask=whole, check=True)
    with pytest.raises(sk.InvalidInput, match=r"row 0 of mask has 10 entries, .* longest is 5"):
        attend(x, mask=replace(whole, longest=5), check=True)


def test_a_policy_needs_pages_values_and_a_flag() -> None:
    x, policy = MIXED.make(), sk.policies.MeanTopK(topk=1)
    with pytest.raises(sk.InvalidInput, match="cache has no pages, and a request of seq_lens has 40 keys"):
        attend(x, mask=policy, cache=x.cache[:0])
    refused("causal is 'yes'", attend, x, mask=policy, causal="yes")
    given: Any = (x.q, x.cache, x.block_table, x.seq_lens, x.cu_seqlens_q)
    with FakeTensorMode() as mode:
        fake: Any = [mode.from_tensor(each) for each in given]
        refused("fake tensors have none", sk.attention_paged, *fake, mask=policy)


def test_out_of_inference_mode_is_refused_outside_of_it() -> None:
    x = MIXED.make()
    with torch.inference_mode():
        out = torch.empty_like(x.q)
        assert torch.equal(attend(x, out=out), attend(x))
    refused("out is an inference tensor", attend, x, out=out)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: sk.PageLists.from_indices(LISTS.long(), (1, 16)), "use|must be"),
        (lambda: sk.PageLists.from_indices(LISTS[0], (1, 16)), "must be 3-D"),
        (lambda: sk.PageLists.from_indices(LISTS.transpose(1, 2), (1, 16)), "contiguous"),
        (lambda: sk.PageLists.from_indices(LISTS, (2, 16)), "block is"),
        (lambda: sk.PageLists.from_indices(LISTS, (1, 48)), "power of two"),
        (lambda: sk.PageLists.from_indices(LISTS, (1, 1 << 31)), "from 16 to 1048576"),
        (lambda: sk.PageLists.from_indices(LISTS, ODD), "pair"),
        (
            lambda: sk.PageLists.from_indices(LISTS, (1, 16), torch.zeros(1, 3, dtype=torch.int32)),
            "one for each row",
        ),
        (lambda: sk.PageLists(FLAT, FLAT, 1, 3, (1, 16), 2), "60 starts"),
    ],
)
def test_lists_of_other_forms_are_refused(make: Any, what: str) -> None:
    refused(what, make)


def test_lists_need_blocks_that_fit_pages() -> None:
    x = replace(MIXED, page=64).make()
    attend(x, mask=sk.PageLists.from_indices(LISTS, (1, 16)))
    attend(x, mask=sk.PageLists.from_indices(LISTS, (1, 128)))


def test_scales_of_two_forms_are_refused() -> None:
    x = CASES["fp8"].make()
    refused("1 and 2 elements", attend, x, k_scale=torch.ones(1), v_scale=torch.ones(2))
    refused(r"float32 \[1\] or \[2\]", attend, x, k_scale=torch.ones(3), v_scale=None)
