"""Every function of sk.distributed, with valid arguments for the fuzz, in a mesh of one process. See `engine.Call`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import sparsek as sk
from tests.fuzz.calls_ops import X, heads, mask
from tests.fuzz.engine import Call, Made

GATHERED = {"pieces": 2, "exact": False, "check": True, "scale": 0.5, "return_lse": True, "softcap": 0.0}
NAMED = {"mesh": "int tuple any", "length": "none int", "tolerance": "float int"}
RULES = "BlockMask MaskPolicy MeshPlan"


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def here(module: str) -> bool:
    return module.startswith("sparsek.distributed")


def _plan(how: str = "gather") -> sk.distributed.MeshPlan:
    return sk.distributed.plan(mask(), dist.group.WORLD, how)


def _of_plan(called: Callable[..., Any], **arguments: Any) -> Callable[[Random], Made]:
    return lambda random: (called, {"plan": _plan(), **arguments})


def _attention(how: str) -> Callable[[Random], Made]:
    def make(random: Random) -> Made:
        given = {"q": heads(4), "k": heads(2), "v": heads(2), "mask": _plan(how)}
        return sk.distributed.attention, {**given, **GATHERED}

    return make


def _split(style: Callable[..., Any]) -> Callable[[Random], Made]:
    """A call of a layer that a style has split."""

    def split(residual: Any = None, **given: Any) -> Any:
        layer = sk.nn.BlockSparseLinear.random(64, X.shape[-1], 32, 0.5)
        return style(**given)._apply(layer, DeviceMesh("cpu", [0]))(X.float(), residual)

    given = {
        "input_layouts": Replicate(),
        "output_layouts": Shard(-1),
        "use_local_output": True,
        "split": "even",
    }
    return lambda random: (split, given)


@lru_cache
def trained() -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the state of both."""
    model = sk.nn.BlockSparseLinear.random(64, 64, 32, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    return model, optimizer, sk.distributed.full_state_dict(model, optimizer)


PLACED = {"input_layouts": "none Shard", "output_layouts": "none Replicate", "split": "sequence"}
d = sk.distributed
CALLS: dict[str, Call] = {
    "distributed.plan": Call(
        lambda random: (d.plan, {"mask": mask(), "mesh": 4, "how": "gather", "length": None, "tolerance": 1.03}),
        {"mask": RULES, "mesh": "int", "length": "none", "tolerance": "int"},
    ),
    "distributed.plan [policy]": Call(
        lambda random: (d.plan, {"mask": sk.MaskPolicy(window=70), "mesh": dist.group.WORLD, "length": 100}),
        {"mask": RULES, "mesh": "int any", "length": "int"},
    ),
    "distributed.simulate": Call(
        lambda random: (
            d.simulate,
            {
                "mask": mask(), "ranks": (2, 8), "how": "gather", "batch": 2, "q_heads": 4, "kv_heads": 2, "dim": 16,
                "dtype": heads(4).dtype, "pair_seconds": 1e-12, "bandwidth": 1e11,
            },
        ),
        {"mask": RULES, "ranks": "sequence any", "pair_seconds": "int", "bandwidth": "int"},
    ),
    "distributed.MeshPlan.received": Call(
        lambda random: (
            _plan().received,
            {"batch": 2, "q_heads": 4, "kv_heads": 2, "dim": 16, "v_dim": None, "dtype": heads(4).dtype},
        ),
        {"v_dim": "none int"},
    ),
    "distributed.MeshPlan.with_mask": Call(lambda random: (_plan().with_mask, {"mask": mask()})),
    "distributed.positions": Call(_of_plan(d.positions, of="keys", device="cpu"), {"device": "none text device"}),
    "distributed.shard_sequence": Call(_of_plan(d.shard_sequence, x=heads(4), dim=2, of="keys")),
    "distributed.unshard_sequence": Call(
        _of_plan(d.unshard_sequence, x=heads(4), dim=2, of="queries", check=True)
    ),
    "distributed.attention": Call(_attention("gather"), {"mask": RULES, "scale": "none int", "softcap": "int"}),
    "distributed.attention [heads]": Call(
        _attention("heads"), {"mask": RULES, "scale": "none int", "softcap": "int"}
    ),
    "distributed.attention [documents]": Call(
        lambda random: (
            d.attention,
            {
                "q": heads(4)[:1], "k": heads(2)[:1], "v": heads(2)[:1], "mask": sk.MaskPolicy(topk=1, block=64),
                "plan": _plan(), "cu_seqlens": torch.tensor([0, 30, heads(4).shape[2]]),
            },
        ),
        {"mask": f"{RULES} TokenLists", "cu_seqlens": "none"},
    ),
    "distributed.ulysses": Call(
        lambda random: (
            d.ulysses,
            {
                "attend": sk.attention, "q": heads(4), "k": heads(2), "v": heads(2),
                "plan": _plan("heads"), "check": True,
            },
        ),
        errors=(TypeError,),  # of another function
    ),
    "distributed.plan [owner]": Call(
        lambda random: (
            d.plan,
            {"mask": mask(), "mesh": 4, "how": "heads", "owner": torch.arange(mask().q_len) % 4},
        ),
        {"mask": RULES, "mesh": "int", "owner": "none"},
    ),
    "distributed.MeshFlexAttention": Call(
        lambda random: (
            d.MeshFlexAttention,
            {"plan": _plan(), "pieces": 2, "exact": False, "check": True, "softcap": 1.0},
        ),
        {"plan": "none", "pieces": "any", "exact": "any", "check": "any", "softcap": "any"},
    ),
    "distributed.MeshFlexAttention.forward": Call(
        lambda random: (
            d.MeshFlexAttention(_plan()).forward,
            {
                "q": heads(4), "k": heads(2), "v": heads(2), "block_mask": _plan(), "attention_masks": None,
                "score_mod": None, "scale": 0.5, "enable_gqa": True, "return_lse": True, "out_transform": None,
                "kernel_options": None,
            },
        ),
        {
            "block_mask": f"none {RULES} TokenLists", "attention_masks": "none", "scale": "none int",
            "out_transform": "none", "score_mod": "none", "enable_gqa": "any", "kernel_options": "any",
        },
        errors=(TypeError,),  # of another function
    ),
    "distributed.ColwiseSparse": Call(_split(d.ColwiseSparse), PLACED),
    "distributed.RowwiseSparse": Call(_split(d.RowwiseSparse), PLACED),
    "distributed.full_state_dict": Call(
        lambda random: (d.full_state_dict, {"model": trained()[0], "optimizer": trained()[1]}),
        {"optimizer": "none"},
    ),
    "distributed.load_full_state_dict": Call(
        lambda random: (
            d.load_full_state_dict,
            {"model": trained()[0], "state": trained()[2], "optimizer": trained()[1]},
        ),
        {"optimizer": "none"},
        errors=(RuntimeError,),  # as load_state_dict of torch
    ),
    "distributed.check_patterns": Call(
        lambda random: (
            d.check_patterns,
            {"model": sk.nn.BlockSparseLinear.random(64, 64, 32, 0.5), "group": dist.group.WORLD},
        ),
        {"model": "any", "group": "none any"},
    ),
}  # fmt: skip

REASONS = {
    "GatedSparse": "for the styles of layers: the same arguments",
    "ExpertsSparse": "for the styles of layers: the same arguments",
    "MeshPlan": "for sk.distributed.plan, which makes it",
    "Simulated": "for sk.distributed.simulate, which makes it",
    "explain": "takes no arguments",
}
