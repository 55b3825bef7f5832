"""The tensors of a sparse weight as buffers of a layer, which follows them when they are replaced or written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import saveable, unmapped, untransformed
from sparsek.nn.parameter import PLAIN, BufferPattern, History, follow, note_pattern
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops.library_args import remember
from sparsek.products.plan import operands

SEEN = 4  # patterns that a layer remembers by their tensors
DENSE = "put torch.nn.Linear with layer.weight.to_dense() in its place"
NOT_TORCHSCRIPT = "torch.jit.{} cannot take a {}; use torch.compile or torch.export, or " + DENSE
NOT_ONNX = "ONNX has no sparse product; for torch.onnx.export " + DENSE


class CheckedTensor(NamedTuple):
    """A tensor that was checked: whether it is this one, unchanged."""

    tensor: Callable[[], Tensor | None]
    version: int
    address: int

    @classmethod
    def of(cls, x: Tensor | None) -> CheckedTensor:
        """Note this one. A reference would keep an offloaded tensor on the GPU.

        Wrapped ones have no address, and writes to those of inference mode are not counted.
        """
        if x is None or is_functorch_wrapped_tensor(x) or x.is_inference():
            return NOT_CHECKED
        return cls(weakref.ref(x), x._version, x.data_ptr())

    def holds(self, x: Tensor) -> bool:
        """Whether this is the tensor, unchanged."""
        return self.tensor() is x and x._version == self.version and x.data_ptr() == self.address


DTYPES = {
    "indptr": torch.int32,
    "indices": torch.int32,
    "metadata": torch.uint8,
    "scale": torch.float32,
}
NOT_CHECKED = CheckedTensor(lambda: None, 0, 0)


def is_plain(x: Any) -> bool:
    return type(x) in PLAIN and not is_functorch_wrapped_tensor(x)


@torch.inference_mode(False)
def copies(pattern: BlockPattern) -> list[tuple[str, Tensor]]:
    """The names and contents of the buffers of a layer. Writing to them leaves the pattern as it is."""
    return untransformed(lambda: [("indptr", pattern.indptr.clone()), ("indices", pattern.indices.clone())])


# Models that a saver of another library is writing: state dicts then have guards.
SAVED: ContextVar[tuple[nn.Module, ...]] = ContextVar("saved", default=())


def guard() -> Tensor:
    """What a checkpoint has as the `weight` of a sparse layer. It fits no dense layer: loaders that know nothing of
    SparseK find that sizes mismatch, where missing names alone would only be a warning. It has memory of its own: of
    tensors in one place, or in none, accelerate saves the first alone.
    """
    return torch.empty(1, dtype=torch.uint8, device="cpu")[:0]


def unguarded(state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """A state dict without the guard of a layer."""
    found = state.get(prefix + "weight")
    if not isinstance(found, Tensor) or found.shape != (0,):
        return state
    return {name: part for name, part in state.items() if name != prefix + "weight"}


class IndexedLayer(nn.Module):
    """A layer of a sparse weight: of `indptr` and `indices`, if it has blocks, and of values, scales and metadata.

    `_stored` is the name of its values; they are no Parameter if `_scaled`, in FP8. `_block`: the sides of its blocks.
    """

    out_features: int
    in_features: int
    indptr: Tensor
    indices: Tensor
    _block: tuple[int, int] | None
    _stored = "values"
    _kind: str
    _scaled: str = ""
    _seen: tuple[BufferPattern, ...]
    _checked: tuple[CheckedTensor, CheckedTensor]
    _savers_know: ClassVar[Any] = staticmethod(lambda: True)  # see savers.py

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make a layer, also for a copy or a pickle, which the savers of other libraries know from now on."""
        cls._savers_know()
        return super().__new__(cls)

    @property
    def pattern(self) -> Any:
        """The BlockPattern of the weight, which is that of `indptr` and `indices`; None for a weight without blocks.

        Reading it synchronizes once after they have changed.

        Raises:
            InvalidInput: If `indptr` and `indices` are no pattern of this layer.
        """
        if self._block is None:
            return None
        if torch.compiler.is_compiling():  # the buffers are inputs of the graph
            shape = self.out_features, self.in_features
            return BlockPattern.unchecked(shape, self._block, self.indptr, self.indices)
        if self._seen:
            seen, buffers = self._seen[0], self._buffers
            same = id(self._parameters.get("values")) == seen.values
            if same and seen.holds(buffers.get("indptr"), buffers.get("indices")):
                return seen.pattern
        return self._look()

    @property
    def block(self) -> tuple[int, int] | None:
        """The sides (bm, bk) of a block of the weight; None for a weight without blocks."""
        return self._block

    def _traced(self, pattern: Any) -> Any:
        """The pattern; under a dispatch mode on the buffers, which a graph has as inputs."""
        if pattern is None or not torch._C._len_torch_dispatch_stack() or self.indptr.is_meta:
            return pattern
        parts = (unmapped(name, self._buffer(name)) for name in ("indptr", "indices"))
        return BlockPattern.unchecked(pattern.shape, pattern.block, *parts)

    def _look(self) -> BlockPattern:
        """The pattern of buffers that are other tensors than in the last call, or were written to."""
        block: Any = self._block
        indptr, indices = (unmapped(name, self._buffer(name)) for name in ("indptr", "indices"))
        for seen in self._seen:
            if not seen._replace(new=False).holds(indptr, indices):
                continue
            if seen.new and indptr.is_cuda and torch.cuda.is_current_stream_capturing():
                return seen.pattern
            with _disable_current_modes():
                if not seen.new or untransformed(seen.is_in_memory):
                    return self._see(indptr, indices, seen.pattern)
        parts = indptr, indices, getattr(self, self._stored, None)
        if all(isinstance(each, Tensor) and each.is_meta for each in parts):  # moved out, as by accelerate
            for seen in self._seen:
                if seen.pattern.indptr.shape == indptr.shape and seen.pattern.indices.shape == indices.shape:
                    return seen.pattern
        if isinstance(indptr, Tensor) and type(indptr) not in PLAIN:  # fake, or traced in another way
            arguments.dtype("the dtype of indices", getattr(indices, "dtype", None), (torch.int32,))
            return BlockPattern.unchecked((self.out_features, self.in_features), block, indptr, indices)
        with _disable_current_modes():
            found = untransformed(lambda: self._read(indptr, indices))
        return self._see(indptr, indices, found)

    def _buffer(self, name: str) -> Any:
        """A buffer. One of inference mode, where torch counts no writes, is replaced by a copy; and so are metadata and
        scales that kernels cannot read in place, as those of a file.
        """
        part: Any = getattr(self, name, None)
        if part is None:
            return None
        arguments.dense(name, part)
        if not is_plain(part):
            arguments.dtype(f"the dtype of {name}", part.dtype, (DTYPES[name],))
        if self._buffers.get(name) is not part or not is_plain(part):
            return part
        if name in ("scale", "metadata") and not part.is_meta and not operands.is_readable(part):
            part = self._buffers[name] = untransformed(lambda: operands.readable(part))
        if part.is_inference():
            part = self._buffers[name] = untransformed(lambda: saveable(part))
        return part

    def _own_values(self, pattern: BlockPattern | None) -> Tensor:
        """The values, contiguous. InvalidInput unless they are dense, and as many as the weight stores."""
        name, share = self._stored, 1 if self._kind == "bsr" else 2
        values: Any = (self._buffers if self._scaled else self._parameters).get(name)
        if values is None:  # last, because __getattr__ is slow
            values = getattr(self, name, None)
        if type(values) not in PLAIN or values.layout is not torch.strided or values.is_nested:
            values = arguments.dense(name, values)
        if pattern is None:
            sizes: tuple[int, ...] = (self.out_features, self.in_features // share)
        else:
            sizes = (pattern.indices.shape[0], pattern.block[0], pattern.block[1] // share)
        if values.shape != sizes:
            raise InvalidInput(f"{name} are {list(values.shape)}; the weight of this layer has {list(sizes)}")
        if not values.is_contiguous() and not torch._C._are_functorch_transforms_active():
            values = values.contiguous()
        return values

    @torch.inference_mode(False)
    def _read(self, indptr: Tensor, indices: Tensor) -> BlockPattern:
        """The pattern of new contents of the buffers, checked with one sync; a known object if it is equal."""
        try:
            for name, part in (("indptr", indptr), ("indices", indices)):
                arguments.tensor(name, part, (torch.int32,), ndim=1)
            if indptr.is_cuda and torch.cuda.is_current_stream_capturing():
                raise InvalidInput("they have changed; call the layer before a CUDA graph is captured")
            # Copies: the next write must change neither a pattern that others share nor one that a loss has saved.
            own = (x.detach().clone(memory_format=torch.contiguous_format) for x in (indptr, indices))
            block: Any = self._block
            found = BlockPattern((self.out_features, self.in_features), block, *own)
            values = getattr(self, self._stored)
            shape = (found.nnzb, *found.block)
            if arguments.is_ordinary(values) and values.device == found.device and values.shape == shape:
                self._refuse_outside(found, values.detach())
        except InvalidInput as error:
            raise InvalidInput(f"indptr and indices of this {type(self).__name__}: {error}") from None
        known = (x.pattern for x in self._seen)
        return next((x for x in known if x.device == found.device and x.same_as(found)), found)

    def _refuse_outside(self, pattern: BlockPattern, values: Tensor) -> None:
        """InvalidInput if values, which fit the pattern, are not zero outside the weight."""
        if pattern.is_ragged:
            self._checked = NOT_CHECKED, NOT_CHECKED  # by the next call, with all other parts

    def _see(
        self,
        indptr: Tensor,
        indices: Tensor,
        pattern: BlockPattern,
        new: bool = False,
        loads: bool = False,
    ) -> BlockPattern:
        """Note that the buffers have this pattern, and that `values` are of it.

        `new`: the next call compares contents, if a GPU has them: a broadcast into new buffers leaves no trace.
        `loads`: load_state_dict gave the pattern.
        """
        values: Any = None if self._scaled else getattr(self, self._stored)
        state = contents = None
        plain = is_plain(indptr) and is_plain(indices)
        if plain:
            state = indptr._version, indices._version, indptr.data_ptr(), indices.data_ptr()
        if plain and indptr.is_cpu and indices.is_cpu:
            rows, columns = pattern.host
            with _disable_current_modes():
                views = untransformed(lambda: (indptr.numpy(), indices.numpy()))
            contents = views[0], rows.tobytes(), views[1], columns.tobytes()
        made = BufferPattern(indptr, indices, state, pattern, id(values), contents)
        made = made.again() if new else made
        others = [x for x in self._seen if not (x.indptr is indptr and x.indices is indices)]
        self._seen = (made, *others)[:SEEN]
        if isinstance(values, nn.Parameter):
            note_pattern(self, values, pattern, loads)
        if plain and not indptr.is_meta and not made.new:
            remember(indptr, indices, pattern, replace=True)  # compiled graphs then share its plans
        return pattern

    def _valid_pattern(self) -> BlockPattern | None:
        """The pattern, or None while the buffers are none, for example between two assignments of a loader.

        Contents on a GPU are compared, with one sync.
        """
        if self._block is None:
            return None
        self._seen = tuple(seen.again() for seen in self._seen)
        with suppress(InvalidInput):
            return self.pattern
        return None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A library that was imported after the layer was made may be saving it.
        if SAVED.get() or (not self._savers_know() and prefix):
            destination[prefix + "weight"] = guard()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, with the pattern, which deepcopy shares."""
        state = {**self.__dict__, "_seen": self._valid_pattern(), "_history": None, "_checked": None}
        codes = self._buffers.get("codes")
        if codes is not None:  # pickle, without torch.save, takes no tensor in FP8
            state["_buffers"] = {**self._buffers, "codes": (codes.view(torch.uint8), codes.dtype)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        pattern, buffers = state.get("_seen"), dict(state["_buffers"])
        if "codes" in buffers:
            buffers["codes"] = buffers["codes"][0].view(buffers["codes"][1])
        begin = {
            "_buffers": buffers,
            "_seen": (),
            "_history": History(),
            "_checked": (NOT_CHECKED, NOT_CHECKED),
        }
        super().__setstate__({**state, **begin})
        follow(self)
        if pattern is not None:
            self._see(self._buffer("indptr"), self._buffer("indices"), pattern, new=True)

    # torch calls this in place of forward under torch.jit.trace, and so in torch.onnx.export(dynamo=False).
    def _slow_forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = type(self).__name__
        raise InvalidInput(
            NOT_ONNX if torch.onnx.is_in_onnx_export() else NOT_TORCHSCRIPT.format("trace", name)
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise InvalidInput(NOT_TORCHSCRIPT.format("script", type(self).__name__))
