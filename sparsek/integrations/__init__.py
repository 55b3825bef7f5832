"""SparseK in other libraries. Each module needs its library, and registers itself when imported."""
