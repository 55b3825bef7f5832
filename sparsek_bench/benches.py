"""Every benchmark, by the name of its command, with the help that this shows. One is loaded when it is looked up."""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsek_bench.engine.bench import Bench

# The module of that name in suites/ has a BENCH.
HELP = {
    "spmm": "BSR and dense against its peers: N(0, 1) data, rotating buffers, interleaved rounds, median, spread.",
    "sddmm": "X @ Y at the stored blocks of a pattern, against its peers.",
    "spgemm": "BSR x BSR against its peers, and what finding out which blocks meet takes of a first call.",
    "linear": "act(x @ W.T + bias) + residual, against torch and against this library's plain product.",
    "semi24": "2:4 matrices, whole or in stored blocks, against cuSPARSELt, cuBLAS and this library's BSR.",
    "fp8": "FP8 matrices in blocks or in 2:4 against cuBLAS, cuSPARSELt and the same in bf16.",
    "pack": "Dense matrices packed into Semi24 or BSR, against a copy of the same matrix.",
    "mlp": "An MLP with gelu against torch's: a training step, eager or compiled, or decoding in a CUDA graph.",
    "attention": "Attention over the blocks of a mask against its peers: N(0, 1) data, rotating buffers, interleaved "
    "rounds.",
    "attention-backward": "The gradients of attention against their peers, alone or with the forward pass of a "
    "training step.",
    "attention-fp8": "Attention of q, k and v in FP8 over the blocks of a mask, against the same in bf16.",
    "tokens": "Attention over blocks that each query chooses, forward, backward or both, against its peers.",
    "serving": "Attention over paged keys: chunks of prompts and decoding steps, beside unpaged kernels and a copy.",
    "fresh": "Attention whose mask is new in every call, host included, over a kept mask and over FlexAttention.",
    "policies": "Blocks of attention chosen from q and k: what that takes alone and in a call, and the mass kept.",
    "planner": "Every way to store a layer's weight, checked and timed; the one that predictions choose against the "
    "fastest.",
    "models": "Whole models with sparse layers over dense ones, new patterns, generate() of transformers, pruning.",
    "mesh": "Attention and models over the GPUs of one host, over the same work on one: times, bits, bytes, memory.",
    "host": "The host's time of calls as users write them, each over torch's: the suite, or the calls given by hand.",
}
MODULES = {"attention-backward": "attention_grad", "attention-fp8": "attention_fp8"}


class Benches(UserDict[str, Any]):
    """The benchmarks of HELP."""

    def __getitem__(self, name: str) -> "Bench":
        if name not in self.data:
            raise KeyError(name)
        return import_module(f"sparsek_bench.suites.{MODULES.get(name, name)}").BENCH


BENCHES: Mapping[str, "Bench"] = Benches(HELP)
