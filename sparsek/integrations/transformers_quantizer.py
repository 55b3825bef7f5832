"""`from_pretrained` of transformers for models with sparse layers: quantization_config.quant_method is "sparsek".

Importing this registers it. `from_pretrained` makes the sparse layers of config.json empty, on the meta device, and
transformers loads their tensors as any others, sharded, by device_map, in another dtype. A loaded model is as if its
layers had just been replaced: `.half()`, Trainer and `sk.densify_` treat it so. `nn/savers.py` has the other direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparsek.core import arguments
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.nn import description
from sparsek.nn.description import METHOD, VERSION, SavedLayer
from sparsek.nn.experts import repacked
from sparsek.nn.replace import cast_inputs, is_packed, layer_of, matching, swap

WATCHED = ("initialize_weights", "_adjust_missing_and_unexpected_keys", "_get_dtype_plan")


@register_quantization_config(METHOD)
class SparsekConfig(QuantizationConfigMixin):
    """What the sparse layers of a model are: the `quantization_config` of its config.json.

    Args:
        version: Of the description.
        layers: The entries by the names of layers, in JSON.

    Raises:
        InvalidInput: For a description that `save_pretrained` does not write, or did not write to the end.
    """

    def __init__(self, version: Any = None, layers: Any = None, **others: Any) -> None:
        self.quant_method: Any = METHOD
        others.pop("quant_method", None)
        found = description.read({"version": version, "layers": layers, **others})
        self.version = VERSION
        self.layers = {name: each.to_dict() for name, each in found.items()}

    def entries(self) -> dict[str, SavedLayer]:
        """What each layer is, by its name in the model that was saved."""
        return description.read(self.to_dict())


@register_quantizer(METHOD)
class SparsekQuantizer(HfQuantizer):
    """Makes the sparse layers of a checkpoint before it is loaded, and checks them afterwards."""

    quantization_config: Any

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Raise InvalidInput unless a checkpoint is loaded."""
        if not self.pre_quantized:
            raise InvalidInput(
                "quantization_config= of from_pretrained takes no sparsek config; load the dense model, and make it "
                "sparse by sk.sparsify_ or sk.prune"
            )

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        for path in options.get("checkpoint_files") or ():
            if not str(path).endswith(".safetensors"):
                raise InvalidFile(f"{path}: sparse layers are loaded from .safetensors files only")
        ranks = getattr(model.config, "distributed_config", None)
        if getattr(ranks, "tp_plan", None) is not None or (getattr(ranks, "tp_size", None) or 1) > 1:
            raise InvalidInput(
                "tensor parallelism (tp_plan, tp_size) does not split sparse layers; load by device_map, or use FSDP2"
            )
        layers = here(model, self.quantization_config.entries(), options.get("checkpoint_files") or ())
        made, plan = description.empty_layers(model, layers, as_model=True), model._get_dtype_plan
        self.kept = matching(plan(model.dtype), layers)
        swap(model, made)
        codes = {f"{name}.codes": made[name]._buffers.get("codes") for name in self.kept}
        own_dtypes = {name: each.dtype for name, each in codes.items() if each is not None}
        # A name from its beginning on matches before a pattern in it does.
        model._get_dtype_plan = lambda dtype: {**own_dtypes, **plan(dtype)}
        self.loaded = tuple(layers)
        self.shapes = {name: each.shape for name, each in model.state_dict().items()}
        own = {f"{name}.weight" for name in layers}
        for module in model.modules():  # a sparse head is not the embedding, whatever config.json has
            tied = getattr(module, "all_tied_weights_keys", None)
            if tied and module is model:
                module.all_tied_weights_keys = {
                    to: of for to, of in tied.items() if to not in own and of not in own
                }
        _watch(model, layers)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for name in WATCHED:
            vars(model).pop(name, None)
        for name, each in model.state_dict().items():  # older transformers leave this to quantizers
            if each.shape != self.shapes.get(name, each.shape):
                raise InvalidFile(
                    f"{name} is {list(each.shape)} in the checkpoint, and this model has {list(self.shapes[name])}"
                )
        for name in self.loaded:
            layer = model.get_submodule(name)
            if not any(each.is_meta for each in layer.state_dict().values()):  # as when it is offloaded
                try:
                    layer.weight  # noqa: B018  checks the tensors
                except InvalidInput as error:
                    raise InvalidInput(f"{name}: {error}") from None
        for name in self.kept:  # in float32
            model.get_submodule(name)._dtype = torch.float32
        cast_inputs(model, self.loaded)
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and getattr(module.config, "_is_quantized", False):
                vars(module.config).pop("_is_quantized")
        return model

    def is_serializable(self) -> bool:
        """Whether it can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether a model can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether a model can be compiled."""
        return True


def here(model: Any, layers: Mapping[str, SavedLayer], paths: Iterable[Any]) -> dict[str, SavedLayer]:
    """The entries by their names in a model, which may be the base of the one that was saved, or be built on it.

    Raises:
        InvalidInput: For a layer that neither the model nor a file has. Those of another head are in the files.
    """
    prefix = f"{model.base_model_prefix}."
    found, others = {}, []
    for name, entry in layers.items():
        names = (name, prefix + name, name.removeprefix(prefix))
        own = next((each for each in names if layer_of(model, each) is not None), None)
        if own is None:
            others.append(name)
        else:
            found[own] = entry
    if others:
        stored: set[str] = set()
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    stored |= set(file.keys())
            except SafetensorError as error:
                raise InvalidFile(f"{path}: {error}") from None
        for name in others:
            if f"{name}.weight" not in stored:
                raise InvalidInput(
                    f"config.json has a sparse layer {arguments.shown(name)}, and neither model nor files have it"
                )
    return found


def _watch(model: Any, layers: Mapping[str, SavedLayer]) -> None:
    """Keep transformers from initialising sparse layers, and make it raise for tensors of theirs that are missing."""
    guards = set(description.guards(layers, model))
    sparse = {f"{name}.{part}" for name in layers for part in model.get_submodule(name).state_dict()}
    initialize, whole = model.initialize_weights, model._adjust_missing_and_unexpected_keys

    def initialize_weights(*args: Any, **options: Any) -> Any:
        vars(model).pop(WATCHED[0])
        own = swap(model, {name: _initialized(model, name) for name in layers})
        try:
            return initialize(*args, **options)
        finally:
            swap(model, own)

    def adjust(info: Any, *args: Any, **options: Any) -> Any:
        vars(model).pop(WATCHED[1])
        for key, found, wanted in info.mismatched_keys:
            if key in sparse or tuple(found) == (0,):  # which a layer that config.json lacks has
                info.mismatched_keys.clear()  # or transformers raises an error of its own
                raise InvalidFile(
                    f"{key} is {list(found)} in the checkpoint, and this model has {list(wanted)}"
                )
        missing = sorted(sparse & set(info.missing_keys))
        if missing:
            raise InvalidFile(f"the checkpoint lacks {', '.join(missing[:3])} of its sparse layers")
        prefix = f"{model.base_model_prefix}."
        known = guards | {prefix + each for each in guards} | {each.removeprefix(prefix) for each in guards}
        info.unexpected_keys -= known
        return whole(info, *args, **options)

    model.initialize_weights = initialize_weights
    model._adjust_missing_and_unexpected_keys = adjust


def _initialized(model: Any, name: str) -> nn.Module | nn.Parameter:
    """A dense layer, or packed experts, without memory, which transformers takes for one that is loaded."""
    layer = model.get_submodule(name)
    made: Any = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
    if is_packed(model, name):
        made = repacked(model.get_submodule(name.rpartition(".")[0]), made.weight.detach(), False)
    parts: Any = (made, *(made.parameters() if isinstance(made, nn.Module) else ()))
    for each in parts:
        each._is_hf_initialized = True
    return made
