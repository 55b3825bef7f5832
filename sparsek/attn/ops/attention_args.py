"""A BlockMask as tensors and ints, the arguments of a torch.library op, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.attn.mask.data import TENSORS
from sparsek.attn.mask.layout import fields_of, known_layout
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask

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
    # By names: torch.compile of torch 2.11 cannot iterate over a tuple inside a mask that is a constant.
    sizes, (bq, bk), layout = mask.sizes, mask.block, mask._layout
    # The op takes ints, not bools, where torch.compile has made any of them symbolic.
    exact, pure = 1 if sizes.exact else 0, 1 if mask.pure else 0
    numbers = [mask.q_len, mask.kv_len, bq, bk, mask.batch, mask.heads]
    numbers += [sizes.stored, sizes.partial, sizes.longest, exact, pure]
    if layout is not None:
        room = layout.room
        return [mask._base], [*numbers, layout.heavy, room.partial, room.full, room.bounds, room.bits]
    full, part = mask.full, mask.partial
    lists = [full.starts, full.counts, full.indices, part.starts, part.counts, part.indices]
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
            known = BlockMask.of_layout(known_layout(own[0].device, facts[0]), own[0]), facts
        else:
            known = put_together(own, numbers), facts
        MASKS[tensors[0]] = known
    return known[0]


def put_together(tensors: Sequence[Any], numbers: Sequence[int]) -> BlockMask:
    """A mask of these tensors, which may be fake; of a base, a mask with the right fields on the right device."""
    tensors = [*([tensors[0]] * 6), *[None] * 4] if len(tensors) == 1 else tensors
    full, partial = BlockLists(*tensors[:3]), BlockLists(*tensors[3:6])
    more = dict(zip(TENSORS, tensors[6:], strict=True))
    return BlockMask.unchecked(full=full, partial=partial, **more, **fields_of(numbers))
