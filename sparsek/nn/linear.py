"""BlockSparseLinear, a torch.nn.Linear with a block-sparse weight, trained and loaded like it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference, saveable
from sparsek.matrix.bsr import BSR, padding_nonzeros
from sparsek.matrix.convert import Scope
from sparsek.matrix.padding import zero_padding
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.ops.linear import Activation, linear
from sparsek.plan import operands


class BlockSparseLinear(nn.Module):
    """A torch.nn.Linear whose weight is a BSR: y = act(x @ W.T + bias) + residual for x [..., in_features].

    The pattern is fixed while the layer trains. x has the dtype of the parameters and is on their device; under
    torch.autocast x, parameters and residual are cast, as those of nn.Linear, and the gradients of parameters keep
    their dtype. `load_state_dict` takes over the pattern of the saved layer, with any number of blocks.

    Args:
        pattern: The BlockPattern of the weight [out_features, in_features].
        bias: Whether the layer has a bias.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None, fused with the product.
        dtype: bf16, fp16, fp32 or fp64; torch's default dtype by default.
        device: A CPU or CUDA device; that of the pattern by default.

    Attributes:
        values: The Parameter [nnzb, bm, bk], the stored blocks of the weight.
        bias: The Parameter [out_features], or None.
        indptr: The buffer with the row pointers of the pattern, int32 [Mb+1].
        indices: The buffer with its block columns, int32 [nnzb].

    Raises:
        InvalidInput: For a pattern, activation, dtype or device that does not fit.

    Examples:
        >>> dense = torch.nn.Linear(512, 1024)
        >>> layer = sk.nn.BlockSparseLinear.from_dense(dense, block=64, keep=0.125, activation="gelu")
        >>> layer(torch.randn(48, 512)).shape
        torch.Size([48, 1024])
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
        activation: Activation | None = None,
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
        activation: Activation | None = None,
        dtype: torch.dtype | None = None,
    ) -> BlockSparseLinear:
        """Make a layer on the CPU with a random pattern, the same number of blocks in every block row.

        Torch's global random generator is not used.

        Args:
            in_features: The number of columns of the weight.
            out_features: The number of rows of the weight.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
            density: Stored blocks over all blocks, 0 to 1.
            seed: For the pattern and the parameters.
            bias: Whether the layer has a bias.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.
            dtype: bf16, fp16, fp32 or fp64; torch's default dtype by default.

        Raises:
            InvalidInput: For an argument outside these ranges.
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
        scope: Scope = "global",
        activation: Activation | None = None,
    ) -> BlockSparseLinear:
        """Make a layer of a torch.nn.Linear: prune its weight to blocks, and copy its bias.

        Give exactly one of `keep`, `threshold` and `mask`; they choose blocks as in `BSR.from_dense`. Nothing is shared
        with `dense`.

        Args:
            dense: A torch.nn.Linear, or a weight [out_features, in_features] for a layer without bias.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
            keep: The share of the blocks to store, 0 to 1: those of largest Frobenius norm.
            threshold: Store the blocks whose Frobenius norm is greater. 0 stores every block with a nonzero element.
            mask: bool, of blocks or of elements of the weight: what to store.
            scope: Where `keep` chooses: in the whole weight ("global"), or in each block row ("row").
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Raises:
            InvalidInput: For another kind of layer, and as `BSR.from_dense`.
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
        cls, a: BSR, bias: Tensor | None = None, *, activation: Activation | None = None
    ) -> BlockSparseLinear:
        """Make a layer with a BSR as its weight.

        Args:
            a: The weight [out_features, in_features]. Its values become the Parameter, so training changes them. The
                blocks of a transposed view are copied, and so are tensors of torch.inference_mode.
            bias: [out_features] of the dtype of `a` on its device, which becomes a Parameter too; None for no bias.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Raises:
            InvalidInput: For a bias that does not fit.
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
        self, pattern: BlockPattern, values: Tensor, bias: Tensor | None, activation: Activation | None
    ) -> None:
        operands.check_activation(activation)
        self.activation: Activation | None = activation
        self.out_features, self.in_features = pattern.shape
        self._pattern = pattern
        self.register_buffer("indptr", pattern.indptr)
        self.register_buffer("indices", pattern.indices)
        self.values = nn.Parameter(saveable(values))
        self.register_parameter("bias", None if bias is None else nn.Parameter(saveable(bias)))

    @property
    def pattern(self) -> BlockPattern:
        """The BlockPattern of the weight."""
        return self._pattern

    @property
    def block(self) -> tuple[int, int]:
        """The sides (bm, bk) of a block of the weight."""
        return self._pattern.block

    @property
    def weight(self) -> BSR:
        """The weight [out_features, in_features] as a BSR on `values`; differentiable.

        Take it again after loading a state dict with another pattern.
        """
        return BSR.unchecked(self._pattern, self.values)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return y [..., out_features], in the dtype of x or of torch.autocast.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added after the activation.
        """
        return linear(x, self.weight, self.bias, self.activation, residual)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias uniformly from +-1 / sqrt(fan-in), where the fan-in of a row counts its stored elements.

        This is the rule of torch.nn.Linear with the stored inputs of a row in place of all inputs, after Evci et al.
        2022, "Gradient Flow in Sparse Neural Networks and How Lottery Tickets Win", arXiv:2010.03533. Rows without
        blocks get bias 0.

        Args:
            generator: A torch.Generator on the device of the values; torch's global one by default.
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
        """Return the sizes, pattern and activation, for `repr`."""
        bm, bk = self.block
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={bm}x{bk}, "
            f"{self._pattern.summary}, bias={self.bias is not None}{activation}"
        )

    def _follow(self, pattern: BlockPattern) -> None:
        """Set the pattern, and its tensors as the buffers."""
        self._pattern, self.indptr, self.indices = pattern, pattern.indptr, pattern.indices

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        """Apply a conversion, as .to and .half do. On "meta" the layer keeps its pattern for the next real device."""
        super()._apply(fn, recurse)
        if not self.indptr.is_meta:
            self._follow(self._pattern.to(self.indptr.device))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle: the buffers are the pattern's own tensors again, which deepcopy shares."""
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
        """Take over the pattern of the state dict, with any number of blocks, if shape and block sides are the same.

        `values` stays the same Parameter, with another shape if the number of blocks changes; with assign=True it is a
        new one, as in torch. Another pattern resets `values.grad`, and `.backward()` of a loss that was computed before
        raises InvalidInput: both belong to the old blocks. So does a `weight` that was taken before: take it again. The
        state that an optimizer keeps for `values`, for example the moments of Adam, belongs to them too, and its shape
        no longer fits if their number changes: make a new optimizer, or remove `optimizer.state[layer.values]`. Wrap a
        model in DistributedDataParallel after loading.

        A wrong pattern or wrong values change nothing, and are reported like torch's own errors.
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
        # torch writes into the buffers, and the tensors of the pattern may belong to other layers and losses.
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
        """The pattern of a state dict, on the device of use; this layer's own object if it is equal."""
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


def _bounds(pattern: BlockPattern) -> np.ndarray:
    """1 / sqrt(stored elements of a row) for the rows of each block row, float64 [Mb]; 0 where there are none."""
    indptr, indices = pattern.host
    bk, columns = pattern.block[1], pattern.shape[1]
    widths = np.minimum(bk, columns - indices.astype(np.int64) * bk)
    rows = np.repeat(np.arange(pattern.grid[0]), np.diff(indptr))
    fan_in = np.bincount(rows, weights=widths, minlength=pattern.grid[0])
    return np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0.0)
