"""Masks of block-sparse attention: the blocks that are stored, and the rules inside of them."""
