"""Arguments that are nearly right: each was taken silently, or ended in an error of torch or Python."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.reference.epilogue import Epilogue
from tests.fuzz.contexts import Watching

Untyped: Any = sk
X, B, BIAS, W = torch.ones(4, 64), torch.ones(64, 4), torch.ones(128), torch.ones(128, 64)
LOW = torch.bfloat16


@pytest.fixture(scope="module")
def a() -> sk.BSR:
    return sk.random_bsr(128, 64, 32, 0.5)


def policy(**options: Any) -> Any:
    return Untyped.MaskPolicy(**options, block=64)


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 64)


def lost(name: str) -> torch.nn.Module:
    layer = torch.nn.Linear(64, 64)
    delattr(layer, name)
    return layer


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(64, 4)])


REFUSED: dict[str, tuple[Callable[[sk.BSR], object], str]] = {
    "a bias of one number": (
        lambda a: sk.linear(X, W, torch.ones(1)),
        r"bias is \[1\]; it must be \[128\], a number for every output feature",
    ),
    "a bias of two dims": (
        lambda a: sk.linear(X, W, torch.ones(4, 128)),
        r"bias is \[4, 128\]; it must be \[128\]",
    ),
    "a sparse W": (lambda a: sk.linear(X, W.to_sparse()), "W must be a dense torch.Tensor, got layout"),
    "a W of ints": (lambda a: sk.linear(X.int(), W.int()), "dtype torch.int32 is not supported; use one of"),
    "a list as kernel": (lambda a: Untyped.spmm(a, B, kernel=[]), r"kernel is \[\]; it must be"),
    "an array as kernel": (lambda a: Untyped.linear(X, a, kernel=np.ones(2)), "kernel is a numpy.ndarray"),
    "a long kernel": (lambda a: sk.spmm(a, B, kernel="x" * 9999), "no kernel of spmm is called a str .{80}"),
    "a list as dtype": (
        lambda a: Untyped.spmm(sk.quantize(a), B, dtype=[]),
        r"dtype is \[\]; use one of torch.bf",
    ),
    "alpha over float32": (
        lambda a: sk.spmm(a, B, alpha=1e39),
        r"alpha is 1e\+39; it must be a finite number from",
    ),
    "alpha NaN": (lambda a: sk.spmm(a, B, alpha=float("nan")), "alpha is nan; it must be a finite number"),
    "beta over float32": (
        lambda a: Epilogue(beta=10**400),
        "beta is a int .*; it must be a finite number from",
    ),
    "a nested B": (lambda a: sk.spmm(a, nested()), "B must be a dense torch.Tensor, got a nested tensor"),
    "a nested out": (
        lambda a: sk.spmm(a, B, out=nested()),
        "out must be a dense torch.Tensor, got a nested tensor",
    ),
    "a negated out": (
        lambda a: sk.spmm(a, B, out=torch._neg_view(torch.ones(128, 4))),
        r"out is a lazily negated view.*call .resolve_neg\(\)",
    ),
    "no epilogue": (
        lambda a: Untyped.plan_spmm(a, B, epilogue="relu"),
        "epilogue is 'relu'; it must be an Epilogue",
    ),
    "an other matrix of one dim": (
        lambda a: sk.plan_spmm(X @ W.T, a, epilogue=Epilogue(other=torch.ones(3))),
        r"other is \[3\]; it must have the shape of the product",
    ),
    "a config of something else": (
        lambda a: sk.plan_spmm(a, B, kernel="cpu.spmm", config=np.ones(2)),
        "a numpy.ndarray, .* is no config of",
    ),
    "a list as card": (lambda a: Untyped.plan_spmm(a, B, device=[]), r"no facts about a card named \[\]"),
    "out= beside a plan": (
        lambda a: Untyped.spgemm(a, a.T, 5, plan=sk.plan_spgemm(a, a.T, "bsr")),
        'out must be "dense", "bsr" or a',
    ),
    "dtype= beside a plan": (
        lambda a: sk.spmm(q8(a), B, plan=sk.plan_spmm(q8(a), B, dtype=LOW), dtype=torch.float32),
        "dtype=torch.float32 contradicts plan, whose result is bf16",
    ),
    "A that is no matrix beside a plan": (
        lambda a: Untyped.spgemm(5, a, plan=sk.plan_spgemm(a.T, a)),
        "A must be",
    ),
    "a length of 10.5": (lambda a: policy(window=4).mask(10.5), "q_len is 10.5; it must be an int"),
    "device=0": (lambda a: policy(window=4).mask(64, device=0), "device is 0; it must be a torch device"),
    "a tensor as causal": (
        lambda a: policy(causal=torch.ones(2)),
        "causal is a torch.Tensor.*; it must be True",
    ),
    "keys without a hash": (
        lambda a: Untyped.policies.SubBlock().mask_for(X[None, None], np.timedelta64(1)),
        "k must be a dense torch.Tensor",
    ),
    "a kernel of half a surrogate pair": (
        lambda a: torch.func.grad(lambda b: sk.spmm(a, b, kernel="\ud800").sum())(B),
        r"kernel is '\\ud800'; it must be a text",
    ),
    "a residual elsewhere, which learns": (
        lambda a: torch.func.grad(
            lambda r: sk.linear(
                torch.ones(2, a.shape[1]), sk.quantize(a), activation="gelu", residual=r
            ).sum()
        )(torch.empty(2, a.shape[0], device="meta")),
        "residual is on meta and W on cpu; use one device",
    ),
    "a matrix with any attribute": (
        lambda a: sk.BSR.from_scipy(Mock()),
        "expected a 2-D SciPy sparse matrix",
    ),
    "a long format": (
        lambda a: sk.SemiSparse.from_dict({"format": "x" * 9999}),
        "no config is called 'x{79}; known",
    ),
    "a layer that lost its weight": (
        lambda a: sk.nn.SparseLinear.from_dense(lost("weight"), "semi24"),
        "weight must be a dense torch.Tensor, got NoneType",
    ),
    "return_lse of a text": (
        lambda a: Untyped.attention(*[torch.ones(1, 1, 64, 8)] * 3, return_lse="yes"),
        "return_lse is 'yes'; it must be",
    ),
    "a sparse part": (
        lambda a: sk.merge_attention(
            torch.ones(2, 3).to_sparse(), torch.ones(2), torch.ones(2, 3), torch.ones(2)
        ),
        "o1 must be a dense torch.Tensor, got layout torch.sparse_coo",
    ),
    "a layer's x in float64": (
        lambda a: sk.nn.SparseAttention(32, 4)(torch.ones(1, 8, 32).double()),
        "x is torch.float64 on cpu and the parameters torch.float32 on cpu; cast or move one",
    ),
    "a layer's x in float64 under autocast": (
        lambda a: under_autocast(torch.ones(1, 8, 32).double()),
        "x is torch.float64 on cpu and the parameters",
    ),
    "a layer of 2^31 heads": (
        lambda a: sk.nn.SparseAttention(2**31, 2**31),
        "dim is 2147483648; it must be an int",
    ),
    "a layer of too many rows": (
        lambda a: sk.nn.SparseAttention(8, 2**30, head_dim=2**20),
        r"\(heads \+ 2 \* kv_heads\) \* head_dim is \d+; it",
    ),
    "a tensor as bias=": (
        lambda a: Untyped.nn.BlockSparseLinear(a.pattern, torch.ones(2)),
        "bias is a torch.Tensor.*; it must be True or",
    ),
    "a seed as generator": (
        lambda a: sk.nn.BlockSparseLinear(a.pattern).reset_parameters(cast(Any, 5)),
        "generator is 5; it must be a torch.Generator or None",
    ),
    "x of inference mode in training": (
        lambda a: sk.nn.BlockSparseLinear.from_bsr(a)(in_inference_mode()),
        "was made in torch.inference_mode, and no",
    ),
    "keep of texts": (
        lambda a: Untyped.choose_format(X, W, keep=["x"]),
        "keep is 'x'; it must be a finite number",
    ),
    "a W of nothing": (lambda a: Untyped.choose_format(X, None), "W must be a dense .* got NoneType"),
    "a shape of floats": (
        lambda a: Untyped.choose_format((4.5, 64), W),
        "a side of x is 4.5; it must be an int",
    ),
}


def q8(a: sk.BSR) -> sk.Quantized:
    return sk.quantize(a)


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sk.nn.SparseAttention(32, 4)(x)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_would_be_right(name: str, a: sk.BSR) -> None:
    call, text = REFUSED[name]
    with pytest.raises(InvalidInput, match=text) as raised:
        call(a)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("alpha", [10**30, np.float32(0.5), 2**63, 3])
def test_numbers_of_any_kind_multiply_as_their_float(a: sk.BSR, alpha: Any) -> None:
    assert torch.equal(sk.spmm(a, B, alpha=alpha), sk.spmm(a, B, alpha=float(alpha)))
    plan = sk.plan_spmm(a, B, epilogue=Epilogue(alpha=alpha))
    assert torch.equal(plan(a, B, epilogue=Epilogue(alpha=alpha)), sk.spmm(a, B, alpha=float(alpha)))


def test_autocast_still_casts_what_a_layer_of_attention_multiplies() -> None:
    layer = sk.nn.SparseAttention(32, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(1, 64, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert layer(torch.ones(1, 64, 32)).dtype == torch.bfloat16


MIXED: dict[str, Callable[[sk.BSR, torch.Tensor], object]] = {
    "spmm": lambda a, x: a @ x.mT,
    "linear": lambda a, x: sk.linear(x, a),
    "mlp": lambda a, x: sk.mlp(x, a, a.T, activation="gelu"),
    "Semi24": lambda a, x: sk.Semi24.from_dense(W) @ x.mT,
    "values": lambda a, x: sk.BSR.unchecked(a.pattern, x.expand(a.nnzb, *a.block)) @ B,
    "sddmm": lambda a, x: sk.sddmm(x, x.mT, sk.random_bsr(4, 4, 16, 0.5).pattern),
    "attention": lambda a, x: sk.attention(x[None, None], x[None, None], X[None, None]),
    "mask": lambda a, x: sk.attention(*[x[None, None]] * 3, mask=sk.BlockMask.causal(4, block=64)),
    "from_dense": lambda a, x: sk.BSR.from_dense(x, 16, keep=0.5),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_fake_tensor_beside_real_ones_is_refused(name: str, a: sk.BSR):
    with pytest.raises(InvalidInput, match="FakeTensor"):
        MIXED[name](a, FakeTensorMode().from_tensor(X if name != "values" else torch.ones(1, 32, 32)))
    if name != "from_dense":
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            MIXED[name](a, mode.from_tensor(X if name != "values" else torch.ones(1, 32, 32)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_is_refused_not_recorded_as_constants(a: sk.BSR):
    learning = sk.nn.BlockSparseLinear.from_bsr(a).weight
    for run in (
        lambda x: a @ x.mT,
        lambda x: sk.linear(x, a, activation="relu"),
        lambda x: sk.sddmm(x, B, sk.random_bsr(4, 4, 16, 0.5).pattern).values,
        lambda x: sk.attention(x[None, None], x[None, None], x[None, None]),
        lambda x: sk.attention(*[x[None, None]] * 3, mask=sk.BlockMask.causal(4, block=64)),
        lambda x: sk.Semi24.from_dense(x).values,
        sk.nn.BlockSparseLinear.from_bsr(a),
        lambda x: sk.mlp(x, learning, learning.T),
    ):
        with pytest.raises(InvalidInput, match=r"torch\.jit\.trace.*use torch\.compile"):
            torch.jit.trace(run, (X,))


ROWS, ROUNDED, CAUSAL = torch.ones(1, 2, 128, 32), sk.quantize(W), sk.BlockMask.causal(128, block=64)
LISTED: dict[str, Callable[[torch.Tensor], object]] = {
    "Semi24": sk.Semi24.from_dense,
    "Semi24 of a mask": lambda x: sk.Semi24.from_dense(W, x.cumsum(-1).remainder(2) > 0),
    "BSR": lambda x: sk.BSR.from_dense(x, 32, keep=0.5),
    "BSR24": lambda x: sk.BSR24.from_dense(x, 64, threshold=0.0),
    "BlockPattern": lambda x: sk.BlockPattern(
        (128, 64), (64, 64), x[0, :3].cumsum(0).int() - 1, x[0, :2].int() - 1
    ),
    "quantize": sk.quantize,
    "quantize_heads": lambda x: Untyped.quantize_heads(*[x.view(1, 1, 128, 64)] * 3),
    "error": ROUNDED.error,
    "choose_format": lambda x: sk.choose_format((8, 64), x),
    "choose_format's x": lambda x: sk.choose_format(x, W),
    "from_dense": lambda x: sk.BlockMask.from_dense(x > 0, 64),
    "from_transformers": lambda x: sk.BlockMask.from_transformers(x.log()[None, None], 64),
    "to_fa4": lambda x: CAUSAL.to_fa4(),
    "to_dense": lambda x: CAUSAL.to_dense(),
    "element_mask": lambda x: CAUSAL.element_mask(x[0, :1].long() - 1, x[0, :1].long() - 1),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize itself
@pytest.mark.parametrize("name", LISTED)
def test_values_that_a_trace_does_not_show_are_read_outside_of_it_or_refused(name: str):
    def run(x: torch.Tensor) -> torch.Tensor:
        LISTED[name](x)
        return x * 1

    for mode in ("real", "fake"):
        with suppress(sk.SparseKError):
            make_fx(run, tracing_mode=mode)(W)
    with suppress(sk.SparseKError):
        torch.func.linearize(run, W)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, suppress(sk.SparseKError):
        run(W)
    with mode, suppress(sk.SparseKError):
        run(mode.from_tensor(W))
    found: list[Any] = []
    if name in ("Semi24", "BSR24", "quantize"):  # a trace of real tensors reads theirs
        make_fx(lambda x: (found.append(LISTED[name](x)), x)[1])(W)
        assert found


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not dist.is_available():
        pytest.skip("torch.distributed is not built")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_beside_plain_tensors_is_refused(a: sk.BSR, mesh: Any):
    from torch.distributed.tensor import Shard, distribute_tensor

    def sharded(x: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    x, heads, half = sharded(X), sharded(ROWS), sk.Semi24.from_dense(W)
    quest, keys = sk.policies.Quest(topk=2), torch.ones(3, 2, 128, 32)
    for call in (
        lambda: sk.linear(x, a),
        lambda: sk.linear(x, W),
        lambda: sk.linear(X, a, sharded(BIAS)),
        lambda: sk.linear(X.to(LOW), q8(a), residual=sharded(torch.ones(4, 128, dtype=LOW))),
        lambda: a @ sharded(B),
        lambda: sk.nn.BlockSparseLinear.from_bsr(a)(x),
        lambda: sk.sddmm(x, sharded(B), sk.random_bsr(4, 4, 16, 0.5).pattern),
        lambda: sk.BSR(a.pattern, sharded(a.values)),
        lambda: sk.Semi24(sharded(half.values), half.meta),
        lambda: sk.Semi24.from_dense(sharded(W)),
        lambda: sk.attention(heads, heads, heads),
        lambda: sk.attention(ROWS, ROWS, heads),
        lambda: sk.attention(ROWS, ROWS, ROWS, sink_logits=sharded(torch.ones(2))),
        lambda: sk.policies.VSA(topk=1).attention(ROWS, ROWS, ROWS, heads),
        lambda: sk.merge_attention(heads, ROWS[..., 0], ROWS, ROWS[..., 0]),
        lambda: quest.update(keys, torch.zeros(1).long(), sharded(quest.summaries(keys))),
    ):
        with pytest.raises(InvalidInput, match="DTensor"):
            call()


def test_whole_numbers_of_a_byte_count_as_any_other():
    for few in (np.int8(64), np.uint8(64)):
        heads = Untyped.quantize_heads(ROWS, ROWS, ROWS, "block", rows=few)
        assert [each.scale.shape[2] for each in heads] == [2, 2, 2]
        assert type(Untyped.QuantizedHeads(heads[0].values, heads[0].scale, few).rows) is int


def test_vmap_over_no_entries_has_the_shape_of_one(a: sk.BSR):
    out, grad = torch.vmap(torch.func.grad_and_value(lambda q: sk.attention(q, ROWS, ROWS).sum()))(
        ROWS[None][:0]
    )
    assert (out.shape, grad.shape) == ((0, *ROWS.shape), (0,))
    assert torch.vmap(lambda q: sk.attention(ROWS, q, ROWS))(ROWS[None][:0]).shape == (0, *ROWS.shape)
    assert torch.vmap(lambda x: sk.linear(x, a))(X[None][:0]).shape == (0, 4, 128)


def test_2_4_pruning_is_functionalized():
    found = torch.func.functionalize(lambda w: sk.Semi24.from_dense(w).meta)(W)
    assert torch.equal(found, sk.Semi24.from_dense(W).meta)


def test_zeros_without_memory_are_refused(a: sk.BSR):
    zeros = torch._efficientzerotensor((64, 4))
    with pytest.raises(InvalidInput, match=r"zeros without memory.*call .clone\(\)"):
        _ = a @ zeros
    assert not (a @ zeros.clone()).any()


WITHOUT_SHAPE: dict[str, Callable[[], Any]] = {
    "nested": nested,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(64, 4)], layout=torch.jagged),
    "uninitialized": lambda: torch.nn.LazyLinear(8).weight,
    "buffer": torch.nn.UninitializedBuffer,
}
TAKEN: dict[str, Callable[[Any, sk.BSR], object]] = {
    "spmm": lambda x, a: a @ x,
    "linear": sk.linear,
    "bias": lambda x, a: sk.linear(X, a, x),
    "dense W": lambda x, a: sk.linear(X, x),
    "swiglu": lambda x, a: sk.swiglu(x, a, a),
    "sddmm": lambda x, a: sk.sddmm(x, X, a.pattern),
    "values": lambda x, a: sk.BSR(a.pattern, x),
    "BSR.from_dense": lambda x, a: sk.BSR.from_dense(x, 32, keep=0.5),
    "Semi24.from_dense": lambda x, a: sk.Semi24.from_dense(x),
    "quantize": lambda x, a: sk.quantize(x),
    "attention": lambda x, a: sk.attention(x, x, x),
    "mask": lambda x, a: sk.attention(*[X[None, None]] * 3, mask=x),
    "varlen": lambda x, a: sk.attention_varlen(X[:, None], X[:, None], X[:, None], x),
    "merge": lambda x, a: sk.merge_attention(x, x, x, x),
    "topk": lambda x, a: Untyped.BlockMask.topk(x, 1, 64, 64, block=64),
    "policy": lambda x, a: sk.policies.MeanTopK(topk=1).mask(x, x),
    "layer": lambda x, a: sk.nn.BlockSparseLinear.from_bsr(a)(x),
    "layer's bias": lambda x, a: sk.nn.BlockSparseLinear.from_bsr(a, x),
    "SparseAttention": lambda x, a: sk.nn.SparseAttention(64, 2)(x),
    "layer.from_dense": lambda x, a: sk.nn.BlockSparseLinear.from_dense(x, 32, keep=0.5),
    "choose_format": lambda x, a: sk.choose_format(X, x),
    "choose_format's x": lambda x, a: sk.choose_format(x, W),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", WITHOUT_SHAPE)
@pytest.mark.parametrize("name", TAKEN)
def test_tensors_without_a_shape_are_refused(name: str, kind: str, a: sk.BSR):
    for context in (nullcontext(), torch.autocast("cpu", LOW), Watching()):
        with context, pytest.raises(InvalidInput):
            TAKEN[name](WITHOUT_SHAPE[kind](), a)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", WITHOUT_SHAPE)
@pytest.mark.parametrize("name", ["values", "indptr", "indices", "bias"])
def test_a_state_dict_of_tensors_without_a_shape_is_reported(name: str, kind: str):
    layer = sk.nn.BlockSparseLinear.random(64, 64, 32, 0.5)
    state = layer.state_dict() | {name: WITHOUT_SHAPE[kind]()}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=f"{name} must be a dense torch.Tensor"):
            layer.load_state_dict(state, assign=assign)


def test_a_lazy_layer_has_no_weight_yet():
    for make in (
        lambda lazy: sk.nn.BlockSparseLinear.from_dense(lazy, 32, keep=0.5),
        lambda lazy: sk.choose_format(X, lazy),
    ):
        with pytest.raises(InvalidInput, match="call its lazy module once with an input"):
            make(torch.nn.LazyLinear(8))


def test_plans_and_values_are_not_read_inside_torch_func(a: sk.BSR):
    plan, rounded = sk.plan_spmm(a, B), sk.quantize(B)
    calls: list[Callable[[Any], Any]] = [
        lambda x: plan(a, x),
        lambda x: B * rounded.error(x),
        lambda x: Untyped.attention_paged(x, x, x, x, x),
    ]
    for call in calls:
        with pytest.raises(InvalidInput):
            torch.vmap(call)(B[None])
