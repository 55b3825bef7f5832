"""The machinery of every operation: plans, calls, and launches."""
