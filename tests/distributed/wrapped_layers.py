"""Cases of layers under FSDP2 and DDP, for the processes of test_tensor_parallel.py."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparsek as sk
from sparsek.nn import replace
from tests.distributed.split_experts import routed, sparse_experts
from tests.distributed.split_layers import MLP, OPTIONS, RANKS, case, layer_of, near, raises
from tests.sampling import sampled


def model_of(form: str, kind: str, seed: int = 0) -> Any:
    if kind == "experts":
        return sparse_experts(form)
    if kind == "layers":
        first, last = layer_of(form, 256, 64, seed, activation="gelu"), layer_of(form, 64, 256, seed + 1)
        if form in ("semi24", "bsr24"):
            first.keep_pruned()
        return nn.Sequential(first, last)
    mlp = MLP(form, True)
    options = {**OPTIONS[form], **({"scope": "global"} if "bsr" in form else {})}
    make = functools.partial(sk.nn.SparseLinear.from_dense, config=form, **options)
    replace.swap(mlp, {name: make(each) for name, each in mlp.named_children()})
    return mlp


def operands_of(form: str, kind: str) -> tuple[Any, ...]:
    if kind == "experts":
        x, _, index, weights = routed(8, 2, form)
        return x, index, weights
    return (routed(8, 1, form)[0].repeat(1, 1 if kind == "layers" else 2),)


def sharding_meshes() -> list[Any]:
    """Of FSDP2: all ranks shard, or two halves, which replicate."""
    from torch.distributed.device_mesh import init_device_mesh

    shapes = sampled(((RANKS,), (2, 2)), 1, of="meshes")
    return [init_device_mesh("cpu", each, mesh_dim_names=("a", "b")[: len(each)]) for each in shapes]


@case
def every_form_learns_under_fsdp2_and_ddp_and_is_saved() -> None:
    """Of layers, gated MLPs and experts; other elements of 2:4 too. Checkpoints are loaded by half as many ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    four, two = (
        init_device_mesh("cpu", (RANKS,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"],
    )
    kinds = itertools.product(OPTIONS, ("layers", "gated", "experts"), ("fsdp2", "ddp"))
    cases = [each for each in kinds if "fp8" not in each[0] or each[2] == "fsdp2"]  # gloo broadcasts no FP8
    state: Any
    for form, kind, how in sampled(cases, 3, of="wrapped"):
        whole, loose, x = model_of(form, kind), "fp8" in form, operands_of(form, kind)
        own: Any = copy.deepcopy(whole)
        wrapped = fully_shard(own, mesh=four) if how == "fsdp2" else DistributedDataParallel(own)
        mine = tuple(each.chunk(RANKS)[rank] for each in x)
        learns = bool([*whole.parameters()])
        optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (whole, own) if learns]
        for at in range(3):
            near(wrapped(*mine), whole(*x).chunk(RANKS)[rank], loose)
            if not learns:
                continue
            whole(*x).square().mean().backward()
            wrapped(*mine).square().mean().backward()
            for each in optimizers:
                each.step()
            if at == 1 and kind == "layers" and form in ("semi24", "bsr24"):
                whole[0].choose_again(optimizer=optimizers[0])
                own[0].choose_again(optimizer=optimizers[1])
            for each in optimizers:
                each.zero_grad()
        if not learns:
            continue
        again: Any = fully_shard(model_of(form, kind, 2), mesh=two)
        other = torch.optim.AdamW(again.parameters(), 0.01)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        state = dict(zip("mo", get_state_dict(wrapped, optimizers[1]), strict=True))
        dcp.save(state, checkpoint_id=folder[0])
        state = dict(zip("mo", get_state_dict(again, other), strict=True))
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(again, other, model_state_dict=state["m"], optim_state_dict=state["o"])
        near(again(*mine), whole(*x).chunk(RANKS)[rank], loose)


@case
def elements_are_chosen_by_all_ranks_at_once() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    whole = layer_of("semi24", 64, 64)
    own: Any = fully_shard(copy.deepcopy(whole), mesh=sharding_meshes()[-1])
    scores = torch.rand((64, 64), generator=torch.Generator().manual_seed(rank))
    own.choose_again(scores)
    dist.broadcast(scores, 0)
    whole.choose_again(scores)
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near(own(x), whole(x))
    wrapped = DistributedDataParallel(copy.deepcopy(whole))
    wrapped(x)
    scores = torch.rand((64, 64), generator=torch.Generator().manual_seed(rank + RANKS))
    wrapped.module.choose_again(scores)
    dist.broadcast(scores, 0)
    whole.choose_again(scores)
    near(wrapped(x), whole(x))
    own.reshard()
    raises("scores", lambda: own.choose_again(scores if rank else None))
    raises("on rank 2: it is", lambda: own.choose_again(scores if rank != 2 else scores[1:]))
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    optimizer.state[own.values] = {"momentum_buffer": torch.zeros_like(own.values)} if rank == 1 else {}
    raises("momentum_buffer", lambda: own.choose_again(optimizer=optimizer))
    raises("before fully_shard", own.keep_pruned)
    raises("has no values of this layer", lambda: own.choose_again(optimizer=torch.optim.SGD([x], 0.1)))


@case
def patterns_change_under_fsdp2() -> None:

    for mesh in sharding_meshes():
        _change_patterns(mesh)


def _change_patterns(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    whole: Any = nn.Sequential(layer_of("bsr", 256, 64, activation="gelu"), layer_of("bsr", 60, 256, 1))
    split: Any = copy.deepcopy(whole)
    for each in (*split, split):
        fully_shard(each, mesh=mesh)
    torch.manual_seed(7)
    x = torch.randn(8, 64, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (whole, split)]

    def step() -> None:
        near(split(x), whole(x))
        whole(x).square().mean().backward()
        split(x.chunk(RANKS)[rank]).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    step()
    for own, other in zip(whole, split, strict=True):
        cells = torch.randperm(own.pattern.grid[0] * own.pattern.grid[1])
        mask = (cells < own.pattern.nnzb).view(own.pattern.grid)
        own.set_pattern(mask)
        other.set_pattern(mask)
        near(other.values.full_tensor(), own.values)
    step()
    layer, mask = split[0], whole[0].pattern.indptr.new_zeros(whole[0].pattern.grid, dtype=torch.bool)
    mask.view(-1)[rank // 2 : rank // 2 + whole[0].pattern.nnzb] = True
    raises("differ between ranks: rank 0 has 16 blocks", lambda: layer.set_pattern(mask))
    raises("on rank 3: pattern has shape", lambda: layer.set_pattern(mask if rank < 3 else mask[:1]))
    raises("room for the 16 blocks", lambda: layer.set_pattern(torch.ones_like(mask)))
    mask.view(-1)[rank // 2 : 1 + rank // 2] = False
    mask.view(-1)[1 : 1 + layer.pattern.nnzb] = True
    other = torch.optim.SGD(split.parameters(), 0.1, momentum=0.9)
    other.state[layer.values] = {"momentum_buffer": torch.zeros_like(layer.values)} if rank == 2 else {}
    raises("without state", lambda: layer.set_pattern(mask, other))
    schedules = [sk.nn.PatternSchedule(x, end=9, every=1, swapped=0.5) for x in (whole, split)]
    with schedules[0].gradients(), schedules[1].gradients():
        near(split(x), whole(x))
        whole(x).square().mean().backward()
        split(x.chunk(RANKS)[rank]).square().mean().backward()
    for schedule, optimizer in zip(schedules, optimizers, strict=True):
        assert schedule.step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for own, other in zip(whole, split, strict=True):
        assert own.pattern.same_as(other.pattern)
        near(other.values.full_tensor(), own.values)
    step()
    sk.distributed.check_patterns(split)
    split[0].unshard()
    raises("reshard", lambda: layer.set_pattern(mask))
    split[0].reshard()


@case
def patterns_of_ranks_agree() -> None:
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(layer_of("bsr", 64, 64), layer_of("semi24", 64, 64)))
    sk.distributed.check_patterns(model)
    layer = model.module[0]
    layer.prune_(0.25)
    sk.distributed.check_patterns(model)
    layer.grow_(2 if rank == 1 else 4, by="random", generator=torch.Generator().manual_seed(0))
    raises(
        "'module.0' differ between ranks: rank 0 has 64x64 with", lambda: sk.distributed.check_patterns(model)
    )
    layer.set_pattern((torch.arange(2) == rank % 2).expand(4, 2))
    quiet = DistributedDataParallel(model.module, init_sync=False)
    quiet.broadcast_buffers = False
    schedule = sk.nn.PatternSchedule(model.module, end=4, keep=0.1)
    quiet(torch.randn(2, 64, dtype=torch.float64))
    raises("'0' differ between ranks", schedule.step)
