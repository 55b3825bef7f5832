"""Configs of SparseK in `quantize_` and `sparsify_` of torchao: `quantize_(model, sk.SemiSparse(), filter_fn)`.

The first config that is made after torchao was imported loads this. torchao calls the function that
`register_quantize_module_handler` has for the class of a config, with each layer that `filter_fn` takes, and never with
the model. So tied weights are not noticed, and a layer that cannot be sparse raises. Tested with torchao 0.18.
"""

from __future__ import annotations

import importlib
from typing import Any, get_args

from torch import nn

from sparsek.core.errors import InvalidInput
from sparsek.models.config import LayerConfig

AOBaseConfig: Any = importlib.import_module("torchao.core.config").AOBaseConfig
registry: Any = importlib.import_module("torchao.quantization.transform_module")


def sparse_layer_of(module: nn.Module, config: LayerConfig) -> nn.Module:
    """The sparse layer of a dense one.

    Raises:
        InvalidInput: For a module that `sk.sparsify_` would skip.
    """
    from sparsek.models.sparsify import (
        sparsify_,
    )  # whose own import makes configs, and so may load this first

    holder = nn.Sequential(module)
    rows = sparsify_(holder, config, lambda _, name: name == "0").rows
    why = next((row.why_not for row in rows if row.name == "0"), "has no weight matrix")
    if why:
        raise InvalidInput(
            f"a {type(module).__name__} {why}; leave it out by filter_fn, or call sk.sparsify_, which skips it"
        )
    return holder[0]


for kind in get_args(LayerConfig):
    AOBaseConfig.register(kind)
    registry.register_quantize_module_handler(kind)(sparse_layer_of)
