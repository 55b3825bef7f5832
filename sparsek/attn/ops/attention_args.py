"""A call of attention as the arguments of a torch.library op, its BlockMask as tensors and ints, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.attn.mask.data import TENSORS
from sparsek.attn.mask.layout import fields_of, known_layout
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.reference.scores import Scores
from sparsek.core.arguments import is_fake

# The masks of calls through the ops, with their arguments, so that plans are made once. An entry lives as long as its
# first tensor: the mask holds another tensor object on the same memory.
MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    return_lse: bool,
    kernel: str | None,
    deterministic: bool,
    *scores: Scores,
) -> Attended:
    """The call of the arguments of `sparsek::attention`. `mask` and `numbers` come from `flat_mask`."""
    found, changes = mask_of(mask, numbers), Scores(*cast(Any, scores))
    return Attended(q, k, v, found, scale, return_lse, kernel, deterministic, changes)


def gradients_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    mask: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float | None,
    deterministic: bool,
    kernel: str | None,
    *scores: Scores,
) -> Differentiated:
    """The call of the arguments of `sparsek::attention_backward`. `kernel` is one of that operation. The last of
    `scores` are None unless their gradient is wanted.
    """
    call = call_of(q, k, v, mask, numbers, scale, True, kernel, deterministic, *scores)
    return Differentiated(call, out, lse, grad, grad_lse)


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
    members = mask.members
    numbers += [0, 0, 0] if members is None else [members.rows, members.window, members.sinks]
    if layout is not None:
        room = layout.room
        return [mask._base], [*numbers, layout.heavy, room.partial, room.full, room.bounds, room.bits]
    full, part = mask.full, mask.partial
    lists = [full.starts, full.counts, full.indices, part.starts, part.counts, part.indices]
    return [*lists, mask.lo, mask.hi, mask.rules, mask.bits], numbers


def mask_of(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> BlockMask | None:
    """The mask of these tensors and ints, the same object as long as the tensors live; without values of fake ones."""
    if not tensors:
        return None
    if tensors[0] is not None and (tensors[0].is_meta or is_fake(tensors[0])):
        return put_together(tensors, numbers)
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
