"""The fuzz sees what it is for: faults planted in functions are found, and what is right is let pass."""

import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import sparsek as sk
from sparsek.core import arguments
from tests.fuzz import contexts, engine
from tests.fuzz.engine import Call, Marked, attack, difference, public_names

A = sk.random_bsr(64, 64, 32, 0.5)


def found(function: Callable[[Any], Any], valid: Any, also: str = "", count: int = 400) -> str:
    """The faults that are found in a function of one argument, by draws that are the same for every seed."""

    def called(n: Any) -> Any:
        return function(n)

    return "\n".join(attack("planted", Call(lambda _: (called, {"n": valid}), {"n": also}), count, seed=0))


def test_what_checks_its_arguments_passes() -> None:
    assert not found(lambda n: arguments.integer("n", n) + 1, 5)
    assert not found(lambda n: arguments.number("n", n), 0.5, "int")
    assert not found(lambda n: arguments.tensor("n", n, (torch.float32,), ndim=2).sum(), torch.ones(64, 64))


@pytest.mark.parametrize(
    ("function", "valid", "fault"),
    [
        (lambda n: range(64)[n], 5, "TypeError"),
        (math.sqrt, 5, "math domain error"),
        (bool, True, "ambiguous"),
        (lambda n: 0, 5, "took dict for n"),
        (
            lambda n: str(arguments.integer("n", n) + (type(n) is not int)),
            5,
            "another result than with plain",
        ),
        (
            lambda n: sk.BSR.unchecked(A.pattern, A.values[:1]),
            torch.ones(2),
            "an unsound result: BSR: values have",
        ),
        (lambda n: arguments.flag("x" * 700, n), True, "an error of 7.. characters"),
    ],
)
def test_planted_faults_are_found(function: Callable[..., Any], valid: Any, fault: str) -> None:
    assert re.search(fault, found(function, valid, count=1500 if "took" in fault else 400))


def test_what_torch_makes_of_subclasses_is_no_fault() -> None:
    """Its own code raises; what a function makes of them, such as a shape that does not fit, is a fault."""
    x, wrapper = torch.ones(4, 4), TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    marked = x.as_subclass(Marked)
    called: dict[Callable[[], Any], bool] = {
        lambda: marked + wrapper: True,
        lambda: torch.func.jvp(lambda x: x.relu() + torch.ones(4, 4), (wrapper,), (wrapper,)): True,
        lambda: wrapper @ torch.ones(3, 3): False,
        wrapper.numpy: False,
    }
    for call, own in called.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert engine._of_subclasses(caught.value) is own


def test_random_numbers_may_be_drawn_in_every_transform() -> None:
    for name in contexts.TRANSFORMS:
        contexts.run(name, Random(0), lambda x: x * torch.rand(2), {"x": torch.ones(2)})


def test_public_names_are_functions_constructors_and_methods() -> None:
    names = public_names(lambda module: module.startswith("sparsek"))
    assert {
        "linear",
        "BSR",
        "BSR.to",
        "BlockMask.full",
        "BlockMask.causal",
        "nn.SparseAttention.forward",
    } <= names
    assert not {"BSR.values", "BSR.dtype", "nn.SparseAttention.parameters"} & names


def test_planted_faults_in_contexts_are_found() -> None:
    contexts_seen = {contexts.drawn(Random(at)) for at in range(400)}
    assert contexts_seen == {"", *contexts.MODES, *contexts.TRANSFORMS}
    x = torch.ones(2, 2)

    def pointer(x: torch.Tensor) -> torch.Tensor:
        return x * (x.data_ptr() % 16)

    for name in contexts.TRANSFORMS:
        with pytest.raises(RuntimeError, match="data pointer"):
            contexts.run(name, Random(0), pointer, {"x": x})
    for name in contexts.MODES:
        assert torch.equal(contexts.run(name, Random(0), torch.add, {"input": x, "other": x}), x + x)


def test_floats_agree_up_to_rounding_and_ints_to_the_bit() -> None:
    x = torch.randn(64, dtype=torch.float64)
    assert not difference(x, x * (1 + 1e-15))
    assert difference(x, x * (1 + 1e-10))
    assert not difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    assert difference(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0]))
    assert difference(torch.tensor([1]), torch.tensor([2]))
