"""A video transformer of diffusers whose attention visits a quarter of the blocks, beside the dense one.

    python examples/video.py                                          a tiny random Wan, some seconds on a CPU
    python examples/video.py --model FOLDER --latent 21x60x104        a Wan checkpoint's transformer, on a GPU

Runs a few denoising steps with and without the policy. Prints the layers that take it, the time of a step, and how far
the sample is from the dense one. The first layer stays dense. Random weights say nothing of quality, and a CPU nothing
of speed. One run on two cores; your times differ:

    sparse: blocks.1.attn1, blocks.2.attn1
    a step: 90 ms dense, 107 ms with 25% of the blocks
    distance of the sample: 0.0047
    undone: dense again
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

import sparsek as sk
from sparsek.integrations import diffusers

Wan: Any = WanTransformer3DModel


def model_of(folder: str | None, device: str) -> Any:
    """A Wan transformer in bf16 on a GPU, in fp32 on a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if folder:
        return Wan.from_pretrained(folder, torch_dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    made = Wan(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=3,
    )
    return (made if device == "cpu" else made.to(device, dtype)).eval()


@torch.no_grad()
def denoised(model: Any, noise: Tensor, text: Tensor, steps: int) -> tuple[Tensor, float]:
    """The sample after some Euler steps of a flow from noise, and the ms of a step after the first."""
    sample, times = noise.clone(), []
    for at in range(steps):
        began = time.perf_counter()
        t = torch.full((1,), 1000 * (1 - at / steps), device=noise.device)
        sample = sample - model(sample, t, text).sample / steps
        float(sample.sum())  # waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return sample, min(times[1:])


def main() -> None:
    of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_argument("--model", help="a folder with the transformer of a Wan pipeline")
    of.add_argument("--latent", default="8x32x32", help="frames x rows x columns of the latent video")
    of.add_argument("--steps", type=int, default=3)
    of.add_argument("--density", type=float, default=0.25, help="the share of the blocks that stay")
    of.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = of.parse_args()
    if given.steps < 2:
        of.error("--steps is 2 or more: the first step also plans")

    model = model_of(given.model, given.device)
    sizes = [int(each) for each in given.latent.split("x")]
    draw = torch.Generator("cpu").manual_seed(1)
    noise = torch.randn(1, model.config.in_channels, *sizes, generator=draw).to(given.device, model.dtype)
    text = torch.randn(1, 64, model.config.text_dim, generator=draw).to(given.device, model.dtype)

    dense, dense_ms = denoised(model, noise, text, given.steps)
    sparse = diffusers.use(model, sk.policies.SubBlock(density=given.density), skip_layers=(0,))
    print("sparse:", ", ".join(sparse.layers))
    sample, ms = denoised(model, noise, text, given.steps)
    distance = ((sample - dense).norm() / dense.norm()).item()
    print(f"a step: {dense_ms:.0f} ms dense, {ms:.0f} ms with {given.density:.0%} of the blocks")
    print(f"distance of the sample: {distance:.4f}")
    sparse.undo()
    again, _ = denoised(model, noise, text, 2)
    print("undone:", "dense again" if torch.equal(again, denoised(model, noise, text, 2)[0]) else "not equal")


if __name__ == "__main__":
    main()
