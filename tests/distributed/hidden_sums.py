"""Cases of the sum of gradients of x beside the gradients of weights, for the processes of test_tensor_parallel.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsek as sk
from sparsek.distributed import styles
from sparsek.nn import parallel_linear, replace, sums
from tests.distributed.split_layers import MLP, case, meshes, near

make = functools.partial(sk.nn.SparseLinear.from_dense, config="bsr", block=32, keep=0.5)


@contextmanager
def ordered() -> Iterator[None]:
    """Every sum before or behind all products."""
    none: Any = lambda *_: False  # noqa: E731
    with patch.object(styles, "learn_beside", none), patch.object(parallel_linear, "learn_beside", none):
        yield


@contextmanager
def noted() -> Iterator[list[str]]:
    """What begins and ends, in order."""
    found: list[str] = []
    reduce, sample = dist.all_reduce, sums.sampled

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            found.append("ended")
            self.work.wait()

    def all_reduce(*args: Any, **options: Any) -> Any:
        work = reduce(*args, **options)
        found.append("begun" if options.get("async_op") else "sum")
        return Waited(work) if options.get("async_op") else work

    def sampled(*args: Any) -> Tensor:
        found.append("weights")
        return sample(*args)

    with patch.object(dist, "all_reduce", all_reduce), patch.object(sums, "sampled", sampled):
        yield found


def gated_mlp() -> Any:
    mlp = MLP("bsr", False)
    replace.swap(mlp, {name: make(each) for name, each in mlp.named_children()})
    return mlp


def layer() -> Any:
    torch.manual_seed(8)
    return nn.Sequential(make(nn.Linear(128, 320, bias=False, dtype=torch.float64)))


def split(whole: Any, mesh: Any) -> Any:
    if isinstance(whole, nn.Sequential):
        sk.distributed.ColwiseSparse()._apply(whole[0], mesh)
        return whole
    return sk.distributed.GatedSparse()._apply(whole, mesh)


def results(model: Any, x: Tensor) -> list[Tensor]:
    """y, and the gradients of x and of the values that learn."""
    model.zero_grad()
    mine = x.clone().requires_grad_()
    y = model(mine)
    slopes = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device)
    (y * slopes.view(y.shape)).sum().backward()
    grads = [each.grad for each in model.parameters()]
    # Without its graph, whose nodes of leaves would stay on the stream of this call, and warn in a CUDA graph.
    return [y.detach(), mine.grad, *(each.to_local() for each in grads if each is not None)]  # type: ignore[list-item]


@case
def gradients_of_weights_are_computed_beside_a_sum_in_the_same_bits() -> None:
    mesh, draw = meshes()[1], torch.Generator().manual_seed(6)
    x = torch.randn(2, 5, 128, dtype=torch.float64, generator=draw)
    for whole, count in ((gated_mlp(), 2), (layer(), 1)):
        own = split(copy.deepcopy(whole), mesh)
        for given in (x, x.flatten(0, 1), x.transpose(0, 1)):
            with ordered():
                right = results(own, given)
            with noted() as found:
                mine = results(own, given)
            assert found[-count - 2 :] == ["begun", *["weights"] * count, "ended"], found
            assert len(mine) == len(right)
            assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
        first = next(own.parameters())
        first.requires_grad_(False)  # fixed, beside one that learns or alone
        with ordered():
            right = results(own, x)
        with noted() as found:
            mine = results(own, x)
        assert found.count("weights") == count - 1, found
        assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


@case
def gradients_of_gradients_beside_a_sum() -> None:
    mesh, draw = meshes()[1], torch.Generator().manual_seed(7)
    x = torch.randn(6, 128, dtype=torch.float64, generator=draw)
    whole = gated_mlp()
    own = split(copy.deepcopy(whole), mesh)
    found = []
    for model in (whole, own):
        mine = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(mine).square().sum(), mine, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), mine)))
    near(found[1], found[0])


@case
def dense_products_of_a_copied_x() -> None:
    """As the q, k and v of attention whose heads are split; one of them is not used."""
    group, draw = meshes()[1].get_group(), torch.Generator().manual_seed(9)
    x = torch.randn(2, 5, 64, dtype=torch.float64, generator=draw, requires_grad=True)
    weights = [torch.randn(32, 64, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(3)]
    assert sums.learn_beside(x, *weights)
    assert not sums.learn_beside(x.detach(), *weights)
    assert not sums.learn_beside(x, *(each.detach() for each in weights))
    shared = sums.copied(x, group)
    both = []
    for ys in (
        [nn.functional.linear(shared, each) for each in weights],
        sums.copied_products(x, weights, group),
    ):
        loss = ys[0].square().sum() + ys[2].sum()
        both.append((*ys, *torch.autograd.grad(loss, [x, *weights], allow_unused=True)))
    for a, b in zip(*both, strict=True):
        assert a is b is None or torch.equal(a, b)


@case
def gradients_that_are_not_asked_for_are_not_computed() -> None:
    mesh, x = meshes()[1], torch.randn(5, 128, dtype=torch.float64, requires_grad=True)
    own = split(layer(), mesh)
    y, weights = own(x).square().sum(), [*own.parameters()]
    with noted() as found:
        torch.autograd.grad(y, weights, retain_graph=True)
    assert found == ["weights"], found
    with noted() as found:
        torch.autograd.grad(y, x, retain_graph=True)
    assert found == ["begun", "ended"], found


class OnRankZero(torch.autograd.Function):
    """x, which has no gradient on other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if meshes()[1].get_local_rank() else grad


@case
def a_rank_without_a_gradient_takes_part_in_the_sum() -> None:
    own, draw = split(layer(), meshes()[1]), torch.Generator().manual_seed(11)
    x = torch.randn(5, 128, dtype=torch.float64, generator=draw)
    found = []
    for way in (ordered, noted):
        mine = x.clone().requires_grad_()
        with way():
            OnRankZero.apply(own(mine)).sum().backward()
        assert mine.grad is not None
        found.append(mine.grad)
    assert torch.equal(*found)


@case
def many_gradients_at_once_beside_a_sum() -> None:
    own, draw = split(gated_mlp(), meshes()[1]), torch.Generator().manual_seed(12)
    x = torch.randn(5, 128, dtype=torch.float64, generator=draw, requires_grad=True)
    y = own(x)
    many = torch.randn(3, *y.shape, dtype=y.dtype, generator=draw)
    (found,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    near(found, torch.stack([torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in many]))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.q, self.k, self.v = (
            make(nn.Linear(128, 256, bias=False, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        return self.q(x) + self.k(x) * self.v(x)


@case
def layers_that_read_one_dtensor_add_up_its_gradient_once() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

    mesh, layout = meshes()[1], Replicate()
    whole, draw = Three(), torch.Generator().manual_seed(10)
    x = torch.randn(6, 128, dtype=torch.float64, generator=draw)
    plan: dict[str, Any] = {name: sk.distributed.ColwiseSparse() for name in "qkv"}
    plan[""] = PrepareModuleInput(input_layouts=layout, desired_input_layouts=layout)
    own: Any = parallelize_module(copy.deepcopy(whole), mesh, plan)
    mine, right = (x.clone().requires_grad_() for _ in range(2))
    y = own(mine)
    with CommDebugMode() as seen:
        y.sum().backward()
    assert seen.get_total_counts() == 1, seen.get_comm_counts()
    whole(right).sum().backward()
    near(mine.grad, right.grad)


@case
def tensors_of_a_mesh_before_a_split_layer_get_whole_gradients() -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

    mesh, draw = meshes()[1], torch.Generator().manual_seed(13)
    x = torch.randn(6, 128, dtype=torch.float64, generator=draw)
    torch.manual_seed(13)
    whole = nn.Sequential(nn.Linear(128, 128, dtype=torch.float64), *layer())
    own = copy.deepcopy(whole)
    distribute_module(own[0], mesh)
    sk.distributed.ColwiseSparse(use_local_output=False)._apply(own[1], mesh)
    whole(x).square().sum().backward()
    y: Any = own(distribute_tensor(x, mesh, [Replicate()]))
    y.full_tensor().square().sum().backward()
    for mine, right in zip(own[0].parameters(), whole[0].parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        near(mine.grad.to_local(), right.grad)
