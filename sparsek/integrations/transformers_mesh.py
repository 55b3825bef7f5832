"""Models of transformers over a mesh: each rank has the whole model and a shard of the tokens."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.build.documents import Window
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers_masks import MaskRequest, ModelMask, Rules

IGNORED = -100  # a label without a loss, as in transformers
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # of config.layer_types


class MeshMask(ModelMask):
    """The `attention_mask` of a model over a mesh: a plan, whose mask and the model's own both admit what is seen."""

    def __init__(self, plan: Any, shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        self.plan, self.shape, self.options = plan, shape, options
        self.packed, self.padded, self.causal = True, False, False
        self.choice, self.own, self.misfit = None, None, None

    def of_layers(self, function: Any, config: Any) -> MeshMask:
        """The mask of the layers of one kind, which have this mask function of transformers."""
        if getattr(config, "sparsek", None) is not None:
            raise InvalidInput(
                "config.sparsek does not go with a plan; plan with its mask, such as MaskPolicy(...).packed(cu_seqlens)"
            )
        others = set(getattr(config, "layer_types", None) or ()) - ATTENTION
        if others:
            raise InvalidInput(
                f"the model has layers of the kinds {', '.join(sorted(others))}, which mix the tokens of a rank alone"
            )
        rules = Rules.of(function)
        if rules is None or rules.chunks is not None or rules.ids is not None:
            raise InvalidInput(
                f"over a mesh layers are causal or not, and have windows; this model has masks by {function}"
            )
        near, mask = rules.near, self.plan.mask
        if near == Window() or (near == Window(None, 1) and _sees_none_ahead(mask)):
            return self

        kept = self.plan._masks
        if near not in kept:
            layout = MaskRequest(1, mask.q_len, mask.kv_len, 0, 0, None, mask.device).layout(rules)
            own = MaskPolicy(causal=False, block=mask.block).visible_in(layout, mask.device).within
            kept[near] = self.plan.with_mask(mask & own)
        return MeshMask(kept[near], self.shape, self.options)

    def to(self, device: Any, **_: Any) -> MeshMask:
        """This mask, which is for all devices."""
        return self

    def reshape(self, *_: int) -> NoReturn:
        """What losses of routers do with a mask of padding. InvalidInput: they count the tokens of the whole batch."""
        raise InvalidInput(
            "a loss of routers (output_router_logits) is of all tokens, and a rank has its own; leave it out"
        )

    def explain(self) -> str:
        """What computes attention under this mask, and over which keys."""
        return f"sk.distributed.attention by {self.plan!r}"

    def __repr__(self) -> str:
        return f"MeshMask({self.plan!r})"

    def attended(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        """out [B, S_r, Hq, Dv] of a layer."""
        out = sk.distributed.attention(query, key, value, self.plan, **settings, **self.options)
        return out.transpose(1, 2).contiguous()


def _sees_none_ahead(mask: BlockMask) -> bool:
    """Whether the lists and intervals of a mask show by themselves that no query sees a key after its own."""
    host, (bq, bk) = mask.host, mask.block
    if host.hi is None or host.bits is not None:
        return False
    starts, counts, indices = host.full
    tiles = np.flatnonzero(counts)
    last = indices[starts[tiles].astype(np.int64) + counts[tiles] - 1].astype(np.int64)  # blocks ascend
    whole = (last + 1) * bk <= tiles % max(mask.grid[0], 1) * bq + 1
    return bool(whole.all() and (host.hi <= np.arange(mask.q_len) + 1).all())


def mesh_inputs(
    plan: Any, *, pieces: int = 1, exact: bool = False, check: bool = True, **inputs: Any
) -> dict[str, Any]:
    """Return the arguments of a model of transformers over a mesh: this rank's shards of its inputs. No communication.

        model.set_attn_implementation("sparsek")
        logits = model(**mesh_inputs(plan, input_ids=ids)).logits  # [B, S_r, vocabulary], of this rank's tokens

    All ranks of the mesh call the model with the result, and run its backward pass if one does. A query sees the keys
    that both the mask of the plan and the model admit: causality and sliding windows. config.sparsek must be None.
    There is no cache, and no padding but what the mask hides. Layers that mix tokens otherwise, such as convolutions
    and linear attention, see this rank's tokens only and are not for shards.

    Args:
        plan: What `sk.distributed.plan` returned, of a BlockMask with as many queries as keys.
        pieces: As in `sk.distributed.attention`.
        exact: The same.
        check: The same.
        **inputs: Inputs of the whole sequence, the same on all ranks: `input_ids` or `inputs_embeds`, and others. Those
            with B or 1 batch items and all tokens [B, S, ...] are sharded. `position_ids` are the places in the
            sequence by default. `labels` [B, S] are those of a causal language model: they are shifted before they are
            sharded, and the loss of a rank is its part of the mean. The sum over ranks is the loss, and sums of
            gradients over ranks are its gradients. Compute other losses from unsharded logits.

    Raises:
        InvalidInput: For a plan of something else, of a policy that chooses, or without processes; for inputs without
            tokens of its length, and for an attention_mask or a cache.

    Example:
        loss = model(**mesh_inputs(plan, input_ids=ids, labels=ids)).loss
    """
    if (
        not isinstance(plan, sk.distributed.MeshPlan)
        or plan.rule is not None
        or plan.mask.q_len != plan.mask.kv_len
    ):
        raise InvalidInput(
            f"plan is {arguments.shown(plan)}; it must come from sk.distributed.plan, of a BlockMask with as many "
            "queries as keys"
        )
    for name in ("attention_mask", "past_key_values"):
        if inputs.get(name) is not None:
            raise InvalidInput(
                f"{name} does not go with a plan; its mask has all that a query sees: plan with one that hides "
                "padding, without a cache"
            )
    tokens = [x for x in (inputs.get("input_ids"), inputs.get("inputs_embeds")) if isinstance(x, Tensor)]
    length = plan.mask.q_len
    if not tokens or tokens[0].dim() < 2 or tokens[0].shape[1] != length:
        found = list(tokens[0].shape) if tokens else "none"
        raise InvalidInput(
            f"input_ids or inputs_embeds must be [B, {length}, ...], the plan's tokens; got {found}"
        )
    batch, device = tokens[0].shape[0], tokens[0].device
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.shape == (batch, length):
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        inputs |= {"shift_labels": shifted, "num_items_in_batch": (shifted != IGNORED).sum()}
    found = {name: _shard(x, plan, batch) for name, x in inputs.items()}
    if found.get("position_ids") is None:
        found["position_ids"] = sk.distributed.positions(plan, device=device)[None]
    options = {"pieces": pieces, "exact": exact, "check": check}
    own = found["position_ids"].shape[-1]
    mask = MeshMask(plan, (batch, 1, own, own), options)
    return {**found, "attention_mask": mask, "use_cache": False}


def _shard(x: Any, plan: Any, batch: int) -> Any:
    """This rank's tokens of a tensor that has all; anything else as it is."""
    sharded = (
        isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] in (1, batch) and x.shape[1] == plan.mask.q_len
    )
    return sk.distributed.shard_sequence(x, plan, dim=1) if sharded else x
