"""sk.attention_paged: results, layouts, lists, policies, out, plans; sk.PageLists; recorded calls, graphs, no waits."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.attn.ops.attention_paged import _binding
from sparsek.attn.plan import attention_paged as planned
from sparsek.attn.plan.attention_paged import AttendedPages, PagedPlan
from sparsek.attn.plan.paged_call import HOME
from sparsek.attn.reference.attention_paged import requests
from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput
from sparsek.testing.paged_budget import PagedInputs, check_attention_paged
from sparsek.testing.poison import poisoned
from tests.attn.paged_cases import FORMS, PAGED_CASES, ListForm, PagedCase
from tests.engine.launch.covering import once
from tests.ops.paged import CASES, MIXED, arguments_of, attend, mask_of

pytest.importorskip("triton")

from sparsek.engine.launch.recorder import MISS, Recorded
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", PAGED_CASES[::3], ids=str)
def test_cases_are_within_budget_and_pass_the_checks_of_values(case: PagedCase) -> None:
    x = case.make(seed=3)
    early = x.causal and any(n > length for n, length in case.lengths)  # which the checks take for a fault
    out, lse = attend(x, return_lse=True, check=not early)
    if x.max_q and x.max_k:
        assert check_attention_paged(x, out, lse).passed
    assert torch.equal(attend(x)[: x.end], out[: x.end])


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("sink", [False, True])
def test_a_request_is_torchs_attention_of_its_keys(softcap: float, sink: bool) -> None:
    """Not by the reference, but by scaled_dot_product_attention and by scores written out."""
    x = replace(MIXED, dtype="fp64", sink_logits=sink, softcap=softcap).make()
    out = attend(x)
    for each in requests(x.k, x.v, x.block_table, x.seq_lens, x.cu_seqlens_q, dtype=torch.float64):
        q = x.q[each.at].transpose(0, 1)
        keys, values = (t.repeat_interleave(2, 0) for t in (each.keys, each.values))
        n, length = q.shape[1], keys.shape[1]
        seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        if not softcap and not sink:
            want = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=x.scale)
        else:
            scores = q @ keys.mT * x.scale
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            weights = scores.masked_fill(~seen, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if x.sink_logits is not None:
                total = total + x.sink_logits.double().exp()[:, None, None]
            want = weights / total @ values
        assert torch.allclose(out[each.at].transpose(0, 1), want, rtol=1e-12, atol=1e-12)


def test_every_form_of_the_cache_gives_the_same_bits() -> None:
    results = [attend(replace(CASES["mixed"], form=form).make()) for form in FORMS]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("by_plan", [False, True])
def test_autograd_sees_that_out_was_written(by_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels too, which write by an address, as to `.data`."""
    x = MIXED.make()
    given, out = arguments_of(x), attend(x).zero_()
    run = sk.plan_attention_paged(**given) if by_plan else sk.attention_paged

    def written(plan: PagedPlan, call: Any) -> tuple[tuple[Tensor, None], None]:
        call.out.data.fill_(2)
        return (call.out, None), None

    monkeypatch.setattr(PagedPlan, "_allocated", written)
    y = torch.ones_like(out).requires_grad_() * out
    run(**given, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_of_no_request_and_other_memory_of_out_are_not_written() -> None:
    x = replace(MIXED, tail=3, loose=True).make()
    whole = poisoned((x.q.shape[0], 2 * 4, 16), x.q.dtype)
    out = whole[:, :4]
    assert attend(x, out=out) is out
    assert torch.equal(out[: x.end], attend(x)[: x.end])
    assert bool(whole[x.end :].isnan().all())
    assert bool(whole[:, 4:].isnan().all())


@pytest.mark.parametrize("lengths", [((1, 40), (5, 33)), (), ((0, 9),), ((2, 0),)], ids=str)
@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize("kernel", [None, "reference.attention_paged"])
def test_rows_of_no_request_are_zeros(
    lengths: tuple[tuple[int, int], ...], by_op: bool, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory holds something: here every new tensor is poisoned."""
    x = replace(MIXED, lengths=lengths, tail=3, loose=True).make()
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *given, **more: empty(*given, **more).fill_(torch.nan)
    )
    plan = sk.plan_attention_paged(**arguments_of(x), return_lse=True, kernel=kernel)
    with FlopCounterMode(display=False) if by_op else nullcontext():
        found = [attend(x, return_lse=True, kernel=kernel)]
    if not by_op:
        found += [
            plan(**arguments_of(x)),
            (None, attend(x, return_lse=True, kernel=kernel, out=x.q.clone())[1]),
        ]
    for out, lse in found:
        if out is not None:
            assert not out.isnan().any()
            assert torch.equal(out[x.end :], torch.zeros(3, 4, 16))
        assert torch.equal(lse[:, x.end :], torch.full((4, 3), -torch.inf))
        assert not lse.isnan().any()


def test_scales_of_pages_may_be_floats() -> None:
    x = CASES["fp8"].make()
    floats = attend(x, k_scale=0.7, v_scale=1.3)
    tensors = attend(x, k_scale=torch.tensor([0.7]), v_scale=torch.tensor(1.3))
    assert torch.equal(floats, tensors)
    assert torch.equal(attend(x, k_scale=1.0, v_scale=None), attend(x, k_scale=None, v_scale=None))
    per_head = attend(x, k_scale=torch.full((2,), 0.7), v_scale=1.3)
    assert torch.equal(per_head, floats)


def test_without_any_key_only_rows_of_requests_are_written() -> None:
    x = replace(MIXED, lengths=((2, 0), (1, 0)), tail=5, sink_logits=True).make()
    out, heads = torch.full_like(x.q[..., : x.v.shape[3]], 7.0), x.q.shape[1]
    _, lse = attend(x, out=out, return_lse=True, max_seqlen_k=0)
    assert x.sink_logits is not None
    assert torch.equal(out, torch.full_like(out, 7.0).index_fill_(0, torch.arange(3), 0.0))
    assert torch.equal(lse[:, :3], x.sink_logits[:, None].expand(heads, 3).to(lse.dtype))


def test_bounds_of_lengths_may_be_of_any_size() -> None:
    x = MIXED.make()
    assert torch.equal(attend(x), attend(x, max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1))


def test_bounds_of_lengths_cut_keys_and_plans_are_shared_by_all_lengths() -> None:
    x = MIXED.make()
    x = x._replace(seq_lens=x.seq_lens.clone())
    plans: Any = HOME.derived(PagedPlan, dict)
    attend(x)
    before = len(plans)
    x.seq_lens.sub_(1).clamp_(min=0)
    shorter = attend(x)
    assert len(plans) == before
    assert torch.equal(shorter, attend(x, max_seqlen_k=x.max_k + 1000, max_seqlen_q=10**6))


def test_a_plan_explains_itself_runs_and_refuses_other_calls() -> None:
    x = replace(MIXED, softcap=2.0, window=9, sinks=1).make()
    given = {**arguments_of(x), "return_lse": True}
    plan = sk.plan_attention_paged(**given)
    text = plan.explain()
    for part in (
        "reference.attention_paged",
        "4 requests",
        "a window of 9 and the first 1",
        "capped scores",
        "2 heads",
    ):
        assert part in text, text
    del given["return_lse"]
    out, lse = plan(**given)
    want, want_lse = attend(x, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    refused("softcap=True, and the call False", plan, **{**given, "softcap": 0.0})
    refused("tokens=26, and the call 25", plan, **{**given, "q": x.q[:-1]})


def test_a_plan_runs_on_its_own_card_only() -> None:
    given = arguments_of(MIXED.make())
    plan = sk.plan_attention_paged(**given)
    other = replace(plan, problem=replace(plan.problem, card=H200))
    refused("this plan is for NVIDIA H200", other, **given)


def test_recorded_calls_tell_a_tensor_from_a_scale_of_1() -> None:
    x, scale = replace(MIXED, dtype="fp16").make(), torch.ones(1, dtype=torch.float32)
    of = [
        _binding(AttendedPages(**arguments_of(x) | {"k_scale": k, "v_scale": v}))[0]
        for k, v in ((scale, 1.0), (1.0, scale), (scale, None))
    ]
    assert len(set(of)) == 3


def test_calls_with_out_in_the_memory_of_q_are_not_recorded() -> None:
    """A recorded call skips the check that refuses them."""
    x = replace(MIXED, dtype="fp16").make()

    def operands(out: Any) -> tuple[Tensor, ...]:
        return _binding(AttendedPages(**arguments_of(x) | {"out": out}))[1]

    assert operands(torch.empty_like(x.q))
    assert not operands(x.q)
    assert not operands(x.q.view(x.q.shape))


def test_float_scales_that_a_graph_reads_are_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_NUMBERS", {})
    monkeypatch.setattr(planned, "_HELD", {})
    monkeypatch.setattr(planned, "NUMBERS", 2)
    kept = planned._number(0.5, 1, CPU)
    monkeypatch.setattr(planned, "captured", lambda x: True)
    assert planned._number(0.5, 1, CPU) is kept
    assert planned._number(0.25, 1, CPU) is not planned._number(0.25, 1, CPU)  # of the graph's own memory
    monkeypatch.setattr(planned, "captured", lambda x: False)
    for value in (2.0, 3.0, 4.0):
        planned._number(value, 1, CPU)
    assert planned._number(0.5, 1, CPU) is kept
    assert len(planned._NUMBERS) == 2


def test_a_plan_predicts_for_another_card_from_meta_tensors() -> None:
    x = replace(CASES["decode"], form="pair").make()
    given: dict[str, Any] = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in arguments_of(x).items()
    }
    given["cache"] = tuple(each.to("meta") for each in x.cache)
    plan = sk.plan_attention_paged(**given, device="h200", kernel="reference.attention_paged")
    assert plan.seconds > 0
    refused("prediction", plan, **given)


@pytest.mark.parametrize("case", [case for case in PAGED_CASES if case.dtype != "fp32"], ids=str)
def test_every_case_has_a_plan_for_an_h200(case: PagedCase) -> None:
    """Empty ones too: kernels divide by sizes where they predict."""
    pytest.importorskip("triton")
    plan = sk.plan_attention_paged(**arguments_of(case.make()), device="h200")
    assert plan.kernel.split(".")[0] in ("hopper", "portable")
    assert plan.seconds > 0
    assert "attention_paged" in plan.explain()


# Lists.


def causal_masks(x: PagedInputs, make: Any = sk.BlockMask.causal, **options: Any) -> list[sk.BlockMask]:
    found = requests(x.k, x.v, x.block_table, x.seq_lens, x.cu_seqlens_q)
    lengths = [(each.at.stop - each.at.start, each.keys.shape[1]) for each in found]
    return [make(q_len=n, kv_len=t, block=64, device="cpu", **options) for n, t in lengths if n]


@pytest.mark.parametrize("note", ["mixed", "prefill", "more queries than keys", "decode"])
def test_lists_of_causal_masks_are_the_causal_call(note: str) -> None:
    x = CASES[note].make()
    masks = causal_masks(x)
    lists = sk.PageLists.of_masks(masks)
    assert lists.tiles == sum(mask.grid[0] for mask in masks)
    assert lists.longest == max(mask.sizes.longest for mask in masks)
    out, lse = attend(x, mask=lists, return_lse=True, check=note != "more queries than keys")
    assert check_attention_paged(x, out, lse).passed


def test_lists_of_masks_of_one_head_and_of_several_join() -> None:
    x = replace(MIXED, lengths=((100, 100), (70, 200))).make()
    one, other = causal_masks(x)
    by_head = sk.BlockMask.per_head([other, sk.BlockMask.full(q_len=70, kv_len=200, block=64, device="cpu")])
    lists = sk.PageLists.of_masks([one, by_head], verify=False)
    assert (lists.heads, lists.tiles) == (2, 4)
    assert torch.allclose(attend(x, mask=lists), attend(x), atol=1e-5)
    whole = sk.PageLists.of_masks(causal_masks(x, sk.BlockMask.full))
    assert torch.allclose(attend(x, mask=whole, causal=False), attend(x, causal=False), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: causal_masks(x, sk.BlockMask.sliding_window, window=30), "other rules than causality"),
        (lambda x: [causal_masks(x)[0] | random_bits(x)], "by bits"),
        (lambda x: [causal_masks(x)[2], sk.BlockMask.causal(20, block=128)], r"blocks \(128, 128\)"),
        (lambda x: [], "one or more BlockMask"),
        (lambda x: [causal_masks(x)[0], None], "one or more BlockMask"),
    ],
)
def test_masks_with_other_rules_are_refused(make: Any, what: str) -> None:
    x = replace(MIXED, lengths=((100, 150), (70, 70), (65, 65))).make()
    refused(what, sk.PageLists.of_masks, make(x))


def random_bits(x: PagedInputs) -> sk.BlockMask:
    seen = torch.rand(100, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    return sk.BlockMask.from_dense(seen, 64)


def test_counts_and_entries_below_0_end_and_skip_blocks_and_later_writes_count() -> None:
    x = replace(MIXED, lengths=((1, 64), (1, 64)), page=16).make()
    indices = torch.tensor([[[3, 0, -1, 2], [1, 1000, 0, 2]]], dtype=torch.int32)
    lists = sk.PageLists.from_indices(indices, block=(1, 16))
    some = sk.PageLists.from_indices(torch.tensor([[[0, 2, 3], [0, 1, 2]]], dtype=torch.int32), (1, 16))
    assert torch.equal(attend(x, mask=lists), attend(x, mask=some))
    counts = torch.tensor([[2, 1]], dtype=torch.int32)
    fewer = sk.PageLists.from_indices(indices, (1, 16), counts)
    two = sk.PageLists.from_indices(torch.tensor([[[0, 3], [1, -1]]], dtype=torch.int32), (1, 16))
    assert torch.equal(attend(x, mask=fewer), attend(x, mask=two))
    indices[:, :, 0] = 2
    changed = sk.PageLists.from_indices(torch.tensor([[[2, 0], [2, -1]]], dtype=torch.int32), (1, 16))
    assert torch.equal(attend(x, mask=fewer), attend(x, mask=changed))


# Policies.

POLICIES = [
    sk.policies.MeanTopK(topk=2, block=64),
    sk.policies.Streaming(window=64, sinks=64, block=64),
    sk.policies.SubBlock(density=0.5, block=64, causal=False),
    sk.policies.NSA(topk=3, block=32, always=(1, 1)),
    sk.policies.MoBAGate(topk=2, block=32),
    sk.MaskPolicy(topk=2, block=64),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_policy_chooses_for_each_request_from_its_keys(policy: Any, fp8: bool) -> None:
    lengths = ((1, 200), (70, 70), (0, 30), (130, 300))
    case = replace(MIXED, lengths=lengths, dims=(32, 32), form="pair")
    x = (replace(case, kv_dtype="e4m3", scale_per="head") if fp8 else case).make()
    if x.k_scale is not None:
        x = x._replace(k_scale=4 * x.k_scale)  # few keys then have most of the mass
    causal = policy.causal
    out = attend(x, mask=policy, causal=causal)
    found = requests(
        x.k, x.v, x.block_table, x.seq_lens, x.cu_seqlens_q, k_scale=x.k_scale, v_scale=x.v_scale
    )
    for each in found:
        if each.at.stop > each.at.start:
            q = x.q[each.at].transpose(0, 1)[None]
            want = sk.attention(q, each.keys[None], each.values[None], policy)[0].transpose(0, 1)
            assert torch.allclose(out[each.at], want, atol=1e-5), each.at
    assert torch.equal(out, attend(x, mask=policy, causal=causal, max_seqlen_q=None))
    padded = attend(x, q=torch.cat((x.q, x.q)), mask=policy, causal=causal)
    assert torch.allclose(padded, torch.cat((out, torch.zeros_like(out))), atol=1e-5)
    with pytest.raises(InvalidInput, match=f"causal, and causal={not causal}: one of them must change"):
        attend(x, mask=policy, causal=not causal)


def test_lists_are_tested_where_full_and_partial_rows_differ_in_length() -> None:
    case = replace(CASES["lists with full blocks"], lists=ListForm((64, 64), "q", most=3, full=True))
    x = case.make(seed=5)
    out, lse = attend(x, return_lse=True, check=True)
    assert check_attention_paged(x, out, lse).passed
    assert mask_of(x).longest == 5


NOTES = [
    "decode", "mixed", "mixed by rows", "window and sinks", "sink logits", "softcap", "lists for each query",
    "lists with full blocks", "fp8 per head", "fp8",
]  # fmt: skip

GROWING = PagedCase("growing", ((1, 300), (1, 31), (1, 1), (1, 600)), page=16, loose=True)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each recorded call that ran."""
    found: list[int] = []
    repeat = Recorded.repeat

    def call(self: Recorded, operands: Any) -> Any:
        made = repeat(self, operands)
        if made is not MISS:
            found.append(1)
        return made

    monkeypatch.setattr(Recorded, "repeat", call)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("note", "given"), once(product(NOTES, (False, True))))
def test_recorded_calls_have_the_bits_of_the_first_and_read_other_tensors(
    note: str, given: bool, repeated: list[int]
) -> None:
    inputs = [CASES[note].make("cuda", seed=seed) for seed in range(4)]
    outs = [poisoned(x.q.shape[:2] + x.v.shape[3:], x.q.dtype, "cuda") if given else None for x in inputs]
    found = [attend(x, return_lse=True, out=out) for x, out in zip(inputs, outs, strict=True)]
    assert len(repeated) >= 2, "the third call on is recorded"
    for x, (out, lse), kept in zip(inputs, found, outs, strict=True):
        assert kept is None or kept is out
        assert check_attention_paged(x, out, lse).passed


@pytest.mark.gpu
@pytest.mark.parametrize("note", [note for note in NOTES if "lists" in note])
def test_rows_after_the_last_request_need_no_tiles(note: str) -> None:
    x = CASES[note].make("cuda")
    padded = torch.cat((x.q[: x.end], torch.full_like(x.q, torch.nan)))
    out = attend(x, q=padded, check=True)
    assert torch.equal(out[: x.end], attend(x)[: x.end])
    assert torch.equal(out, attend(x, q=padded))
    assert not out[x.end :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("note", [note for note in NOTES if note != "sink logits"])
def test_a_query_of_nan_gives_nan_and_changes_no_other(note: str) -> None:
    x = CASES[note].make("cuda")
    wanted, lse = attend(x, return_lse=True)
    row = x.end - 1  # the last request's last query sees keys, in its lists too
    q = x.q.clone()
    q[row] = torch.nan
    out, found = attend(x, q=q, return_lse=True)
    seen = lse[:, row] > -torch.inf
    assert seen.any()
    assert out[row, seen].isnan().all()
    assert found[seen, row].isnan().all()
    others = [at for at in range(x.end) if at != row]
    assert torch.equal(out[others], wanted[others])
    assert torch.equal(found[:, others], lse[:, others])


@pytest.mark.gpu
@pytest.mark.parametrize("note", NOTES)
def test_a_graph_follows_lengths_tables_and_lists(note: str) -> None:
    case = replace(CASES[note], loose=True)
    first = case.make("cuda")
    graph, held = _captured(first)
    for seed in (1, 2):
        _copy_into(first, case.make("cuda", seed=seed))
        for x in held:
            x.fill_(torch.nan)
        graph.replay()
        out, lse = attend(first, return_lse=True)
        assert torch.equal(held[0][: first.end], out[: first.end])
        assert torch.equal(held[1][:, : first.end], lse[:, : first.end])


@pytest.mark.gpu
def test_one_graph_serves_all_steps_while_lengths_grow_over_pages() -> None:
    x = GROWING.make("cuda")
    pages = x.block_table.shape[1]
    cache = torch.randn_like(x.cache[0] if isinstance(x.cache, tuple) else x.cache)
    table = torch.randint(0, cache.shape[0], (4, pages), dtype=torch.int32, device="cuda")
    x = x._replace(cache=cache, k=cache[..., :64], v=cache[..., 64:], block_table=table, max_k=pages * 16)
    graph, (out, lse) = _captured(x)
    for _ in range(40):
        x.seq_lens.add_(1).clamp_(max=pages * 16)
        graph.replay()
        assert check_attention_paged(x, out, lse).passed


@pytest.mark.gpu
def test_nothing_waits_for_the_device(no_sync: Any) -> None:
    made = [CASES[note].make("cuda") for note in NOTES]
    for x in made:
        attend(x)
    torch.cuda.synchronize()
    with no_sync():
        for x in made * 3:
            attend(x)


@pytest.mark.gpu
def test_the_bits_of_a_request_do_not_depend_on_others() -> None:
    x = replace(CASES["mixed"], lengths=((1, 3000), (1, 17), (64, 500), (1, 2999))).make("cuda")
    whole = attend(x)
    edges = x.cu_seqlens_q.tolist()
    for r in range(len(edges) - 1):
        alone = attend(
            x, q=x.q[edges[r] : edges[r + 1]], block_table=x.block_table[r : r + 1], seq_lens=x.seq_lens[r : r + 1],
            cu_seqlens_q=x.cu_seqlens_q[r : r + 2] - x.cu_seqlens_q[r],
        )  # fmt: skip
        assert torch.equal(alone, whole[edges[r] : edges[r + 1]]), r


@pytest.mark.gpu
def test_a_policy_with_lengths_on_the_host_does_not_wait_and_is_refused_in_a_capture(no_sync: Any) -> None:
    x = replace(CASES["mixed"], lengths=((1, 200), (300, 300), (130, 600)), form="pair").make("cuda")
    policy = sk.policies.MeanTopK(topk=2, block=64)
    lengths = {"seq_lens": x.seq_lens.cpu(), "cu_seqlens_q": x.cu_seqlens_q.cpu()}
    want = attend(x, mask=policy)
    for _ in range(3):
        found = attend(x, mask=policy, **lengths)
    torch.cuda.synchronize()
    with no_sync():
        found = attend(x, mask=policy, **lengths)
    assert torch.equal(found, want)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        found.zero_()  # torch warns of an empty graph
        refused("cannot capture it", attend, x, mask=policy)


@pytest.mark.gpu
def test_bad_tables_read_nothing_outside_and_check_names_them() -> None:
    x = replace(CASES["mixed"], lists=ListForm((1, 64)), page=64).make("cuda")
    bad = x._replace(block_table=x.block_table.clone().fill_(2**31 - 1), seq_lens=x.seq_lens + 10**6)
    attend(bad, max_seqlen_k=None)
    attend(x._replace(block_table=x.block_table.clone().fill_(-5)))
    torch.cuda.synchronize()
    refused(r"seq_lens\[0\] is 1000200", attend, bad, max_seqlen_k=None, check=True)


def _captured(x: PagedInputs) -> tuple[torch.cuda.CUDAGraph, tuple[Any, Any]]:
    given, graph = arguments_of(x), torch.cuda.CUDAGraph()
    sk.attention_paged(**given, return_lse=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held = sk.attention_paged(**given, return_lse=True)
    return graph, held


def _copy_into(held: PagedInputs, x: PagedInputs) -> None:
    """Writes the tensors of x over those that a graph holds."""
    pairs = [(held.q, x.q), (held.block_table, x.block_table), (held.seq_lens, x.seq_lens)]
    pairs += [(held.cu_seqlens_q, x.cu_seqlens_q), (held.k, x.k), (held.v, x.v)]
    for mine, theirs in (
        (held.sink_logits, x.sink_logits),
        (held.k_scale, x.k_scale),
        (held.v_scale, x.v_scale),
    ):
        if mine is not None and theirs is not None:
            pairs.append((mine, theirs))
    if held.lists is not None and x.lists is not None:
        pairs += zip(held.lists.tensors, x.lists.tensors, strict=True)
    for mine, theirs in pairs:
        mine.copy_(theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["portable.attention_paged", "hopper.attention_paged"])
@pytest.mark.parametrize("lengths", [((1, 700), (1, 30), (1, 1)), ((60, 300), (3, 90)), ((0, 50),)], ids=str)
def test_rows_of_no_request_are_zeros_recorded_and_in_a_graph(
    kernel: str, lengths: Any, no_sync: Any
) -> None:
    """Also where out is wide, which stays as it is; a graph follows the end of the last request."""
    x = PagedCase("tail", lengths, tail=90, page=64, dims=(128, 128), loose=True).make("cuda")
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        found = [attend(x, return_lse=True, kernel=kernel)]
        with no_sync():
            found += [attend(x, return_lse=True, kernel=kernel) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    out = poisoned(x.q.shape[:2] + x.v.shape[3:], x.q.dtype, "cuda")
    _, lse = attend(x, return_lse=True, kernel=kernel, out=out)
    assert bool(out[x.end :].isnan().all())
    for each, of_lse in [*found, (None, lse)]:
        if each is not None:
            assert not each[x.end :].any()
            assert torch.equal(each[: x.end], out[: x.end])
        assert bool((of_lse[:, x.end :] == -torch.inf).all())
        assert torch.equal(of_lse[:, : x.end], lse[:, : x.end])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attend(x, return_lse=True, kernel=kernel)
    for last in (x.end, max(x.end - 1, 0), 0):
        x.cu_seqlens_q.clamp_(max=last)
        for each in held:
            each.fill_(torch.nan)
        graph.replay()
        assert not held[0][last:].any()
        assert bool((held[1][:, last:] == -torch.inf).all())
        assert not held[0][:last].isnan().any()


@pytest.mark.gpu
def test_sizes_without_room_are_refused_without_a_wait(no_sync: Any) -> None:
    x = CASES["decode"].make("cuda")
    none = sk.PageLists.from_indices(torch.zeros(1, 0, 1, dtype=torch.int32, device="cuda"), (1, 16))
    for name, wrong in (
        ("max_seqlen_q", 0), ("cache", (x.k[:0], x.v[:0])), ("block_table", x.block_table[:, :0]), ("mask", none),
    ):  # fmt: skip
        with no_sync(), pytest.raises(sk.InvalidInput, match=name):
            attend(x, **{name: wrong})
