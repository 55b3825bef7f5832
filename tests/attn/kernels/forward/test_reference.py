"""reference.attention behind the protocol: the reference itself, and the last choice of the planner."""

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.reference.attention import attention
from sparsek.engine.table import load
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem

KERNEL = load("reference.attention")


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_it_gives_the_bits_of_the_reference(case: AttentionCase) -> None:
    q, k, v, mask = case.make()
    assert KERNEL.why_not(problem(q, k, v, mask)) == []
    for ours, exact in zip(attend(KERNEL, q, k, v, mask), attention(q, k, v, mask), strict=True):
        assert torch.equal(ours, exact)


def test_it_takes_a_scale_inputs_that_need_gradients_and_no_lse() -> None:
    q = torch.randn(1, 2, 70, 16, dtype=torch.float64, requires_grad=True)
    mask = BlockMask.causal(70, device="cpu")
    out = torch.empty_like(q, requires_grad=False)
    p = problem(q, q, q, mask, lse=False)
    c = KERNEL.default(p)
    KERNEL.launch(c, KERNEL.prepare(p, c, mask), AttentionCall(q, q, q, mask, 0.3, out, None))
    assert not out.requires_grad
    assert torch.equal(out, attention(q, q, q, mask, scale=0.3)[0])
