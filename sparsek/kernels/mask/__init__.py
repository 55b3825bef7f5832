"""Kernels that make attention masks."""
