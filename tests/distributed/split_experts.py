"""Cases of packed experts that are spread over a mesh, for the processes of test_tensor_parallel.py."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.distributed.exchange import Exchange
from sparsek.nn import replace
from tests.distributed.split_layers import OPTIONS, RANKS, case, check_gradients, local, meshes, near, raises
from tests.sampling import sampled


class Experts(nn.Module):
    """Packed experts as those of transformers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = count, True, False
        self.is_transposed, self.is_concatenated, self.act_fn = False, True, nn.SiLU()
        torch.manual_seed(8)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 128, 64, dtype=torch.float64) / 8)
        self.down_proj = nn.Parameter(torch.randn(count, 64, 64, dtype=torch.float64) / 8)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self.act_fn(gate) * up


def sparse_experts(form: str) -> Any:
    whole, made = Experts(6), {}
    options = {**OPTIONS[form], **({"scope": "global"} if "bsr" in form else {})}
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(whole, name).detach().flatten(0, 1)
        weight = weight.float() if "fp8" in form else weight
        made[name] = sk.nn.SparseLinear.from_dense(weight, form, **options)
    replace.swap(whole, made)
    return whole


def spread_experts(form: str, mesh: Any, **options: Any) -> tuple[Any, Any]:
    """Packed experts of one process, and spread over a mesh."""
    from torch.distributed.tensor.parallel import parallelize_module

    whole = sparse_experts(form)
    return whole, parallelize_module(copy.deepcopy(whole), mesh, sk.distributed.ExpertsSparse(**options))


def routed(tokens: int, top: int, form: str = "") -> list[Any]:
    """Tokens, gradients, experts and weights; the expert 4 has no tokens, and some tokens have fewer experts."""
    draw = torch.Generator().manual_seed(9)
    kind = torch.float32 if "fp8" in form else torch.float64
    x, g = (torch.randn(tokens, 64, dtype=kind, generator=draw) for _ in range(2))
    index = torch.rand(tokens, 5, generator=draw).argsort(1)[:, :top]
    index[index == 4] = 6
    return [x, g, index, torch.rand(tokens, top, dtype=kind, generator=draw)]


def compare_experts(
    whole: Any, split: Any, given: list[Any], cut: Any, back: Any, loose: bool = False
) -> None:
    x, g, index, weights = given
    mine, of_mine = (cut(each).clone().detach().requires_grad_() for each in (x, weights))
    x, weights = (each.clone().requires_grad_() for each in (x, weights))
    for each in (*whole.parameters(), *split.parameters()):
        each.grad = None
    y = whole(x, index, weights)
    y.backward(g)
    found = split(mine, cut(index), of_mine)
    near(found, back(y), loose)
    found.backward(back(g))
    near(mine.grad, cut(x.grad), loose)
    near(of_mine.grad, cut(weights.grad), loose)
    if not loose:
        for name in ("gate_up_proj", "down_proj"):
            check_gradients(whole.get_submodule(name), split.get_submodule(name))


@case
def experts_of_ranks() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = meshes()[0]
    rank = mesh.get_local_rank()

    def cut(layout: Any) -> Any:
        return functools.partial(local, layout=layout, rank=rank, sizes=(0,) * RANKS)

    cases = itertools.product(OPTIONS, (Shard(0), Replicate()), (Shard(0), Replicate()))
    for form, of_x, of_y in sampled(cases, 2, of="experts"):
        whole, split = spread_experts(form, mesh, input_layouts=of_x, output_layouts=of_y, split="balanced")
        compare_experts(whole, split, routed(16, 2, form), cut(of_x), cut(of_y), "fp8" in form)
    # Any number of tokens of a rank, and none; of all of them for one rank, which has as many experts as others.
    whole, split = spread_experts(
        "bsr", mesh, input_layouts=Shard(0), output_layouts=Shard(0), split=(1, 3, 1, 1)
    )
    split = copy.deepcopy(split)
    for sizes, top in (((5, 0, 9, 2), 3), ((0, 0, 1, 0), 2), ((0, 0, 0, 0), 1)):
        given = routed(sum(sizes), top)
        if top == 2:
            given[2][:] = 2  # twice the same expert: the ranks of others get no token
        given[2] = given[2].to(torch.uint8) if top == 3 else given[2].int()
        mine: Any = functools.partial(lambda each, sizes: each.split(sizes)[rank], sizes=sizes)
        if sum(sizes):
            compare_experts(whole, split, given, mine, mine)
        else:
            assert split(*map(mine, (given[0], *given[2:]))).shape == (0, 64)
    x, _, index, weights = routed(8, 3)
    ranks_of_tokens = torch.bucketize(index, torch.tensor([1, 4, 5, 6]), right=True).tolist()
    sent, start = [], Exchange.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "start", lambda self, *x: (sent.append(len(self.send)), start(self, *x))[1])
        split(x, index, weights)
    assert sent[:3] == [sum(len({*each} - {RANKS}) for each in ranks_of_tokens)] * 3  # x, weights, index
    # 5 tokens as DTensors: 2, 2, 1 and 0.
    whole, split = spread_experts(
        "bsr", mesh, output_layouts=Shard(0), use_local_output=False, split="balanced"
    )
    x, _, index, weights = routed(5, 2)
    shards = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, index, weights)]
    for inputs in (shards, (x, index, weights)):
        found = split(*inputs)
        assert isinstance(found, DTensor)
        near(found.full_tensor(), whole(x, index, weights))
    even = sk.distributed.ExpertsSparse()
    raises("takes a SparseLinear, got Parameter; sk.sparsify_", lambda: even._apply(Experts(4), mesh))
    raises("do not divide by 4", lambda: even._apply(whole, mesh))
    raises("add up to 6", lambda: sk.distributed.ExpertsSparse(split=(3, 3))._apply(whole, mesh))


@case
def calls_of_experts_that_differ_are_refused_on_all() -> None:
    from torch.distributed.tensor import Shard

    mesh = meshes()[0]
    rank = mesh.get_local_rank()
    split = spread_experts("bsr", mesh, input_layouts=Shard(0), output_layouts=Shard(0), split="balanced")[1]
    x, _, index, weights = routed(2 + rank, 2)
    split(x, index, weights)
    raises("must be [T, D], [T, k]", lambda: split(x, index[: 2 + rank // 2], weights))
    raises(
        "on rank 1: top_k_index is torch.float64",
        lambda: split(x, index.double() if rank == 1 else index, weights),
    )
    raises(
        "'x' differ between ranks", lambda: split(x, index[:, : 1 + rank // 3], weights[:, : 1 + rank // 3])
    )
    raises("'x' differ between ranks", lambda: split(x.requires_grad_(rank == 2), index, weights))
    raises("x must be a dense", lambda: split(None if rank else x, index, weights))
    index[:] = 0  # an expert of the first rank, and yet all refuse
    raises("W is torch.float64 and x torch.float32", lambda: split(x.detach().float(), index, weights))
    raises("torch.func", lambda: torch.func.grad(lambda x: split(x, index, weights).sum())(x.detach()))
