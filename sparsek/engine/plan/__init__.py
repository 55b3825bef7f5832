"""Planning without kernels: problems, the protocol of kernels, choices, plans."""
