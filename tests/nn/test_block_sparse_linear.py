"""BlockSparseLinear: its values, its parameters, what moves and copies it, its state dict."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear, SparseLinear
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.padding import padding_of
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from tests.sampling import sampled

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


Untyped: Any = BlockSparseLinear  # for what its types forbid


def layer(**more: Any) -> BlockSparseLinear:
    """70 -> 100 features in blocks of 32 x 16, ragged on both sides."""
    return BlockSparseLinear.random(70, 100, (32, 16), 0.4, **{"seed": 5, **more})


def inputs(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*lead, 70, generator=torch.Generator().manual_seed(1)).to(dtype)


def dense(made: BlockSparseLinear, x: Tensor) -> Tensor:
    z = functional.linear(x, made.weight.to_dense(), made.bias)
    return ACTIVATIONS[made.activation](z)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_it_is_torchs_linear_with_the_dense_weight_and_so_are_its_gradients(activation: Any, bias: bool):
    made = layer(activation=activation, bias=bias, dtype=torch.float64)
    x, residual = inputs(2, 3, dtype=torch.float64).requires_grad_(), torch.randn(2, 3, 100).double()
    y = made(x)
    torch.testing.assert_close(y, dense(made, x))
    torch.testing.assert_close(made(x, residual), dense(made, x) + residual)
    parts = [x, *made.parameters()]
    assert len(parts) == 3 if bias else 2
    grads = torch.autograd.grad(y.square().sum(), parts)
    for got, right in zip(grads, torch.autograd.grad(dense(made, x).square().sum(), parts), strict=True):
        torch.testing.assert_close(got, right)


def test_parameters_and_buffers_are_what_is_said():
    made = layer()
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == {
        "values": (8, 32, 16),
        "bias": (100,),
    }
    assert list(made.state_dict()) == ["values", "bias", "indptr", "indices"]
    for name in (
        "indptr",
        "indices",
    ):  # of its own: what is written to it changes no pattern that others share
        assert torch.equal(getattr(made, name), getattr(made.pattern, name))
        assert getattr(made, name).data_ptr() != getattr(made.pattern, name).data_ptr()
    assert made.weight.values is made.values
    assert made.weight.pattern is made.pattern
    assert (made.in_features, made.out_features, made.block) == (70, 100, (32, 16))
    assert list(dict(layer(bias=False).named_parameters())) == ["values"]
    assert repr(layer(activation="gelu")) == (
        "BlockSparseLinear(in_features=70, out_features=100, block=32x16, 8 of 20 blocks, 40 %, bias=True, "
        "activation='gelu')"
    )
    made(inputs(4)).sum().backward()
    assert made.values.grad is not None
    assert made.values.grad.shape == made.values.shape
    assert made.weight.grad is not None
    assert made.weight.grad.pattern is made.pattern


def test_a_layer_of_a_pattern_has_torchs_defaults():
    pattern = random_bsr(100, 70, (32, 16), 0.4).pattern
    assert BlockSparseLinear(pattern).values.dtype == torch.float32
    assert BlockSparseLinear(pattern, False, dtype=torch.bfloat16, device="cpu").bias is None
    torch.set_default_dtype(torch.float64)
    try:
        assert BlockSparseLinear(pattern).values.dtype == layer().values.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_are_drawn_by_what_a_row_stores():
    """Five block rows: full, of one whole block, of the cut block, of two, and empty."""
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    made = BlockSparseLinear(BSR.from_dense(torch.ones(16 * 5, 40), 16, mask=mask).pattern)
    weight, bias = made.weight.to_dense().detach(), made.bias
    assert bias is not None
    for row, fan_in in enumerate((40, 16, 8, 24, 0)):
        rows = slice(16 * row, 16 * row + 16)
        bound = fan_in**-0.5 if fan_in else 0
        largest = weight[rows].abs().max()
        assert bound * 0.9 < largest <= bound if fan_in else largest == 0
        assert bias[rows].abs().max() <= bound
        assert int((weight[rows] != 0).sum()) == 16 * fan_in
    assert bias[:16].abs().max() > 0.5 * 40**-0.5
    BSR(made.pattern, made.values.detach())  # which looks at the padding
    before = made.values.detach().clone()
    made.reset_parameters()
    assert not torch.equal(before, made.values)


def test_a_seed_draws_the_same_layer_and_leaves_torchs_generator_alone():
    torch.manual_seed(3)
    right = torch.rand(1)
    torch.manual_seed(3)
    first, second, other = layer(), layer(), layer(seed=6)
    assert torch.equal(torch.rand(1), right)
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.bias, second.bias)  # type: ignore[arg-type]
    assert not torch.equal(first.bias, other.bias)  # type: ignore[arg-type]


def test_a_dense_layer_is_pruned_and_left_as_it_is():
    linear = nn.Linear(70, 100)
    before = linear.weight.detach().clone()
    made = BlockSparseLinear.from_dense(linear, (32, 16), keep=0.5, activation="relu")
    right = BSR.from_dense(linear.weight.detach(), (32, 16), keep=0.5)
    assert torch.equal(made.weight.to_dense(), right.to_dense())
    assert torch.equal(made.bias, linear.bias)  # type: ignore[arg-type]
    assert made.pattern.nnzb == 10
    assert all(p.is_leaf and p.requires_grad for p in made.parameters())
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert torch.equal(linear.weight, before)
    assert (linear.bias != 0).all()
    all_blocks = BlockSparseLinear.from_dense(linear, 16, threshold=0)
    torch.testing.assert_close(all_blocks(inputs(3)), linear(inputs(3)))
    plain = BlockSparseLinear.from_dense(linear.weight, 32, threshold=0.1)
    assert plain.bias is None
    mask = torch.rand(7, 5) < 0.5
    assert BlockSparseLinear.from_dense(linear.weight, 16, mask=mask).pattern.nnzb == int(mask.sum())


def test_a_matrix_is_taken_over_and_a_view_copied():
    a, bias = random_bsr(100, 70, (32, 16), 0.4), torch.ones(100)
    made = BlockSparseLinear.from_bsr(a, bias)
    assert made.values.data_ptr() == a.values.data_ptr()
    assert made.bias is not None
    assert made.bias.data_ptr() == bias.data_ptr()
    assert made.pattern is a.pattern
    view = BlockSparseLinear.from_bsr(a.T)
    assert (view.in_features, view.out_features) == (100, 70)
    assert torch.equal(view.weight.to_dense(), a.to_dense().T)
    assert view.values.data_ptr() != a.values.data_ptr()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Untyped(random_bsr(64, 64, 16, 0.5)), "pattern must be a BlockPattern .* got BSR; .*random"),
        (lambda: layer(activation="tanh"), "activation is 'tanh'; use one of relu, gelu, gelu_tanh, silu"),
        (lambda: layer(activation=""), "activation is ''; use one of"),
        (lambda: layer(dtype=torch.int32), r"dtype is torch\.int32; use one of"),
        (lambda: BlockSparseLinear(layer().pattern, device="mps"), "device is .mps.; use a CUDA device or the CPU"),
        (lambda: BlockSparseLinear.from_dense(nn.Linear(64, 64, device="meta"), 16, keep=0.5),
         "meta device .* give mask="),
        (lambda: BlockSparseLinear(layer().pattern, dtype=torch.complex64), r"dtype is torch\.complex64; use one of"),
        (lambda: Untyped.from_dense(nn.Conv1d(4, 4, 1), 16), "takes a torch.nn.Linear .* got Conv1d"),
        (lambda: Untyped.from_bsr(torch.ones(4, 4)), "takes a BSR, got Tensor; from_dense takes"),
        (lambda: BlockSparseLinear.from_bsr(layer().weight, torch.ones(70)),
         r"bias is torch.float32 \[70\] on cpu; it must be torch.float32 \[100\] on cpu, or None"),
        (lambda: Untyped.from_bsr(layer().weight, True), "bias must be a dense torch.Tensor, got bool"),
    ],
)  # fmt: skip
def test_what_makes_no_layer_is_told(make: Callable[[], Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.float64), torch.float64),
        (lambda m: m.to("cpu", torch.float64), torch.float64),
        (lambda m: nn.Sequential(m).double()[0], torch.float64),
    ],
)
def test_a_change_of_dtype_leaves_the_pattern(change: Callable[[Any], Any], dtype: torch.dtype):
    made = layer()
    pattern, before = made.pattern, made.weight.to_dense().detach()
    changed = change(made)
    assert changed is made
    assert made.values.dtype == made.bias.dtype == dtype  # type: ignore[union-attr]
    assert made.pattern is pattern
    assert torch.equal(made.indptr, pattern.indptr)
    assert torch.equal(made.weight.to_dense(), before.to(dtype))
    assert made(inputs(3, dtype=dtype)).dtype == dtype


@pytest.mark.gpu
def test_it_moves_to_a_gpu_and_back():
    made = layer(activation="gelu")
    y, pattern = made(inputs(3)), made.pattern
    made.cuda()
    assert {p.device.type for p in (*made.parameters(), *made.buffers())} == {"cuda"}
    assert made.pattern.device.type == "cuda"
    assert torch.equal(made.indptr, made.pattern.indptr)
    torch.testing.assert_close(made(inputs(3).cuda()).cpu(), y, rtol=2e-3, atol=2e-3)
    made.cpu()
    assert made.pattern.same_as(pattern)
    torch.testing.assert_close(made(inputs(3)), y)


def test_meta_and_back_gives_the_pattern_again():
    made, right = layer(), layer()
    made.to("meta")
    assert {p.device.type for p in (*made.parameters(), *made.buffers())} == {"meta"}
    empty = copy.deepcopy(made).to_empty(device="cpu")
    assert empty.pattern.same_as(right.pattern)
    assert torch.equal(empty.indices, right.indices)
    empty.load_state_dict(right.state_dict())
    made.load_state_dict(right.state_dict(), assign=True)
    for each in (empty, made):
        assert torch.equal(each.indptr, right.indptr)
        assert torch.equal(each(inputs(3)), right(inputs(3)))


def test_copies_own_their_parameters_and_share_the_pattern():
    made = layer(activation="silu")
    deep = copy.deepcopy(made)
    assert deep.pattern is made.pattern
    assert deep.indices.data_ptr() != made.indices.data_ptr()
    assert deep.values.data_ptr() != made.values.data_ptr()
    with torch.no_grad():
        deep.values.mul_(2)
    assert torch.equal(deep.weight.to_dense(), 2 * made.weight.to_dense())
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False)):  # noqa: S301
        assert again.pattern.same_as(made.pattern)
        assert torch.equal(again(inputs(3)), made(inputs(3)))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("density", [0.4, 0.8], ids=["as many blocks", "more blocks"])
def test_another_pattern_is_loaded_and_the_old_one_left_alone(density: float, assign: bool):
    made = layer()
    shared = copy.deepcopy(made)
    parameter, before = made.values, shared.weight.to_dense().detach().clone()
    source = BlockSparseLinear.random(70, 100, (32, 16), density, seed=8)
    assert not source.pattern.same_as(made.pattern)
    made.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(made.weight.to_dense(), source.weight.to_dense())
    assert made.pattern.same_as(source.pattern)
    assert torch.equal(made.indices, source.indices)
    assert (made.values is parameter) == (not assign)
    assert isinstance(made.values, nn.Parameter)
    assert made.values.requires_grad
    assert torch.equal(made(inputs(3)), source(inputs(3)))
    made(inputs(3)).sum().backward()
    assert made.values.grad is not None
    assert made.values.grad.shape == source.values.shape
    assert torch.equal(shared.weight.to_dense(), before)
    with torch.no_grad():
        made.values.zero_()
    assert assign == bool((source.values == 0).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": None}, "has indptr and values only; indptr, indices and values go together"),
        ({"values": None}, "has indptr and indices only"),
        ({"indptr": None, "indices": None}, "has values only"),
        ({"bias": None}, 'Missing key.* "bias"'),
        ({"weight": torch.ones(2)}, 'Unexpected key.* "weight"'),
        ({"indptr": torch.arange(4, dtype=torch.int32)}, "indptr has 4 entries; 100 rows in blocks of 32 .* need 5"),
        ({"indptr": torch.arange(5)}, "dtype of indptr is torch.int64; it must be torch.int32"),
        ({"indices": torch.full((8,), 5, dtype=torch.int32)}, "block columns are 0 to 4"),
        ({"values": torch.ones(8, 16, 16)}, r"values have shape \(8, 16, 16\); the pattern .* \(8, 32, 16\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_wrong_state_dict_is_told_and_changes_nothing(change: dict[str, Any], message: str, assign: bool):
    made = layer()
    before, pattern = made(inputs(3)), made.pattern
    state = {**BlockSparseLinear.random(70, 100, (32, 16), 0.4, seed=8).state_dict(), **change}
    state = {name: part for name, part in state.items() if part is not None}
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state, assign=assign, strict="key" in message)
    if "key" not in message:
        assert made.pattern is pattern
        assert torch.equal(made(inputs(3)), before)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("fill", [1.0, float("nan")])
def test_values_outside_the_weight_are_saved_and_loaded_as_zero(fill: float, assign: bool):
    saved, right = layer(), layer()
    at, outside = padding_of(saved.pattern)
    with torch.no_grad():  # as an initialization that fills all values
        saved.values[at] = saved.values[at].masked_fill(outside, fill)
    made = BlockSparseLinear.random(70, 100, (32, 16), 0.8, seed=8)
    state = saved.state_dict()
    made.load_state_dict(state, assign=assign)
    assert torch.equal(made.values, right.values)
    assert not torch.equal(state["values"], right.values)  # what is loaded stays as it is
    saved.load_state_dict(saved.state_dict())
    assert torch.equal(saved.values, right.values)


def test_a_pickle_of_before_the_release_is_loaded():
    """Its state has the pattern, whose own tensors are the buffers."""
    right = layer()
    state = {k: v for k, v in right.__getstate__().items() if k not in ("_seen", "_block")}
    state["_pattern"] = BlockPattern(right.pattern.shape, right.block, right.indptr, right.indices)
    state["_buffers"] = {name: getattr(state["_pattern"], name) for name in right._buffers}
    made = BlockSparseLinear.__new__(BlockSparseLinear)
    made.__setstate__(state)
    assert torch.equal(made(inputs(3)), right(inputs(3)))
    assert made.indices.data_ptr() != state["_pattern"].indices.data_ptr()
    made = pickle.loads(pickle.dumps(made))  # noqa: S301
    made.load_state_dict(BlockSparseLinear.random(70, 100, (32, 16), 0.8, seed=8).state_dict())
    assert len(made(inputs(3))) == 3


@pytest.mark.parametrize("activation", sampled(list(ACTIVATIONS), 3), ids=str)
def test_compiled_forward_and_backward_are_the_eager_ones(activation: str | None):
    torch._dynamo.reset()
    made = nn.Sequential(layer(activation=activation), BlockSparseLinear.random(100, 30, 16, 0.5))
    x = inputs(6)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    results = []
    for run in (made, compiled):
        at = x.clone().requires_grad_()
        y = run(at)
        results.append((y, *torch.autograd.grad(y.square().sum(), [at, *made.parameters()])))
    for got, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, right)
    torch._dynamo.reset()


@pytest.mark.parametrize("scope", ["row", "global"])
@pytest.mark.parametrize("sides", [(96, 64), (64, 96), (200, 32)])
def test_a_layer_on_meta_has_room_for_as_many_blocks_as_are_chosen(
    scope: Any, sides: tuple[int, int]
) -> None:
    for keep in (0.1, 0.25, 0.5, 0.8):
        how = {"block": 32, "keep": keep, "scope": scope}
        empty, made = (
            SparseLinear.from_dense(nn.Linear(*sides, device=where), "bsr_fp8", **how)
            for where in ("meta", "cpu")
        )
        assert {key: part.shape for key, part in empty.state_dict().items()} == {
            key: part.shape for key, part in made.state_dict().items()
        }
