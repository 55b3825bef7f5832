"""Policies: which blocks of attention are kept, chosen from q and k on their device. They stand in attn/policies."""

from sparsek.attn.policies import *  # noqa: F403
from sparsek.attn.policies import __all__ as __all__
