"""Old paths of modules and names of classes: imports and pickles with them go on working with a warning.

MOVED has a row for each folder and module that moved or has another name. An import of an old path gets a module whose
names are looked up at the new one, so a class is the same class by both paths. RENAMED has the classes with another
name, by their module's path today.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sparsek.core.errors import SparseKWarning

# Paths within sparsek, old: new, or several new ones that divide the names of the old. A row also holds for the modules
# below it that have no row of their own. Measuring is beside sparsek.
MOVED: dict[str, tuple[str, ...]] = {
    "advise": ("tools.advise",),
    "advise.tune": ("tools.cli.tune",),
    "bench": ("sparsek_bench",),
    "cli": ("tools.cli", "sparsek_bench.commands"),
    "core.home": ("core.plan_owner",),
    "core.wall": ("core.clock",),
    "core.words": ("core.fault_ring",),
    "integrations.named": ("integrations.config",),
    "integrations.refused": ("integrations.foreign_options",),
    "kernels": ("engine.table", "products.kernels", "attn.kernels"),
    "kernels.attention": ("attn.kernels.forward", "attn.kernels.backward"),
    "kernels.attention.bwd_rules": ("attn.kernels.forward.rules",),
    "kernels.kinds": ("engine.launch.kinds",),
    "kernels.lang": ("engine.launch", "products.kernels.common"),
    "kernels.pack": ("products.kernels.pack", "attn.kernels.forward"),
    "mask": ("attn.mask",),
    "mask.accepted": ("attn.mask.convert.argument",),
    "mask.again": ("attn.mask.recorded",),
    "mask.bigbird": ("attn.mask.build.bigbird",),
    "mask.choice": ("attn.mask.build.selection",),
    "mask.chosen": ("attn.mask.build.selection_reference",),
    "mask.closed": ("attn.mask.build.banded",),
    "mask.documents": ("attn.mask.build.documents",),
    "mask.flex": ("attn.mask.convert.flex",),
    "mask.fresh": ("attn.mask.layout", "attn.mask.recorded", "attn.mask.readback"),
    "mask.heads8": ("attn.mask.quantized_heads",),
    "mask.interop": ("attn.mask.convert.interop",),
    "mask.listed": ("attn.mask.build.lists",),
    "mask.scored": ("attn.mask.build.scored",),
    "mask.structured": ("attn.mask.build.structured",),
    "mask.survey": ("attn.mask.convert.evaluate",),
    "mask.view": ("attn.mask.elements",),
    "mask.xformers": ("attn.mask.convert.xformers",),
    "matrix": ("products.formats",),
    "matrix.dense8": ("products.formats.quantized_tensor",),
    "ops": ("products.ops", "attn.ops", "engine", "engine.call"),
    "ops.attention_fp8": ("attn.ops.attention",),
    "ops.attention_refused": ("attn.ops.foreign_options",),
    "ops.bound": ("engine.call.recorded_calls", "products.ops.recorded_products"),
    "plan": ("engine.plan", "products.plan", "attn.plan", "sparsek_bench.engine"),
    "plan.kernel": ("engine.plan.kernel", "products.plan.kernels", "attn.plan.kernels"),
    "plan.tune": ("tools.cli.tune",),
    "plan.problem": ("engine.plan.problem", "products.plan.problems", "attn.plan.problems"),
    "policies": ("attn.policies",),
    "policies.quality": ("sparsek_bench.suites.quality",),
    "profile": ("sparsek_bench.profile",),
    "reference": ("products.reference", "attn.reference"),
    "testing.heads": ("sparsek_bench.engine.heads",),
    "testing.pack_budget": ("sparsek_bench.engine.pack_budget",),
    "tools.bench": ("sparsek_bench",),
    "tools.cli.output": ("core.terminal",),
}
RENAMED = {
    "sparsek.attn.policies.policy.Given": "PolicyInputs",
    "sparsek.integrations.vllm_omni.SparseKBackend": "OmniBackend",
    "sparsek.integrations.vllm_omni.SparseKImpl": "OmniImpl",
    "sparsek.testing.attention_data.Sizes": "HeadSizes",
    "sparsek.tools.advise.break_even.Setting": "CurveSetting",
}


class MovedWarning(SparseKWarning):
    """A name of SparseK was found by its old path."""


def homes(old: str) -> tuple[str, ...]:
    """The modules that have the names of the module `old` today; none if it has not moved."""
    found: list[str] = []
    for new in _next(old):  # which may have moved again
        found += homes(new) or ([new] if _exists(new) else [])
    return tuple(found)


def _next(old: str) -> list[str]:
    """Where its own row or that of its folder puts a module."""
    row = MOVED.get(old.removeprefix("sparsek."))
    if row is not None:
        return [new if new.startswith("sparsek_bench") else f"sparsek.{new}" for new in row]
    above, _, stem = old.rpartition(".")
    return [f"{folder}.{stem}" for folder in _next(above)] if above else []


def _exists(module: str) -> bool:
    try:
        package = import_module(module.rpartition(".")[0] or "sparsek")
    except ModuleNotFoundError as error:
        if error.name and module.startswith(f"{error.name}."):
            return False
        raise
    return hasattr(package, "__path__") and util.find_spec(module) is not None


class Aliases:  # no importlib.abc, whose import takes longer than that of sparsek
    """Finds and loads modules of sparsek by their old paths, after every other finder has failed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of an old path; None for other modules."""
        found = homes(fullname) if fullname.startswith("sparsek.") else ()
        if found and fullname.endswith(".__main__"):  # `python -m` with an old path runs the file of today
            text = f"{fullname} is {found[0]} now; the old path works until a later release"
            warnings.warn(text, MovedWarning, stacklevel=2)
            today = util.find_spec(found[0])
            return util.spec_from_file_location(fullname, today and today.origin)
        return ModuleSpec(fullname, self, is_package=True) if found else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Have the names of `module` looked up where they are today."""
        old, found = module.__name__, [import_module(home) for home in homes(module.__name__)]
        module.__getattr__ = earlier_names(old, found)
        # For `from old import *`; each name is once in it.
        names = {name for home in found for name in getattr(home, "__all__", dir(home)) if name[0] != "_"}
        module.__all__ = sorted(names)  # type: ignore[attr-defined]


def earlier_names(old: str, found: Sequence[ModuleType] = ()) -> Any:
    """The __getattr__ of a module, for the names of those `found` for it, or else of its own classes in RENAMED."""
    now = f", now {' and '.join(home.__name__ for home in found)}," if found else ""

    def lookup(name: str) -> Any:
        for home in found or [sys.modules[old]]:
            new = RENAMED.get(f"{home.__name__}.{name}", name if found else "")
            if not name.startswith("__") and new and hasattr(home, new):
                text = f"{old}.{name} is {home.__name__}.{new} now; imports of the old path, and files that "
                text += "were pickled with it, work until a later release"
                warnings.warn(text, MovedWarning, stacklevel=2)
                return getattr(home, new)
        raise AttributeError(f"module {old!r}{now} has no attribute {name!r}")

    return lookup


def install() -> None:
    """Let imports find old paths. Done by `import sparsek`."""
    sys.meta_path.append(Aliases())
