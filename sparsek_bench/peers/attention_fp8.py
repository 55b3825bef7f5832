"""What a user would pick instead of `sk.attention` of q, k and v in FP8: rounded to e4m3 before any time, as ours are.

FlashAttention-3 gets the same values and scales, and v by rows: its kernel transposes v as it goes, so within its time,
where `quantize_heads` has done it before ours. The block-sparse kernels of cuDNN frontend and FlashInfer have
SageAttention's scales: one for each token of q, for each 16 keys and for each column of v. They round q, k and v
themselves. Their results are judged as the attention of what they rounded to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.quantized_heads import E4M3, QuantizedHeads, in_key_order
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from sparsek_bench.engine.case import block_name
from sparsek_bench.engine.peer import Peer, ReadyPeer, accepted, holding, setting_up
from sparsek_bench.peers.attention import (
    LOOSE,
    Flash3,
    even_lists,
    flashinfer_limits,
    flashinfer_plan,
    imported,
)

SAGE_KEYS = 16  # that share a scale


@dataclass(frozen=True)
class Flash3Fp8(Flash3):
    """FlashAttention-3 in FP8, on the values and scales of our own q, k and v."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        reasons = {
            f"takes a scale for each head, not for each {case.scale}": case.scale != "head",
            "its scales are of the heads of keys": case.heads != case.kv_heads,
        }
        return super().why_not(case, device) + holding(reasons)

    def timed(self, case: Any, attend: Any, one: Any) -> Callable[[], Any]:
        given = (self.laid(straight(x)).contiguous() for x in one.heads)
        scales = {f"{name}_descale": x.scale for name, x in zip("qkv", one.heads, strict=True)}
        return partial(attend, *given, **scales)


def straight(x: QuantizedHeads) -> Tensor:
    """The values [B, H, L, D] of heads, turned ones too."""
    return in_key_order(x.values).mT[:, :, : x.length] if x.turned else x.values


class SageHeads(NamedTuple):
    """Values [B, H, L, D] in e4m3 of q, k or v, and a float32 scale that broadcasts over them."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.scale


def sage_heads(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> list[Any]:
    """Of values [B, H, L, D] and scales [B, H, S] of q, [B, H, T / 16] of k and [H, D] of v."""
    of_q, of_k, of_v = scales
    of_keys = of_k.repeat_interleave(SAGE_KEYS, -1)[..., : k.shape[2]]
    shaped = (of_q[..., None], of_keys[..., None], of_v[:, None])
    return [SageHeads(*each) for each in zip((q, k, v), shaped, strict=True)]


@dataclass(frozen=True)
class SageBlocks(Peer):
    """Block-sparse attention that rounds q, k and v by SageAttention's scales, which is not timed."""

    def made(self, case: Any, one: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        """q, k and v of a set as `sage_heads`, and the call over them."""
        raise NotImplementedError

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        first = sets[0]
        with setting_up():
            made = [self.made(case, one) for one in sets]
            calls = tuple(call for _, call in made)
            out, *_ = [call() for call in calls]  # what fails, fails in the set-up
            q, k, v = made[0][0]
            gate = check_attention_fp8(q, k, v, first.mask, out, rows=first.sample())
            rounded = accepted(gate, "its result", LOOSE)
        scales = f"scales of a token of q, {SAGE_KEYS} keys, a column of v"
        return ReadyPeer(calls, ", ".join(filter(None, (scales, rounded))))


@dataclass(frozen=True)
class CudnnSage(SageBlocks):
    """cuDNN frontend 1.32. Its public function rounds in every call, so its parts are called."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        (bq, bk), dims = case.block, (case.dim, case.v_dim)
        even = case.mask_text.uniform and not case.q_len % bq and not case.kv_len % bk
        reasons = {
            f"takes as many whole blocks in every row, which {case.mask_text.words} has not": not even,
            f"takes square blocks, not {block_name(case.block)}": bq != bk,
            f"takes heads of 128, not {case.dim} and {case.v_dim}": dims != (128, 128),
            f"results are bf16, not {case.dtype}": case.dtype != "bf16",
            f"takes no shared heads, not {case.heads} to {case.kv_heads}": case.heads != case.kv_heads,
        }
        return super().why_not(case, device) + holding(reasons)

    def made(self, case: Any, one: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        module, index = "cudnn.block_sparse_attention", even_lists(one)
        attend = getattr(imported(f"{module}._interface"), f"_bsa_attn_fwd_sm90_fp8_blk{case.block[0]}")
        given = imported(f"{module}._fp8_quant")._quantize_sage_bhsd(one.q, one.k, one.v, v_layout="bhds")
        q, k, v, *scales = given
        return sage_heads(q, k, v.mT, *scales), lambda: attend(*given, index, index.shape[-1])[0]


@dataclass(frozen=True)
class FlashInferSage(SageBlocks):
    """FlashInfer on Hopper (backend "cake"), a plan for each set."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        return super().why_not(case, device) + flashinfer_limits(case)

    def made(self, case: Any, one: Any) -> tuple[list[Any], Callable[[], Tensor]]:
        rounding = imported("flashinfer.cake_vsa_sm90").sage_fp8_quantize_sm90
        q, k, v, *scales = rounding(one.q[0], one.k[0], one.v[0])
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        plan = flashinfer_plan(one, q_data_type=E4M3, **named)
        return sage_heads(q[None], k[None], v[None], *scales), lambda: plan.run(q, k, v)[None]


FP8_PEERS: tuple[Peer, ...] = (
    Flash3Fp8("fa3_fp8", "FlashAttention-3 in FP8", "cuda"),
    CudnnSage("cudnn_bsa_fp8", "cuDNN block-sparse in FP8", "cuda"),
    FlashInferSage("flashinfer_fp8", "FlashInfer block-sparse in FP8", "cuda"),
)
