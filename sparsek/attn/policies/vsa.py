"""VSA: top blocks by means, and attention between the means as a second branch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.ops.attention import attention
from sparsek.attn.plan.attention_operands import checked_scale
from sparsek.attn.policies.estimates import KERNEL_DTYPES, block_mass, block_means, block_scores
from sparsek.attn.policies.maps import kernels
from sparsek.attn.policies.policy import Policy, PolicyInputs, block_lengths, given
from sparsek.attn.reference.estimates import rows_of_blocks
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import wants_gradient, watched


@dataclass(frozen=True)
class VSA(Policy):
    """Keeps the key blocks whose mean key has the largest product with the mean query of a tile.

    Tokens are in the order of cubes of the video, each padded to a block: `kv_lengths` are the tokens of each cube.
    `attention` adds the coarse branch, in which the means attend to each other.

    Args:
        topk: Blocks that each tile keeps.
        block: The block in tokens, a cube: 64 or 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For options that are out of range.

    Source: VSA, Zhang et al., arXiv:2505.13389; FastVideo's video_sparse_attn.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 4, 1024, 64).unbind()
        >>> sk.policies.VSA(topk=4).mask(q, k).density
        0.25
    """

    topk: int = 64
    block: int | tuple[int, int] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "topk", arguments.integer("topk", self.topk, 1))

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        return given.topk(block_scores(given), self.topk, False)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None = None,
        *,
        kv_lengths: Tensor | None = None,
        q_lengths: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return gate * coarse + sparse, [B, Hq, S, Dv]. Differentiable in all four tensors.

        sparse = attention(q, k, v, self); coarse = softmax(scale * mean(q) @ mean(k).T) @ mean(v) for the blocks, the
        same for all queries of a tile, in float32.

        Args:
            q: Queries [B, Hq, S, D].
            k: Keys [B, Hkv, T, D].
            v: Values [B, Hkv, T, Dv].
            gate: The weight of the coarse branch, of the dtype of q, of a shape that broadcasts to [B, Hq, S, Dv]; None
                for 1.
            kv_lengths: int32 [Nb] or [1 or B, Nb]: the tokens of each block of keys. None: all.
            q_lengths: int32 [Mb] or [1 or B, Mb]: the tokens of each tile of queries, for its mean. Rows after them
                choose nothing, and get 0 without a gradient. None: all.
            scale: The factor of q @ k.T; D**-0.5 by default.

        Raises:
            InvalidInput: For operands that do not fit together.

        Example:
            >>> import torch, sparsek as sk
            >>> q, k, v, gate = torch.randn(4, 1, 4, 1024, 64).unbind()
            >>> sk.policies.VSA(topk=4).attention(q, k, v, gate).shape
            torch.Size([1, 4, 1024, 64])
        """
        check_tensors(q, k, v)
        tiles, blocks = (-(-x.shape[2] // side) for x, side in zip((q, k), self.sides, strict=True))
        if kv_lengths is not None:
            kv_lengths = block_lengths("kv_lengths", kv_lengths, q.shape[0], blocks, q.device)
        if q_lengths is not None:
            q_lengths = block_lengths("q_lengths", q_lengths, q.shape[0], tiles, q.device)
        factor, traced = checked_scale(scale, q.shape[3]), torch.compiler.is_compiling() or watched(q)
        if gate is not None:
            arguments.dense_beside("gate", gate, "q", q)
        if not q.shape[0]:
            return attention(q, k, v, scale=scale)
        learns = traced or wants_gradient(q, k, v, gate)
        if learns:  # whatever those rows hold, no gradient of k or v is of it
            q = only(q, self.sides[0], q_lengths)
        if traced:
            mask = self.mask(q, k, scale=scale, kv_lengths=kv_lengths)
        else:
            found = given(self.block, q, k, scale, None, kv_lengths)
            scores = block_scores(found, q_lengths=q_lengths)
            mask = found.topk(scores, self.topk, False)
        sparse = attention(q, k, v, mask, scale=scale)
        if learns:
            means = coarse(q, k, v, self.sides, factor, q_lengths, kv_lengths)
        else:
            means = averaged(block_mass(found, scores), v, self.sides[1], kv_lengths)
        gate = None if gate is None else checked_gate(gate, sparse)
        return with_coarse(sparse, means, gate, self.sides[0], q_lengths)


def with_coarse(
    sparse: Tensor, means: Tensor, gate: Tensor | None, side: int, lengths: Tensor | None = None
) -> Tensor:
    """gate * means + sparse, where means [B, Hq, Mb, Dv], float32, are for `side` queries each; 0 after `lengths`.

    Without gradients on a GPU it is written to `sparse` [B, Hq, S, Dv], whose memory must be its own.
    """
    usable = sparse.dtype in KERNEL_DTYPES and not watched(sparse)
    by_kernel = kernels("coarse", sparse) if usable else None
    if by_kernel is None or wants_gradient(sparse, means, gate):
        spread = means.to(sparse.dtype).repeat_interleave(side, 2)[:, :, : sparse.shape[2]]
        return only(sparse + (spread if gate is None else gate * spread), side, lengths)
    by_kernel.add_means(sparse, means, gate, side, lengths)
    return sparse


def coarse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: tuple[int, int],
    scale: float,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """float32 [B, Hq, Mb, Dv]: attention between the means of blocks. Blocks without a key are not seen."""
    group = q.shape[1] // k.shape[1]
    q_means = block_means(q, block[0], q_lengths)
    k_means, v_means = (block_means(x, block[1], kv_lengths) for x in (k, v))
    tiles = q_means.shape[2]
    q_means = q_means.unflatten(1, (k.shape[1], group)).flatten(2, 3)  # [B, Hkv, group * Mb, D]
    scores = scale * (q_means @ k_means.mT)
    if kv_lengths is not None:
        empty = rows_of_blocks(k.shape[2], block[1], kv_lengths, k.device)[:, None, None] == 0
        nothing = empty.all(-1, keepdim=True)
        weights = scores.masked_fill(empty & ~nothing, -torch.inf).softmax(-1) * ~nothing
    else:
        weights = scores.softmax(-1)
    return (weights @ v_means).unflatten(2, (group, tiles)).flatten(1, 2)


def only(q: Tensor, side: int, lengths: Tensor | None) -> Tensor:
    """q with 0 in the rows after the lengths of its tiles, which have no gradient."""
    if lengths is None:
        return q
    row = torch.arange(q.shape[2], device=q.device)
    return torch.where((row % side < lengths[:, row // side])[:, None, :, None], q, 0)


def averaged(mass: Tensor, v: Tensor, side: int, kv_lengths: Tensor | None) -> Tensor:
    """mass @ mean(v) [B, Hq, Mb, Dv] of mass [B, Hq, Mb, Nb], for blocks of `side` keys."""
    means = block_means(v, side, kv_lengths)
    group, tiles = mass.shape[1] // v.shape[1], mass.shape[2]
    of_groups = mass.unflatten(1, (v.shape[1], group)).flatten(2, 3)
    return (of_groups @ means).unflatten(2, (group, tiles)).flatten(1, 2)


def checked_gate(gate: Tensor, out: Tensor) -> Tensor:
    """A gate that multiplies the coarse branch."""
    arguments.tensor("gate", gate)
    arguments.one_device("gate is", gate.device, "q", out.device)
    wide = (1,) * (4 - gate.ndim) + tuple(gate.shape)
    if (
        gate.dtype != out.dtype
        or len(wide) > 4
        or any(side not in (1, size) for side, size in zip(wide, out.shape, strict=True))
    ):
        raise InvalidInput(
            f"gate is {gate.dtype} {list(gate.shape)}; it must be {out.dtype} and broadcast to {list(out.shape)}"
        )
    return gate
