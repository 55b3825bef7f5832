"""A model run block by block: its repeated blocks, their recorded arguments, and activations in memory or on disk.

Only tensors that one block returns and the next one receives, by identity, flow through the stream. All other arguments
(masks, position embeddings, flags) are recorded once for each block, while the blocks are replaced by stand-ins.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, first_line
from sparsek.core.parsing import json_value
from sparsek.files.tensor_file import opened
from sparsek.nn.replace import output_embeddings

STATE = "prune.json"
DENSE, PRUNED = "dense", "pruned"
CPU = torch.device("cpu")
IGNORED = -100  # a label that counts in no loss
PLAIN = (type(None), bool, int, float, str)
Batch: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


def stop(*_: Any) -> None:
    """A hook that ends it."""
    raise Stop


class NoSequence(Exception):
    """The blocks of a stack are not called one after the other."""


class Flow(NamedTuple):
    """An argument that is tensor `index` of what the block before returned."""

    index: int


class Constant(NamedTuple):
    """An argument that is a tensor of the record."""

    index: int


@dataclass
class Stack:
    """Repeated blocks of a model, run one after the other; or the whole model as one block.

    Attributes:
        name: The name of the module that has the blocks; "" for the model.
        blocks: The blocks by name.
    """

    name: str
    blocks: dict[str, nn.Module]

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole model as one block."""
        return "" in self.blocks

    def has(self, layer: str) -> bool:
        """Return whether a layer, by its name, is in one of the blocks."""
        return any(is_in(layer, block) for block in self.blocks)


@dataclass
class StackCalls:
    """The arguments of every block of a stack for one calibration batch: (leaves, tree) for each, and tensors.

    The first `outer` tensors are arguments of the first block.
    """

    calls: list[tuple[list[Any], TreeSpec]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    outer: int = 0

    @property
    def places(self) -> list[list[tuple[type, int]]]:
        """Which arguments flow, and which are constant."""
        return [
            [(type(each), each.index) for each in leaves if isinstance(each, Flow | Constant)]
            for leaves, _ in self.calls
        ]

    def flows(self, block: int) -> list[int]:
        """The tensors of the block before that a block receives."""
        if block >= len(self.calls):
            return []
        return sorted({each.index for each in self.calls[block][0] if isinstance(each, Flow)})


class ActivationStore:
    """Tensors by stage and calibration batch: on the CPU, or one .safetensors file each in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._tensors: dict[tuple[str, int], dict[str, Tensor]] = {}

    def put(self, stage: str, batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors; a file replaces an old one once all of it is on disk."""
        kept = {name: each.detach().to(CPU).contiguous() for name, each in tensors.items()}
        if self.folder is None:
            self._tensors[stage, batch] = kept
        else:
            write_tensors(self._path(stage, batch), kept)

    def get(self, stage: str, batch: int) -> dict[str, Tensor]:
        """Return the tensors of a stage and batch, on the CPU."""
        if self.folder is None:
            return self._tensors[stage, batch]
        return read_tensors(self._path(stage, batch))

    def drop(self, stage: str) -> None:
        """Forget a stage."""
        for key in [key for key in self._tensors if key[0] == stage]:
            del self._tensors[key]
        if self.folder is not None:
            for path in self.folder.glob(f"{stage}.batch-*.safetensors"):
                path.unlink(missing_ok=True)

    def _path(self, stage: str, batch: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{stage}.batch-{batch:05d}.safetensors"


class State:
    """What a pruning run has finished: a small JSON file in its folder, atomically replaced.

    Attributes:
        data: "finished" blocks, "rows" and "skipped" of the report; "keep" by layer where a budget has decided, "picks"
            where the planner has; "measured" seconds of dense and of pruned blocks.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self.path = None if folder is None else folder / STATE
        self.data: dict[str, Any] = {
            "fingerprint": fingerprint,
            "finished": 0,
            "rows": [],
            "skipped": {},
            "keep": None,
            "picks": None,
            "measured": [0.0, 0.0],
        }
        if self.path is None or not self.path.exists():
            return
        found = json_value(files.content(self.path), self.path)
        kinds = {
            name: (type(each),) if each is not None else (dict, type(None))
            for name, each in self.data.items()
        }
        if (
            not isinstance(found, dict)
            or found.keys() != kinds.keys()
            or not all(type(found[name]) in each for name, each in kinds.items())
        ):
            raise InvalidFile(f"{self.path}: is no state of sparsek.prune; use another folder")
        if found["fingerprint"] != fingerprint:
            raise InvalidInput(
                f"{self.path}: is of another model, config, method or calibration; use another folder, or the "
                "arguments and the dense model of that run"
            )
        self.data = found

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            with files.replacing(self.path) as file:
                file.write(json.dumps(self.data).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors on the CPU to a .safetensors file, atomically. Tensors may share memory."""
    own: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, each in tensors.items():
        place = each.untyped_storage().data_ptr()
        own[name] = (
            each.clone()
            if place in places or each.numel() != each.untyped_storage().nbytes() // each.element_size()
            else each
        )
        places.add(place)
    with files.replacing(path) as file:
        file.write(to_safetensors(own))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors file."""
    try:
        with opened(path) as file:
            return {name: file.read(name) for name in file.tensors}
    except FileNotFoundError as error:
        raise InvalidFile(f"{path}: is missing; delete the folder and begin anew") from error


def is_in(layer: str, block: str) -> bool:
    """Whether a layer is in a block, by their names."""
    return not block or layer.startswith(f"{block}.")


def working_folder(value: Any) -> Path | None:
    """The folder of a run, created if it is missing; None for a run in memory."""
    if value is None:
        return None
    folder = files.as_path("folder", value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"folder {folder}: cannot be created: {error.strerror}") from error
    return folder


def stacks_of(model: nn.Module) -> list[Stack]:
    """The lists of alike blocks in a model, outermost first, in the order of its modules; without any, the model.

    Blocks are alike if they have one class. A list has at least two, and parameters.
    """
    found: list[Stack] = []
    for name, module in model.named_modules():
        inside = any(is_in(f"{name}.", stack.name) for stack in found)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        children = list(module)
        if len({type(child) for child in children}) == 1 and len({id(child) for child in children}) == len(
            children
        ):
            leaf = isinstance(children[0], nn.Linear) or not any(True for _ in children[0].children())
            if not leaf and any(True for _ in module.parameters()):
                prefix = f"{name}." if name else ""
                found.append(Stack(name, {prefix + key: child for key, child in module.named_children()}))
    return found or [Stack("", {"": model})]


def batches_of(calibration: Any, name: str = "calibration batch {}") -> list[Batch]:
    """The calibration batches, or others of a name, as (args, kwargs) of the model."""
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise InvalidInput(
            f"calibration is {arguments.shown(calibration)}; it must be batches, such as a DataLoader or a list: each "
            "a tensor, a tuple of arguments, or a dict of keyword arguments of the model"
        )
    batches: list[Batch] = []
    for batch in calibration:
        if isinstance(batch, Mapping):
            batches.append(((), dict(batch)))
        elif isinstance(batch, (tuple, list)):
            batches.append((tuple(batch), {}))
        elif isinstance(batch, Tensor):
            batches.append(((batch,), {}))
        else:
            what = name.format(len(batches))
            raise InvalidInput(f"{what} is {arguments.shown(batch)}; it must be a tensor, a tuple or a dict")
        found = tensors_in(batches[-1])
        if not found or any(each.is_meta for each in found):
            fault = "a tensor on the meta device, without values" if found else "no tensor"
            what = name.format(len(batches) - 1)
            raise InvalidInput(f"{what} has {fault}; a batch is inputs of the model")
    if not batches:
        raise InvalidInput("calibration has no batch")
    return batches


def has_tokens(model: nn.Module, batch: Batch) -> bool:
    """Whether any token of a batch counts."""
    sizes = [each.numel() for each in tensors_in(batch) if each.ndim]
    masks = padding_of(model, batch)
    return any(sizes or [1]) and (not masks or any(bool(each.any()) for each in masks))


def checksum(tensors: Iterable[Tensor]) -> int:
    """The CRC-32 of tensors, by dtype, shape and bytes; of those that are not plain, by their text."""
    found = 0
    for each in tensors:
        part = each.detach()
        found = zlib.crc32(f"{part.dtype}{list(part.shape)}".encode(), found)
        if type(part) is Tensor and part.layout == torch.strided and not (part.is_meta or part.is_quantized):
            flat = part.resolve_conj().resolve_neg().to(CPU).contiguous().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        else:
            found = zlib.crc32(repr(part).encode(), found)
    return found


def moved(value: Any, device: torch.device, copy: bool = False) -> Any:
    """A tree of arguments with its tensors on a device. `copy`: with other tensors, which a module may write to."""
    leaves, tree = tree_flatten(value)
    made = {id(each): each.to(device, copy=copy) for each in leaves if isinstance(each, Tensor)}
    return tree_unflatten([made.get(id(each), each) for each in leaves], tree)


def decodes(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def named(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The arguments of a batch by name: those given by place, too, as far as the model's forward has names for them."""
    args, kwargs = batch
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward = getattr(model, "_orig_mod", model).forward  # of a compiled model that of what was compiled
    parameters = inspect.signature(forward).parameters.items()
    names = [name for name, each in parameters if each.kind in kinds]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def padding_of(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Which tokens of a batch count: its attention_mask [B, T], and of an encoder-decoder that of the decoder too.

    Without a decoder_attention_mask these are the labels that are not IGNORED.
    """
    given = named(model, batch)
    masks = [given.get("attention_mask")]
    if decodes(model):
        labels = given.get("labels")
        words = labels != IGNORED if isinstance(labels, Tensor) else None
        masks.append(given.get("decoder_attention_mask", words))
    return [each for each in masks if isinstance(each, Tensor) and each.ndim == 2]


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return CPU if first is None else first.device


def run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch: str) -> Any:
    """What a module returns. InvalidInput with the name of the batch for which it, or torch in it, raises."""
    try:
        return module(*args, **kwargs)
    except (SparseKError, torch.OutOfMemoryError):
        raise
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        kind = type(module).__name__
        raise InvalidInput(f"{kind} does not take {batch}: {first_line(error)}") from error


def record(model: nn.Module, stack: Stack, batch: Batch, number: int) -> StackCalls | None:
    """Run a model to the end of a stack, whose first block alone computes; None if its blocks are no sequence."""
    made = _recorded(model, stack, batch, number)
    if made is not None and len(made.tensors) > made.outer:  # made between blocks: of what these return?
        other = _recorded(model, stack, batch, number, other=True)
        pairs = zip(made.tensors, other.tensors if other else (), strict=False)
        if (
            other is None
            or len(other.tensors) != len(made.tensors)
            or not all(torch.equal(*x) for x in pairs)
        ):
            return None
    return made


def _recorded(
    model: nn.Module, stack: Stack, batch: Batch, number: int, other: bool = False
) -> StackCalls | None:
    """`record` that takes what is computed from the outputs of blocks for constant. `other`: with other outputs.

    Of batch 0 the model runs on to its head: are the blocks called in a second round?
    """
    made = StackCalls()
    onward = number == 0 and not other and len(stack.blocks) > 1
    blocks = list(stack.blocks.values())
    places: dict[tuple[int, int], int] = {}
    alive: list[Any] = []  # an id is of one object only while this lives
    last: dict[int, tuple[int, int]] = {}  # what the block before has returned, with versions
    gone: set[int] = set()  # what those before it have returned, and other objects
    returned: Any = None

    def entered(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal returned
        if at != len(made.calls):
            raise NoSequence
        leaves, tree = tree_flatten((args, kwargs))
        made.calls.append(([kept(each) for each in leaves], tree))
        if at and not made.flows(at):
            raise NoSequence
        if at == 0:
            made.outer = len(made.tensors)
        if at == len(blocks) - 1 and not onward:
            raise Stop
        if at == 0:
            returned = forwards[0](*args, **kwargs)
            returned = tree_map(changed, returned) if other else returned
        gone.update(last)
        last.clear()
        leaves, tree = tree_flatten(returned)
        leaves = [each.detach() if isinstance(each, Tensor) else each for each in leaves]  # other objects
        alive.append(leaves)
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        last.update({id(each): (index, version_of(each)) for index, each in enumerate(tensors)})
        gone.update(id(each) for each in leaves if not isinstance(each, (Tensor, *PLAIN)))
        return tree_unflatten(leaves, tree)

    def kept(leaf: Any) -> Any:
        if type(leaf).__name__.endswith("Cache"):
            return None
        if id(leaf) in gone:
            raise NoSequence
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in last:
            index, version = last[id(leaf)]
            if version_of(leaf) != version:
                raise NoSequence
            return Flow(index)
        place = id(leaf), version_of(leaf)
        if place not in places:
            places[place] = len(made.tensors)
            alive.append(leaf)
            made.tensors.append(leaf.detach().to(CPU, copy=True))  # a block may write to it
        return Constant(places[place])

    forwards, own = [block.forward for block in blocks], [vars(block).get("forward") for block in blocks]
    args, kwargs = moved(batch, device_of(model), copy=True)
    hooks = [head.register_forward_pre_hook(stop) for head in output_embeddings(model)] if onward else []
    try:
        for at, block in enumerate(blocks):
            block.forward = lambda *args, _at=at, **kwargs: entered(_at, args, kwargs)
        run(model, args, kwargs, f"calibration batch {number}")
    except Stop:
        pass
    except NoSequence:
        return None
    except Exception:  # of what follows the blocks, which gets no outputs of theirs
        if not onward or len(made.calls) < len(blocks):
            raise
    finally:
        for hook in hooks:
            hook.remove()
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
    return (
        made if len(made.calls) == len(blocks) and (len(blocks) == 1 or made.flows(len(blocks) - 1)) else None
    )


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if tensor.is_inference() else tensor._version


def changed(leaf: Any) -> Any:
    """A tensor of floats with other values."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return (
        torch.linspace(-1, 1, leaf.numel(), dtype=torch.float32, device=leaf.device).to(leaf).view(leaf.shape)
    )


class Stream:
    """The calibration batches, or pieces of them, on their way through one stack: for each block its arguments, dense
    and pruned. `numbers`: those of their calibration batches. `fullest`: with the most tokens that count.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        batches: Sequence[Batch],
        numbers: Sequence[int],
        store: ActivationStore,
        label: str,
    ) -> None:
        self.stack, self.store, self.label = stack, store, label
        self.batches, self.numbers = batches, numbers
        self.recorded = {DENSE: DENSE, PRUNED: DENSE}  # whose arguments a side takes
        self.records = self._record(model, DENSE)
        self.padding = [padding_of(model, batch) for batch in batches]
        self.fullest = max(
            range(len(batches)),
            key=lambda at: (
                not self.padding[at],
                sum(int(each.count_nonzero()) for each in self.padding[at]),
            ),
        )

    def __len__(self) -> int:
        return len(self.records)

    def follow(self, model: nn.Module) -> None:
        """Let the pruned side have the arguments that a model gives it whose stacks before are pruned by now.

        Such as the states of an encoder, which cross-attention takes.
        """
        if [each.places for each in self._record(model, PRUNED)] != [each.places for each in self.records]:
            raise NoSequence
        self.recorded[PRUNED] = PRUNED

    def _record(self, model: nn.Module, side: str) -> list[StackCalls]:
        found = []
        for at, batch in enumerate(self.batches):
            made = record(model, self.stack, batch, self.numbers[at])
            if made is None:
                raise NoSequence
            self.store.put(self._arguments(side), at, {str(i): each for i, each in enumerate(made.tensors)})
            made.tensors.clear()
            found.append(made)
        return found

    def call(self, module: nn.Module, block: int, side: str, batch: int) -> Any:
        """Run a block, or another module in its place, on the arguments of one side; return what it returns."""
        args, kwargs = self.arguments(block, side, batch, device_of(module))
        return run(module, args, kwargs, f"calibration batch {self.numbers[batch]}")

    def arguments(
        self, block: int, side: str, batch: int, device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block of one side, on a device."""
        made = self.records[batch]
        leaves, tree = made.calls[block]
        flows = self.store.get(self._stage(block, side), batch) if made.flows(block) else {}
        fixed = self.store.get(self._arguments(self.recorded[side]), batch)

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Flow):
                return flows[str(leaf.index)]
            return fixed[str(leaf.index)] if isinstance(leaf, Constant) else leaf

        return moved(tree_unflatten([given(each) for each in leaves], tree), device, copy=True)

    def outputs(self, returned: Any, block: int, batch: int) -> dict[str, Tensor]:
        """The tensors of a block's result that flow on; of the last block, all of floats."""
        tensors = [each for each in tree_flatten(returned)[0] if isinstance(each, Tensor)]
        if block + 1 < len(self.stack.blocks):
            return {str(at): tensors[at] for at in self.records[batch].flows(block + 1)}
        return {str(at): each for at, each in enumerate(tensors) if each.is_floating_point()}

    def put(self, block: int, side: str, batch: int, outputs: Mapping[str, Tensor]) -> None:
        """Keep what flows into a block."""
        self.store.put(self._stage(block, side), batch, outputs)

    def get(self, block: int, side: str, batch: int) -> dict[str, Tensor]:
        """Return what flows into a block, on the CPU."""
        return self.store.get(self._stage(block, side), batch)

    def drop(self, block: int) -> None:
        """Forget what flows into a block."""
        for side in (DENSE, PRUNED):
            self.store.drop(self._stage(block, side))

    def close(self) -> None:
        """Forget what is left: arguments, and what the last block returned."""
        self.drop(len(self.stack.blocks))
        self.forget()

    def forget(self) -> None:
        """Forget the arguments."""
        for side in (DENSE, PRUNED):
            self.store.drop(self._arguments(side))

    def rows(self, x: Tensor, batch: int) -> Tensor:
        """1 for each row of x [..., K], 0 for padding; float32."""
        count = x.numel() // x.shape[-1] if x.shape[-1] else 0
        masks = [each.reshape(-1) != 0 for each in self.padding[batch] if each.numel() == count]
        if masks:
            return torch.stack(masks).any(0).to(x.device, torch.float32)
        return torch.ones(count, dtype=torch.float32, device=x.device)

    def real(self, x: Tensor, batch: int) -> Tensor:
        """Return x [..., K] with zeros in the rows of padding, whatever they hold, also NaN."""
        if not self.padding[batch] or x.ndim < 2:
            return x
        return x.masked_fill(self.rows(x, batch).view(*x.shape[:-1], 1) == 0, 0)

    def _arguments(self, side: str) -> str:
        return f"{self.label}.arguments.{side}"

    def _stage(self, block: int, side: str) -> str:
        return f"{self.label}.block-{block:05d}.{side}"


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree of arguments or results."""
    return [each for each in tree_flatten(tree)[0] if isinstance(each, Tensor)]
