"""Packed experts, as transformers holds those of Mixtral or Qwen-MoE: the weights of all of them in one Parameter.

    experts.gate_up_proj [E, 2F, D], experts.down_proj [E, D, F]

A sparse weight of all experts is one SparseLinear [E * 2F, D] in the place of the Parameter, with the weights of expert
after expert. Its rows of one expert are a matrix on views of its tensors. The module keeps its class, in a subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import untransformed
from sparsek.nn.gated import Fitted, activation_of, may_fuse
from sparsek.nn.indices import SAVED, guard
from sparsek.nn.regrow import record
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats.algebra import cut_rows
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import block_sides
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import owner_of
from sparsek.products.ops.linear import gated, linear
from sparsek.products.ops.weight_formats import DENSE_BLOCK, WeightFormat

FACTS = (
    "num_experts",
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
)  # of transformers' experts
LEAST_TOKENS = 16  # of an expert: fewer cost as much
INT64_MAX = torch.iinfo(torch.int64).max
STEP = 16  # rows of a 2:4 matrix whose parts begin at whole 16 bytes


def packed_names(module: Any) -> tuple[str, ...]:
    """The names of the weights of packed experts; () for another module."""
    if not all(name in module.__dict__ for name in FACTS):
        return ()
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    weights = [module._parameters.get(name, module._modules.get(name)) for name in names]
    if any(each is None or (isinstance(each, Tensor) and _misfits(module, each)) for each in weights):
        return ()
    return names


def _misfits(module: Any, weight: Tensor) -> bool:
    return weight.ndim != 3 or weight.shape[0] != module.num_experts


class PackedLinear(nn.Linear):
    """The weights of all experts in one Parameter as one linear layer [E * out_features, in_features].

    It stands for the layer where its config is chosen, and is in no model.
    """

    bias: Any = None
    experts: Any

    def __init__(self, experts: Any, name: str) -> None:
        nn.Module.__init__(self)
        self.name = name
        self.__dict__["experts"] = experts  # no child
        packed = experts._parameters[name]
        self.shape: tuple[int, ...] = tuple(packed.shape)
        if experts.is_transposed:
            self.shape = (self.shape[0], self.shape[2], self.shape[1])
        _, self.out_features, self.in_features = self.shape
        self.training = experts.training

    @property
    def packed(self) -> Tensor:
        """The Parameter."""
        return self.experts._parameters[self.name]

    @property
    def weight(self) -> Any:
        """The weights of expert after expert, in two dimensions: a view, or a copy of transposed ones."""
        packed = self.packed
        weight = packed.detach().mT if self.experts.is_transposed else packed.detach()
        return nn.Parameter(weight.reshape(-1, self.in_features), packed.requires_grad)

    @property
    def biases(self) -> Any:
        """The Parameter of all biases [E, out_features], which the module adds; None without."""
        return self.experts._parameters[f"{self.name}_bias"] if self.experts.has_bias else None

    @property
    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """The weight [out_features, in_features] and bias of each expert: views."""
        packed = self.packed.detach()
        weights = packed.mT if self.experts.is_transposed else packed
        biases = [None] * len(weights) if self.biases is None else self.biases.detach().unbind()
        return list(zip(weights.unbind(), biases, strict=True))

    def inputs(self, x: Tensor, expert: int) -> Tensor:
        """What an expert multiplies by this weight, of tokens x [n, D]."""
        own, (first, _) = self.experts, packed_names(self.experts)
        return x if self.name == first else _activated(own, x, expert, _rows(own, first, own.num_experts))


def routes_of(experts: Any) -> int:
    """The number of experts of a token."""
    return getattr(getattr(experts, "config", None), "num_experts_per_tok", None) or 1


def why_not_packed(layer: PackedLinear) -> str:
    """Why packed experts may not become sparse, whatever the config; "" if they may."""
    experts, packed = layer.experts, layer.packed
    if "forward" in experts.__dict__:
        return f"is of {type(experts).__name__} with a forward of its own"
    if is_parametrized(experts):
        return f"is of {type(experts).__name__} with a parametrization; remove it first"
    if type(packed) is not nn.Parameter or type(packed.data) is not Tensor:
        return f"has a weight of class {type(packed).__name__}"
    return "is spread over processes" if getattr(experts, "_is_expert_parallel", False) else ""


def why_no_packed_fit(layer: PackedLinear, form: WeightFormat) -> str:
    """Why the rows of an expert are no matrix of their own in a format; "" if they are."""
    sides = (
        (STEP, STEP)
        if form.base == "semi24"
        else block_sides(DENSE_BLOCK if form.base == "dense" else form.block)
    )
    if layer.out_features % sides[0] == 0:
        return ""
    return f"has experts of {layer.out_features} rows, no multiple of {sides[0]}"


def repacked(experts: Any, weight: Tensor, learns: bool) -> nn.Parameter:
    """The Parameter of the weights of expert after expert [E * R, K]."""
    packed = weight.reshape(experts.num_experts, -1, weight.shape[1])
    return nn.Parameter(packed.mT.contiguous() if experts.is_transposed else packed, learns)


def split_rows(w: Any, count: int) -> list[Any]:
    """A matrix [count * R, K] as `count` matrices [R, K] on views of its tensors. Differentiable."""
    if isinstance(w, Quantized):
        parts = split_rows(w.matrix, count)
        if w.kind == "tensor":
            scales = [w.scale] * count
        elif w.kind == "row":
            scales = w.scale.view(count, -1).unbind(0)
        else:
            scales = w.scale.split([len(each.values) for each in parts])
        return [
            Quantized.unchecked(part, scale, w.kind, w.fast_accum)
            for part, scale in zip(parts, scales, strict=True)
        ]
    if isinstance(w, Semi24):
        sizes = [len(w.values) // count] * count
        return [
            Semi24.unchecked(*each) for each in zip(w.values.split(sizes), _cut(w.meta, sizes), strict=True)
        ]
    pattern = w.pattern
    rows = pattern.grid[0] // count
    patterns = pattern.derived(
        ("rows", count), lambda: [cut_rows(pattern, at * rows, (at + 1) * rows) for at in range(count)]
    )
    sizes = [each.nnzb for each in patterns]
    parts = [patterns, w.values.split(sizes)]
    if not isinstance(w, BSR):
        parts.append(_cut(w.meta, sizes))
    return [type(w).unchecked(*each) for each in zip(*parts, strict=True)]


def _cut(meta: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Parts of metadata: views, kept as long as it is in the same memory, and cut alike."""
    kept: dict[Any, Any] = owner_of(meta).derived("parts", dict)
    place = meta.data_ptr(), *sizes
    if place not in kept:
        kept.clear()
        with torch.inference_mode(False):
            kept[place] = untransformed(lambda: meta.split(sizes))
    return kept[place]


def padded(count: int) -> int:
    """A number of tokens, rounded up by 15 or a quarter at most: there is a plan for each number of tokens."""
    step = max(LEAST_TOKENS, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


class SparseExperts(Fitted):
    """Packed experts with sparse weights, or one of them sparse. Each expert multiplies its tokens.

    A call waits for the device once, for the number of tokens of each.
    """

    @staticmethod
    def fits(module: nn.Module, base: type[nn.Module]) -> bool:
        """Whether a module is packed experts with a sparse weight."""
        if is_parametrized(module):
            return False
        return any(isinstance(module._modules.get(name), SparseLinear) for name in packed_names(module))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in packed_names(self):
            _check_weight(self, name, value)
        super().__setattr__(name, value)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what the experts of each token compute.

        Args:
            hidden_states: [T, D].
            top_k_index: [T, k], the experts of each token; other numbers, such as that of the experts, stand for none.
            top_k_weights: [T, k].
        """
        if "torch._dynamo" not in sys.modules:
            return weighted_sum(self, hidden_states, top_k_index, top_k_weights)
        if not UNTRACED:  # numbers of tokens are no constants of a graph: it runs between two
            UNTRACED.append(torch.compiler.disable(weighted_sum))
        return UNTRACED[0](self, hidden_states, top_k_index, top_k_weights)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if SAVED.get():  # the Parameter of the dense module must not be missing only
            destination.update({prefix + name: guard() for name in self._sparse()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **options: Any) -> None:
        guards = {prefix + name for name in self._sparse()}
        own = {name: each for name, each in state_dict.items() if name not in guards or each.shape != (0,)}
        super()._load_from_state_dict(own, prefix, *args, **options)  # type: ignore[misc]

    def _sparse(self) -> list[str]:
        """The names of the sparse weights."""
        return [name for name in packed_names(self) if name in self._modules]  # type: ignore[attr-defined]

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Where accelerate moves weights in and out of every call, do so here too: the layers are not called."""
        own: Any = self
        moved = [each for name in self._sparse() if hasattr(each := own._modules[name], "_hf_hook")]
        with ExitStack() as after:
            for layer in moved:
                layer._hf_hook.pre_forward(layer)
                after.callback(layer._hf_hook.post_forward, layer, None)
            yield

    def _experts(self, x: Tensor) -> Any:
        """What one expert computes of its tokens, as a function of them and of its index."""
        own: Any = self
        first, last = packed_names(self)
        act, count = self._gate(x, _weight(self, first)), own.num_experts
        with self._at_hand():
            parts, outs = _rows(self, first, count if act is None else 2 * count), _rows(self, last, count)

        def through(part: Tensor, expert: int) -> Tensor:
            if act is not None:
                hidden = gated(part, parts[2 * expert], parts[2 * expert + 1], act)
            else:
                hidden = _activated(self, part, expert, parts)
            made = _product(self, hidden, last, expert, outs[expert])
            return own.post_expert_norm(made) if getattr(own, "has_post_expert_norm", False) else made

        return through

    def _gate(self, x: Tensor, layer: Any) -> Any:
        """The activation with which gate and up are one fused product; None where they are not."""
        own: Any = self
        moe = sys.modules.get("transformers.integrations.moe")
        if not (own.has_gate and own.is_concatenated) or own.has_bias or not isinstance(layer, SparseLinear):
            return None
        if type(own)._apply_gate is not getattr(moe, "_default_apply_gate", None):
            return None
        half = layer.out_features // (2 * getattr(own, "all_experts", own.num_experts))  # of all ranks
        if half % (STEP if layer._block is None else layer._block[0]) or not may_fuse(x, layer):
            return None
        return activation_of(own._modules.get("act_fn"))


def _weight(experts: Any, name: str) -> Any:
    """A sparse layer, or a Parameter."""
    return _check_weight(experts, name, experts._modules.get(name, experts._parameters.get(name)))


def _check_weight(experts: Any, name: str, found: Any) -> Any:
    if not isinstance(found, SparseLinear | Tensor):
        raise InvalidInput(
            f"{name} of {type(experts).__name__} would be a {type(found).__name__}, and packed experts take no adapter "
            "there: leave it out, for example of LoRA's target_modules, or call sk.densify_ and use target_parameters"
        )
    return found


def _rows(experts: Any, name: str, count: int) -> Any:
    """The weights of experts, or halves of them."""
    weight = _weight(experts, name)
    if isinstance(weight, SparseLinear):
        if weight.activation is not None:
            raise InvalidInput(
                f"{name} applies {weight.activation!r}, and packed experts have an activation of their own: set that "
                f"of {name} to None"
            )
        pruned = weight._parameters.get("pruned")
        if pruned is not None and pruned.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(
                f"{name} has pruned elements that learn (keep_pruned), and those of packed experts get no gradient: "
                f"set pruned of {name} to None; choose_again(scores) needs none"
            )
        return split_rows(weight.weight, count)
    return weight.mT if experts.is_transposed else weight


def _product(experts: Any, x: Tensor, name: str, expert: int, weight: Any) -> Tensor:
    y = linear(x, weight, experts._parameters[f"{name}_bias"][expert] if experts.has_bias else None)
    record(experts._modules.get(name), x, y, expert * y.shape[-1])
    return y


def _activated(experts: Any, x: Tensor, expert: int, weights: Any) -> Tensor:
    """What an expert computes of its tokens by its first weight."""
    hidden = _product(experts, x, packed_names(experts)[0], expert, weights[expert])
    return experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)


def weighted_sum(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, counts: Any = None
) -> Tensor:
    """What the experts of each token compute, weighted and added up. See `SparseExperts.forward`.

    `counts`: the number of tokens of each expert, where the host has them.
    """
    count, top = experts.num_experts, top_k_index.shape[-1]
    ids = top_k_index.reshape(-1).long() & INT64_MAX  # negative ones are then beyond all experts
    order = ids.argsort(stable=True)
    if counts is None:
        counted = ids.new_zeros(count + 1).scatter_add_(0, ids.clamp(max=count), torch.ones_like(ids))
        counts = counted.tolist()[:count]  # waits for the device, and bincount would wait twice
    order = order[: sum(counts)]
    sizes = [padded(each) for each in counts]
    shifts, shift = [], 0
    for size, each in zip(sizes, counts, strict=True):
        shifts.append(shift)
        shift += size - each
    staged = torch.tensor(shifts, device="cpu", pin_memory=ids.is_cuda)
    ahead = staged.to(ids.device, non_blocking=True)[ids[order]]
    places = torch.arange(len(order), device=ids.device) + ahead
    rows = ids.new_zeros(sum(sizes), dtype=torch.int64).index_copy(0, places, order // top)
    x = hidden_states[rows]
    through, parts = experts._experts(hidden_states), x.split(sizes)
    busy = [expert for expert in range(count) if counts[expert]] or [
        0
    ]  # one: for its checks, and for gradients
    done = [through(parts[expert], expert) for expert in busy]
    y = torch.cat(done)[places] * top_k_weights.reshape(-1)[order, None]
    y = y.new_zeros(len(ids), y.shape[1]).index_copy(0, order, y)
    return y.view(len(top_k_index), top, y.shape[1]).sum(1).to(hidden_states.dtype)


UNTRACED: list[Any] = []  # `weighted_sum` for torch.compile
