"""A BlockMask as tensors and ints, the arguments of a torch.library op, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.mask.layout import facts_of, known_layout
from sparsek.mask.lists import BlockLists, Sizes
from sparsek.mask.mask import BlockMask

# The masks of calls through the ops, with their arguments, so that plans are made once. An entry lives as long as its
# first tensor: the mask holds another tensor object on the same memory.
MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class AttentionArgs(NamedTuple):
    """The arguments of `sparsek::attention`. `mask` and `numbers` come from `flat_mask`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Sequence[Tensor | None]
    numbers: Sequence[int]
    scale: float | None
    return_lse: bool
    kernel: str | None
    deterministic: bool
    softcap: float
    alibi_slopes: Tensor | None
    sink_logits: Tensor | None


class AttentionBackwardArgs(NamedTuple):
    """The arguments of `sparsek::attention_backward`. `kernel` is one of that operation. `sink_logits`: None unless
    their gradient is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None
    mask: Sequence[Tensor | None]
    numbers: Sequence[int]
    scale: float | None
    deterministic: bool
    kernel: str | None
    softcap: float
    alibi_slopes: Tensor | None
    sink_logits: Tensor | None


def flat_mask(mask: BlockMask | None) -> tuple[list[Tensor | None], list[int]]:
    """A mask as tensors and ints: as its base and the numbers of its layout, if it has these; empty without a mask."""
    if mask is None:
        return [], []
    if mask._base is not None and mask._layout is not None:
        return [mask._base], mask._layout.numbers(mask.sizes, mask.pure)
    # By names: torch.compile of torch 2.11 cannot iterate over a tuple inside a mask that is a constant.
    full, part, sizes, (bq, bk) = mask.full, mask.partial, mask.sizes, mask.block
    lists = [full.starts, full.counts, full.indices, part.starts, part.counts, part.indices]
    numbers = [mask.q_len, mask.kv_len, bq, bk, mask.batch, mask.heads]
    # The op takes ints, not bools, where torch.compile has made any of them symbolic.
    exact, pure = 1 if sizes.exact else 0, 1 if mask.pure else 0
    numbers += [sizes.stored, sizes.partial, sizes.longest, exact, pure]
    return [*lists, mask.lo, mask.hi, mask.rules, mask.bits], numbers


def mask_of(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> BlockMask | None:
    """The mask of these tensors and ints, the same object as long as the tensors live."""
    if not tensors:
        return None
    facts = tuple(numbers), tuple(None if x is None else (x.data_ptr(), x.shape) for x in tensors)
    known = MASKS.get(tensors[0])
    if known is None or known[1] != facts:
        own: list[Any] = [None if x is None else x.detach() for x in tensors]
        if len(own) == 1:
            layout = known_layout(own[0].device, *facts_of(numbers))
            known = BlockMask.of_layout(layout, own[0]), facts
        else:
            known = put_together(own, numbers), facts
        MASKS[tensors[0]] = known
    return known[0]


def put_together(tensors: Sequence[Any], numbers: Sequence[int]) -> BlockMask:
    """A mask of these tensors, which may be fake; of a base, a mask with the right fields on the right device."""
    q_len, kv_len, bq, bk, batch, heads, stored, partial, longest, exact, pure, *_ = numbers
    tensors = [*([tensors[0]] * 6), *[None] * 4] if len(tensors) == 1 else tensors
    return BlockMask.unchecked(
        q_len=q_len,
        kv_len=kv_len,
        block=(bq, bk),
        batch=batch,
        heads=heads,
        full=BlockLists(*tensors[:3]),
        partial=BlockLists(*tensors[3:6]),
        lo=tensors[6],
        hi=tensors[7],
        rules=tensors[8],
        bits=tensors[9],
        sizes=Sizes(stored, partial, longest, bool(exact)),
        pure=bool(pure),
    )
