"""What the ranks of the benchmark `mesh` run: attention over a mesh beside one GPU, its results and its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sparsek as sk
from sparsek.core.clock import wait
from sparsek.testing.budget import Gate
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.ranks import together
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.peers.attention import step

Tell = Callable[[str], None]
ONE = "one"  # the whole call on the GPU of rank 0
# How attention is distributed, and options of a call. 8 pieces are as many as there are ranks, if these are fewer.
WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gather": ("gather", {}),
    "pieces": ("gather", {"pieces": 8}),
    "exact": ("gather", {"exact": True}),
    "heads": ("heads", {}),
    "both": ("both", {}),
}
EXACT = ("exact", "heads")  # with the bits of one GPU
SAMPLE_SECONDS = 0.15
MOST_CALLS = 20
LONG_SECONDS = 3.0
RESULTS = ("out", "dq", "dk", "dv")


def attention_rows(tell: Tell, device: torch.device, case: Any, rounds: int) -> dict[str, Any]:
    """Results of a small case, then times of the whole one: what rank 0 knows of it."""
    found: dict[str, Any] = {"notes": []}
    found["gates"], found["differing"], found["unlike"] = checked(tell, device, case, found["notes"])
    wait(device)
    ways = [name for name in case.ways if found["gates"][name].passed]
    found |= timed(tell, device, case, ways, rounds)
    return found


@cache
def pairs_of_ranks(kind: str) -> DeviceMesh:
    """The mesh of "both": ranks of a pair exchange heads, the pairs keys."""
    return init_device_mesh(kind, (dist.get_world_size() // 2, 2))


class Shares:
    """A case by one way: this rank's shards, and their call."""

    def __init__(self, way: str, case: Any, whole: Any) -> None:
        how, options = WAYS[way]
        mesh = pairs_of_ranks(whole.q.device.type) if how == "both" else dist.group.WORLD
        plan = sk.distributed.plan(whole.mask, mesh, how)
        self.plan, self.of = plan, ("queries", "keys", "keys", "queries")
        parts = (whole.q, whole.k, whole.v, whole.grad)
        shards = [
            sk.distributed.shard_sequence(x.detach(), plan, of=of)
            for x, of in zip(parts, self.of, strict=True)
        ]
        given = tuple(x.requires_grad_() for x in shards[:3])
        self.call = step(lambda q, k, v: sk.distributed.attention(q, k, v, plan, **options), given, shards[3])

    def of_whole(self, results: Any) -> list[Tensor]:
        """This rank's part of results of one process."""
        at = {of: sk.distributed.positions(self.plan, of=of, device=results[0].device) for of in set(self.of)}
        return [x.index_select(2, at[of]) for x, of in zip(results, ("queries", *self.of[:3]), strict=True)]

    def joined(self, results: Any) -> list[Tensor]:
        """The results of all ranks, put together."""
        of = ("queries", *self.of[:3])
        pairs = zip(results, of, strict=True)
        return [sk.distributed.unshard_sequence(x, self.plan, of=each) for x, each in pairs]


def operands(case: Any, device: torch.device) -> Any:
    """q, k, v, the gradient of out and the mask of the whole sequence, the same on every rank."""
    return case.sets(Draw(device, case.drawn, 0))(Draw(device, case.drawn, 100))


def checked(
    tell: Tell, device: torch.device, case: Any, notes: list[str]
) -> tuple[dict[str, Gate], dict[str, int], dict[str, int]]:
    """For each way the gate of a small case; elements that differ from one GPU's; and those that differ in repeats."""
    small = case.small
    whole = operands(small, device)
    single = step(lambda q, k, v: sk.attention(q, k, v, whole.mask), (whole.q, whole.k, whole.v), whole.grad)
    expected = single()
    gates: dict[str, Gate] = {}
    differing, unlike = {}, {}
    for way in case.ways:
        tell(f"{way}: gate of {small.q_len} tokens")
        shares = Shares(way, small, whole)
        first = shares.call()
        counts = [
            int(together(float((a != b).sum())))
            for a, b in zip(first, shares.of_whole(expected), strict=True)
        ]
        differing[way] = sum(counts)
        joined = shares.joined(first)
        passed = True
        if dist.get_rank() == 0:
            judged = whole.judge(joined)
            gates[way] = Gate(float(judged.error), float(judged.budget), bool(judged.passed))
            passed = gates[way].passed
        if not together(float(passed and dist.get_rank() == 0)):
            notes.append(f"WRONG RESULT by {way}: {gates.get(way)}")
        if way in EXACT and differing[way] and device.type == "cuda":
            parts = ", ".join(f"{name} {count}" for name, count in zip(RESULTS, counts, strict=True))
            notes.append(f"NOT THE BITS of one GPU by {way}: differing elements of {parts}")
        tell(f"{way}: {case.repeats} repeats")
        unlike[way] = int(together(repeats(shares.call, first, case.repeats)))
        if unlike[way]:
            notes.append(f"NOT THE SAME BITS in {case.repeats} repeats by {way}: {unlike[way]} elements")
    every = [
        together(float(way in gates and gates[way].passed)) for way in case.ways
    ]  # all know which passed
    if dist.get_rank() != 0:
        gates = {way: Gate(0.0, 1.0, bool(passed)) for way, passed in zip(case.ways, every, strict=True)}
    return gates, differing, unlike


def repeats(call: Callable[[], Any], first: Any, count: int) -> float:
    """Elements that differ from the first results in so many more calls."""
    total = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(count):
        for a, b in zip(call(), first, strict=True):
            total += (a != b).sum()
    return float(total)


def timed(tell: Tell, device: torch.device, case: Any, ways: list[str], rounds: int) -> dict[str, Any]:
    """Times of one GPU and of every way, bytes, and what the plan predicts."""
    tell("data")
    whole = operands(case, device)
    rank, calls, shares = dist.get_rank(), {}, {}
    calls[ONE] = step(
        lambda q, k, v: sk.attention(q, k, v, whole.mask), (whole.q, whole.k, whole.v), whole.grad
    )
    for way in ways:
        tell(f"{way}: plan")
        shares[way] = Shares(way, case, whole)
        calls[way] = shares[way].call
    if rank:
        del whole
        calls[ONE] = lambda: None
    found: dict[str, Any] = {"imbalance": {}, "received": {}, "fewest": {}}
    for way in ways:
        plan, heads = shares[way].plan, (case.heads, case.kv_heads)
        tell(f"{way}: bytes")
        with counting(device) as forward:
            shares[way].call()
        wait(device)
        fewest = int(plan.received(case.batch, *heads, case.dim, case.v_dim, case.drawn)[rank])
        found["imbalance"][way] = plan.imbalance
        # Of the forward pass; the backward pass of a step receives more.
        found["received"][way] = together(float(forward["first"]))
        found["fewest"][way] = together(float(fewest))
    tell("samples")
    found["samples"] = rounds_of(tell, calls, device, rounds)
    best = min(ways, key=lambda way: sorted(found["samples"][way])[rounds // 2]) if ways else ONE
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found["best"] = best
    run = calls[best]
    ran: list[str] = []
    if rank == 0:
        ran.extend(executed_by(run))
    elif ways:
        run()
    wait(device)
    together()
    return found | {"ran": ran}


@contextmanager
def counting(device: torch.device) -> Iterator[dict[str, int]]:
    """Bytes that exchanges bring to this rank: of forward passes, and of all."""
    made, start = {"first": 0, "all": 0}, dist.all_to_all_single

    def counted(out: Tensor, *args: Any, **more: Any) -> Any:  # rows that stay on a rank are not in it
        made["all"] += out.nbytes
        made["first"] += 0 if torch._C._current_graph_task_id() != -1 else out.nbytes
        return start(out, *args, **more)

    with patch.object(dist, "all_to_all_single", counted):
        yield made


def rounds_of(
    tell: Tell, calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds per call of each sample, whose calls are back to back, until all ranks are done: rank 0's clock."""
    names, counts = list(calls), {}

    def sample(name: str, count: int) -> float:
        wait(device)
        together()
        begin = time.perf_counter()
        for _ in range(count):
            calls[name]()
        wait(device)
        together()
        took = (time.perf_counter() - begin) / count
        return together(0.0 if dist.get_rank() else took)  # one clock, so that ranks agree

    for name in names:
        took = sample(name, 1)
        if took < LONG_SECONDS:  # the first call of a shape may compile
            took = sample(name, 1)
        counts[name] = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(took, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(sample(name, counts[name]) * 1e3)
        tell(
            f"round {index + 1} of {rounds}: " + ", ".join(f"{x} {y[-1]:.2f} ms" for x, y in samples.items())
        )
    return samples


def memory(tell: Tell, device: torch.device, case: Any) -> dict[str, Any]:
    """The most bytes of a card in a step: of one GPU with everything, and of each rank with its shards."""
    tell(f"gate of {case.small.q_len} tokens")
    notes: list[str] = []
    gates, *_ = checked(tell, device, replace(case, repeats=1), notes)
    rank, peaks, (way,) = dist.get_rank(), {}, case.ways

    def peak_of(made: Callable[[], Callable[[], Any]]) -> tuple[float, float]:
        """The peak of two calls, beyond what torch held before, and the milliseconds of the second."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        before = allocated(device)
        call = made()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        took = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return float(peak - before if peak else 0), took * 1e3

    def single() -> Callable[[], Any]:
        whole = operands(case, device)
        mask = whole.mask
        return step(lambda q, k, v: sk.attention(q, k, v, mask), (whole.q, whole.k, whole.v), whole.grad)

    tell("one GPU")
    one = peak_of(single) if rank == 0 else (0.0, 0.0)
    together()
    shares: list[Shares] = []

    def shared() -> Callable[[], Any]:
        shares.append(Shares(way, case, operands(case, device)))
        return shares[0].call

    tell("all ranks")
    mine = peak_of(shared)
    for other in range(dist.get_world_size()):
        peaks[other] = together(mine[0] if other == rank else 0.0)
    run, ran = shares[0].call, []
    if rank == 0:
        ran.extend(executed_by(run))
    else:
        run()
    wait(device)
    together()
    return {"gates": gates, "notes": notes, "one": one, "mine": mine, "peaks": peaks, "ran": ran}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
