"""NativeSparseAttention and MoBA: attention layers that choose blocks of keys for each query token."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.attn.mask.convert.argument import MaskLike
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.attn.policies.selected import NSA, MoBAGate, means
from sparsek.attn.policies.token import TokenGrid, compressed_mask, mask_of
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference
from sparsek.nn.attention import SparseAttention


class MoBA(SparseAttention):
    """Mixture of block attention: x [B, S, dim] to [B, S, dim].

    y = out(attention(q, k, v, mask)), with [q, k, v] = qkv(x): one softmax over a query's own block of keys, up to the
    query, and the earlier blocks whose mean key has the largest products with it. The choice has no gradient. There is
    no positional encoding. A `SparseAttention` whose mask is a `sk.policies.MoBAGate`.

    Args:
        dim: Features of x and of the output.
        heads: Heads of q.
        mask: The block, and how many each query keeps; `MoBAGate()` by default.
        kv_heads: Heads of k and v, a divisor of `heads`; as many by default, as in the source. Heads of q that share
            one choose together.
        head_dim: Features of a head; dim // heads by default.
        bias: Whether both projections have a bias.
        dtype: The dtype of the parameters; torch's default dtype by default.
        device: The device of the parameters, or "meta"; torch's default device by default.

    Raises:
        InvalidInput: For sizes that do not fit together.

    Source: MoBA, Lu et al., arXiv:2502.13189.

    Example:
        >>> import torch, sparsek as sk
        >>> layer = sk.nn.MoBA(256, heads=4, mask=sk.policies.MoBAGate(topk=3, block=128))
        >>> layer(torch.randn(2, 500, 256)).shape
        torch.Size([2, 500, 256])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mask: MoBAGate | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        policy = _policy(mask, MoBAGate)
        super().__init__(
            dim, heads, policy, kv_heads=kv_heads, head_dim=head_dim, bias=bias, dtype=dtype, device=device
        )


class NativeSparseAttention(SparseAttention):
    """Native sparse attention: x [B, S, dim] to [B, S, dim].

    y = out(g_c * compressed + g_s * selected + g_w * sliding), with gates sigmoid(gate(x)) for each head and three
    attentions of one q, each with a softmax of its own:

    - compressed: to the compressed keys and values that lie before the query with all their tokens; 0 before the first.
    - selected: to the blocks of keys that the weights of the compressed attention choose, by `mask`.
    - sliding: to the last `window` keys.

    Gradients go through the three attentions, the compression and the gates, and not through the choice. There is no
    positional encoding.

    Args:
        dim: Features of x and of the output.
        heads: Heads of q.
        mask: Blocks, budget and compressed lengths; `sk.policies.NSA()` by default.
        window: Keys of the sliding attention, the query's own included.
        kv_heads: Heads of k and v, a divisor of `heads`; as many by default. Heads of q that share one choose together.
        head_dim: Features of a head; dim // heads by default.
        shared_kv: Whether the three attentions have the same k and v. Each has its own by default, as in the source.
        learned: Whether keys and values are compressed by a network with positions, as in the source; else by their
            mean.
        bias: Whether projections and gates have a bias.
        dtype: The dtype of the parameters; torch's default dtype by default.
        device: The device of the parameters, or "meta"; torch's default device by default.

    Attributes:
        qkv: nn.Linear with weight [(heads + 2 * kv_heads) * head_dim, dim]: the rows of q, then those of k and v of the
            selected attention.
        other_kv: nn.Linear with weight [4 * kv_heads * head_dim, dim]: the rows of the compressed k and v, then of the
            sliding k and v. None with `shared_kv`.
        gate: nn.Linear with weight [3 * heads, dim]: rows of compressed, selected and sliding, heads within.
        compress_k: For `span` keys, their positions added: a linear layer to head_dim, GELU, another. None without
            `learned`.
        compress_v: The same for values.
        out: nn.Linear with weight [dim, heads * head_dim].

    Raises:
        InvalidInput: For sizes that do not fit together.

    Source: Native Sparse Attention, Yuan et al., arXiv:2502.11089.

    Example:
        >>> import torch, sparsek as sk
        >>> layer = sk.nn.NativeSparseAttention(256, heads=8, mask=sk.policies.NSA(topk=4), window=64, kv_heads=2)
        >>> layer(torch.randn(2, 500, 256)).shape
        torch.Size([2, 500, 256])
    """

    @outside_inference
    def __init__(
        self,
        dim: int,
        heads: int,
        mask: NSA | None = None,
        *,
        window: int = 512,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        shared_kv: bool = False,
        learned: bool = True,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        policy = _policy(mask, NSA)
        super().__init__(
            dim, heads, policy, kv_heads=kv_heads, head_dim=head_dim, bias=bias, dtype=dtype, device=device
        )
        self.window = MaskPolicy(window=arguments.integer("window", window, 1))
        made: dict[str, Any] = {"dtype": self.qkv.weight.dtype, "device": self.qkv.weight.device}
        self.gate = nn.Linear(self.dim, 3 * self.heads, bias=bias, **made)
        rows = 4 * self.kv_heads * self.head_dim
        own = not arguments.flag("shared_kv", shared_kv)
        self.other_kv = nn.Linear(self.dim, rows, bias=bias, **made) if own else None
        self.compress_k = self.compress_v = None
        if arguments.flag("learned", learned):
            self.compress_k, self.compress_v = (
                KeyCompression(policy.span, policy.stride, self.head_dim, **made) for _ in range(2)
            )

    def forward(self, x: Tensor, mask: MaskLike | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the layer's output, of the shape of x.

        Args:
            x: [B, S, dim], or packed documents [total, dim] with `cu_seqlens`.
            mask: None: the layer chooses.
            cu_seqlens: int32 or int64 [documents + 1]: 0, then the end of each document in tokens.

        Raises:
            InvalidInput: For an x of another shape, dtype or device, and for a mask.
        """
        if mask is not None:
            raise InvalidInput("mask is given; a NativeSparseAttention chooses its own: leave it out")
        self._check(x, cu_seqlens)
        policy, rows = cast(NSA, self.mask), x if cu_seqlens is None else x[None]
        q, k, v = self._heads(self.qkv(rows)).split((self.heads, self.kv_heads, self.kv_heads), 1)
        k_c, v_c, k_w, v_w = (
            (k, v, k, v) if self.other_kv is None else self._heads(self.other_kv(rows)).chunk(4, 1)
        )
        if cu_seqlens is not None:
            grid = TokenGrid.of(q, k, policy.block, cu_seqlens)
            k_c, v_c = grid.aligned(k_c), grid.aligned(v_c)
        k_c = compressed(k_c, policy, self.compress_k)
        v_c = compressed(v_c, policy, self.compress_v)
        seen = compressed_mask(policy.spans, q.shape[2], k.shape[2], q.device, cu_seqlens)
        if cu_seqlens is None:
            near: MaskLike = self.window
            selected = attention(q, k, v, mask_of(policy, q, k, None, compressed=k_c))
        else:
            near = self.window.packed(cu_seqlens, device=q.device)
            lists = policy.lists(q, k, cu_seqlens=cu_seqlens, compressed=k_c)
            by_token = [each[0].transpose(0, 1) for each in (q, k, v)]
            out = attention_varlen(by_token[0], by_token[1], by_token[2], cu_seqlens, mask=lists)
            selected = out.transpose(0, 1)[None]
        gates = self.gate(rows).sigmoid().unflatten(-1, (3, self.heads)).permute(2, 0, 3, 1)[..., None]
        mixed = gates[0] * attention(q, k_c, v_c, seen) + gates[1] * selected
        mixed = mixed + gates[2] * attention(q, k_w, v_w, near)
        y = self.out(mixed.transpose(1, 2).flatten(2))
        return y if cu_seqlens is None else y[0]

    def _heads(self, x: Tensor) -> Tensor:
        """[B, heads, S, head_dim] of [B, S, heads * head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the sizes and the policies, for repr(layer)."""
        return f"{super().extra_repr()}, {self.window.label}"


class KeyCompression(nn.Module):
    """One key or value of every `span`, `stride` apart: [B, H, T, D] to [B, H, n, D].

    outer(gelu(inner([x + position]))), the same for all heads, of `span` rows in one.
    """

    def __init__(self, span: int, stride: int, dim: int, **made: Any) -> None:
        super().__init__()
        self.span, self.stride = span, stride
        self.position = nn.Parameter(torch.zeros(span, dim, dtype=made["dtype"], device=made["device"]))
        self.inner = nn.Linear(span * dim, dim, **made)
        self.outer = nn.Linear(dim, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        """Return the compressed rows."""
        if x.shape[2] < self.span:
            return x[:, :, :0]
        spans = x.unfold(2, self.span, self.stride).transpose(3, 4) + self.position
        return self.outer(functional.gelu(self.inner(spans.flatten(3))))

    def extra_repr(self) -> str:
        """Return the lengths, for repr(layer)."""
        return f"span={self.span}, stride={self.stride}"


def compressed(x: Tensor, policy: NSA, network: nn.Module | None) -> Tensor:
    """Compressed keys or values [B, H, n, D] of x [B, H, T, D], of its dtype."""
    return network(x) if network is not None else means(x, policy.span, policy.stride).to(x.dtype)


def _policy(mask: Any, kind: Any) -> Any:
    """A policy of that kind, or its default."""
    found = kind() if mask is None else mask
    if type(found) is not kind:
        raise InvalidInput(f"mask is {arguments.shown(mask)}; it must be a sk.policies.{kind.__name__}")
    return found
