"""Triton's interpreter without work that changes nothing: two fifths of the time of portable.attention_bwd in it.

tests/conftest.py calls `hasten` where TRITON_INTERPRET=1 is set. test_interpreter.py holds what is said here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# What a patch of `tl` and `tl.core` returns. Where a release has other names, `hasten` changes nothing.
Scope: Any = getattr(interpreter, "_LangPatchScope", None)


def hasten() -> None:
    """Once in a process.

    A launch gives the functions of `tl` to numpy, and takes them back when it ends. Every call of a device function in
    between does the first again, 1 ms each, though it finds nothing left. And each sum and product of integers is done
    again in 64 bits to look for an overflow, whose assertion the interpreter then drops, as `debug` is off.
    """
    if Scope is not None:
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
        interpreter._patch_lang = _patching_once(interpreter._patch_lang)


def _patching_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch`, except where what it would patch still is. The first to patch, which is a launch, takes all back."""
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if seen <= patched:
            return Scope()
        scope, first = patch(function), not patched
        patched.update(seen)
        if first:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    return patch_once
