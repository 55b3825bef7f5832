# ruff: noqa
"""The library's own choice of sums and starts beside one sum and any order."""
import sys
from dataclasses import replace
import torch
import sparsek as sk
from sparsek.kernels import load
from sparsek.plan.kernel import AttentionGradCall
from tests.kernels.attention.grad_cases import Inputs, problem
from draft.sums_try import mask_of, normal
KERNEL = load("hopper.attention_bwd")
def timed(kind, length, dim, softcap=None):
    mask = mask_of(kind, length, 128)
    q, k, v, grad = (normal(1, 16, length, dim) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
    given = Inputs(q, k, v, mask, dim**-0.5, out, lse, grad, None)
    graphs = {}
    with torch.no_grad():
        for name in ("rule", "one sum", "any order"):
            p = problem(*given[:4], deterministic=name != "any order")
            c = next(iter(KERNEL.configs(p)))
            if name == "one sum": c = replace(c, sums=1)
            work = KERNEL.prepare(p, c, mask)
            outs = [torch.full_like(x, torch.nan) for x in given[:3]]
            call = AttentionGradCall(*given[:9], *outs, given.scores)
            KERNEL.launch(c, work, call)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                KERNEL.launch(c, work, call)
            graphs[name] = (graph, outs, work, c, KERNEL.seconds(p, c))
        times = {key: [] for key in graphs}
        graph.replay(); torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); graph.replay(); b.record(); b.synchronize()
        launches = max(1, int(12 / a.elapsed_time(b)))
        for rounds in range(12):
            for key, (graph, *_) in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                for _ in range(launches): graph.replay()
                b.record(); b.synchronize()
                if rounds > 2: times[key].append(a.elapsed_time(b) / launches)
    mid = {key: sorted(t)[len(t) // 2] for key, t in times.items()}
    print(kind, length, f"D {dim}", *(f"{n}: {ms*1e3:.0f} us, {mid['one sum']/ms:.3f}, sums {graphs[n][3].sums}, predicted {graphs[n][4]*1e3/ms:.3f};" for n, ms in mid.items()), flush=True)
print(torch.cuda.get_device_name())
for one in sys.argv[1:]:
    kind, length, dim = one.split(":")
    timed(kind, int(length) * 1024, int(dim)); torch.cuda.empty_cache()
