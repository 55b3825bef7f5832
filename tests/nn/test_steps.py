"""Optimizers of a BlockSparseLinear whose pattern changes: gradients and moments of old blocks are not used."""

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear
from tests.nn.test_loading import gradients, inputs, layer, other, write
from tests.sums import alike


def step(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients(made)
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("loader", ["load_state_dict", "written to"])
@pytest.mark.parametrize("density", [0.4, 0.8], ids=["as many", "more"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_of_other_blocks_are_refused(kind: str, density: float, loader: str) -> None:
    made, right = layer(), other(density=density)
    optimizer = OPTIMIZERS[kind](made.parameters())
    step(made, optimizer)
    if loader == "written to" and density == 0.4:
        write(made, right)
    else:
        made.load_state_dict(right.state_dict())
    before = made.values.detach().clone()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop\(layer\.values\)"):
            step(made, optimizer)
    assert torch.equal(made.values, before)
    optimizer.state.pop(made.values)
    step(made, optimizer)
    step(made, optimizer)


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "beside its layer"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_parameter_that_moves_to_another_layer_leaves_gradient_and_moments(kind: str, kept: bool) -> None:
    made, moved, right = even(1), even(2), even(1)
    optimizer = GRADIENTS[kind](made.parameters())
    learn(made)
    optimizer.step()
    layers = [made] if kept else []
    right.values, right.bias = made.values, made.bias
    del made
    right(torch.ones(2, 96))
    optimizer.step()  # the same pattern
    moved.values = right.values
    if not kept:
        del right
    moved(torch.ones(2, 96))
    with pytest.raises(InvalidInput, match="old blocks"):
        optimizer.step()
    if kind == "AdamW":
        optimizer.zero_grad()
        learn(moved)
        with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop"):
            optimizer.step()
    assert len(layers) == kept


def even(seed: int) -> BlockSparseLinear:
    """A layer whose values fit any pattern of as many blocks."""
    return BlockSparseLinear.random(96, 64, 32, 0.5, seed=seed)


def learn(made: nn.Module) -> None:
    made(torch.ones(2, 96)).square().sum().backward()


GRADIENTS = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1), **OPTIMIZERS}


@pytest.mark.parametrize("begin", ["zero_grad", "zeros", "backward", "closure", "converted"])
def test_a_gradient_of_other_blocks_is_neither_used_nor_added_to(begin: str) -> None:
    made, right = even(1), even(2)
    optimizers = [GRADIENTS["SGD"](each.parameters()) for each in (made, right)]
    old = copy.deepcopy(made)
    learn(made)
    for source in (right, old):  # and back
        write(made, source)
        made(torch.ones(2, 96))
    gradient = made.values.grad
    write(made, right)
    made(torch.ones(2, 96))
    assert made.values.grad is gradient
    nn.utils.clip_grad_norm_(made.parameters(), 0.1)
    with pytest.raises(InvalidInput, match=r"is of its old blocks.* optimizer\.zero_grad\(\)"):
        optimizers[0].step()
    assert torch.equal(made.values, right.values)
    if begin == "converted":
        made.double().float()
        assert made.values.grad is None
    elif begin != "backward":
        made.zero_grad(set_to_none=begin != "zeros")
    made.bias.grad = None  # type: ignore[union-attr]
    for each, optimizer in zip((made, right), optimizers, strict=True):
        if begin == "closure":
            learn(each)
            each.zero_grad()
            optimizer.step(lambda each=each: learn(each))
        else:
            learn(each)
            optimizer.step()
    assert torch.equal(made.values, right.values)


def test_a_compiled_step_refuses_moments_of_other_blocks() -> None:
    torch._dynamo.reset()
    made = even(1)
    optimizer = OPTIMIZERS["AdamW"](made.parameters())
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        learn(made)
        compiled()
    made.load_state_dict(even(2).state_dict())
    learn(made)
    with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop"):
        compiled()
    optimizer.state.pop(made.values)
    compiled()
    torch._dynamo.reset()


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_resumed_run_goes_on_in_whatever_order_it_loads(first: str, stepped: bool) -> None:
    saved, made = other(), layer()
    trained, optimizer = (OPTIMIZERS["AdamW"](each.parameters()) for each in (saved, made))
    step(saved, trained)
    if stepped:
        step(made, optimizer)
    states = copy.deepcopy((saved.state_dict(), trained.state_dict()))
    loads = [lambda: made.load_state_dict(states[0]), lambda: optimizer.load_state_dict(states[1])]
    for load in loads if first == "model" else loads[::-1]:
        load()
    for _ in range(2):
        step(made, optimizer)
        step(saved, trained)
    assert torch.equal(made.values, saved.values)


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),  # noqa: S301
    "file": saved,
}


@pytest.mark.parametrize("first", ["layer", "optimizer"])
@pytest.mark.parametrize("change", ["loaded", "more loaded", "written to", "written to before"])
@pytest.mark.parametrize("carrier", COPIES)
def test_a_copied_optimizer_knows_of_which_blocks_its_moments_are(
    carrier: str, change: str, first: str
) -> None:
    made = layer()
    optimizer = OPTIMIZERS["AdamW"](made.parameters())
    step(made, optimizer)
    if change == "written to before":
        write(made, other())
    if first == "layer":
        made, optimizer = COPIES[carrier]((made, optimizer))
    else:
        optimizer, made = COPIES[carrier]((optimizer, made))
    if "loaded" in change:
        made.load_state_dict(other(density=0.8 if "more" in change else 0.4).state_dict())
    elif change == "written to":
        write(made, other())
    with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop\(layer\.values\)"):
        step(made, optimizer)
    optimizer.state.pop(made.values)
    step(made, optimizer)


BETWEEN: dict[str, Callable[[BlockSparseLinear], Any]] = {
    "called": lambda made: made(torch.ones(2, 96)),
    "written to": lambda made: write(made, even(4)),
    "loaded": lambda made: made.load_state_dict(even(4).state_dict()),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_moments_that_were_loaded_before_another_use_are_of_that_pattern(between: str) -> None:
    made = even(1)
    optimizer = OPTIMIZERS["AdamW"](made.parameters())
    learn(made)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    BETWEEN[between](made)
    made.load_state_dict(even(2).state_dict())
    learn(made)
    with pytest.raises(InvalidInput, match="has state for the old blocks"):
        optimizer.step()


@pytest.mark.parametrize("density", [0.4, 0.8], ids=["as many", "more"])
@pytest.mark.parametrize("kind", ["Adagrad", "LBFGS"])
def test_optimizers_that_go_on_only_with_their_own_state_are_made_anew(kind: str, density: float) -> None:
    made, make = nn.Sequential(nn.Linear(70, 70), layer()), getattr(torch.optim, kind)
    optimizer = make(made.parameters(), lr=0.01)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = made(inputs()).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    made[1].load_state_dict(other(density=density).state_dict())
    with pytest.raises(InvalidInput, match="make a new optimizer"):
        optimizer.step(loss)
    optimizer = make(made.parameters(), lr=0.01)
    optimizer.step(loss)


class Course:
    """A layer and its optimizer, which go through a random course, and of which patterns their parts must be."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.make = GRADIENTS[self.draw.choice(list(GRADIENTS))]
        self.patterns = [
            BlockSparseLinear.random(96, 64, 16, density, seed=number)
            for number, density in enumerate((0.5, 0.5, 0.5, 0.8, 0.8))
        ]
        self.made = copy.deepcopy(self.patterns[0])
        self.optimizer = self.make(self.made.parameters())
        self.loss: Tensor | None = None
        self.now, self.of_loss = 0, 0
        self.gradient: int | None = None
        self.moments: int | None = None
        self.resumes = self.was_loaded = False

    def learn(self) -> None:
        self.compute()
        self.go_back()

    def begin(self) -> None:
        self.optimizer.zero_grad()
        self.gradient = None
        self.learn()

    def compute(self) -> None:
        self.loss, self.of_loss, self.resumes = self.made(torch.ones(2, 96)).square().sum(), self.now, False
        self.was_loaded = False

    def compute_with_other_buffers(self) -> None:
        found = self.pick()
        buffers = dict(self.patterns[found].named_buffers())
        y = torch.func.functional_call(self.made, buffers, (torch.ones(2, 96),))
        self.loss, self.of_loss, self.resumes = y.square().sum(), found, False
        self.was_loaded = False

    def go_back(self) -> None:
        if self.loss is None:
            return
        loss, self.loss = self.loss, None
        try:
            loss.backward()
        except (InvalidInput, RuntimeError) as error:  # torch's own of another shape
            assert self.of_loss != self.now or self.was_loaded, error
            return
        self.gradient = self.of_loss

    def pick(self) -> int:
        """A pattern of as many blocks."""
        return self.draw.choice([0, 1, 2] if self.now < 3 else [3, 4])

    def write(self) -> None:
        self.now, self.resumes = self.pick(), False
        parts = dict(self.patterns[self.now].named_buffers())
        how = self.draw.randrange(3)
        for name, part in parts.items():
            if how == 0:
                setattr(self.made, name, part.clone())
            elif how == 1:
                self.made.get_buffer(name).copy_(part)
            else:
                self.made.get_buffer(name).data.copy_(part)

    def load(self) -> None:
        found = self.draw.randrange(len(self.patterns))
        self.made.load_state_dict(self.patterns[found].state_dict())
        if found != self.now:
            self.gradient, self.was_loaded = None, True
        if self.resumes and self.moments == self.now and (found < 3) == (self.now < 3):
            self.moments = found
        self.now, self.resumes = found, False

    def load_optimizer(self) -> None:
        fits = self.moments is not None and (self.moments < 3) == (self.now < 3)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.resumes, self.moments = fits, self.now if fits else self.moments

    def copy(self) -> None:
        take = COPIES[self.draw.choice(list(COPIES))]
        if self.draw.random() < 0.5:
            self.made, self.optimizer = take((self.made, self.optimizer))
        else:
            self.optimizer, self.made = take((self.optimizer, self.made))
        self.gradient = self.loss = None
        self.resumes = False

    def clip(self) -> None:
        if self.gradient is not None:
            nn.utils.clip_grad_norm_(self.made.parameters(), 0.5)

    def convert(self) -> None:
        self.made.double().float()
        if self.gradient != self.now and self.made.values.grad is None:
            self.gradient = None

    def begin_moments(self) -> None:
        self.optimizer.state.pop(self.made.values, None)
        self.moments = None

    def step(self) -> None:
        if {self.gradient, self.moments} <= {self.now, None}:
            right = copy.deepcopy(self.patterns[self.now])
            right.load_state_dict(self.made.state_dict())
            optimizer = self.make(right.parameters())
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            for name, parameter in right.named_parameters():
                parameter.grad = copy.copy(self.made.get_parameter(name).grad)
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            optimizer.step()
            self.optimizer.step()
            assert alike(self.made.values, right.values)
            self.moments = self.now if self.optimizer.state.get(self.made.values) else None
            self.resumes = False
            return
        before = self.made.values.detach().clone()
        with pytest.raises(InvalidInput, match="old blocks"):
            self.optimizer.step()
        assert torch.equal(self.made.values, before)


MOVES = {
    Course.begin: 6,
    Course.learn: 2,
    Course.compute: 2,
    Course.compute_with_other_buffers: 1,
    Course.go_back: 3,
    Course.write: 4,
    Course.load: 3,
    Course.load_optimizer: 2,
    Course.copy: 1,
    Course.clip: 1,
    Course.convert: 1,
    Course.begin_moments: 1,
    Course.step: 6,
}


@pytest.mark.parametrize("start", [0, 20, 40, 60])
def test_whatever_happens_a_step_is_that_of_a_layer_made_anew_or_refused(start: int) -> None:
    for seed in range(start, start + 20):
        course = Course(seed)
        for move in course.draw.choices(list(MOVES), list(MOVES.values()), k=14):
            move(course)


def test_a_loss_of_before_a_conversion_gives_a_gradient_of_its_pattern() -> None:
    made = even(1)
    optimizer = GRADIENTS["SGD"](made.parameters())
    loss = made(torch.ones(2, 96)).square().sum()
    made.double().float()
    write(made, even(2))
    made(torch.ones(2, 96))
    loss.backward()
    with pytest.raises(InvalidInput, match="is of its old blocks"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_a_compiled_layer_learns_in_pattern_after_pattern() -> None:
    torch._dynamo.reset()
    made = even(1)
    optimizer = GRADIENTS["SGD"](made.parameters())
    compiled: Any = torch.compile(made, backend="aot_eager")
    for seed in (1, 2, 3, 4):
        optimizer.zero_grad()
        write(made, even(seed))
        learn(compiled)
        optimizer.step()
        with torch.no_grad():
            made(torch.ones(2, 96))
    torch._dynamo.reset()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(made: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    return made


def write_buffers(made: nn.Module, source: nn.Module) -> None:
    for name, part in made.named_buffers():
        part.copy_(source.get_buffer(name))


@pytest.mark.parametrize("wrap", [sharded, nn.parallel.DistributedDataParallel])
def test_gradients_and_moments_of_wrapped_layers(wrap: Any, alone: None) -> None:
    made = even(1)
    wrapped = wrap(nn.Sequential(made))
    plain, adam = (GRADIENTS[kind](wrapped.parameters()) for kind in ("SGD", "AdamW"))
    for _ in range(2):
        learn(wrapped)
        write_buffers(made, even(2))
        for called in (False, True):
            with pytest.raises(InvalidInput, match=r"optimizer\.zero_grad\(\)"):
                plain.step()
            if not called:
                with torch.no_grad():
                    wrapped(torch.ones(2, 96))
        plain.zero_grad()
        learn(wrapped)
        plain.step()
        adam.step()
        write_buffers(made, even(1))
        plain.zero_grad()
        learn(wrapped)
        plain.step()
        with pytest.raises(InvalidInput, match="AdamW has state"):
            adam.step()
        adam.state.clear()
        plain.zero_grad()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_distributed_restores_pattern_and_moments(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    saved, made = nn.Sequential(other()), nn.Sequential(layer())
    trained, optimizer = (OPTIMIZERS["AdamW"](each.parameters()) for each in (saved, made))
    step(saved, trained)
    step(made, optimizer)
    dcp.save(dict(zip("mo", get_state_dict(saved, trained), strict=True)), checkpoint_id=tmp_path)
    parts = get_state_dict(made, optimizer)
    dcp.load(dict(zip("mo", parts, strict=True)), checkpoint_id=tmp_path)
    set_state_dict(made, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    assert alike(made(inputs()), saved(inputs()))
    step(saved, trained)
    step(made, optimizer)
    assert torch.equal(made[0].values, saved[0].values)  # type: ignore[arg-type]
