"""Policies: which blocks of attention are kept, chosen from q and k on their device."""

from sparsek.policies.policy import Policy
from sparsek.policies.static import Streaming
from sparsek.policies.top import MeanTopK, SubBlock
from sparsek.policies.xattention import XAttention

__all__ = ["MeanTopK", "Policy", "Streaming", "SubBlock", "XAttention"]
