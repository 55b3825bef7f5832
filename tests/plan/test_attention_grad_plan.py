"""Problems of attention's gradients, and what their plans say."""

import re
from dataclasses import replace

import pytest
import torch

import sparsek as sk
from sparsek.attn.plan.attention_grad import AttentionGradPlan
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core.device import H200
from sparsek.core.streams import tensors_in
from tests.attn.kernels.forward.problems import attention_problem
from tests.plan.test_attention_plan import SIZES
from tests.refusals import refused

CAUSAL = attention_problem(AttentionGradProblem, 128, 64, **SIZES)


def test_it_wants_lse_and_a_fixed_order_unless_told_otherwise():
    assert CAUSAL.lse
    assert CAUSAL.deterministic
    assert CAUSAL.op == "attention_backward"
    assert replace(CAUSAL, deterministic=False) != CAUSAL


def test_flops_are_those_of_five_products():
    assert CAUSAL.dense_flops == 2 * 16 * 1024 * 1024 * (3 * 128 + 2 * 64)
    assert CAUSAL.useful_flops == 36 / 64 * CAUSAL.dense_flops
    square = replace(CAUSAL, v_dim=128)
    assert square.dense_flops == 2.5 * (2 * 16 * 1024 * 1024 * (128 + 128))


def test_bytes_are_operands_once_and_gradients_once():
    queries, keys = 2 * 8 * 1024, 2 * 2 * 1024
    tensors = (2 * queries + 2 * keys) * (128 + 64) * 2
    assert CAUSAL.compulsory_bytes == tensors + 8 * 36 + 4 * queries
    few = replace(CAUSAL, stored=1)
    assert few.compulsory_bytes == (2 * queries + keys + 16 * 128) * (128 + 64) * 2 + 8 + 4 * queries


def planned(device: str | None = None, deterministic: bool = True) -> AttentionGradPlan:
    kind = torch.float32 if device is None else torch.bfloat16
    place = "cpu" if device is None else "meta"
    q, k, v = (torch.empty(1, heads, 4096, 128, dtype=kind, device=place) for heads in (16, 4, 4))
    mask = sk.BlockMask.sliding_window(4096, 512, device="cpu")
    plan = sk.plan_attention_backward(q, k, v, mask, device=device, deterministic=deterministic)
    KEPT.append(mask)
    return plan


KEPT: list[sk.BlockMask] = []


def test_a_plan_for_an_h200_is_made_on_any_machine_and_explains_the_real_table():
    plan = planned("h200")
    assert plan.problem.card is H200
    assert plan.bound_seconds < plan.seconds < 1
    text = plan.explain()
    assert text.startswith("gradients   q [1, 16, 4096, 128] bf16, k [1, 4, 4096, 128]")
    assert "  not        cpu.attention_bwd: runs on CPU tensors only" in text
    for name in (
        "hopper.attention_bwd",
        "hopper.attention_bwd_wide",
        "portable.attention_bwd",
        "cpu.attention_bwd",
        "reference.attention_bwd",
    ):
        assert re.search(rf"^  (kernel    |not       ) {re.escape(name)}: ", text, re.MULTILINE)
    refused("prediction for NVIDIA H200", plan, *(torch.empty(1),) * 3, None, *(torch.empty(1),) * 3)


def test_memory_names_the_transposed_lists_where_a_kernel_reads_them():
    plan = planned()
    mask = plan.mask()
    assert mask is not None
    words = r"^  memory     q, k, v, out and their gradients \S+ MB; kept beside them: mask \S+ MB, "
    assert re.search(f"{words}plan \\S+ MB$", plan.explain(), re.MULTILINE)
    expected = sum(x.nbytes for x in tensors_in(mask.transposed)) / 1e6
    found = re.search(f"{words}its transposed lists (\\S+) MB, plan", plan.explain(), re.MULTILINE)
    assert found
    assert float(found[1]) == pytest.approx(expected, rel=1e-3)


def test_a_plan_that_need_not_repeat_bits_says_so():
    assert "sums in any order" not in planned().explain()
    assert "on cpu, sums in any order" in planned(deterministic=False).explain()


def test_aligned_speaks_of_the_gradient_too():
    """A gradient that is copied has rows of Dv elements, and 12 halves are 24 bytes."""
    mask = sk.BlockMask.causal(64, block=64, device="cpu")
    q = torch.zeros(1, 1, 64, 16, dtype=torch.float16)
    for wide, aligned in ((16, True), (12, False)):
        v = torch.zeros(1, 1, 64, 16, dtype=torch.float16)[..., :wide]
        assert sk.plan_attention(q, q, v, mask).problem.aligned
        assert sk.plan_attention_backward(q, q, v, mask).problem.aligned == aligned
