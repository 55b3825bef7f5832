"""python fp8_hunt.py SECONDS; several at once on the card. PYTHONPATH=. from the repository."""
import sys, time, os, torch, sparsek as sk
from sparsek.core.device import card_of
from sparsek.plan.attention_fp8 import AttendedFp8
from sparsek.plan.kernel import AttentionCall
from sparsek.testing.attention_cases import AttentionCase
from tests.kernels.attention.test_hopper_fp8_gpu import KERNEL
from tests.kernels.attention.test_hopper_fwd_gpu import per_head
end = time.time() + float(sys.argv[1]); launches = drawn = bad = 0
while time.time() < end:
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    q, k, v, mask = AttentionCase("h", per_head, heads=(8, 2), dims=(64, 64), batch=2).make("cuda", torch.bfloat16, seed)
    q, k, v = sk.quantize_heads(q, k, v, "block", rows=128)
    p = AttendedFp8(q, k, v, mask, lse=True).problem(card_of(q.device))
    (c,) = [c for c in KERNEL.configs(p) if (c.groups, c.keys) == (1, 64)]
    work = KERNEL.prepare(p, c, mask)
    def go():
        out = torch.full((*q.shape[:3], 64), torch.nan, dtype=torch.bfloat16, device="cuda")
        lse = torch.full(q.shape[:3], torch.nan, device="cuda")
        KERNEL.launch(c, work, AttentionCall(q, k, v, mask, 0.125, out, lse)); return out, lse
    runs = [go() for _ in range(51)]; launches += 51; drawn += 1
    outs = torch.stack([o for o, _ in runs]).view(torch.int16); want = outs.median(0).values
    hit = (outs != want).flatten(1).any(1).nonzero().flatten().tolist()
    for at in hit:
        bad += 1; o = runs[at][0]; d = (outs[at] != want).nonzero()
        b, h = d[0, :2].tolist(); rows = sorted(set(d[(d[:, 0] == b) & (d[:, 1] == h), 2].tolist()))
        w = want.view(torch.bfloat16)[b, h, rows].double(); e = o[b, h, rows].double() - w
        kh, t = h // 4, torch.arange(1500, device="cuda")
        qq, kk, vv = (x.dequantize(torch.float64) for x in (q, k, v)); seen = mask.to_dense()[b if mask.batch > 1 else 0, kh][rows]
        pr = (qq[b, h, rows] @ kk[b, kh].T / 8).masked_fill(~seen, -torch.inf).softmax(-1)
        fits = []
        for j in range(0, 1500, 64):  # is the error a multiple of one step's P V? the factor tells the scale it had
            x = pr[:, j:j+64] @ vv[b, kh, j:j+64]; f = float((x * e).sum() / x.square().sum().clamp(min=1e-30))
            fits.append((float((e - f * x).norm() / e.norm()), j, (f + 1) * float(v.scale[b, kh, j // 128])))
        print(f"BAD seed {seed} launch {at} tiles {sorted({(*x[:2], x[2] // 16) for x in d.tolist()})} lse same "
              f"{torch.equal(runs[at][1], runs[at - 1][1])} max {float(e.abs().max()):.3g} best (residual, key, scale it had) {min(fits)}", flush=True)
    if drawn % 20 == 1:  # all launches wrong alike would look equal
        from sparsek.testing.attention_fp8_budget import check_attention_fp8
        g = check_attention_fp8(q, k, v, mask, *runs[0])
        if not g.passed: print("BAD ALIKE", seed, g, flush=True)
print(os.getpid(), torch.cuda.get_device_name(), "drawn", drawn, "launches", launches, "bad", bad)
