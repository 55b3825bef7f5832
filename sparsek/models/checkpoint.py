"""`save_model` and `load_model`: checkpoints of whole models with sparse layers, in safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes, files
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.files import StrPath
from sparsek.core.memory import check_free
from sparsek.core.parsing import json_value
from sparsek.files.compressed import MASKED, behind_mask
from sparsek.files.tensor_file import Writer, opened
from sparsek.nn.description import METHOD, SavedLayer, describe, empty_layers, guards, read, written
from sparsek.nn.replace import cast_inputs, swap
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats import two_four
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.semi24 import Semi24

WEIGHTS, CONFIG = "model.safetensors", "config.json"
INDEX = WEIGHTS + ".index.json"


def save_model(model: nn.Module, directory: StrPath) -> None:
    """Save a model with sparse layers: model.safetensors in a directory, with what each sparse layer is in its header.

    `load_model` reads it. The file is replaced at once, when all of it is on disk. Models of transformers are saved by
    their own `save_pretrained`, after `import sparsek.integrations.transformers`.

    Args:
        model: A torch.nn.Module, whose state dict holds tensors only.
        directory: It is made if it is not there.

    Raises:
        InvalidInput: For another model, one with tensors on the meta device, and a directory that cannot be written.

    Examples:
        >>> def make():
        ...     return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
        >>> model = make()
        >>> report = sk.sparsify_(model, sk.BlockSparse(block=64, keep=0.5))
        >>> sk.save_model(model, "checkpoint")
        >>> sk.load_model(make, "checkpoint")[0].weight
        BSR(256x128 fp32, block 64x64, 4 of 8 blocks, 50 %, 0.0655 MB, cpu)
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module")
    folder = files.as_path("directory", directory)
    layers = describe(model)
    if "" in layers:
        raise InvalidInput("model is itself a sparse layer; torch.save(layer.state_dict()) saves one")
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in model.state_dict().items():
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if arguments.is_distributed(tensor):
            raise InvalidInput(
                f'{name} of the state dict is a DTensor; load sk.distributed.full_state_dict(model)["model"] into a '
                "model of one process, and save that"
            )
        if not plain or tensor.is_meta:
            kind = "" if type(tensor) in (Tensor, nn.Parameter) else f" of class {type(tensor).__name__}"
            raise InvalidInput(
                f"{name} of the state dict is {arguments.shown(tensor)}{kind}; only plain tensors with values are saved"
            )
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            ties[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach()
    tensors |= guards(layers, model)
    about = json.dumps(written(layers) | {"ties": ties}, separators=(",", ":"))
    metadata = {"format": "pt", METHOD: about}
    with files.blamed_on(folder, InvalidInput, "cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(folder / WEIGHTS) as file:
        writer = Writer(file, tensors, metadata)
        for name, tensor in tensors.items():
            writer.put(name, tensor.to("cpu").contiguous())
        writer.finish(metadata)


def load_model(
    model: nn.Module | Callable[[], nn.Module],
    directory: StrPath,
    *,
    device: str | torch.device | None = None,
) -> Any:
    """Load what `save_model` wrote, or the tensors of a checkpoint of transformers or diffusers with sparse layers.

    It reads the 2:4 weights of compressed-tensors too (sparse-24-bitmask), also in FP8; what a bit mask has that is not
    2:4 (sparse-bitmask) becomes a dense weight.

    Every tensor of the model comes from the checkpoint, with its dtype there. The linear layers that were sparse are
    replaced; the tensors of others are new ones, so make an optimizer afterwards.

    Args:
        model: The dense model, whose layers are replaced in place, or a function that makes it. The function is called
            under `torch.device("meta")`, so that no dense weight is made, and again on the CPU if the model has buffers
            that are not saved.
        directory: Where model.safetensors is, or its shards with their index.
        device: Where to put the model; by default that of its first parameter, the CPU for one on the meta device.

    Returns:
        The model, in its training mode.

    Raises:
        InvalidFile: For a file that is damaged or hostile, and one that does not fit the model.
        InvalidInput: For another model, and a device that this machine does not have.
        FileNotFoundError: If there is no checkpoint.
    """
    folder = files.as_path("directory", directory)
    home = None if device is None else arguments.device("device", device)
    tensors, about, where = _content(folder)
    found = _made(model)
    if unfilled := _unfilled(found):
        raise InvalidInput(
            f"{unfilled[0]} of the model is on the meta device, and no state dict has it; give a function that makes "
            "the model"
        )
    if home is None:
        start = next(iter(found.parameters()), None)
        home = torch.device("cpu") if start is None or start.is_meta else start.device
    try:
        layers = read(about)
        made = empty_layers(found, layers)
    except InvalidInput as error:
        raise InvalidFile(f"{where}: {error}") from None
    for name, tensor in _ties(where, about).items():
        if tensor not in tensors:
            raise InvalidFile(f"{where}: {name} is tied to {arguments.shown(tensor)}, which is not there")
        tensors[name] = tensors[tensor]
    for name in guards(layers, found):
        tensors.pop(name, None)
    old = swap(found, made)
    try:
        tied = _tied(found, tensors)
        _check_fit(where, found.state_dict(), tensors)
        moved = {id(each): each.to(home) for each in tensors.values()}
        found.load_state_dict({name: moved[id(each)] for name, each in tensors.items()}, assign=True)
        for name, other in tied.items():
            (holder, own), (of, first) = (_place(found, each) for each in (name, other))
            setattr(holder, own, getattr(of, first))
        for name in made:
            found.get_submodule(name).weight  # noqa: B018  checks the tensors
        cast_inputs(found, made)
    except (RuntimeError, InvalidInput) as error:
        swap(found, old)
        raise InvalidFile(f"{where}: {error}") from None
    except BaseException:
        swap(found, old)
        raise
    config: Any = getattr(found, "config", None)
    if hasattr(config, "model_type") and hasattr(config, "quantization_config"):
        del config.quantization_config  # of transformers, which would write it with the next checkpoint
    return found.to(home)


def _made(model: Any) -> nn.Module:
    """The model to load into."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module or make one")
    make: Callable[[], Any] = model
    with torch.device("meta"):
        found = make()
    if not isinstance(found, nn.Module):
        raise InvalidInput(f"model() is {arguments.shown(found)}; it must be a torch.nn.Module")
    return make() if _unfilled(found) else found


def _unfilled(model: nn.Module) -> list[str]:
    """The buffers on the meta device that no state dict has."""
    saved = model.state_dict().keys()
    return [name for name, each in model.named_buffers() if each.is_meta and name not in saved]


def _content(folder: Path) -> tuple[dict[str, Tensor], Any, Path]:
    """The tensors of a checkpoint, the description, and the file that it is in."""
    tensors: dict[str, Tensor] = {}
    about: Any = None
    where = folder / CONFIG
    for path in weight_files(folder):
        with opened(path) as file:
            total = sum(each.end - each.start for each in file.tensors.values())
            check_free(path, "all of it", total)
            if METHOD in file.metadata and file.metadata[METHOD].startswith("{"):
                about, where = json_value(file.metadata[METHOD], path), path
            for name in file.tensors:
                if name in tensors:
                    raise InvalidFile(f"{path}: {arguments.shown(name)} is in another file too")
                tensors[name] = file.read(name)
    if about is None:
        config = json_value(files.content(where), where) if where.is_file() else {}
        about = config.get("quantization_config") if isinstance(config, dict) else None
        if not isinstance(about, dict) or about.get("quant_method") != METHOD:
            layers = _unmask(folder, tensors)
            if not layers:
                raise InvalidFile(f"{folder}: no checkpoint of sparse layers; sk.save_model writes one")
            about, where = written(layers), folder
    return tensors, about, where


def _unmask(folder: Path, tensors: dict[str, Tensor]) -> dict[str, SavedLayer]:
    """Put the tensors of sparse layers in the place of weights behind bit masks, as compressed-tensors stores them.

    Returns what the layers are. A weight whose mask is not 2:4 becomes dense.
    """
    layers: dict[str, SavedLayer] = {}
    for name in [each for each in tensors if each.endswith(".bitmask")]:
        own = name.removesuffix(".bitmask")
        layer = own.removesuffix(".weight")
        try:
            if f"{layer}.weight" in tensors or layer in layers:
                raise InvalidInput("has another weight beside that of the bit mask")
            weight = _masked_weight(own, layer, tensors)
            if isinstance(weight, Tensor):
                tensors[f"{layer}.weight"] = weight
                continue
            made = SparseLinear.from_matrix(weight, tensors.get(f"{layer}.bias"))
        except InvalidInput as error:
            raise InvalidFile(f"{folder}: {layer}: {error}") from None
        if isinstance(weight, Quantized):
            made._dtype = weight.scale.dtype if made.bias is None else made.bias.dtype
        layers[layer] = SavedLayer.of(made)
        tensors |= {f"{layer}.{part}": each for part, each in made.state_dict().items()}
    return layers


def _masked_weight(own: str, layer: str, tensors: dict[str, Tensor]) -> Any:
    """A weight behind a bit mask, whose parts are taken out: a Semi24, also in FP8, or a dense tensor."""
    parts = {part: tensors.pop(f"{own}.{part}", None) for part in MASKED}
    values, mask, shape = (parts[part] for part in ("compressed", "bitmask", "shape"))
    if values is None or mask is None or shape is None:
        raise InvalidInput("compressed, bitmask and shape go together")
    scale = tensors.pop(f"{layer}.weight_scale", None)
    tensors.pop(f"{layer}.input_scale", None)  # x is scaled when it is multiplied
    is_fp8 = values.dtype in dtypes.FP8
    if is_fp8 != (scale is not None):
        raise InvalidInput(f"compressed is {values.dtype}; a weight_scale goes with values in FP8")
    arguments.dtype("its dtype", values.dtype if scale is None else scale.dtype)
    are_sides = shape.numel() == 2 and shape.dtype in (torch.int64, torch.int32)
    n, k = shape.flatten().tolist() if are_sides else (0, 0)
    if min(n, k) < 1 or mask.dtype != torch.uint8 or mask.shape != (n, -(-k // 8)):
        given = shape.flatten().tolist() if are_sides else arguments.shown(shape)
        raise InvalidInput(f"shape is {given}, and bitmask {arguments.shown(mask)}; they do not fit")
    check_free(Path(layer), "it", n * k * 8, " as a dense matrix")
    found = behind_mask(values, mask, k)
    if isinstance(found, str):
        raise InvalidInput(found)
    dense, kept = found
    wide = dense.float() if is_fp8 else dense
    fits = not k % two_four.STEP and bool((two_four.groups(kept).sum(-1, dtype=torch.uint8) <= 2).all())
    matrix = Semi24.from_dense(wide, kept) if fits else None
    if scale is None:
        return dense if matrix is None else matrix
    if scale.numel() not in (1, n):
        raise InvalidInput(
            f"weight_scale is {list(scale.shape)}; it must be one, or one for each of {n} rows"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise InvalidInput("weight_scale has values that are not positive and finite")
    if matrix is None:
        return (wide * scale.float().reshape(-1, 1)).to(scale.dtype)
    codes = Semi24.unchecked(matrix.values.to(values.dtype), matrix.meta)
    by_row = scale.numel() > 1
    return Quantized(codes, scale.float().reshape(n if by_row else ()), "row" if by_row else "tensor")


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a checkpoint. Raises InvalidFile for a hostile index, FileNotFoundError without any."""
    for stem in ("model", "diffusion_pytorch_model"):
        whole, index = (folder / f"{stem}.safetensors{end}" for end in ("", ".index.json"))
        if whole.exists():  # libraries leave the index of earlier shards
            return [whole]
        if index.is_file():
            found = json_value(files.content(index), index)
            names = found.get("weight_map") if isinstance(found, dict) else None
            if not isinstance(names, dict) or not all(
                isinstance(each, str) and Path(each).name == each for each in names.values()
            ):
                raise InvalidFile(
                    f"{index}: its weight_map must give a file of this directory for every tensor"
                )
            return [folder / each for each in sorted(set(names.values()))]
    raise FileNotFoundError(f"{folder}: no {WEIGHTS} and no {INDEX}")


def _ties(where: Path, about: Any) -> dict[str, str]:
    ties = about.get("ties", {})
    if not isinstance(ties, dict) or not all(isinstance(each, str) for each in ties.values()):
        raise InvalidFile(
            f"{where}: its ties are {arguments.shown(ties)}; they must give a name for each name"
        )
    return ties


def _tied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The names of a model whose tensors are those of other names, which the checkpoint may have once only.

    Tensors that were one in the saved model and are not in this one become two.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    tied: dict[str, str] = {}
    seen: set[int] = set()
    for names in groups.values():
        there = [name for name in names if name in tensors]
        own: dict[int, str] = {}
        for name in names if there else ():
            tensor = tensors.setdefault(name, tensors[there[0]])
            if id(tensor) in own:
                tied[name] = own[id(tensor)]
                continue
            if id(tensor) in seen:
                tensor = tensors[name] = tensor.clone()
            own[id(tensor)] = name
        seen |= own.keys()
    return tied


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, own = name.rpartition(".")
    return model.get_submodule(parent), own


def _check_fit(where: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """InvalidFile unless names and sizes are the same, but for tied tensors that a checkpoint has once."""
    for what, names in (
        ("lacks", wanted.keys() - found.keys()),
        ("has no place for", found.keys() - wanted.keys()),
    ):
        if names:
            some = sorted(names)
            more = f" and {len(some) - 3} others" if len(some) > 3 else ""
            whose = "the file" if what == "lacks" else "the model"
            raise InvalidFile(f"{where}: {whose} {what} {', '.join(some[:3])}{more}")
    for name, tensor in wanted.items():
        if tensor.shape != found[name].shape:
            raise InvalidFile(
                f"{where}: {name} is {list(found[name].shape)}, and the model needs {list(tensor.shape)}"
            )
