"""interpreter.hasten: what it leaves out of Triton's interpreter changes nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

from tests.engine.launch import interpreter
from tests.engine.launch.interpreter import hasten

interpreted: Any = triton_interpreter.InterpretedFunction
BUILTINS = {name: getattr(tl, name) for name in ("arange", "load", "store", "dot", "range")}


@interpreted
def doubled(x):
    return tl.where(x > 0, x + x, 0)


@interpreted
def by_device_functions(x, out, size: tl.constexpr, calls: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    found = tl.load(x + at)
    for _ in range(calls):
        found = doubled(found)
    tl.store(out + at, found)


@interpreted
def failing(x):
    tl.static_assert(False, "as it should")


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Names that were looked through for functions to patch, one for each time. What `hasten` did is undone."""
    seen: list[Any] = []
    look = triton_interpreter._patch_builtin

    def looked(package: Any, *more: Any) -> None:
        seen.append(package)
        look(package, *more)

    monkeypatch.setattr(triton_interpreter, "_patch_builtin", looked)
    builder = triton_interpreter.interpreter_builder
    for owner, name in (
        (triton_interpreter, "_patch_lang"),
        (triton_interpreter, "_get_np_dtype"),
        (builder, "options"),
        (tl.block_type, "__init__"),
        (tl.tensor, "__init__"),
        (TritonSemantic, "broadcast_impl_value"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return seen


def run(calls: int) -> torch.Tensor:
    x, out = torch.randint(-9, 9, (48,), dtype=torch.int32), torch.full((48,), -1, dtype=torch.int32)
    by_device_functions[(3,)](x, out, 16, calls)
    assert torch.equal(out, torch.where(x > 0, x * 2**calls, 0).int())
    return out


def test_the_functions_of_tl_are_patched_once_for_a_launch(patches: list[Any]) -> None:
    run(1)
    once = len(patches)
    run(4)
    assert len(patches) > 2 * once, "Triton patches once by itself now: hasten can go"
    hasten()
    for _ in range(2):
        patches.clear()
        run(4)
        assert patches.count(tl) == patches.count(tl.tensor) == 1


@pytest.mark.parametrize("hastened", [False, True])
def test_a_launch_leaves_tl_as_it_was_whether_it_fails_or_not(patches: list[Any], hastened: bool) -> None:
    if hastened:
        hasten()
    for _ in range(2):
        run(2)
        assert {name: getattr(tl, name) for name in BUILTINS} == BUILTINS
        with pytest.raises(Exception, match="as it should"):
            failing[(1,)](torch.zeros(1))
        assert {name: getattr(tl, name) for name in BUILTINS} == BUILTINS


def told(make: Callable[[], Any]) -> Any:
    """What an attempt to make a type, or a value of it, comes to."""
    try:
        made = make()
    except (AssertionError, TypeError, ValueError) as error:
        return type(error), str(error)
    value = tl.tensor(None, made)
    sides = [(type(side), side.value) for side in value.shape]
    return str(made), str(value), sides, value.numel.value, list(made.shape) if made.is_block() else None


@pytest.mark.usefixtures("patches")
def test_types_of_one_shape_are_what_they_were() -> None:
    shapes: list[Any] = [
        [16],
        (4, 8),
        tl.tuple([4, 8]),
        [4, 8],
        [tl.constexpr(8)],
        [8],
        [8.0],
        [1],
        [3],
        [],
        [2**40],
    ]
    dtypes = tl.float32, tl.pointer_type(tl.int8)
    makes = [partial(tl.block_type, dtype, shape) for dtype in dtypes for shape in shapes]
    makes += [lambda: tl.float16, lambda: tl.int1]
    before = [told(make) for make in makes]
    hasten()
    assert [told(make) for make in makes * 2] == before * 2


@pytest.mark.usefixtures("patches")
def test_dtypes_of_numpy_are_what_they_were() -> None:
    scalars = [getattr(tl, name) for name in dir(tl) if isinstance(getattr(tl, name), tl.dtype)]
    scalars = [x for x in scalars if x is not tl.void]
    types = [
        *scalars,
        *map(tl.pointer_type, scalars),
        *(tl.block_type(tl.pointer_type(x), [4]) for x in scalars),
    ]
    types += [tl.block_type(x, [4]) for x in scalars]
    before = [triton_interpreter._get_np_dtype(x) for x in types]
    hasten()
    assert [triton_interpreter._get_np_dtype(x) for x in types * 2] == before * 2


@pytest.mark.usefixtures("patches")
def test_triton_says_nothing_of_an_overflow() -> None:
    """Once this fails, the interpreter has learned to find them, and `hasten` must leave that to it."""
    options = triton_interpreter.interpreter_builder.options
    assert options.sanitize_overflow
    x = torch.full((16,), 2**30, dtype=torch.int32)
    out = torch.zeros_like(x)
    by_device_functions[(1,)](x, out, 16, 1)
    assert (out == -(2**31)).all()


def test_other_names_in_a_release_of_triton_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = triton_interpreter._patch_lang
    monkeypatch.setattr(interpreter, "Scope", None)
    hasten()
    assert triton_interpreter._patch_lang is before
