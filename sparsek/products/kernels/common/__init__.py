"""Device code that kernels of several products share."""
