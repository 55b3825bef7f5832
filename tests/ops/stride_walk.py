"""Walks an operation through the stride zoo: one operand in each layout in turn, by every kernel, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from tests.ops.operands import names_of
from tests.ops.strides import PlacedTensor, StrideLayout, layouts
from tests.sampling import SEED, sampled

CONTIGUOUS = torch.contiguous_format
# How far a result may be from float64, in units in the last place of its norm. The budgets are for fine errors; a
# stride that is read wrongly is wrong by a row, a column or an item, or NaN.
UNITS = {torch.float32: 32, torch.float16: 32, torch.bfloat16: 8}
# Around the step of an activation: how far a sum of a product and a bias may be off, in units of 1 + |bias|.
CROSSED = 1


class Sizes(NamedTuple):
    """A is m x k, B k x n; `batch` leads where a form has a batch."""

    m: int = 128
    k: int = 192
    n: int = 80
    batch: int = 3
    block: int = 64


Operands = dict[str, Tensor]
Shapes = dict[str, Sequence[int]]


@dataclass(frozen=True)
class Form:
    """One way to call an operation.

    `op` names the kernels to walk; "" for what has no kernels to choose. `make(sizes, dtype, device)` builds what is
    sparse, None for nothing. `shapes(sizes)` are the dense operands'. `call(sparse, operands, kernel)` returns a tensor
    or several. `learns`: operands with a gradient; `values`: the sparse matrix' values have one too. `grads` are the
    operands that are gradients of what `call` returns. `written`: an operand that the call writes. `refuses`: layouts,
    by operand, that InvalidInput may refuse.
    """

    name: str
    op: str
    make: Callable[[Sizes, torch.dtype, str], Any]
    shapes: Callable[[Sizes], Shapes]
    call: Callable[[Any, Operands, str | None], Any]
    learns: tuple[str, ...] = ()
    values: bool = False
    grads: tuple[str, ...] = ()
    written: str = ""
    refuses: dict[str, Callable[[StrideLayout, Tensor], bool]] = field(default_factory=dict)
    fp8: bool = False
    wide: tuple[str, ...] = ()  # operands in float32 (float64 for float64), whatever the others are
    exact: bool = False  # moves and rounds numbers only: bits are equal
    steps: bool = False  # its gradients have a step at 0, which a rounded sum with `bias` may cross

    def __str__(self) -> str:
        return self.name.replace(" ", "_").replace("@", "x").replace("+", "and")

    def kernels(self) -> tuple[str | None, ...]:
        """The planner's choice, and every kernel by its name."""
        return (None, *names_of(self.op)) if self.op else (None,)


def run(form: Form, sparse: Any, given: Operands, kernel: str | None) -> dict[str, Tensor]:
    """What the form gives: its outputs, and their gradients where it has some."""
    with torch.no_grad():
        plain = _listed(form.call(sparse, given, kernel))
    found = {f"output {i}": x for i, x in enumerate(plain)}
    if not form.grads:
        return found
    leaves = {name: given[name].detach().requires_grad_() for name in form.learns}
    if form.values:
        matrices = sparse if isinstance(sparse, tuple) else (sparse,)
        made = tuple(sk.BSR(a.pattern, a.values.detach().requires_grad_(), a.order) for a in matrices)
        leaves |= {f"values {i}": a.values for i, a in enumerate(made)}
        sparse = made if isinstance(sparse, tuple) else made[0]
    outputs = _listed(form.call(sparse, {**given, **leaves}, kernel))
    found |= {f"output {i} with gradients": x.detach() for i, x in enumerate(outputs)}
    grads = torch.autograd.grad(
        outputs[: len(form.grads)], tuple(leaves.values()), [given[g] for g in form.grads]
    )
    return found | {f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}


def _listed(made: Any) -> list[Tensor]:
    parts = made if isinstance(made, tuple) else (made,)
    return [x.values if isinstance(x, sk.BSR | sk.Semi24) else x for x in parts]


class Setting(NamedTuple):
    """A form's matrix and contiguous operands of one size and dtype, with what they should give and how well."""

    sparse: Any
    given: dict[str, PlacedTensor]
    shapes: Shapes


def operand_dtype(form: Form, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if name in form.wide else dtype


def setting(
    form: Form, sizes: Sizes, dtype: torch.dtype, device: str, draw: torch.Generator
) -> Setting | None:
    """None where the form has no such sizes."""
    try:
        sparse = form.make(sizes, dtype, device)
    except InvalidInput:
        return None
    shapes = form.shapes(sizes)
    given = {
        name: _placed(form, name, next(layouts(shape)), shape, dtype, device, draw)
        for name, shape in shapes.items()
    }
    return Setting(sparse, {name: x for name, x in given.items() if x is not None}, shapes)


def _placed(
    form: Form,
    name: str,
    layout: StrideLayout,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    draw: torch.Generator,
) -> PlacedTensor | None:
    return layout.place(shape, operand_dtype(form, name, dtype), device, draw)


class Outcome(NamedTuple):
    """What came of one call: "right", "refused" or what is wrong."""

    form: str
    kernel: str
    operand: str
    layout: str
    sizes: Sizes
    result: str
    text: str = ""


def walk(
    form: Form,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    kernels: Sequence[str | None],
    zoo: Callable[[StrideLayout], bool] = lambda layout: True,
    share: float = 1.0,
) -> Iterator[Outcome]:
    """Each operand in each layout in turn, the others contiguous, by each kernel that takes the contiguous ones.

    With a `share`, only the contiguous layout and that share of the others, drawn anew in every run (sampling.py).
    """
    draw = torch.Generator().manual_seed(crc32(f"{SEED} {form} {sizes}".encode()))
    base = setting(form, sizes, dtype, device, draw)
    if base is None:
        return
    able = [kernel for kernel in kernels if _can(form, base, kernel)]
    every = [
        (name, shape, layout)
        for name, shape in base.shapes.items()
        for layout in layouts(shape)
        if zoo(layout)
    ]
    others = sampled(every[1:], ceil(share * (len(every) - 1)), of=(str(form), sizes, kernels))
    for name, shape, layout in (*every[:1], *others):
        placed = _placed(form, name, layout, shape, dtype, device, draw)
        assert placed is not None
        given = {**base.given, name: placed}
        truths: dict[str, Truth] = {}
        for kernel in able:
            fresh = {key: each.again() for key, each in given.items()}
            where = str(form), kernel or "chosen", name, layout.name, sizes
            try:
                found = run(form, base.sparse, {key: each.x for key, each in fresh.items()}, kernel)
            except (InvalidInput, Unsupported) as error:
                may = form.refuses.get(name, lambda *_: False)(layout, placed.x)
                fine = may if isinstance(error, InvalidInput) else kernel is not None
                yield Outcome(*where, "refused" if fine else "refused without a reason to", str(error))
                continue
            except RuntimeError as error:
                yield Outcome(*where, "raised", str(error))
                if "CUDA error" in str(error) and "CUBLAS" not in str(error):
                    return  # nothing runs in this process any more
                continue
            truths = truths or _truths(form, base.sparse, given)
            wrong = [text for key, truth in truths.items() if (text := _wrong(form, key, found[key], *truth))]
            wrong += [
                f"wrote around or over {key}"
                for key, each in fresh.items()
                if not each.untouched(written=key == form.written)
            ]
            yield Outcome(*where, "wrong" if wrong else "right", "; ".join(wrong))


def _can(form: Form, base: Setting, kernel: str | None) -> bool:
    if kernel is None:
        return True
    try:
        run(form, base.sparse, {key: each.again().x for key, each in base.given.items()}, kernel)
    except (InvalidInput, Unsupported):
        return False
    return True


class Truth(NamedTuple):
    """What is exact, and the norm of what roundings of a sum may add to it or take away."""

    exact: Tensor
    crossed: float = 0.0


def _truths(form: Form, sparse: Any, given: dict[str, PlacedTensor]) -> dict[str, Truth]:
    """By the reference on contiguous copies, in float64 where the form does not round its operands."""
    reference = next((name for name in form.kernels() if name and name.startswith("reference.")), None)
    copies = {name: each.x.clone(memory_format=CONTIGUOUS) for name, each in given.items()}
    if not form.exact and not form.fp8:
        sparse = tuple(map(_in_float64, sparse)) if isinstance(sparse, tuple) else _in_float64(sparse)
        copies = {name: x.double() for name, x in copies.items()}
    truths = {name: Truth(x.double()) for name, x in run(form, sparse, copies, reference).items()}
    if form.steps:
        bias = copies["bias"]
        reach = CROSSED * torch.finfo(given["bias"].x.dtype).eps * (1 + bias.abs())
        low, high = (run(form, sparse, {**copies, "bias": bias + way * reach}, reference) for way in (-1, 1))
        for name in [name for name in truths if name.startswith("gradient")]:
            crossed = float((high[name].double() - low[name].double()).norm())
            truths[name] = truths[name]._replace(crossed=crossed)
    return truths


def _in_float64(sparse: Any) -> Any:
    return sparse.to(dtype=torch.float64) if hasattr(sparse, "values") else sparse


def _wrong(form: Form, name: str, found: Tensor, exact: Tensor, crossed: float) -> str:
    if found.shape != exact.shape:
        return f"{name} has shape {list(found.shape)}, not {list(exact.shape)}"
    size, off = float(exact.norm()), float((found.double() - exact).norm())
    allowed = crossed
    if not form.exact:
        scale = max(size, exact.numel() ** 0.5)  # numbers of about 1 are added, and may cancel
        allowed += UNITS[found.dtype] * torch.finfo(found.dtype).eps * scale
    return "" if off <= allowed else f"{name} is off by {off:.3g} of {size:.3g}, allowed {allowed:.3g}"
