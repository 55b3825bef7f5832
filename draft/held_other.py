import sys, torch, sparsek as sk
from dataclasses import replace
from sparsek import kernels
from sparsek.reference.epilogue import Epilogue, ACTIVATIONS, slope as slope_of
from sparsek.plan.spmm import Product
from sparsek.core.device import card_of
from sparsek.kernels.spmm.hopper import _paced
from sparsek.kernels.spmm.multiply import deepened
from timing import rounds, show
K = kernels.load("hopper.spmm")
bf = torch.bfloat16
def pick(p, held, width=64):
    found = [c for c in K.configs(p) if bool(c.held) == held and (c.rows, c.cols, c.width * c.pieces) == (128, 256, width) and c.wg_m == 2 and not c.split and c.joined_rows == 1]
    return found[0]
def run(call, held, width=64):
    p = call.problem(card_of(call.b.device)); c = pick(p, held, width)
    work = K.prepare(p, c, call.a); m, n = call.shape[0], call.b.shape[-1]
    out = torch.full((n, m), float("nan"), device="cuda", dtype=bf).mT if p.c.layout == "col" else torch.full((m, n), float("nan"), device="cuda", dtype=bf)
    f = lambda: (K.launch(c, work, call.a, call.b, out, call.epilogue), out)[1]
    f.c = c
    return f
torch.manual_seed(0)
w = sk.random_bsr(1152, 2048, 128, 0.15, pattern="powerlaw", dtype=bf, device="cuda", seed=5); b = torch.randn(2048, 1000, device="cuda").to(bf); o_ = torch.randn(1152, 1000, device="cuda").to(bf)
f = run(Product.of(w, b, None, Epilogue(other=o_, beta=2.0)), True); o = f(); torch.cuda.synchronize()
z = w.to_dense().double() @ b.double() + 2 * o_.double()
print("row-major C", float(((o.double() - z).abs() / (1 + z.abs())).max()), "nan", int(o.isnan().sum()), f.c, flush=True)
T, k, N = 8192, 4096, 16384
w2 = sk.random_bsr(k, N, 128, 0.125, dtype=bf, device="cuda", seed=1); x = torch.randn(T, k, device="cuda").to(bf)
s = torch.randn(T, N, device="cuda").to(bf)
c1 = Product.of(x, w2, None, Epilogue(other=s, combine="mul"))
f = {"staged": run(c1, False), "held": run(c1, True), "held 8x32": run(c1, True, 32)}
a = f["staged"]().double(); b_ = f["held"]().double()
print("mul difference", float(((a - b_).abs() / (1 + a.abs())).max()), int(b_.isnan().sum()), flush=True)
show("mul", rounds(f, count=7))
S = 8192
w = sk.random_bsr(S, S, 128, 0.125, dtype=bf, device="cuda", seed=1); d = torch.randn(S, S, device="cuda").to(bf); x8, r8 = torch.randn(S, S, device="cuda").to(bf), torch.randn(S, S, device="cuda").to(bf); b8 = torch.randn(S, device="cuda").to(bf)
c2 = Product.layer(x8, w, Epilogue(bias=b8, other=r8))
f = {"staged": run(c2, False), "held": run(c2, True), "cublas": lambda: torch.nn.functional.linear(x8, d, b8).add_(r8)}
a = f["staged"]().double(); b_ = f["held"]().double()
print("residual difference", float(((a - b_).abs() / (1 + a.abs())).max()), int(b_.isnan().sum()), flush=True)
r = rounds(f, count=7, inner=4); show("bias residual", r); print("of cublas", {k_: r["cublas"] / 8 / v for k_, v in r.items()}, flush=True)
