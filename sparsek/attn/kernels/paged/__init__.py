"""Kernels of attention over paged keys and values."""
