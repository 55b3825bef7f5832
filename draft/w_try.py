# ruff: noqa: T201
"""How far apart CTAs start in their lists (W of a list), one or two sums; times in CUDA graphs."""
import sys
from dataclasses import replace

import torch

import sparsek as sk
import sparsek.plan.attention_grad_schedule as g
from sparsek.kernels import load
from sparsek.kernels.attention.hopper_bwd import Work
from sparsek.kernels.attention.schedule_bwd import padded_bounds
from sparsek.mask.mask import BlockMask
from sparsek.plan.kernel import AttentionGradCall
from tests.kernels.attention.grad_cases import Inputs, judged, problem
from draft.sums_try import mask_of, normal

KERNEL = load("hopper.attention_bwd")
SRC = open(g.__file__).read()


def spread(w):
    s = SRC.replace("apart = cta[tile] * GOLDEN % (1 << GOLDEN_BITS) * length >> GOLDEN_BITS", f"apart = (cta[tile] * GOLDEN % (1 << GOLDEN_BITS) * length * {w}).long() >> GOLDEN_BITS")
    s = s.replace("if ordered or heads_in_section(p) else", "if True else")
    assert s.count("if True else") == 1
    ns = {"__name__": "x"}
    exec(compile(s, "x", "exec"), ns)
    return ns["schedule"]


def timed(kind, length, dim):
    mask = mask_of(kind, length, 128)
    q, k, v, grad = (normal(1, 16, length, dim) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
    given = Inputs(q, k, v, mask, dim**-0.5, out, lse, grad, None)
    graphs = {}
    first = None
    with torch.no_grad():
        for ordered, sums in ((True, 1), (True, 2), (False, 1)):
            p = problem(*given[:4], deterministic=ordered)
            c = replace(next(iter(KERNEL.configs(p))), sums=sums)
            for w in (1, 0.5, 0.25, 0.125, 0) if ordered else (1, 0):
                made = spread(w)(p, mask, p.card.sm_count, ordered=ordered)
                bounds = padded_bounds(mask.lo, mask.hi, made.rows) if c.interval and mask.lo is not None else None
                made = type(KERNEL.prepare(p, c, mask).schedule)(*made)
                work = Work(made, bounds, made.starts)
                outs = [torch.full_like(x, torch.nan) for x in given[:3]]
                call = AttentionGradCall(*given[:9], *outs, given.scores)
                KERNEL.launch(c, work, call)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    KERNEL.launch(c, work, call)
                graphs[f"{sums} in order" if ordered else "any order", w] = (graph, outs, work)
                if first is None:
                    first = [x.clone() for x in outs]
                assert all(((a - b).float().norm() / a.float().norm()) < 5e-3 for a, b in zip(first, outs))
        times = {key: [] for key in graphs}
        graph.replay()
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); graph.replay(); b.record(); b.synchronize()
        launches = max(1, int(12 / a.elapsed_time(b)))
        for rounds in range(9):
            for key, (graph, *_) in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                for _ in range(launches):
                    graph.replay()
                b.record()
                b.synchronize()
                if rounds > 2:
                    times[key].append(a.elapsed_time(b) / launches)
    mid = {key: sorted(t)[len(t) // 2] for key, t in times.items()}
    base = mid["1 in order", 1]
    print(kind, length, f"D {dim}", f"now {base * 1e3:.0f} us;", "; ".join(f"{n} {w}: {base / ms:.3f}" for (n, w), ms in mid.items()), flush=True)


for one in sys.argv[1:]:
    kind, length, dim = one.split(":")
    timed(kind, int(length) * 1024, int(dim))
    torch.cuda.empty_cache()
