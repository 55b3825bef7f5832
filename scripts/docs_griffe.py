"""An extension of griffe: methods that a class takes over from a module, with the signature and docs of the function.

griffe reads the source, where `causal = classmethod(structured.causal)` or `to_dense = view.to_dense` is an attribute.
"""

import re
from typing import Any

import griffe

TAKEN = re.compile(r"(classmethod|property)?\(?(\w+)\.(\w+)\)?")


class ReplacedAttributes(griffe.Extension):
    """Replaces such attributes by functions."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visits every class of the package."""
        modules = [pkg]
        while modules:
            module = modules.pop()
            members = [each for each in module.members.values() if not each.is_alias]
            modules += [each for each in members if each.is_module]
            for cls in members:
                if cls.is_class:
                    _take_over(cls, module, pkg)


def _take_over(cls: Any, module: Any, pkg: Any) -> None:
    for name, member in list(cls.members.items()):
        found = TAKEN.fullmatch(str(member.value)) if not member.is_alias and member.is_attribute else None
        source = module.members.get(found[2]) if found else None
        inside = f"{pkg.path}."
        if (
            found is None
            or source is None
            or not source.is_alias
            or not source.target_path.startswith(inside)
        ):
            continue
        function = pkg[source.target_path.removeprefix(inside)].members.get(found[3])
        if function is None or function.is_alias or not function.is_function:
            continue
        made = griffe.Function(
            name,
            parameters=griffe.Parameters(*list(function.parameters)[1:]),
            returns=function.returns,
            docstring=function.docstring,
            lineno=member.lineno,
            endlineno=member.endlineno,
            parent=cls,
        )
        made.labels |= {found[1]} if found[1] else set()
        for annotation in (made.returns, *(each.annotation for each in made.parameters)):
            for part in annotation.iterate(flat=True) if isinstance(annotation, griffe.Expr) else ():
                if isinstance(part, griffe.ExprName) and part.name == "Mask":  # any class of masks: this one
                    part.name, part.parent = cls.name, module
        cls.set_member(name, made)
