"""The checks of q, k and v that need no mask."""

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import MOVE, check_real
from sparsek.core.errors import InvalidInput

SWAPPED = (
    "; q and k seem to be [B, S, H, D], and attention takes [B, H, S, D]: pass x.transpose(1, 2) for each"
)
DIMS = {"q": "[B, Hq, S, D]", "k": "[B, Hkv, T, D]", "v": "[B, Hkv, T, Dv]"}


def check_tensors(
    q: Any, k: Any, v: Any, *, predicted: bool = False, planner: str = "plan_attention"
) -> None:
    """InvalidInput unless q, k and v are dense, of one dtype, on one device, and fit together.

    `predicted`: the call is not run, so they may be on the meta device. `planner`: the function that predicts such
    calls, for messages. `v` is k where there are no values yet.
    """
    for name, x in (("q", q), ("k", k)) if v is k else (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            both = "; quantize_heads(q, k, v) makes all three" if type(x).__name__ == "QuantizedHeads" else ""
            raise InvalidInput(
                f"{name} must be a dense torch.Tensor {DIMS[name]}, got {type(x).__name__}{both}"
            )
        if x.is_nested:
            raise InvalidInput(
                f"{name} must be a dense torch.Tensor {DIMS[name]}, got a nested tensor; pack the sequences for "
                f"attention_varlen, or pad them, torch.nested.to_padded_tensor({name}.contiguous(), 0.0), and mask the "
                "padding"
            )
        arguments.dense(name, x)
        if x.is_meta and not predicted:
            raise InvalidInput(
                f"{name} is on the meta device and holds nothing; {planner}(..., device='h200') predicts a call"
            )
        if x.dim() != 4:
            raise InvalidInput(f"{name} must be {DIMS[name]}, got {x.dim()}-D {list(x.shape)}")
        if x.dtype != q.dtype:
            raise InvalidInput(
                f"q is {q.dtype} and {name} {x.dtype}; cast one of them, SparseK does not{_autocast(q.device.type)}"
            )
        arguments.one_device("q is", q.device, name, x.device, MOVE)
        if x is not q:
            check_real("q", q, name, x)
        elif arguments.is_distributed(q):
            raise InvalidInput(f"q is a DTensor, which no kernel takes; {arguments.LOCAL}")
    dtypes.name(q.dtype)
    check_shapes(q.shape, k.shape, v.shape)


def _autocast(device: str) -> str:
    """The end of a message on dtypes under torch.autocast."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return ""
    wanted = torch.get_autocast_dtype(device)
    return f". torch.autocast casts neither float64 nor the operands of plan=: cast all three, to {wanted}"


def check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    """InvalidInput unless q [B, Hq, S, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] fit together."""
    if not q[0] == k[0] == v[0]:
        raise InvalidInput(f"q, k and v have {q[0]}, {k[0]} and {v[0]} batch items; they must have as many")
    if k[1] != v[1]:
        raise InvalidInput(f"k has {k[1]} heads and v {v[1]}; they must have as many")
    if q[1] == 0 or k[1] == 0 or q[1] % k[1]:
        raise InvalidInput(
            f"q has {q[1]} heads and k {k[1]}; q needs a positive multiple of the heads of k, "
            f"each of which serves as many heads of q{SWAPPED if _heads_second(q, k) else ''}"
        )
    if k[2] != v[2]:
        raise InvalidInput(f"k has {k[2]} keys and v {v[2]} values; every key needs one value")
    if q[3] != k[3] or q[3] == 0:
        raise InvalidInput(f"q has head dim {q[3]} and k {k[3]}; they must agree and be at least 1")
    if v[3] == 0:
        raise InvalidInput("v has head dim 0; it must be at least 1")


def _heads_second(q: torch.Size, k: torch.Size) -> bool:
    """Whether dim 2 of both can be heads, and is smaller than dim 1."""
    return 0 < k[2] < k[1] and q[2] < q[1] and q[2] % k[2] == 0


def swapped(q: Tensor, k: Tensor, lengths: tuple[int, ...]) -> str:
    """The end of a message on a mask for `lengths` that q and k do not have: a hint where their dim 1 has them."""
    return SWAPPED if lengths == (q.shape[1], k.shape[1]) else ""
