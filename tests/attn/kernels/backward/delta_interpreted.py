"""attention/delta.py in Triton's interpreter."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.backward.delta import add_parts, cast_quantized, prepare_rows
from sparsek.attn.kernels.forward.packed_rows import packed_rows
from sparsek.testing.poison import poisoned
from tests.engine.launch.covering import once

HALF = torch.float16
INF = float("inf")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(x: Tensor) -> Tensor:
    """float32 [B, H, 1, R, D] in the order of bwd_dq.as_held: 16 rows, of these 8 columns, a row, a pair of columns."""
    batch, heads, rows, width = x.shape
    parts = x.view(batch, heads, rows // 16, 2, 8, width // 8, 4, 2)
    return parts.permute(0, 1, 2, 5, 4, 6, 3, 7).reshape(batch, heads, 1, rows, width)


def check_rows(out: Tensor, grad: Tensor, lse: Tensor, grad_lse: Tensor | None, rows: int) -> None:
    made = prepare_rows(out, grad, lse, grad_lse, rows)
    q_len = out.shape[2]
    assert made.dtype == torch.float32
    assert made.shape == (2, *out.shape[:2], rows)
    assert made.is_contiguous()
    empty = lse == -INF
    delta = (out.double() * grad.double()).sum(-1) - (0 if grad_lse is None else grad_lse.double())
    expected = (lse.double() / math.log(2)).masked_fill(empty, INF), delta.masked_fill(empty, 0)
    for found, wanted in zip(made.double(), expected, strict=True):
        torch.testing.assert_close(found[:, :, :q_len], wanted, rtol=1e-6, atol=2e-5)
    assert (made[0, :, :, q_len:] == INF).all()
    assert (made[1, :, :, q_len:] == 0).all()


@pytest.mark.parametrize(
    ("v_dim", "q_len", "rows"),
    [
        (v_dim, *rows)
        for v_dim, rows in once(product((32, 64, 96, 128, 192, 256), ((1, 64), (70, 128), (128, 128))))
    ],
)
def test_rows_hold_lse_in_base_2_and_delta(v_dim: int, q_len: int, rows: int) -> None:
    out, grad = (normal(2, 3, q_len, v_dim, seed=seed).to(HALF) for seed in range(2))
    lse, grad_lse = (normal(2, 3, q_len, seed=seed) * 5 for seed in range(2, 4))
    check_rows(out, grad, lse, grad_lse, rows)
    check_rows(out, grad, lse, None, rows)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), INF, 1.0], ids=str)
def test_rows_that_saw_nothing_hold_inf_and_zero_whatever_their_gradients(bad: float) -> None:
    out, grad = normal(1, 2, 50, 64).to(HALF), normal(1, 2, 50, 64, seed=1).to(HALF)
    lse, grad_lse = normal(1, 2, 50, seed=2), normal(1, 2, 50, seed=3)
    lse[:, :, 10:20], lse[:, 1, 49] = -INF, -INF
    grad[:, :, 10:15], grad_lse[:, :, 13:20] = bad, bad
    check_rows(out, grad, lse, grad_lse, 64)


def test_rows_are_read_with_any_strides() -> None:
    base = normal(2, 40, 3, 64).to(HALF).transpose(1, 2)
    turned = normal(2, 3, 64, 40, seed=1).to(HALF).mT
    spread = normal(2, 3, 80, 128, seed=2).to(HALF)[:, :, ::2, ::2]
    shared = normal(1, seed=3).to(HALF).expand(2, 3, 40, 64)
    lse, grad_lse = normal(2, 40, 3, seed=4).transpose(1, 2), normal(1, seed=5).expand(2, 3, 40)
    for out, grad in ((base, turned), (turned, spread), (spread, shared)):
        check_rows(out, grad, lse, grad_lse, 64)
        check_rows(out, grad, lse.contiguous(), lse, 40)


def test_lse_is_in_the_unit_asked_for() -> None:
    out, lse = normal(1, 2, 50, 64).to(HALF), normal(1, 2, 50) * 5
    lse[:, :, 7] = -INF
    made, plain = prepare_rows(out, out, lse, None, 64, -8.0), prepare_rows(out, out, lse, None, 64)
    assert torch.equal(made[0], plain[0] * -8)
    assert torch.equal(made[1], plain[1])
    assert (made[0, :, :, 7] == -INF).all()


def test_there_may_be_nothing_to_prepare() -> None:
    nothing = torch.empty(2, 0, 5, 64, dtype=HALF)
    assert prepare_rows(nothing, nothing, torch.empty(2, 0, 5), None, 64).shape == (2, 2, 0, 64)


@pytest.mark.parametrize("dim", [32, 96, 128, 192, 256])
def test_a_cast_scales_and_rounds_once(dim: int) -> None:
    width = 1 << (dim - 1).bit_length()
    for rows, more in ((128, 0), (192, 256 - width)):
        acc = normal(2, 3, rows, width + more)
        acc[:, :, 70:], acc[..., dim:] = torch.nan, torch.nan
        dq = poisoned((2, 3, 70, dim), HALF)
        cast_quantized(held(acc), 0.3, dq)
        assert torch.equal(dq, (acc[:, :, :70, :dim] * torch.tensor(0.3)).to(HALF))


def test_rows_without_a_turn_are_zero_whatever_the_sum_holds() -> None:
    acc, dq = normal(2, 3, 256, 64), poisoned((2, 3, 200, 64), HALF)
    turns = torch.randint(0, 3, (2, 3, 4), dtype=torch.int32)
    seen = (turns > 0).repeat_interleave(64, 2)[..., None]
    cast_quantized(held(acc.masked_fill(~seen, torch.nan)), 0.5, dq, turns.flatten())
    assert torch.equal(dq, torch.where(seen, acc * 0.5, 0)[:, :, :200].to(HALF))


def test_a_cast_adds_its_sums_where_they_had_a_turn() -> None:
    acc, dq = normal(2, 3, 2, 256, 64), poisoned((2, 3, 200, 64), HALF)
    turns = torch.randint(0, 3, (2, 3, 2, 4), dtype=torch.int32)
    seen = (turns > 0).repeat_interleave(64, 3)[..., None]
    sums = torch.cat([held(x) for x in acc.masked_fill(~seen, torch.nan).unbind(2)], 2)
    cast_quantized(sums, 0.5, dq, turns.flatten())
    assert torch.equal(dq, (torch.where(seen, acc, 0).sum(2) * 0.5)[:, :, :200].to(HALF))


def test_a_cast_writes_any_strides_and_nothing_beside() -> None:
    acc, room = normal(2, 3, 64, 64), poisoned((2, 60, 4, 72), HALF)
    dq = room[:, :50, :3, :64].transpose(1, 2)
    cast_quantized(held(acc), 2.0, dq)
    assert torch.equal(dq, (acc[:, :, :50] * 2).to(HALF))
    dq.fill_(torch.nan)
    assert room.isnan().all()
    turned = poisoned((2, 3, 64, 50), HALF).mT
    cast_quantized(held(acc), 1.0, turned)
    assert torch.equal(turned, acc[:, :, :50].to(HALF))
    cast_quantized(held(acc)[:0], 1.0, turned[:0])


@pytest.mark.parametrize(("dims", "kv_len"), once(product(((32, 64), (40, 128)), (65, 128, 200))))
def test_parts_are_added_in_order_and_rounded_once(dims: tuple[int, int], kv_len: int) -> None:
    """Those without visits hold NaN; dk and dv have other strides."""
    (batch, heads, count, keys), (dim, v_dim) = (2, 2, 3, 64), dims
    columns, first = -(-kv_len // keys), 64
    lengths = torch.randint(0, 2, (batch, heads, count, columns), generator=torch.Generator().manual_seed(1))
    parts = normal(batch, heads, count, columns, keys, first + 128)
    parts = torch.where(lengths[..., None, None] > 0, parts, torch.nan)
    dk = poisoned((batch, kv_len, heads, dim), HALF).transpose(1, 2)
    dv = poisoned((batch, kv_len, heads, v_dim), HALF).transpose(1, 2)
    add_parts(parts.flatten(0, 3), lengths.int().flatten(), count, 0.5, dk, dv, first)
    wanted = torch.zeros(batch, heads, columns, keys, first + 128)
    for part in parts.nan_to_num().unbind(2):
        wanted += part
    wanted = wanted.flatten(2, 3)[:, :, :kv_len]
    assert torch.equal(dk, (wanted[..., :dim] * 0.5).to(HALF))
    assert torch.equal(dv, wanted[..., first : first + v_dim].to(HALF))


@pytest.mark.parametrize("pack", [2, 16])
def test_rows_of_several_heads_of_a_token_are_read_and_written_in_place(pack: int) -> None:
    batch, heads, tokens, dim = 2, 2 * pack, 11, 40
    rows = -(-tokens * pack // 64) * 64
    out, grad = (normal(batch, tokens, heads, dim, seed=seed).to(HALF).transpose(1, 2) for seed in range(2))
    lse, grad_lse = (normal(batch, tokens, heads, seed=seed).mT for seed in range(2, 4))
    found = prepare_rows(out, grad, lse, grad_lse, rows, pack=pack)
    o, g, s, n = (packed_rows(x, pack) for x in (out, grad, lse, grad_lse))
    torch.testing.assert_close(found, prepare_rows(o, g, s, n, rows), rtol=0, atol=1e-5)
    acc = normal(batch, heads // pack, rows, 64)
    dq = poisoned((batch, tokens, heads, dim), HALF).transpose(1, 2)
    cast_quantized(held(acc), 2.0, dq, pack=pack)
    assert torch.equal(packed_rows(dq, pack), (acc[:, :, : tokens * pack, :dim] * 2).to(HALF))
