"""reference.attention_paged: the specification as a kernel, on any device, in any dtype and layout."""

from typing import Any

import torch

from sparsek.attn.plan.kernels import PagedCall, PagedKernel
from sparsek.attn.plan.problems import PagedProblem
from sparsek.attn.reference.attention_paged import attention_paged
from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel, wide_seconds, wide_size

OPTIONS = ("lists", "sink_logits", "k_scale", "v_scale", "scale", "softcap")


class ReferencePaged(FixedKernel):
    """`sparsek.attn.reference.attention_paged` as a kernel: that of CPU tensors, and the baseline for tests."""

    name = "reference.attention_paged"
    config = Fixed("every key of one request at a time, in float32 or float64")

    def only_by_name(self, p: PagedProblem) -> str:
        return "" if p.on_cpu else "reads the lengths on the host, which waits for the device"

    def prepare(self, p: PagedProblem, c: Fixed, source: Any) -> PagedProblem:
        return p

    def seconds(self, p: PagedProblem, c: Fixed) -> float:
        width, size = p.dim + p.v_dim, wide_size(p)
        keys = p.requests * p.q_heads * p.max_k * width * (2 * size + dtypes.itemsize(p.kv_dtype))
        scores = 12 * p.tokens * p.q_heads * p.max_k * size
        return wide_seconds(p, p.dense_flops, keys + scores, 40 * p.requests)

    def launch(self, c: Fixed, work: PagedProblem, call: PagedCall) -> None:
        q, k, table = call.q, call.k, call.block_table
        most = min(work.max_k, table.shape[1] * k.shape[2])
        edges = call.cu_seqlens_q.clamp(0, q.shape[0])
        options = {name: getattr(call, name) for name in OPTIONS}
        with torch.no_grad():
            result, sums = attention_paged(
                q, k, call.v, table.clamp(0, k.shape[0] - 1), call.seq_lens.clamp(0, most), edges.cummax(0).values,
                causal=work.causal, window=work.window, sinks=work.sinks, **options,
            )  # fmt: skip
            # Rows after the last request are 0 and -inf there.
            out_end, lse_end = (max(int(edges[-1]), end) for end in (call.out_end, call.lse_end))
            call.out[:out_end].copy_(result[:out_end])
            if call.lse is not None:
                call.lse[:, :lse_end].copy_(sums[:, :lse_end])


KERNEL: PagedKernel = ReferencePaged()
