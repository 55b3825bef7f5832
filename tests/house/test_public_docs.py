"""Every public name of `sparsek` and of its stand-ins has a docstring: summary, every argument, running examples."""

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.integrations import (
    block_sparse_attention,
    diffusers,
    fastvideo,
    flash_attention,
    flashinfer,
    flex,
    selected,
    vllm,
    vllm_omni,
    xformers,
)

LONGEST = 120  # characters of a summary
STAND_INS = (
    block_sparse_attention,
    diffusers,
    fastvideo,
    flash_attention,
    flashinfer,
    flex,
    selected,
    vllm,
    vllm_omni,
    xformers,
)
SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Example", "Examples")


def members(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that SparseK defines, also by inheritance, as functions."""
    for attribute in dir(cls):
        owner = next((each for each in cls.__mro__ if attribute in vars(each)), None)
        if attribute.startswith("_") or owner is None or not owner.__module__.startswith("sparsek."):
            continue
        raw = vars(owner)[attribute]
        raw = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
        if inspect.isfunction(raw):
            yield f"{name}.{attribute}", raw


def public() -> dict[str, Any]:
    """Every public function, class, method and property."""
    tops = {f"sk.{name}": getattr(sk, name) for name in sk.__all__ if name not in sk.ROOMS}
    for room in sk.ROOMS:
        tops |= {f"sk.{room}.{name}": getattr(getattr(sk, room), name) for name in getattr(sk, room).__all__}
    for module in STAND_INS:
        own = {name: each for name, each in vars(module).items() if name[0] != "_" and callable(each)}
        own = {name: each for name, each in own.items() if each.__module__ == module.__name__}
        last = module.__name__.rpartition(".")[2]
        tops |= {f"{name} of {last}" if name in tops else name: each for name, each in own.items()}
    found = dict(tops)
    for name, each in tops.items():
        if inspect.isclass(each):
            found |= dict(members(name, each))
    return found


PUBLIC = public()


def sections(text: str) -> dict[str, str]:
    """The body of each section of a docstring in Google style."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.M)
    return {
        name: re.split(r"^\S", body, flags=re.M)[0]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_walk_reaches_what_users_call() -> None:
    reached = {
        "sk.BSR.from_dense",
        "sk.BSR.T",
        "sk.BSR.spy",
        "sk.BSR.sum",
        "sk.spmm",
        "sk.nn.BlockSparseLinear.forward",
    }
    assert reached <= PUBLIC.keys()
    assert len(PUBLIC) > 250


def test_a_public_name_has_a_docstring_of_its_own() -> None:
    for name, each in PUBLIC.items():
        summary, *rest = inspect.cleandoc(each.__doc__ or "").split("\n")
        assert summary.endswith((".", ":")), f"{name}: {summary!r} is no sentence on one line"
        assert len(summary) <= LONGEST, name
        assert not rest or not rest[0], f"{name}: the summary goes on in a second line"


def named_in(section: str) -> Iterator[tuple[str, list[str]]]:
    """The public names whose docstrings have a section, with what it names."""
    for name, each in PUBLIC.items():
        body = sections(inspect.cleandoc(each.__doc__ or "")).get(section)
        if body is not None:
            yield name, re.findall(r"^    (\w+): \S", body, re.M)


def test_args_are_the_arguments() -> None:
    for name, named in named_in("Args"):
        parameters = inspect.signature(PUBLIC[name]).parameters.values()
        plain = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rooms = (
            name.removeprefix("sk.nn.")
            .removeprefix("sk.policies.")
            .removeprefix("sk.distributed.")
            .removeprefix("sk.")
        )
        assert named == plain[1 if rooms.count(".") == 1 else 0 :], name


def test_attributes_are_the_fields() -> None:
    for name, named in named_in("Attributes"):
        every = getattr(PUBLIC[name], "__dataclass_fields__", {})
        fields = [each for each in every if not each.startswith("_")]
        assert named == fields or (not fields and named), name


@pytest.mark.parametrize("name", [name for name in PUBLIC if ">>>" in (PUBLIC[name].__doc__ or "")])
def test_examples_run(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.cleandoc(PUBLIC[name].__doc__)
    example = doctest.DocTestParser().get_doctest(text, {"sk": sk, "torch": torch}, name, None, None)
    found: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=found.append)
    assert "".join(found) == ""


def test_a_method_shows_its_own_arguments() -> None:
    assert list(inspect.signature(sk.BSR.from_dense).parameters) == [
        "w", "block", "mask", "threshold", "keep", "scope",
    ]  # fmt: skip
    assert sk.BSR.from_dense.__qualname__.endswith(".from_dense")
