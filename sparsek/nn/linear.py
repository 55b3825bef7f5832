"""BlockSparseLinear, a torch.nn.Linear with a block-sparse weight, trained and loaded like it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference, saveable
from sparsek.engine.call import transforms
from sparsek.nn.forms import check_bias, weight_and_bias
from sparsek.nn.indices import NOT_ONNX, copies, is_plain, unguarded
from sparsek.nn.parameter import (
    begin_anew,
    bounds,
    draw,
    empty,
    follow,
    meta_device,
    note_learning,
)
from sparsek.nn.regrow import Regrown
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats.bsr import BSR, padding_nonzeros
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.padding import zero_padding
from sparsek.products.formats.pattern import BlockPattern, grid_of
from sparsek.products.formats.random import random_pattern
from sparsek.products.ops.linear import Activation
from sparsek.products.plan import operands

OUTSIDE = (
    "{} values outside the {}x{} weight are not zero; layer.load_state_dict(layer.state_dict()) clears them"
)


class BlockSparseLinear(SparseLinear, Regrown):
    """A torch.nn.Linear whose weight is a BSR: y = act(x @ W.T + bias) + residual for x [..., in_features].

    Training keeps the pattern until `set_pattern`, `prune_` or `grow_` changes it. `indptr` and `indices` define it:
    after a loader has written to them, the next call checks them, with one sync, and follows them or raises
    InvalidInput. On a GPU, collectives such as torch.distributed.broadcast and writes through `.data` leave no trace:
    after the first call, `layer.load_state_dict(layer.state_dict())` follows them.
    `load_state_dict` takes over the pattern of the saved layer, with any number of blocks. x has the dtype of the
    parameters and is on their device; under torch.autocast x, parameters and residual are cast, as those of nn.Linear,
    and the gradients of parameters keep their dtype.

    Args:
        pattern: The BlockPattern of the weight [out_features, in_features].
        bias: Whether the layer has a bias.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None, fused with the product.
        dtype: bf16, fp16, fp32 or fp64; torch's default dtype by default.
        device: A CPU or CUDA device, or "meta"; that of the pattern by default, "meta" under `torch.device("meta")`.

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
    _block: tuple[int, int]
    _kind = "bsr"  # in the class, for pickles of before

    if TYPE_CHECKING:

        @property
        def pattern(self) -> BlockPattern: ...

        @property
        def block(self) -> tuple[int, int]: ...

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
        nn.Module.__init__(self)
        if not isinstance(pattern, BlockPattern):
            raise InvalidInput(
                f"pattern must be a BlockPattern of [out_features, in_features], got {type(pattern).__name__}; "
                "BlockSparseLinear.random, .from_dense and .from_bsr take something else"
            )
        dtype = torch.get_default_dtype() if dtype is None else arguments.dtype("dtype", dtype)
        arguments.flag("bias", bias)
        home = meta_device(device)
        if home is None and device is not None:
            pattern = pattern.to(arguments.device("device", device))
        self._own(pattern, *empty(pattern, bias, dtype, home or pattern.device), activation)
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
        device: str | torch.device | None = None,
    ) -> BlockSparseLinear:
        """Make a layer with a random pattern, the same number of blocks in every block row.

        Torch's global random generator is not used. Values are drawn on the CPU, and so are the same on any device.

        Args:
            in_features: The number of columns of the weight.
            out_features: The number of rows of the weight.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
            density: Stored blocks over all blocks, 0 to 1.
            seed: For the pattern and the parameters.
            bias: Whether the layer has a bias.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.
            dtype: bf16, fp16, fp32 or fp64; torch's default dtype by default.
            device: A CPU or CUDA device, or "meta"; the CPU by default, "meta" under `torch.device("meta")`.

        Raises:
            InvalidInput: For an argument outside these ranges.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        arguments.flag("bias", bias)
        arguments.dtype("dtype", dtype)
        home = meta_device(device)
        target = arguments.device("device", "cpu" if home or device is None else device)
        pattern = random_pattern(out_features, in_features, block, density, seed=seed)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._own(pattern, *empty(pattern, bias, dtype, home or pattern.device), activation)
        made.reset_parameters(torch.Generator("cpu").manual_seed(operator.index(seed)))
        return made if home or target == pattern.device else made.to(target)

    @classmethod
    @outside_inference
    def from_dense(
        cls,
        dense: nn.Module | Tensor,
        block: int | tuple[int, int],
        *,
        keep: float | None = None,
        threshold: float | None = None,
        mask: Tensor | None = None,
        scope: Scope | None = None,
        activation: Activation | None = None,
    ) -> BlockSparseLinear:
        """Make a layer of a torch.nn.Linear: prune its weight to blocks, and copy its bias.

        Give exactly one of `keep`, `threshold` and `mask`; they choose blocks as in `BSR.from_dense`. Nothing is shared
        with `dense`. A weight on the meta device has no values to choose by: give `mask`.

        Args:
            dense: A torch.nn.Linear, transformers' Conv1D, or a weight [out_features, in_features] for a layer without
                bias.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
            keep: The share of the blocks to store, 0 to 1: those of largest Frobenius norm.
            threshold: Store the blocks whose Frobenius norm is greater. 0 stores every block with a nonzero element.
            mask: bool, of blocks or of elements of the weight: what to store.
            scope: Where `keep` chooses: in each block row ("row", the default), or in the whole weight ("global"); see
                `BSR.from_dense`.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Raises:
            InvalidInput: For another kind of layer, and as `BSR.from_dense`.
        """
        weight, bias = weight_and_bias(dense)
        if weight.is_meta:
            if mask is None:
                raise InvalidInput(
                    "the weight is on the meta device and has no values by which blocks are chosen; give mask=, or use "
                    'BlockSparseLinear(pattern, device="meta")'
                )
            like = torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)
            rules: Any = {"mask": mask, "threshold": threshold, "keep": keep, "scope": scope}
            pattern = BSR.from_dense(like, block, **rules).pattern
            return cls(pattern, bias is not None, activation=activation, dtype=weight.dtype, device="meta")
        chosen = BSR.from_dense(weight, block, mask=mask, threshold=threshold, keep=keep, scope=scope)
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
        check_bias(bias, a.shape[0], a.dtype, a.device)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._own(a.pattern, a.logical_values().detach(), None if bias is None else bias.detach(), activation)
        return made

    def _own(
        self, pattern: BlockPattern, values: Tensor, bias: Tensor | None, activation: Activation | None
    ) -> None:
        self._describe(BSR.unchecked(pattern, values), activation, values.dtype)
        self.values = nn.Parameter(saveable(values))
        self.register_parameter("bias", None if bias is None else nn.Parameter(saveable(bias)))
        self._register_pattern(pattern, values.is_meta)
        follow(self)

    @property
    def weight(self) -> BSR:
        """The weight [out_features, in_features] as a BSR on `values`; differentiable.

        Take it again after `indptr` and `indices` have changed, for example by load_state_dict.

        Raises:
            InvalidInput: If `indptr`, `indices` and `values` do not fit each other.
        """
        pattern = self.pattern
        if torch.compiler.is_compiling():
            if torch.onnx.is_in_onnx_export():
                raise InvalidInput(NOT_ONNX)
            return BSR.unchecked(pattern, self.values)
        history = self._history
        history.calls += 1
        if not history.settled and torch.is_grad_enabled():
            note_learning(self)
        values = self._parameters.get("values")  # without a call; the product checks how many they are
        if (
            type(values) is not nn.Parameter
            or values.layout is not torch.strided
            or values.is_nested
            or values.ndim != 3
            or not values.is_contiguous()
        ):
            values = self._own_values(pattern)
        if values.get_device() != pattern.indptr.get_device():
            raise InvalidInput(
                f"indptr and indices are on {pattern.device} and values on {values.device}; "
                "layer.to(device) moves all of them"
            )
        if torch._C._len_torch_dispatch_stack():
            pattern = self._traced(pattern)
        return BSR.of_fields({"pattern": pattern, "values": values, "order": None})

    def _refuse_outside(self, pattern: BlockPattern, values: Tensor) -> None:
        outside = padding_nonzeros(BSR.unchecked(pattern, values))
        if outside:
            raise InvalidInput(OUTSIDE.format(outside, *pattern.shape))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias uniformly from +-1 / sqrt(fan-in), where the fan-in of a row counts its stored elements.

        This is the rule of torch.nn.Linear with the stored inputs of a row in place of all inputs, after Evci et al.
        2022, "Gradient Flow in Sparse Neural Networks and How Lottery Tickets Win", arXiv:2010.03533. Rows without
        blocks get bias 0.

        Args:
            generator: A torch.Generator on the device of the values; torch's global one by default.
        """
        pattern = self.pattern
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"generator is {arguments.shown(generator)}; it must be a torch.Generator or None"
            )
        bound = torch.from_numpy(bounds(pattern)).to(pattern.device, self.values.dtype)
        of_blocks = bound.index_select(0, pattern.block_rows)[:, None, None]
        if pattern.is_ragged:
            of_blocks = zero_padding(pattern, of_blocks.expand(pattern.nnzb, *pattern.block).contiguous())
        draw(self.values, of_blocks, generator)
        if self.bias is not None:
            draw(self.bias, bound.repeat_interleave(pattern.block[0])[: self.out_features], generator)

    def extra_repr(self) -> str:
        """Return the sizes, number of blocks and activation, for `repr`."""
        (bm, bk), (rows, columns) = self._block, grid_of((self.out_features, self.in_features), self._block)
        stored, cells = len(self.indices), rows * columns
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={bm}x{bk}, {stored} of {cells} "
            f"blocks, {100 * stored / max(1, cells):.3g} %, bias={self.bias is not None}{activation}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        old = state.get("_pattern")  # of before 0.1.0, whose buffers were its own tensors
        if old is not None:
            own = {} if state["_buffers"]["indptr"].is_meta else dict(copies(old))
            state = {**state, "_block": old.block, "_seen": old, "_buffers": {**state["_buffers"], **own}}
            del state["_pattern"]
        super().__setstate__(state)

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
        state that an optimizer keeps for `values`, for example the moments of Adam, belongs to them too. Its next step
        raises InvalidInput, unless the optimizer's own state dict is loaded afterwards, or was directly before;
        `optimizer.state.pop(layer.values)` begins anew. Wrap a model in DistributedDataParallel after loading. With
        assign=True, values that are not aligned to 16 bytes, as in a safetensors file, are copied. Values outside the
        weight, where the blocks of a ragged side reach beyond it, become 0.

        A wrong pattern or wrong values change nothing, and are reported like torch's own errors.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        current = self._valid_pattern()
        try:
            transforms.refuse("load_state_dict")
            pattern, values = self._pattern_in(state_dict, prefix, assign, current)
            if isinstance(bias := state_dict.get(prefix + "bias"), Tensor):
                arguments.dense("bias", bias)
        except InvalidInput as error:
            error_msgs.append(f"{prefix or 'BlockSparseLinear'}: {error}")
            return
        if values is not None and assign:
            values = saveable(operands.readable(values) if is_plain(values) else values)
            self.values = nn.Parameter(values, self.values.requires_grad)
        elif pattern is not None and pattern is not current:
            begin_anew(self.values, pattern)
        if values is not None:
            state_dict = {**state_dict, prefix + "values": values}
        if values is not None and pattern is not None and len(self.indices) != pattern.nnzb:
            self.indices = pattern.indices.new_empty(pattern.nnzb, device=self.indptr.device)
        if (
            torch.__future__.get_swap_module_params_on_conversion()
        ):  # which refuses tensors that are weakly referenced
            self.indptr, self.indices = torch.empty_like(self.indptr), torch.empty_like(self.indices)
        nn.Module._load_from_state_dict(
            self,
            unguarded(state_dict, prefix),
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if pattern is not None:
            here = self.values.device if self.values.is_meta else pattern.device
            if self.indptr.device != here or self.indices.device != here:
                self.indptr, self.indices = (part.to(here) for _, part in copies(pattern))
            self._see(self._buffer("indptr"), self._buffer("indices"), pattern, new=True, loads=True)

    def _pattern_in(
        self, state: Mapping[str, Any], prefix: str, assign: bool, current: BlockPattern | None
    ) -> tuple[BlockPattern | None, Tensor | None]:
        """The pattern and the values of a state dict, on the device of use; `current` itself if it is equal."""
        parts = {
            name: state[prefix + name] for name in ("indptr", "indices", "values") if prefix + name in state
        }
        if not parts:
            return current, None
        if len(parts) < 3:
            raise InvalidInput(
                f"the state dict has {' and '.join(parts)} only; indptr, indices and values go together"
            )
        for name, part in parts.items():
            arguments.tensor(name, part)
        whole = is_plain(parts["values"])
        values = parts["values"].detach()
        if assign:
            device = values.device
        elif self.values.is_meta:
            device = torch.device("cpu") if current is None else current.device
        else:
            device = self.values.device
        indptr, indices = (parts[name].detach().to(device, copy=True) for name in ("indptr", "indices"))
        shape = self.out_features, self.in_features
        found = BlockPattern(shape, self._block, indptr, indices)
        if tuple(values.shape) != (found.nnzb, *found.block):
            raise InvalidInput(
                f"values have shape {tuple(values.shape)}; the pattern in the state dict needs "
                f"{(found.nnzb, *found.block)}"
            )
        if whole:  # not a shard, as of FSDP2, whose padding is not looked for
            here = operands.readable(values) if assign else values.to(device)
            if padding_nonzeros(BSR.unchecked(found, here)):
                values = here = zero_padding(found, here.clone())
            if assign:
                BSR(found, here)
        same = current is not None and found.device == current.device and found.same_as(current)
        return (current if same else found), values


SparseLinear.form_of_bsr = BlockSparseLinear
