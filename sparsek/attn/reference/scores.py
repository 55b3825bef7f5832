"""What changes the scores of attention before the softmax: a cap, a bias by distance, learned sinks."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparsek.core import arguments
from sparsek.core.arguments import faking, is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import concrete, untransformed, wants_gradient

MARK = "a tensor"
CAPS = (1e-3, 1e3)  # float32 represents a scale over these; of larger caps it loses small scores


class Scores(NamedTuple):
    """The scores of head h of item b, from s = scale <q, k>, before the mask and the softmax:

        s = softcap * tanh(s / softcap)                      softcap > 0 (Gemma 2, arXiv:2408.00118)
        s = s - slope[h] * |i + T - S - j|                   alibi_slopes float32 [Hq] or [B, Hq] (arXiv:2108.12409)
        lse = log(exp(sink[h]) + sum_j exp(s_j))             sink_logits [Hq], float32 or the dtype of q

    for query i of S and key j of T. A sink is a key with a score of its own and a value of 0, which every query sees:
    a query that sees no other key has out = 0 and lse = sink.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sink_logits: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing changes."""
        return not self.softcap and self.alibi_slopes is None and self.sink_logits is None

    def with_sinks(self, sink_logits: Tensor | None) -> Scores:
        """The softcap and slopes with these sinks."""
        softcap, alibi_slopes, known = self
        if sink_logits is known:
            return self
        plain = not softcap and alibi_slopes is None and sink_logits is None
        return PLAIN if plain else Scores(softcap, alibi_slopes, sink_logits)

    def parted(self) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
        """The fields, as keys of calls have them, with MARK in the place of each tensor; and the tensors. None for
        numbers that are no floats: 1, 1.0 and True are one key.
        """
        marked: list[Any] = []
        tensors: list[Tensor] = []
        for x in self:
            if x is None or x.__class__ is float:
                marked.append(x)
            elif isinstance(x, Tensor):
                marked.append(MARK)
                tensors.append(x)
            else:
                return None, tensors
        return tuple(marked), tensors

    @property
    def changes(self) -> dict[str, bool]:
        """Fields of problems: whether they are capped, and biased by slopes."""
        return {"softcap": self.softcap > 0, "alibi": self.alibi_slopes is not None}

    def slopes(self, batch: int, heads: int) -> Tensor:
        """[batch, heads], a view."""
        assert self.alibi_slopes is not None
        return self.alibi_slopes.expand(batch, heads)


PLAIN = Scores()


def told(softcap: bool, alibi: bool, sink_logits: str) -> str:
    """What changes the scores of a problem, in words."""
    there = (("softcap", softcap), ("alibi_slopes", alibi), (f"{sink_logits} sink_logits", sink_logits))
    return ", ".join(name for name, given in there if given) or "plain scores"


Places: TypeAlias = tuple[Tensor, Tensor]
"""The positions of some queries, i + T - S for query i, and of some keys."""


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """int64 [..., n, t]: |query - key| of positions [..., n] and [..., t]."""
    return (queries[..., :, None] - keys[..., None, :]).abs()


def capped(s: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """softcap * tanh(s / softcap) and its derivative; `s` and None for a softcap of 0."""
    if not softcap:
        return s, None
    t = torch.tanh(s / softcap)
    return softcap * t, 1 - t * t


def changed(s: Tensor, scores: Scores, places: Places | None) -> tuple[Tensor, Tensor | None]:
    """Scores s [B, Hq, n, t] of the queries and keys `places`, capped and biased; the derivative by `s`, None for 1."""
    s, slope = capped(s, scores.softcap)
    if scores.alibi_slopes is None:
        return s, slope
    assert places is not None, "ALiBi needs the positions of queries and keys"
    slopes = scores.slopes(s.shape[0], s.shape[1]).to(s.dtype)
    return s - slopes[..., None, None] * distances(*places).to(s.dtype), slope


def sink_gradients(
    out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, sink_logits: Tensor
) -> Tensor:
    """The gradient of `sink_logits` [Hq] for each batch item: [B, Hq], in the dtype of lse.

    - sum_i exp(sink - lse_i) (<grad_i, out_i> - grad_lse_i), for out [B, Hq, S, Dv], which shrinks as the sink grows.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = (sink_logits.to(lse.dtype)[None, :, None] - lse).exp()
    return -torch.where(lse == -torch.inf, 0, weights * delta).sum(-1)


def checked_scores(
    q: Any,
    softcap: Any,
    alibi_slopes: Any,
    sink_logits: Any,
    *,
    here: bool = True,
    dtype: torch.dtype | None = None,
) -> Scores:
    """What changes the scores of q. InvalidInput for a softcap, slopes or sinks that do not fit q.

    `here`: slopes and sinks must be on the device of q. A call that is only predicted takes them on any; on the meta
    device only if q is there too. `dtype`: of results, q's own for None.
    """
    cap = checked_softcap(softcap)
    if cap == 0 and alibi_slopes is None and sink_logits is None:
        return PLAIN
    (batch, heads), kinds = q.shape[:2], {torch.float32, dtype or q.dtype}
    for name, x, shapes, dtypes in (
        ("alibi_slopes", alibi_slopes, ((heads,), (batch, heads)), {torch.float32}),
        ("sink_logits", sink_logits, ((heads,),), kinds),
    ):
        if x is None:
            continue
        arguments.dense_beside(name, x, "q", q)
        if tuple(x.shape) not in shapes or x.dtype not in dtypes:
            right = " or ".join(map(str, map(list, shapes))), " or ".join(sorted(map(str, dtypes)))
            raise InvalidInput(
                f"{name} is {x.dtype} {list(x.shape)}; for q {list(q.shape)} it must be {right[1]} {right[0]}"
            )
        if x.device != q.device and (here or x.is_meta):
            raise InvalidInput(
                f"{name} is on {x.device} and q on {q.device}; call {name}.to({str(q.device)!r})"
            )
        if x is alibi_slopes and wants_gradient(x):
            raise InvalidInput(
                "alibi_slopes requires a gradient, which attention does not give; pass alibi_slopes.detach()"
            )
    if sink_logits is not None:
        check_sinks(sink_logits)
    return Scores(cap, alibi_slopes, sink_logits)


def checked_softcap(softcap: Any) -> float:
    """InvalidInput unless it is 0 or in CAPS."""
    cap = arguments.number("softcap", softcap)
    if cap != 0 and not CAPS[0] <= cap <= CAPS[1]:
        raise InvalidInput(f"softcap is {cap}; it must be 0, for none, or from {CAPS[0]} to {CAPS[1]:.0f}")
    return cap


def check_sinks(sink_logits: Tensor) -> None:
    """InvalidInput for NaN and +inf among sinks on a CPU. On a GPU that would wait."""
    if sink_logits.device.type != "cpu" or torch.compiler.is_compiling() or faking() or is_fake(sink_logits):
        return
    try:
        plain = concrete(sink_logits, "", "").detach()
    except InvalidInput:  # vmap maps over them
        return

    def find() -> int | None:
        bad = (plain < torch.inf).logical_not()
        return int(bad.nonzero()[0]) if bool(bad.any()) else None

    with _disable_current_modes():  # make_fx records what is read
        head = untransformed(find)
        value = None if head is None else untransformed(lambda: float(plain[head]))
    if head is not None:
        raise InvalidInput(f"sink_logits[{head}] is {value}; a sink is a finite number, or -inf for none")
