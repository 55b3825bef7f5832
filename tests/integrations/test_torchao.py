"""Configs of SparseK in torchao's `quantize_`: with torchao if it is there, else with a stand-in of its registry."""

import abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear, SparseLinear
from tests.house.tools import python

REGISTRY = "torchao.quantization.transform_module"


class AOBaseConfig(abc.ABC):  # noqa: B024
    """As torchao's."""


def stand_in() -> dict[str, ModuleType]:
    """The modules of torchao 0.18 that have its registry."""
    names = ("torchao", "torchao.core", "torchao.core.config", "torchao.quantization", REGISTRY)
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    handlers: dict[type, Callable[..., Any]] = {}
    made["torchao.core.config"].AOBaseConfig = AOBaseConfig
    made[REGISTRY]._QUANTIZE_CONFIG_HANDLER = handlers
    made[REGISTRY].register_quantize_module_handler = lambda kind: lambda f: handlers.setdefault(kind, f)
    made["torchao.quantization"].quantize_ = quantize_
    return made


def quantize_(model: Any, config: Any, filter_fn: Any = None) -> None:
    """As torchao's, which goes no further into a module that the filter takes."""
    assert isinstance(config, sys.modules["torchao.core.config"].AOBaseConfig)
    handler = sys.modules[REGISTRY]._QUANTIZE_CONFIG_HANDLER[type(config)]
    taken = filter_fn or (lambda module, name: isinstance(module, nn.Linear))

    def walk(module: nn.Module, name: str) -> nn.Module:
        if taken(module, name):
            return handler(module, config)
        for own, child in list(module.named_children()):
            new = walk(child, f"{name}.{own}".lstrip("."))
            if new is not child:
                setattr(module, own, new)
        return module

    walk(model, "")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchao.quantization, which SparseK has not met before."""
    name = "sparsek.models.torchao"
    if importlib.util.find_spec("torchao") is None:
        for each, module in stand_in().items():
            monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    del sys.modules[name]
    yield importlib.import_module("torchao.quantization")
    sys.modules.pop(name, None)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def test_quantize_takes_configs_of_sparsek(torchao: Any) -> None:
    model, whole = dense(), dense()
    bias, hooked = model[0].bias, []
    model[0].register_forward_hook(lambda *_: hooked.append(1))
    torchao.quantize_(model, sk.SemiSparse(), lambda module, name: name == "0")
    assert isinstance(model[0], SparseLinear)
    assert isinstance(model[2], nn.Linear)
    torchao.quantize_(model, sk.BlockSparse(block=32, keep=0.5))
    assert isinstance(model[2], BlockSparseLinear)
    sk.sparsify_(whole, {"0": sk.SemiSparse(), "2": sk.BlockSparse(block=32, keep=0.5)})
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), whole(x))
    assert model[0].bias is bias
    assert hooked
    torchao.quantize_(fp8 := dense(), sk.Float8(sk.SemiSparse()))
    assert "codes" in fp8[0]._buffers


@pytest.mark.parametrize(
    ("taken", "why"),
    [("", "a Sequential has no weight matrix"), ("1", "a GELU has no weight matrix"), ("3", "at least 2x2")],
)
def test_what_cannot_be_sparse_is_refused_with_the_cure(torchao: Any, taken: str, why: str) -> None:
    model = dense().append(nn.Linear(64, 8))
    with pytest.raises(InvalidInput, match=rf"{why}.*; leave it out by filter_fn"):
        torchao.quantize_(model, sk.BlockSparse(block=64), lambda module, name: name == taken)
    assert not any(isinstance(each, SparseLinear) for each in model.modules())
    torchao.quantize_(model, sk.BlockSparse(block=32), lambda module, name: name == "0")
    with pytest.raises(InvalidInput, match=r"is sparse already; sk\.densify_"):
        torchao.quantize_(model, sk.SemiSparse(), lambda module, name: name == "0")


@pytest.mark.parametrize("first", ["sk.sparsify_", "sk.prune"])
def test_any_verb_may_load_first_after_torchao(first: str) -> None:
    code = (
        "import sys; from tests.integrations.test_torchao import REGISTRY, stand_in; sys.modules.update(stand_in())\n"
        f"import sparsek as sk; {first}; sk.SemiSparse()\n"
        "print(sk.SemiSparse in sys.modules[REGISTRY]._QUANTIZE_CONFIG_HANDLER)"
    )
    assert python(code) == "True"


def test_a_layer_by_itself_is_not_left_dense_in_silence(torchao: Any) -> None:
    layer, x = nn.Linear(64, 64), torch.randn(2, 64)
    torchao.quantize_(layer, sk.SemiSparse())
    with pytest.raises(InvalidInput, match="give it the model, not the layer itself"):
        layer(x)


def test_a_layer_in_two_places_becomes_one(torchao: Any) -> None:
    first = dense()
    model: Any = nn.ModuleDict({"first": first, "second": nn.Sequential(first[0], nn.GELU())})
    torchao.quantize_(model, sk.SemiSparse())
    assert isinstance(model.first[0], SparseLinear)
    assert model.second[0] is model.first[0]


def test_weights_with_nan_are_refused_without_a_name_of_none(torchao: Any) -> None:
    model: Any = dense()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match=r"^a Linear: its weight has 1 elements that are NaN"):
        torchao.quantize_(model, sk.SemiSparse())
