"""LoRA of peft over sparse layers. `import sparsek.integrations.peft`, and all else is as with dense layers.

    import sparsek.integrations.peft
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))

The sparse layers stay frozen, in FP8 too. An update is dense: `merge_adapter` puts a dense layer with the sum in the
place of a sparse one, and `unmerge_adapter` puts the sparse one back; `merge_and_unload` leaves the dense one, a Conv1D
where the model had it.

peft takes other kinds of layers by `LoraConfig._register_custom_module`, for each config; here every config has it.
Tested with peft 0.21.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.nn.replace import Origin, dense_of, has_own_forward, is_packed
from sparsek.nn.sparse import SparseLinear

# Its classes have no types for options but their own.
lora: Any = importlib.import_module("peft.tuners.lora")
tuners_utils: Any = importlib.import_module("peft.tuners.tuners_utils")
STARTS = (True, False, "gaussian")  # the others factor the dense weight


class LoraSparseLinear(lora.Linear):
    """A sparse layer with adapters beside it: y = layer(x) + scale * (x @ A.T) @ B.T for each."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **options: Any) -> None:
        layer = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        if layer.activation is not None:
            raise InvalidInput(
                f"a layer applies {layer.activation!r}, and LoRA adds before an activation: set its activation to "
                "None, and call it after the layer"
            )
        self._apart: list[SparseLinear] = []  # while a dense layer with the sum is in its place
        super().__init__(base_layer, adapter_name, config, **options)
        # Of the layer that `merge` makes. The config has that of the dense layers of the model, as peft found them.
        kind = getattr(layer, "_origin", Origin(nn.Linear, True)).kind
        self.fan_in_fan_out = isinstance(layer, SparseLinear) and kind is not nn.Linear

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        """Where adapters are put. Beside a weight in FP8 they have the dtype of the dense weight before."""
        weight = base_layer.weight
        return weight.device, base_layer._dtype if _in_fp8(base_layer) else weight.dtype

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **options: Any) -> None:
        """Add an adapter. Raises InvalidInput for a kind that needs the dense weight."""
        if config.init_lora_weights not in STARTS:
            raise InvalidInput(
                f"init_lora_weights is {arguments.shown(config.init_lora_weights)}; over sparse layers it must be one "
                f"of {STARTS}"
            )
        super().update_layer(adapter_name, *args, config=config, **options)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """The kinds of LoRA that there are: the plain one."""
        return {(): None}

    def resolve_lora_variant(self, *, config: Any, **options: Any) -> None:
        """Raise InvalidInput for DoRA and other variants, which read the dense weight."""
        try:
            super().resolve_lora_variant(config=config, **options)
        except ValueError as error:
            raise InvalidInput(
                f"over sparse layers there is plain LoRA only, no DoRA or other kinds: {error}"
            ) from None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put a dense layer with the weight and the updates in the place of the sparse one."""
        layer = self.base_layer
        if not isinstance(layer, SparseLinear):
            super().merge(safe_merge, adapter_names)
            return
        if has_own_forward(layer):
            raise InvalidInput(
                "a sparse layer has a forward of its own, as accelerate sets it: load the model without offloading, "
                "and merge then"
            )
        self.base_layer = _dense(layer)
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if self.merged:
                self._apart = [layer]
            else:
                self.base_layer = layer

    def unmerge(self) -> None:
        """Put the sparse layer back, on the device, in the dtype and in the mode that the dense one has by now."""
        super().unmerge()
        if self._apart:
            dense: Any = self.base_layer
            layer: Any = self._apart.pop()
            before = layer._dtype if _in_fp8(layer) else layer.weight.dtype
            cast = {} if dense.weight.dtype == before else {"dtype": dense.weight.dtype}
            self.base_layer = layer.to(dense.weight.device, **cast).train(dense.training)


def _dense(layer: Any) -> nn.Module:
    """A dense layer in the place of a sparse one, with a bias of its own, which may be merged too."""
    values = layer._parameters.get("values")
    made: Any = dense_of("", layer, is_frozen=True)
    made.weight.requires_grad_(values is not None and values.requires_grad)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone(), layer.bias.requires_grad)
    return made


def _in_fp8(layer: Any) -> bool:
    return isinstance(layer, SparseLinear) and layer.weight.dtype not in dtypes.FLOATS


def _registering(plain: Any) -> Any:
    """`LoraConfig.__post_init__` that registers sparse layers."""

    @functools.wraps(plain)
    def post_init(self: Any) -> None:
        plain(self)
        self._register_custom_module({SparseLinear: LoraSparseLinear})

    return post_init


def _with_sparse_ones(plain: Any) -> Any:
    """peft's choice of layers for "all-linear", with the sparse ones."""

    @functools.wraps(plain)
    def include(config: Any, model: Any) -> Any:
        targets = getattr(config, "target_modules", None)
        found = plain(config, model)
        if isinstance(targets, str) and targets.lower() == "all-linear":
            head = getattr(model, "get_output_embeddings", lambda: None)()
            tuned = [
                name for name, each in model.named_modules() if isinstance(each, tuners_utils.BaseTunerLayer)
            ]
            config.target_modules |= {
                name
                for name, each in model.named_modules()
                if isinstance(each, SparseLinear)
                and each is not head
                and not is_packed(model, name)  # as peft does with dense ones
                and not any(name.startswith(f"{of}.") for of in tuned)
            }
        return found

    return include


if not hasattr(lora.LoraConfig.__post_init__, "__wrapped__"):
    lora.LoraConfig.__post_init__ = _registering(lora.LoraConfig.__post_init__)
    tuners_utils._maybe_include_all_linear_layers = _with_sparse_ones(
        tuners_utils._maybe_include_all_linear_layers
    )
