"""BlockSparseLinear loaded with another pattern, by whatever loader, whatever of the old one is still alive."""

import copy
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear
from sparsek.nn.parameter import BufferPattern
from tests.sums import alike

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
# Beside 8 stored blocks: fewer, as many at other places, more.
DENSITIES = {"fewer": 0.2, "as many": 0.4, "more": 0.8}


def layer(density: float = 0.4, seed: int = 5, **more: Any) -> BlockSparseLinear:
    """70 -> 100 features in blocks of 32 x 16, ragged on both sides."""
    return BlockSparseLinear.random(70, 100, (32, 16), density, seed=seed, **more)


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(6, 70, generator=torch.Generator().manual_seed(seed))


def gradients(made: nn.Module) -> list[Tensor]:
    made.zero_grad()
    made(inputs(2)).square().sum().backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
@pytest.mark.parametrize("learns", [False, True], ids=["x fixed", "x learns"])
def test_another_pattern_learns_while_an_old_loss_lives(
    density: float, mode: str, assign: bool, learns: bool
) -> None:
    made, source = layer(), layer(density, seed=8)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(inputs()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x = inputs().requires_grad_(learns)
    y = made(x)
    loss = y.square().sum()
    made(inputs()).square().sum().backward()  # and a gradient of the old blocks is there
    with MODES[mode]():
        made.load_state_dict(source.state_dict(), assign=assign)
    assert made.values.grad is None
    assert made.pattern.same_as(source.pattern)
    right = gradients(source)
    for got, wanted in zip(gradients(made), right, strict=True):
        assert torch.equal(got, wanted)
    if not assign:
        before = made.values.detach().clone()
        optimizer.step()
        torch.testing.assert_close(made.values.detach(), before - 0.1 * right[0])
    assert loss.grad_fn is not None


@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
@pytest.mark.parametrize("learns", [False, True], ids=["x fixed", "x learns"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_an_old_loss_gives_the_new_pattern_no_gradient(density: float, learns: bool, frozen: bool) -> None:
    made = layer()
    loss = made(inputs().requires_grad_(learns)).square().sum()
    if frozen:
        made.values.requires_grad_(False)
    made.load_state_dict(layer(density, seed=8).state_dict())
    assert made.values.requires_grad != frozen
    # Values that the backward pass reads were written to, which torch refuses by itself.
    text = "modified by an inplace operation" if learns else "another pattern.*compute the loss again"
    with pytest.raises(RuntimeError if learns else InvalidInput, match=text):
        loss.backward()
    assert made.values.grad is None
    if not frozen:
        made(inputs()).sum().backward()
        assert made.values.grad is not None


def test_the_same_pattern_keeps_gradient_and_loss_as_torch_does() -> None:
    made = layer()
    made(inputs()).sum().backward()
    gradient, loss = made.values.grad, made(inputs()).sum()
    made.load_state_dict(layer(seed=5).state_dict())
    assert made.values.grad is gradient
    loss.backward()


@pytest.mark.parametrize("density", [0.2, 0.4, 0.8])
def test_a_step_that_hooks_into_gradients_goes_on_after_loading(density: float) -> None:
    made, seen = layer(), []
    made.values.register_hook(lambda g: seen.append(tuple(g.shape)))
    made.values.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    loss = made(inputs()).sum()
    source = layer(density, seed=8)
    made.load_state_dict(source.state_dict())
    made(inputs()).sum().backward()
    assert seen == [tuple(source.values.shape)] * 2
    assert loss.requires_grad


def test_a_layer_in_float64_and_on_meta_takes_another_pattern() -> None:
    made, source = layer(dtype=torch.float64), layer(0.8, seed=8, dtype=torch.float64)
    loss = made(inputs().double()).sum()
    made.load_state_dict(source.state_dict())
    made(inputs().double()).sum().backward()
    assert made.values.grad is not None
    assert (made.values.dtype, made.values.grad.shape) == (torch.float64, source.values.shape)
    assert loss.requires_grad
    away = layer().to("meta")
    away.load_state_dict(source.state_dict(), assign=True)
    assert alike(away(inputs().double()), source(inputs().double()))


def test_what_is_missing_is_told_if_torch_is_strict() -> None:
    made, source = layer(), layer(0.8, seed=8)
    state = source.state_dict()
    del state["bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "bias"'):
        made.load_state_dict(state)
    found = made.load_state_dict(state, strict=False)
    assert found.missing_keys == ["bias"]
    assert torch.equal(made.weight.to_dense(), source.weight.to_dense())


@pytest.mark.parametrize("blocks", [(16, 8), (8, 16)], ids=str)
def test_a_weight_of_an_old_pattern_is_refused(blocks: tuple[int, int]) -> None:
    """Its pattern would be read beyond its values."""
    old, new = (sk.random_bsr(64, 64, 16, count / 16, seed=count) for count in blocks)
    layer = BlockSparseLinear.from_bsr(old)
    weight = layer.weight
    layer.load_state_dict(BlockSparseLinear.from_bsr(new).state_dict())
    x = torch.randn(4, 64)
    for use in (
        lambda: weight @ x.T,
        lambda: x @ weight,
        lambda: weight.T @ x.T,
        lambda: sk.linear(x, weight),
        lambda: sk.spgemm(weight, weight),
        weight.to_dense,
    ):
        with pytest.raises(InvalidInput, match=r"take layer\.weight again"):
            use()
    assert torch.equal(layer.weight.to_dense(), new.to_dense())


@pytest.mark.parametrize("part", ["values", "indptr", "indices"])
@pytest.mark.parametrize("odd", [5, "a", torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")], ids=type)
def test_odd_parts_of_a_state_dict_change_nothing(part: str, odd: Any) -> None:
    layer = BlockSparseLinear.from_bsr(sk.random_bsr(64, 64, 16, 0.5, seed=1))
    before = layer.weight.to_dense()
    state = BlockSparseLinear.from_bsr(sk.random_bsr(64, 64, 16, 1.0, seed=2)).state_dict()
    with pytest.raises(RuntimeError, match=part):
        layer.load_state_dict({**state, part: odd})
    assert torch.equal(layer.weight.to_dense(), before)


def other(seed: int = 8, density: float = 0.4) -> BlockSparseLinear:
    """What a loader reads: a layer of another pattern."""
    return layer(density, seed=seed)


def is_as(made: BlockSparseLinear, right: BlockSparseLinear) -> bool:
    same = torch.equal(made.indices, right.indices) and made.pattern.same_as(right.pattern)
    return same and alike(made(inputs()), right(inputs()))


def assign(made: nn.Module, source: nn.Module) -> None:
    """As transformers and accelerate do: tensor by tensor."""
    for name, tensor in [*source.named_parameters(), *source.named_buffers()]:
        setattr(made, name, tensor)


def write(made: nn.Module, source: nn.Module) -> None:
    for name, tensor in made.state_dict().items():
        tensor.copy_(source.state_dict()[name])


@functools.cache
def ranks() -> list[Any]:
    """The process groups of two ranks, both of this process."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))


def broadcast(made: nn.Module, source: nn.Module) -> None:
    """Of this write neither a tensor nor its `.data` has a version."""
    sent = source.state_dict()
    for name, tensor in made.state_dict().items():
        version = 0 if tensor.is_inference() else tensor._version
        parts = zip((sent[name], tensor), ranks(), strict=True)
        works: list[Any] = [dist.broadcast(x, group_src=0, group=rank, async_op=True) for x, rank in parts]
        for work in works:
            work.wait()
        assert tensor.is_inference() or tensor._version == version


def write_data(made: nn.Module, source: nn.Module) -> None:
    """As averages of models do: of these writes a tensor has no version."""
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        tensor.data.copy_(source.state_dict()[name])


def set_data(made: nn.Module, source: nn.Module) -> None:
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        tensor.data = source.state_dict()[name]


LOADERS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "assigned": assign,
    "written to": write,
    "broadcast": broadcast,
    "data written to": write_data,
    "data set": set_data,
}
THEN: dict[str, Callable[[Any], Any]] = {
    "called": lambda made: made,
    "copied": copy.deepcopy,
    "pickled": lambda made: pickle.loads(pickle.dumps(made)),  # noqa: S301
    "cast": lambda made: made.double().float(),
    "moved": lambda made: made.to("meta").to_empty(device="cpu"),
    "state dict": lambda made: (fresh := other(3), fresh.load_state_dict(made.state_dict()))[0],
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("called", [False, True], ids=["new", "called"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loader", LOADERS)
def test_any_loader_gives_the_pattern_of_the_file(loader: str, mode: str, called: bool, then: str) -> None:
    made, right = layer(), other()
    bystander = copy.deepcopy(made)
    before = bystander(inputs())
    if called:
        made(inputs())
    with MODES[mode]():
        LOADERS[loader](made, copy.deepcopy(right))
        made = THEN[then](made)
        if then == "moved":
            assert made.pattern.same_as(right.pattern)
            return
        assert is_as(made, right)
    assert torch.equal(bystander(inputs()), before)


def as_on_a_gpu(made: BlockSparseLinear, new: bool) -> BlockSparseLinear:
    """The layer without the knowledge of contents that it has on a CPU."""
    seen = made._seen[0]._replace(contents=None)
    made._seen = (seen.again() if new else seen,)
    return made


@pytest.mark.parametrize("writer", [broadcast, write_data])
def test_new_buffers_on_a_gpu_are_compared_once(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, right, looks = layer(), other(), []
    writer(as_on_a_gpu(made, new=True), right)
    assert is_as(made, right)
    look = BufferPattern.is_in_memory
    monkeypatch.setattr(BufferPattern, "is_in_memory", lambda self: looks.append(1) or look(self))
    made = as_on_a_gpu(layer(), new=True)
    for _ in range(3):
        made(inputs())
    assert looks == [1]


@pytest.mark.parametrize("then", [*list(THEN)[1:], "loaded"])
def test_what_a_gpu_has_unseen_is_found_by_conversions_copies_and_loading(then: str) -> None:
    made, right = as_on_a_gpu(layer(), new=False), other()
    made(inputs())
    made(inputs())
    as_on_a_gpu(made, new=False)
    broadcast(made, right)
    if then == "loaded":
        made.load_state_dict(made.state_dict())
    else:
        made = THEN[then](made)
    assert made.pattern.same_as(right.pattern)
    if then != "moved":
        assert is_as(made, right)


@pytest.mark.gpu
def test_broadcasts_into_a_new_layer_on_a_gpu_are_seen() -> None:
    made, right, x = layer().cuda(), other().cuda(), inputs().cuda()
    for compiled in (False, True):
        made = layer().cuda()
        write_data(made, right)
        call = torch.compile(made, backend="aot_eager") if compiled else made
        assert alike(call(x), right(x))
    made(x)
    made.indices.data.copy_(layer().indices)
    made.indptr.data.copy_(layer().indptr)
    made.load_state_dict(made.state_dict())
    assert made.pattern.same_as(layer().pattern.to("cuda"))


@pytest.mark.parametrize("part", ["indptr", "indices"])
@pytest.mark.parametrize("how", ["assigned", "written to"])
def test_buffers_that_are_no_pattern_are_refused_until_they_are_one(how: str, part: str) -> None:
    made, right = layer(), layer()
    good = getattr(made, part).clone()
    if how == "assigned":
        setattr(made, part, torch.full_like(good, 7))
    else:
        getattr(made, part).fill_(7)
    for use in (lambda: made(inputs()), lambda: made.weight, lambda: made.pattern):
        with pytest.raises(InvalidInput, match="indptr and indices of this BlockSparseLinear: ind"):
            use()
    assert "8 of 20 blocks" in repr(copy.deepcopy(made).double().float())
    getattr(made, part).copy_(good)
    assert is_as(made, right)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (None, "indices must be a dense torch.Tensor, got NoneType"),
        (torch.zeros(8), "dtype of indices is torch.float32; it must be torch.int32"),
        (torch.zeros(8, dtype=torch.int32, device="meta"), "indices is on meta"),
        (torch.zeros(2, 4, dtype=torch.int32), "it must be 1-D"),
    ],
)
def test_odd_buffers_are_named(odd: Any, message: str) -> None:
    made = layer()
    made.indices = odd
    with pytest.raises(InvalidInput, match=message):
        made(inputs())


def test_values_outside_the_weight_are_refused_with_their_pattern() -> None:
    made, source = layer(), other()
    source.values.detach().fill_(1)
    assign(made, source)
    with pytest.raises(InvalidInput, match="outside the 100x70 weight are not zero"):
        made(inputs())


def test_a_pattern_is_checked_when_it_changes_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, one, two = layer(), other(8), other(9)
    reads = []
    monkeypatch.setattr(
        BlockSparseLinear, "_read", lambda *a, read=BlockSparseLinear._read: reads.append(1) or read(*a)
    )
    for _ in range(3):
        made(inputs())
    assert reads == []
    for _ in range(3):  # buffers that a hook moves to and fro
        for source in (one, two):
            assign(made, source)
            assert is_as(made, source)
    assert len(reads) == 2
    pattern = made.pattern
    made.indices = two.indices.clone()  # an equal one: plans are kept
    assert made.pattern is pattern
    assert len(reads) == 3


def test_strided_values_are_read_by_their_strides() -> None:
    made, right = layer(), layer()
    made.values = nn.Parameter(right.values.detach().mT.contiguous().mT)
    assert alike(made(inputs()), right(inputs()))
    made(inputs()).sum().backward()
    assert made.values.grad is not None
    assert alike(made.values.grad, gradient_of_sum(right))


def gradient_of_sum(made: BlockSparseLinear) -> Tensor:
    (found,) = torch.autograd.grad(made(inputs()).sum(), [made.values])
    return found


def test_functional_calls_take_the_pattern_that_they_are_given() -> None:
    made, right = layer(), other()
    before = made(inputs())
    call = torch.func.functional_call
    parts: Any = dict(right.named_parameters()), dict(right.named_buffers())
    assert alike(call(made, parts, (inputs(),)), right(inputs()))

    def loss(values: Any, buffers: Any) -> Tensor:
        return call(made, (values, buffers), (inputs(),)).sum()

    assert alike(torch.func.grad(loss)(*parts)["values"], gradient_of_sum(right))
    assert torch.equal(made(inputs()), before)


def test_vmap_over_models_takes_one_pattern_and_refuses_several() -> None:
    made, models, x = other(1), [layer(), layer()], inputs()
    models[1].reset_parameters()

    def run(parameters: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(made, (parameters, buffers), (x,))

    stacked = torch.vmap(run)(*torch.func.stack_module_state(models))
    torch.testing.assert_close(stacked, torch.stack([each(x) for each in models]))
    with pytest.raises(InvalidInput, match="the patterns differ"):
        torch.vmap(run)(*torch.func.stack_module_state([layer(), other()]))


def test_compiled_and_exported_layers_follow_their_buffers() -> None:
    torch._dynamo.reset()
    made = layer()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(copy.deepcopy(made), (inputs(),)).module()
    assert alike(compiled(inputs()), exported(inputs()))
    for seed, load in ((8, write), (9, assign), (10, write_data)):
        load(made, other(seed))
        assert alike(compiled(inputs()), other(seed)(inputs()))
        write(exported, other(seed))
        assert alike(exported(inputs()), other(seed)(inputs()))
    exported.get_buffer("indices").fill_(4)
    with pytest.raises(InvalidInput, match="indices"):
        exported(inputs())
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_graphs_of_make_fx_have_the_buffers_as_inputs(mode: Any) -> None:
    made, right, x = layer(), other(), inputs()

    def loss(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(made, (parameters, buffers), (x,)).sum()

    def parts(of: nn.Module) -> Any:
        return dict(of.named_parameters()), dict(of.named_buffers()), x

    graph = make_fx(torch.func.grad(loss), tracing_mode=mode)(*parts(made))
    assert alike(graph(*parts(right))["values"], gradient_of_sum(right))


def test_a_dispatch_mode_sees_the_new_pattern_and_leaves_its_plans() -> None:
    made, right = layer(), other()
    write(made, right)
    for _ in range(2):
        with FlopCounterMode(display=False):
            assert is_as(made, right)
        pattern = made.pattern
    assert made.pattern is pattern
    made.indices.fill_(9)
    with FlopCounterMode(display=False), pytest.raises(InvalidInput, match="indices"):
        made(inputs())


@pytest.mark.parametrize("offset", [1, 2], ids="at {} floats".format)
def test_a_file_that_aligns_to_8_bytes_is_copied(offset: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    right = other()
    save_file(
        {"first": torch.zeros(2, dtype=torch.float32), **right.state_dict()}, tmp_path / "a.safetensors"
    )
    state = load_file(tmp_path / "a.safetensors")
    del state["first"]
    odd = torch.empty(right.values.numel() + offset)[offset:].view(right.values.shape)
    state["values"] = odd.copy_(right.values.detach())
    assert odd.data_ptr() % 16
    with torch.device("meta"):
        made = layer()
    made.load_state_dict(state, assign=True)
    assert made.values.data_ptr() % 16 == 0
    assert is_as(made, right)


def test_a_layer_is_made_on_meta_with_its_pattern() -> None:
    pattern, right = layer().pattern, other()
    with torch.device("meta"):
        drawn, given = layer(), BlockSparseLinear(pattern)
    masked = BlockSparseLinear.from_dense(
        nn.Linear(70, 100, device="meta"), (32, 16), mask=dense_mask(pattern)
    )
    for made in (
        drawn,
        given,
        masked,
        BlockSparseLinear(pattern, device="meta"),
        layer(device="meta"),
        layer().to("meta"),
    ):
        assert {x.device.type for x in made.state_dict().values()} == {"meta"}
        assert made.pattern.same_as(pattern)
        assert copy.deepcopy(made).to_empty(device="cpu").pattern.same_as(pattern)
        made.to_empty(device="cpu").load_state_dict(right.state_dict())
        assert is_as(made, right)
    empty = BlockSparseLinear(pattern, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert 0 < empty.values.abs().max() <= 1


def dense_mask(pattern: sk.BlockPattern) -> Tensor:
    return sk.BSR(pattern, torch.zeros(pattern.nnzb, *pattern.block)).map(torch.ones_like).to_dense() != 0


@pytest.mark.parametrize("swapped", [False, True], ids=["data", "swapped"])
def test_parameters_may_be_swapped_by_torch(swapped: bool) -> None:
    made, right = layer(), other()
    made(inputs())
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    try:
        loss = made(inputs()).sum()
        made.double().float()
        del loss
        made.load_state_dict(right.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert is_as(made, right)


NOT_ONNX = r"ONNX has no sparse product; .* torch\.nn\.Linear with layer\.weight\.to_dense\(\)"


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "model"])
def test_what_cannot_take_the_layer_says_what_can(
    whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = nn.Sequential(layer()) if whole else layer()
    with pytest.raises(InvalidInput, match=r"torch\.jit\.trace cannot take .* torch\.export"):
        torch.jit.trace(made, inputs())
    with pytest.raises(InvalidInput, match=r"torch\.jit\.script cannot take .* torch\.export"):
        torch.jit.script(made)
    with pytest.raises(InvalidInput, match=NOT_ONNX):
        torch.onnx.export(made, (inputs(),), tmp_path / "a.onnx", dynamo=False)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)  # the other exporter needs onnxscript
    with pytest.raises(InvalidInput, match=NOT_ONNX):
        torch.export.export(made, (inputs(),), strict=False)


def test_what_adds_to_the_data_of_a_weight_is_told_what_to_do() -> None:
    """As merge_and_unload of peft."""
    weight: Any = layer().weight
    with pytest.raises(InvalidInput, match=r"a BSR has no \.data; .* leave it unmerged") as error:
        weight.data += torch.zeros(100, 70)
    assert isinstance(error.value, AttributeError)
    assert not hasattr(weight, "data")
