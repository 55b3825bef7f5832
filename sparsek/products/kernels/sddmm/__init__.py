"""Kernels of dense x dense at the blocks of a pattern."""
