"""Sparse layers that are split over a mesh, by four processes that run all cases, against one process in float64."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsek as sk
import tests.distributed.wrapped_layers  # its cases  # noqa: F401
from sparsek.core.errors import InvalidInput, MeshError
from sparsek.nn import gated, parallel_linear, replace
from sparsek_bench.engine.run import captured
from tests.distributed import hidden_sums  # and its cases
from tests.distributed.ranks import run_ranks
from tests.distributed.split_experts import routed, sparse_experts, spread_experts  # and its cases
from tests.distributed.split_layers import (
    CASES,
    MLP,
    OPTIONS,
    RANKS,
    case,
    check_gradients,
    compare,
    layer_of,
    layouts,
    local,
    meshes,
    near,
    of_half,
    own_half,
    raises,
)
from tests.sampling import sampled

STYLES = (("ColwiseSparse", 256, 128), ("RowwiseSparse", 128, 256))


@case
def every_storage() -> None:
    cases = sampled(itertools.product(STYLES, OPTIONS), 4, of="storages")
    for (name, rows, columns), form in cases[own_half() :: 2]:
        compare(getattr(sk.distributed, name)(), form, rows, columns, meshes()[1])


@case
def every_layout() -> None:
    cases = sampled(itertools.product(STYLES, layouts(), layouts(), (True, False)), 6, of="layouts")
    for (name, rows, columns), inputs, outputs, plain in cases[own_half() :: 2]:
        style = getattr(sk.distributed, name)(
            input_layouts=inputs, output_layouts=outputs, use_local_output=plain
        )
        compare(style, "bsr", rows, columns, meshes()[1])


@case
def uneven_splits() -> None:
    mesh = meshes()[0]
    sizes = (("ColwiseSparse", 200, 128), ("RowwiseSparse", 128, 200))
    splits = ("balanced", (32, 96, 32, 40))
    cases = itertools.product(sizes, layouts(), layouts(), splits)
    for (name, rows, columns), inputs, outputs, split in sampled(cases, 2, of="uneven splits"):
        style = getattr(sk.distributed, name)(input_layouts=inputs, output_layouts=outputs, split=split)
        compare(style, "bsr", rows, columns, mesh)
    compare(sk.distributed.ColwiseSparse(split="balanced"), "bsr24", 320, 128, mesh)
    compare(sk.distributed.RowwiseSparse(split="balanced"), "semi24", 128, 320, mesh)
    style = sk.distributed.ColwiseSparse(split="balanced", use_local_output=False)
    raises("shards of one size", lambda: compare(style, "bsr", 200, 128, mesh))


@case
def gated_mlps() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = meshes()[1]
    either = (False, Replicate()), (True, Shard(1))
    bias, layout = either[own_half()]
    for form in sampled(("bsr", "bsr_fp8", "semi24", "bsr24"), 2, of="gated MLPs"):
        whole, loose = MLP(form, bias), "fp8" in form
        options = {**OPTIONS[form], **({"scope": "global"} if "bsr" in form else {})}
        make = functools.partial(sk.nn.SparseLinear.from_dense, config=form, **options)
        replace.swap(whole, {name: make(each) for name, each in whole.named_children()})
        style = sk.distributed.GatedSparse(input_layouts=layout, output_layouts=layout)
        split: Any = parallelize_module(copy.deepcopy(whole), mesh, style)
        cut: Any = functools.partial(local, layout=layout, rank=mesh.get_local_rank(), sizes=(0, 0))
        draw = torch.Generator().manual_seed(4)
        x, g = (torch.randn(2, 8, 128, dtype=torch.float64, generator=draw) for _ in range(2))
        x, g = (x.float(), g.float()) if loose else (x, g)
        with torch.no_grad():
            near(split(cut(x)), cut(whole(x)), loose)
            assert (gated._parts(split, split._form, x) is None) == bias
        mine = cut(x).clone().requires_grad_()
        x.requires_grad_()
        y = whole(x)
        y.backward(g)
        found = split(mine)
        near(found, cut(y), loose)
        found.backward(cut(g))
        near(mine.grad, cut(x.grad), loose)
        for name, each in whole.named_children() if not loose else ():
            check_gradients(each, split.get_submodule(name))


@of_half(0)
def compiled_gated_mlps_trace_nothing_of_their_weights() -> None:
    from torch._dynamo.testing import CompileCounter

    mesh, counter, draw = meshes()[1], CompileCounter(), torch.Generator().manual_seed(4)
    mlps = [MLP("bsr", False) for _ in range(2)]
    for mlp, keep in zip(mlps, (0.3, 0.7), strict=True):
        make = functools.partial(sk.nn.SparseLinear.from_dense, config="bsr", block=32, keep=keep)
        replace.swap(mlp, {name: make(each) for name, each in mlp.named_children()})
    whole = nn.Sequential(*mlps, nn.ReLU())
    x = torch.randn(8, 128, dtype=torch.float64, generator=draw)
    right, split = whole(x), copy.deepcopy(whole)
    for each in (split[0], split[1]):
        sk.distributed.GatedSparse()._apply(each, mesh)
    compiled = torch.compile(split, backend=counter)
    with torch.no_grad():
        near(compiled(x), right)
    assert counter.frame_count <= 2, counter.frame_count  # an activation, and no product
    learned = x.clone().requires_grad_()
    near(compiled(learned), right)


@case
def parts_of_gated_mlps_are_left_to_the_caller() -> None:
    from torch.distributed.tensor import Partial

    mesh, parts = meshes()[0], sk.distributed.GatedSparse(output_layouts=Partial())
    draw = torch.Generator().manual_seed(4)
    make = functools.partial(sk.nn.SparseLinear.from_dense, config="bsr", block=32, keep=0.5)

    def made(bias: bool) -> Any:
        torch.manual_seed(3)
        mlp = MLP("bsr", bias)
        replace.swap(mlp, {name: make(each) for name, each in mlp.named_children()})
        return mlp

    x, g = (torch.randn(8, 128, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(2))
    whole, split = made(False), parts._apply(made(False), mesh)
    mine = x.detach().clone().requires_grad_()
    y, part = whole(x), split(mine)
    total = part.detach().clone()
    assert not torch.equal(total, y)
    dist.all_reduce(total, group=mesh.get_group())
    near(total, y)
    for result in (y, part):
        result.backward(g.detach())
    near(mine.grad, x.grad)
    raises("with a bias of down", lambda: parts._apply(made(True), mesh))
    raises("must be Replicate() or", lambda: sk.distributed.GatedSparse(input_layouts=Partial()))
    raises("must be Replicate() or", lambda: sk.distributed.RowwiseSparse(output_layouts=Partial()))


@of_half(0)
def beside_torchs_styles_with_an_optimizer() -> None:
    """Losses of two steps, with clipped gradients, and sharded checkpoints of model and optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = meshes()[1]

    def model() -> Any:
        torch.manual_seed(5)
        return nn.Sequential(
            layer_of("bsr", 256, 64, activation="gelu"),
            layer_of("bsr", 64, 256, 1),
            nn.Linear(64, 32, dtype=torch.float64),
            nn.ReLU(),
            nn.Linear(32, 16, dtype=torch.float64),
        )

    plan = {
        "0": sk.distributed.ColwiseSparse(split=(96, 160)),
        "1": sk.distributed.RowwiseSparse(split=(96, 160)),
        "2": ColwiseParallel(),
        "4": RowwiseParallel(),
    }
    whole = model()
    split: Any = parallelize_module(model(), mesh, plan)
    x = torch.randn(8, 64, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (whole, split)]
    norms: list[Any] = []
    for _ in range(2):
        for each, optimizer in zip((whole, split), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(x).square().sum()
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            norms.append((loss.detach(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
        near(norms[-1][0], norms[-2][0])
        near(norms[-1][1], norms[-2][1])
    for at in (0, 1):
        near(split[at].gathered().values, whole[at].values)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, group=mesh.get_group(), group_src=0)
    state, of_optimizer = get_state_dict(split, optimizers[1])
    dcp.save(
        {"model": state, "optimizer": of_optimizer}, checkpoint_id=folder[0], process_group=mesh.get_group()
    )
    other: Any = parallelize_module(model(), mesh, plan)
    again = torch.optim.AdamW(other.parameters(), 0.01)
    state, of_optimizer = get_state_dict(other, again)
    dcp.load(
        {"model": state, "optimizer": of_optimizer}, checkpoint_id=folder[0], process_group=mesh.get_group()
    )
    set_state_dict(other, again, model_state_dict=state, optim_state_dict=of_optimizer)
    for each, optimizer in ((split, optimizers[1]), (other, again)):
        optimizer.zero_grad()
        each(x).square().sum().backward()
        optimizer.step()
    near(other(x), split(x))
    split[:2].load_state_dict(model()[:2].state_dict())  # of one process
    near(split[:2](x), model()[:2](x))


@case
def what_cannot_be_split() -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh, two = meshes()
    rank = dist.get_rank()
    style = sk.distributed.ColwiseSparse()
    raises("do not divide by 4 ranks", lambda: style._apply(layer_of("bsr", 48 + 32, 64), mesh))
    raises("fewer than 4 ranks", lambda: style._apply(layer_of("bsr", 48, 64), mesh))
    raises(
        "multiples of 16",
        lambda: sk.distributed.ColwiseSparse(split=(8, 24, 16, 16))._apply(layer_of("bsr", 64, 64), mesh),
    )
    raises("takes a SparseLinear", lambda: style._apply(nn.Linear(4, 4), mesh))
    raises("GatedSparse takes", lambda: sk.distributed.GatedSparse()._apply(nn.Linear(4, 4), mesh))
    raises("one dimension", lambda: style._apply(layer_of("bsr", 64, 64), init_device_mesh("cpu", (2, 2))))
    raises("differ between ranks", lambda: style._apply(layer_of("bsr", 64, 64, seed=rank // 3), mesh))
    raises(
        "must call the same",
        lambda: (style if rank else sk.distributed.RowwiseSparse())._apply(layer_of("bsr", 64, 128), mesh),
    )
    layer = layer_of("bsr", 64, 64) if rank != 2 else nn.Linear(64, 64)
    raises("on rank 2", lambda: style._apply(layer, mesh)) if rank != 2 else raises(
        "SparseLinear", lambda: style._apply(layer, mesh)
    )
    layer = layer_of("bsr", 64, 64)
    layer.forward = layer.forward
    raises("a forward of its own", lambda: style._apply(layer, mesh))
    split = style._apply(layer_of("bsr", 64, 64), mesh)
    raises("split over a mesh already", lambda: style._apply(split, mesh))
    x = torch.randn(4, 64, dtype=torch.float64)
    raises("x is a DTensor of", lambda: split(DTensor.from_local(x, two, [Replicate()], run_check=False)))
    raises("takes 64 features", lambda: split(x[:, :32]))
    three = DeviceMesh("cpu", [0, 1, 2])
    if rank == 3:
        raises("is not in", lambda: style._apply(layer_of("bsr", 96, 64), three))
    else:
        style._apply(layer_of("bsr", 96, 64), three)


@case
def calls_that_differ_between_ranks_are_refused_on_all() -> None:
    """Else a rank would wait in a collective for others that never call it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, rank = meshes()[0], dist.get_rank()
    torch.manual_seed(10)
    x = torch.randn(2, 5, 128, dtype=torch.float64)
    whole = layer_of("bsr", 64, 128)
    for name in ("ColwiseSparse", "RowwiseSparse"):
        style = getattr(sk.distributed, name)(input_layouts=Shard(1), output_layouts=Shard(1))
        split: Any = style._apply(copy.deepcopy(whole), mesh)
        split(x[:, :2])
        raises("'x' differ between ranks", functools.partial(split, x[:, : 1 + rank // 3]))
        raises("on rank 2: x is", functools.partial(split, x[:, :2, : 128 - 32 * (rank == 2)]))
        raises("on rank 1: x must be", functools.partial(split, x[:, :2] if rank != 1 else None))
        raises("learns", functools.partial(split, x[:, :2].clone().requires_grad_(rank == 3)))
        with torch.set_grad_enabled(rank != 0):
            raises("no gradients", functools.partial(split, x[:, :2]))
        shards = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()  # of 2, 2, 1 and 0 tokens
        y = split(shards)
        near(y, whole(x).tensor_split((2, 4, 5), 1)[rank])
        y.sum().backward()
        learned = x.clone().requires_grad_()
        whole(learned).sum().backward()
        near(shards.grad.full_tensor(), learned.grad)  # type: ignore[union-attr]
    mlp = MLP("bsr", False)
    make = functools.partial(sk.nn.SparseLinear.from_dense, config="bsr", block=32, keep=0.5)
    replace.swap(mlp, {name: make(each) for name, each in mlp.named_children()})
    split = sk.distributed.GatedSparse()._apply(mlp, mesh)
    wide = torch.randn(4, 128, dtype=torch.float64)
    near(split(x=wide), split(wide))
    raises("'x' differ between ranks", lambda: split(wide[: 1 + rank // 2]))
    raises("on rank 2: MLP, which", lambda: split(wide, wide) if rank == 2 else split(wide))


@case
def state_dicts_of_other_splits_are_refused() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    mesh, two = meshes()
    whole: Any = nn.Sequential(layer_of("bsr", 128, 64), layer_of("semi24", 64, 256))
    values, styles = whole.state_dict(), (sk.distributed.ColwiseSparse, sk.distributed.RowwiseSparse)

    def split(of: Any, first: Any = "even", second: Any = "even") -> Any:
        made = copy.deepcopy(whole)
        for style, part, layer in zip(styles, (first, second), made, strict=True):
            style(split=part)._apply(layer, of)
            for each in layer.parameters():
                each.data.zero_()
        return made

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    own = split(mesh)
    own.load_state_dict(values)
    dcp.save(get_model_state_dict(own), checkpoint_id=folder[0])
    again = split(mesh)
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(again, state)
    torch.manual_seed(11)
    x = torch.randn(3, 64, dtype=torch.float64)
    near(again[0](x), own[0](x))
    complete = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in own.state_dict().items()
    }
    again = split(mesh)
    again.load_state_dict(complete)
    for one, each in zip(whole, again, strict=True):
        near(each.gathered().to_dense(), one.to_dense())
    others = split(mesh, (16, 48, 32, 32)), split(two)
    for other in others:
        for given in (own.state_dict(), complete):
            try:
                other.load_state_dict(given)
            except RuntimeError as error:
                assert "parts" in str(error), error
            else:
                raise AssertionError("loaded")
    for other in (*others, copy.deepcopy(whole)):  # whose tensors have other shapes
        state = other.state_dict()
        try:
            dcp.load(state, checkpoint_id=folder[0])
            other[0](x)
        except (InvalidInput, dcp.api.CheckpointException) as error:
            assert "parts" in str(error) or "ize" in str(error), error
        else:
            raise AssertionError("loaded")


@case
def full_state_dicts_fit_any_number_of_ranks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole: Any = nn.Sequential(layer_of("bsr", 256, 64, activation="gelu"), layer_of("semi24", 64, 256))
    torch.manual_seed(12)
    x = torch.randn(8, 64, dtype=torch.float64)

    def split(mesh: Any, sizes: Any = "even") -> Any:
        made = copy.deepcopy(whole)
        sk.distributed.ColwiseSparse(split=sizes)._apply(made[0], mesh)
        sk.distributed.RowwiseSparse(split=sizes)._apply(made[1], mesh)
        return made

    def step(model: Any, optimizer: Any, rows: Any) -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = split(meshes()[0])
    sharded = split(both["tp"])
    fully_shard(sharded, mesh=both["dp"])
    own = torch.optim.AdamW(first.parameters(), 0.01)
    step(first, own, x)
    state = sk.distributed.full_state_dict(first, own)
    one = torch.optim.AdamW(whole.parameters(), 0.01)
    others = [copy.deepcopy(whole), split(meshes()[1], (128, 128)), sharded]
    step(whole, one, x)
    assert state["model"].keys() == whole.state_dict().keys()
    for name, each in whole.state_dict().items():
        near(state["model"][name], each)
    step(whole, one, x)
    for model, rows in zip(others, (x, x, x.chunk(2)[both["dp"].get_local_rank()]), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        sk.distributed.load_full_state_dict(model, state, optimizer)
        step(model, optimizer, rows)
        near(model(x), whole(x))
    layer = whole[0]
    layer.set_pattern(
        torch.arange(layer.pattern.grid[0] * layer.pattern.grid[1]).view(layer.pattern.grid) % 4 < 3
    )
    state = sk.distributed.full_state_dict(whole, one)
    more = split(meshes()[1])  # of another number of blocks
    optimizer = torch.optim.AdamW(more.parameters(), 0.01)
    sk.distributed.load_full_state_dict(more, state, optimizer)
    for each in ((whole, one), (more, optimizer)):
        step(*each, x)
    near(more(x), whole(x))
    raises("full_state_dict", lambda: sk.save_model(more, tempfile.gettempdir()))
    raises("with model and optimizer", lambda: sk.distributed.load_full_state_dict(whole, {"model": {}}, one))


@case
def layers_on_meta_are_split_and_loaded() -> None:
    mesh = meshes()[1]
    for form in (("semi24", "bsr"), ("semi24_fp8", "bsr24"))[own_half()]:
        whole = layer_of(form, 128, 128)
        x = torch.randn(3, 128, dtype=torch.float32 if "fp8" in form else torch.float64)
        for assign in (False, True):
            own = copy.deepcopy(whole).to("meta")
            split: Any = sk.distributed.ColwiseSparse(output_layouts=layouts()[0])._apply(own, mesh)
            split = split if assign else split.to_empty(device="cpu")
            split.load_state_dict(whole.state_dict(), assign=assign)
            near(split(x), whole(x))
    placeholder = sk.nn.SparseLinear.from_dense(nn.Linear(64, 64, device="meta"), "bsr", block=16, keep=0.5)
    other = sk.nn.SparseLinear.from_dense(nn.Linear(64, 64), "bsr", block=16, keep=0.5, scope="global")
    split = sk.distributed.ColwiseSparse()._apply(placeholder, mesh)
    with pytest.raises(RuntimeError, match="before it is split"):
        split.load_state_dict(other.state_dict(), assign=True)


@case
def patterns_of_split_layers_stay() -> None:
    for style in (sk.distributed.ColwiseSparse(), sk.distributed.RowwiseSparse()):
        layer: Any = style._apply(layer_of("bsr", 128, 128), meshes()[0])
        schedule = sk.nn.PatternSchedule(layer, end=4, every=1, swapped=0.5, by="random")
        for work in (
            lambda layer=layer: layer.set_pattern(torch.ones(8, 4, dtype=torch.bool)),
            lambda layer=layer: layer.prune_(0.1),
            lambda layer=layer: layer.grow_(1, by="random"),
            schedule.step,
            lambda layer=layer: sk.nn.dense_gradients(layer).__enter__(),
            lambda layer=layer: layer.to_dense(),
        ):
            raises("gathered", work)


def _work(rank: int) -> str:
    """The fault of a case, or ""."""
    meshes()  # which all ranks make together
    for name, each in CASES.items():
        try:
            each()
        except BaseException:
            return f"{name}, rank {rank}: {traceback.format_exc()}"  # the others then fail in a collective
    return _gone(rank)


def _gone(rank: int) -> str:
    """A rank that makes no call; and two that end, before a backward pass and in a forward. Others get a MeshError."""
    from torch.distributed.tensor import Shard

    brief: Any = dist.new_group()
    mesh = meshes()[1]
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=300), brief)
    if rank:
        with pytest.raises(MeshError, match=f"rank {rank} of 4: the check of check_patterns failed"):
            sk.distributed.check_patterns(nn.Linear(2, 2), brief)
    if rank < 2:
        own_tokens = {"input_layouts": Shard(0), "output_layouts": Shard(0)}
        split = spread_experts("bsr", mesh, **own_tokens)[1]
        x, _, index, weights = routed(4, 2)
        y = split(x.requires_grad_(), index, weights)
    else:
        split = sk.distributed.RowwiseSparse()._apply(layer_of("bsr", 64, 64), mesh)
        x = torch.randn(4, 32, dtype=torch.float64)
    if rank == 1:
        return ""
    if rank == 3:
        parallel_linear.linear = lambda *_: 1 / 0
        with pytest.raises(ArithmeticError):
            split(x)
        return ""
    faults = "the exchange of the tokens of experts" if rank == 0 else "the exchange of [4, 64], P(sum) to R"
    with pytest.raises(MeshError, match=re.escape(f"rank 0 of 2: {faults}")):
        y.sum().backward() if rank == 0 else split(x)
    with pytest.raises(MeshError, match=f"rank 0 of 2: the check of {type(split).__name__} failed"):
        split(x, index, weights) if rank == 0 else split(x)
    with pytest.raises(MeshError, match=f"rank {rank} of 4: the check of check_patterns failed"):
        sk.distributed.check_patterns(split)
    return ""


def test_four_processes_compute_what_one_does() -> None:
    faults = [each for each in run_ranks(RANKS, _work) if each]
    assert not faults, "\n".join(faults)


def test_a_model_without_values_has_no_state() -> None:
    with pytest.raises(InvalidInput, match="weight has no values yet"):
        sk.distributed.full_state_dict(torch.nn.LazyLinear(3))
    with pytest.raises(InvalidInput, match="it must be what full_state_dict returns"):
        sk.distributed.load_full_state_dict(torch.nn.Linear(3, 3), {"model": {}, "optimizer": 3})


def test_balanced_groups_are_as_light_as_possible() -> None:
    from sparsek.distributed.styles import balanced

    generator = torch.Generator().manual_seed(0)
    for count in range(1, 6):
        weights = torch.randint(0, 5, (count,), generator=generator).tolist()
        for parts in range(1, count + 1):
            found = balanced(weights, parts)
            assert (len(found), sum(found), min(found) > 0) == (parts, count, True)
            ends = [(0, *each, count) for each in itertools.combinations(range(1, count), parts - 1)]
            best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise(e)) for e in ends)
            at = [sum(found[:i]) for i in range(parts + 1)]
            assert max(sum(weights[a:b]) for a, b in itertools.pairwise(at)) == best


@pytest.mark.gpu
def test_one_gpu_over_nccl_has_the_experts_of_one_process() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    here = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=here)
    try:
        options = {"input_layouts": Shard(0), "output_layouts": Shard(0)}
        whole: Any = sparse_experts("semi24").to(here, torch.bfloat16)
        split: Any = copy.deepcopy(whole)
        sk.distributed.ExpertsSparse(**options)._apply(split, init_device_mesh("cuda", (1,)))
        x, g, index, weights = (each.to(here) for each in routed(200, 2))
        given = [each.bfloat16().requires_grad_() for each in (x, weights)]
        y, found = (each(given[0], index, given[1]) for each in (whole, split))
        torch.testing.assert_close(found, y, rtol=0.02, atol=0.02)
        grads = (torch.autograd.grad(each, given, g.bfloat16()) for each in (y, found))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_one_gpu_over_nccl_hides_sums_in_the_same_bits_and_in_a_graph() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    here = torch.device("cuda", 0)
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=here)
    try:
        mesh = init_device_mesh("cuda", (1,))
        x = torch.randn(2, 96, 128, dtype=torch.bfloat16, device=here)
        for whole in (hidden_sums.gated_mlp(), hidden_sums.layer()):
            own: Any = hidden_sums.split(whole.to(here, torch.bfloat16), mesh)
            with hidden_sums.ordered():
                right = hidden_sums.results(own, x)
            with hidden_sums.noted() as found:
                mine = hidden_sums.results(own, x)
            assert found[-1] == "ended"
            replay, (in_graph,) = captured([lambda own=own: hidden_sums.results(own, x)], here)
            replay()
            for both in (mine, in_graph):
                assert len(both) == len(right)
                assert all(torch.equal(a, b) for a, b in zip(both, right, strict=True))
    finally:
        dist.destroy_process_group()
