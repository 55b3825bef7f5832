"""Error budgets, poisoned outputs and test cases of kernels. Users may judge their own kernels with it."""
