"""copy, deepcopy and pickle of every public class: they work, or refuse with a text that names the way."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput
from tests.ops.tensors import qkv


def matrix() -> sk.BSR:
    return sk.random_bsr(64, 64, 16, 0.5, seed=3)


def dense(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


PLANS: dict[str, Callable[[], Any]] = {
    "spmm": lambda: sk.plan_spmm(matrix(), dense(64, 8)),
    "prediction": lambda: sk.plan_spmm(matrix(), dense(64, 8), device="h200"),
    "semi24": lambda: sk.plan_spmm(sk.Semi24.from_dense(dense(32, 64)), dense(64, 8)),
    "scaled": lambda: sk.plan_spmm(sk.quantize(matrix()), dense(64, 8)),
    "sddmm": lambda: sk.plan_sddmm(dense(64, 32), dense(32, 64), matrix().pattern),
    "spgemm": lambda: sk.plan_spgemm(matrix(), matrix()),
    "attention": lambda: sk.plan_attention(*qkv(), sk.BlockMask.causal(192)),
    "attention_backward": lambda: sk.plan_attention_backward(*qkv(), sk.BlockMask.causal(192)),
    "linear": lambda: sk.choose_format((16, 64), dense(64, 64), formats="bsr", block=16, min_norm=0),
}
FROZEN: dict[str, Callable[[], Any]] = {
    "BlockPattern": lambda: matrix().pattern,
    "BlockMask": lambda: sk.BlockMask.sliding_window(192, 70),
    "MaskPolicy": lambda: sk.MaskPolicy(window=70),
    "Card": lambda: H200,
    "problem": lambda: PLANS["spmm"]().problem,
}
MATRICES: dict[str, Callable[[], Any]] = {
    "BSR": matrix,
    "view": lambda: matrix().T,
    "Semi24": lambda: sk.Semi24.from_dense(dense(32, 64)),
    "BSR24": lambda: sk.BSR24.from_dense(dense(64, 128), 64, keep=0.5),
    "Quantized": lambda: sk.quantize(matrix()),
    "QuantizedTensor": lambda: sk.quantize(dense(8, 64)),
    "QuantizedTensor E5M2, turned": lambda: sk.quantize(dense(8, 64), torch.float8_e5m2, "tensor").mT,
}
NOT_PICKLED = ("BSR", "view", "Quantized")


def wide(x: Any) -> Tensor:
    return x.dequantize() if isinstance(x, sk.QuantizedTensor) else x.to_dense()


def values(x: Any) -> Tensor:
    return x.matrix.values if isinstance(x, sk.Quantized) else x.values


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))  # noqa: S301


def through_torch(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", MATRICES)
def test_a_deep_copy_of_a_matrix_has_its_own_values(name: str) -> None:
    x = MATRICES[name]()
    shallow, deep = copy.copy(x), copy.deepcopy(x)
    assert type(shallow) is type(deep) is type(x)
    assert (shallow.shape, shallow.dtype, deep.shape, deep.dtype) == (x.shape, x.dtype) * 2
    assert torch.equal(wide(shallow), wide(x))
    assert torch.equal(wide(deep), wide(x))
    assert values(shallow).data_ptr() == values(x).data_ptr() != values(deep).data_ptr()


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("again", [pickled, through_torch])
def test_a_matrix_is_pickled_or_says_how_it_is_saved(name: str, again: Callable[[Any], Any]) -> None:
    x = MATRICES[name]()
    if name in NOT_PICKLED:
        with pytest.raises(InvalidInput, match=r"is not pickled.*sparsek\.save"):
            again(x)
        return
    found = again(x)
    assert (type(found), found.shape, found.dtype) == (type(x), x.shape, x.dtype)
    assert torch.equal(wide(found), wide(x))


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled, through_torch])
def test_what_nobody_writes_to_is_shared_or_made_again(name: str, again: Callable[[Any], Any]) -> None:
    x = FROZEN[name]()
    found = again(x)
    assert type(found) is type(x)
    if isinstance(x, sk.BlockPattern):
        assert found.same_as(x)
    elif isinstance(x, sk.BlockMask):
        assert torch.equal(found.to_dense(), x.to_dense())
    else:
        assert found == x
        assert hash(found) == hash(x)


def test_a_copied_card_cannot_be_written_to() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        pickled(H200).tflops["bf16"] = 1.0


@pytest.mark.parametrize("name", PLANS)
def test_a_model_that_holds_a_plan_is_copied_and_refuses_to_be_pickled(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    model.plan = PLANS[name]()
    found: Any = copy.deepcopy(model)
    assert repr(found.plan) == repr(model.plan)
    assert found.plan.explain() == model.plan.explain()
    assert copy.copy(model).plan is model.plan
    for again in (pickled, through_torch):
        with pytest.raises(InvalidInput, match=r"is not pickled.*plan anew"):
            again(model)


def test_copies_of_plans_run() -> None:
    a, b = matrix(), dense(64, 8)
    pair = copy.deepcopy({"a": a, "plan": sk.plan_spmm(a, b)})
    assert torch.equal(pair["plan"](pair["a"], b), sk.spmm(a, b))
    plan = PLANS["linear"]()
    found = copy.deepcopy(plan)
    assert torch.equal(found(dense(16, 64)), plan(dense(16, 64)))
    assert found.weight.values.data_ptr() != plan.weight.values.data_ptr()


@pytest.mark.parametrize("again", [copy.deepcopy, pickled, through_torch])
def test_layers_are_copied_and_pickled(again: Callable[[Any], Any]) -> None:
    model = torch.nn.Sequential(
        sk.nn.SparseAttention(64, 2, sk.MaskPolicy(window=40)),
        sk.nn.BlockSparseLinear.random(64, 48, 16, 0.5),
    )
    x = dense(2, 50, 64)
    right = model(x)
    found = again(model)
    assert torch.equal(found(x), right)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    assert torch.equal(model(x), right)
