"""Policies: which blocks of attention are kept, chosen from q and k on their device."""

from sparsek.policies.policy import Policy

__all__ = ["Policy"]
