"""Matrices multiply, pack and round by functions of the operations, above them, which register there when loaded."""

from importlib import import_module


def load() -> None:
    """Loads all operations. A matrix calls this that was made, or unpickled, before any of them was."""
    import_module("sparsek.ops")
