"""Kernels of the gradients of attention."""
