"""Sparse matrices and masks in files, and the weights of others."""
