"""The checks of arguments: what passes comes back plain, what does not is InvalidInput with one line of the value."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput

ODD = [
    None,
    True,
    1.5,
    -1,
    10**30,
    "4",
    b"4",
    [],
    [1, 2, 3],
    {},
    object(),
    torch.ones(2),
    np.ones(3),
    math.nan,
    1j,
]


def test_what_is_right_comes_back_plain() -> None:
    assert arguments.integer("n", np.int64(3)) == 3
    assert type(arguments.integer("n", np.int64(3))) is int
    assert arguments.number("x", 2) == 2.0
    assert arguments.number("x", np.float32(0.5)) == 0.5
    assert arguments.flag("f", False) is False
    assert arguments.one_of("kind", "row", ("row", "col")) == "row"
    assert arguments.pair("block", [64, np.int32(128)]) == (64, 128)
    assert arguments.dtype("dtype", torch.bfloat16) is torch.bfloat16
    assert arguments.device("device", "cpu:0") == torch.device("cpu")
    assert files.as_path("path", Path("a") / "b.png") == Path("a") / "b.png"
    assert arguments.text("title", "") == ""
    x = torch.ones(2, 3)
    assert arguments.tensor("x", x) is x
    assert arguments.tensor("x", x, (torch.float32,), ndim=2) is x


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_odd_values_are_refused_by_every_check(value: object) -> None:
    checks = {
        "integer": lambda: arguments.integer("n", value, 0, 100),
        "number": lambda: arguments.number("x", value, 2, 3),
        "flag": lambda: arguments.flag("f", value),
        "one_of": lambda: arguments.one_of("kind", value, ("row", "col")),
        "pair": lambda: arguments.pair("block", value),
        "dtype": lambda: arguments.dtype("dtype", value),
        "device": lambda: arguments.device("device", value),
        "path": lambda: files.as_path("path", value),
        "text": lambda: arguments.text("text", value),
        "tensor": lambda: arguments.tensor("t", value, (torch.float16,)),
    }
    for check in checks:
        if (check == "flag" and value is True) or (check in ("path", "text") and isinstance(value, str)):
            continue
        with pytest.raises(InvalidInput) as raised:
            checks[check]()
        assert len(str(raised.value)) < 250
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [0, "meta", torch.device("meta"), "cuda:99", "abacus"])
def test_devices_that_are_not_here_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput):
        arguments.device("device", value)


def test_numbers_stay_within_their_bounds() -> None:
    assert arguments.number("x", 3, 0, 3) == 3
    for value in (-0.1, 3.1, math.inf, -math.inf, 10**400):
        with pytest.raises(InvalidInput, match="x is"):
            arguments.number("x", value, 0, 3)


def test_tensors_that_no_kernel_can_read_are_refused() -> None:
    for value, why in [
        (torch.ones(2, 2).to_sparse(), "layout"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch._neg_view(torch.ones(2)), "resolve_neg"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            arguments.tensor("x", value)


def test_a_value_whose_repr_raises_is_told_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert arguments.shown(Broken()) == "a Broken"
    assert arguments.shown((Broken(), 1)) == "a tuple"


def test_tensors_without_a_shape_are_told_all_the_same() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert arguments.shown(nested) == "a torch.Tensor, torch.float32, nested"
    assert (
        arguments.shown(torch.eye(2).to_sparse())
        == "a torch.Tensor, torch.float32 [2, 2], layout torch.sparse_coo"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_the_cure_of_a_nested_tensor_cures(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(1, 3, 4)], layout=layout)
    for x in (nested, nested.transpose(1, 2)):
        with pytest.raises(InvalidInput, match="nested tensor; pad it: ") as raised:
            arguments.dense("x", x)
        cured = eval(str(raised.value).partition("pad it: ")[2], {"torch": torch, "x": x})
        assert arguments.dense("x", cured).shape in ((2, 2, 3, 4), (2, 3, 2, 4))


def test_an_uninitialized_parameter_has_no_shape() -> None:
    lazy = torch.nn.LazyLinear(8)
    for x in (lazy.weight, torch.nn.UninitializedBuffer()):
        assert arguments.shown(x) == "a torch.Tensor, torch.float32, uninitialized"
        with pytest.raises(InvalidInput, match="call its lazy module once"):
            arguments.dense("x", x)
    lazy(torch.ones(2, 4))
    arguments.dense("x", lazy.weight)


def test_tensors_of_transforms_that_have_ended_are_refused() -> None:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(arguments.dense("x", x * 1))
        return x

    torch.func.vjp(keep, torch.ones(2))
    torch.func.vmap(keep)(torch.ones(2, 2))
    with pytest.raises(InvalidInput, match=r"transformed, and is used after it; call \.clone"):
        arguments.dense("x", kept[0])
    arguments.dense("x", kept[0].clone())
    with pytest.raises(InvalidInput, match="vmap mapped"):
        arguments.dense("x", kept[1])


def test_dimensions_are_counted() -> None:
    with pytest.raises(InvalidInput, match=r"x has shape \[2, 3\]; it must be 3-D"):
        arguments.tensor("x", torch.ones(2, 3), ndim=3)


@pytest.mark.parametrize("value", [{1, 2}, {1: 2, 3: 4}, "12", b"12", range(3)], ids=repr)
def test_only_sequences_of_two_are_pairs(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"block is .*; it must be two ints"):
        arguments.pair("block", value)


def test_a_path_with_a_zero_in_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no file can have this name"):
        files.as_path("path", "a\0b")
