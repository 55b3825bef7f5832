"""Attention and sparse layers over several processes, on torch.distributed: `sk.distributed`.

plan = sk.distributed.plan(mask, mesh)                   which rank owns which tokens, balanced by visited pairs
x = sk.distributed.shard_sequence(x, plan, dim=1)        this rank's tokens; their places: positions(plan)
out = sk.distributed.attention(q, k, v, plan)            of shards [B, H, S_r, D]
y = sk.distributed.unshard_sequence(y, plan, dim=1)

parallelize_module(model, mesh, {"up": sk.distributed.ColwiseSparse(), "down": sk.distributed.RowwiseSparse()})
"""

from sparsek.distributed.attention import attention
from sparsek.distributed.module import MeshFlexAttention
from sparsek.distributed.plan import MeshPlan
from sparsek.distributed.planning import plan
from sparsek.distributed.sequence import positions, shard_sequence, unshard_sequence
from sparsek.distributed.simulate import Simulated, simulate
from sparsek.distributed.states import full_state_dict, load_full_state_dict
from sparsek.distributed.styles import ColwiseSparse, ExpertsSparse, GatedSparse, RowwiseSparse
from sparsek.distributed.ulysses import ulysses
from sparsek.nn.agreement import check_patterns

__all__ = [
    "ColwiseSparse",
    "ExpertsSparse",
    "GatedSparse",
    "MeshFlexAttention",
    "MeshPlan",
    "RowwiseSparse",
    "Simulated",
    "attention",
    "check_patterns",
    "full_state_dict",
    "load_full_state_dict",
    "plan",
    "positions",
    "shard_sequence",
    "simulate",
    "ulysses",
    "unshard_sequence",
]
