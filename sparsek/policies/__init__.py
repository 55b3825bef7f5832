"""Policies: which blocks of attention are kept, chosen from q and k on their device."""

from sparsek.policies.flexprefill import FlexPrefill
from sparsek.policies.mass import recall
from sparsek.policies.nabla import Nabla
from sparsek.policies.pictures import plot
from sparsek.policies.policy import Policy
from sparsek.policies.quest import Quest
from sparsek.policies.static import Streaming
from sparsek.policies.top import MeanTopK, SubBlock
from sparsek.policies.vertical_slash import VerticalSlash
from sparsek.policies.video import Radial, SlidingTile
from sparsek.policies.vsa import VSA
from sparsek.policies.xattention import XAttention

__all__ = [
    "VSA",
    "FlexPrefill",
    "MeanTopK",
    "Nabla",
    "Policy",
    "Quest",
    "Radial",
    "SlidingTile",
    "Streaming",
    "SubBlock",
    "VerticalSlash",
    "XAttention",
    "plot",
    "recall",
]
