# ruff: noqa
import sys
from dataclasses import replace
import torch
import sparsek as sk
from sparsek.kernels import load
from sparsek.kernels.attention.hopper_bwd import Work
from sparsek.plan.kernel import AttentionGradCall
import sparsek.plan.attention_grad_schedule as g
from sparsek.mask.mask import BlockMask
from tests.kernels.attention.grad_cases import Inputs, problem
from draft.sums_try import mask_of, normal
KERNEL = load("hopper.attention_bwd")
def timed(seed, dim):
    torch.manual_seed(seed)
    length = 32768
    mask = mask_of("random", length, 128)
    q, k, v, grad = (normal(1, 16, length, dim) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
    given = Inputs(q, k, v, mask, dim**-0.5, out, lse, grad, None)
    graphs = {}
    with torch.no_grad():
        for name in ("1 gpu", "1 plan", "2 gpu", "2 plan", "any"):
            p = problem(*given[:4], deterministic=name != "any")
            c = next(iter(KERNEL.configs(p)))
            if name != "any": c = replace(c, sums=int(name[0]))
            work = KERNEL.prepare(p, c, mask)
            if "plan" in name:
                other = g.schedule(p, mask, p.card.sm_count, sums=c.sums)
                there = int(other.tiles[:, 6].sum())
                print("same", torch.equal(other.tiles, work.schedule.tiles), torch.equal(other.starts, work.schedule.starts), torch.equal(other.visits[:there], work.schedule.visits[:there]), other.visits.shape, work.schedule.visits.shape, other.visits.data_ptr() % 128, work.schedule.visits.data_ptr() % 128)
                work = Work(other, None, other.starts)
            outs = [torch.full_like(x, torch.nan) for x in given[:3]]
            call = AttentionGradCall(*given[:9], *outs, given.scores)
            KERNEL.launch(c, work, call)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                KERNEL.launch(c, work, call)
            graphs[name] = (graph, outs, work, c)
        times = {key: [] for key in graphs}
        for rounds in range(12):
            for key, (graph, *_) in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                for _ in range(3): graph.replay()
                b.record(); b.synchronize()
                if rounds > 2: times[key].append(a.elapsed_time(b) / 3)
    mid = {key: sorted(t)[len(t) // 2] for key, t in times.items()}
    print(seed, dim, {n: round(ms * 1e3) for n, ms in mid.items()}, {n: [round(x * 1e3) for x in t[:4]] for n, t in times.items()}, flush=True)
print(torch.cuda.get_device_properties(0))
for seed in (0, 1): timed(seed, 64)
timed(0, 128)
