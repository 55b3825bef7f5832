"""Device facts, dtypes, environment, errors, timing. Imports nothing of the project."""
