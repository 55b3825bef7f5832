"""Checks of q, k, v and a mask that read no values: shapes, dtypes, devices and layouts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import swapped
from sparsek.core import arguments
from sparsek.core.arguments import check_real
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured

PLAN_HAS_NO_GRADIENT = (
    "a call of a plan has no gradient; attention(q, k, v, mask, plan=plan) has one, and torch.no_grad() lets the "
    "plan run"
)
NO_SECOND_GRADIENT = (
    "the gradients of attention have no gradients themselves; "
    "sparsek.attn.reference.attention.attention has those of any order"
)
NO_TANGENT = (
    "attention has no forward-mode derivative (jvp, jacfwd, torch.func.hessian); "
    "sparsek.attn.reference.attention.attention has one"
)
SCALES = (1e-30, 1e30)  # float32 represents them, also times log2(e)


def check_mask(q: Tensor, k: Tensor, mask: Any, *, here: bool = True) -> None:
    """InvalidInput unless `mask` is a BlockMask for q and k, without a fault that the device has reported so far.

    `here`: it must be on their device too. Otherwise the call is only predicted.
    """
    if not isinstance(mask, BlockMask):
        kind = type(mask)
        raise InvalidInput(
            f"mask is a {kind.__module__}.{kind.__name__}; a plan takes the BlockMask that it was made for, or None"
        )
    if (mask.q_len, mask.kv_len) != (q.shape[2], k.shape[2]):
        cure = swapped(q, k, (mask.q_len, mask.kv_len)) or f". {_built(mask.label, q.shape[2], k.shape[2])}"
        raise InvalidInput(
            f"mask is for {mask.q_len} queries and {mask.kv_len} keys; q has {q.shape[2]} and k {k.shape[2]}{cure}"
        )
    if mask.batch not in (1, q.shape[0]):
        raise InvalidInput(f"mask has {mask.batch} batch items and q {q.shape[0]}; mask needs 1 or as many")
    if mask.heads not in (1, k.shape[1], q.shape[1]):
        raise InvalidInput(
            f"mask has {mask.heads} heads; it needs 1 for all, {k.shape[1]} as k, or {q.shape[1]} as q"
        )
    if here and mask.device != q.device:
        raise InvalidInput(f"mask is on {mask.device} and q on {q.device}; call mask.to({str(q.device)!r})")
    check_real("q", q, "mask", mask.full.starts if mask._base is None else mask._base)
    if not captured(q):
        mask.verify()


def _built(label: str, q_len: int, kv_len: int) -> str:
    """How to build a mask with this label for these lengths, by the arguments of its builder."""
    if "from_flex" in label or "from_mask_mod" in label:
        return f"Build it with Q_LEN={q_len}, KV_LEN={kv_len}"
    if "from_dense" in label or "from_transformers" in label:
        return f"Build it of a tensor [..., {q_len}, {kv_len}]"
    return f"Build it with q_len={q_len}, kv_len={kv_len}"


def check_backward(q: Tensor, v: Tensor, out: Any, lse: Any, grad: Any, grad_lse: Any) -> None:
    """InvalidInput unless out and lse fit q and v, and grad and grad_lse fit out and lse."""
    of_out = (*q.shape[:3], v.shape[3]), q.dtype
    of_lse = tuple(q.shape[:3]), lse_dtype(q.dtype)
    for name, x, (shape, dtype) in (
        ("out", out, of_out),
        ("lse", lse, of_lse),
        ("grad", grad, of_out),
        ("grad_lse", grad_lse, of_lse),
    ):
        if x is None and name == "grad_lse":
            continue
        x = arguments.dense_beside(name, x, "q", q)
        if (tuple(x.shape), x.dtype, x.device) != (shape, dtype, q.device):
            raise InvalidInput(
                f"{name} must be {dtype} {list(shape)} on {q.device}, got {x.dtype} {list(x.shape)} on {x.device}"
            )
    gapless = out.is_contiguous() or out.transpose(1, 2).is_contiguous()
    if not gapless or not lse.is_contiguous():
        raise InvalidInput(
            "out and lse must have the memory layout that attention gave them: out as [B, Hq, S, Dv] or "
            "[B, S, Hq, Dv], without gaps"
        )


def fitting(grad: Tensor, out: Tensor, aligned: bool) -> Tensor:
    """`grad`, or a copy with out's layout, if its last dim has gaps or it is not `aligned` where that is needed."""
    fits = grad.stride(3) == 1 and (not aligned or is_aligned(grad))
    return grad if fits else torch.empty_like(out).copy_(grad)


def checked_scale(scale: Any, dim: int, name: str = "scale") -> float:
    """The softmax scale as a float: D**-0.5 for None. InvalidInput unless it is finite and positive."""
    if scale is None:
        return dim**-0.5
    return arguments.number(name, scale, *SCALES)


class Layout(NamedTuple):
    """The layouts of q, k and v: `unit_stride` if last dims are contiguous, `aligned` if their pointers and all other
    strides are also multiples of 16 bytes.
    """

    unit_stride: bool
    aligned: bool


def layout(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = q.stride(), k.stride(), v.stride()
    unit_stride = q3 == k3 == v3 == 1
    strides = q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2
    starts = q.data_ptr() | k.data_ptr() | v.data_ptr()
    return Layout(unit_stride, unit_stride and (strides * q.element_size() | starts) % 16 == 0)


def backward_layout(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """The layouts of q, k, v and the gradient of out, which is copied if needed: see `fitting`."""
    unit_stride, aligned = layout(q, k, v)
    return Layout(unit_stride, aligned and v.shape[3] * v.element_size() % 16 == 0)


def is_aligned(x: Tensor) -> bool:
    """Whether the pointer of x, whose last dim is contiguous, and all other strides are multiples of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])


def empty_out(q: Tensor, v_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised, gapless out [B, Hq, S, Dv], no view: in memory [B, S, Hq, Dv] if q is, else as its shape.

    In q's dtype for None.
    """
    _, heads, length, _ = shape = *q.shape[:3], v_dim
    if heads > 1 and length > 1 and q.stride(1) < q.stride(2):
        return q.new_empty_strided(shape, (length * heads * v_dim, v_dim, heads * v_dim, 1), dtype=dtype)
    return q.new_empty(shape, dtype=dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
