"""The languages that kernels are written in, and how they are launched."""
