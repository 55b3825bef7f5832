"""Lists of blocks that a trained model chooses, for `sparsek bench tokens`."""
