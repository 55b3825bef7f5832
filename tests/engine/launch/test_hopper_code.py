"""hopper_code: a fault of Triton 3.6 that its `fixed_bounds` guards against."""

from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sparsek.products.kernels.spmm.multiply_fp8 import carried as carried_bound
from tests.engine.launch.hopper_code import fixed_bounds


@gluon.jit
def carried(bounds, out, rounds):
    """The bound of the inner loop is that of the round; nothing else uses it."""
    bound = gl.load(bounds)
    for t in range(rounds):
        for i in range(bound):
            gl.store(out + i, t)
        bound = gl.load(bounds + t + 1)


@gluon.jit
def computed(bounds, out, rounds):
    """The bound is computed in the round, from what is carried to it."""
    first = gl.load(bounds)
    last = gl.load(bounds + 1)
    for t in range(rounds):
        for i in range(gl.maximum(1, last - first)):
            gl.store(out + i, t)
        first = gl.load(bounds + 2 * t + 2)
        last = gl.load(bounds + 2 * t + 3)


@gluon.jit
def looked_up(bounds, out, rounds):
    """The bound is loaded in the round, from a place that is carried to it, whose name begins as a constant's does."""
    chosen = gl.load(bounds)
    for t in range(rounds):
        for i in range(gl.load(bounds + chosen)):
            gl.store(out + i, t)
        chosen = gl.load(bounds + t + 1)


@gluon.jit
def half_carried(bounds, out, rounds):
    """One end is carried to the round, the other loaded in it."""
    first = gl.load(bounds)
    for t in range(rounds):
        last = gl.load(bounds + t + 1)
        for i in range(last - first):
            gl.store(out + i, t)
        first = last


@gluon.jit
def kept(bounds, out, rounds):
    """The same by an instruction that must stay."""
    first = gl.load(bounds)
    last = gl.load(bounds + 1)
    for t in range(rounds):
        for i in range(0, carried_bound(gl.maximum(1, last - first)), 1):  # pyright: ignore[reportArgumentType]
            gl.store(out + i, t)
        first = gl.load(bounds + 2 * t + 2)
        last = gl.load(bounds + 2 * t + 3)


@gluon.jit
def loaded(bounds, out, rounds):
    for t in range(rounds):
        for i in range(gl.load(bounds + t)):
            gl.store(out + i, t)


def ttgir(kernel: Any) -> str:
    source = GluonASTSource(kernel, {"bounds": "*i32", "out": "*i32", "rounds": "i32"})
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return compiled.asm["ttgir"]


@pytest.mark.parametrize(
    ("kernel", "loads", "left"), [(carried, 2, 1), (computed, 4, 2), (looked_up, 3, 2), (half_carried, 2, 2)]
)
def test_triton_3_6_takes_the_bound_of_the_first_round_for_every_round(
    kernel: Any, loads: int, left: int
) -> None:
    """Once this fails, the pinned Triton has learned, and kernels may carry bounds again."""
    forgets = triton.__version__.startswith("3.6.")
    found = ttgir(kernel)
    assert len(fixed_bounds(found)) == (1 if forgets else 0)
    assert found.count("tt.load") == (left if forgets else loads)


def test_a_bound_through_an_instruction_that_must_stay_is_right() -> None:
    found = ttgir(kept)
    assert fixed_bounds(found) == []
    assert found.count("tt.load") == 4


def test_a_bound_that_is_loaded_in_its_round_is_right() -> None:
    found = ttgir(loaded)
    assert fixed_bounds(found) == []
    assert found.count("tt.load") == 1


def test_bounds_that_change_with_the_outer_loop_or_are_constants_are_fine() -> None:
    text = """
      scf.for %t = %c0_i32 to %rounds step %c1_i32 iter_args(%high = %first)  : i32 {
        %low:2 = "tt.reduce"
        scf.for %i = %low#0 to %high step %c1_i32  : i32 {
          scf.for %j = %c0_i32 to %i step %c1_i32  : i32 {
          }
        }
        scf.for %i = %c0_i32 to %c4_i32 step %c1_i32  : i32 {
        }
        %wide = arith.subi %high, %first
        scf.for %i = %c0_i32 to %wide step %c1_i32  : i32 {
        }
      }
      scf.for %t = %low_1 to %rounds step %c1_i32  : i32 {
      }"""
    assert fixed_bounds(text) == []
    assert fixed_bounds(text.replace("to %high", "to %rounds")) == ["%rounds"]
    assert fixed_bounds(text.replace("%high, %first", "%rounds, %first")) == ["%wide"]
    assert fixed_bounds(text.replace("to %i step", "to %high step")) == ["%high"]
