"""Prefill of a long prompt with attention that follows the blocks that matter, beside dense attention.

    python examples/long_prefill.py                                  a tiny random Llama, some seconds on a CPU
    python examples/long_prefill.py --model FOLDER --tokens 32768    a checkpoint of transformers, on a GPU

Prints for each policy the time of the prefill, and how far the logits of the last token are from those of dense
attention. Random weights say nothing of what a policy keeps of a trained model, and a CPU nothing of speed. One run on
two cores; your times differ:

    policy                          ms   distance
    dense                          336      0.000
    window 256, sinks 64           255      1.240
    XAttention(0.9)                367      0.548
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers as hugging_face
from torch import Tensor

import sparsek as sk
import sparsek.integrations.transformers  # registers attn_implementation="sparsek"

transformers: Any = hugging_face
POLICIES: dict[str, Any] = {
    "dense": None,
    "window 256, sinks 64": {"window": 256, "sinks": 64},
    "XAttention(0.9)": sk.policies.XAttention(threshold=0.9),
}


def model_of(folder: str | None, device: str) -> Any:
    """A causal model in bf16 on a GPU, in fp32 on a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if folder:
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, dtype=dtype, attn_implementation="sparsek").to(device).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        attn_implementation="sparsek",
    )
    return transformers.LlamaForCausalLM(config).to(device, dtype).eval()


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> tuple[Tensor, float]:
    """Logits [vocabulary] of the last token and the least time of two runs, in ms: the first also plans."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        logits = model(ids, logits_to_keep=1).logits[0, -1].float().cpu()  # waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return logits, min(times)


def main() -> None:
    of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_argument("--model", help="a folder that from_pretrained loads")
    of.add_argument("--tokens", type=int, default=2048)
    of.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = of.parse_args()

    model = model_of(given.model, given.device)
    ids = torch.randint(model.config.vocab_size, (1, given.tokens), device=given.device)
    print(f"{'policy':<25} {'ms':>8} {'distance':>10}")
    dense = None
    for name, policy in POLICIES.items():
        model.config.sparsek = policy
        logits, ms = prefill(model, ids)
        dense = logits if dense is None else dense
        distance = (logits - dense).norm() / dense.norm()
        print(f"{name:<25} {ms:8.0f} {distance:10.3f}")


if __name__ == "__main__":
    main()
