"""A Parameter of blocks: how it is made and drawn, and what a change of its pattern does to losses and optimizers.

When the pattern of a Parameter changes, its gradient and the state of optimizers for it, for example Adam's moments,
are noted as those of the old blocks. A change is noted when the layer is called, loaded or copied, and before each step
of its optimizer. That step raises InvalidInput until a backward pass or zero_grad has removed the gradient, and the
state was loaded, removed or written to. If the old pattern returns, nothing has happened.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import untransformed
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


class Gradient:
    """The gradient that `values` had when their pattern changed, and the pattern that it is of; None if unknown.

    The next backward pass looks at the pattern again, and drops a gradient of old blocks rather than add to it.
    """

    def __init__(self, layer: Any, values: nn.Parameter, pattern: BlockPattern | None) -> None:
        self.layer, self.values, self.pattern = weakref.ref(layer), values, pattern
        self.memory = None if pattern is None or values.grad is None else _memory(values.grad)
        self.hook = values.register_hook(self._before_backward) if values.requires_grad else None

    def is_there(self) -> bool:
        """Whether the Parameter still has this gradient, which may have been clipped."""
        gradient = self.values.grad
        memory = None if gradient is None else _memory(gradient)
        return memory is not None and self.memory is not None and memory.cdata == self.memory.cdata

    def is_old(self) -> bool:
        """Whether the Parameter still has this gradient, and now has another pattern."""
        layer, pattern = self.layer(), self.pattern
        now = None if layer is None else layer._history.patterns.get(id(self.values))
        if now is None or pattern is None or now is pattern:
            return False
        return self.is_there() and not now.same_as(pattern)

    @torch._disable_dynamo
    def _before_backward(self, gradient: Tensor) -> None:
        layer = self.layer()
        if layer is not None:
            _look(layer)
            if layer._history.gradient is self and (self.is_old() or not self.is_there()):
                layer._history.drop_gradient()

    def forget(self) -> None:
        """Let the next backward pass be."""
        if self.hook is not None:
            self.hook.remove()


def _memory(gradient: Tensor) -> StorageWeakRef | None:
    """What identifies a gradient, or the local part of a sharded one. Holds no memory."""
    local = getattr(gradient, "_local_tensor", gradient)
    plain = type(local) in PLAIN and local.layout == torch.strided and not local.is_inference()
    return StorageWeakRef(local.untyped_storage()) if plain else None


class History:
    """What was done with a layer since its pattern changed.

    `calls`: how often its weight was used, outside compiled graphs. `learns`: whether a loss may refer to it.
    `settled`: whether that is known, and in a process group `wrapper`, the DistributedDataParallel that calls it.
    `patterns`: those of the blocks of its last Parameters, by id. `shard`: the one of two that FSDP2 leaves
    in the layer between calls. `gradient`: that of before.
    """

    def __init__(self) -> None:
        self.begin()
        self.patterns: dict[int, BlockPattern] = {}
        self.gradient: Gradient | None = None
        self.shard: nn.Parameter | None = None
        self.wrapper: weakref.ref[DistributedDataParallel] | None = None

    def begin(self) -> None:
        """Note that nothing was done since the pattern changed."""
        self.calls, self.learns, self.settled = 0, False, False

    def ranks(self) -> Any:
        """The process group of the DistributedDataParallel that calls the layer; None if there is none."""
        wrapper = None if self.wrapper is None else self.wrapper()
        return wrapper.process_group if wrapper is not None and dist.is_initialized() else None

    def note_gradient(self, gradient: Gradient | None) -> None:
        """Note another gradient, or none."""
        if self.gradient is not None:
            self.gradient.forget()
        self.gradient = gradient

    def drop_gradient(self) -> None:
        """Drop a gradient of old blocks, if it is there."""
        if self.gradient is not None and self.gradient.is_old():
            self.gradient.values.grad = None
        self.note_gradient(None)


class Old(NamedTuple):
    """The state that an optimizer has for blocks of this pattern, which `values` no longer have."""

    values: nn.Parameter
    pattern: BlockPattern
    state: list[tuple[weakref.ref[Tensor], int]]

    @classmethod
    def of(cls, values: nn.Parameter, pattern: BlockPattern, state: Any) -> Old:
        """All of the state at this time."""
        return cls(values, pattern, [(weakref.ref(x), x._version) for x in _moments(state)])

    def is_there(self, state: Any) -> bool:
        """Whether any of it was neither removed nor written to."""
        now = {id(x): x._version for x in _moments(state)}
        return any(now.get(id(tensor())) == version for tensor, version in self.state)


class Watch:
    """What is known of the state of an optimizer, by the id of a Parameter.

    `old`: state of old blocks. `loaded`: for state that load_state_dict gave since the last step, the calls of the
    layer by then: if the layer is loaded before another call, the state is of the pattern that it then has.
    `checked`: state that has as many blocks as the Parameter. `patterns`: those at the last step.
    """

    def __init__(self) -> None:
        self.old: dict[int, Old] = {}
        self.patterns: dict[int, BlockPattern] = {}
        self.loaded: dict[int, int] = {}
        self.checked: set[int] = set()


_LAYERS: set[weakref.ref[Any]] = set()
_WATCHES: weakref.WeakKeyDictionary[Optimizer, Watch] = weakref.WeakKeyDictionary()
_HOOKED: list[Any] = []
_OLD = "_sparsek_old"  # in the state of a copied or pickled optimizer


def follow(layer: Any) -> None:
    """Look at a layer before each step of its optimizers. Every optimizer that steps or is given a state is noted."""
    _LAYERS.add(weakref.ref(layer, _LAYERS.discard))
    if not _HOOKED:
        _HOOKED.append(register_optimizer_step_pre_hook(_before_step))
        _follow_states()


def _follow_states() -> None:
    """Note optimizers that are loaded, copied and unpickled, for which torch has no hook, by their state."""
    give, take = Optimizer.__getstate__, Optimizer.__setstate__

    @functools.wraps(give)
    def given(self: Optimizer) -> dict[str, Any]:
        _owned(self)
        watch = _WATCHES.get(self)
        found = () if watch is None else watch.old.values()
        old = [(x.values, x.pattern) for x in found if x.is_there(_state_of(self, x.values))]
        return {**give(self), _OLD: old} if old else give(self)

    @functools.wraps(take)
    def taken(self: Optimizer, state: dict[str, Any]) -> None:
        is_loaded = "param_groups" in self.__dict__  # and so is not a copy
        take(self, {name: part for name, part in state.items() if name != _OLD})
        owned = _owned(self)  # and looked at: this state is newer than what was written before
        watch = _WATCHES[self] = Watch()
        if is_loaded:
            watch.loaded = {id(values): layer._history.calls for layer, values in owned}
        for values, pattern in state.get(_OLD, ()):
            watch.old[id(values)] = Old.of(values, pattern, _state_of(self, values))

    Optimizer.__getstate__, Optimizer.__setstate__ = given, taken


def _owned(optimizer: Optimizer) -> list[tuple[Any, nn.Parameter]]:
    """The layers whose `values` an optimizer has, which are looked at, and these."""
    own = {id(x) for group in getattr(optimizer, "param_groups", ()) for x in group["params"]}
    owned = []
    for ref in list(_LAYERS):
        layer = ref()
        if layer is not None:
            values = layer._parameters.get("values")
            if id(values) not in own:
                values = layer._history.shard
            if values is not None and id(values) in own:
                _look(layer)
                owned.append((layer, values))
    return owned


def _state_of(optimizer: Optimizer, values: nn.Parameter) -> Any:
    """The state that an optimizer has for `values`, if any. That of LBFGS is of all its Parameters."""
    if isinstance(optimizer, torch.optim.LBFGS):
        own = optimizer.param_groups[0]["params"]
        return optimizer.state.get(own[0]) if any(x is values for x in own) else None
    return optimizer.state.get(values)


def _moments(state: Any) -> Iterator[Tensor]:
    """The tensors of a state but its counters of steps."""
    for part in (state or {}).values():
        if isinstance(part, Tensor) and part.ndim and not part.is_inference():
            yield part


def note_pattern(layer: Any, values: nn.Parameter, pattern: BlockPattern, loads: bool) -> None:
    """Note the pattern of the blocks of `values`, and what is of other blocks. `loads`: load_state_dict gave it."""
    history: History = layer._history
    last = None
    if history.shard is not None and history.shard is not values:
        note_pattern(layer, history.shard, pattern, loads)
    if type(values) not in PLAIN:
        history.shard, last = values, next(reversed(history.patterns.values()), None)
    old = history.patterns.pop(id(values), last)
    if old is None and (old := _at_a_step(values)) is not None:  # another layer had it
        history.learns = True
    history.patterns = {**dict(list(history.patterns.items())[-3:]), id(values): pattern}
    changes = old is not None and not (old is pattern or old.same_as(pattern))
    if changes:
        assert old is not None
        # A shard that was not in the layer at the change has a newer gradient.
        _note_gradient(layer, values, old, stale=last is None or not last.same_as(pattern))
    for optimizer, watch in list(_WATCHES.items()) if changes or loads else ():
        calls = watch.loaded.pop(id(values), None)
        watch.checked.discard(id(values))
        state = _state_of(optimizer, values)
        if not changes or not state or (loads and calls == history.calls):
            continue
        known = watch.old.pop(id(values), None)
        before = old if known is None else known.pattern
        if before is not None and not before.same_as(pattern):
            watch.old[id(values)] = Old.of(values, before, state)
    if changes:
        history.begin()


def _at_a_step(values: nn.Parameter) -> BlockPattern | None:
    """The pattern that `values` had when an optimizer last made a step with it."""
    for optimizer, watch in list(_WATCHES.items()):
        found = watch.patterns.get(id(values))
        if found is not None and any(
            x is values for group in optimizer.param_groups for x in group["params"]
        ):
            return found
    return None


def _note_gradient(layer: Any, values: nn.Parameter, old: BlockPattern, stale: bool) -> None:
    """Note a gradient of before a change of the pattern, and those that losses of before will give.

    `stale`: it is not newer than the change.
    """
    history: History = layer._history
    noted, gradient, before = history.gradient, values.grad, None
    if (
        noted is not None
        and noted.values is not values
        and noted.values is history.shard
        and noted.is_there()
    ):
        return
    if noted is not None and noted.values is values and noted.memory is not None:
        before = noted.pattern
    elif history.learns and stale:  # else the gradient is from a compiled graph, or given by hand
        before = old
    if before is not None and gradient is not None and _memory(gradient) is None:
        values.grad = None
    history.note_gradient(Gradient(layer, values, before))
    _mark_losses(layer, values, old)


def note_learning(layer: Any) -> None:
    """Note that a loss may refer to a layer, and the DistributedDataParallel that calls it.

    InvalidInput if that does not wait for its gradient.
    """
    history: History = layer._history
    history.learns = True
    if not (dist.is_available() and dist.is_initialized()):
        history.settled = True
        return
    wrapper: Any = DistributedDataParallel._get_active_ddp_module()
    values = layer._parameters.get("values")
    if wrapper is None:
        return
    learns = values is not None and values.requires_grad
    if not learns or wrapper._use_python_reducer or untransformed(lambda: _is_held(values)):
        history.wrapper, history.settled = weakref.ref(wrapper), True
        return
    ignored = wrapper.parameters_to_ignore
    if any(x is values and name not in ignored for name, x in wrapper.module.named_parameters()):
        raise InvalidInput(
            "DistributedDataParallel would not average the gradient of a sparse layer: since it was made, the layer "
            "has another number of blocks or became sparse, or requires_grad was set; make a new one of the model, "
            "DistributedDataParallel(model.module), and give every rank the same pattern"
        )
    history.settled = True


@torch.inference_mode(False)
@torch.enable_grad()
def _is_held(values: Any) -> bool:
    """Whether a loss or a DistributedDataParallel holds the node that accumulates the gradient of `values`."""
    hook = functools.partial(_pass)
    handle = get_gradient_edge(values).node.register_prehook(hook)
    seen = weakref.ref(hook)
    del hook  # which the node has now, if anything has the node
    held = seen() is not None
    handle.remove()
    return held


def _pass(gradients: Any) -> None:
    """Leave the gradients as they are."""


def owners(values: nn.Parameter) -> list[Any]:
    """The layers that have these `values`."""
    layers = [ref() for ref in list(_LAYERS)]
    return [x for x in layers if x is not None and x._parameters.get("values") is values]


def followed(values: nn.Parameter) -> list[Optimizer]:
    """The optimizers with state for `values` that have made a step or loaded a state."""
    return [x for x in list(_WATCHES) if _state_of(x, values)]


def check_state(optimizer: Optimizer, values: nn.Parameter) -> None:
    """InvalidInput if an optimizer has state for other blocks than those of `values`."""
    watches = [
        watch for x, watch in list(_WATCHES.items()) if x.state is optimizer.state
    ]  # wrappers share it
    for watch in watches or [Watch()]:
        _check_state(optimizer, values, watch)


def note_carried(
    layer: Any, values: nn.Parameter, pattern: BlockPattern, optimizers: list[Optimizer]
) -> None:
    """Note another pattern of `values` and of the state of `optimizers`. The state of others is of the old one."""
    history: History = layer._history
    old = history.patterns.pop(id(values), None)
    history.patterns = {**dict(list(history.patterns.items())[-3:]), id(values): pattern}
    history.note_gradient(None)
    history.begin()
    for optimizer, watch in list(_WATCHES.items()):
        known, state = watch.old.pop(id(values), None), _state_of(optimizer, values)
        watch.loaded.pop(id(values), None)
        watch.checked.discard(id(values))
        if any(optimizer.state is x.state for x in optimizers):
            watch.patterns[id(values)] = pattern
            continue
        before = old if known is None else known.pattern
        if state and before is not None and (known is None or not before.same_as(pattern)):
            watch.old[id(values)] = Old.of(values, before, state)


def before_conversion(layer: Any, pattern: BlockPattern | None) -> None:
    """Note what a conversion of a layer of this pattern would hide: an old gradient, and losses computed before."""
    layer._history.drop_gradient()
    values = layer._parameters.get("values")
    if values is not None and pattern is not None:
        _mark_losses(layer, values, pattern)


def _mark_losses(layer: Any, values: nn.Parameter, old: BlockPattern) -> None:
    """Let losses that were computed by now note that their gradients are of this pattern."""
    # DistributedDataParallel waits for the nodes that existed when it was made.
    # torch.utils.swap_tensors refuses a Parameter with another node than its own, and lets no loss reach it.
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    if values.requires_grad and layer._history.learns and not (dist.is_available() and dist.is_initialized()):
        begin, end = (
            functools.partial(f, weakref.ref(layer), old) for f in (_before_old_backward, _after_old_backward)
        )
        untransformed(
            lambda: _part(values, lambda node: (node.register_prehook(begin), node.register_hook(end)))
        )


@torch._disable_dynamo
def _before_old_backward(layer_ref: Any, pattern: BlockPattern, *_: Any) -> None:
    """Let a loss of this pattern not add to a gradient of another one."""
    layer = layer_ref()
    values = None if layer is None else layer._parameters.get("values")
    if layer is None or values is None:
        return
    _look(layer)
    noted, present = layer._history.gradient, layer._history.patterns.get(id(values))
    if noted is not None and noted.values is values and noted.is_there():
        present = noted.pattern
    if present is not None and not present.same_as(pattern):
        values.grad = None


@torch._disable_dynamo
def _after_old_backward(layer_ref: Any, pattern: BlockPattern, *_: Any) -> None:
    """Note that a loss of this pattern has just given the gradient."""
    layer = layer_ref()
    values = None if layer is None else layer._parameters.get("values")
    if layer is not None and values is not None and values.grad is not None:
        layer._history.note_gradient(Gradient(layer, values, pattern))


def _look(layer: Any) -> None:
    """Let a layer note its pattern: its buffers may have been written to, or be back after functional_call."""
    try:  # noqa: SIM105 (contextlib.suppress takes longer than the look)
        _ = layer.pattern
    except InvalidInput:
        pass


@torch._disable_dynamo  # torch.compiler.disable would import all of torch.compile here
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watch = _WATCHES.get(optimizer)
    if watch is None:
        watch = _WATCHES[optimizer] = Watch()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    for layer, values in _owned(optimizer):
        history: History = layer._history
        if history.gradient is not None and closure is None and history.gradient.is_old():
            raise InvalidInput(
                "the gradient of a BlockSparseLinear is of its old blocks: its pattern has changed since the backward "
                "pass; call optimizer.zero_grad() and compute the loss again"
            )
        if id(values) not in watch.checked:
            _check_state(optimizer, values, watch)
        if id(values) in history.patterns:
            watch.patterns[id(values)] = history.patterns[id(values)]
    watch.old.clear()
    watch.loaded.clear()


def _check_state(optimizer: Optimizer, values: nn.Parameter, watch: Watch) -> None:
    """InvalidInput if state for `values` is of other blocks: of an old pattern, or of another number."""
    state, old = _state_of(optimizer, values), watch.old.get(id(values))
    if not state:
        return
    if _is_of_other_shape(optimizer, values, state) or (old is not None and old.is_there(state)):
        cure = "call optimizer.state.pop(layer.values), which begins anew"
        if isinstance(
            optimizer, (torch.optim.Adagrad, torch.optim.LBFGS)
        ):  # which go on only with what they made
            cure = "make a new optimizer"
        raise InvalidInput(
            f"{type(optimizer).__name__} has state for the old blocks of a BlockSparseLinear, whose pattern has "
            f"changed since, or for those of another layer; {cure}, or load the optimizer's own state dict of the new "
            "pattern"
        )
    watch.checked.add(id(values))


def _is_of_other_shape(optimizer: Optimizer, values: nn.Parameter, state: Any) -> bool:
    """Whether a part of a state has another number of blocks. Factored moments have a side of 1 in each block."""
    if isinstance(optimizer, torch.optim.LBFGS):
        count = sum(x.numel() for x in optimizer.param_groups[0]["params"])
        return any(x.ndim == 1 and len(x) not in (1, count) for x in _moments(state))
    count, *sides = values.shape
    parts = (x.shape for x in _moments(state) if x.ndim == values.ndim)
    return any(x[0] != count and all(a in (1, b) for a, b in zip(x[1:], sides, strict=True)) for x in parts)


@torch.inference_mode(False)
@torch.enable_grad()
def _part(values: nn.Parameter, add: Callable[[Any], Any]) -> None:
    """Add a hook to the node that accumulates the gradient of `values` from all present losses.

    The node lives as long as a loss. Setting data of another dtype makes autograd drop it: the next forward pass
    creates a new one.
    """
    if values.is_inference():  # no loss refers to a tensor of inference mode
        return
    learns = values.requires_grad
    add(get_gradient_edge(values.requires_grad_()).node)
    values.requires_grad_(learns)
    kept = values.data
    values.data = kept.new_empty(0, dtype=torch.float32 if kept.dtype == torch.float64 else torch.float64)
    values.data = kept


def begin_anew(values: nn.Parameter, pattern: BlockPattern, blocks: Tensor | None = None) -> None:
    """Reset the Parameter `values` for a new pattern: without a gradient, and detached from losses computed before.

    `blocks`: the new contents, if they are there already. DistributedDataParallel waits for the node that accumulates
    the gradient: in a process group that of as many blocks stays, and losses computed before still reach it.
    """
    values.grad = None
    if values.shape[0] != pattern.nnzb or not (dist.is_available() and dist.is_initialized()):
        _part(values, lambda node: node.register_prehook(_refuse_old_gradient))
    if blocks is not None:
        if type(blocks) is Tensor:
            values.data = blocks
        else:  # the memory of FSDP2, which it goes on to gather
            values._local_tensor.copy_(blocks._local_tensor)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(values)  # losses have saved it
    elif values.shape[0] != pattern.nnzb:
        with torch.inference_mode(False):
            values.data = values.data.new_empty((pattern.nnzb, *values.shape[1:]))


def _refuse_old_gradient(gradients: Any) -> NoReturn:
    raise InvalidInput(
        "this loss was computed before load_state_dict or set_pattern gave a BlockSparseLinear another pattern, and "
        "its gradient is of the old blocks: compute the loss again"
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
