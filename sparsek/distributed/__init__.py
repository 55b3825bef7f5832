"""Plans of attention over several processes, on torch.distributed."""
