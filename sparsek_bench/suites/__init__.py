"""What is measured: a file an operation."""
