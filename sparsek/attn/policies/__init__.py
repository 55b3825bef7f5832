"""Policies: which blocks of attention are kept, chosen from q and k on their device."""

from sparsek.attn.policies.flexprefill import FlexPrefill
from sparsek.attn.policies.mass import recall
from sparsek.attn.policies.nabla import Nabla
from sparsek.attn.policies.pictures import plot
from sparsek.attn.policies.policy import Policy
from sparsek.attn.policies.quest import Quest
from sparsek.attn.policies.selected import NSA, IndexHead, InfLLMv2, MoBAGate, index_loss
from sparsek.attn.policies.static import Streaming
from sparsek.attn.policies.top import MeanTopK, SubBlock
from sparsek.attn.policies.vertical_slash import VerticalSlash
from sparsek.attn.policies.video import Radial, SlidingTile
from sparsek.attn.policies.vsa import VSA
from sparsek.attn.policies.xattention import XAttention

__all__ = [
    "NSA",
    "VSA",
    "FlexPrefill",
    "IndexHead",
    "InfLLMv2",
    "MeanTopK",
    "MoBAGate",
    "Nabla",
    "Policy",
    "Quest",
    "Radial",
    "SlidingTile",
    "Streaming",
    "SubBlock",
    "VerticalSlash",
    "XAttention",
    "index_loss",
    "plot",
    "recall",
]
