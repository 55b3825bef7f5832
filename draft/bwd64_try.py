# ruff: noqa: T201
"""Steps of 128 queries of hopper.attention_bwd (heads of at most 64) on a GPU: one tile, masks, time. About 40 s.

    PYTHONPATH=. python draft/bwd64_try.py          each part in a process of its own, under a time limit
    PYTHONPATH=. python draft/bwd64_try.py one      one part: one, masks, repeat or time

Prediction, random 12.5 % in blocks of 128 at 32K, 16 heads, D 64, in order: 1.35 of the rate of 64 queries a step (1.2
to 1.45), which is 0.97 of FlashAttention-4's where that was 0.722. See draft/bwd64.md.
"""

import subprocess
import sys
import time

import torch

import sparsek as sk
from sparsek.kernels import load
from sparsek.mask.mask import BlockMask
from sparsek.plan.kernel import AttentionGradCall
from sparsek.testing.attention_cases import random_bits
from tests.kernels.attention.grad_cases import Inputs, _columns, differentiate, inputs, judged, problem

LIMITS = {"one": 60, "masks": 100, "repeat": 60, "time": 90}
KERNEL = load("hopper.attention_bwd")
BF16 = torch.bfloat16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def configs(given: Inputs, queries: int, deterministic: bool = True) -> list:
    p = problem(*given[:4], deterministic=deterministic)
    found = [c for c in KERNEL.configs(p) if c.queries == queries]
    assert found
    return found


def say(name: str, given: Inputs, deterministic: bool = True) -> None:
    """Against float64, over NaN, every ring of 128 queries; twice the same bits in order."""
    for c in configs(given, 128, deterministic):
        found = differentiate(KERNEL, given, c, deterministic=deterministic)
        gate = judged(given, found)
        again = differentiate(KERNEL, given, c, deterministic=deterministic)
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        right = gate.passed and (same or not deterministic)
        print("right" if right else "WRONG", name, c, gate if not gate.passed else "", same, flush=True)


def one() -> None:
    for dims in ((64, 64), (32, 64)):
        q, k, v = normal(1, 1, 128, dims[0]), normal(1, 1, 128, dims[0]), normal(1, 1, 128, dims[1])
        say("one tile", inputs(q, k, v, BlockMask.full(128, block=(128, 128), device="cuda")))
    q, k, v = (normal(1, 1, 512, 64) for _ in range(3))
    say("4 x 4 tiles", inputs(q, k, v, BlockMask.full(512, block=(128, 128), device="cuda")))


def masks() -> None:
    seed = int(time.time())
    print("seed", seed, flush=True)
    torch.manual_seed(seed)
    for dims in ((64, 64), (40, 32)):
        q, k, v = normal(2, 4, 333, dims[0]), normal(2, 2, 401, dims[0]), normal(2, 2, 401, dims[1])
        for ordered in (True, False):
            mask = random_bits("cuda", (333, 401), (128, 128), heads=4, seed=seed)
            say(f"bits, ragged, gqa {dims}", inputs(q, k, v, mask, with_lse=True), ordered)
    mask = _columns("cuda", [[0, 1], [], [2], [], [0]], (384, 600), (128, 128))
    q, k, v = normal(1, 4, 384, 64), normal(1, 2, 600, 64), normal(1, 2, 600, 64)
    say("keys that no query visits", inputs(q, k, v, mask))
    q, k, v = (normal(2, 16, 2048, 64) for _ in range(3))
    scores = torch.rand(2, 16, 16, 16, device="cuda")
    for name, mask in {
        "topk": BlockMask.topk(scores, 5, seq_len=2048, block=128),
        "causal": BlockMask.causal(2048, block=128, device="cuda"),
        "window": BlockMask.sliding_window(2048, 300, sinks=70, block=128, device="cuda"),
    }.items():
        say(name, inputs(q, k, v, mask))


def prepared(length: int) -> tuple:
    """q, k, v, mask and what the backward pass reads, from the library's own forward pass."""
    tiles = length // 128
    mask = BlockMask.topk(
        torch.rand(1, 1, tiles, tiles, device="cuda"), tiles // 8, seq_len=length, block=128
    )
    q, k, v, grad = (normal(1, 16, length, 64) for _ in range(4))
    with torch.no_grad():
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
    return Inputs(q, k, v, mask, 64**-0.5, out, lse, grad, None)


def launcher(given: Inputs, queries: int, deterministic: bool = True) -> tuple:
    p = problem(*given[:4], deterministic=deterministic)
    c = configs(given, queries, deterministic)[0]
    work = KERNEL.prepare(p, c, given.mask)
    outs = [torch.full_like(x, torch.nan) for x in given[:3]]
    call = AttentionGradCall(*given[:9], *outs, given.scores)
    return lambda: KERNEL.launch(c, work, call), outs


def repeat() -> None:
    torch.manual_seed(int(time.time()))
    given = prepared(8192)
    run, outs = launcher(given, 128)
    old, old_outs = launcher(given, 64)
    with torch.no_grad():
        run(), old()
        first = [x.clone() for x in outs]
        apart = [
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(outs, old_outs, strict=True)
        ]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2000):
            [x.fill_(torch.nan) for x in outs]
            run()
            wrong += sum((a != b).any() for a, b in zip(first, outs, strict=True))
    print("128 beside 64 queries, relative:", apart, "launches with other bits:", int(wrong), flush=True)


def timed() -> None:
    """Median of interleaved rounds on a hot card; executed TFLOPS of five products."""
    print(torch.cuda.get_device_name(), flush=True)
    for length, launches in ((8192, 20), (32768, 4)):
        given = prepared(length)
        flops = 10 * 64 * length * length // 8 * 16
        kinds = {(n, o): launcher(given, n, o)[0] for n in (64, 128) for o in (True, False)}
        times: dict = {kind: [] for kind in kinds}
        with torch.no_grad():
            for rounds in range(14):
                for kind, run in kinds.items():
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(launches):
                        run()
                    end.record()
                    end.synchronize()
                    if rounds > 3:
                        times[kind].append(begin.elapsed_time(end) / launches)
        mid = {kind: sorted(each)[len(each) // 2] for kind, each in times.items()}
        for (n, ordered), ms in mid.items():
            ratio = mid[64, ordered] / ms
            print(
                f"{length} random 12.5 %, {n} queries, {'in' if ordered else 'any'} order: {ms * 1e3:.0f} us, "
                f"{flops / ms / 1e9:.0f} TFLOPS, {ratio:.3f} of the rate of 64",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"one": one, "masks": masks, "repeat": repeat, "time": timed}[sys.argv[1]]()
    else:
        for part, limit in LIMITS.items():
            began = time.time()
            try:
                code = subprocess.run([sys.executable, __file__, part], timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = "HANGS"
            print(f"{part}: {code} after {time.time() - began:.0f} s", flush=True)
            if code != 0:
                break
