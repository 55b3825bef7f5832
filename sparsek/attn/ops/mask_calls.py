"""Builders of masks as recorded calls: from the third call on, one with the same options repeats its launches.

    mask = again("topk", (scores,), options, build)

`build()` makes a mask whose tensors are views of one buffer, by launches, allocations and views only
(attn/mask/layout.py). What it makes on a CPU, or of tensors that something traces, is returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.readback import DeferredFault, DeferredSizes, made_in, raise_earlier
from sparsek.core.operations import KERNELS
from sparsek.core.plan_owner import drop_oldest
from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import Calls, Slot

TEMPLATES = 256


class Template(NamedTuple):
    """What a repeated builder's masks have in common. `explain`: for each word of a fault, that fault in words.
    `sized`: their true sizes are read later.
    """

    layout: MaskLayout
    explain: tuple[Callable[[int], str], ...]
    sized: bool


_calls = Calls()
_templates: dict[Hashable, Template] = {}


def again(
    name: str, tensors: Sequence[Tensor], options: Hashable, build: Callable[[], BlockMask]
) -> BlockMask:
    """The mask of `build()`, which reads `tensors` and `options` only, made by a recorded call if there is one.

    The tensors are on GPUs. Raises InvalidInput if an earlier mask of the same layout has a fault that was not raised
    yet.
    """
    learns = torch.is_grad_enabled()  # a choice has no gradient, and calls with one are not repeated
    if learns:
        torch._C._set_grad_enabled(False)
    try:
        return _again((name, options, len(tensors)), tensors, build)
    finally:
        if learns:
            torch._C._set_grad_enabled(True)


def _again(more: Hashable, tensors: Sequence[Tensor], build: Callable[[], BlockMask]) -> BlockMask:
    key = more, tensors[0].device, *[x.shape for x in tensors]
    template = _templates.get(key)
    if template is not None and template.explain:
        raise_earlier(template.layout)
    slot: Any = recorded_calls.repeat(_calls, more, tensors)
    made: list[BlockMask] = []

    def run() -> tuple[Tensor, ...]:
        made.append(build())
        return _results(made[0])

    results = slot.run(run) if slot.__class__ is Slot else slot
    if not made and template is None:  # it was dropped
        made.append(build())
    if made or template is None:
        _note(key, made[0])
        return made[0]
    layout, explain, sized = template
    return made_in(BlockMask, layout, results[0], results[1:], explain, sized)


def _results(mask: BlockMask) -> tuple[Tensor, ...]:
    """The base and the words of faults: what a recorded call gives back."""
    if mask._base is None or type(mask) is not BlockMask:
        return (torch.empty(0, dtype=torch.int32, device="cpu"),)  # which no recorded call can return
    return (mask._base, *(each.word for each in _found(mask, DeferredFault)))


def _note(key: Hashable, mask: BlockMask) -> None:
    if mask._layout is None or type(mask) is not BlockMask:
        return
    while len(_templates) >= TEMPLATES and key not in _templates:
        drop_oldest(_templates)
    explain = tuple(each.explain for each in _found(mask, DeferredFault))
    _templates[key] = Template(mask._layout, explain, bool(_found(mask, DeferredSizes)))


def _found(mask: BlockMask, kind: type[Any]) -> list[Any]:
    """The readbacks of this class."""
    return [each for each in mask._memo.get("readbacks", ()) if isinstance(each, kind)]


KERNELS.update(mask_again=again)
