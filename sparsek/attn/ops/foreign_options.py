"""Options of other libraries' attention that SparseK's does not have, and what to do instead of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsek.core.errors import InvalidInput

SCORES = (
    "attention changes scores by softcap, alibi_slopes and sink_logits only; call "
    "torch.compile(flex_attention)(q, k, v, score_mod=..., block_mask=mask.to_flex()), which takes the same mask"
)
IN_A_POLICY = "write mask=sparsek.MaskPolicy(), in which a query sees the keys of its document up to its own"
NO_DROPOUT = (
    "attention drops no weights; leave it out, or call scaled_dot_product_attention with "
    "attn_mask=mask.to_dense()"
)
REFUSED = {
    "dropout_p": NO_DROPOUT,
    "dropout": NO_DROPOUT,
    "policy": "pass it as mask=",
    "attention_mask": "pass it as mask=, a bool tensor that is true where a query sees a key; for padding [B, T] "
    "attention_mask.bool()[:, None, None]",
    "q_offset": "write policy.mask(q, k, q_offset=...), or the q_offset= of a builder of BlockMask, and pass that mask",
    "kv_lengths": "write policy.mask(q, k, kv_lengths=...), or the kv_lengths= of BlockMask.topk, and pass that mask",
    "attn_mask": "pass it as mask=, which takes a bool tensor",
    "block_mask": "pass it as mask=, which takes a FlexAttention mask",
    "mask_mod": "make a mask of it: mask=sparsek.BlockMask.from_mask_mod(mask_mod, B, H, S, T)",
    "attn_bias": SCORES,
    "bias": SCORES,
    "score_mod": SCORES,
    "s_aux": "it is called sink_logits here: [Hq] in float32 or the dtype of q",
    "learnable_sink": "it is called sink_logits here: [Hq] in float32 or the dtype of q",
    "causal": "write is_causal=True, or mask=sparsek.MaskPolicy(), which puts the last query at the last key",
    "window_size": "write mask=sparsek.MaskPolicy(window=...), which counts the query's own key",
    "window": "write mask=sparsek.MaskPolicy(window=...), which counts the query's own key",
    "softmax_scale": "pass it as scale=",
    "sm_scale": "pass it as scale=",
    "enable_gqa": "leave it out: q may have any multiple of the heads of k and v",
    "cu_seqlens_q": "call attention_varlen for packed documents",
    "cu_seqlens": "call attention_varlen(q, k, v, cu_seqlens) for packed documents",
}
REFUSED_PACKED = {
    **{name: cure for name, cure in REFUSED.items() if name != "cu_seqlens_q"},
    "is_causal": IN_A_POLICY,
    "causal": IN_A_POLICY,
    "cu_seqlens": "it is called cu_seqlens_q here, and cu_seqlens_k where the keys differ",
    "max_seqlen_q": "leave it out: the lengths follow from cu_seqlens",
    "max_seqlen_k": "leave it out: the lengths follow from cu_seqlens",
}


# Beside None, the values at which an option of REFUSED or REFUSED_PACKED changes nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0.0,),
    "dropout": (0.0,),
    "causal": (False,),
    "is_causal": (False,),
    "window_size": ((-1, -1),),
    "enable_gqa": (False, True),
}


def refuse(name: str, options: Mapping[str, Any], known: Mapping[str, str] = REFUSED) -> None:
    """InvalidInput for options that `name` does not have and that would change its result; TypeError, as Python's own,
    for unknown names.
    """
    for each, value in options.items():
        if each not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument '{each}'")
        plain = isinstance(value, (bool, int, float, tuple))  # a tensor has no one truth
        if value is not None and not (plain and value in HARMLESS.get(each, ())):
            raise InvalidInput(f"{name} has no argument {each}: {known[each]}")
