"""Devices, dtypes, environment, errors, timing. Imports no other room."""
