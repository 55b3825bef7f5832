"""Attention over q, k and v in FP8, in plain torch: the attention of scale * values, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.quantized_heads import QuantizedHeads
from sparsek.attn.reference.attention import attention
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import dtypes


def attention_fp8(
    q: QuantizedHeads,
    k: QuantizedHeads,
    v: QuantizedHeads,
    mask: BlockMask,
    *,
    scale: float | None = None,
    scores: Scores = PLAIN,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of `reference.attention` over the dequantized operands.

    Args:
        q: Queries [B, Hq, S, D].
        k: Keys [B, Hkv, T, D].
        v: Values [B, Hkv, T, Dv].
        mask: For S queries and T keys, with 1 or B batch items and 1, Hkv or Hq heads.
        scale: D**-0.5 by default.
        scores: What changes the scores.
        dtype: In which all is computed: float32, or float64, in which this is the specification of kernels.

    Returns:
        out [B, Hq, S, Dv] and lse [B, Hq, S], both in `dtype`.
    """
    with dtypes.as_given(q.device):
        wide = q.dequantize(dtype), k.dequantize(dtype), v.dequantize(dtype)
    return attention(*wide, mask, scale=scale, scores=scores)
