# ruff: noqa: T201
"""One or two sums of dQ in order: right, the same bits, and time in CUDA graphs. Part: right, or a list of cases."""

import sys
import time
from dataclasses import replace

import torch

import sparsek as sk
from sparsek.kernels import load
from sparsek.mask.mask import BlockMask
from sparsek.plan.kernel import AttentionGradCall
from tests.kernels.attention.grad_cases import Inputs, differentiate, inputs, judged, problem
from sparsek.testing.attention_cases import random_bits

KERNEL = load("hopper.attention_bwd")


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def variants(given, every=True):
    found = {}
    for ordered in (True, False):
        p = problem(*given[:4], deterministic=ordered)
        for c in KERNEL.configs(p):
            for sums in ((1, 2) if ordered else (0,)):
                key = (c.queries, f"{sums} in order" if ordered else "any order")
                if key not in found or (every and "2" in key[1]):
                    found[(*key, c.stages, c.dq_slots) if key in found else key] = (p, replace(c, sums=sums))
    return found


def right():
    seed = int(time.time())
    torch.manual_seed(seed)
    print("seed", seed)
    cases = {}
    for dims in ((64, 64), (128, 128), (40, 32)):
        for block in ((128, 128), (64, 64), (64, 128), (128, 64)):
            q, k, v = normal(2, 4, 333, dims[0]), normal(2, 2, 401, dims[0]), normal(2, 2, 401, dims[1])
            cases[f"bits {dims} {block}"] = inputs(q, k, v, random_bits("cuda", (333, 401), block, heads=4, seed=seed), with_lse=True)
        q, k, v = (normal(1, 16, 2048, dims[0]), normal(1, 16, 2048, dims[0]), normal(1, 16, 2048, dims[1]))
        cases[f"causal {dims}"] = inputs(q, k, v, BlockMask.causal(2048, block=128, device="cuda"))
    for name, given in cases.items():
        for key, (p, c) in variants(given).items():
            if c.sums == 1:
                continue
            found = differentiate(KERNEL, given, c)
            gate = judged(given, found)
            same = all(all(torch.equal(a, b) for a, b in zip(found, differentiate(KERNEL, given, c), strict=True)) for _ in range(8))
            print("right" if gate.passed and same else "WRONG", name, key, "" if gate.passed else gate, same, flush=True)


def mask_of(kind, length, block):
    tiles = length // block
    if kind == "random":
        return BlockMask.topk(torch.rand(1, 1, tiles, tiles, device="cuda"), tiles // 8, seq_len=length, block=block)
    if kind == "window":
        return BlockMask.sliding_window(length, 2048, block=block, device="cuda")
    if kind == "causal":
        return BlockMask.causal(length, block=block, device="cuda")
    return BlockMask.full(length, block=(block, block), device="cuda")


def timed(kind, length, dim, block=128):
    mask = mask_of(kind, length, block)
    q, k, v, grad = (normal(1, 16, length, dim) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
    given = Inputs(q, k, v, mask, dim**-0.5, out, lse, grad, None)
    graphs = {}
    with torch.no_grad():
        for key, (p, c) in variants(given, False).items():
            work = KERNEL.prepare(p, c, mask)
            outs = [torch.full_like(x, torch.nan) for x in given[:3]]
            call = AttentionGradCall(*given[:9], *outs, given.scores)
            KERNEL.launch(c, work, call)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                KERNEL.launch(c, work, call)
            graphs[key] = (graph, outs, work)
        times = {key: [] for key in graphs}
        graph.replay()
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); graph.replay(); b.record(); b.synchronize()
        launches = max(1, int(12 / a.elapsed_time(b)))
        for rounds in range(13):
            for key, (graph, *_) in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                for _ in range(launches):
                    graph.replay()
                b.record()
                b.synchronize()
                if rounds > 3:
                    times[key].append(a.elapsed_time(b) / launches)
    mid = {key: sorted(t)[len(t) // 2] for key, t in times.items()}
    base = mid[64, "1 in order"]
    for key, ms in mid.items():
        print(kind, length, f"D {dim} block {block}", key, f"{ms * 1e3:.0f} us, {base / ms:.3f} of the rate of 64 queries, one sum", flush=True)


if __name__ != "__main__":
    pass
elif sys.argv[1] == "right":
    right()
else:
    print(torch.cuda.get_device_name())
    for one in sys.argv[1:]:
        kind, length, dim, *block = one.split(":")
        timed(kind, int(length) * 1024, int(dim), *map(int, block))
        torch.cuda.empty_cache()
