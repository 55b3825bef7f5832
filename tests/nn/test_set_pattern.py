"""BlockSparseLinear with another pattern in training: values and the state of optimizers are carried block by block."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear

BLOCK, SHAPE = (32, 16), (100, 70)  # ragged on both sides
GRID = (4, 5)


class Lion(torch.optim.Optimizer):
    """An optimizer of a user: Chen et al. 2023, arXiv:2302.06675, with a part that torch's have not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("momentum", torch.zeros_like(p))
            state.setdefault("anchor", p.detach().clone())  # as of Prodigy
            state["calls"] = state.get("calls", 0) + 1
            p.sub_(1e-2 * (0.9 * state["momentum"] + 0.1 * p.grad).sign() + 1e-3 * (p - state["anchor"]))
            state["momentum"].lerp_(p.grad, 0.01)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), weight_decay=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=torch.tensor(1e-3), foreach=True),
    "Adam amsgrad fused": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "SGD nesterov fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "Lion": Lion,
}
ELSEWHERE = {
    "Adafactor": "test_factored_moments_are_carried",
    "LBFGS": "test_lbfgs_is_refused",
    "Muon": "torch takes matrices only",
    "SparseAdam": "torch takes sparse gradients only",
}


def mask(share: float, seed: int) -> Tensor:
    return torch.rand(GRID, generator=torch.Generator().manual_seed(seed)) < share


def elements(blocks: Tensor) -> Tensor:
    """A mask of blocks as one of the elements of the weight."""
    return blocks.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: SHAPE[0], : SHAPE[1]]


def layer(blocks: Tensor | None = None, dtype: torch.dtype = torch.float64, **more: Any) -> BlockSparseLinear:
    torch.manual_seed(0)
    dense = nn.Linear(SHAPE[1], SHAPE[0], dtype=dtype)
    return BlockSparseLinear.from_dense(dense, BLOCK, mask=mask(0.5, 1) if blocks is None else blocks, **more)


def data(i: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(i)
    return tuple(torch.randn(8, n, generator=draw, dtype=dtype) for n in (SHAPE[1], SHAPE[0]))  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, after: Any = None) -> None:
    for i in steps:
        optimizer.zero_grad()
        x, y = data(i)
        functional.mse_loss(model(x), y).backward()
        if after is not None:
            after()
        optimizer.step()


@pytest.mark.parametrize("change", ["mask", "pattern", "prune", "grow", "same number"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_that_of_a_masked_dense_layer(make: Make, change: str) -> None:
    before = mask(0.5, 1)
    made, dense = layer(before), nn.Linear(SHAPE[1], SHAPE[0], dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(made.weight.to_dense())
        assert made.bias is not None
        dense.bias.copy_(made.bias)
    values = made.values
    mine, theirs = make([*made.parameters()]), make([*dense.parameters()])
    stored = elements(before)

    def masked() -> None:
        assert dense.weight.grad is not None
        dense.weight.grad.mul_(stored)

    train(made, mine, range(3))
    train(dense, theirs, range(3), masked)
    if change == "prune":
        made.prune_(0.2)
    elif change == "grow":
        made.grow_(3, by="random")
    else:
        after = mask(0.5, 2)
        if change == "same number":
            after = before.flip(1)
        made.set_pattern(
            after if change != "pattern" else sk.BSR.from_dense(torch.ones(SHAPE), BLOCK, mask=after).pattern,
            mine,
        )
    after = made.weight.detach().pattern
    now = sk.BSR.unchecked(after, torch.ones(after.nnzb, *BLOCK, dtype=torch.float64)).to_dense().bool()
    assert made.values is values
    assert not torch.equal(now, stored)
    assert values.grad is None
    kept, stored = now & stored, now
    with torch.no_grad():
        dense.weight.mul_(kept)
    for name, part in theirs.state[dense.weight].items():
        if isinstance(part, Tensor) and part.ndim:
            fresh = {"step_size": 1e-3, "sum": mine.param_groups[0].get("initial_accumulator_value")}.get(
                name
            )
            part.copy_(torch.where(kept, part, fresh or 0.0))
    train(made, mine, range(3, 6))
    train(dense, theirs, range(3, 6), masked)
    torch.testing.assert_close(
        made.weight.detach().to_dense(), dense.weight.detach() * stored, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(made.bias.detach(), dense.bias.detach(), rtol=0, atol=1e-6)
    assert torch.equal(made.indptr, made.pattern.indptr)
    assert torch.equal(made.indices, made.pattern.indices)


def test_every_optimizer_of_torch_is_tried() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert kinds == {name.split()[0] for name in OPTIMIZERS if name != "Lion"} | ELSEWHERE.keys()
    made = layer()
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(made.parameters())
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        train(made, torch.optim.SparseAdam(made.parameters()), range(1))


def factored(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, factored], ids=["torch", "transformers"])
def test_factored_moments_are_carried(make: Make) -> None:
    made = layer(dtype=torch.float32)
    optimizer = make([*made.parameters()])
    made(torch.randn(8, SHAPE[1])).square().sum().backward()
    optimizer.step()
    old = {
        name: part.clone() for name, part in optimizer.state[made.values].items() if isinstance(part, Tensor)
    }
    before, after = made.pattern.host, mask(0.5, 2)
    cells = dict(zip(_pairs(before), range(len(made.values)), strict=True))
    made.set_pattern(after)
    parts = [name for name, part in old.items() if part.ndim]
    assert len(parts) >= 2
    for position, pair in enumerate(_pairs(made.pattern.host)):
        for name in parts:
            now = optimizer.state[made.values][name][position]
            wanted = old[name][cells[pair]] if pair in cells else torch.zeros_like(now)
            assert torch.equal(now, wanted)
    for name in old.keys() - set(parts):
        assert torch.equal(optimizer.state[made.values][name], old[name])
    made(torch.randn(8, SHAPE[1])).square().sum().backward()
    optimizer.step()


def _pairs(host: Any) -> list[tuple[int, int]]:
    rows = [i for i in range(len(host.indptr) - 1) for _ in range(host.indptr[i + 1] - host.indptr[i])]
    return list(zip(rows, map(int, host.indices), strict=True))


def snapshot(made: BlockSparseLinear, *optimizers: torch.optim.Optimizer) -> list[Any]:
    assert made.values.grad is not None
    return copy.deepcopy([made.state_dict(), made.values.grad, *(x.state_dict() for x in optimizers)])


def same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return x == y


class Odd(torch.optim.SGD):
    """SGD that also keeps something of its own in its state."""

    part: Any = None

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = self.part


@pytest.mark.parametrize(
    "part",
    [
        torch.zeros(7, 3),
        torch.zeros(16, 16),
        torch.zeros(9, 32, 16, dtype=torch.uint8),
        [torch.zeros(3)],
        object(),
    ],
    ids=["another number", "a side", "codes", "a list", "an object"],
)
def test_state_that_is_not_of_blocks_is_refused(part: Any) -> None:
    made = layer()
    odd, adam = Odd(made.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(made.parameters())
    x, y = data(0)
    functional.mse_loss(made(x), y).backward()
    adam.step()
    odd.part = part
    odd.step()
    made.values.grad = torch.ones_like(made.values)
    odd.part, before = None, snapshot(made, adam)
    for given in (None, odd, [adam, odd]):
        with pytest.raises(InvalidInput, match="'odd'"):
            made.set_pattern(mask(0.5, 2), given)
        assert same(before, snapshot(made, adam))
    made.set_pattern(mask(0.5, 2), adam)  # the cure: without it
    functional.mse_loss(made(x), y).backward()
    adam.step()
    with pytest.raises(InvalidInput, match=r"(?s)Odd has state for the old blocks"):
        odd.step()


def test_lbfgs_is_refused() -> None:
    made = layer()
    optimizer = torch.optim.LBFGS(made.parameters(), max_iter=2)
    x, y = data(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(made(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = snapshot(made)
    for given in (None, optimizer):
        with pytest.raises(InvalidInput, match=r"LBFGS cannot be carried.*optimizer=\(\)"):
            made.set_pattern(mask(0.5, 2), given)
        assert same(before, snapshot(made))
    made.set_pattern(mask(0.5, 2), ())
    torch.optim.LBFGS(made.parameters(), max_iter=2).step(lambda: functional.mse_loss(made(x), y))


def test_state_of_old_blocks_is_not_carried_further() -> None:
    made = layer()
    optimizer = torch.optim.Adam(made.parameters())
    train(made, optimizer, range(1))
    made.load_state_dict(layer(mask(0.5, 2)).state_dict())  # the state stays that of the old blocks
    with pytest.raises(InvalidInput, match="has state for the old blocks"):
        made.set_pattern(mask(0.5, 3))
    optimizer.state.pop(made.values)
    made.set_pattern(mask(0.5, 3), optimizer)
    train(made, optimizer, range(2))
    made.set_pattern(mask(0.5, 4), ())
    with pytest.raises(InvalidInput, match="has state for the old blocks"):
        train(made, optimizer, range(1))
    made.set_pattern(mask(0.5, 3), ())  # and is back
    train(made, optimizer, range(1))


def test_an_equal_pattern_changes_nothing() -> None:
    made = layer()
    optimizer = torch.optim.Adam(made.parameters())
    train(made, optimizer, range(2))
    x, y = data(3)
    loss = functional.mse_loss(made(x), y)
    before, pattern, version = snapshot(made, optimizer), made.pattern, made.values._version
    made.set_pattern(mask(0.5, 1))
    made.set_pattern(pattern)
    made.set_pattern(sk.BSR.from_dense(torch.ones(SHAPE), BLOCK, mask=mask(0.5, 1)).pattern)
    made.prune_(1.0).grow_(0, by="random")
    assert made.pattern is pattern
    assert made.values._version == version
    assert same(before, snapshot(made, optimizer))
    loss.backward()


@pytest.mark.parametrize("learns", [False, True], ids=["x fixed", "x learns"])
@pytest.mark.parametrize(
    "after", [mask(0.5, 2), mask(0.5, 1).flip(1), mask(1, 0)], ids=["other", "as many", "all"]
)
def test_an_old_loss_refuses_its_backward_pass(after: Tensor, learns: bool) -> None:
    made = layer()
    x, y = data(0)
    loss = functional.mse_loss(made(x.requires_grad_(learns)), y)
    made.set_pattern(after)
    with pytest.raises((InvalidInput, RuntimeError), match=r"compute the loss again|modified by an inplace"):
        loss.backward()
    assert made.values.grad is None
    functional.mse_loss(made(x), y).backward()
    assert made.values.grad is not None
    assert len(made.values.grad) == int(after.sum())


@pytest.mark.parametrize(
    ("given", "more", "match"),
    [
        (mask(0.5, 2).float(), {}, "pattern"),
        ([[True]], {}, "pattern"),
        (torch.ones(3, 5, dtype=torch.bool), {}, r"pattern has shape \(3, 5\)"),
        (torch.ones(SHAPE, dtype=torch.bool), {}, r"bool \(4, 5\)"),
        (sk.random_bsr(100, 70, 16, 0.5).pattern, {}, "in blocks of 16x16"),
        (mask(0.5, 2), {"optimizer": "adam"}, "must be a torch.optim.Optimizer"),
        (mask(0.5, 2), {"optimizer": [3]}, "must be a torch.optim.Optimizer"),
        (mask(0.5, 2), {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3))])}, "has no values"),
    ],
)
def test_wrong_arguments_are_refused(given: Any, more: dict[str, Any], match: str) -> None:
    made = layer()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(InvalidInput, match=match):
        made.set_pattern(given, **more)
    assert same(before, made.state_dict())


def test_values_that_cannot_change_are_refused() -> None:
    with pytest.raises(InvalidInput, match="meta device"):
        layer().to("meta").set_pattern(mask(0.5, 2))
    made, other = layer(), layer()
    other.values = made.values
    with pytest.raises(InvalidInput, match="share the values"):
        made.set_pattern(mask(0.5, 2))
    pruned = prune.identity(layer(), "values")
    with pytest.raises(InvalidInput, match="are not its Parameter"):
        pruned.set_pattern(mask(0.5, 2))
    for name, bad in (("keep", 2.0), ("keep", True), ("by", "x"), ("scope", "all")):
        with pytest.raises(InvalidInput, match=name):
            layer().prune_(**{"keep": 0.5, name: bad})
    for name, bad in (("blocks", 2.0), ("blocks", -1), ("blocks", True), ("by", "x"), ("generator", 3)):
        with pytest.raises(InvalidInput, match=name):
            layer().grow_(**{"blocks": 1, "by": "random", name: bad})
    with pytest.raises(InvalidInput, match="dense_gradients"):
        layer().grow_(1)


def test_sharded_values_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = layer()
        fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(InvalidInput, match="sharded"):
            made.set_pattern(mask(0.5, 2))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_values_are_carried_bit_for_bit(dtype: torch.dtype, inference: bool) -> None:
    made = layer(dtype=dtype)
    before = made.weight.detach().to_dense().clone()
    with torch.inference_mode(inference):
        made.set_pattern(mask(0.7, 2))
    assert made.values.dtype == dtype
    assert torch.equal(made.weight.detach().to_dense(), before * elements(mask(0.7, 2)))
    made.set_pattern(torch.zeros(GRID, dtype=torch.bool))
    assert made.values.shape == (0, *BLOCK)
    made.set_pattern(mask(0.7, 3))
    assert not made.values.any()
    made(torch.randn(3, SHAPE[1], dtype=dtype)).sum().backward()
    assert made.values.grad is not None
    assert made.values.grad.any()


def test_a_compiled_layer_follows() -> None:
    made = layer(dtype=torch.float32)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, SHAPE[1])
    for seed in (1, 2, 3):
        made.set_pattern(mask(0.5, seed))
        wanted = functional.linear(x, made.weight.detach().to_dense(), made.bias)
        torch.testing.assert_close(compiled(x), wanted)
        made.zero_grad()
        compiled(x).sum().backward()
        assert made.values.grad is not None
        assert made.values.grad.shape == made.values.shape


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.55])
@pytest.mark.parametrize("scope", ["row", "global"])
def test_pruning_keeps_the_largest_norms(scope: Any, keep: float) -> None:
    made = layer(torch.ones(GRID, dtype=torch.bool))
    wanted = sk.BSR.from_dense(made.weight.detach().to_dense(), BLOCK, keep=keep, scope=scope)
    assert made.prune_(keep, scope=scope) is made
    assert made.pattern.same_as(wanted.pattern)
    assert torch.equal(made.weight.detach().to_dense(), wanted.to_dense())


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "forward replaced"])
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_growing_takes_the_largest_gradients(activation: Any, wrapped: bool) -> None:
    made = layer(activation=activation)
    if wrapped:  # as accelerate does
        made.forward = functools.partial(BlockSparseLinear.forward, made)
    dense = made.weight.detach().to_dense().requires_grad_()
    residual = torch.randn(8, SHAPE[0], dtype=torch.float64)
    act = {None: lambda z: z, "gelu": functional.gelu, "relu": torch.relu}[activation]
    with sk.nn.dense_gradients(nn.Sequential(made)), sk.nn.dense_gradients(made):
        for i in range(2):  # two parts of a batch
            x, y = data(i)
            functional.mse_loss(made(residual=residual, input=x), y).backward()
            functional.mse_loss(act(functional.linear(x, dense, made.bias)) + residual, y).backward()
    assert not made._forward_hooks
    assert dense.grad is not None
    norms = (
        sk.BSR.from_dense(dense.grad, BLOCK, mask=torch.ones(GRID, dtype=torch.bool)).block_norms().view(GRID)
    )
    free = torch.where(mask(0.5, 1), -1, norms)
    best = free.view(-1).topk(4).indices
    made.grow_(4)
    wanted = mask(0.5, 1).view(-1).index_fill(0, best, True).view(GRID)
    assert made.pattern.same_as(sk.BSR.from_dense(torch.ones(SHAPE), BLOCK, mask=wanted).pattern)
    with pytest.raises(InvalidInput, match="dense_gradients"):  # it is taken once
        made.grow_(4)


def test_a_random_generator_decides() -> None:
    patterns = [
        layer().grow_(0.2, by="random", generator=torch.Generator().manual_seed(5)).pattern for _ in range(2)
    ]
    assert patterns[0].same_as(patterns[1])
    assert patterns[0].nnzb == int(mask(0.5, 1).sum()) + 4
    assert layer().grow_(100, by="random").weight.nnzb == 20


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_pruned_and_grown_in_a_mode_a_layer_learns(mode: Any) -> None:
    made = layer()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    train(made, optimizer, range(2))
    with mode():
        made.prune_(0.3).grow_(0.3, by="random", optimizer=optimizer)
    train(made, optimizer, range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("same", [False, True], ids=["other number", "as many"])
def test_a_new_pattern_waits_for_the_gpu_once(same: bool, capturable: bool) -> None:
    made = layer(dtype=torch.float32).cuda()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=not capturable, capturable=capturable)
    made(torch.randn(8, SHAPE[1], device="cuda")).square().sum().backward()
    optimizer.step()
    before = made.weight.detach().to_dense().clone()
    after = mask(0.5, 1).flip(1) if same else mask(0.5, 2)
    given = after.cuda()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            made.set_pattern(given, optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [x for x in found if "called a synchronizing" in str(x.message)]
    assert len(waits) == 1, [str(x.message) for x in waits]
    assert torch.equal(made.weight.detach().to_dense().cpu(), before.cpu() * elements(after))
    made(torch.randn(8, SHAPE[1], device="cuda")).square().sum().backward()
    optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that hands everything on to another one, as accelerate's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@pytest.mark.parametrize("given", ["none", "wrapper", "wrapped"])
def test_an_optimizer_in_a_wrapper_is_carried(given: str) -> None:
    made = layer()
    inner = torch.optim.AdamW(made.parameters(), lr=1e-2)
    outer = Wrapper(inner)
    train(made, outer, range(2))
    made.set_pattern(mask(0.5, 2), {"none": None, "wrapper": outer, "wrapped": inner}[given])
    assert inner.state[made.values]["exp_avg"].shape == made.values.shape
    train(made, outer, range(2))
    made.load_state_dict(layer(mask(0.5, 3)).state_dict())
    with pytest.raises(InvalidInput, match="has state for the old blocks"):
        made.set_pattern(mask(0.5, 4), outer)


@pytest.mark.parametrize("layer_first", [False, True], ids=["optimizer first", "layer first"])
def test_a_run_resumes_after_a_new_pattern(layer_first: bool) -> None:
    made, again = layer(), layer()
    mine, theirs = (torch.optim.AdamW(x.parameters(), lr=1e-2) for x in (made, again))
    train(made, mine, range(2))
    made.set_pattern(mask(0.5, 2))
    train(made, mine, range(2, 4))
    loads = [(again, copy.deepcopy(made.state_dict())), (theirs, copy.deepcopy(mine.state_dict()))]
    for target, state in loads if layer_first else reversed(loads):
        target.load_state_dict(state)
    train(made, mine, range(4, 6))
    train(again, theirs, range(4, 6))
    assert torch.equal(made.values, again.values)
