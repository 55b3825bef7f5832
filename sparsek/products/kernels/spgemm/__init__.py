"""Kernels of sparse x sparse."""
