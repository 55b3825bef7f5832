# ruff: noqa
import os, sys, hashlib
from dataclasses import replace
import torch
import sparsek as sk
from sparsek.kernels import load
from sparsek.plan.kernel import AttentionGradCall
from tests.kernels.attention.grad_cases import Inputs, problem
from draft.sums_try import mask_of, normal
KERNEL = load("hopper.attention_bwd")
def timed(kind, length, dim, sums):
    torch.manual_seed(7)
    mask = mask_of(kind, length, 128)
    q, k, v, grad = (normal(1, 16, length, dim) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
        given = Inputs(q, k, v, mask, dim**-0.5, out, lse, grad, None)
        p = problem(*given[:4])
        c = replace(next(iter(KERNEL.configs(p))), sums=sums)
        work = KERNEL.prepare(p, c, mask)
        outs = [torch.full_like(x, torch.nan) for x in given[:3]]
        call = AttentionGradCall(*given[:9], *outs, given.scores)
        KERNEL.launch(c, work, call)
        first = [x.clone() for x in outs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            KERNEL.launch(c, work, call)
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay(); torch.cuda.synchronize()
        a.record(); graph.replay(); b.record(); b.synchronize()
        n = max(1, int(15 / a.elapsed_time(b)))
        times, bad = [], torch.zeros((), dtype=torch.int64, device="cuda")
        for rounds in range(16):
            a.record()
            for _ in range(n): graph.replay()
            b.record(); b.synchronize()
            if rounds > 5: times.append(a.elapsed_time(b) / n)
            for x, y in zip(first, outs): bad += (x != y).any(); y.fill_(torch.nan)
            graph.replay()
            for x, y in zip(first, outs): bad += (x != y).any()
    bits = hashlib.sha256(b"".join(x.cpu().view(torch.int16).numpy().tobytes() for x in first)).hexdigest()[:8]
    print(f"V {os.environ.get('V')} {kind} {length} D {dim} sums {sums} us", round(sorted(times)[len(times)//2] * 1e3), "bits", bits, "bad", int(bad), flush=True)
for one in sys.argv[1:]:
    kind, length, dim, sums = one.split(":")
    timed(kind, int(length) * 1024, int(dim), int(sums)); torch.cuda.empty_cache()
