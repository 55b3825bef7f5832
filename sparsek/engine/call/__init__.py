"""Calls: recorded ones, autocast, and ops under torch.func."""
