"""One of Hopper's attention kernels over small awkward inputs, for `compute-sanitizer --tool memcheck`."""

import sys

import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from tests.attn.attention_cases import AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import hold
from tests.attn.kernels.forward import test_attention_fwd
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem
from tests.sampling import dealt, sampled

LARGE = (128, 128)
BITS = AttentionCase("bits", lambda d: random_bits(d, (300, 333), LARGE, heads=2), dims=LARGE)
SMALL = AttentionCase("small blocks", lambda d: random_bits(d, (300, 333), (64, 64), heads=2), dims=(64, 64))
FORWARD = (
    BITS,
    SMALL,
    AttentionCase(
        "padded heads", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(96, 192)
    ),
    AttentionCase(
        "cut", lambda d: BlockMask.causal(q_len=5, kv_len=4000, device=d), heads=(8, 2), dims=LARGE
    ),
    AttentionCase("many tiles", lambda d: BlockMask.causal(2500, device=d), heads=(8, 8), dims=LARGE),
)
BACKWARD = (
    BITS,
    AttentionCase("small blocks", SMALL.mask, dims=LARGE),
    AttentionCase("two dims", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(40, 128)),
    AttentionCase("narrow heads", lambda d: BlockMask.causal(400, device=d), heads=(4, 2), dims=(64, 64)),
    AttentionCase("many tiles", lambda d: BlockMask.causal(1000, device=d), heads=(17, 17), dims=LARGE),
)


WIDE = (
    AttentionCase("bits", BITS.mask, dims=(256, 256)),
    AttentionCase(
        "blocks of 64 keys", lambda d: random_bits(d, (300, 333), (128, 64), heads=2), dims=(192, 256)
    ),
    AttentionCase("two dims", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(256, 40)),
    AttentionCase("grouped heads", lambda d: BlockMask.causal(400, device=d), heads=(4, 2), dims=(256, 128)),
    AttentionCase(
        "cut",
        lambda d: BlockMask.sliding_window(4000, 200, sinks=130, device=d),
        heads=(2, 1),
        dims=(256, 256),
    ),
)
FP8 = (
    *(case for case in FORWARD if case.dims[1] <= 128),
    AttentionCase("padded heads", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(96, 48)),
)


def main(name: str) -> None:
    kernel = load(name)
    if name == "hopper.attention_bwd":
        for hand, case in enumerate(BACKWARD):
            for deterministic in dealt((True, False), 2, hand):
                hold(kernel, case, device="cuda", dtype=torch.bfloat16, deterministic=deterministic)
    elif name == "hopper.attention_bwd_wide":
        for case in WIDE:
            hold(kernel, case, device="cuda", dtype=torch.bfloat16)
    elif name == "hopper.attention_fp8":
        for hand, case in enumerate(FP8):
            for scale in dealt(("head", "block"), 2, hand):
                test_attention_fwd.hold(name, case, torch.bfloat16, scale)
    else:
        for case in FORWARD:
            q, k, v, mask = case.make("cuda", torch.bfloat16)
            for c in sampled(kernel.configs(problem(q, k, v, mask)), 2, of=str(case)):
                gate = check_attention(q, k, v, mask, *attend(kernel, q, k, v, mask, c))
                assert gate.passed, (str(case), c, gate)
    torch.cuda.synchronize()
    print("every result is within its budget")


if __name__ == "__main__":
    main(sys.argv[1])
