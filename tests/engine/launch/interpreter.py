"""Triton's interpreter without work that changes nothing: half of the time of portable.attention_bwd in it.

tests/conftest.py calls `hasten` where TRITON_INTERPRET=1 is set. test_interpreter.py holds what is said here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# What a patch of `tl` and `tl.core` returns. Where a release has other names, `hasten` changes nothing.
Scope: Any = getattr(interpreter, "_LangPatchScope", None)


def hasten() -> None:
    """Once in a process.

    A launch gives the functions of `tl` to numpy, and takes them back when it ends. Every call of a device function in
    between does the first again, 1 ms each, though it finds nothing left. And each sum and product of integers is done
    again in 64 bits to look for an overflow, whose assertion the interpreter then drops, as `debug` is off. Each value
    makes the tuples of its shape and a table of all dtypes; here equal shapes share theirs.
    """
    if Scope is None:
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype)
    core: Any = tl.core
    core.block_type.__init__ = _types_of_shapes(core.block_type.__init__)
    core.tensor.__init__ = _tensors_of_shapes(core.tensor.__init__)
    semantic: Any = TritonSemantic
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)


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


def _looked_up_once(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype for one of Triton, or for that of a block's elements."""
    found: dict[str, Any] = {}

    def look(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    return look


def _types_of_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """block_type.__init__"""
    made: dict[Any, Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sides = tuple(shape) if isinstance(shape, (list, tl.tuple)) else None
        if sides is None or sides not in made or not all(type(side) is int for side in sides):
            make(self, element_ty, shape)
            made[tuple(self.shape)] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = made[sides]
        self.name = f"<{text}, {element_ty}>"

    return init


def _tensors_of_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """tensor.__init__"""
    made: dict[Any, Any] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sides = tuple(type.shape) if type.is_block() else ()
        if sides not in made:
            make(self, handle, type)
            made[sides] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made[sides]

    return init


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """TritonSemantic.broadcast_impl_value, except for two scalars and for two values of one shape."""

    def broadcast_once(self: Any, left: Any, right: Any) -> Any:
        # Tensors of one shape share one tuple (`_tensors_of_shapes`).
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    return broadcast_once
