"""Models of Llama's shapes in tensor parallel over GPUs of one host, over the same sparse model on one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import sparsek as sk
from sparsek.core.clock import Times, wait
from sparsek.core.errors import InvalidInput
from sparsek.models.config import BlockSparse
from sparsek.models.sparsify import densify_, sparsify_
from sparsek.nn.sums import added, copied, copied_products, learn_beside
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Column, Table
from sparsek_bench.engine.case import Bar
from sparsek_bench.engine.ranks import ranks_of, together
from sparsek_bench.engine.run import Outcome, PeerResult, beside, captured, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, MS, faster_than, target
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.llama import KeyCache, Llama, Sizes, llama, near
from sparsek_bench.suites.mesh_ranks import ONE, Tell, rounds_of
from sparsek_bench.suites.mlp import MODES
from sparsek_bench.suites.models import ModelCase, loss_of

MODULE = "distributed.styles"
SEQUENCE = "graph-sequence"  # a mode of a prefill
SECONDS = 200.0  # of a row, until all its ranks are ended


@dataclass(frozen=True)
class MeshModelCase(ModelCase):
    """A model of Llama's shapes with sparse MLPs, split over `ranks` GPUs: MLPs by GatedSparse, attention by heads.

    "prefill" and "train" as of `ModelCase`, in wall time until all ranks are done. Embedding, norms and head are on
    every rank. In mode "graph" a call is a CUDA graph, of one GPU too; on a CPU it is eager. In "graph-sequence" each
    rank has the sums of its own tokens (sequence parallel). `host_ms`, `one_host_ms`: milliseconds until a call over
    ranks, and on one GPU, has queued its work.
    """

    op: ClassVar[str] = "mesh_model"
    extra: ClassVar[tuple[str, ...]] = ("host_ms", "one_host_ms")

    mode: str = options.choice("How it is run", (*MODES, "graph", SEQUENCE), usual="eager")
    ranks: int = options.size("Ranks", "2", usual=2)

    def check(self) -> None:
        super().check()
        if self.work == "decode" or self.heads % self.ranks or self.kv_heads % self.ranks:
            raise InvalidInput(
                "tensor parallel is measured in prefill and training, of heads that ranks divide"
            )
        if self.mode == SEQUENCE and self.work != "prefill":
            raise InvalidInput(f"{self.mode} is a mode of prefill")
        if self.mode == SEQUENCE and (self.sequences > 1 or self.tokens % self.ranks):
            raise InvalidInput("sequence parallel is measured on one sequence, of tokens that ranks divide")

    @property
    def name(self) -> str:
        """As that of one GPU, with the ranks."""
        return f"{super().name}, {self.ranks} ranks"

    def run(
        self,
        *,
        device: torch.device,
        rounds: int,
        report: Callable[[str], None] = lambda text: None,
        **_: Any,
    ) -> Outcome:
        """One record. Raises GateError for a wrong result."""
        count = torch.cuda.device_count() if device.type == "cuda" else self.ranks
        if count < self.ranks:
            why = f"{self.ranks} ranks need as many GPUs of one host; this one has {count}: skipped"
            return Outcome(self, (), {MODULE: [why]}, {})
        report("ranks")
        found = ranks_of(device.type, self.ranks).run(model_rows, self, rounds, limit=SECONDS, report=report)[
            0
        ]
        gate = passed(self, MODULE, found["gate"])
        times, alone = (Times.of(found["samples"][name]) for name in ("mesh", ONE))
        more = beside(1 / times.median, {ONE: PeerResult(alone, 1 / alone.median, {})}, rated=False)
        more |= {name: round(found[name], 6) for name in self.extra}
        record = record_of(
            self, Timed(MODULE), times, gate, device, Sensors(device), **more, ran=found["ran"]
        )
        return Outcome(self, (record,), {}, {})


class SplitAttention(nn.Module):
    """An attention layer with the heads of this rank, between a copy of x and a sum of y, as Megatron splits it."""

    def __init__(self, whole: Any, group: Any) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.whole, self.group = whole, group
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            layer = getattr(whole, name)
            part = layer.weight.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
            layer.weight = nn.Parameter(part)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], kept: KeyCache | None) -> Tensor:
        whole, weights = self.whole, [self.whole.q.weight, self.whole.k.weight, self.whole.v.weight]
        if not torch.compiler.is_compiling() and learn_beside(x, *weights):
            projected = copied_products(x, weights, self.group)
            return added(whole.o(whole.attended(*projected, turn, kept)), self.group)
        return added(whole(copied(x, self.group), turn, kept), self.group)


class SequenceBlock(nn.Module):
    """A block of inference over ranks, in sequence parallel: between products each rank has rows of its own tokens."""

    def __init__(self, block: Any, mesh: DeviceMesh, last: bool) -> None:
        super().__init__()
        self.block, self.mesh, self.last = block, mesh, last

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], kept: KeyCache | None) -> Tensor:
        block: Any = self.block
        x = x[0].chunk(self.mesh.size())[self.mesh.get_local_rank()] if x.ndim == 3 else x
        whole = self.moved(block.before(x), Shard(0), Replicate())[None]
        x = x + self.moved(block.attention.whole(whole, turn, kept)[0], Partial(), Shard(0))
        whole = self.moved(block.between(x), Shard(0), Replicate())
        x = x + self.moved(block.mlp(whole), Partial(), Shard(0))
        return self.moved(x, Shard(0), Replicate())[None] if self.last else x

    def moved(self, x: Tensor, of: Placement, to: Placement) -> Tensor:
        """All tokens of this rank's, or the sums of its own tokens."""
        return (
            DTensor.from_local(x, self.mesh, [of], run_check=False).redistribute(placements=[to]).to_local()
        )


def sparse_model(case: MeshModelCase, device: torch.device) -> Llama:
    """The same on every rank."""
    sizes = case.layers, case.width, case.hidden, case.heads, case.kv_heads, case.vocabulary
    model = llama(Sizes(*sizes), case.tokens, case.drawn, device)
    sparsify_(model, {"*.mlp.*": BlockSparse(case.block, case.density)}, card=None)
    return model


def split_model(model: Llama, device: torch.device, sequence: bool = False) -> Llama:
    """The same model with this rank's part of it. `sequence`: in sequence parallel, for inference."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks: Any = model.blocks
    group = mesh.get_group()
    for at, block in enumerate([*blocks]):
        style = sk.distributed.GatedSparse(output_layouts=Partial() if sequence else None)
        parallelize_module(block, mesh, {"mlp": style})
        block.attention = SplitAttention(block.attention, group)
        if sequence:
            blocks[at] = SequenceBlock(block, mesh, at == len(blocks) - 1)
    return model


def training_step(model: nn.Module, loss: Callable[[], Tensor], graph: bool) -> Callable[[], None]:
    """A step of fused AdamW, with groups for Parameters that are split and for others. `graph`: one can have it."""
    split: dict[bool, list[Any]] = {True: [], False: []}
    for each in model.parameters():
        split[hasattr(each, "to_local")].append(each)
    groups = [{"params": each} for each in split.values() if each]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=True, capturable=graph)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def call_of(case: MeshModelCase, model: Llama, ids: Tensor) -> Callable[[], Any]:
    """What is timed."""
    if case.work == "train":
        return training_step(model, lambda: loss_of(model(ids), ids), ids.is_cuda and case.mode == "graph")
    return torch.no_grad()(partial(model, ids, None, True))


def graph_of(call: Callable[[], Any], device: torch.device, wanted: Tensor | None) -> Callable[[], Any]:
    """A replay of a call in one CUDA graph. RuntimeError unless it computes what was `wanted`."""
    replay, (found,) = captured([call], device)
    replay()
    if wanted is not None and not near(found, wanted, wanted).passed:
        raise RuntimeError("a CUDA graph of the model has another result than its calls")
    return replay


def queued(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until a call has queued its work, the least of three."""
    found = []
    for _ in range(3):
        wait(device)
        begin = perf_counter()
        call()
        found.append((perf_counter() - begin) * 1e3)
    wait(device)
    return min(found)


def model_rows(tell: Tell, device: torch.device, case: MeshModelCase, rounds: int) -> dict[str, Any]:
    """The gate, then times of the split model and of the whole one on rank 0."""
    rank, ids = dist.get_rank(), case.drawn_ids(device)
    tell("models")
    whole = sparse_model(case, device)
    split = split_model(copy.deepcopy(whole), device, case.mode == SEQUENCE)
    compute = partial(case.gradient if case.work == "train" else case.result, ids=ids)
    tell("gate")
    found, gate = compute(split), None
    if rank == 0:
        same = copy.deepcopy(whole)
        densify_(same)
        rough = compute(same)
        exact = compute(same.to(torch.float64 if rough.dtype == torch.float32 else torch.float32))
        gate = near(found, rough, exact)
        del same, rough, exact
    wanted = found if case.work == "prefill" else None
    del found
    together()
    if case.mode == "compiled":
        tell("compile")
        for block in (*whole.blocks, *split.blocks):
            block.compile(dynamic=False)
    calls = {"mesh": call_of(case, split, ids), ONE: call_of(case, whole, ids) if rank == 0 else lambda: None}
    eager = calls["mesh"]
    if rank:
        del whole
    if case.mode.startswith("graph") and device.type == "cuda":
        tell("graphs")
        calls["mesh"] = graph_of(calls["mesh"], device, wanted)
        calls[ONE] = graph_of(calls[ONE], device, None) if rank == 0 else calls[ONE]
    samples = rounds_of(tell, calls, device, rounds)
    host_ms, one_host_ms = (queued(calls[name], device) for name in ("mesh", ONE))
    ran: list[str] = []
    if rank == 0:  # a replay executes none of the functions that it repeats
        ran.extend(executed_by(eager))
    else:
        eager()
    wait(device)
    together()
    found = {"gate": gate, "samples": samples, "ran": ran}
    return found | {"host_ms": host_ms, "one_host_ms": one_host_ms}


MODELS: dict[Any, Any] = {
    MeshModelCase("prefill"): (Bar(ONE, 1.7, 1.9),),
    MeshModelCase("train"): (Bar(ONE, 1.65, 1.9),),
    MeshModelCase("prefill", mode="compiled"): (Bar(ONE, 1.7, 1.9),),
    MeshModelCase("train", mode="compiled"): (Bar(ONE, 1.65, 1.9),),
    **{MeshModelCase("prefill", mode=each): (Bar(ONE, 1.7, 1.9),) for each in ("graph", SEQUENCE)},
    MeshModelCase("train", mode="graph"): (Bar(ONE, 1.65, 1.9),),
}
WIDER_MODELS = tuple(  # on more GPUs of one host
    MeshModelCase(work, mode=mode, ranks=ranks)
    for ranks in (4, 8)
    for mode in ("eager", "graph")
    for work in ("prefill", "train")
)
MODEL_TABLE = Table(
    op="mesh_model",
    title="models over a mesh, tensor parallel",
    headings={ONE: "one GPU"},
    dense=(ONE,),
    columns=(
        CASE,
        MS,
        Column("over one GPU", faster_than(ONE)),
        Column(
            "of the host, one GPU's", lambda record: f"{record['host_ms']:.3g}, {record['one_host_ms']:.3g}"
        ),
        target(MODELS, ""),
    ),
    note=(
        "Wall time until all ranks are done, over the same model with sparse MLPs on one GPU, in the same rounds. MLPs "
        "are split by `GatedSparse`, attention by heads; embedding, norms and head are on every rank. Of the host: "
        "milliseconds until a call has queued its work; where they are the time, the GPUs wait. graph: one CUDA graph; "
        "graph-sequence: one in sequence parallel."
    ),
    usual=("8 layers of 4096 and 14336", "block 128 25 % bf16", "2 ranks"),
    ratios=False,
)
