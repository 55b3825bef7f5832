"""Runs hopper.attention_fwd over small awkward inputs, under compute-sanitizer: test_hopper_attention_gpu.py does."""

import torch

from sparsek.kernels import load
from sparsek.mask.mask import BlockMask
from sparsek.testing.attention_cases import AttentionCase, random_bits
from tests.kernels.planned_attention import attend, problem

CASES = (
    AttentionCase("bits", lambda d: random_bits(d, (300, 333), (128, 128), heads=2), dims=(128, 128)),
    AttentionCase("small blocks", lambda d: random_bits(d, (300, 333), (64, 64), heads=2), dims=(64, 64)),
    AttentionCase(
        "padded heads", lambda d: BlockMask.causal(q_len=200, kv_len=333, device=d), dims=(96, 192)
    ),
    AttentionCase(
        "cut", lambda d: BlockMask.causal(q_len=5, kv_len=4000, device=d), heads=(8, 2), dims=(128, 128)
    ),
    AttentionCase("many tiles", lambda d: BlockMask.causal(2500, device=d), heads=(8, 8), dims=(128, 128)),
)

if __name__ == "__main__":
    kernel = load("hopper.attention_fwd")
    for case in CASES:
        q, k, v, mask = case.make("cuda", torch.bfloat16)
        for c in kernel.configs(problem(q, k, v, mask)):
            attend(kernel, q, k, v, mask, c)
    torch.cuda.synchronize()
