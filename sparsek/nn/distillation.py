"""A loss by which a sparse model learns from a dense one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    *,
    mask: Tensor | None = None,
    of: Literal["logits", "hidden"] = "logits",
) -> Tensor:
    """Return how far the logits or the hidden states of a student are from those of its teacher.

    Of logits s and t it is the mean over tokens of T^2 KL(softmax(t / T) || softmax(s / T)) (Hinton et al. 2015,
    arXiv:1503.02531), of hidden states |s - t|^2 / |t|^2 over all tokens, whose scale is that of no layer (SquareHead,
    Kurtic et al. 2023, arXiv:2310.06927).
    `torch.nn.functional.kl_div` has neither temperature nor mask, takes log-probabilities in their own dtype, and its
    "batchmean" is one over sequences. No sync.

    Args:
        student: Logits or hidden states [..., features], of a floating dtype.
        teacher: Those of the teacher, of the same shape. No gradient goes to it.
        temperature: T, 0.001 to 1000. For logits only.
        mask: [...], true or nonzero for the tokens that count, as an attention mask; all by default. Without any the
            loss is 0.
        of: "logits" or "hidden".

    Raises:
        InvalidInput: For arguments outside these ranges.

    Examples:
        >>> student, teacher = torch.zeros(2, 5, 100), torch.randn(2, 5, 100)
        >>> sk.nn.distillation_loss(student, teacher, temperature=2.0).shape
        torch.Size([])
    """
    arguments.tensor("student", student, dtypes.FLOATS)
    arguments.tensor("teacher", teacher, dtypes.FLOATS)
    if student.ndim == 0 or teacher.shape != student.shape or teacher.device != student.device:
        raise InvalidInput(
            f"teacher is {arguments.shown(teacher)} and student {arguments.shown(student)}; both must be "
            "[..., features] on one device"
        )
    if mask is not None and arguments.tensor("mask", mask).shape != student.shape[:-1]:
        raise InvalidInput(f"mask has shape {list(mask.shape)}; it must have {list(student.shape[:-1])}")
    arguments.one_of("of", of, ("logits", "hidden"))
    temperature = arguments.number("temperature", temperature, 1e-3, 1e3)
    if of == "hidden" and temperature != 1:
        raise InvalidInput(f"temperature is {temperature}; it is for logits, and 1 for hidden states")
    exact: Any = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    s, t = student.to(exact), teacher.detach().to(exact)
    counts = None if mask is None else mask.to(student.device) != 0

    def total(each: Tensor) -> Tensor:
        return (each if counts is None else torch.where(counts, each, 0)).sum()

    if of == "hidden":
        size = total(t.square().sum(-1))
        return total((s - t).square().sum(-1)) / size.clamp(min=torch.finfo(exact).tiny)
    s, t = (functional.log_softmax(x / temperature, -1) for x in (s, t))
    p = t.exp()
    each = torch.where(p > 0, p * (t - s), 0).sum(-1)  # a logit of -inf on both sides adds nothing
    number = max(1, each.numel()) if counts is None else counts.sum().clamp(min=1)
    return total(each) * temperature**2 / number
