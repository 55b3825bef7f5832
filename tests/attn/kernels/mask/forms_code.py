"""Kernels of masks compiled for cards that are not there, as their launches specialise them."""

from typing import Any

from sparsek.attn.kernels.mask import bigbird, documents, forms
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS

SHAPE = {"BQ": 128, "BK": 128}


def _code(
    function: Any, lists: tuple[str, ...], module: Any, card: str, types: Any = (), **constants: Any
) -> Code:
    sides = {"ROWS": module.ROWS, "ENTRIES": module.ENTRIES, "LANES": module.LANES}
    pointers = dict.fromkeys(lists, "*i32") | dict(types)
    return compiled(function, pointers, constants | SHAPE | sides, CARDS[card], module.WARPS, 1, aligned=())


def codes(card: str) -> dict[str, Code]:
    """One kernel of each kind, by name."""
    found = {}
    for kind, name in enumerate(("all", "strided", "dilated")):
        constants = {"STEPS": kind, "BOTH_WAYS": kind > 0, "BOUNDED": True, "SHIFT": 7}
        found[name] = _code(forms._steps, forms._LISTS, forms, card, **constants)
    lists = (*forms._LISTS, "full_indices", "rules", "bits")
    for sinks, slots in ((0, 0), (1, 0), (2, 3)):
        found[f"window, sinks {sinks}"] = _code(forms._band, lists, forms, card, SINKS=sinks, SLOTS=slots)
    for wide in (False, True):
        types = {"fault": "*i64"} | ({"edges": "*i64"} if wide else {})
        found[f"documents {wide}"] = _code(documents._documents, documents._LISTS, documents, card, types)
    found["bigbird"] = _code(bigbird._bigbird, bigbird._LISTS, bigbird, card, DRAWS=4, BOUNDED=True, SHIFT=7)
    return found
