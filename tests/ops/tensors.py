"""q, k and v for a mask, and what is expected of their attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.testing.attention_budget import check_attention

Qkv = tuple[Tensor, Tensor, Tensor]
# A tensor [B, H, S, D] with other strides or at another address.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bhsd": lambda x: x,
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "slice of packed heads": lambda x: torch.cat((x, x, x), 1)[:, x.shape[1] : 2 * x.shape[1]],
    "odd rows": lambda x: torch.cat((x, x[..., :1]), 3)[..., :-1],
    "odd start": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "dims by rows": lambda x: x.mT.contiguous().mT,
    "one head for all": lambda x: x[:, :1].expand(x.shape),
}


def qkv(
    q_len: int = 192,
    kv_len: int | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 64),
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Qkv:
    """N(0, 1) tensors q [batch, heads[0], q_len, dims[0]], k and v [batch, heads[1], kv_len, dims[0] or dims[1]]."""
    draw = torch.Generator(device).manual_seed(0)
    kv_len = q_len if kv_len is None else kv_len
    shapes = (
        (batch, heads[0], q_len, dims[0]),
        (batch, heads[1], kv_len, dims[0]),
        (batch, heads[1], kv_len, dims[1]),
    )
    q, k, v = (torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes)
    return q, k, v


def window(length: int = 192, width: int = 70, device: str = "cpu") -> BlockMask:
    """A causal window, in blocks of 64."""
    return BlockMask.sliding_window(length, width, block=64, device=device)


def check(
    tensors: Qkv, mask: BlockMask, out: Tensor, lse: Tensor | None = None, scale: float | None = None
) -> None:
    q, k, v = tensors
    assert out.dtype == q.dtype
    assert lse is None or lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    gate = check_attention(q, k, v, mask, out, lse, scale=scale)
    assert gate.passed, f"{mask} of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: {gate}"
