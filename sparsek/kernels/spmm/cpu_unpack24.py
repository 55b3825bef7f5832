"""2:4 values written out dense on a CPU, for the kernels there: a table says where the four values of a byte go.

One pass over what is written. `matrix.two_four.unpack` makes several, and can be differentiated.
"""

from functools import cache

import torch
from torch import Tensor

PIECE = 1 << 15  # bytes of metadata in a step, whose places take 32 bytes each
COLUMNS, VALUES = 8, 4  # of a byte


def unpacked(values: Tensor, meta: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense [..., C] of values [..., C/2] and meta uint8 [..., C/8] of any strides, in `dtype`. No gradient."""
    flat_values, flat_meta = values.reshape(-1, VALUES), meta.reshape(-1)
    dense = torch.zeros(flat_meta.shape[0], COLUMNS, dtype=dtype, device=meta.device)
    for first in range(0, flat_meta.shape[0], PIECE):
        part = slice(first, first + PIECE)
        places = _places().index_select(0, flat_meta[part].int())
        dense[part].scatter_(1, places, flat_values[part].to(dtype))
    return dense.view(*meta.shape[:-1], COLUMNS * meta.shape[-1])


@cache
def _places() -> Tensor:
    """int64 [256, 4]: in which of its 8 columns each value of a byte stands."""
    byte = torch.arange(256, device="cpu")
    fields = [byte >> shift & 3 for shift in (0, 2, 4, 6)]
    return torch.stack((fields[0], fields[1], fields[2] + 4, fields[3] + 4), 1)
