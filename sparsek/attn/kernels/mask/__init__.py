"""Block masks made on a GPU."""
