"""A Parameter of blocks: how it is drawn, and what a change of its pattern does to losses and optimizers.

Torch has no list of optimizers, so each is noted at its first step. If the pattern of a Parameter changes between two
steps, the state that an optimizer has for it, for example Adam's moments, is of other blocks. The next step then raises
InvalidInput, unless the optimizer was loaded meanwhile, or the state was removed or written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsek.core.errors import InvalidInput
from sparsek.matrix.pattern import BlockPattern


class Old(NamedTuple):
    """A Parameter with another pattern than at the last step, that pattern, and the state when it changed."""

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


def note_pattern(values: nn.Parameter, old: BlockPattern, pattern: BlockPattern) -> None:
    """Note the pattern of the blocks of `values`. Another one than before resets its gradient."""
    if old is pattern or old.same_as(pattern):
        return
    values.grad = None
    for optimizer, watch in list(_WATCHES.items()):
        state = optimizer.state.get(values)
        if state and not watch.loaded:
            known = watch.old.pop(id(values), None)
            before = old if known is None else known.pattern
            if not before.same_as(pattern):
                kept = [(weakref.ref(x), x._version) for x in _moments(state)]
                watch.old[id(values)] = Old(values, before, kept)


def _moments(state: Any) -> Iterator[Tensor]:
    """The tensors of a state but its counters of steps."""
    for part in state.values():
        if isinstance(part, Tensor) and part.ndim and not part.is_inference():
            yield part


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watch = _WATCHES.get(optimizer)
    if watch is None:
        watch = _WATCHES[optimizer] = Watch()
        optimizer.register_load_state_dict_post_hook(watch.load)
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
