"""What a sparse matrix is, how it is made, and how it lies in memory."""
