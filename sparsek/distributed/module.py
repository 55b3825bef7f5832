"""Attention over a mesh as a module, in place of a model's own that calls FlexAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.distributed.attention import attention
from sparsek.distributed.plan import MeshPlan


class MeshFlexAttention(torch.nn.Module):
    """Attention over a mesh as a module, for models whose attention modules call `flex_attention`, as torchtitan's do.

    It takes the place of the module that the model calls with q, k, v and a block mask:

        block.attention.inner_attention = MeshFlexAttention(plan)

    The model gets shards of tokens (`sk.distributed.shard_sequence`) and their `positions`, and block masks of the
    whole sequence: those are not to be sharded, and torch's context parallel is not to be applied.

    Args:
        plan: The plan of all calls without a plan of their own, of `sk.distributed.plan`. None: each call gets one as
            its block mask, which suits masks that change in each step.
        pieces: As in `sk.distributed.attention`.
        exact: The same.
        check: The same.
        softcap: As in `sk.attention`, in place of a score_mod.

    Raises:
        InvalidInput: For a plan of something else.
    """

    def __init__(
        self,
        plan: Any = None,
        *,
        pieces: int = 1,
        exact: bool = False,
        check: bool = True,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        if plan is not None and not isinstance(plan, MeshPlan):
            raise InvalidInput(f"plan is {arguments.shown(plan)}; it must come from sk.distributed.plan")
        self.plan = plan
        self.options = {"pieces": pieces, "exact": exact, "check": check, "softcap": softcap}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: Any = None,
        attention_masks: Any = None,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        out_transform: Any = None,
        kernel_options: Any = None,
    ) -> Any:
        """Return this rank's shard of attention, with gradients. All ranks must call it.

        Args:
            q: This rank's queries [B, Hq, S_r, D], or packed [S_r, Hq, D] as in torchtitan since 2026.
            k: Its keys, with as many dims and Hkv heads.
            v: Its values.
            block_mask: A plan, as of `plan.with_mask(mask)`; a BlockMask of FlexAttention or SparseK of the whole
                sequence; TokenLists or a policy, as `mask` of `sk.distributed.attention`; or None for that of the plan.
            attention_masks: Another name of it.
            score_mod: Must be None.
            scale: The factor of the scores; D**-0.5 for None.
            enable_gqa: Not read: q may have any multiple of the heads of k and v.
            return_lse: Whether to return (out, lse).
            out_transform: A function of out and lse, whose result is returned; lse [B, Hq, S_r], or [S_r, Hq] of packed
                operands.
            kernel_options: Not read: it is for torch's kernels.

        Returns:
            out in the dims of q, or (out, lse), or what `out_transform` returns.

        Raises:
            InvalidInput: As `sk.distributed.attention`; without a plan, and for two masks.
            MeshError: As `sk.distributed.attention`.
        """
        if score_mod is not None:
            raise InvalidInput(
                "score_mod is given, and attention over a mesh changes scores by a soft cap alone: "
                "MeshFlexAttention(plan, softcap=...)"
            )
        if block_mask is not None and attention_masks is not None:
            raise InvalidInput("block_mask and attention_masks are both given; give one")
        if out_transform is not None and not callable(out_transform):
            raise InvalidInput(
                f"out_transform is {arguments.shown(out_transform)}; it must be a function of out and lse, or None"
            )
        mask: Any = attention_masks if block_mask is None else block_mask
        plan = None if mask is None or isinstance(mask, MeshPlan) else self.plan
        mask = self.plan if mask is None else mask
        packed = all(isinstance(x, Tensor) and x.ndim == 3 for x in (q, k, v))
        if packed:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        wanted = arguments.flag("return_lse", return_lse) or out_transform is not None
        given: Any = {"plan": plan, "scale": scale, "return_lse": wanted, **self.options}
        found: Any = attention(q, k, v, mask, **given)
        if not wanted:
            return found[0].transpose(0, 1) if packed else found
        out, lse = (x[0].transpose(0, 1) for x in found) if packed else found
        return (out, lse) if out_transform is None else out_transform(out, lse)
