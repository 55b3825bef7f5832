"""Floor 0: device facts, dtypes, environment, errors, timing. Imports nothing of the project."""
