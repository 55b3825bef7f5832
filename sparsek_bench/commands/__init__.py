"""The commands `sparsek bench` and `sparsek profile`."""
