"""The gate that judges gradients of attention: what it lets pass, what it refuses, and what it looks at."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention, attention_backward
from sparsek.testing.attention_budget import check_attention_backward
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import random_bits
from tests.attn.kernels.backward.grad_cases import Inputs, inputs
from tests.refusals import refused

SMALL = (64, 64)
# Of 300 queries over 200 keys the first 100 see nothing.
MASK = BlockMask.causal(q_len=300, kv_len=200, block=SMALL, device="cpu")


def given(dtype: torch.dtype = torch.float16, mask: BlockMask = MASK, with_lse: bool = True) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 4, mask.q_len, 32), (1, 2, mask.kv_len, 32), (1, 2, mask.kv_len, 48)
    q, k, v = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    return inputs(q, k, v, mask, with_lse=with_lse)


def right(of: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, mask, scale, out, lse, grad, grad_lse, *_ = of
    return attention_backward(q, k, v, mask, out, lse, grad, grad_lse, scale=scale)


def verdict(of: Inputs, found: tuple[Tensor, ...], **more: Any) -> bool:
    q, k, v, mask, scale, _, _, grad, grad_lse, *_ = of
    return check_attention_backward(q, k, v, mask, grad, found, grad_lse, scale=scale, **more).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_formulas_pass_in_every_dtype(dtype: torch.dtype, with_lse: bool) -> None:
    of = given(dtype, with_lse=with_lse)
    q, k, v, mask, scale, _, _, grad, grad_lse, *_ = of
    gate = check_attention_backward(q, k, v, mask, grad, right(of), grad_lse, scale=scale)
    assert gate.passed
    assert gate.error in gate.errors
    assert gate.budget in gate.budgets
    assert all(0 < e <= b < 2e-2 for e, b in zip(gate.errors, gate.budgets, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_budget_is_twice_the_error_of_torchs_own_dense_attention(dtype: torch.dtype) -> None:
    mask = random_bits("cpu", (200, 300), SMALL, density=1.2)
    of = given(dtype, mask, with_lse=False)
    seen = mask.to_dense()
    sees = seen.any(-1, keepdim=True)
    leaves = [x.clone().requires_grad_() for x in of[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(*leaves, attn_mask=seen | ~sees, enable_gqa=True)
    dense = torch.autograd.grad(out, leaves, of.grad.masked_fill(~sees, 0))
    q, k, v = (x.double().requires_grad_() for x in of[:3])
    truth = torch.autograd.grad(attention(q, k, v, mask)[0], (q, k, v), of.grad.double())
    gate = check_attention_backward(*of[:3], mask, of.grad, dense)
    for error, allowed, mine, true in zip(gate.errors, gate.budgets, dense, truth, strict=True):
        off = float((mine.double() - true).norm() / true.norm())
        assert error == pytest.approx(off, rel=1e-6)
        if (
            dtype != torch.float32
        ):  # there the sums of tiles and of all keys differ by as much as the error itself
            assert allowed == pytest.approx(2 * off, rel=0.05)


def test_poison_and_faults_are_refused() -> None:
    of = given()
    found = right(of)
    assert verdict(of, found)
    for place, (length, dim) in enumerate(((300, 32), (200, 32), (200, 48))):
        for fault in (torch.nan, 1.0):
            wrong = [x.clone() for x in found]
            wrong[place][0, 1, length - 3, dim - 1] += fault
            assert not verdict(of, tuple(wrong)), (place, fault)
        others = list(found)
        others[place] = poisoned(found[place].shape, found[place].dtype)
        assert not verdict(of, tuple(others))
        others[place] = found[place] * 1.01
        assert not verdict(of, tuple(others))
    dq = found[0].clone()
    dq[0, 0, 5, 0] = 1e-7
    assert not verdict(of, (dq, *found[1:])), "query 5 sees nothing"


def test_keys_that_no_query_sees_must_have_no_gradient() -> None:
    mask = BlockMask.from_blocks([0, 1, 2], [0, 2], 128, 192, SMALL, device="cpu")
    of = given(torch.float32, mask)
    found = right(of)
    assert verdict(of, found)
    for place in (1, 2):
        wrong = [x.clone() for x in found]
        wrong[place][0, 0, 100, 0] = 1e-9
        assert not verdict(of, tuple(wrong))


def test_queries_that_see_one_key_may_have_noise_for_nothing() -> None:
    """One weight of 1, so dS is 0, which is the difference of two sums."""
    mask = BlockMask.sliding_window(128, 1, block=SMALL, device="cpu")
    of = given(torch.float32, mask, with_lse=False)
    dq, dk, dv = right(of)
    assert verdict(of, (dq + 1e-8, dk, dv))
    assert not verdict(of, (dq + 1e-4, dk, dv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_that_see_two_keys_may_be_off_by_the_rounding_of_out(dtype: torch.dtype) -> None:
    """delta is made of out. Torch's math attention, which keeps the weights instead, is several times as exact."""
    of = given(dtype, BlockMask.sliding_window(128, 2, block=SMALL, device="cpu"), with_lse=False)
    seen = of.mask.to_dense()
    leaves = [x.clone().requires_grad_() for x in of[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    math = torch.autograd.grad(out, leaves, of.grad)
    found = right(of)
    gates = [check_attention_backward(*of[:4], of.grad, each) for each in (found, math)]
    assert all(gate.passed for gate in gates)
    assert gates[0].errors[0] > 1.2 * gates[1].errors[0]
    dq, dk, dv = found
    assert not verdict(of, (dq * (1 + 8 * torch.finfo(dtype).eps), dk, dv))


def test_only_chosen_tiles_and_blocks_are_looked_at() -> None:
    of = given()
    dq, dk, dv = (x.clone() for x in right(of))
    dq[:, :, 130] = dk[:, :, 70] = dv[:, :, 70] = torch.nan
    assert verdict(of, (dq, dk, dv), rows=[0, 1, 4], columns=[0, 2, 3])
    assert verdict(of, (dq, dk, dv), rows=[3], columns=[])
    assert verdict(of, (dq, dk, dv), rows=[], columns=[3])
    assert not verdict(of, (dq, dk, dv), rows=[2], columns=[])
    assert not verdict(of, (dq, dk, dv), rows=[], columns=[1])


def test_what_is_found_does_not_depend_on_what_else_is_looked_at() -> None:
    mask = random_bits("cpu", (300, 400), SMALL, heads=4, density=0.4)
    q, k, v, _, scale, _, _, grad, grad_lse, *_ = of = given(torch.float32, mask)
    found = right(of)
    gates = [
        check_attention_backward(q, k, v, mask, grad, found, grad_lse, scale=scale, rows=rows, columns=[1, 5])
        for rows in ([], range(5))
    ]
    assert gates[0].errors[1:] == pytest.approx(gates[1].errors[1:])
    assert gates[0].budgets[1:] == pytest.approx(gates[1].budgets[1:], rel=1e-3)


def test_keys_that_no_query_of_a_tile_sees_may_hold_anything() -> None:
    mask = BlockMask.sliding_window(256, 1, block=SMALL, device="cpu")
    of = given(torch.float32, mask)
    found = right(of)
    of.k[:, :, 64:128] = of.v[:, :, 64:128] = torch.nan
    assert verdict(of, found, rows=[0, 2, 3], columns=[0, 2, 3])
    assert not verdict(of, found)


def test_what_does_not_fit_is_refused() -> None:
    of = given()
    q, k, v, mask, _, _, _, grad, grad_lse, *_ = of
    dq, dk, dv = right(of)
    found = dq, dk, dv
    words = r"dq, dk and dv must have the shapes .*, got .*\[1, 2, 199, 32\]"
    refused(words, check_attention_backward, q, k, v, mask, grad, (dq, dk[:, :, 1:], dv))
    refused(r"grad \[1, 4, 300, 48\]", check_attention_backward, q, k, v, mask, grad[..., 1:], found)
    assert grad_lse is not None
    words = r"grad_lse must be \[1, 4, 300\], got \[1, 4, 299\]"
    refused(words, check_attention_backward, q, k, v, mask, grad, found, grad_lse[:, :, 1:])
    refused("rows must name 0 to 4", verdict, of, found, rows=[5])
    refused("columns must name 0 to 3", verdict, of, found, columns=[-1])
