"""Any attention between two exchanges of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.ops.attention import follow_autocast
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import agreed, refuse_transforms
from sparsek.core.tracing import untraced
from sparsek.distributed.heads import by_heads
from sparsek.distributed.plan import MeshPlan

NAME, ANY = "sk.distributed.ulysses", MaskRule()  # in place of a mask, which `attend` has


@untraced(f"{NAME} communicates", "leave fullgraph=True out")
def ulysses(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: MeshPlan,
    *,
    check: bool = True,
) -> Tensor:
    """Return this rank's shard of any attention, which is computed with whole rows of some heads on each rank.

    All ranks must call it, and run the backward pass if one of them does.

    Args:
        attend: A function of q [B, H, S, D], k [B, G, T, D] and v [B, G, T, Dv] that returns out [B, H, S, Dv]. It gets
            all tokens, in order, of this rank's heads; H is a multiple of G. A rank without heads does not call it.
        q: This rank's queries [B, Hq, S_r, D].
        k: Its keys [B, Hkv, T_r, D].
        v: Its values [B, Hkv, T_r, Dv].
        plan: A plan by "heads". Its mask is not read.
        check: As in `attention`; also whether an error of `attend` on one rank is raised on all.

    Raises:
        InvalidInput: For operands that do not fit the plan, on every rank.
        MeshError: If an exchange fails or times out, and if `attend` raised an error on another rank.

    Example:
        out = ulysses(torch.nn.functional.scaled_dot_product_attention, q, k, v, plan)
    """
    if not isinstance(plan, MeshPlan) or plan.how != "heads":
        raise InvalidInput(
            f'plan is {arguments.shown(plan)}; it must come from sk.distributed.plan(..., how="heads")'
        )
    plan._here  # noqa: B018  # InvalidInput without processes

    def checks() -> str:
        nonlocal q, k, v
        arguments.flag("check", check)
        refuse_transforms(NAME)
        if not callable(attend):
            raise InvalidInput(f"attend is {arguments.shown(attend)}; it must be a function of q, k and v")
        q, k, v = follow_autocast(q, k, v)
        check_tensors(q, k, v)
        own = int(plan._parts.queries.tokens[plan._here]), int(plan._parts.keys.tokens[plan._here])
        if (q.shape[2], k.shape[2]) != own:
            raise InvalidInput(
                f"rank {plan._here} has {q.shape[2]} queries and {k.shape[2]} keys; the plan gives it {own[0]} and "
                f"{own[1]}"
            )
        shapes = [[*x.shape[:2], "S", x.shape[3]] for x in (q, k, v)]
        learns = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
        return f"heads of q, k and v {shapes} in {q.dtype}, gradients {learns}, in {plan._text}"

    groups = plan._groups
    if check is not False:
        agreed(NAME, groups, checks)
    else:
        checks()

    def of_rows(all_q: Tensor, all_k: Tensor, all_v: Tensor, _: Any, **__: Any) -> tuple[Tensor, Tensor]:
        out = attend(all_q, all_k, all_v)
        wanted = [*all_q.shape[:3], all_v.shape[3]]
        if not isinstance(out, Tensor) or list(out.shape) != wanted or out.dtype != all_q.dtype:
            raise InvalidInput(
                f"attend returned {arguments.shown(out)}; it must return a tensor {wanted} in {all_q.dtype}"
            )
        if q.shape[1] < plan.ranks:  # ranks without heads have gradients through all three
            out = out + sum(x.flatten()[:0].sum() for x in (all_q, all_k, all_v))
        return out, out[..., 0]

    return by_heads(q, k, v, plan, ANY, of_rows, {"sink_logits": None}, groups if check else [], False)[0]
