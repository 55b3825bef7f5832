"""How kernels are judged: error budgets, poisoned outputs, and the cases. Users may judge theirs with it."""
