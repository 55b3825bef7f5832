"""Sizes of 0 in every public function: the right empty result, or one of our errors."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from sparsek.core.errors import SparseKError

SIDES = (0, 1, 40)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def same(product: Callable[..., Tensor], right: Callable[..., Tensor], *given: Tensor) -> None:
    """Results and gradients of a product are those of torch."""
    results = []
    for call in (product, right):
        parts = [x.detach().requires_grad_() for x in given]
        y = call(*parts)
        grads = torch.autograd.grad(y.sum(), parts, allow_unused=True)
        results.append(
            [y, *(x.new_zeros(x.shape) if g is None else g for g, x in zip(grads, parts, strict=True))]
        )
    for got, wanted in zip(*results, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("density", [0, 0.5])
@pytest.mark.parametrize(("m", "k", "n"), list(itertools.product(SIDES, SIDES, (0, 3))))
def test_products(m: int, k: int, n: int, density: float) -> None:
    a = sk.random_bsr(m, k, 16, density)
    dense = a.to_dense()

    def of(values: Tensor) -> sk.BSR:
        return sk.BSR(a.pattern, values)

    def wide(values: Tensor) -> Tensor:
        return of(values).to_dense()

    for lead in ((), (0,), (2,)):
        same(lambda v, b: sk.spmm(of(v), b), lambda v, b: wide(v) @ b, a.values, normal(*lead, k, n))
        same(lambda v, b: sk.spmm(b, of(v)), lambda v, b: b @ wide(v), a.values, normal(*lead, n, m))
        same(
            lambda v, x, c: sk.linear(x, of(v), c, "relu"),
            lambda v, x, c: functional.relu(functional.linear(x, wide(v), c)),
            a.values, normal(*lead, n, k), normal(m),
        )  # fmt: skip
        same(
            lambda v, x: sk.swiglu(x, of(v), of(v)),
            lambda v, x: functional.silu(x @ wide(v).T) * (x @ wide(v).T),
            a.values, normal(*lead, n, k),
        )  # fmt: skip
    seen = sk.BSR.unchecked(a.pattern, torch.ones_like(a.values)).to_dense()
    same(
        lambda x, y: sk.sddmm(x, y, a.pattern).to_dense(),
        lambda x, y: (x @ y) * seen,
        normal(m, n),
        normal(n, k),
    )
    b = sk.random_bsr(k, n, 16, density)
    same(lambda v: sk.spgemm(of(v), b), lambda v: wide(v) @ b.to_dense(), a.values)
    same(lambda v: sk.spgemm(of(v), b, "bsr").to_dense(), lambda v: wide(v) @ b.to_dense(), a.values)
    for plan in (
        sk.plan_spmm(a, normal(k, n)),
        sk.plan_spmm(a, normal(k, n), device="h200"),
        sk.plan_spgemm(a, b),
    ):
        assert plan.explain()
    for scale in ("row", "tensor", "block"):
        q = sk.quantize(a, scale=scale)
        torch.testing.assert_close(sk.linear(normal(n, k), q), normal(n, k) @ dense.T, rtol=0.2, atol=0.2)
        assert q.error(a) < 0.1
        assert repr(q)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 96, 40), (128, 0, 40), (128, 96, 0), (0, 0, 0)])
def test_products_are_empty_or_zeros_on_every_device(m: int, k: int, n: int, device: str) -> None:
    x, y = torch.ones(m, k, device=device), torch.ones(k, n, device=device)
    a, b = (sk.BSR.from_dense(each, 32, threshold=0) for each in (x, y))
    at = sk.BSR.from_dense(torch.ones(m, n, device=device), 32, threshold=0).pattern
    low, y16 = a.to(dtype=torch.bfloat16), y.bfloat16()
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=device)
    for c in (low @ y16, sk.spmm(low, y16, out=out), sk.spgemm(a, b)):
        assert c.shape == (m, n)
        assert not c.any()
    left = torch.ones(n, m, dtype=torch.bfloat16, device=device) @ low
    assert left.shape == (n, k)
    assert not left.any()
    assert (a @ b).nnzb == 0
    for s in (sk.sddmm(x, y, at), sk.spgemm(a, b, at)):
        assert s.values.shape == (at.nnzb, 32, 32)
        assert not s.values.any()


@pytest.mark.parametrize(("m", "k"), list(itertools.product(SIDES, SIDES)))
def test_formats(m: int, k: int) -> None:
    a = sk.random_bsr(m, k, 16, 0.5)
    assert (a.sum(0).shape, a.sum(1).shape, a.norm().shape) == ((k,), (m,), ())
    for again in (
        sk.BSR.from_dense(a.to_dense(), 16, threshold=0),
        sk.BSR.from_state_dict(a.state_dict()),
        sk.BSR.from_coo_blocks(a.pattern.block_rows, a.pattern.indices, a.values, a.shape),
        a.block_row_slice(0, a.grid[0]),
        a.T.T,
    ):
        assert torch.equal(again.to_dense(), a.to_dense())
        assert repr(again)
        assert isinstance(again.spy(), str)
    rules: list[Any] = [{"keep": 0.5}, {"keep": 0.0}, {"keep": 0.5, "scope": "row"}, {"threshold": 0.1}]
    for rule in rules:
        assert sk.BSR.from_dense(normal(m, k), 16, **rule).shape == (m, k)
    layer = sk.nn.BlockSparseLinear.random(k, m, 16, 0.5)
    assert layer(normal(3, k)).shape == (3, m)
    wide = 8 * k
    semi24 = sk.Semi24.from_dense(normal(m, wide))
    torch.testing.assert_close(sk.linear(normal(2, wide), semi24), normal(2, wide) @ semi24.to_dense().T)
    assert sk.quantize(normal(m, k)).error(normal(m, k)) < 0.1


POLICIES = [
    None,
    sk.MaskPolicy(),
    sk.MaskPolicy(window=40),
    sk.MaskPolicy(topk=1),
    sk.MaskPolicy(topk=2, window=30, sinks=1, block=64),
    sk.MaskPolicy(stride=128, window=40),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_attention(policy: sk.MaskPolicy | None) -> None:
    refused = 0
    for batch, heads, kv_heads, q_len, kv_len, dim in itertools.product(
        (0, 2), (0, 4), (0, 2), (0, 150), (0, 150), (0, 32)
    ):
        q, k = normal(batch, heads, q_len, dim).requires_grad_(), normal(batch, kv_heads, kv_len, dim)
        try:
            mask = None if policy is None else policy.mask_for(q, k)
            out, lse = sk.attention(q, k, k, mask, return_lse=True)
        except SparseKError:
            refused += 1
            assert 0 in (heads, kv_heads, dim)
            continue
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
        if not kv_len:
            assert not out.any()
            assert (lse == -torch.inf).all()
        assert sk.plan_attention(q, k, k, mask).explain()
    assert refused


@pytest.mark.parametrize("length", [0, 150])
def test_masks(length: int) -> None:
    tiles = -(-length // 128)
    makers: list[Callable[[], Any]] = [
        lambda: sk.BlockMask.causal(length),
        lambda: sk.BlockMask.full(length),
        lambda: sk.BlockMask.sliding_window(length, 10),
        lambda: sk.BlockMask.bigbird(length, 10, 1, 1),
        lambda: sk.BlockMask.block_diagonal([0, length]),
        lambda: sk.BlockMask.block_diagonal([]),
        lambda: sk.BlockMask.from_dense(normal(length, 5) > 0),
        lambda: sk.BlockMask.from_dense(normal(0, 2, length, length) > 0),
        lambda: sk.BlockMask.topk(normal(tiles, tiles), 1, seq_len=length),
        lambda: sk.BlockMask.topk(normal(0, 1, tiles, tiles), 1, seq_len=length),
        lambda: sk.BlockMask.per_head([]),
        lambda: sk.MaskPolicy().packed(torch.tensor([0, length])),
    ]
    made = 0
    for make in makers:
        try:
            mask = make()
        except SparseKError:
            continue
        made += 1
        assert torch.equal((mask & mask).to_dense(), mask.to_dense())
        if length:
            assert torch.equal(sk.BlockMask.from_flex(mask.to_flex()).to_dense(), mask.to_dense())
        assert repr(mask)
        assert isinstance(mask.plot(), str)
    assert made >= 8


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2, 3)])
def test_merged_parts(shape: tuple[int, ...]) -> None:
    out, lse = sk.merge_attention(normal(*shape, 8), normal(*shape), normal(*shape, 8), normal(*shape))
    assert (out.shape, lse.shape) == ((*shape, 8), shape)
