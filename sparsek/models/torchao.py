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


class Gone:
    """The forward of a dense layer that became sparse. torchao drops what it gets for the module it is called with.

    Attributes:
        sparse: What the layer became.
    """

    def __init__(self, sparse: nn.Module) -> None:
        self.sparse = sparse

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InvalidInput(
            "this layer became sparse, and torchao puts sparse layers into the model that it is called with: give it "
            "the model, not the layer itself as TorchAoConfig of transformers does; or call sk.sparsify_(model, config)"
        )


def sparse_layer_of(module: nn.Module, config: LayerConfig) -> nn.Module:
    """The sparse layer of a dense one, which is not to be called any more.

    Raises:
        InvalidInput: For a module that `sk.sparsify_` would skip, and a weight with NaN or Inf.
    """
    # Its own import makes configs, and so may load this module first.
    from sparsek.models.sparsify import sparsify_

    before = module.__dict__.get("forward")
    if isinstance(before, Gone):  # of a module in several places
        return before.sparse
    holder = nn.Sequential(module)
    try:
        rows = sparsify_(holder, config, lambda _, name: name == "0").rows
    except InvalidInput as error:
        raise InvalidInput(f"a {type(module).__name__}{str(error).removeprefix('0')}") from None
    why = next((row.why_not for row in rows if row.name == "0"), "has no weight matrix")
    if why:
        raise InvalidInput(
            f"a {type(module).__name__} {why}; leave it out by filter_fn, or call sk.sparsify_, which skips it"
        )
    module.forward = Gone(holder[0])
    return holder[0]


for kind in get_args(LayerConfig):
    AOBaseConfig.register(kind)
    registry.register_quantize_module_handler(kind)(sparse_layer_of)
