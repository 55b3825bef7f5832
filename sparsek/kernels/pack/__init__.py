"""Kernels that bring dense matrices into a format."""
