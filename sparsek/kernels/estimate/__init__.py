"""Estimates of the softmax mass of blocks, for the policies that choose blocks from q and k."""
