"""Attention over the blocks of a mask: masks, reference, planning, kernels, verbs, policies."""
