"""Whole models: which layers become sparse, and calibrated pruning."""
