"""Attention in plain torch, differentiable, on any device. The reference is the specification."""
