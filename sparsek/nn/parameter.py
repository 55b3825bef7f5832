"""A Parameter of blocks: how it is made and drawn, and what a change of its pattern does to losses and optimizers.

Torch has no list of optimizers, so each is noted at its first step. If the pattern of a Parameter changes between two
steps, the state that an optimizer has for it, for example Adam's moments, is of other blocks, and so is a gradient. The
next step then raises InvalidInput, unless the optimizer was loaded meanwhile, or the state was removed or written to,
and the gradient computed anew. If the old pattern returns, nothing has happened.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern

PLAIN = (Tensor, nn.Parameter)


class BufferPattern(NamedTuple):
    """The pattern of two buffers of a layer while they are these tensors, unchanged.

    `values`: the id of the Parameter that was used with it. A reference would keep offloaded values on the GPU, and
    torch.utils.swap_tensors, which FSDP2 calls, refuses tensors that are weakly referenced.
    `new`: their contents are to be compared before the pattern is used.
    """

    indptr: Tensor
    indices: Tensor
    state: tuple[int, int, int, int] | None
    pattern: BlockPattern
    values: int
    contents: tuple[np.ndarray, bytes, np.ndarray, bytes] | None
    new: bool = False

    def holds(self, indptr: Any, indices: Any) -> bool:
        """Whether these are the tensors, unchanged. On a CPU their contents are compared too."""
        if self.new or indptr is not self.indptr or indices is not self.indices:
            return False
        if self.state is None:  # fake
            return True
        if (indptr._version, indices._version, indptr.data_ptr(), indices.data_ptr()) != self.state:
            return False
        known = self.contents  # a write through .data, numpy or shared memory has no version
        return known is None or (known[0].tobytes() == known[1] and known[2].tobytes() == known[3])

    def again(self) -> BufferPattern:
        """Itself, `new` if the contents are in the memory of a GPU, where a broadcast leaves no trace."""
        return self._replace(new=self.state is not None and self.contents is None and not self.indptr.is_meta)

    @torch.inference_mode(False)
    def is_in_memory(self) -> bool:
        """Whether the tensors contain the pattern. Synchronizes."""
        pairs = (self.indptr, self.pattern.indptr), (self.indices, self.pattern.indices)
        if any(x.shape != y.shape or x.dtype != y.dtype or x.device != y.device for x, y in pairs):
            return False
        differs = [(x != y).any() for x, y in pairs]
        return not bool(differs[0] | differs[1])


class Old(NamedTuple):
    """A Parameter with another pattern than at the last step, that pattern, and the state when it changed."""

    layer: weakref.ref[Any]
    values: nn.Parameter
    pattern: BlockPattern
    state: list[tuple[weakref.ref[Tensor], int]]


class Watch:
    """What happened to an optimizer since its last step: whether it was loaded, and its state of other blocks."""

    def __init__(self) -> None:
        self.loaded = False
        self.old: dict[int, Old] = {}  # by the id of the Parameter

    def load(self, optimizer: Optimizer) -> None:
        """Note that a state dict was loaded."""
        self.loaded = True
        self.old.clear()


_WATCHES: weakref.WeakKeyDictionary[Optimizer, Watch] = weakref.WeakKeyDictionary()
_HOOKED: list[Any] = []


def follow_optimizers() -> None:
    """Note every optimizer that steps from now on."""
    if not _HOOKED:
        _HOOKED.append(register_optimizer_step_pre_hook(_before_step))


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) in PLAIN and gradient.layout == torch.strided and not gradient.is_inference()


class Gradient:
    """A gradient that a Parameter had when its pattern changed, and that pattern.

    The next backward pass drops it, rather than add to it.
    """

    def __init__(self, values: nn.Parameter, gradient: Tensor, pattern: BlockPattern) -> None:
        self.values, self.pattern = values, pattern
        self.memory = StorageWeakRef(gradient.untyped_storage())  # holds no memory
        self.hook = values.register_hook(self._drop) if values.requires_grad else None

    def is_there(self) -> bool:
        """Whether the Parameter still has this gradient, which may have been clipped."""
        now = self.values.grad
        return now is not None and _is_plain(now) and now.untyped_storage()._cdata == self.memory.cdata

    @torch._disable_dynamo
    def _drop(self, gradient: Tensor) -> None:
        for layer, noted in list(_GRADIENTS.items()):
            if noted is self:
                _look(layer)
                drop_old_gradient(layer, self)

    def forget(self, layer: Any) -> None:
        """Forget it, because it is gone, or of the pattern of the layer again."""
        _GRADIENTS.pop(layer, None)
        if self.hook is not None:
            self.hook.remove()


_GRADIENTS: weakref.WeakKeyDictionary[Any, Gradient] = weakref.WeakKeyDictionary()


def drop_old_gradient(layer: Any, which: Gradient | None = None) -> None:
    """Drop the gradient of a layer if it is of other blocks than `values` now are, and is the given one, if any."""
    noted = _GRADIENTS.get(layer)
    if noted is not None and (which is None or noted is which):
        if noted.is_there():
            noted.values.grad = None
        noted.forget(layer)


def note_pattern(layer: Any, values: nn.Parameter, old: BlockPattern, pattern: BlockPattern) -> None:
    """Note another pattern than before of the blocks of `values`."""
    if old is pattern or old.same_as(pattern):
        return
    noted = _GRADIENTS.get(layer)
    before = old
    if noted is not None:
        before = noted.pattern if noted.values is values else old  # no backward pass has dropped it
        noted.forget(layer)
    gradient = values.grad
    if gradient is not None and not _is_plain(gradient):  # for example a shard
        values.grad = None
    elif gradient is not None and not before.same_as(pattern):
        _GRADIENTS[layer] = Gradient(values, gradient, before)
    for optimizer, watch in list(_WATCHES.items()):
        state = optimizer.state.get(values)
        if state and not watch.loaded:
            known = watch.old.pop(id(values), None)
            before = old if known is None else known.pattern
            if not before.same_as(pattern):
                kept = [(weakref.ref(x), x._version) for x in _moments(state)]
                watch.old[id(values)] = Old(weakref.ref(layer), values, before, kept)


def _moments(state: Any) -> Iterator[Tensor]:
    """The tensors of a state but its counters of steps."""
    for part in state.values():
        if isinstance(part, Tensor) and part.ndim and not part.is_inference():
            yield part


def _look(layer: Any) -> None:
    """Let a layer note its pattern: buffers that a call has replaced, as functional_call does, may be back."""
    with suppress(InvalidInput):
        _ = layer.pattern if layer is not None else None


@torch._disable_dynamo  # torch.compiler.disable would import all of torch.compile here
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watch = _WATCHES.get(optimizer)
    if watch is None:
        watch = _WATCHES[optimizer] = Watch()
        optimizer.register_load_state_dict_post_hook(watch.load)
    if _GRADIENTS and kwargs.get("closure", args[1] if len(args) > 1 else None) is None:
        _check_gradients(optimizer)
    for old in list(watch.old.values()):
        _look(old.layer())
    for old in watch.old.values():
        now = {id(x): x._version for x in _moments(optimizer.state.get(old.values) or {})}
        if any(now.get(id(tensor())) == version for tensor, version in old.state):
            raise InvalidInput(
                f"{type(optimizer).__name__} has state for the old blocks of a BlockSparseLinear, whose pattern has "
                "changed since the last step; call optimizer.state.pop(layer.values), which begins anew, or load the "
                "optimizer's own state dict of the new pattern"
            )
    watch.old.clear()
    watch.loaded = False


def _check_gradients(optimizer: Optimizer) -> None:
    own = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for layer, noted in list(_GRADIENTS.items()):
        if id(noted.values) not in own:
            continue
        _look(layer)
        if _GRADIENTS.get(layer) is noted:
            if noted.is_there():
                raise InvalidInput(
                    "the gradient of a BlockSparseLinear is of its old blocks: its pattern has changed since the "
                    "backward pass; call optimizer.zero_grad() and compute the loss again"
                )
            noted.forget(layer)


@torch.inference_mode(False)
@torch.enable_grad()
def begin_anew(values: nn.Parameter, pattern: BlockPattern) -> None:
    """Reset the Parameter `values` for a new pattern: without a gradient, and detached from losses computed before."""
    values.grad = None
    if not values.is_inference():  # no loss refers to a tensor of inference mode
        learns = values.requires_grad
        edge = torch.autograd.graph.get_gradient_edge(values.requires_grad_())
        edge.node.register_prehook(_refuse_old_gradient)
        values.requires_grad_(learns)
    # That node accumulates the gradient of `values`. It lives as long as a loss, and holds the old shape. Setting data
    # of another dtype makes autograd drop it: the next forward pass creates a new one.
    kept = values.data
    if kept.shape[0] != pattern.nnzb:
        kept = kept.new_empty((pattern.nnzb, *pattern.block))
    other = torch.float32 if kept.dtype == torch.float64 else torch.float64
    values.data = kept.new_empty(0, dtype=other)
    values.data = kept


def _refuse_old_gradient(gradients: Any) -> NoReturn:
    raise InvalidInput(
        "this loss was computed before load_state_dict gave a BlockSparseLinear another pattern, and its gradient is "
        "of the old blocks: compute the loss again"
    )


def meta_device(device: Any = None) -> torch.device | None:
    """The meta device, if it is named, or torch's default where none is named; else None."""
    home = torch.get_default_device() if device is None else device
    meta = home.type == "meta" if isinstance(home, torch.device) else isinstance(home, str) and home == "meta"
    return torch.device("meta") if meta else None


def empty(
    pattern: BlockPattern, bias: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Values and bias of a layer, to be written."""
    values = torch.empty((pattern.nnzb, *pattern.block), dtype=dtype, device=device)
    return values, torch.empty(pattern.shape[0], dtype=dtype, device=device) if bias else None


def draw(x: Tensor, bound: Tensor, generator: torch.Generator | None) -> None:
    """Draw `x` uniformly from +-bound, which broadcasts to it. `x` may be sharded, as by FSDP2."""
    x.uniform_(-1, 1, generator=generator)
    bound = bound.to(x.device)
    if hasattr(x, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        bound = distribute_tensor(bound, x.device_mesh, x.placements, src_data_rank=None)  # type: ignore[attr-defined]
    x.mul_(bound)


def bounds(pattern: BlockPattern) -> np.ndarray:
    """1 / sqrt(stored elements of a row) for the rows of each block row, float64 [Mb]; 0 where there are none."""
    indptr, indices = pattern.host
    bk, columns = pattern.block[1], pattern.shape[1]
    widths = np.minimum(bk, columns - indices.astype(np.int64) * bk)
    rows = np.repeat(np.arange(pattern.grid[0]), np.diff(indptr))
    fan_in = np.bincount(rows, weights=widths, minlength=pattern.grid[0])
    return np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0.0)
