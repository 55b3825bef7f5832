"""Kernels of sparse x dense."""
