"""Formats inside torch.func and under forward mode: they work, or say what to call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

import sparsek as sk
from sparsek.core.errors import InvalidInput

A = sk.random_bsr(40, 48, 16, 0.5)  # ragged
CELLS = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def of(values: Tensor) -> sk.BSR:
    return sk.BSR.unchecked(A.pattern, values)


def cut(w: Tensor) -> Tensor:
    """The blocks of CELLS."""
    return w * CELLS.repeat_interleave(16, 0).repeat_interleave(16, 1)[: w.shape[0], : w.shape[1]]


def kept(w: Tensor) -> Tensor:
    """Blocks whose norm is over 15.5, which is some of WEIGHT's."""
    stored = WEIGHT.view(4, 16, 4, 16).norm(dim=(1, 3)) > 15.5
    return w * stored.repeat_interleave(16, 0).repeat_interleave(16, 1)


ROWS, COLUMNS = A.pattern.block_rows.long(), A.pattern.indices.long()


def written(values: Tensor) -> Tensor:
    """A's dense matrix, one block after the other."""
    rows = []
    for row in range(3):
        cells = [values.new_zeros(16, 16)] * 3
        for p in range(A.nnzb):
            if int(ROWS[p]) == row:
                cells[int(COLUMNS[p])] = values[p]
        rows.append(torch.cat(cells, 1))
    return torch.cat(rows)[:40, :48]


# What SparseK does, the same in torch, and where.
WORKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]] = {
    "to_dense": (lambda v: of(v).to_dense(), written, A.values),
    "view to_dense": (lambda v: of(v).T.to_dense(), lambda v: written(v).T, A.values),
    "from_dense of a mask": (
        lambda w: sk.BSR.from_dense(w, 16, mask=CELLS).to_dense(), cut, WEIGHT[:40, :48].contiguous(),
    ),
    "from_coo_blocks": (
        lambda v: sk.BSR.from_coo_blocks(A.pattern.block_rows, A.pattern.indices, v, A.shape).to_dense(),
        written, A.values,
    ),
    "BSR24.to_dense": (
        lambda w: sk.BSR24.from_bsr(sk.BSR.from_dense(w, 64, mask=CELLS[:1, :1])).to_dense(),
        lambda w: w * (sk.Semi24.from_dense(WEIGHT).to_dense() != 0), WEIGHT,
    ),
}  # fmt: skip
# The same, but vmap has many values to choose by.
ONE_BY_ONE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]] = {
    "from_dense": (lambda w: sk.BSR.from_dense(w, 16, threshold=0).to_dense(), lambda w: w * 1, WEIGHT),
    "from_dense by norm": (lambda w: sk.BSR.from_dense(w, 16, threshold=15.5).to_dense(), kept, WEIGHT),
    "BSR": (lambda v: sk.BSR(A.pattern, v).to_dense(), written, A.values),
    "from_dense and a product": (
        lambda w: sk.spmm(sk.BSR.from_dense(w, 16, threshold=0), torch.ones(64, 3)),
        lambda w: w @ torch.ones(64, 3), WEIGHT,
    ),
}  # fmt: skip
BOTH = {**WORKS, **ONE_BY_ONE}


@pytest.mark.parametrize("name", BOTH)
def test_gradients_are_torchs(name: str) -> None:
    ours, torchs, x = BOTH[name]
    weights = torch.randn(ours(x).shape, generator=torch.Generator().manual_seed(3))
    for wanted in (ours, torchs):
        assert wanted(x).shape == weights.shape
    found, right = (grad(lambda x, f=f: (f(x).square() * weights).sum())(x) for f in (ours, torchs))
    torch.testing.assert_close(found, right)
    found, right = (vjp(f, x)[1](weights)[0] for f in (ours, torchs))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", [name for name in BOTH if "product" not in name])
def test_forward_mode_is_torchs(name: str) -> None:
    """Also outside of torch.func, where a derivative of 0 would be no error."""
    ours, torchs, x = BOTH[name]
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    right = jvp(torchs, (x,), (tangent,))
    for got, wanted in zip(jvp(ours, (x,), (tangent,)), right, strict=True):
        torch.testing.assert_close(got, wanted)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, tangent)))
        assert found.tangent is not None
        torch.testing.assert_close(found.tangent, right[1])


@pytest.mark.parametrize("name", WORKS)
def test_vmap_is_torchs(name: str) -> None:
    ours, torchs, x = WORKS[name]
    many = torch.stack([x, 2 * x])
    torch.testing.assert_close(vmap(ours)(many), vmap(torchs)(many))
    found, right = (vmap(grad(lambda x, f=f: f(x).square().sum()))(many) for f in (ours, torchs))
    torch.testing.assert_close(found, right)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], Tensor, str]] = {
    "from_dense": (
        lambda w: sk.BSR.from_dense(w, 16, threshold=0),
        WEIGHT,
        "from_dense reads the values of w.*pass mask=",
    ),
    "from_dense keep": (lambda w: sk.BSR.from_dense(w, 16, keep=0.5), WEIGHT, "pass mask="),
    "mask": (lambda w: sk.BSR.from_dense(w, 16, mask=w > 0), WEIGHT, "reads its mask.*one that all share"),
    "quantize": (sk.quantize, WEIGHT, r"quantize looks for NaN.*quantize\(\.\.\., check=False\)"),
    "quantize BSR": (lambda v: sk.quantize(of(v)), A.values, r"quantize looks for NaN.*check=False"),
    "BSR": (lambda v: sk.BSR(A.pattern, v), A.values, r"padding.*BSR\.unchecked"),
    "Semi24 exact": (lambda w: sk.Semi24.from_dense(w, exact=True), WEIGHT, "exact=True"),
    "kept_norm": (lambda w: sk.Semi24.from_dense(WEIGHT).kept_norm(w), WEIGHT, "kept_norm.*call it outside"),
    "BlockMask": (lambda w: sk.BlockMask.from_dense(w > 0, 64), WEIGHT, "a block mask.*make it outside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_values_is_refused_where_vmap_has_many(name: str) -> None:
    call, x, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=text):
        vmap(lambda x: (call(x), x)[1])(torch.stack([x, x]))


@pytest.mark.parametrize(
    "transform", [grad, vmap, lambda f: lambda x: jvp(f, (x,), (x,))], ids=["grad", "vmap", "jvp"]
)
def test_plans_and_torchs_sparse_tensors_are_made_outside(transform: Any) -> None:
    a, x = sk.random_bsr(64, 64, 16, 0.5), torch.ones(64, 4)
    calls: list[Callable[[Tensor], Any]] = [
        lambda w: sk.choose_format((4, 64), w),
        lambda w: sk.plan_spmm(a, x),
        lambda w: sk.plan_spgemm(a, a),
        lambda w: sk.plan_sddmm(x, x.T, a.pattern),
        lambda w: a.to_torch(),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match=r"torch\.func"):
            transform(lambda w, call=call: (call(w), w.sum())[1])(WEIGHT)


def test_quantized_parts_have_no_derivative() -> None:
    for call, x in (
        (lambda w: sk.quantize(w).dequantize(), WEIGHT),
        (lambda v: sk.quantize(of(v)).to_dense(), A.values),
    ):
        assert not grad(lambda x, call=call: call(x).sum())(x).any()
        assert not jvp(call, (x,), (x,))[1].any()
    many = torch.stack([WEIGHT, 2 * WEIGHT])
    found = vmap(lambda w: sk.quantize(w, check=False).dequantize())(many)
    assert torch.equal(found, torch.stack([sk.quantize(w).dequantize() for w in many]))


def test_a_mask_is_made_of_the_values_inside_grad() -> None:
    def masked(w: Tensor) -> Tensor:
        return (sk.BlockMask.from_dense(w > 0, 64).to_dense() * w).sum()

    assert torch.equal(grad(masked)(WEIGHT), (WEIGHT > 0).float())
