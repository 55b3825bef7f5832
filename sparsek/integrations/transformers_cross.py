"""Which layers of transformers are cross-attention: a policy is for positions, and two sequences have none in common.

A layer does not receive what it attends to, only keys. Its module has marks: its class is named for it, or it is not
causal and yet of a decoder.
"""

from __future__ import annotations

import inspect
from typing import Any

from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant

OTHERS = ("key_value_states", "encoder_hidden_states", "key")  # what forward() takes, of another sequence


def is_cross_attention(module: Any, q_len: int, kv_len: int) -> bool:
    """Whether a layer attends to another sequence.

    Raises:
        InvalidInput: For a module without marks that may attend to either, where queries and keys are equally many.
    """
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    if getattr(module, "is_causal", False):
        return False
    of_decoder = getattr(module, "is_decoder", None)
    if isinstance(of_decoder, bool):
        return of_decoder
    if not _takes_others(type(module)):
        return False
    if q_len != kv_len:
        return True
    raise InvalidInput(
        f"config.sparsek does not fit a {type(module).__name__}: it may attend to its own tokens or, as "
        "cross-attention, to those of another sequence, which no policy is for, and has no mark of either; set "
        "config.sparsek to None"
    )


@constant
def _takes_others(kind: type) -> bool:
    """Whether the forward pass of a module may be given states of another sequence."""
    forward: Any = getattr(kind, "forward", None)
    return any(name in OTHERS for name in inspect.signature(forward).parameters)
