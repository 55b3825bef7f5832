"""SparseAttention: projections around sparse attention, the module that people start from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference
from sparsek.mask.mask import BlockMask
from sparsek.mask.rule import MaskPolicy
from sparsek.matrix.pattern import INT32_MAX
from sparsek.ops.attention import attention
from sparsek.ops.attention_varlen import attention_varlen
from sparsek.plan import operands


class SparseAttention(nn.Module):
    """Self-attention with projections: x [B, S, dim] becomes [B, S, dim].

    `heads` of queries and `kv_heads` of keys and values (as many), each of `head_dim` (dim // heads). `mask` is the
    policy by which a query sees keys: causal if left out. Parameters: `qkv.weight` [(heads + 2 * kv_heads) * head_dim,
    dim], whose rows are those of q, k and v, and `out.weight` [dim, heads * head_dim]; with `bias` a bias for each.
    Positions are not encoded, and nothing is dropped.

    The masks of a policy are made once for each length and kept. Under torch.compile the length becomes a constant of
    the graph; top-k policies, whose masks follow q and k, break the graph. Raises InvalidInput for sizes that do not
    fit.
    """

    @outside_inference
    def __init__(
        self,
        dim: int,
        heads: int,
        mask: MaskPolicy | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dim = arguments.integer("dim", dim, 1, INT32_MAX)
        self.heads = arguments.integer("heads", heads, 1, INT32_MAX)
        self.kv_heads = self.heads if kv_heads is None else arguments.integer("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise InvalidInput(f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}")
        if head_dim is None and self.dim % self.heads:
            raise InvalidInput(f"dim is {dim} and heads {heads}: heads must divide it, or give head_dim")
        self.head_dim = (
            self.dim // self.heads if head_dim is None else arguments.integer("head_dim", head_dim, 1)
        )
        arguments.flag("bias", bias)
        dtype = None if dtype is None else arguments.dtype("dtype", dtype)
        device = None if device is None else arguments.device("device", device)
        if isinstance(mask, BlockMask):
            raise InvalidInput(
                "mask is a BlockMask, which is for one length: give it to each call, layer(x, mask), and here a "
                "MaskPolicy, which has a mask for every length"
            )
        if not isinstance(mask, MaskPolicy | None):
            raise InvalidInput(
                f"mask is {type(mask).__module__}.{type(mask).__name__}; it must be a MaskPolicy, and forward takes a "
                "BlockMask"
            )
        self.mask = MaskPolicy() if mask is None else mask
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        arguments.integer("(heads + 2 * kv_heads) * head_dim", rows, 1, INT32_MAX)
        self.qkv = nn.Linear(self.dim, rows, bias=bias, dtype=dtype, device=device)
        self.out = nn.Linear(self.heads * self.head_dim, self.dim, bias=bias, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, mask: BlockMask | None = None, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """[B, S, dim] of x [B, S, dim], or [total, dim] of packed documents x [total, dim] with their `cu_seqlens`.

        mask: for this call, in the place of the policy's; of S queries and keys, and here also of packed documents.
        """
        arguments.dense("x", x)
        if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != self.dim:
            wanted = f"[B, S, {self.dim}], or with cu_seqlens [total, {self.dim}]"
            raise InvalidInput(f"x is {list(x.shape)}; it must be {wanted}")
        self._check_alike(x)
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), -2)
        if cu_seqlens is not None:
            found = attention_varlen(q, k, v, cu_seqlens, mask=self.mask if mask is None else mask)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            found = attention(q, k, v, self.mask.mask_for(q, k) if mask is None else mask).transpose(1, 2)
        return self.out(found.flatten(-2))

    def _check_alike(self, x: Tensor) -> None:
        """InvalidInput unless torch multiplies x with these parameters, which under torch.autocast it casts both."""
        weight = self.qkv.weight
        cast = operands.autocasts(x) and torch.float64 not in (x.dtype, weight.dtype)
        if x.device != weight.device or not (cast or x.dtype == weight.dtype):
            raise InvalidInput(
                f"x is {x.dtype} on {x.device} and the parameters {weight.dtype} on {weight.device}; cast or move one "
                "of them"
            )
        if operands.wants_gradient(x, weight):
            arguments.kept("x", x)

    def extra_repr(self) -> str:
        kv = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        return f"dim={self.dim}, heads={self.heads}{kv}, head_dim={self.head_dim}, mask={self.mask.label}"
