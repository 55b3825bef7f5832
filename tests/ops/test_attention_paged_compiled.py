"""sk.attention_paged under torch.compile, and the torch.library ops behind it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsek as sk
from sparsek.attn.ops.attention_paged_op import PagedArgs, flat
from tests.attn.paged_cases import ListForm
from tests.ops.operands import Seen
from tests.ops.paged import CASES, MIXED, arguments_of, attend
from tests.refusals import refused
from tests.sampling import sampled

NOTES = [
    "decode",
    "window and sinks",
    "lists for each query",
    "fp8 per head",
    "softcap and sink logits",
    "not causal",
]


@pytest.mark.parametrize("note", sampled(NOTES, 3))
def test_compiled_it_is_one_graph_with_the_eager_result(note: str) -> None:
    x = CASES[note].make()
    given = arguments_of(x)
    run = torch.compile(
        lambda: sk.attention_paged(**given, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    for found, want in zip(run(), attend(x, return_lse=True), strict=True):
        assert torch.equal(found, want)


def test_compiled_out_is_written() -> None:
    x = MIXED.make()
    given, out = arguments_of(x), torch.full_like(x.q, torch.nan)
    run = torch.compile(
        lambda out: sk.attention_paged(**given, out=out) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(run(out), 2 * out)
    assert torch.equal(out, attend(x))


def test_compiled_scales_may_be_floats_and_lengths_change() -> None:
    x = CASES["fp8"].make()
    given: dict[str, Any] = arguments_of(x) | {"k_scale": 0.5, "v_scale": 2.0}
    run = torch.compile(
        lambda q: sk.attention_paged(**{**given, "q": q}), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(run(x.q), sk.attention_paged(**given))
    x.seq_lens.sub_(1).clamp_(min=0)
    assert torch.equal(run(x.q), sk.attention_paged(**given))


def test_compiled_a_float_scale_goes_with_one_of_each_head_and_1_with_any_pages() -> None:
    x = CASES["fp8 per head"].make()
    calls: list[dict[str, Any]] = [
        arguments_of(x) | {"k_scale": 0.5},
        arguments_of(x) | {"k_scale": 1.0},
        arguments_of(MIXED.make()) | {"k_scale": 1.0, "v_scale": 1.0},
    ]
    for given in calls:
        run = torch.compile(
            lambda given=given: sk.attention_paged(**given), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(run(), sk.attention_paged(**given))


@pytest.mark.parametrize("dynamic", sampled([True, None], 1))
def test_compiled_for_any_number_of_tokens(dynamic: bool | None) -> None:
    run = torch.compile(sk.attention_paged, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in (((1, 30), (3, 20)), ((4, 30), (9, 20)), ((5, 5), (2, 47))):
        x = replace(MIXED, lengths=lengths).make()
        given = (x.q, x.cache, x.block_table, x.seq_lens, x.cu_seqlens_q)
        assert torch.equal(run(*given), sk.attention_paged(*given))


def test_a_graph_holds_for_other_bounds_of_lengths() -> None:
    x, counter = MIXED.make(), CompileCounterWithBackend("aot_eager")
    given: Any = arguments_of(x)
    run = torch.compile(
        lambda most, keys: sk.attention_paged(**given | {"max_seqlen_q": most, "max_seqlen_k": keys}),
        fullgraph=True,
        backend=counter,
    )
    for more in range(4):
        assert torch.equal(run(x.max_q + more, x.max_k + more), attend(x))
    assert counter.frame_count <= 2  # one for the first numbers, one for any


def test_the_ops_pass_torchs_checks() -> None:
    lists_of = ListForm((1, 16), most=2)
    x = replace(MIXED, lists=lists_of, sink_logits=True, form="pair").make()
    lists, numbers = flat(x.lists, None, x.max_k)
    args: Any = PagedArgs(
        x.q, [x.k, x.v], x.block_table, x.seq_lens, x.cu_seqlens_q, lists, numbers, x.sink_logits, None, None, True,
        None, 0.0, True, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.sparsek.attention_paged.default, tuple(args))
    torch.library.opcheck(torch.ops.sparsek.attention_paged_out.default, (torch.zeros_like(x.q), *args))


def test_policies_are_refused_under_compile() -> None:
    x = MIXED.make()
    run = torch.compile(lambda: attend(x, mask=sk.policies.MeanTopK()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot trace lengths"):
        run()


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("max_seqlen_q", -1, "max_seqlen_q is -1"),
        ("max_seqlen_k", 1.5, "max_seqlen_k is 1.5"),
        ("softcap", "a", "softcap is 'a'"),
        ("softcap", torch.tensor(1.0), "write float"),
        ("scale", "a", "scale is 'a'"),
        ("scale", torch.tensor(1.0), "write float"),
        ("k_scale", "a", "k_scale is 'a'"),
        ("k_scale", 0.5, "only FP8 pages have a scale"),
        ("cache", None, "cache is None"),
        ("cache", torch.zeros(3), r"cache is \[3\]"),
        ("seq_lens", [1, 2], "seq_lens must be a dense torch.Tensor, got list"),
        ("sink_logits", [0.0], "sink_logits must be a dense torch.Tensor, got list"),
        ("out", 1, "out must be a dense torch.Tensor, got int"),
        ("check", True, "check=True reads values"),
    ],
)
def test_a_dispatch_mode_refuses_what_eager_calls_refuse(name: str, value: Any, what: str) -> None:
    x = MIXED.make()
    with Seen():
        assert torch.equal(attend(x, max_seqlen_k=1 << 70), attend(x))
        refused(what, attend, x, **{name: value})


def test_a_scale_of_1_and_scales_of_two_forms_go_through_the_op() -> None:
    x, fp8 = MIXED.make(), CASES["fp8 per head"].make()
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": 0.25}
    with Seen():
        assert torch.equal(attend(x, k_scale=1.0, v_scale=1), attend(x))
        found = attend(fp8, **scales)
    assert torch.equal(found, attend(fp8, **scales))


def test_fake_tensors_give_fake_results_outside_of_their_mode() -> None:
    x, mode = MIXED.make(), FakeTensorMode()
    given: Any = (x.q, x.cache, x.block_table, x.seq_lens, x.cu_seqlens_q)
    fake: Any = [mode.from_tensor(each) for each in given]
    out, lse = sk.attention_paged(*fake, return_lse=True)
    assert out.shape == x.q.shape
    assert lse.shape == (4, 26)
