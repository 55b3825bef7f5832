"""A block-sparse MLP under torch.compile: forward and backward in one graph each, equal to eager, planned once."""

import gc
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops import library_args, mlp

pytestmark = pytest.mark.filterwarnings(
    "ignore:Your compiler for AOTAutograd is returning a function:UserWarning"
)
F32 = torch.float32


class Mlp(nn.Module):
    """y = x + linear(act(linear(x))), or SwiGLU in the place of the first two."""

    def __init__(self, act: Any, device: str = "cpu", dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.act = act
        shapes = [(256, 96), (256, 96), (96, 256)]
        self.matrices = [
            random_bsr(*shape, 32, 0.3, dtype=dtype, device=device, seed=at)
            for at, shape in enumerate(shapes)
        ]
        self.values = nn.ParameterList(nn.Parameter(a.values) for a in self.matrices)
        draw = torch.Generator().manual_seed(1)
        self.bias = nn.Parameter(torch.randn(256, generator=draw).to(device, dtype))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (
            BSR.unchecked(a.pattern, v) for a, v in zip(self.matrices, self.values, strict=True)
        )
        if self.act == "swiglu":
            return sk.linear(sk.swiglu(x, gate, up), down, residual=x)
        return sk.linear(sk.linear(x, gate, self.bias, self.act), down, residual=x) + (x @ up.T @ up)


def step(model: Callable[[Tensor], Tensor], leaves: Iterable[Tensor], x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    y = model(x)
    found = torch.autograd.grad(y, [x, *leaves], torch.sin(y.detach()), allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu"])
def test_forward_and_backward_are_one_graph_each_and_equal_eager(act: str, recorder: Any):
    model = Mlp(act)
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    leaves = list(model.parameters())
    x = torch.randn(2, 10, 96)
    expected = step(model, leaves, x)
    for _ in range(2):
        found = step(compiled, leaves, x)
        assert len(found) == len(expected)
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right)
    assert len(recorder.fw_graphs) == len(recorder.bw_graphs) == 1
    ops = [
        str(node.target).split(".")[0]
        for node in recorder.bw_graphs[0].graph.nodes
        if node.op == "call_function"
    ]
    assert ops.count("sparsek") == (6 if act == "swiglu" else 8)
    assert "sort" not in str(recorder.fw_graphs[0].code) + str(recorder.bw_graphs[0].code)


@pytest.mark.parametrize("act", ["gelu", "swiglu"])
def test_without_gradients_activations_are_fused(act: str, recorder: Any):
    model = Mlp(act).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    x = torch.randn(2, 10, 96)
    assert torch.equal(compiled(x), model(x))
    assert "aten.gelu" not in recorder.graphs[0].code + recorder.fw_graphs[0].code
    assert "aten.silu" not in recorder.fw_graphs[0].code


def test_one_graph_serves_any_number_of_tokens(recorder: Any):
    model = Mlp("relu")
    leaves = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    for tokens in (11, 26, 50):
        x = torch.randn(tokens, 96, requires_grad=True)
        expected = step(model, leaves, x)
        torch._dynamo.mark_dynamic(x, 0)  # raises if something fixes it
        found = step(compiled, leaves, x)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)
    assert len(recorder.fw_graphs) == 1


def test_a_compiled_step_plans_once_for_the_matrices_that_eager_calls_use(plans_made: list[str]):
    torch._dynamo.reset()
    model = Mlp("relu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 96)
    step(compiled, list(model.parameters()), x)
    made = len(plans_made)
    gc.collect()
    kept = len(library_args._PATTERNS)
    for _ in range(2):
        step(compiled, list(model.parameters()), torch.randn(20, 96))
    assert len(plans_made) == made
    assert len(library_args._PATTERNS) == kept


def layers(act: str, turned: bool, device: str = "cpu", dtype: torch.dtype = F32) -> tuple[Any, list[Tensor]]:
    """`sk.mlp` of x and four leaves, the values of both matrices and the biases; and these."""
    shapes = [(96, 256), (256, 96)] if turned else [(256, 96), (96, 256)]
    a, b = (random_bsr(*s, 32, 0.3, dtype=dtype, device=device, seed=at) for at, s in enumerate(shapes))
    biases = [torch.randn(n, device=device).to(dtype) for n in (256, 96)]
    leaves = [x.clone().requires_grad_() for x in (a.values, b.values, *biases)]

    def run(x: Tensor) -> Tensor:
        up, down = (BSR.unchecked(m.pattern, v) for m, v in zip((a, b), leaves, strict=False))
        up, down = (up.T, down.T) if turned else (up, down)
        return sk.mlp(x, up, down, *leaves[2:], activation=act)  # type: ignore[arg-type]

    return run, leaves


def arguments(x: Tensor, act: str = "gelu") -> tuple[Any, ...]:
    """Those of the op `sparsek::mlp`, without a bias of the second layer."""
    up, down = random_bsr(256, 96, 32, 0.3, seed=0), random_bsr(96, 256, 32, 0.3, seed=1)
    matrices = [library_args.flat(each.requires_grad_()) for each in (up, down)]
    return x, *matrices[0], torch.randn(256, requires_grad=True), *matrices[1], None, act, None


@pytest.fixture
def one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels write slopes."""
    torch._dynamo.reset()
    monkeypatch.setattr("sparsek.products.ops.mlp.one_op", constant(lambda *given: True))


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
def test_where_kernels_write_slopes_an_mlp_is_one_op(act: str, turned: bool, recorder: Any, one_op: None):
    run, leaves = layers(act, turned)
    x = torch.randn(2, 10, 96)
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    for mine, right in zip(step(compiled, leaves, x), step(run, leaves, x), strict=True):
        torch.testing.assert_close(mine, right)
    forward, backward = (
        [str(node.target) for node in graphs[0].graph.nodes if str(node.target).startswith("sparsek")]
        for graphs in (recorder.fw_graphs, recorder.bw_graphs)
    )
    assert forward == ["sparsek.mlp.default"]
    assert sorted(backward) == ["sparsek.sddmm.default"] * 2 + ["sparsek.spmm.default"] * 2
    assert not any(
        f"aten.{name}" in str(recorder.bw_graphs[0].code) for name in ("gelu", "silu", "sigmoid", "mul")
    )


@pytest.mark.parametrize("needed", range(5))
def test_of_an_mlp_as_one_op_each_gradient_can_be_the_only_one(needed: int, one_op: None):
    run, leaves = layers("gelu", False)
    x = torch.randn(10, 96)
    given = [x, *leaves]
    for at, each in enumerate(given):
        each.requires_grad_(at == needed)
    found = []
    for made in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        y = made(x)
        found += torch.autograd.grad(y, given[needed], torch.sin(y.detach()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_an_mlp_as_one_op_serves_any_number_of_tokens(lead: tuple[int, ...], recorder: Any, one_op: None):
    run, leaves = layers("silu", False)
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    for tokens in (11, 26, 50):
        x = torch.randn(*lead, tokens, 96, requires_grad=True)
        torch._dynamo.mark_dynamic(x, len(lead))
        for mine, right in zip(step(compiled, leaves, x), step(run, leaves, x), strict=True):
            torch.testing.assert_close(mine, right)
    assert len(recorder.fw_graphs) == 1


def test_the_op_of_an_mlp_is_registered_as_torch_wants_it():
    # Not its comparison with AOTAutograd, which takes gradients of all outputs.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = arguments(torch.randn(2, 5, 96, requires_grad=True))
    torch.library.opcheck(torch.ops.sparsek.mlp.default, given, test_utils=checks)


@pytest.mark.parametrize("width", [96, 97])
def test_operands_that_do_not_fit_are_refused_while_it_is_traced(width: int, one_op: None):
    up, down = random_bsr(256, 96, 32, 0.3), random_bsr(96, 128 if width == 96 else 256, 32, 0.3)
    up.requires_grad_()
    with pytest.raises(InvalidInput) as eager:
        sk.mlp(torch.randn(4, width), up, down)
    compiled = torch.compile(lambda x: sk.mlp(x, up, down), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        compiled(torch.randn(4, width))


def test_the_op_of_an_mlp_refuses_what_it_does_not_have():
    with pytest.raises(InvalidInput, match="has gelu, gelu_tanh, silu, not 'relu'"):
        torch.ops.sparsek.mlp(*arguments(torch.randn(4, 96), "relu"))
    y, hidden, _ = torch.ops.sparsek.mlp(*arguments(torch.randn(4, 96, requires_grad=True)))
    with pytest.raises(InvalidInput, match="no second gradient"):
        (y.sum() + hidden.sum()).backward()


def test_a_second_gradient_of_an_mlp_as_one_op_is_refused(one_op: None):
    """By a backend without AOTAutograd, which refuses it by itself."""
    run, leaves = layers("gelu", False)
    y = torch.compile(run, fullgraph=True, backend="eager")(torch.randn(4, 96))
    (first,) = torch.autograd.grad(y.sum(), leaves[1], create_graph=True)
    with pytest.raises(InvalidInput, match="no second gradient"):
        torch.autograd.grad(first.pow(2).sum(), leaves[0])


def test_the_op_of_an_mlp_takes_operands_as_they_are_under_autocast():
    given = arguments(torch.randn(4, 96))
    wanted = torch.ops.sparsek.mlp(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.ops.sparsek.mlp(*given)
    assert all(torch.equal(mine, right) for mine, right in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("device", "dtype", "act", "kernel"),
    [
        ("cpu", torch.bfloat16, "gelu", None),
        ("cuda:0", torch.float32, "gelu", None),
        ("cuda:0", torch.bfloat16, "relu", None),
        ("cuda:0", torch.bfloat16, None, None),
        ("cuda:0", torch.bfloat16, ["gelu"], None),
        ("cuda:0", torch.bfloat16, "gelu", "portable.spmm"),
    ],
)
def test_where_no_kernel_writes_a_slope_torch_fuses(
    device: str, dtype: torch.dtype, act: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sparsek.products.ops.mlp.card_of", lambda device: H200)
    assert mlp.one_op(torch.device("cuda:0"), torch.bfloat16, "gelu", None)
    assert not mlp.one_op(torch.device(device), dtype, act, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_on_a_gpu_a_compiled_mlp_equals_eager(act: str, monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no kernel of this card writes slopes")
    torch._dynamo.reset()
    wrote: list[str] = []

    def with_slope(call: mlp.LinearCall) -> tuple[Tensor, Tensor]:
        wrote.append(act)
        return written(call)

    written = mlp.LinearCall.with_slope
    monkeypatch.setattr(mlp.LinearCall, "with_slope", with_slope)
    run, leaves = layers(act, False, "cuda", torch.bfloat16)
    x = torch.randn(2, 128, 96, device="cuda").bfloat16()
    compiled = torch.compile(run, fullgraph=True)
    for mine, right in zip(step(compiled, leaves, x), step(run, leaves, x), strict=True):
        torch.testing.assert_close(mine, right, rtol=4e-2, atol=4e-2 * float(right.abs().max()))
    assert wrote == [act, act]


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu"])
def test_by_inductor_it_equals_eager(act: str):
    torch._dynamo.reset()
    model = Mlp(act, "cuda", torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 128, 96, device="cuda").bfloat16()
    leaves = list(model.parameters())
    for mine, right in zip(step(compiled, leaves, x), step(model, leaves, x), strict=True):
        # Inductor rounds once where eager rounds after every elementwise operation.
        torch.testing.assert_close(mine, right, rtol=4e-2, atol=4e-2 * float(right.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu"])
def test_a_cuda_graph_of_a_training_step_replays(act: str, no_sync: Any):
    model = Mlp(act, "cuda", torch.bfloat16)
    leaves = list(model.parameters())
    x = torch.randn(256, 96, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(model, leaves, x)
        with no_sync():
            step(model, leaves, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(model, leaves, x)
    for seed in range(2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(256, 96, device="cuda"))
        graph.replay()
        for mine, right in zip(found, step(model, leaves, x), strict=True):
            assert torch.equal(mine, right)


@pytest.mark.gpu
def test_a_backward_pass_on_a_gpu_allocates_what_is_stored():
    a = random_bsr(8192, 8192, 128, 0.02, dtype=torch.bfloat16, device="cuda", seed=0)
    a.requires_grad_()
    x = torch.randn(256, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        y = sk.linear(x, a)
        cotangent = torch.randn_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y, [x, a.values], cotangent)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * (a.values.nbytes + x.nbytes)
