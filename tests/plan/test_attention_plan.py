"""Problems of attention, and what their plans say."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.core.device import CPU, H200
from sparsek.engine.plan.plan import bound_seconds
from sparsek.engine.plan.select import select
from tests.attn.kernels.forward.problems import attention_problem

# A causal mask of 8 x 8 blocks for all heads, over 4 heads of q to one of k.
SIZES: Any = {
    "batch": 2, "q_heads": 8, "kv_heads": 2, "q_len": 1024, "kv_len": 1024, "mask_heads": 1, "stored": 36,
    "partial": 8, "longest": 8, "by_interval": True,
}  # fmt: skip
CAUSAL = attention_problem(AttentionProblem, 128, 64, **SIZES)


def test_a_mask_that_is_shared_is_visited_by_every_batch_item_and_head_of_q():
    assert CAUSAL.visited == 36 * 2 * 8
    assert replace(CAUSAL, mask_heads=8, stored=8 * 36).visited == 36 * 2 * 8
    assert replace(CAUSAL, mask_heads=2, stored=2 * 36).visited == 36 * 2 * 8
    assert replace(CAUSAL, mask_batch=2, stored=2 * 36).visited == 36 * 2 * 8
    assert replace(CAUSAL, batch=0).visited == 0


def test_flops_follow_visited_blocks_and_dense_flops_follow_lengths():
    assert CAUSAL.useful_flops == 2 * 36 * 16 * 128 * 128 * (128 + 64)
    assert CAUSAL.dense_flops == 2 * 16 * 1024 * 1024 * (128 + 64)
    assert replace(CAUSAL, q_len=1000).dense_flops == 2 * 16 * 1000 * 1024 * (128 + 64)
    ragged = replace(CAUSAL, q_len=1000, kv_len=900, stored=64)
    assert ragged.useful_flops == ragged.dense_flops


def test_density_counts_blocks_of_all_rows_of_the_mask():
    assert CAUSAL.grid == (8, 8)
    assert CAUSAL.density == 36 / 64
    assert replace(CAUSAL, mask_heads=8, stored=8 * 36).density == 36 / 64
    assert replace(CAUSAL, kv_len=0, stored=0).density == 0
    assert replace(CAUSAL, q_len=1025, kv_len=65, block=(64, 64)).grid == (17, 2)


def test_a_mask_is_dense_if_every_block_is_stored_and_none_has_a_rule():
    whole = replace(CAUSAL, stored=64, partial=0)
    assert whole.dense
    assert not replace(whole, partial=8).dense
    assert not replace(whole, stored=63).dense
    assert not replace(whole, exact=False).dense, "bounds say nothing about what is stored"


def test_compulsory_bytes_are_every_operand_once_and_an_index_per_block():
    rows = 2 * 8 * 1024 + 2 * 2 * 1024
    assert CAUSAL.compulsory_bytes == rows * (128 + 64) * 2 + 4 * 36
    assert replace(CAUSAL, lse=True).compulsory_bytes == CAUSAL.compulsory_bytes + 4 * 2 * 8 * 1024


def test_keys_that_no_block_visits_are_not_compulsory():
    few = replace(CAUSAL, q_len=1, kv_len=1 << 20, stored=3, partial=1)
    assert few.compulsory_bytes == (16 + 3 * 16 * 128) * (128 + 64) * 2 + 4 * 3


def test_the_roofline_is_the_slower_of_arithmetic_and_memory():
    assert bound_seconds(CAUSAL) == pytest.approx(CAUSAL.useful_flops / 690e12)
    one = replace(CAUSAL, q_len=1, stored=8)
    assert bound_seconds(one) == pytest.approx(one.compulsory_bytes / 4.28e12)


@dataclass(frozen=True)
class Choice:
    """A config of a stub."""

    tile: int = 128


class Work(NamedTuple):
    """What a stub prepares: some tensors, and how uneven they are."""

    tiles: Tensor
    nested: dict[str, list[Tensor]]
    imbalance: Any


@dataclass
class Stub:
    """A kernel that answers what it is told."""

    name: str
    time: float = 1e-3
    why: tuple[str, ...] = ()
    said: list[str] = field(default_factory=list)

    def why_not(self, p: AttentionProblem) -> list[str]:
        return list(self.why)

    def default(self, p: AttentionProblem) -> Choice:
        return Choice()

    def configs(self, p: AttentionProblem) -> Iterable[Choice]:
        return [Choice(64), Choice(128)]

    def seconds(self, p: AttentionProblem, c: Choice) -> float:
        return self.time

    def notes(self, p: AttentionProblem, c: Choice) -> list[str]:
        return self.said


def stubbed(p: AttentionProblem, table: Iterable[Any], **more: Any) -> AttentionPlan:
    return AttentionPlan(p, select(p, table), **{"ready": False, **more})


def test_explain_tells_problem_mask_choice_roofline_memory_and_why_the_others_lost():
    table = [
        Stub("fast", 20e-6, said=["4 heads of q share a tile", "rows of over 64 blocks are split"]),
        Stub("slow", 1.5e-3),
        Stub("elsewhere", why=("needs sm_100", "needs fp4")),
    ]
    mask = sk.BlockMask.causal(1024)
    work = Work(torch.zeros(1000, dtype=torch.int32), {"parts": [torch.zeros(2, 500)]}, 1.25)
    plan = stubbed(CAUSAL, table, work=work, ready=True, label=mask.label, mask=lambda: mask)
    tensors = (2 * 8 + 2 * 2) * 1024 * (128 + 64) * 2
    assert plan.explain().splitlines() == [
        (
            "attention   q [2, 8, 1024, 128] bf16, k [2, 2, 1024, 128], v [2, 2, 1024, 64], "
            "4 heads of q to a head of k, on NVIDIA H200"
        ),
        (
            f"  mask       {mask.label}: 36 of 64 blocks of 128x128 stored (56.2 %), 8 partial by interval, "
            "one list for all heads"
        ),
        "  kernel     fast: Choice(tile=128)",
        "  predicted  20.0 us, 181 TFLOPS useful, 322 TFLOPS dense-equivalent",
        "  roofline   5.3 us, bound by arithmetic: 3.624 GFLOP in 5.3 us, 7.864 MB in 1.8 us",
        "  schedule   fullest CTA has 1.25 times the mean work",
        (
            f"  memory     q, k, v and out {tensors / 1e6:.4g} MB; kept beside them: mask {mask.nbytes / 1e6:.4g} MB, "
            "plan 0.008 MB"
        ),
        "  note       4 heads of q share a tile",
        "  note       rows of over 64 blocks are split",
        "  not        slow: 1.50 ms, 75.00x the time",
        "  not        elsewhere: needs sm_100; needs fp4",
    ]


def test_explain_asks_work_for_its_imbalance_where_that_takes_a_call():
    work = Work(torch.zeros(1), {}, lambda: 2.0)
    assert "fullest CTA has 2.00 times the mean work" in stubbed(CAUSAL, [Stub("one")], work=work).explain()


def mask_line(p: AttentionProblem, **more: Any) -> str:
    return stubbed(p, [Stub("one")], **more).explain().splitlines()[1].removeprefix("  mask       ")


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (
            replace(CAUSAL, stored=64, partial=0),
            "64 of 64 blocks .* 0 partial, .*; dense: every block is stored$",
        ),
        (replace(CAUSAL, exact=False), "^at most 36 of 64 blocks .*, at most 8 partial by interval, "),
        (replace(CAUSAL, by_bits=True), "8 partial by interval or bits, "),
        (replace(CAUSAL, mask_heads=8, stored=288), "288 of 512 blocks .*, a list per head of q$"),
        (replace(CAUSAL, mask_heads=2, stored=72), "72 of 128 blocks .*, a list per head of k$"),
        (replace(CAUSAL, mask_batch=2, stored=72), "one list for all heads, per batch item$"),
    ],
    ids=["dense", "bounds", "bits", "heads of q", "heads of k", "batch"],
)
def test_the_line_about_the_mask(p: AttentionProblem, text: str):
    assert re.search(text, mask_line(p))


def test_if_no_kernel_can_run_every_reason_is_told():
    with pytest.raises(sk.Unsupported, match="no kernel can run this attention on cpu\n  one: too wide"):
        select(replace(CAUSAL, card=CPU), [Stub("one", why=("too wide",))])


def test_a_plan_for_an_h200_is_made_on_any_machine_and_explains_the_real_table():
    q, k, v = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 4, 4))
    mask = sk.BlockMask.sliding_window(4096, 512, device="cpu")
    for given in (mask, None):
        plan = sk.plan_attention(q, k, v, given, device="h200")
        assert plan.problem.card is H200
        assert plan.bound_seconds < plan.seconds < 1e-1
        text = plan.explain()
        assert "  not        cpu.attention: runs on CPU tensors only" in text
        for name in (
            "hopper.attention_fwd",
            "portable.attention_fwd",
            "cpu.attention",
            "reference.attention",
        ):
            assert re.search(rf"^  (kernel    |not       ) {name}: ", text, re.MULTILINE)
        assert ("dense: every block is stored" in text) == (given is None)


@pytest.mark.parametrize("turned", [False, True])
def test_results_are_no_views(turned: bool):
    """A view that a function of autograd returns refuses what happens in place, and recorded calls make it anew."""
    q, k, v = torch.randn(3, 1, 64, 2, 16).transpose(2, 3) if turned else torch.randn(3, 1, 2, 64, 16)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = sk.attention(q, k, v, is_causal=True, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert {x.stride() for x in (out, *grads)} == {q.stride()}
    assert [x._base for x in (out, lse, *grads)] == [None] * 5
    out.add_(1)
