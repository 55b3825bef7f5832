"""SparseAttention: an attention layer with a mask for every length."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sparsek.attn.mask.convert.argument import MaskLike
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.attn.reference.scores import checked_softcap
from sparsek.core import arguments, tracing
from sparsek.core.arguments import INT32_MAX, check_real
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference
from sparsek.engine.call.autocast import CAST
from sparsek.nn.parameter import meta_device

NOT_TORCHSCRIPT = "torch.jit.{} cannot take a SparseAttention; use torch.compile or torch.export"
NOT_ONNX = (
    "ONNX has no block-sparse attention; for torch.onnx.export put a layer with "
    "torch.nn.functional.scaled_dot_product_attention in its place, with the same qkv and out"
)


class SparseAttention(nn.Module):
    """Self-attention with projections: x [B, S, dim] to [B, S, dim].

    y = out(attention(q, k, v, mask)), with [q, k, v] = qkv(x), and the softcap and learned sinks of the layer. There
    is no positional encoding and no dropout.

    Args:
        dim: Features of x and of the output.
        heads: Heads of q.
        mask: A `MaskPolicy` or a policy of `sk.policies`, which have a mask for every length; `MaskPolicy()`, causal,
            by default.
        kv_heads: Heads of k and v, a divisor of `heads`; as many by default.
        head_dim: Features of a head; dim // heads by default.
        bias: Whether both projections have a bias.
        softcap: The bound of capped scores, as in `attention`; 0 for none.
        sink_logits: Whether each head has a learned sink.
        dtype: The dtype of the parameters; torch's default dtype by default.
        device: The device of the parameters, or "meta"; torch's default device by default.

    Attributes:
        qkv: nn.Linear with weight [(heads + 2 * kv_heads) * head_dim, dim]: the rows of q, then of k, then of v.
        out: nn.Linear with weight [dim, heads * head_dim].
        sink_logits: Parameter [heads], 0 at first, or None.

    Raises:
        InvalidInput: For sizes that do not fit together, and for a mask of one length.

    The mask of each length is made once and kept. Under torch.compile the length is a constant of the graph, and a
    policy whose masks depend on q and k is one more node.

    Example:
        >>> import torch, sparsek as sk
        >>> layer = sk.nn.SparseAttention(256, heads=8, mask=sk.MaskPolicy(window=128, sinks=4), kv_heads=2)
        >>> layer(torch.randn(2, 500, 256)).shape
        torch.Size([2, 500, 256])
    """

    @outside_inference
    def __init__(
        self,
        dim: int,
        heads: int,
        mask: MaskRule | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        softcap: float = 0.0,
        sink_logits: bool = False,
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
        home = meta_device(device)
        device = home if home is not None or device is None else arguments.device("device", device)
        if isinstance(mask, BlockMask):
            raise InvalidInput(
                "mask is a BlockMask, which is for one length: pass it to each call, layer(x, mask), and here a "
                "MaskPolicy, which has a mask for every length"
            )
        if not isinstance(mask, MaskRule | None):
            raise InvalidInput(
                f"mask is a {type(mask).__module__}.{type(mask).__name__}; it must be a MaskPolicy or a "
                "policy of sk.policies; masks of one length go to each call, layer(x, mask)"
            )
        self.mask: MaskRule = MaskPolicy() if mask is None else mask
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        arguments.integer("(heads + 2 * kv_heads) * head_dim", rows, 1, INT32_MAX)
        self.qkv = nn.Linear(self.dim, rows, bias=bias, dtype=dtype, device=device)
        self.out = nn.Linear(self.heads * self.head_dim, self.dim, bias=bias, dtype=dtype, device=device)
        self.softcap = checked_softcap(softcap)
        self.register_parameter("sink_logits", None)
        if arguments.flag("sink_logits", sink_logits):
            kind, on = self.qkv.weight.dtype, self.qkv.weight.device
            self.sink_logits = nn.Parameter(torch.zeros(self.heads, dtype=kind, device=on))

    def forward(self, x: Tensor, mask: MaskLike | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the layer's output, of the shape of x.

        Args:
            x: [B, S, dim], or packed documents [total, dim] with `cu_seqlens`.
            mask: In place of the layer's policy, for this call: any mask of `attention`, of S queries and keys, or of
                `attention_varlen`, of `total`.
            cu_seqlens: int32 or int64 [documents + 1]: 0, then the end of each document in tokens.

        Raises:
            InvalidInput: For an x of another shape, dtype or device, and for a mask that does not fit it.
        """
        self._check(x, cu_seqlens)
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), -2)
        mask = self.mask if mask is None else mask
        sinks = None if self.sink_logits is None else self.sink_logits.to(q.dtype)
        if cu_seqlens is not None:
            found = attention_varlen(q, k, v, cu_seqlens, mask=mask, softcap=self.softcap, sink_logits=sinks)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            found = attention(q, k, v, mask, softcap=self.softcap, sink_logits=sinks).transpose(1, 2)
        return self.out(found.flatten(-2))

    # torch calls this in place of forward under torch.jit.trace, and so in torch.onnx.export(dynamo=False).
    def _slow_forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(NOT_ONNX if torch.onnx.is_in_onnx_export() else NOT_TORCHSCRIPT.format("trace"))

    def __prepare_scriptable__(self) -> NoReturn:
        raise InvalidInput(NOT_TORCHSCRIPT.format("script"))

    def _check(self, x: Tensor, cu_seqlens: Tensor | None) -> None:
        """InvalidInput unless x has the layer's features, and the device and dtype of the parameters, or torch.autocast
        casts both.
        """
        if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
            raise InvalidInput(NOT_ONNX)
        arguments.dense("x", x)
        if cu_seqlens is not None:
            arguments.tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), 1)
        if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != self.dim:
            wanted = f"[B, S, {self.dim}], or with cu_seqlens [total, {self.dim}]"
            raise InvalidInput(f"x is {list(x.shape)}; it must be {wanted}")
        weight = self.qkv.weight
        cast = tracing.autocasts(x) and x.dtype in CAST and weight.dtype in CAST
        if x.device != weight.device or not (cast or x.dtype == weight.dtype):
            raise InvalidInput(
                f"x is {x.dtype} on {x.device} and the parameters {weight.dtype} on {weight.device}; cast or move one "
                "of them"
            )
        check_real("the layer", weight, "x", x)
        if tracing.wants_gradient(x, weight):
            arguments.kept("x", x)

    def extra_repr(self) -> str:
        """Return the sizes and the policy, for repr(layer)."""
        kv = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        cap = f", softcap={self.softcap}" if self.softcap else ""
        sinks = "" if self.sink_logits is None else ", sink_logits=True"
        sizes = f"dim={self.dim}, heads={self.heads}{kv}, head_dim={self.head_dim}"
        return f"{sizes}, mask={self.mask.label}{cap}{sinks}"
