"""Attention over ranks and by one process, in every form: what tests compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

import sparsek as sk
from sparsek.distributed.dtensors import _exchanges
from sparsek.integrations.diffusers_layers import Around, ContextRanks, Form, Processor

RANKS = 4
N = 64 * 5 - 23  # uneven tokens, and units that the ranks do not divide
BATCH, DIM, V_DIM = 2, 8, 4


def map_of(heads: int, batch: int = 1) -> sk.BlockMask:
    side = -(-N // 64)
    found = torch.rand((batch, heads, side, side), generator=torch.Generator().manual_seed(0)) < 0.4
    found[:, :, 3] = False  # queries that see nothing
    return sk.BlockMask.from_block_map(found, N, block=64)


def lists_of(heads: int = 2, **options: Any) -> sk.TokenLists:
    draw = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, N // 64 + 1, (1, heads, N, 3), generator=draw, dtype=torch.int32)
    return sk.TokenLists(indices, 64, torch.randint(0, 4, (1, heads, N), generator=draw), **options)


@functools.lru_cache
def masks() -> dict[str, Any]:
    """Masks of every form, for 2 batch items, 4 heads of q and 2 of k; the rules choose in each call."""
    dense = torch.rand((1, 1, N, N), generator=torch.Generator().manual_seed(2)) < 0.4
    return {
        "causal": sk.BlockMask.causal(N, block=64),
        "documents": sk.BlockMask.block_diagonal([200, 31, N - 231], block=64),
        "cu_seqlens": sk.MaskPolicy(window=70, block=64).packed(torch.tensor([0, 90, 90, N])),
        "window": sk.BlockMask.sliding_window(N, 100, sinks=3, block=(64, 128)),
        "map": map_of(1),
        "map of heads of k": map_of(2),
        "map of heads of q": map_of(4, 2),
        "bits": sk.BlockMask.from_dense(dense, block=64),
        "members": lists_of(window=70, sinks=5).mask_for(operands(N, N)[0], operands(N, N)[1]),
        "few": sk.BlockMask.causal(100, block=64),
        "one unit": sk.BlockMask.full(50),
        "other lengths": sk.BlockMask.causal(q_len=130, kv_len=N, block=64),
        "lists": lists_of(),
        "lists with a window": lists_of(4, window=70, sinks=5),
        "topk": sk.MaskPolicy(topk=2, window=10, sinks=1, block=64),
        "policy": sk.policies.MeanTopK(topk=2, block=64),
        "rule of tokens": sk.policies.MoBAGate(topk=1, block=64),
    }


def lengths_of(mask: Any) -> tuple[int, int]:
    return (mask.q_len, mask.kv_len) if isinstance(mask, sk.BlockMask) else (N, N)


def operands(queries: int, keys: int, q_heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """q, k, v, a gradient of out and of lse, and sinks, of the whole sequence."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(BATCH, q_heads, queries, DIM), (BATCH, kv_heads, keys, DIM), (BATCH, kv_heads, keys, V_DIM)]
    shapes += [(BATCH, q_heads, queries, V_DIM), (BATCH, q_heads, queries), (q_heads,)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def learned(
    attend: Callable[..., Any], given: list[Tensor], *, sinks: bool, slopes: bool = False
) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and sinks."""
    *tensors, grad, grad_lse, sink = given
    tensors = [x.detach().requires_grad_() for x in (*tensors, sink)]
    more = {"alibi_slopes": torch.arange(1.0, tensors[0].shape[1] + 1) / 64} if slopes else {}
    out, lse = attend(
        *tensors[:3], return_lse=True, softcap=5.0, sink_logits=tensors[3] if sinks else None, **more
    )
    grad_lse = grad_lse.masked_fill(lse.isinf(), 0)
    found = torch.autograd.grad((out, lse), tensors[: 4 if sinks else 3], (grad, grad_lse))
    return [out.detach(), lse.detach(), *found]


Heads = tuple[int, int]


@functools.lru_cache
def alone(name: str, sinks: bool, heads: Heads = (4, 2)) -> list[Tensor]:
    """What one process has."""
    mask = masks()[name]
    given = operands(*lengths_of(mask), *heads)
    return learned(lambda q, k, v, **more: sk.attention(q, k, v, mask, **more), given, sinks=sinks)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("gather", {}),
    "pieces": ("gather", {"pieces": 3}),
    "exact": ("gather", {"exact": True}),
    "heads": ("heads", {}),
    "both": ("both", {}),
    "both exact": ("both", {"exact": True}),
}


def over_ranks(mask: Any, way: str, mesh: Any, sinks: bool, heads: Heads = (4, 2)) -> list[Tensor]:
    """The same, of shards that are put together again."""
    d, (how, options) = sk.distributed, WAYS[way]
    if isinstance(mask, sk.TokenLists):
        plan = d.plan(sk.MaskPolicy(block=128), mesh, how, length=N)
        indices, counts = (d.shard_sequence(x, plan) for x in (mask.indices, mask.counts))
        mask = sk.TokenLists(indices, mask.block, counts, window=mask.window, sinks=mask.sinks)
        options = {"plan": plan, **options}
    else:
        plan = mask = d.plan(mask, mesh, how, length=None if isinstance(mask, sk.BlockMask) else N)
    q, k, v, grad, grad_lse, sink = operands(plan.mask.q_len, plan.mask.kv_len, *heads)
    q, grad, grad_lse = (d.shard_sequence(x, plan) for x in (q, grad, grad_lse))
    k, v = (d.shard_sequence(x, plan, of="keys") for x in (k, v))
    found = learned(
        lambda q, k, v, **more: d.attention(q, k, v, mask, **more, **options),
        [q, k, v, grad, grad_lse, sink],
        sinks=sinks,
    )
    for each in found[5:]:
        for group in plan._groups:
            dist.all_reduce(each, group=group)
    whole = [d.unshard_sequence(x, plan, check=False) for x in found[:3]]
    return [*whole, *(d.unshard_sequence(x, plan, of="keys", check=False) for x in found[3:5]), *found[5:]]


CASES = [  # mask, way, with sinks, heads; and the ranks of a part of the world
    ("causal", "gather", True, (4, 2), 4),
    ("causal", "pieces", True, (4, 2), 4),
    ("causal", "exact", True, (4, 2), 4),
    ("causal", "heads", True, (4, 2), 4),
    ("causal", "both exact", True, (4, 2), 4),
    ("causal", "heads", True, (1, 1), 4),  # ranks without heads
    ("causal", "both", True, (1, 1), 4),
    ("documents", "pieces", False, (4, 2), 4),
    ("cu_seqlens", "both", False, (4, 2), 4),
    ("window", "exact", False, (4, 2), 4),
    ("map", "pieces", True, (4, 2), 4),
    ("map of heads of k", "gather", False, (4, 2), 4),
    ("map of heads of q", "exact", False, (4, 2), 4),
    ("map of heads of q", "heads", True, (4, 4), 3),  # heads that ranks do not divide
    ("map of heads of q", "both", False, (4, 2), 4),
    ("bits", "gather", False, (4, 2), 2),
    ("members", "pieces", True, (4, 2), 4),
    ("few", "exact", False, (4, 2), 4),  # ranks without tokens
    ("few", "heads", False, (6, 2), 4),  # and other numbers of heads of q
    ("one unit", "both exact", True, (4, 2), 4),
    ("other lengths", "gather", False, (4, 2), 3),
    ("other lengths", "exact", False, (4, 2), 2),
    ("causal", "pieces", False, (4, 2), 1),
    ("lists", "exact", False, (4, 2), 4),
    ("lists", "both", False, (4, 2), 4),
    ("lists with a window", "gather", True, (4, 2), 4),
    ("lists with a window", "pieces", True, (4, 2), 3),
    ("lists with a window", "heads", False, (4, 2), 3),
    ("topk", "gather", False, (4, 2), 4),
    ("topk", "both", True, (4, 2), 4),
    ("topk", "heads", False, (6, 2), 3),  # heads of q that share a head of k on several ranks
    ("policy", "heads", False, (4, 2), 4),
    ("rule of tokens", "heads", False, (4, 2), 2),
]


EDGES = torch.tensor([0, 90, 90, 131, N])
ALIGNED = torch.tensor([0, 128, 192, N])
PACKED = {  # lists and policies of packed documents: a rule, a way, and cu_seqlens
    "gather": ("lists", "gather", EDGES),
    "pieces": ("lists", "pieces", EDGES),
    "exact": ("lists", "exact", EDGES),
    "both": ("lists with a window", "both", EDGES),
    "ends in pieces": ("lists with a window", "pieces", EDGES),
    "heads": ("lists with a window", "heads", EDGES),
    "whole blocks": ("lists", "gather", ALIGNED),
    "topk": ("topk", "both", EDGES),
    "topk by heads": ("topk", "heads", EDGES),
    "by token": ("rule of tokens", "heads", EDGES),
}


def packed_over_ranks(name: str, world: Any, mesh: Any) -> list[Tensor]:
    """out, lse and gradients of packed documents, whole."""
    d, (rule, way, edges) = sk.distributed, PACKED[name]
    rule, (how, options) = masks()[rule], WAYS[way]
    plan = d.plan(sk.MaskPolicy(block=128).packed(edges), mesh if how == "both" else world, how)
    if isinstance(rule, sk.TokenLists):
        assert rule.counts is not None
        rule = replace(
            rule, indices=d.shard_sequence(rule.indices, plan), counts=d.shard_sequence(rule.counts, plan)
        )
    shards = [d.shard_sequence(x, plan) for x in packed_operands(name)]

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return d.attention(q, k, v, rule, plan=plan, cu_seqlens=edges, **more, **options)

    found = learned(attend, [*shards, torch.zeros(4, dtype=torch.float64)], sinks=False)
    return [d.unshard_sequence(x, plan, check=False) for x in found]


def packed_operands(name: str) -> list[Tensor]:
    """q, k, v and gradients of one batch item; a policy for each token has whole groups of heads on each rank."""
    return [x[:1] for x in operands(N, N, 4, 4 if name == "by token" else 2)[:5]]


def packed_alone(name: str) -> list[Tensor]:
    rule, _, edges = PACKED[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, lse = sk.attention_varlen(q, k, v, edges, None, masks()[rule], **more)
        return out.transpose(0, 1)[None], lse[None]

    return learned(attend, [*packed_operands(name), torch.zeros(4, dtype=torch.float64)], sinks=False)


WHOLE = {  # DTensors: a mask, a way, and the placements of q, k and v on the mesh of 2 x 2
    "flat": ("causal", "pieces", [Shard(2)]),
    "heads": ("window", "heads", [Shard(2)]),
    "both": ("causal", "both exact", [Shard(2), Shard(2)]),
    "beside heads": ("causal", "gather", [Shard(2), Shard(1)]),
    "beside items": ("cu_seqlens", "exact", [Shard(2), Shard(0)]),
    "few": ("few", "gather", [Shard(2)]),
    "other lengths": ("other lengths", "gather", [Shard(2), Replicate()]),
    "lists": ("lists", "gather", [Shard(2)]),
}


def of_dtensors(name: str, mesh: Any) -> tuple[list[Tensor], bool]:
    """out, lse and gradients of DTensors, whole; and whether all of these are placed as the operands are."""
    d, (mask, way, placements) = sk.distributed, WHOLE[name]
    mask, (how, options) = masks()[mask], WAYS[way]
    if len(placements) == 1:
        mesh = init_device_mesh("cpu", (RANKS,))
    over = mesh["sequence"] if len(placements) == 2 and how != "both" else mesh
    lengths, given = lengths_of(mask), operands(*lengths_of(mask))
    if isinstance(mask, sk.TokenLists):
        plan = d.plan(sk.MaskPolicy(block=128), over, how, length=N)
        assert mask.counts is not None
        both = mask.indices, mask.counts
        indices, counts = (distribute_tensor(x, mesh, placements).to_local() for x in both)
        mask = sk.TokenLists(indices, mask.block, counts)
    else:
        plan = d.plan(mask, over, how)
    *given, sink = given
    given = [distribute_tensor(x, mesh, placements) for x in given]
    if len(set(lengths)) == 1:
        assert d.unshard_sequence(d.shard_sequence(given[0], plan), plan).placements[0] == Replicate()

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return d.attention(q, k, v, mask, plan=plan, **more, **options)

    found: list[Any] = learned(attend, [*given, sink], sinks=False)
    alike = [isinstance(x, DTensor) and list(x.placements) == placements for x in found]
    return [x.full_tensor() for x in found], all(alike)


class FlexBlock(torch.nn.Module):
    """Attention as torchtitan has it: projections around a module that is called with a block mask."""

    def __init__(self, inner_attention: torch.nn.Module, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(8, 64, dtype=torch.float64)
        self.inner_attention, self.packed = inner_attention, packed

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
        if not self.packed:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, lse = self.inner_attention(
                q, k, v, block_mask=mask, scale=0.3, return_lse=True, enable_gqa=True
            )
            return (out * lse.sigmoid()[..., None]).transpose(1, 2)
        q, k, v = (x[0] for x in (q, k, v))
        scaled: Callable[..., Tensor] = lambda out, lse: out * lse.sigmoid()[..., None]  # noqa: E731
        return self.inner_attention(q, k, v, attention_masks=mask, scale=0.3, out_transform=scaled)[None]


class FlexAlone(torch.nn.Module):
    """The module of one process, on sk.attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, **_: Any) -> Any:
        return sk.attention(q, k, v, block_mask, scale=scale, return_lse=True)


def flex_mask() -> Any:
    return create_block_mask(
        lambda b, h, q, k: (q >= k) & (q // 70 == k // 70), None, None, N, N, device="cpu"
    )


def tokens() -> Tensor:
    return torch.randn(1, N, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def flex_over_ranks(group: Any) -> dict[str, list[Tensor]]:
    """The output and the gradient of the projections, of a mask in each call and of a plan in each call."""
    d, mask = sk.distributed, flex_mask()
    plan, found = d.plan(sk.MaskPolicy(), group, length=N), {}
    for name, inner, given in (
        ("masks", sk.distributed.MeshFlexAttention(plan, pieces=2), mask),
        ("plans", sk.distributed.MeshFlexAttention(), d.plan(mask, group)),
        ("of the module", sk.distributed.MeshFlexAttention(d.plan(mask, group)), None),
    ):
        for packed in (False, True):
            block, deal = FlexBlock(inner, packed), given if name == "plans" else inner.plan
            out = block(d.shard_sequence(tokens(), deal, dim=1), given)
            (out**2).sum().backward()
            assert block.qkv.weight.grad is not None
            dist.all_reduce(block.qkv.weight.grad, group=group)
            whole = d.unshard_sequence(out.detach(), deal, dim=1)
            found[f"{name}, {packed}"] = [whole, block.qkv.weight.grad]
    return found


def flex_alone() -> list[Tensor]:
    block = FlexBlock(FlexAlone(), False)
    out = block(tokens(), flex_mask())
    (out**2).sum().backward()
    assert block.qkv.weight.grad is not None
    return [out.detach(), block.qkv.weight.grad]


def ulysses_alone() -> list[Tensor]:
    """out and the gradients of torch's own attention, of heads of q that share a head of k."""
    q, k, v, grad = (x.requires_grad_() for x in operands(N, N)[:4])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def ulysses_over_ranks(group: Any) -> list[Tensor]:
    """The same, of tokens that are distributed already, one by one."""
    d, owner = sk.distributed, torch.arange(N) % 5 % dist.get_world_size(group)
    plan = d.plan(sk.MaskPolicy(), group, "heads", length=N, owner=owner)
    q, k, v, grad = (d.shard_sequence(x, plan).requires_grad_() for x in operands(N, N)[:4])
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    )
    out = d.ulysses(attend, q, k, v, plan)
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), grad)
    masked = d.attention(q.detach(), k.detach(), v.detach(), sk.BlockMask.causal(N, block=64), plan=plan)
    assert torch.allclose(masked, found[0])
    # One head, of a function that learns from v alone: ranks without heads make all exchanges too.
    one = [d.shard_sequence(x, plan).float().requires_grad_() for x in operands(N, N, 1, 1)[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        half = d.ulysses(lambda q, k, v: attend(q.detach(), k.detach(), v), *one, plan)
    half.sum().backward()
    assert half.dtype == torch.bfloat16
    assert [bool(x.grad is not None and x.grad.any()) for x in one] == [False, False, True]
    split = torch.arange(N) // -(-N // dist.get_world_size(group))
    assert not _exchanges(d.plan(sk.BlockMask.causal(N), group, "heads", owner=split), "keys", q.device)
    return [d.unshard_sequence(x, plan) for x in found]


TEXT, VIDEO = 7, 200


def diffusion_layer() -> tuple[Any, list[Tensor]]:
    """A processor of diffusers with a policy, and q, k and v [B, text and video, H, D]."""

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor) -> None: ...

    sparse = SimpleNamespace(
        policy=sk.policies.MeanTopK(topk=2, block=64, causal=False),
        applies=lambda tokens: tokens >= VIDEO - 4,
        dense={},
    )
    model = SimpleNamespace(forward=forward, _cp_plan={"": {"encoder_hidden_states": None}})
    made = object.__new__(Processor)
    made._around, made._form, made._layer = (
        Around(sparse, model),
        Form(text="first", masks="keys"),
        "blocks.0.attn1",
    )
    made._around.text, made._dense = TEXT, lambda *given, **options: None
    draw = torch.Generator().manual_seed(4)
    return made, [torch.randn(2, TEXT + VIDEO, 4, 8, generator=draw, dtype=torch.float64) for _ in range(3)]


def diffusion_alone() -> Tensor:
    made, given = diffusion_layer()
    return made._attend(1, VIDEO, TEXT, *given)


def diffusion_over_ranks(mesh: Any) -> list[Any]:
    """Its output under diffusers' context parallelism: text and video are split each by itself, into uneven parts."""
    made, given = diffusion_layer()
    over = SimpleNamespace(_flattened_mesh=mesh, ulysses_anything=True, ring_anything=False)
    options = {"parallel_config": SimpleNamespace(context_parallel_config=over)}
    rank, ranks = mesh.get_local_rank(), mesh.size()

    def here(x: Tensor) -> list[Tensor]:
        return [part.tensor_split(ranks, 1)[rank] for part in x.split((TEXT, VIDEO), 1)]

    text, video = here(given[0])
    sizes = 1, video.shape[1], text.shape[1]
    local = [torch.cat(here(x), 1) for x in given]
    found = [made._attend(*sizes, *local, **options) for _ in range(2)]
    wanted = torch.cat(here(diffusion_alone()), 1)
    reasons = []
    for size in range(10):  # plans of the last few sizes are kept
        made._around.plan(ContextRanks.of(options["parallel_config"]), [(64 + size, 0)] * ranks, True)
    assert len(made._around._plans) == 8
    for mask in (torch.ones(2, 1, 1, sum(sizes[1:]), dtype=torch.bool), None):  # and one that is not split
        assert made._attend(*sizes, *local, mask, **options) is None  # dense
        reasons += made._around.sparse.dense.values()
        made._around._splits_text = False
    return [[(x - wanted).abs().max().item() for x in found], *reasons]
