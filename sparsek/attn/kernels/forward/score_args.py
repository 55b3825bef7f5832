"""What changes scores, as arguments of kernels on a GPU. They work in base 2:

cap None     s2 = factor s                         factor = scale log2(e)
else         s2 = factor tanh(cap s / 2 log2(e))   factor = softcap log2(e), cap = 2 log2(e) scale / softcap
slopes       s2 = s2 - log2(e) slope |i + ahead - j|
"""

from math import e, log2
from typing import NamedTuple

from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.scores import Scores

LOG2E = log2(e)


class Slopes(NamedTuple):
    """ALiBi: the slope of head h of item b is at b * slope_item + h * slope_head of `slopes`. All None without."""

    slopes: Tensor | None = None
    slope_item: int | None = None
    slope_head: int | None = None
    ahead: int | None = None


class Sinks(NamedTuple):
    """The sink of head h is at h * sink_step of `sinks`. All None without."""

    sinks: Tensor | None = None
    sink_step: int | None = None


def factor(scale: float, scores: Scores) -> float:
    """The factor of capped scores, or of scores, in base 2."""
    return (scores.softcap or scale) * LOG2E


def cap(scale: float, scores: Scores) -> float | None:
    """The factor of scores inside the cap."""
    return 2 * LOG2E * scale / scores.softcap if scores.softcap else None


def slopes(scores: Scores, q_len: int, kv_len: int) -> Slopes:
    """The arguments of ALiBi: query i of q_len stands at key i + ahead of kv_len."""
    x = scores.alibi_slopes
    if x is None:
        return Slopes()
    item = x.stride(0) if x.dim() == 2 else 0
    return Slopes(x, item, x.stride(-1), kv_len - q_len)


def sinks(scores: Scores) -> Sinks:
    x = scores.sink_logits
    return Sinks() if x is None else Sinks(x, x.stride(0))


def ends(mask: BlockMask) -> tuple[int | None, int | None]:
    """Keys at the ends of its interval that a query sees without a bit, of a mask with members; None without any. At
    most all, so that sums with bounds are 32 bits.
    """
    members, most = mask.members, mask.kv_len
    if members is None or not members.at_ends:
        return None, None
    return min(members.window, most), min(members.sinks, most)
