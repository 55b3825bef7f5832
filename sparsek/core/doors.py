"""Doors: what rooms below load of rooms above, without naming them. `sparsek/__init__.py` lists what is behind each.

Behind "operations" are the modules that register all verbs when they load, behind "kernels" those whose KERNELS are the
kernels' table, behind "commands" the folders whose modules are the commands of `sparsek`. Behind "transformers" is what
registers sparse layers with its `from_pretrained`, behind "torchao" what registers configs with its `quantize_`.
"""

from importlib import import_module
from types import ModuleType

_behind: dict[str, tuple[str, ...]] = {}


def build(door: str, *modules: str) -> None:
    """Put modules behind a door. Nothing is imported."""
    _behind[door] = modules


def enter(door: str) -> list[ModuleType]:
    """The modules behind a door, imported."""
    return [import_module(module) for module in _behind[door]]
