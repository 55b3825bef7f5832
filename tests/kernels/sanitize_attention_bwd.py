"""Runs hopper.attention_bwd over small awkward inputs, for compute-sanitizer: see test_hopper_attention_bwd_gpu.py."""

import torch

from sparsek.kernels import load
from sparsek.mask.mask import BlockMask
from sparsek.testing.attention_cases import AttentionCase, random_bits
from tests.kernels.attention_grad_cases import hold

CASES = (
    AttentionCase("bits", lambda d: random_bits(d, (300, 333), (128, 128), heads=2), dims=(128, 128)),
    AttentionCase("small blocks", lambda d: random_bits(d, (300, 333), (64, 64), heads=2), dims=(128, 128)),
    AttentionCase("two dims", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(40, 128)),
    AttentionCase("narrow heads", lambda d: BlockMask.causal(400, device=d), heads=(4, 2), dims=(64, 64)),
    AttentionCase("many tiles", lambda d: BlockMask.causal(1000, device=d), heads=(17, 17), dims=(128, 128)),
)

if __name__ == "__main__":
    kernel = load("hopper.attention_bwd")
    for case in CASES:
        for deterministic in (True, False):
            hold(kernel, case, device="cuda", dtype=torch.bfloat16, deterministic=deterministic)
    torch.cuda.synchronize()
    print("every gradient is within its budget")
