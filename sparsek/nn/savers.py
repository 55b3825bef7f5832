"""`save_pretrained` of transformers and diffusers, which then writes what the sparse layers of a model are.

These libraries only warn of tensors that a file lacks, and draw them at random: a file with the tensors of sparse
layers alone would load as noise. So each model that they save has a description in config.json (`description.py`),
guards in its files, which fit no dense layer, and a README.md that names the import.

The first sparse layer of a process that has loaded one of them changes its `save_pretrained`; models without sparse
layers are saved as before, and a README.md of an earlier sparse one is removed, unless it was changed.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsek.core import doors, files
from sparsek.core.errors import InvalidInput
from sparsek.nn.description import METHOD, describe, guards, written
from sparsek.nn.indices import SAVED, IndexedLayer

CONFIG, README, UNFINISHED = "config.json", "README.md", "unfinished"
OF_TRANSFORMERS = """---
library_name: transformers
tags: [sparsek]
---

The linear layers of this model are sparse, as SparseK stores them. Import it before the model is loaded:

```python
import sparsek.integrations.transformers
from transformers import {0}

model = {0}.from_pretrained("...")
```
"""
OF_DIFFUSERS = """---
library_name: diffusers
tags: [sparsek]
---

The linear layers of this model are sparse, as SparseK stores them. It is loaded by SparseK:

```python
import sparsek as sk
from diffusers import {0}

model = sk.load_model(lambda: {0}.from_config({0}.load_config("...")), "...")
```
"""


def install() -> bool:
    """Make the savers of the libraries that are loaded know sparse layers. Whether they did before."""
    known = True
    for module, (kind, method, wrapped) in SAVERS.items():
        found = getattr(sys.modules.get(module), kind, None)
        plain = getattr(found, method, None)
        if plain is not None and not hasattr(plain, "of_sparsek"):
            made: Any = functools.wraps(plain)(wrapped(plain))
            made.of_sparsek = True
            setattr(found, method, made)
            known = False
    return known


def _of_transformers(plain: Callable[..., Any]) -> Callable[..., Any]:
    # Files of other versions, which raise here, are guarded all the same.
    with suppress(ImportError, AttributeError, ValueError):
        doors.enter("transformers")
    return _saving(plain)


def _saving(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` that writes what the sparse layers of a model are."""
    signature = inspect.signature(plain)

    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        layers = describe(self)
        has_adapters = getattr(self, "_hf_peft_config_loaded", False)
        only_adapters = has_adapters and "save_peft_format" in signature.parameters
        is_inner = any(each is self for each in SAVED.get())  # of a save_pretrained of a subclass
        if not layers or only_adapters or is_inner:
            found = plain(self, *args, **options)
            if not layers and not only_adapters:
                given = signature.bind(self, *args, **options).arguments
                readme = Path(given["save_directory"]) / README
                if given.get("is_main_process", True) and _is_ours(readme):  # of a sparse model before
                    readme.unlink()
            return found
        call = signature.bind(self, *args, **options)
        given = call.arguments
        _check(self, given)
        if given.get("state_dict") is not None:
            given["state_dict"] = {**given["state_dict"], **guards(layers, self)}
        if (
            "save_original_format" in signature.parameters
        ):  # names and shapes of older files, of dense weights
            given.setdefault("save_original_format", False)
        about = {"quant_method": METHOD, **written(layers)}
        if not given.get("push_to_hub"):  # which uploads before the mark is taken away
            about[UNFINISHED] = True
        with _described(self, about), _guarded(self):
            found = plain(*call.args, **call.kwargs)
        folder = Path(given["save_directory"])
        if given.get("is_main_process", True) and (folder / CONFIG).is_file():
            _finish(folder, self)
        return found

    return save_pretrained


def _refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A saver that refuses sparse layers."""

    def save(self: Any, *args: Any, **options: Any) -> Any:
        if describe(self):
            raise InvalidInput(
                f"{type(self).__name__} has sparse layers, which its from_pretrained does not load: save it by "
                "sk.save_model(model, directory), and load it by sk.load_model"
            )
        return plain(self, *args, **options)

    return save


def _guarding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A saver of any model, such as accelerate's, whose files have the guards of sparse layers."""

    def save(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        with _guarded(model):
            return plain(self, model, *args, **options)

    return save


# The savers by module: the class, its method, and what takes its place.
SAVERS: Mapping[str, tuple[str, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "transformers.modeling_utils": ("PreTrainedModel", "save_pretrained", _of_transformers),
    "diffusers.models.modeling_utils": ("ModelMixin", "save_pretrained", _saving),
    "accelerate.accelerator": ("Accelerator", "save_model", _guarding),
    "huggingface_hub.hub_mixin": ("PyTorchModelHubMixin", "_save_pretrained", _refusing),
}


def _check(model: Any, given: Mapping[str, Any]) -> None:
    """InvalidInput for options with which sparse layers are not saved."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise InvalidInput(
            f"the model has sparse layers and is quantized by {type(quantizer).__name__}; a checkpoint has one "
            "quantization_config"
        )
    for name, value in {
        "safe_serialization": False,
        "use_flashpack": True,
        "distributed_checkpoint": True,
    }.items():
        if name in given and bool(given[name]) is value:
            raise InvalidInput(f"{name}={value}: sparse layers are saved in .safetensors files only")


@contextmanager
def _described(model: Any, about: dict[str, Any]) -> Iterator[None]:
    """A model whose config has a description, which is written with it."""
    if hasattr(model, "register_to_config"):  # of diffusers
        before = model._internal_dict
        model.register_to_config(quantization_config=about)
        try:
            yield
        finally:
            model._internal_dict = before
        return
    config = vars(model.config)
    had = {name: value for name, value in config.items() if name == "quantization_config"}
    config["quantization_config"] = about
    try:
        yield
    finally:
        del config["quantization_config"]
        config.update(had)


@contextmanager
def _guarded(model: Any) -> Iterator[None]:
    """A time when state dicts have guards."""
    before = SAVED.set((*SAVED.get(), model))
    try:
        yield
    finally:
        SAVED.reset(before)


def _finish(folder: Path, model: Any) -> None:
    """Take the mark of an unfinished checkpoint away, and say in README.md how it is loaded.

    Libraries read model.safetensors if it is there, and leave that of an earlier model beside shards: it is removed.
    """
    for index in folder.glob("*.safetensors.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if shards and all((folder / shard).is_file() for shard in shards):
            (folder / index.name.removesuffix(".index.json")).unlink(missing_ok=True)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("quantization_config", {}).pop(UNFINISHED, False):
        with files.replacing(folder / CONFIG) as file:
            file.write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    readme = folder / README
    if not readme.exists() or _is_ours(readme):
        name, text = type(model).__name__, OF_TRANSFORMERS
        if hasattr(model, "register_to_config"):
            text = OF_DIFFUSERS
        elif not hasattr(sys.modules.get("transformers"), name):  # a class of the user's
            name = "AutoModel"
        readme.write_text(text.format(name))


def _is_ours(readme: Path) -> bool:
    """Whether a README.md is as `_finish` writes it, of a model of any class, and not changed since."""
    if not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"import (\w+)$", text, re.MULTILINE)
    return any(text == ours.format(name) for ours in (OF_TRANSFORMERS, OF_DIFFUSERS) for name in names)


IndexedLayer._savers_know = staticmethod(install)
