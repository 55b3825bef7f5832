"""SparseLinear, a torch.nn.Linear with a sparse weight of any storage. `linear.py` has its BSR form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference, saveable, unmapped, untransformed
from sparsek.engine.call import transforms
from sparsek.nn.forms import any_meta, check_bias, inside, placeholder, wanted_format, weight_and_bias
from sparsek.nn.indices import (
    NOT_CHECKED,
    NOT_ONNX,
    CheckedTensor,
    IndexedLayer,
    copies,
    is_plain,
    unguarded,
)
from sparsek.nn.parameter import (
    History,
    before_conversion,
    begin_anew,
    bounds,
    draw,
    follow,
    note_learning,
)
from sparsek.nn.pruned import StraightThrough, choose_again, keep_pruned
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import FORMATS, Quantized, SparseMatrix, quantize
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.linear import Activation, linear
from sparsek.products.ops.spmm import finished
from sparsek.products.ops.weight_formats import TITLES
from sparsek.products.plan import operands


class SparseLinear(IndexedLayer):
    """A torch.nn.Linear whose weight is sparse: y = act(x @ W.T + bias) + residual for x [..., in_features].

    The weight is a Semi24, a BSR24, or a BSR, Semi24 or BSR24 in FP8; `BlockSparseLinear` is the form of a BSR.
    `from_dense` and `from_matrix` make the form of each.

    Values that are not in FP8 are a Parameter. Its gradient is that of the stored elements: the 2:4 pattern and the
    blocks stay as they are, until `choose_again`. A weight in FP8 has no Parameter; x gets a gradient through it.
    Conversions such as `.to(torch.bfloat16)` leave FP8 values, scales, metadata and indices in their dtypes.

    The tensors are the weight: after a loader has assigned or written to `metadata`, `scale`, `indptr` or `indices`,
    the next call checks them, with a sync, and follows them or raises InvalidInput. `load_state_dict` takes over the
    pattern of the saved layer, with any number of blocks.

    Args:
        weight: The weight [out_features, in_features]: a Semi24, a BSR24 or a Quantized. Its values become those of the
            layer; metadata, scales and indices are copied.
        bias: [out_features], which becomes a Parameter; None for no bias. It has the dtype of the values, or that of y
            for a weight in FP8.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None, fused with the product.

    Attributes:
        values: The Parameter of a weight that is not in FP8, [out_features, in_features / 2] or [nnzb, bm, bk / 2].
        codes: The buffer of the values of a weight in FP8.
        scale: The buffer of its scales, float32.
        metadata: The buffer of the metadata of a 2:4 weight; see `Semi24`.
        indptr: The buffer of the row pointers of a pattern of blocks, int32 [Mb+1].
        indices: The buffer of its block columns, int32 [nnzb].
        bias: The Parameter [out_features], or None.

    Raises:
        InvalidInput: For another weight, and for a bias or an activation that does not fit.

    Examples:
        >>> dense = torch.nn.Linear(512, 1024)
        >>> layer = sk.nn.SparseLinear.from_dense(dense, "semi24", activation="gelu")
        >>> layer(torch.randn(48, 512)).shape
        torch.Size([48, 1024])
        >>> sk.nn.SparseLinear.from_dense(dense, "bsr24_fp8", block=128, keep=0.5).weight
        Quantized(BSR24 1024x512 e4m3, block 128x128, 16 of 32 blocks, 50 %, scale per row, 0.168 MB, cpu)
    """

    form_of_bsr: ClassVar[type[Any]]
    values: nn.Parameter
    codes: Tensor
    scale: Tensor
    metadata: Tensor
    bias: nn.Parameter | None

    @outside_inference
    def __init__(
        self, weight: SparseMatrix, bias: Tensor | None = None, *, activation: Activation | None = None
    ) -> None:
        super().__init__()
        if isinstance(weight, BSR) or not operands.is_sparse(weight):
            raise InvalidInput(
                f"weight is {arguments.shown(weight)}; it must be a Semi24, BSR24 or Quantized; "
                "SparseLinear.from_dense and .from_matrix take others"
            )
        inner = weight.matrix if isinstance(weight, Quantized) else weight
        if isinstance(inner, BSR) and inner.order is not None:
            raise InvalidInput(
                "weight is a transposed view of a BSR in FP8; quantize the matrix itself: "
                "BSR(a.pattern, a.logical_values())"
            )
        dtype = None if isinstance(weight, Quantized) else weight.dtype
        check_bias(bias, weight.shape[0], dtype, weight.device)
        self._describe(
            weight, activation, dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        )
        values = saveable(inner.values.detach())
        if isinstance(weight, Quantized):
            self.register_buffer("codes", values)
            self.register_buffer("scale", saveable(weight.scale).detach().clone())
        else:
            self.values = nn.Parameter(values)
        if not isinstance(inner, BSR):
            meta = unmapped("metadata", saveable(inner.meta))
            self.register_buffer("metadata", untransformed(meta.clone))
        self.register_parameter("bias", None if bias is None else nn.Parameter(saveable(bias.detach())))
        if not isinstance(inner, Semi24):
            self._register_pattern(inner.pattern, values.is_meta)
        self._checked = (
            CheckedTensor.of(self._buffers.get("scale")),
            CheckedTensor.of(self._buffers.get("metadata")),
        )
        follow(self)

    def _describe(self, weight: SparseMatrix, activation: Activation | None, dtype: torch.dtype) -> None:
        """Note storage, sizes and activation."""
        operands.check_activation(activation)
        self.activation: Activation | None = activation
        self.out_features, self.in_features = weight.shape
        quantized = weight if isinstance(weight, Quantized) else None
        inner = weight.matrix if isinstance(weight, Quantized) else weight
        self._kind = type(inner).__name__.lower()
        self._stored = "values" if quantized is None else "codes"
        self._scaled, self._fast_accum = (
            ("", False) if quantized is None else (quantized.kind, quantized.fast_accum)
        )
        self._block = None if isinstance(inner, Semi24) else inner.block
        self._dtype = dtype
        self._seen, self._history = (), History()
        self._checked = NOT_CHECKED, NOT_CHECKED

    def _register_pattern(self, pattern: BlockPattern, on_meta: bool) -> None:
        for name, part in copies(pattern):
            self.register_buffer(name, part.to("meta") if on_meta else part)
        self._see(self.indptr, self.indices, pattern, new=True)

    @classmethod
    @outside_inference
    def from_dense(
        cls,
        dense: nn.Module | Tensor,
        config: Any,
        *,
        block: int | tuple[int, int] | None = None,
        keep: float | None = None,
        scope: Scope = "row",
        activation: Activation | None = None,
    ) -> Any:
        """Make a layer of a torch.nn.Linear: prune its weight, round it to FP8 if that is wanted, and copy its bias.

        Nothing is shared with `dense`. Of a weight on the meta device the layer is on it too, with the placeholder of a
        pattern, until it is loaded.

        Args:
            dense: A torch.nn.Linear, transformers' Conv1D (whose weight is transposed), or a weight [out_features,
                in_features] for a layer without bias.
            config: The name of a format: "bsr", "semi24", "bsr24", "bsr_fp8", "semi24_fp8", "bsr24_fp8" or "dense_fp8";
                or an object with that as `.format`, and with `.block`, `.keep` and `.scope` of its own.
            block: For a name with "bsr": the sides (bm, bk) of a block, or one side of a square one.
            keep: For a name with "bsr": the share of the blocks to store, those of largest Frobenius norm.
            scope: Where `keep` chooses: in each block row ("row"), or in the whole weight ("global").
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Returns:
            A BlockSparseLinear for "bsr", a SparseLinear for others.

        Raises:
            InvalidInput: For another kind of layer, an unknown format, and a weight that cannot have it.
        """
        weight, bias = weight_and_bias(dense)
        form = wanted_format(config, block, keep, scope)
        why = form.why_not(weight)
        if why:
            raise InvalidInput(f"a weight {list(weight.shape)} cannot be {form.name}: {'; '.join(why)}")
        made: Any = placeholder(weight, form) if weight.is_meta else form.convert(weight)
        bias = None if bias is None else bias.detach().clone()
        layer = cls.from_matrix(made, bias, activation=activation)
        layer._dtype = weight.dtype
        return layer

    @classmethod
    def from_matrix(
        cls, weight: SparseMatrix, bias: Tensor | None = None, *, activation: Activation | None = None
    ) -> Any:
        """Make a layer with a sparse matrix as its weight.

        Args:
            weight: A BSR, Semi24, BSR24 or Quantized [out_features, in_features]; see the class, and
                `BlockSparseLinear.from_bsr`.
            bias: [out_features], or None.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Returns:
            A BlockSparseLinear for a BSR, a SparseLinear for others.

        Raises:
            InvalidInput: For another weight, and for a bias that does not fit.
        """
        if isinstance(weight, BSR):
            return cls.form_of_bsr.from_bsr(weight, bias, activation=activation)
        return SparseLinear(weight, bias, activation=activation)

    @property
    def weight(self) -> Any:
        """The weight [out_features, in_features] as a matrix on the tensors of the layer; differentiable.

        Take it again after they were replaced, for example by load_state_dict.

        Raises:
            InvalidInput: If the tensors do not fit each other.
        """
        pattern = None if self._block is None else self.pattern
        if torch.compiler.is_compiling():
            if torch.onnx.is_in_onnx_export():
                raise InvalidInput(NOT_ONNX)
            values, *rest = (getattr(self, name, None) for name in (self._stored, "scale", "metadata"))
            return self._matrix(pattern, cast(Tensor, values), *rest)
        history, buffers = self._history, self._buffers
        history.calls += 1
        if not history.settled and torch.is_grad_enabled():
            note_learning(self)
        values = self._own_values(pattern)
        scale, meta = buffers.get("scale"), buffers.get("metadata")
        of_scale, of_meta = self._checked
        if (scale is not None and not of_scale.holds(scale)) or (
            meta is not None and not of_meta.holds(meta)
        ):
            scale, meta = self._look_at_parts(pattern, values)
        where = values.get_device()
        for part in (scale, meta, None if pattern is None else pattern.indptr):
            if part is not None and (part.get_device() != where or (part.is_meta and not values.is_meta)):
                raise InvalidInput(
                    f"{self._stored} are on {values.device} and other tensors of the weight on {part.device}; "
                    "layer.to(device) moves all of them"
                )
        return self._matrix(self._traced(pattern), values, scale, meta)

    def _matrix(
        self, pattern: BlockPattern | None, values: Tensor, scale: Tensor | None, meta: Tensor | None
    ) -> Any:
        """The weight of these parts, unchecked."""
        if (scale is None and self._scaled) or (meta is None and self._kind != "bsr"):
            missing = "scale" if scale is None and self._scaled else "metadata"
            raise InvalidInput(f"{missing} of this {type(self).__name__} is no tensor; load the whole layer")
        parts: dict[str, Any] = {"values": values}
        if pattern is not None:
            parts["pattern"] = pattern
        if meta is None:
            parts["order"] = None
        else:
            parts["meta"] = meta
        made = FORMATS[self._kind].of_fields(parts)
        if scale is None:
            return made
        return Quantized.of_fields(
            {"matrix": made, "scale": scale, "kind": self._scaled, "fast_accum": self._fast_accum}
        )

    def _look_at_parts(
        self, pattern: BlockPattern | None, values: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scales and metadata that are other tensors than in the last call, or were written to; checked with a sync."""
        scale, meta = (unmapped(name, self._buffer(name)) for name in ("scale", "metadata"))
        lists = 0 if pattern is None else len(pattern.indices)
        sizes = {"tensor": (), "row": (self.out_features,), "block": (lists,)}.get(self._scaled)
        if scale is not None and scale.shape != sizes:
            raise InvalidInput(
                f"scale is {list(scale.shape)}; there must be {list(sizes or ())}, one per {self._scaled}"
            )
        if values.is_meta or not all(is_plain(x) and not x.is_meta for x in (scale, meta) if x is not None):
            return scale, meta
        if not is_plain(values):  # of torch.func, or a shard: the others are checked by themselves
            sizes, dtype, device = values.shape, values.dtype, values.device
            if not self._scaled:
                arguments.dtype("the dtype of values", dtype)
            with _disable_current_modes():
                values = untransformed(lambda: torch.zeros(sizes, dtype=dtype, device=device))
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidInput(
                "tensors of the weight have changed; call the layer before a CUDA graph is captured"
            )
        self._check(pattern, values, scale, meta)
        self._checked = CheckedTensor.of(scale), CheckedTensor.of(meta)
        return scale, meta

    def _check(
        self, pattern: BlockPattern | None, values: Tensor, scale: Tensor | None, meta: Tensor | None
    ) -> None:
        """InvalidInput unless these are the parts of a weight of this shape."""
        try:
            with _disable_current_modes():
                whole = untransformed(lambda: operands.readable(values.detach()))
                matrix = self._matrix(pattern, whole, scale, meta)
                untransformed(matrix._checked)
            if matrix.shape != (self.out_features, self.in_features):
                raise InvalidInput(
                    f"they are {list(matrix.shape)} and the weight {[self.out_features, self.in_features]}"
                )
        except InvalidInput as error:
            raise InvalidInput(f"the tensors of this {type(self).__name__}: {error}") from None

    if TYPE_CHECKING:

        def __call__(
            self, x: Tensor | None = None, residual: Tensor | None = None, *, input: Tensor | None = None
        ) -> Tensor: ...

    def forward(
        self, x: Tensor | None = None, residual: Tensor | None = None, *, input: Tensor | None = None
    ) -> Tensor:
        """Return y [..., out_features], in the dtype of x or of torch.autocast.

        Args:
            x: [..., in_features].
            residual: [..., out_features], added after the activation.
            input: x by the name that torch.nn.Linear has for it.
        """
        if input is not None:
            if x is not None:
                raise InvalidInput("x and input are two names of one argument; give one of them")
            x = input
        own: Any = self._parameters
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401 (whose __getattr__ is slow)
        pruned = own.get("pruned")
        if pruned is None or not torch.is_grad_enabled():
            return linear(x, self.weight, bias, self.activation, residual)  # type: ignore[arg-type]
        weight = self.weight
        z = linear(x, weight.detach(), bias)  # type: ignore[arg-type]
        z = StraightThrough.apply(z, x, weight.values, pruned, weight.detach(), self._decay)
        return finished(z, self.activation or "", residual)

    @outside_inference
    def keep_pruned(self, dense: nn.Module | Tensor | None = None, *, decay: float = 2e-4) -> Any:
        """Let the elements of a 2:4 weight that are not stored learn too, for `choose_again`. Return this layer.

        They become the Parameter `pruned`, of the shape of `values`: make the optimizer afterwards. The product reads
        `values` only. The gradient of `pruned` is that of the dense weight, straight through the choice, plus `decay`
        times `pruned`. This is SR-STE (Zhou et al. 2021, arXiv:2102.04010).

        Args:
            dense: The dense layer or weight, whose elements they are; zeros without it.
            decay: What draws them to 0, lambda in the paper.

        Raises:
            InvalidInput: For a weight that is not 2:4, or in FP8, and a dense one of another shape.
        """
        keep_pruned(self, dense, decay)
        return self

    @torch.no_grad()
    def choose_again(
        self, scores: Tensor | None = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Choose the two stored of every four neighbours anew: those of largest magnitude. No sync.

        Elements keep their values: those that leave go to `pruned`, if there is one, and new elements come from it.
        Without `keep_pruned` the old ones are dropped, and new ones begin at 0. Gradients move along. Blocks stay.
        Under FSDP2 and DistributedDataParallel all ranks call it together, and take the choice of the first.

        Args:
            scores: [out_features, in_features]. The largest are chosen, and negative ones are least. By default they
                are the magnitudes of the weight with its pruned elements.
            optimizer: Its state for `values` and `pruned`, for example Adam's moments, moves along.

        Raises:
            InvalidInput: For a weight that is not 2:4, or in FP8, scores that do not fit, and an optimizer of others.
        """
        choose_again(self, scores, optimizer)
        self._checked = self._checked[0], CheckedTensor.of(self.metadata)

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight [out_features, in_features]. Differentiable in `values`.

        Args:
            dtype: By default that of the values; of a weight in FP8 that of the dense weight before.
        """
        if dtype is not None:
            arguments.dtype("dtype", dtype)
        if self._scaled:
            return self.weight.to_dense(self._dtype if dtype is None else dtype)
        return self.weight.to(dtype=dtype).to_dense()

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return a torch.nn.Linear with the dense weight and a copy of the bias.

        Raises:
            InvalidInput: For a layer with an activation, which a torch.nn.Linear has not.
        """
        if self.activation is not None:
            raise InvalidInput(
                f"this layer applies {self.activation!r}, and a torch.nn.Linear has no activation: set "
                "layer.activation = None, and put the activation behind the Linear"
            )
        weight = self.to_dense()
        made = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", weight.dtype)
        made.weight = nn.Parameter(saveable(weight.detach()))
        if self.bias is not None:
            made.bias = nn.Parameter(saveable(self.bias.detach().clone()))
        return made.train(self.training)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias uniformly from +-1 / sqrt(fan-in), where the fan-in of a row counts its stored elements.

        See `BlockSparseLinear.reset_parameters`. Pattern and metadata stay. FP8 values and scales are those of such
        values.

        Args:
            generator: A torch.Generator on the device of the values; torch's global one by default.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"generator is {arguments.shown(generator)}; it must be a torch.Generator or None"
            )
        pattern, share = self.pattern, 1 if self._kind == "bsr" else 2
        stored, *rest = (getattr(self, name, None) for name in (self._stored, "scale", "metadata"))
        weight = self._matrix(pattern, cast(Tensor, stored), *rest)
        inner = weight.matrix if self._scaled else weight
        if pattern is None:
            bound = (share / self.in_features) ** 0.5
            rows = torch.full((self.out_features,), bound, dtype=torch.float32, device=weight.device)
            of_values = rows[:, None]
        else:
            by_block = torch.from_numpy(bounds(pattern) * np.sqrt(share)).to(pattern.device, torch.float32)
            of_values = by_block.index_select(0, pattern.block_rows)[:, None, None]
            rows = by_block.repeat_interleave(pattern.block[0])[: self.out_features]
        if self._scaled:
            plain = torch.empty(inner.values.shape, dtype=torch.float32, device=weight.device)
            draw(plain, of_values, generator)
            whole = inner._each(lambda _: inside(inner, plain))
            made = quantize(whole, weight.dtype, weight.kind, check=False)
            self.codes.copy_(made.values)
            self.scale.copy_(made.scale)
        else:
            draw(self.values, inside(inner, of_values.to(weight.dtype)), generator)
        if self.bias is not None:
            draw(self.bias, rows.to(self.bias.dtype), generator)

    def __delattr__(self, name: str) -> None:
        if name == "values" and name in self._parameters:  # as parametrize does, which then fails at its name
            raise InvalidInput(
                'the stored values of a sparse layer stay: torch parametrizes no tensor of the name "values". '
                "Parametrize the dense layer and remove that before it becomes sparse, or use torch.nn.utils.prune"
            )
        super().__delattr__(name)

    def extra_repr(self) -> str:
        """Return the sizes, the storage and the activation, for `repr`."""
        words = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        words.append(TITLES[self._kind] + (" in FP8" if self._scaled else ""))
        if self._block is not None:
            words.append(f"block={self._block[0]}x{self._block[1]}, {len(self.indices)} blocks")
        words.append(f"bias={self.bias is not None}")
        return ", ".join(words if self.activation is None else [*words, f"activation={self.activation!r}"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply a conversion, as .to and .half do, which leaves pattern and metadata as they are, also .to_empty.

        On "meta" the layer keeps its pattern for the next real device. FP8 values and scales keep their dtypes.
        """
        before = {name: self._buffers.get(name) for name in ("indptr", "indices", "metadata")}
        pattern, fixed = self._valid_pattern(), [self._buffers.get(name) for name in ("codes", "scale")]
        before_conversion(self, pattern)

        def convert(x: Tensor) -> Tensor:
            made = fn(x)
            if made.dtype == x.dtype or all(each is not x for each in fixed):
                return made
            if x is fixed[0]:
                self._dtype = made.dtype
            return x.to(made.device)

        super()._apply(convert if self._scaled else fn, recurse)
        if pattern is not None and any(self._buffers.get(x) is not before[x] for x in ("indptr", "indices")):
            if not self.indptr.is_meta:
                pattern = pattern.to(self.indptr.device)
                self.indptr, self.indices = (part for _, part in copies(pattern))
            self._see(self._buffer("indptr"), self._buffer("indices"), pattern, new=True)
        old, meta = before["metadata"], self._buffers.get("metadata")
        if old is not None and meta is not None and meta is not old and not meta.is_meta:
            old, meta = (
                getattr(x, "_local_tensor", x) for x in (old, meta)
            )  # of a layer that is split over a mesh
            with torch.no_grad():
                meta.copy_(any_meta(meta) if old.is_meta else old)
        return self

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
        """Take over the weight of the state dict, with any number of blocks, if shape, storage and block are the same.

        `values` stays the same Parameter, as in `BlockSparseLinear`. Its gradient, and the state that an optimizer has
        for it, are of the old elements where metadata change: call optimizer.zero_grad(), and load the optimizer too.
        With assign=True, tensors that are not aligned to 16 bytes, as in a safetensors file, are copied.

        Wrong parts change nothing, and are reported like torch's own errors.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        current, pattern = self._valid_pattern(), None
        try:
            transforms.refuse("load_state_dict")
            parts = self._parts_in(state_dict, prefix)
            if parts:
                parts, pattern = self._checked_parts(parts, assign)
            if isinstance(bias := state_dict.get(prefix + "bias"), Tensor):
                arguments.dense("bias", bias)
        except InvalidInput as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")
            return
        values = parts.get("values")
        if values is not None and assign:
            self.values = nn.Parameter(values, self.values.requires_grad)
        elif values is not None and pattern is not None and (current is None or not current.same_as(pattern)):
            begin_anew(self.values, pattern)
        swaps = torch.__future__.get_swap_module_params_on_conversion()  # refuses tensors weakly referenced
        for name, part in parts.items():
            now = self._buffers.get(name)
            if now is not None and (swaps or now.shape != part.shape):
                self._buffers[name] = torch.empty(part.shape, dtype=now.dtype, device=now.device)
        super()._load_from_state_dict(
            {**unguarded(state_dict, prefix), **{prefix + name: part for name, part in parts.items()}},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if pattern is not None:
            here = getattr(self, self._stored).device
            if current is not None and current.device == pattern.device and current.same_as(pattern):
                pattern = current
            pattern = pattern if here.type == "meta" else pattern.to(here)
            self._see(self._buffer("indptr"), self._buffer("indices"), pattern, new=True, loads=True)

    def _parts_in(self, state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """The tensors of a weight in a state dict, by name."""
        lists = () if self._block is None else ("indptr", "indices")
        names = [x for x in (self._stored, "scale", "metadata") if x == self._stored or x in self._buffers]
        found = {x: state[prefix + x] for x in (*names, *lists) if prefix + x in state}
        if found and len(found) < len(names) + len(lists):
            raise InvalidInput(
                f"the state dict has {' and '.join(found)} only; {', '.join((*names, *lists))} go together"
            )
        return {name: arguments.tensor(name, part).detach() for name, part in found.items()}

    def _checked_parts(
        self, parts: dict[str, Tensor], assign: bool
    ) -> tuple[dict[str, Tensor], BlockPattern | None]:
        """The tensors of a state dict, readable if they are assigned, and their pattern, after all checks."""
        stored, own = parts[self._stored], getattr(self, self._stored)
        if self._scaled and stored.dtype != own.dtype:
            raise InvalidInput(f"codes are {stored.dtype}; this layer has {own.dtype}")
        if assign:
            if not self._scaled:
                arguments.dtype("the dtype of values", stored.dtype)
            parts = {
                x: saveable(operands.readable(part) if is_plain(part) else part) for x, part in parts.items()
            }
        if not all(is_plain(part) for part in parts.values()) or stored.is_meta:
            return parts, None
        where = stored.device if assign else torch.device("cpu") if own.is_meta else own.device
        here = {x: operands.readable(part.to(where)) for x, part in parts.items()}
        pattern = None
        if self._block is not None:
            lists = (here.pop(x).clone() for x in ("indptr", "indices"))
            pattern = BlockPattern((self.out_features, self.in_features), self._block, *lists)
        self._check(pattern, here[self._stored], here.get("scale"), here.get("metadata"))
        return parts, pattern
