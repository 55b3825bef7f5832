"""Models of transformers over ranks and by one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM

import sparsek as sk
from sparsek.integrations.transformers import mesh_inputs

N, EDGES = 300, [0, 130, 130, 171, 300]
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gemma() -> Any:
    """Soft caps, and a layer with a window before one without."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=8, sliding_window=20, query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0, attn_implementation="sparsek",
    )  # fmt: skip
    return Gemma2ForCausalLM(config).double().eval()


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SMALL, attn_implementation="sparsek")).double().eval()


def inputs(batch: int) -> dict[str, Any]:
    """Tokens and labels, some of which are ignored."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (batch, N), generator=draw)
    return {"input_ids": ids, "labels": ids.where(ids > 5, -100)}


def _gradients(model: Any) -> list[Tensor]:
    return [x.grad for x in model.parameters() if x.grad is not None]


def gemma_over_ranks(group: Any) -> list[Tensor]:
    """Logits, loss and gradients, of documents."""
    model, cu_seqlens = gemma(), torch.tensor(EDGES)
    plan = sk.distributed.plan(sk.MaskPolicy(block=64).packed(cu_seqlens), group)
    found = model(**mesh_inputs(plan, **inputs(1), position_ids=places()))
    found.loss.backward()
    parts = [found.loss.detach(), *_gradients(model)]
    for each in parts:
        dist.all_reduce(each, group=group)
    return [sk.distributed.unshard_sequence(found.logits.detach(), plan, dim=1), *parts]


def places() -> Tensor:
    """The places of tokens in their documents."""
    return torch.cat([torch.arange(b - a) for a, b in pairwise(EDGES)])[None]


def gemma_alone() -> list[Tensor]:
    model = gemma()
    found = model(**inputs(1), position_ids=places(), use_cache=False)
    found.loss.backward()
    return [found.logits.detach(), found.loss.detach(), *_gradients(model)]


def bert_over_ranks(group: Any) -> Tensor:
    """The states of a model in which all tokens see each other, but for padding at the end of the mask."""
    plan = sk.distributed.plan(sk.BlockMask.full(N, block=64), group, "heads")
    types = torch.arange(N)[None] % 2
    with torch.no_grad():
        states = bert()(
            **mesh_inputs(plan, input_ids=inputs(2)["input_ids"], token_type_ids=types)
        ).last_hidden_state
    return sk.distributed.unshard_sequence(states, plan, dim=1)


def bert_alone() -> Tensor:
    with torch.no_grad():
        return bert()(inputs(2)["input_ids"], token_type_ids=torch.arange(N)[None] % 2).last_hidden_state
