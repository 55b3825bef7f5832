"""Documented failures of torch.sparse's BSR, run against the torch that is installed, and SparseK's answers."""
