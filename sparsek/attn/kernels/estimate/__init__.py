"""Estimates of the softmax mass of blocks of attention, in plain Triton: means, scores, and maps of blocks."""
