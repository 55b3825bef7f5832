"""Changed scores for tests: each option alone, and all of them, for any q."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsek.attn.reference.scores import Scores


def _slopes(q: Tensor, *, per_item: bool) -> Tensor:
    """float32 [Hq], or [B, Hq] with strides."""
    draw = torch.Generator(q.device).manual_seed(7)
    shape = (q.shape[1], q.shape[0]) if per_item else (q.shape[1],)
    slopes = torch.rand(shape, generator=draw, dtype=torch.float32, device=q.device)
    return slopes.T if per_item else slopes


def _sinks(q: Tensor, dtype: torch.dtype) -> Tensor:
    """[Hq], two apart in memory; one of them is large, and one -inf."""
    draw = torch.Generator(q.device).manual_seed(8)
    sinks = torch.randn(2 * q.shape[1], generator=draw, dtype=torch.float32, device=q.device).to(dtype)[::2]
    if len(sinks) > 1:
        sinks[0], sinks[1] = 9.0, -torch.inf
    return sinks


CHANGES: dict[str, Callable[[Tensor], Scores]] = {
    "softcap": lambda q: Scores(softcap=2.0),
    "slopes": lambda q: Scores(alibi_slopes=_slopes(q, per_item=False)),
    "slopes per item": lambda q: Scores(alibi_slopes=_slopes(q, per_item=True)),
    "sinks": lambda q: Scores(sink_logits=_sinks(q, torch.float32)),
    "all": lambda q: Scores(5.0, _slopes(q, per_item=True), _sinks(q, q.dtype)),
}
