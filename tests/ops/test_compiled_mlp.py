"""A block-sparse MLP under torch.compile: forward and backward in one graph each, equal to eager, planned once."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.ops import library_args

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


def test_training_steps_follow_those_of_eager():
    torch._dynamo.reset()
    models = [Mlp("gelu"), Mlp("gelu")]
    models[1].load_state_dict(models[0].state_dict())
    runs = [models[0], torch.compile(models[1], fullgraph=True, backend="aot_eager")]
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    losses = []
    for model, run in zip(models, runs, strict=True):
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimiser.zero_grad()
            loss = (run(x) - 1).pow(2).mean()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert losses[:4] == losses[4:]
    assert losses[0] > losses[1] > losses[2] > losses[3]


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
