"""Every policy and function of sk.policies, with valid arguments for the fuzz. See `engine.Call`."""

from __future__ import annotations

from typing import Any

import torch

import sparsek as sk
from tests.fuzz.calls_ops import dense, function
from tests.fuzz.engine import Call

policies = sk.policies
TILES = policies.SlidingTile((4, 8, 8), (1, 1, 1))
Q, K, V = dense(2, 4, 256, 16), dense(2, 2, 256, 16), dense(2, 2, 256, 8)
LENGTHS = torch.tensor([64, 3, 0, 64], dtype=torch.int32)
MADE: dict[str, Any] = {
    "FlexPrefill": policies.FlexPrefill(min_budget=128, block=64),
    "MeanTopK": policies.MeanTopK(topk=2, block=64),
    "Nabla": policies.Nabla(0.5, tiles=TILES),
    "Radial": policies.Radial(4, 64, block=64),
    "SlidingTile": TILES,
    "Streaming": policies.Streaming(window=64, sinks=64, block=64),
    "SubBlock": policies.SubBlock(0.5),
    "VSA": policies.VSA(topk=2),
    "VerticalSlash": policies.VerticalSlash(vertical=64, slash=128, block=64),
    "XAttention": policies.XAttention(block=64, precision="full"),
}
SIDES = {"block": "int sequence"}
SHARED = {"topk": "none int", **SIDES}
CALLED = {"q_offset": "none int", "kv_lengths": "none tensor"}
SCALED = {"scale": "none float int"}
COMPARED = {"scale": "none float int", "causal": "none bool", "kv_lengths": "none tensor"}

CALLS: dict[str, Call] = {
    "policies.FlexPrefill": Call(
        function(policies.FlexPrefill, gamma=0.9, tau=0.1, min_budget=512, block=128),
        SIDES | {"gamma": "int", "tau": "int"},
    ),
    "policies.MeanTopK": Call(
        function(policies.MeanTopK, topk=3, density=0.5, block=128, causal=True, always=(1, 1)),
        SHARED | {"density": "int"},
    ),
    "policies.Nabla": Call(
        function(policies.Nabla, threshold=0.5, block=64, tiles=None, causal=False, most=4),
        SIDES | {"most": "none int", "threshold": "int"},
    ),
    "policies.Radial": Call(
        function(policies.Radial, frames=4, frame_tokens=64, decay=0.5, model="wan", block=64),
        SIDES | {"decay": "int", "model": "none text"},
    ),
    "policies.SlidingTile": Call(
        function(
            policies.SlidingTile, shape=(4, 8, 8), window=(1, 3, 3), tile=(4, 4, 4), block=64, clamped=True
        ),
        SIDES,
    ),
    "policies.Streaming": Call(
        function(policies.Streaming, window=64, sinks=64, block=64, causal=True), SIDES
    ),
    "policies.SubBlock": Call(
        function(policies.SubBlock, density=0.5, parts=(4, 4), block=64, causal=False, topk=3, always=(0, 1)),
        SHARED | {"density": "int"},
    ),
    "policies.VSA": Call(function(policies.VSA, topk=3, block=64), SIDES),
    "policies.VerticalSlash": Call(
        function(policies.VerticalSlash, vertical=64, slash=64, block=64, heads=None),
        SIDES | {"heads": "none sequence"},
    ),
    "policies.XAttention": Call(
        function(policies.XAttention, threshold=0.9, stride=16, block=128, causal=True, precision="full"),
        SIDES | {"threshold": "int"},
    ),
    "policies.VerticalSlash.from_json": Call(
        function(
            policies.VerticalSlash.from_json, source=[{"0": ["stream_llm", 100, 800]}], layer=0, block=64
        ),
        SIDES,
    ),
    "policies.VSA.attention": Call(
        function(
            MADE["VSA"].attention, q=Q, k=K, v=V, gate=dense(2, 4, 256, 8), kv_lengths=LENGTHS, q_lengths=LENGTHS,
            scale=0.5,
        ),
        {"gate": "none tensor", "kv_lengths": "none tensor", "q_lengths": "none tensor", "scale": "none float int"},
        every=20,
    ),
    "policies.plot": Call(
        function(
            policies.plot, mask=MADE["VSA"], q=Q, k=K, head=1, batch=0, path=None, scale=0.5, causal=False,
            kv_lengths=None, max_pixels=256,
        ),
        COMPARED | {"mask": "BlockMask"},
        every=20,
    ),
    "policies.recall": Call(
        function(
            policies.recall, mask=MADE["VSA"], q=Q, k=K, scale=0.5, samples=4, seed=0, causal=False, kv_lengths=None
        ),
        COMPARED | {"mask": "BlockMask"},
        every=20,
    ),
}  # fmt: skip
QUEST = policies.Quest(topk=2, page=16)
KEYS, SUMMARIES = dense(5, 2, 16, 8), dense(5, 2, 2, 8)
CALLS |= {
    "policies.Quest": Call(function(policies.Quest, topk=2, page=16)),
    "policies.Quest.summaries": Call(function(QUEST.summaries, cache_keys=KEYS)),
    "policies.Quest.update": Call(
        function(
            QUEST.update, cache_keys=KEYS, slot_mapping=torch.tensor([3, 40, -1, 41]), summaries=SUMMARIES
        ),
        every=4,
    ),
    "policies.Quest.lists": Call(
        function(
            QUEST.lists, q=dense(3, 4, 8), summaries=SUMMARIES,
            block_table=torch.tensor([[0, 3], [1, 4]], dtype=torch.int32),
            seq_lens=torch.tensor([20, 32], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32),
        ),
        every=4,
    ),
}  # fmt: skip
for name, made in MADE.items():
    CALLS[f"policies.{name}.mask"] = Call(
        function(made.mask, q=Q, k=K, q_offset=0, kv_lengths=LENGTHS), CALLED, every=20
    )
    CALLS[f"policies.{name}.mask_for"] = Call(function(made.mask_for, q=Q, k=K), every=20)
SELECTING: dict[str, Any] = {
    "InfLLMv2": policies.InfLLMv2(topk=4, always=(1, 1)),
    "MoBAGate": policies.MoBAGate(block=64),
    "NSA": policies.NSA(topk=4),
}
PACKED = torch.tensor([0, 100, 256])
INDEXED = policies.IndexHead(topk=2, block=64).lists(
    dense(1, 2, 256, 8), dense(1, 1, 256, 8), cu_seqlens=PACKED
)
CALLS |= {
    "policies.IndexHead": Call(function(policies.IndexHead, topk=4, block=64, always=(1, 1))),
    "policies.InfLLMv2": Call(
        function(policies.InfLLMv2, topk=8, block=64, always=(1, 4), span=32, stride=16)
    ),
    "policies.MoBAGate": Call(function(policies.MoBAGate, topk=2, block=256, always=(0, 1))),
    "policies.NSA": Call(function(policies.NSA, topk=4, block=64, always=(1, 2), span=32, stride=16)),
    "policies.IndexHead.lists": Call(
        function(
            policies.IndexHead(topk=2, block=64).lists, q=dense(1, 2, 256, 8), k=dense(1, 1, 256, 8), scale=0.5,
            cu_seqlens=PACKED,
        ),
        {"scale": "none float int", "cu_seqlens": "none"},
        every=10,
    ),
    "policies.index_loss": Call(
        function(
            policies.index_loss, index_q=dense(1, 2, 256, 8), index_k=dense(1, 1, 256, 8), q=dense(1, 4, 256, 8),
            k=dense(1, 2, 256, 8), lists=INDEXED, scale=0.5, index_scale=0.5, cu_seqlens=PACKED,
        ),
        {"scale": "none float int", "index_scale": "none float int", "cu_seqlens": "none", "lists": "none"},
        every=10,
    ),
}  # fmt: skip
for name, made in SELECTING.items():
    more: dict[str, Any] = {} if name == "MoBAGate" else {"compressed": None}
    CALLS[f"policies.{name}.lists"] = Call(
        function(made.lists, q=Q[:1], k=K[:1], scale=0.5, cu_seqlens=PACKED, **more),
        {"scale": "none float int", "cu_seqlens": "none"},
        every=10,
    )
    CALLS[f"policies.{name}.mask_for"] = Call(function(made.mask_for, q=Q, k=K, scale=0.5), SCALED, every=20)

REASONS = {
    "policies.IndexHead.mask_for": "takes index queries and keys, and attention has none; `lists`",
    "choose": "for `mask`: of arguments that were checked",
    "pairs": "for `mask`: of a place that was checked",
    "near": "takes no arguments",
    "width": "for `pairs`",
    "policies.Policy": "the base class",
    "policies.Policy.mask": "of the base class",
    "policies.Policy.mask_for": "of the base class",
}
