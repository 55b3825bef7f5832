"""Attention over processes of gloo, against one process in float64."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import sparsek as sk
from sparsek.core import handshake
from sparsek.core.errors import InvalidInput, MeshError
from sparsek.core.handshake import agreed
from sparsek.distributed.exchange import Exchange
from sparsek.distributed.pieces import key_pieces
from sparsek.distributed.plan import once
from tests.distributed.mesh_cases import (
    ALIGNED,
    BATCH,
    CASES,
    DIM,
    EDGES,
    PACKED,
    RANKS,
    V_DIM,
    WHOLE,
    N,
    alone,
    diffusion_over_ranks,
    flex_alone,
    flex_over_ranks,
    learned,
    lists_of,
    masks,
    of_dtensors,
    operands,
    over_ranks,
    packed_alone,
    packed_over_ranks,
    ulysses_alone,
    ulysses_over_ranks,
)
from tests.distributed.ranks import run_ranks
from tests.refusals import refused

if importlib.util.find_spec("transformers"):
    from tests.distributed import mesh_models as models
else:
    models = None


def _refused(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _faults(rank: int, mesh: Any) -> dict[str, Any]:
    """Calls that one rank makes otherwise: what each rank gets to hear."""
    d, made, world = sk.distributed, masks(), dist.group.WORLD
    causal = made["causal"]
    plan = d.plan(causal, world)
    q, k, v = (d.shard_sequence(x, plan) for x in operands(N, N)[:3])
    odd = rank == 2

    def attend(*given: Any, **more: Any) -> Any:
        return d.attention(*given, plan, **more)

    def second_order(plan: Any) -> Any:
        x = [d.shard_sequence(x, plan).requires_grad_() for x in operands(N, N)[:3]]
        return torch.autograd.grad(d.attention(*x, plan).sum(), x, create_graph=True)

    flat, rows = init_device_mesh("cpu", (RANKS,)), operands(N, N)[:3]

    def placed(*placements: Any, over: Any = flat, **more: Any) -> Any:
        given = [DTensor.from_local(x, over, placements, run_check=False) for x in rows]
        return d.attention(*given, plan, **more)

    lists = sk.TokenLists(lists_of().indices[:, :, :5], 64)
    tokens = d.plan(made["rule of tokens"], world, "heads", length=N)
    by_heads = d.plan(made["policy"], world, "heads", length=320)
    odd_head = torch.randn(3, 1, 4, 128, 8, dtype=torch.float64)
    odd_head[0, :, 3] = math.nan
    calls: dict[str, Callable[[], Any]] = {
        "masks": lambda: d.plan(made["causal" if odd else "documents"], world),
        "no mask": lambda: d.plan(7 if odd else causal, world),
        "ways": lambda: d.plan(causal, world, "heads" if odd else "gather"),
        "dims": lambda: d.plan(causal, mesh, "gather"),
        "shape": lambda: attend(q[:, :, 1:] if odd else q, k, v),
        "dtype": lambda: attend(*(x.float() if odd else x for x in (q, k, v))),
        "gradient": lambda: attend(q.clone().requires_grad_(odd), k, v),
        "option": lambda: attend(q, k, v, softcap=1.0 if odd else 2.0),
        "both plan and mesh": lambda: attend(q, k, v, mesh=mesh if odd else None),
        "flag": lambda: attend(q, k, v, check=1 if odd else True),
        "other mask": lambda: d.attention(q, k, v, made["map" if odd else "causal"], mesh=world),
        "lists": lambda: d.attention(q, k, v, lists, plan=plan),
        "rule by gather": lambda: d.attention(q, k, v, made["policy"], plan=plan),
        "rule of split groups": lambda: d.attention(
            *([d.shard_sequence(x, tokens) for x in operands(N, N)[:3]]), tokens
        ),
        "slopes by gather": lambda: attend(q, k, v, alibi_slopes=torch.ones(4)),
        "exact ends": lambda: d.attention(q, k, v, made["members"], plan=plan, exact=True),
        "vmap": lambda: torch.func.vmap(lambda x: attend(x, k, v))(torch.stack((q, q))),
        "NaN of a head": lambda: d.attention(
            *odd_head[:, :, :, : by_heads._parts.queries.tokens[rank]], by_heads
        ),
        "second order": lambda: second_order(plan),
        "second order of heads": lambda: second_order(d.plan(causal, world, "heads")),
        "one DTensor": lambda: attend(
            distribute_tensor(rows[0], flat, [Shard(2)], src_data_rank=None) if odd else q, k, v
        ),
        "whole": lambda: placed(Replicate()),
        "sum": lambda: placed(Partial()),
        "split heads": lambda: placed(Shard(1)),
        "another mesh": lambda: placed(Shard(2), Shard(2), over=mesh),
        "a plan's shards": lambda: attend(
            *(
                DTensor.from_local(x, flat, [Shard(2)], run_check=False, shape=y.shape, stride=y.stride())
                for x, y in zip((q, k, v), rows, strict=True)
            )
        ),
        "heads of a mask": lambda: d.attention(
            *(distribute_tensor(x, mesh, [Shard(2), Shard(1)]) for x in rows),
            d.plan(made["map of heads of k"], mesh["sequence"]),
        ),
        "FP8": lambda: d.attention(
            *(distribute_tensor(x, flat, [Shard(2)]).to(torch.float8_e4m3fn) for x in rows), plan
        ),
        "documents of a mask": lambda: attend(q[:1], k[:1], v[:1], cu_seqlens=EDGES),
        "documents of items": lambda: d.attention(q, k, v, sk.MaskPolicy(), plan=plan, cu_seqlens=EDGES),
        "other documents": lambda: d.attention(
            q[:1], k[:1], v[:1], sk.MaskPolicy(), plan=plan, cu_seqlens=ALIGNED if odd else EDGES
        ),
        "owners": lambda: d.plan(causal, world, owner=torch.arange(N) % 4),
        "other owners": lambda: d.plan(causal, world, "heads", owner=torch.arange(N) * (0 if odd else 1) % 4),
        "owners of both": lambda: d.plan(causal, mesh, "both", owner=torch.zeros(N, dtype=torch.int32)),
        "few owners": lambda: d.plan(causal, world, "heads", owner=torch.zeros(7, dtype=torch.int32)),
        "topk of owners": lambda: d.attention(
            *(torch.ones(1, h, len(range(rank, N, 4)), 8) for h in (4, 2, 2)),
            sk.MaskPolicy(topk=1),
            plan=d.plan(causal, world, "heads", owner=torch.arange(N) % 4),
        ),
        "ulysses by gather": lambda: d.ulysses(lambda q, k, v: q, q, k, v, plan),
        "ulysses of a rank": lambda: d.ulysses(
            lambda q, k, v: q[:, :odd], *(d.shard_sequence(x, tokens) for x in rows), tokens
        ),
        "unshard whole": lambda: d.unshard_sequence(distribute_tensor(rows[0], flat, [Replicate()]), plan),
        "shard heads": lambda: d.shard_sequence(distribute_tensor(rows[0], flat, [Shard(1)]), plan),
        "unshard": lambda: d.unshard_sequence(q[:, :, 1:] if odd else q, plan),
        "other error": lambda: agreed("a call", [world], lambda: str(1 // (rank != 2))),
    }
    return {name: _refused(call) for name, call in calls.items()}


WAYS_SENT = ("gather", "heads", "both")


def _received(rank: int, how: str, mesh: Any) -> tuple[int, int]:
    """Bytes that a forward pass in bf16 gets from other ranks, without lse, and those that the plan counts."""
    d, mask, total = sk.distributed, masks()["map of heads of k"], 0
    plan, start = d.plan(mask, mesh, how), Exchange._all_to_all

    def counted(self: Exchange, out: Tensor, given: Tensor, to: Any, of: Any) -> Any:
        nonlocal total
        if out.dtype == torch.bfloat16:
            total += (sum(to) - to[dist.get_rank(self.group)]) * out.shape[1] * out.itemsize
        return start(self, out, given, to, of)

    q, k, v = (d.shard_sequence(x, plan).bfloat16() for x in operands(N, N)[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_all_to_all", counted)
        d.attention(q, k, v, plan)
    return total, int(plan.received(BATCH, 4, 2, DIM, V_DIM)[rank])


def _rounded_once() -> list[tuple[float, float]]:
    """Errors of dk and dv in bf16 of keys that all ranks see, over ranks and by one process."""
    mask, given, d = masks()["causal"], [x.bfloat16() for x in operands(N, N)[:4]], sk.distributed
    plan = d.plan(mask, dist.group.WORLD)

    def of_keys(attend: Any, operands: list[Tensor], **more: Any) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in operands[:3])
        return torch.autograd.grad(attend(q, k, v, **more), (k, v), operands[3])

    exact, one = (of_keys(sk.attention, each, mask=mask) for each in ([x.double() for x in given], given))
    shards = [
        d.shard_sequence(x, plan, of="keys" if at in (1, 2) else "queries") for at, x in enumerate(given)
    ]
    parts = of_keys(d.attention, shards, mask=plan)
    wholes = [d.unshard_sequence(x, plan, of="keys") for x in parts]
    pairs = [[x.double() - right for x in xs] for *xs, right in zip(wholes, one, exact, strict=True)]
    return [(float(a.norm()), float(b.norm())) for a, b in pairs]


def _merged_once() -> tuple[float, float]:
    """Errors of out in bf16 of keys in as many pieces as ranks, over ranks and by one process."""
    mask, d = sk.BlockMask.full(N, block=64), sk.distributed
    plan, (q, k, v) = d.plan(mask, dist.group.WORLD), (x.bfloat16() for x in operands(N, N)[:3])
    exact, one = sk.attention(q.double(), k.double(), v.double(), mask), sk.attention(q, k, v, mask)
    mine, keys, values = (d.shard_sequence(x, plan) for x in (q, k, v))
    whole = d.unshard_sequence(d.attention(mine, keys, values, plan, pieces=RANKS), plan)
    return float((whole.double() - exact).norm()), float((one.double() - exact).norm())


def _whole_and_bits(rank: int, mesh: Any) -> dict[str, Any]:
    d, world, mask = sk.distributed, dist.group.WORLD, masks()["causal"]
    plan = d.plan(mask, world)
    found: dict[str, Any] = {}
    q, k, v = (d.shard_sequence(x, plan) for x in operands(N, N)[:3])
    with torch.inference_mode():  # what the plan keeps serves training later
        first = d.attention(q, k, v, plan, pieces=2)
    again = [d.attention(q, k, v, plan, pieces=2, check=False)]
    again += [d.attention(q, k, v, mask, mesh=world, pieces=2) for _ in range(2)]
    # A model with a plan has copies, which share it.
    again.append(copy.deepcopy(torch.nn.ModuleList([d.MeshFlexAttention(plan, pieces=2)]))[0](q, k, v))
    found["same bits"] = [torch.equal(first, each) for each in again]
    half = [x.float().requires_grad_() for x in (q, k, v)]
    mixed = [
        distribute_tensor(x.to(dtype), init_device_mesh("cpu", (RANKS,)), [Shard(2)])
        for x, dtype in zip(operands(N, N)[:3], (torch.float32, torch.bfloat16, torch.float32), strict=True)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        out = d.attention(*half, plan)
        found["same bits"].append(d.attention(*mixed, plan).dtype == torch.bfloat16)
    out.sum().backward()
    found["autocast"] = out.dtype, (out - first).abs().max().item(), [x.grad is not None for x in half]
    by_heads = d.plan(mask, world, "heads")
    for given in (by_heads, d.plan(masks()["policy"], world, "heads", length=N)):
        # Attention alone is run again, where ranks have no heads.
        one = [d.shard_sequence(x, given).requires_grad_() for x in operands(N, N, 1, 1)[:3]]
        outs = d.attention(*one, given), checkpoint(d.attention, *one, given, use_reentrant=False)
        grads = [torch.autograd.grad(out.square().sum(), one) for out in outs]
        found["same bits"] += map(torch.equal, *grads)
    whole = operands(N, N)
    shards = [d.shard_sequence(x, by_heads) for x in (*whole[:3], whole[3], whole[4])]
    slopes = learned(
        lambda q, k, v, **more: d.attention(q, k, v, by_heads, **more),
        [*shards, whole[5]],
        sinks=False,
        slopes=True,
    )
    found["slopes"] = [d.unshard_sequence(x, by_heads) for x in slopes[:3]]
    d.positions(plan).add_(1)  # the caller's own
    places = d.positions(plan)
    found["positions"] = places, d.unshard_sequence(places[None], plan, dim=1)
    for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn):
        whole = (torch.arange(N)[None] % 2).to(dtype)
        again = d.unshard_sequence(d.shard_sequence(whole, plan, dim=1), plan, dim=1)
        found["same bits"].append(torch.equal(again.float(), whole.float()))
    every = distribute_tensor(torch.arange(float(N))[None], init_device_mesh("cpu", (RANKS,)), [Replicate()])
    if rank == 0:  # nothing is sent
        compiled = torch.compile(lambda x: d.shard_sequence(x, plan, dim=1) * 2, backend="eager")(every)
        found["same bits"].append(
            torch.equal(compiled.to_local(), d.shard_sequence(every, plan, dim=1).to_local() * 2)
        )
    # A loss of the whole result on every rank: the gradient of a shard is the sum over ranks.
    x = torch.ones(1, len(places), 2, dtype=torch.float64, requires_grad=True)
    d.unshard_sequence(x, plan, dim=-2).mul(rank + 1).sum().backward()
    found["sum"] = x.grad
    plan = d.plan(masks()["map of heads of k"], world)
    (piece,) = key_pieces(plan, BATCH, 2, torch.device("cpu"), 1)
    found["gathered"] = piece.length, int(plan._seen[rank].sum(-1).max()) * 64
    found["received"] = [_received(rank, how, mesh if how == "both" else world) for how in WAYS_SENT]
    return found


def _work(rank: int) -> dict[Any, Any]:
    made, world = masks(), dist.group.WORLD
    parts = {4: world, 1: [dist.new_group([each]) for each in range(RANKS)][rank]}
    parts[2] = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    parts[3] = [dist.new_group([0, 1, 2]), dist.new_group([3])][rank // 3]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    found: dict[Any, Any] = {}
    for case in CASES:
        name, way, sinks, heads, ranks = case
        found[case] = over_ranks(made[name], way, mesh if "both" in way else parts[ranks], sinks, heads)
    found["flex"] = flex_over_ranks(parts[2])
    found["ulysses"] = ulysses_over_ranks(parts[3])
    found["diffusion"] = diffusion_over_ranks(init_device_mesh("cpu", (RANKS,)))
    if models is not None:
        found["models"] = models.gemma_over_ranks(world), models.bert_over_ranks(world)
    found["packed"] = {name: packed_over_ranks(name, world, mesh) for name in PACKED}
    found["rounded"], found["merged"] = _rounded_once(), _merged_once()
    found["DTensors"] = {name: of_dtensors(name, mesh) for name in WHOLE}
    found |= {"faults": _faults(rank, mesh), **_whole_and_bits(rank, mesh)}
    if rank == RANKS - 1:
        return found  # and ends, while others go on
    plan = sk.distributed.plan
    found["gone"] = _refused(lambda: plan(made["causal"], world))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(RANKS, _work)


def _same(found: list[Tensor], right: list[Tensor], budget: float = 1e-12) -> None:
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * budget, atol=budget)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_way_and_mask_is_one_process(case: Any, found: list[dict[Any, Any]]) -> None:
    name, _, sinks, heads, _ = case
    for each in found:
        _same(each[case], alone(name, sinks, heads))


def test_gradients_of_keys_that_ranks_share_are_rounded_once(found: list[dict[Any, Any]]) -> None:
    for mine, whole in (pair for each in found for pair in each["rounded"]):
        assert 0 < mine < 1.05 * whole


def test_the_output_of_pieces_is_rounded_once_more_than_its_parts(found: list[dict[Any, Any]]) -> None:
    for mine, whole in (each["merged"] for each in found):
        assert 0 < mine < 1.05 * 2**0.5 * whole


def test_slopes_by_heads_are_those_of_one_process(found: list[dict[Any, Any]]) -> None:
    mask = masks()["causal"]
    right = learned(
        lambda q, k, v, **more: sk.attention(q, k, v, mask, **more), operands(N, N), sinks=False, slopes=True
    )
    for each in found:
        _same(each["slopes"], right[:3])


@pytest.mark.parametrize("name", PACKED)
def test_lists_and_policies_of_packed_documents(name: str, found: list[dict[Any, Any]]) -> None:
    right = packed_alone(name)
    for each in found:
        _same(each["packed"][name], right)


def test_models_of_transformers(found: list[dict[Any, Any]]) -> None:
    if models is None:
        pytest.skip("transformers is not installed")
    gemma, bert = models.gemma_alone(), models.bert_alone()
    for each in found:
        _same(each["models"][0], gemma, 1e-7)  # losses and norms are in float32
        _same([each["models"][1]], [bert])


def test_modules_that_call_flex_attention(found: list[dict[Any, Any]]) -> None:
    right = flex_alone()
    for each in found:
        for of_one in each["flex"].values():
            _same(of_one, right)


def test_any_attention_with_heads_exchanged(found: list[dict[Any, Any]]) -> None:
    right = ulysses_alone()
    for each in found:
        _same(each["ulysses"], right)


def test_a_policy_under_the_context_parallelism_of_diffusers(found: list[dict[Any, Any]]) -> None:
    for each in found:
        errors, *reasons = each["diffusion"]
        assert max(errors) < 1e-12
        assert reasons == ["called with a mask over ranks", "called over ranks that do not split the text"]


@pytest.mark.parametrize("name", WHOLE)
def test_dtensors_are_whole_and_stay_so(name: str, found: list[dict[Any, Any]]) -> None:
    for each in found:
        whole, alike = each["DTensors"][name]
        assert alike
        _same(whole, alone(WHOLE[name][0], False))


ON_ALL = {  # what every rank hears, and what the odd one
    "masks": "sk.distributed.plan: the calls of ranks 2 differ from that of rank 0",
    "no mask": "must be a BlockMask of the whole sequence, or a policy",
    "ways": "the calls of ranks 2 differ from that of rank 0; rank 0 has a plan by gather",
    "dims": "mesh has 2 dims; take one of them",
    "shape": "rank 2 has ",
    "dtype": "sk.distributed.attention: the calls of ranks 2 differ",
    "gradient": "gradients [False, False, False, False]",
    "option": "softcap 2.0",
    "both plan and mesh": "pass one of a plan as mask",
    "flag": "check is 1",
    "other mask": "rank 2 has 128 queries and 128 keys",
    "lists": "queries: those of sk.distributed.shard_sequence(indices, plan)",
    "rule by gather": 'plan with how="heads"',
    "rule of split groups": "take at most 2 ranks for heads",
    "slopes by gather": 'plan with how="heads"',
    "exact ends": "its window and sinks are counted from the ends",
    "vmap": "does not go through torch.func",
    "NaN of a head": "NaN",
    "second order": "no gradients of gradients",
    "second order of heads": "no gradients of gradients",
    "one DTensor": "k is a Tensor and others are DTensors",
    "whole": "it must have Shard(2)",
    "sum": "it must have Shard(2)",
    "split heads": "it must have Shard(2)",
    "another mesh": "do not have the ranks of the plan's mesh",
    "a plan's shards": "pass shards of a plan as plain tensors",
    "heads of a mask": "the mask has batch 1 and heads 2",
    "FP8": "torch.float8_e4m3fn",
    "documents of a mask": "a BlockMask keeps documents apart itself",
    "documents of items": "q has 2 batch items",
    "other documents": "the calls of ranks 2 differ",
    "owners": "owner cuts units of 64 tokens",
    "other owners": "the calls of ranks 2 differ",
    "owners of both": 'owner does not go with how="both"',
    "few owners": "owner has 7 ranks from 0 to 0; it must have one of 4 for each of 297 tokens",
    "topk of owners": "tokens the owners of the plan cut",
    "ulysses by gather": 'how="heads"',
    "ulysses of a rank": "it must return a tensor",
    "unshard whole": "it must have Shard(2)",
    "shard heads": "it must have Shard(2)",
    "unshard": "along dim 2",
}


@pytest.mark.parametrize("name", ON_ALL)
def test_if_one_rank_refuses_all_do(name: str, found: list[dict[Any, Any]]) -> None:
    for each in found:
        kind, text = each["faults"][name]
        assert kind == "InvalidInput"
        assert ON_ALL[name] in text


def test_lists_of_other_queries_hear_how_many_their_rank_has(found: list[dict[Any, Any]]) -> None:
    for each in found:
        _, text = each["faults"]["lists"]
        mine = re.search(r"this rank's q \[2, 4, (\d+), 8\]", text)
        assert mine is not None
        assert f"and {mine[1]} queries" in text


def test_errors_that_are_not_ours_are_mesh_errors_elsewhere(found: list[dict[Any, Any]]) -> None:
    for rank, each in enumerate(found):
        kind, text = each["faults"]["other error"]
        assert kind == ("ZeroDivisionError" if rank == 2 else "MeshError")
        assert rank == 2 or text.startswith("a call: rank 2 raised an error")


def test_a_rank_that_ended_is_an_error_on_the_others(found: list[dict[Any, Any]]) -> None:
    for rank, each in enumerate(found[:-1]):
        kind, text = each["gone"]
        assert kind == MeshError.__name__
        assert f"rank {rank} of {RANKS}: the check of sk.distributed.plan failed" in text


def test_the_bits_of_a_world_repeat(found: list[dict[Any, Any]]) -> None:
    assert all(all(each["same bits"]) for each in found)


def test_autocast_casts_as_attention_does(found: list[dict[Any, Any]]) -> None:
    for each in found:
        dtype, error, grads = each["autocast"]
        assert dtype == torch.bfloat16
        assert error < 0.05
        assert grads == [True] * 3


def test_plans_count_what_arrives_and_only_seen_blocks_do(found: list[dict[Any, Any]]) -> None:
    for each in found:
        assert all(sent == counted for sent, counted in each["received"])
        assert each["gathered"][0] == each["gathered"][1]


def test_shards_have_positions_and_gradients(found: list[dict[Any, Any]]) -> None:
    every = torch.cat([each["positions"][0] for each in found])
    assert torch.equal(every.sort().values, torch.arange(N))
    for each in found:
        assert torch.equal(each["positions"][1][0], torch.arange(N))
        assert (each["sum"] == sum(range(RANKS + 1))).all()


def test_a_group_without_a_backend_of_the_cpu_compares_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    both = [torch.device("cuda"), torch.device("cpu")]
    for devices, right in ((both, torch.device("cpu")), (both[:1], torch.device("cuda", 3))):
        assert handshake._device(SimpleNamespace(_device_types=devices)) == right


def test_a_plan_keeps_no_tensors_of_fakes_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}

    def make() -> Tensor:
        return torch.from_numpy(np.arange(3)).clone()

    with FakeTensorMode():
        assert isinstance(once(kept, "places", make), FakeTensor)
    assert not kept
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        once(kept, "places", make)
    assert not kept
    torch.func.vmap(lambda x: x + once(kept, "places", make))(torch.ones(2, 3))
    torch.func.grad(lambda x: (x * once(kept, "more", make)).sum())(torch.ones(3))
    assert [type(each) for each in kept.values()] == [Tensor] * 2
    assert not any(map(is_functorch_wrapped_tensor, kept.values()))
    with FakeTensorMode():
        assert isinstance(once(kept, "places", make), FakeTensor)


def test_deals_are_even() -> None:
    n = 131072
    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < n:
        lengths.append(min(n - sum(lengths), int(draw.integers(50, 3000))))
    scores = torch.rand((1, 2, 1024, 1024), generator=torch.Generator().manual_seed(0))
    for mask in (
        sk.BlockMask.causal(n),
        sk.BlockMask.block_diagonal(lengths),
        sk.BlockMask.sliding_window(n, 4096, sinks=128),
        sk.BlockMask.topk(scores, 64, seq_len=n),
        sk.BlockMask.from_block_map(scores < 0.125, n),
    ):
        for ranks in (2, 3, 16):
            plan = sk.distributed.plan(mask, ranks)
            assert plan.imbalance <= 1.03, plan
            assert plan._parts.queries.tokens.sum() == n


def test_a_window_stays_with_its_neighbours() -> None:
    n, mask = 65536, sk.BlockMask.sliding_window(65536, 4096, sinks=128)
    for ranks in (2, 8, 64):
        plan = sk.distributed.plan(mask, ranks)
        assert plan.received(1, 8, 8, 64).max() <= 2 * 8 * 64 * 2 * (4096 + 256)
        assert plan.imbalance <= 1.05
        assert plan._parts.queries.tokens.max() <= 1.05 * n / ranks


def test_plans_without_processes_are_only_looked_at() -> None:
    plan = sk.distributed.plan(sk.MaskPolicy(topk=4), (2, 2), "both", length=1000)
    assert plan.rank is None
    assert "chosen by topk=4 in each call" in plan.explain()
    assert "bits: within rounding of one process, which plans" in plan.explain()
    for how, ranks, needs in (
        ("gather", 3, "a GPU, exact=True;"),
        ("heads", 3, "a GPU, at least 3 heads of k;"),
        ("both", (3, 2), "a GPU, at least 2 heads of k, exact=True;"),
    ):
        assert needs in sk.distributed.plan(sk.BlockMask.causal(1000), ranks, how).explain()
    ends = masks()["members"]
    assert "takes no window and sinks" in sk.distributed.plan(ends, 2).explain()
    assert "takes no window and sinks" not in sk.distributed.plan(ends, 2, "heads").explain()
    with pytest.raises(InvalidInput, match="without processes"):
        sk.distributed.positions(plan)
    q, k, v, *_ = operands(1000, 1000)
    with pytest.raises(InvalidInput, match="without processes"):
        sk.distributed.attention(q, k, v, plan)
    chosen = plan.with_mask(sk.BlockMask.sliding_window(1000, 100))
    assert chosen.received(1, 4, 2, 64).max() <= plan.received(1, 4, 2, 64).max()
    with pytest.raises(InvalidInput, match="in units of 128 tokens"):
        plan.with_mask(sk.BlockMask.causal(1001))


def test_a_module_over_a_mesh_refuses_other_plans_and_two_masks() -> None:
    q, k, v, *_ = operands(64, 64)
    plan, module = sk.distributed.plan(sk.BlockMask.causal(64), 2), sk.distributed.MeshFlexAttention
    refused("sk.distributed.plan", module, plan.mask)
    attend = module(plan)
    refused("without processes", attend, q, k, v)
    refused("pass a plan", module(), q, k, v, block_mask=plan.mask)
    refused("give one", attend, q, k, v, block_mask=plan, attention_masks=plan)
    refused("softcap=", attend, q, k, v, score_mod=lambda score, *at: score)
