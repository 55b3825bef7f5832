"""Kernels that convert dense matrices into a format."""
