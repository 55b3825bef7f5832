"""BlockSparseLinear: torch.nn.Linear whose weight stores some blocks only, trained and loaded like it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference, saveable
from sparsek.matrix.bsr import BSR, padding_nonzeros
from sparsek.matrix.padding import zero_padding
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.ops.linear import linear
from sparsek.plan import operands


class BlockSparseLinear(nn.Module):
    """y = act(x @ W.T + bias), or act(x @ W.T + bias) + residual, for x [..., in_features] and W in BSR.

    `pattern` says which blocks of W [out_features, in_features] there are; it stays as it is while the layer trains.
    `activation` is "relu", "gelu", "gelu_tanh", "silu" or None. Parameters: `values` [nnzb, bm, bk] and `bias`
    [out_features] or None; their gradients have these shapes. Buffers, which a state dict carries: `indptr` and
    `indices` of the pattern. Dtype and device are torch's default and the pattern's own if they are not given.

    x must have the parameters' dtype and be on their device. Under torch.autocast x, parameters and residual are cast,
    as those of nn.Linear; the parameters' gradients keep their dtype. Raises InvalidInput for a pattern, an activation,
    a dtype or a device that do not fit.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    indptr: Tensor
    indices: Tensor

    @outside_inference
    def __init__(
        self,
        pattern: BlockPattern,
        bias: bool = True,
        *,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pattern, BlockPattern):
            raise InvalidInput(
                f"pattern must be a BlockPattern of [out_features, in_features], got {type(pattern).__name__}; "
                "BlockSparseLinear.random, .from_dense and .from_bsr take something else"
            )
        dtype = torch.get_default_dtype() if dtype is None else arguments.dtype("dtype", dtype)
        arguments.flag("bias", bias)
        pattern = pattern if device is None else pattern.to(arguments.device("device", device))
        values = torch.empty((pattern.nnzb, *pattern.block), dtype=dtype, device=pattern.device)
        offset = torch.empty(pattern.shape[0], dtype=dtype, device=pattern.device) if bias else None
        self._own(pattern, values, offset, activation)
        self.reset_parameters()

    @classmethod
    @outside_inference
    def random(
        cls,
        in_features: int,
        out_features: int,
        block: int | tuple[int, int],
        density: float,
        *,
        seed: int = 0,
        bias: bool = True,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> BlockSparseLinear:
        """A layer on the CPU with about `density` of its blocks, as many in every block row, drawn by `seed`.

        The parameters are drawn by the same seed; torch's own generator is left as it is. See `random_bsr`.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        arguments.flag("bias", bias)
        drawn = random_bsr(out_features, in_features, block, density, dtype=dtype, seed=seed)
        made = cls.from_bsr(
            drawn, drawn.values.new_empty(out_features) if bias else None, activation=activation
        )
        made.reset_parameters(torch.Generator("cpu").manual_seed(operator.index(seed)))
        return made

    @classmethod
    @outside_inference
    def from_dense(
        cls,
        dense: nn.Linear | Tensor,
        block: int | tuple[int, int],
        *,
        keep: float | None = None,
        threshold: float | None = None,
        mask: Tensor | None = None,
        scope: str = "global",
        activation: str | None = None,
    ) -> BlockSparseLinear:
        """The chosen blocks of a torch.nn.Linear and a copy of its bias, or of a weight [out, in] without bias.

        `keep`, `threshold`, `mask` and `scope` choose as in `BSR.from_dense`. Nothing is shared with `dense`.
        """
        if not isinstance(dense, (nn.Linear, Tensor)):
            raise InvalidInput(
                f"from_dense takes a torch.nn.Linear or its weight [out_features, in_features], got "
                f"{type(dense).__name__}"
            )
        weight, bias = (dense.weight, dense.bias) if isinstance(dense, nn.Linear) else (dense, None)
        chosen = BSR.from_dense(
            weight.detach(), block, mask=mask, threshold=threshold, keep=keep, scope=scope
        )
        return cls.from_bsr(chosen, None if bias is None else bias.detach().clone(), activation=activation)

    @classmethod
    @outside_inference
    def from_bsr(
        cls, a: BSR, bias: Tensor | None = None, *, activation: str | None = None
    ) -> BlockSparseLinear:
        """A layer with `a` [out_features, in_features] as its weight, and `bias` [out_features].

        Both are taken over, not copied: training changes them. The blocks of a transposed view are
        copied, and tensors of torch.inference_mode, which could not be trained.
        """
        if not isinstance(a, BSR):
            raise InvalidInput(
                f"from_bsr takes a BSR, got {type(a).__name__}; from_dense takes dense weights"
            )
        wanted = (torch.Size([a.shape[0]]), a.dtype, a.device)
        if bias is not None:
            arguments.dense("bias", bias)
            if (bias.shape, bias.dtype, bias.device) != wanted:
                raise InvalidInput(
                    f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}; it must be {a.dtype} [{a.shape[0]}] "
                    f"on {a.device}, or None"
                )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._own(a.pattern, a.logical_values().detach(), None if bias is None else bias.detach(), activation)
        return made

    def _own(
        self, pattern: BlockPattern, values: Tensor, bias: Tensor | None, activation: str | None
    ) -> None:
        operands.check_activation(activation)
        self.activation = activation
        self.out_features, self.in_features = pattern.shape
        self._pattern = pattern
        self.register_buffer("indptr", pattern.indptr)
        self.register_buffer("indices", pattern.indices)
        self.values = nn.Parameter(saveable(values))
        self.register_parameter("bias", None if bias is None else nn.Parameter(saveable(bias)))

    @property
    def pattern(self) -> BlockPattern:
        """Which blocks of the weight are stored."""
        return self._pattern

    @property
    def block(self) -> tuple[int, int]:
        """(bm, bk) of the weight's blocks."""
        return self._pattern.block

    @property
    def weight(self) -> BSR:
        """The weight [out_features, in_features], sharing `values`; differentiable. Good until another pattern is
        loaded."""
        return BSR.unchecked(self._pattern, self.values)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y [..., out_features] of x's dtype, or of autocast's; `residual` has y's shape. See `sparsek.linear`."""
        return linear(x, self.weight, self.bias, self.activation, residual)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Values and bias uniform in +-1 / sqrt(fan-in), where the fan-in of a row counts its stored elements.

        That is torch.nn.Linear's rule with the inputs that a row has in place of all of them, as Evci et al. 2022 ask
        for ("Gradient Flow in Sparse Neural Networks and How Lottery Tickets Win", arXiv 2010.03533). Rows without
        blocks get bias 0.
        """
        pattern = self._pattern
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"generator is {arguments.shown(generator)}; it must be a torch.Generator or None"
            )
        bound = torch.from_numpy(_bounds(pattern)).to(self.values.device, self.values.dtype)
        self.values.uniform_(-1, 1, generator=generator)
        self.values.mul_(bound.index_select(0, pattern.block_rows)[:, None, None])
        zero_padding(pattern, self.values)
        if self.bias is not None:
            self.bias.uniform_(-1, 1, generator=generator)
            self.bias.mul_(bound.repeat_interleave(pattern.block[0])[: self.out_features])

    def extra_repr(self) -> str:
        bm, bk = self.block
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={bm}x{bk}, "
            f"{self._pattern.summary}, bias={self.bias is not None}{activation}"
        )

    def _follow(self, pattern: BlockPattern) -> None:
        """Makes `pattern` this layer's, and its tensors the buffers."""
        self._pattern, self.indptr, self.indices = pattern, pattern.indptr, pattern.indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        """What .to, .half and the like go through. On "meta" the pattern waits here for a device to come."""
        super()._apply(fn, recurse)
        if not self.indptr.is_meta:
            self._follow(self._pattern.to(self.indptr.device))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what pickle reads, has one set of indices again: the pattern's, which deepcopy shares."""
        super().__setstate__(state)
        if not self.indptr.is_meta:
            self._follow(self._pattern)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes over the pattern of the state dict, of as many blocks as it has, if sides and blocks are these.

        `values` stays the same Parameter, of another shape if the number of blocks changes; with assign=True it is a
        new one, as torch has it. Another pattern takes `values.grad` away, and `.backward()` of a loss that was
        computed before raises InvalidInput: both are of the old blocks. So is a `weight` that was taken before: take it
        again. What an optimizer keeps for `values`, as Adam its moments, is of them too, and no longer fits if their
        number changes: make a new optimizer, or remove `optimizer.state[layer.values]`. Wrap a model in
        DistributedDataParallel after loading.

        A wrong pattern or wrong values change nothing and are reported as torch reports its own errors.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            pattern = self._pattern_in(state_dict, prefix, assign)
        except InvalidInput as error:
            error_msgs.append(f"{prefix or 'BlockSparseLinear'}: {error}")
            return
        if pattern is not self._pattern and assign:
            values = saveable(state_dict[prefix + "values"].detach())
            self.values = nn.Parameter(values, self.values.requires_grad)
        elif pattern is not self._pattern:
            _begin_anew(self.values, pattern)
        # torch writes to the buffers that are there; the pattern's own belong to its other layers and losses too.
        parts = pattern.indptr, pattern.indices
        self.indptr, self.indices = (torch.empty_like(x, device=self.indptr.device) for x in parts)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._pattern = pattern
        if not self.indptr.is_meta:
            self._follow(pattern)

    def _pattern_in(self, state: Mapping[str, Any], prefix: str, assign: bool) -> BlockPattern:
        """The pattern of a state dict, where it will be used; this layer's own object if it is the same."""
        parts = {
            name: state[prefix + name] for name in ("indptr", "indices", "values") if prefix + name in state
        }
        if not parts or list(parts) == ["values"]:
            return self._pattern
        if len(parts) < 3:
            raise InvalidInput(
                f"the state dict has {' and '.join(parts)} only; indptr, indices and values go together"
            )
        for name, part in parts.items():
            arguments.tensor(name, part)
        values = parts["values"].detach()
        if assign:
            device = values.device
        else:
            device = self._pattern.device if self.values.is_meta else self.values.device
        indptr, indices = (parts[name].detach().to(device, copy=True) for name in ("indptr", "indices"))
        found = BlockPattern(self._pattern.shape, self._pattern.block, indptr, indices)
        if assign:
            BSR(found, values)
        elif tuple(values.shape) != (found.nnzb, *found.block):
            raise InvalidInput(
                f"values have shape {tuple(values.shape)}; the pattern in the state dict needs "
                f"{(found.nnzb, *found.block)}"
            )
        elif outside := padding_nonzeros(BSR.unchecked(found, values.to(device))):
            raise InvalidInput(
                f"{outside} values outside the {found.shape[0]}x{found.shape[1]} weight are not zero"
            )
        same = found.device == self._pattern.device and found.same_as(self._pattern)
        return self._pattern if same else found


@torch.inference_mode(False)
@torch.enable_grad()
def _begin_anew(values: nn.Parameter, pattern: BlockPattern) -> None:
    """Makes `values` of an old pattern the same Parameter for a new one: no gradient, and no part in an old loss."""
    values.grad = None
    if not values.is_inference():  # no loss holds a tensor of inference mode
        learns = values.requires_grad
        edge = torch.autograd.graph.get_gradient_edge(values.requires_grad_())
        edge.node.register_prehook(_refuse_old_gradient)
        values.requires_grad_(learns)
    # That node adds the gradients to `values`. It lives as long as a loss does, and knows the shape that was. Data of
    # another dtype make autograd forget it: the next forward pass gets one of its own.
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


def _bounds(pattern: BlockPattern) -> np.ndarray:
    """1 / sqrt(stored elements of a row) for the rows of each block row, float64 [Mb]; 0 where there are none."""
    indptr, indices = pattern.host
    bk, columns = pattern.block[1], pattern.shape[1]
    widths = np.minimum(bk, columns - indices.astype(np.int64) * bk)
    rows = np.repeat(np.arange(pattern.grid[0]), np.diff(indptr))
    fan_in = np.bincount(rows, weights=widths, minlength=pattern.grid[0])
    return np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0.0)
