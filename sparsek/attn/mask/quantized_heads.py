"""QuantizedHeads, the heads of q, k or v of attention in e4m3 with float32 scales; and `quantize_heads`.

Hopper's FP8 tensor cores read both operands along the sum. Attention sums q k^T over D, so q and k are stored as [B, H,
L, D]. It sums P v over keys, so v is stored turned, as [B, H, Dv, T]. There the keys of every sixteen have the order in
which a thread of hopper.attention_fp8 holds their weights (`KEY_ORDER`), and T is padded to whole sixteens with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.operands import check_tensors
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.record import record
from sparsek.core.tracing import not_traced
from sparsek.products.formats.float8 import largest_of, rounded, scales_of
from sparsek.products.formats.quantized_tensor import ScaledTensor, check_finite, check_scale

HeadScale: TypeAlias = Literal["head", "block"]
SCALES = get_args(HeadScale)
E4M3 = torch.float8_e4m3fn
TOP = torch.finfo(E4M3).max
GROUP = 16  # keys of v that lie in an order of their own
# At place 4 t + 2 a + b of a group lies its key 8 a + 2 t + b: thread t of four has the scores of keys 2 t and 2 t + 1
# of each eight, and needs four neighbours of the left operand of the next product.
KEY_ORDER = tuple(8 * a + 2 * t + b for t in range(4) for a in range(2) for b in range(2))
ROWS = 128
MOST_ROWS = 65536


@record(leaves=("values", "scale"), own=("values", "scale"))
@dataclass(frozen=True, eq=False, repr=False)
class QuantizedHeads(ScaledTensor):
    """Heads [B, H, L, D] of q, k or v in e4m3: scale * values. `sparsek.quantize_heads` makes three.

    An operand of `attention`, without gradients. Construction checks the parts, and that every scale is positive and
    finite, with one sync.

    Attributes:
        values: torch.float8_e4m3fn [B, H, L, D] with contiguous rows; of `turned` heads [B, H, D, Lp], where Lp is
            the next multiple of 16 and the places of each 16 keys hold those in the order of `KEY_ORDER`.
        scale: float32, contiguous: [B, H], one for each head, or [B, H, ceil(L / rows)], one for each `rows` rows.
            Values v whose scale is below 2^-80 of another of their head may count as 0.
        rows: Rows that share a scale, a multiple of 64 up to 65536; 0 where a head does.
        turned: Whether the values lie along L, as v must.
        length: L of turned heads; 0 for others, whose values have it.
        source_dtype: The dtype that was rounded: results of attention have that of q.

    Raises:
        InvalidInput: For parts that do not fit.
    """

    values: Tensor
    scale: Tensor
    rows: int = 0
    turned: bool = False
    length: int = 0
    source_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("length", "rows"):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name)))
        arguments.tensor("values", self.values, (E4M3,), 4)
        arguments.tensor("scale", self.scale, (torch.float32,))
        arguments.dtype("source_dtype", self.source_dtype)
        if arguments.flag("turned", self.turned):
            most = self.values.shape[3]
            arguments.integer("length", self.length, max(0, most - GROUP + 1), most)
            if most % GROUP:
                raise InvalidInput(
                    f"values are turned and have {most} keys; pad them to a multiple of {GROUP}"
                )
        elif self.length:
            raise InvalidInput(f"length is {self.length}; it is for turned values, others have their own")
        if arguments.integer("rows", self.rows, 0, MOST_ROWS) % 64:
            raise InvalidInput(
                f"rows is {self.rows}; a scale is for a multiple of 64 rows, or for 0, a whole head"
            )
        b, h, length, _ = self.shape
        right = (b, h, -(-length // self.rows)) if self.rows else (b, h)
        if self.scale.shape != right:
            raise InvalidInput(
                f"scale has shape {list(self.scale.shape)}; heads {list(self.shape)} with {self.kind} scales need "
                f"{list(right)}"
            )
        check_scale(self.scale, self.values.device)

    @property
    def shape(self) -> torch.Size:
        """The shape [B, H, L, D]."""
        b, h, rows, columns = self.values.shape
        return torch.Size((b, h, self.length, rows)) if self.turned else torch.Size((b, h, rows, columns))

    @property
    def kind(self) -> HeadScale:
        """What shares a scale: a "head", or a "block" of its rows."""
        return "block" if self.rows else "head"

    def to(self, device: str | torch.device) -> QuantizedHeads:
        """Return these heads on `device`; the same object if they are there already."""
        target = arguments.device("device", device)
        if target == self.device:
            return self
        return self.unchecked(
            **{**self._parts(), "values": self.values.to(target), "scale": self.scale.to(target)}
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return scale * values as a torch.Tensor [B, H, L, D]. No sync.

        Args:
            dtype: bf16, fp16, fp32 or fp64. The product is computed in float32 (float64 for fp64), then rounded.
        """
        arguments.dtype("dtype", dtype)
        wide = torch.promote_types(dtype, torch.float32)
        values = in_key_order(self.values).mT[:, :, : self.length] if self.turned else self.values
        scale = self.scale[..., None]
        if self.rows:
            scale = scale.expand(*self.scale.shape, self.rows).flatten(2)[:, :, : self.shape[2]]
        return (values.to(wide) * scale[..., None]).to(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values as bytes, because torch pickles no FP8 tensor."""
        parts = self._parts()
        return _of_bytes, (parts.pop("values").view(torch.uint8), *parts.values())

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor) or not isinstance(self.scale, Tensor):
            return "QuantizedHeads(values not concrete)"
        size = (self.values.nbytes + self.scale.nbytes) / 1e6
        per = f"block of {self.rows}" if self.rows else "head"
        turned = ", along keys" if self.turned else ""
        sides = "x".join(map(str, self.shape))
        return f"QuantizedHeads({sides} e4m3, scale per {per}{turned}, {size:.3g} MB, {self.device})"


def _of_bytes(values: Tensor, *rest: Any) -> QuantizedHeads:
    """The inverse of `QuantizedHeads.__reduce__`."""
    return QuantizedHeads.unchecked(values.view(E4M3), *rest)


AttentionHeads: TypeAlias = tuple[QuantizedHeads, QuantizedHeads, QuantizedHeads]
"""q, k and v of `attention` in FP8."""


def quantize_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: HeadScale = "head", *, rows: int = ROWS, check: bool = True
) -> AttentionHeads:
    """Round q, k and v of `attention` to e4m3 (torch.float8_e4m3fn), with float32 scales.

    A scale maps the largest magnitude of the values that share it to 448. Values are rounded to nearest, ties to even.
    The result is outside autograd, and attention over it has no gradients.

    Args:
        q: Queries [B, Hq, S, D].
        k: Keys [B, Hkv, T, D].
        v: Values [B, Hkv, T, Dv]. They are stored with the keys of a head contiguous, as FP8 tensor cores read them.
        scale: What shares a scale: each "head" of a batch item, or each "block" of `rows` rows of a head.
        rows: Rows of a block, a multiple of 64 up to 65536.
        check: Refuse NaN and Inf, with one sync for each tensor. Without it a NaN or Inf makes NaN of all values that
            share its scale.

    Returns:
        (q, k, v) as three `QuantizedHeads`.

    Raises:
        InvalidInput: For operands that do not fit together, for NaN and Inf, and for one that requires a gradient.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(3, 1, 4, 512, 64, dtype=torch.bfloat16).unbind()
        >>> q8, k8, v8 = sk.quantize_heads(q, k, v)
        >>> v8
        QuantizedHeads(1x4x512x64 e4m3, scale per head, along keys, 0.131 MB, cpu)
        >>> out = sk.attention(q8, k8, v8, sk.BlockMask.causal(512))
        >>> exact = sk.attention(q, k, v, sk.BlockMask.causal(512))
        >>> bool((out - exact).norm() < 0.1 * exact.norm())
        True
    """
    check_tensors(q, k, v)
    arguments.one_of("scale", scale, SCALES)
    rows = arguments.integer("rows", rows, 64, MOST_ROWS)
    if rows % 64:
        raise InvalidInput(f"rows is {rows}; it must be a multiple of 64, as blocks of masks are")
    arguments.flag("check", check)
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.supported(name, x.device)
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInput(
                f"{name} requires a gradient, and FP8 attention has none; pass {name}.detach(), or call under "
                "torch.no_grad()"
            )
    return _made(q, k, v, rows if scale == "block" else 0, check)


@not_traced("an FP8 operand of attention")
def _made(q: Tensor, k: Tensor, v: Tensor, rows: int, check: bool) -> AttentionHeads:
    if check:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_finite(x.detach(), None, E4M3, f"values of {name}", str)
    q8, k8, v8 = (_quantized(x.detach(), rows, turned) for x, turned in ((q, False), (k, False), (v, True)))
    return q8, k8, v8


def _quantized(x: Tensor, rows: int, turned: bool) -> QuantizedHeads:
    """x [B, H, L, D] with a scale for each head, or for each `rows` rows. On a GPU one kernel scales and rounds."""
    scale = scales_of(_largest(x, rows), E4M3)
    stored = -(-x.shape[2] // GROUP) * GROUP
    found = by_kernel("round_heads", x, scale, rows, stored, turned) if x.is_cuda else None
    values = _rounded(x, scale, rows, turned) if found is None else found
    return QuantizedHeads.unchecked(values, scale, rows, turned, x.shape[2] if turned else 0, x.dtype)


def _largest(x: Tensor, rows: int) -> Tensor:
    """The largest magnitude of each head [B, H], or of each block of its rows [B, H, n]."""
    b, h, length, dim = x.shape
    if not rows:
        return largest_of(x, (2, 3))
    rows = min(rows, max(1, length))
    blocks = -(-length // rows)
    padded = functional.pad(x, (0, 0, 0, blocks * rows - length)).reshape(b, h, blocks, rows * dim)
    return largest_of(padded, (3,))


def _rounded(x: Tensor, scale: Tensor, rows: int, turned: bool) -> Tensor:
    """The values [B, H, L, D], or turned, in plain torch: what kernels match bit for bit."""
    wide = torch.promote_types(x.dtype, torch.float32)
    of_rows = scale[..., None]
    if rows:
        of_rows = of_rows.expand(*scale.shape, rows).flatten(2)[:, :, : x.shape[2]]
    values = rounded(x.to(wide) / of_rows[..., None], E4M3)
    if not turned:
        return values.contiguous()
    padded = functional.pad(values.view(torch.uint8), (0, 0, 0, -x.shape[2] % GROUP))
    return out_of_key_order(padded.mT.view(E4M3))


def out_of_key_order(values: Tensor) -> Tensor:
    """values [..., Lp] with the places of each 16 keys in the order of `KEY_ORDER`."""
    *lead, keys = values.shape
    groups = values.view(torch.uint8).reshape(*lead, keys // GROUP, 2, 4, 2)
    return groups.transpose(-3, -2).reshape(*lead, keys).contiguous().view(E4M3)


def in_key_order(values: Tensor) -> Tensor:
    """The inverse of `out_of_key_order`."""
    *lead, keys = values.shape
    groups = values.view(torch.uint8).reshape(*lead, keys // GROUP, 4, 2, 2)
    return groups.transpose(-3, -2).reshape(*lead, keys).view(E4M3)
