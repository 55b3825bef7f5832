"""Kernel languages and the launcher."""
