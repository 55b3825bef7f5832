"""Kernels by operation, their tables, and the launcher."""
