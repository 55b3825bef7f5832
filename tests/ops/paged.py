"""Calls of the verb `attention_paged` with the cases of kernels."""

from typing import Any

import sparsek as sk
from sparsek.testing.paged_budget import PagedInputs
from tests.attn.paged_cases import PAGED_CASES, PagedCase

CASES = {case.note: case for case in PAGED_CASES}
MIXED = PagedCase("mixed", ((1, 40), (5, 33), (0, 9), (20, 20)), heads=(4, 2), dims=(16, 16), dtype="fp32")


def mask_of(x: PagedInputs) -> Any:
    """The mask that means what the case has."""
    if x.lists is not None:
        return x.lists
    return sk.MaskPolicy(window=x.window, sinks=x.sinks, causal=x.causal) if x.window else None


def arguments_of(x: PagedInputs) -> dict[str, Any]:
    """All arguments of the verb for these inputs."""
    return {
        "q": x.q, "cache": x.cache, "block_table": x.block_table, "seq_lens": x.seq_lens,
        "cu_seqlens_q": x.cu_seqlens_q, "mask": mask_of(x), "max_seqlen_q": x.max_q, "max_seqlen_k": x.max_k,
        "causal": x.causal, "scale": x.scale, "softcap": x.softcap, "sink_logits": x.sink_logits, "k_scale": x.k_scale,
        "v_scale": x.v_scale,
    }  # fmt: skip


def attend(x: PagedInputs, **changed: Any) -> Any:
    """The verb's result."""
    return sk.attention_paged(**{**arguments_of(x), **changed})
