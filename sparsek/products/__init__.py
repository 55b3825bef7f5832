"""Products of sparse matrices: formats, reference, planning, kernels, verbs."""
