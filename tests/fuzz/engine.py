"""Calls of public functions with odd arguments: each raises one of SparseK's errors or returns a right result.

A `Call` knows how to make a function and valid arguments for it. `attack` draws calls in which one to three arguments
are replaced:
- by another form of the same value (np.int64(64) for 64, a tensor with other strides): the result must be the one of
  the plain value, or an error;
- by a spoiled form (the same tensor in int64, with one dim more, with NaN): the result must be sound, and there must be
  none where the form is one of `REFUSED`;
- by something else (None, 10**30, a dict, an object whose repr raises): if it is of another sort than the valid value
  it must be refused, unless `also` names that sort for that argument.
Half of the calls are made in a context (contexts.py), where the result must only be sound.

A result is sound if the checked constructors accept it. The draws follow from the seed and the name of the call alone.
"""

from __future__ import annotations

import enum
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

import sparsek as sk
from sparsek.core.errors import SparseKError
from tests.fuzz import contexts
from tests.sampling import EVERY

CALLS = "SPARSEK_FUZZ_CALLS"  # this environment variable sets how many calls of each function are drawn
SEED = "SPARSEK_FUZZ_SEED"  # and this one the seed of the draws, 0 by default
LONGEST = 700  # characters of an error's text

Made = tuple[Callable[..., Any], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """One public function. `make` gives it, or a method of a fresh object, and valid arguments by name.

    `also` says which sorts (see `sort_of`) an argument takes besides that of the valid value: {"block": "int pair"};
    "meta": a tensor on the meta device too.
    `every` is for slow functions: only one of so many draws is made. `errors` are those that others raise on purpose,
    such as FileNotFoundError.
    """

    make: Callable[[Random], Made]
    also: Mapping[str, str] = field(default_factory=dict)
    every: int = 1
    errors: tuple[type[Exception], ...] = ()


def count_of(default: int) -> int:
    """How many calls of each function to draw: the first twelfth where not every test runs (sampling.py)."""
    return int(os.environ.get(CALLS, default if EVERY else default // 12))


def attack(name: str, call: Call, count: int, seed: int | None = None) -> list[str]:
    """What went wrong in `count` drawn calls, a line each; the same faults once. `seed`: that of the environment."""
    seed = int(os.environ.get(SEED, "0")) if seed is None else seed
    faults: dict[str, str] = {}
    for at in range(max(count // call.every, 1)):
        found = _one(call, f"{name} {seed} {at}")
        if found is not None:
            kind, drawn = found
            faults.setdefault(kind, f"{name}({drawn}): {kind}  [draw {at}]")
    return list(faults.values())


def _one(call: Call, key: str) -> tuple[str, str] | None:
    """The fault of one drawn call and its odd arguments in words, or None."""
    random = Random(key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, arguments = call.make(Random(key))
        names = random.sample(sorted(arguments), min(random.choice((1, 1, 1, 2, 3)), len(arguments)))
        drawn = {name: _drawn(random, arguments[name]) for name in names}
        context = contexts.drawn(random)
        fault = _fault(call, key, function, arguments, drawn, context)
    told = ", ".join(f"{name}={odd.label}" for name, odd in drawn.items()) + (context and f", in {context}")
    return None if fault is None else (fault, told)


def _fault(
    call: Call,
    key: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    drawn: dict[str, Odd],
    context: str,
) -> str | None:
    """What is wrong with what the call raises or returns in a context, or None."""
    given = {**arguments, **{name: odd.value for name, odd in drawn.items()}}
    try:
        result = contexts.run(context, Random(key), function, given)
        sound(result)
    except call.errors:
        return None
    except SparseKError as error:
        text = str(error)
        return f"an error of {len(text)} characters: {text[:200]}" if len(text) > LONGEST else None
    except Unsound as error:
        return f"an unsound result: {error}"
    except Exception as error:  # whatever is not ours is a fault
        if context in contexts.TRANSFORMS and not _inside_sparsek(error):
            return None
        if _of_subclasses(error) or (any("fake" in odd.label for odd in drawn.values()) and _of_fakes(error)):
            return None
        return f"{type(error).__name__}: {str(error)[:300]}"
    if result is NotImplemented or context:  # NotImplemented: Python then raises its own TypeError
        return None
    for name, odd in drawn.items():
        allowed = f"{sort_of(arguments[name])} {call.also.get(name, '')}".split()
        if "any" in allowed or (odd.label == "on meta" and "meta" in allowed):
            continue
        if odd.label in REFUSED:
            return f"took {name} {odd.label}"
        if odd.kind == "other" and sort_of(odd.value) not in allowed:
            return f"took {sort_of(odd.value)} for {name}"
    if all(odd.kind == "form" for odd in drawn.values()):
        function, arguments = call.make(Random(key))
        different = difference(result, function(**arguments))
        if different:
            return f"another result than with plain arguments: {different}"
    return None


def _inside_sparsek(error: Exception) -> bool:
    """Whether it was raised in a function of SparseK, or below one, and not by torch.func alone."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("sparsek.") for frame, _ in frames)


def _of_subclasses(error: Exception) -> bool:
    """Whether torch's own code for tensor subclasses raised it: it gives a subclass's results their storage, or their
    class, and cannot for a wrapper in forward mode, or for subclasses of two kinds; nor can 2.11 in inference mode.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if str(error).startswith("Cannot set version_counter for inference"):
        return any(isinstance(x, contexts.TwoTensor) for x in frame.f_locals.values())
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in SUBCLASSES


SUBCLASSES = (("torch.utils._python_dispatch", "alias_non_inplace_storage"), ("torch._tensor", "_convert"))


def _of_fakes(error: Exception) -> bool:
    """Whether torch itself says that a fake tensor has no values, or that it cannot stand beside real ones."""
    known = any(text in str(error) for text in ("FakeTensor", "tensor subclasses"))
    return known or type(error).__module__ == "torch._subclasses.fake_tensor"


# What is drawn.


@dataclass(frozen=True)
class Odd:
    """A drawn value: a "form" of the valid one, a "spoiled" one or something "other"."""

    kind: str
    label: str
    value: Any


class Whole(int):
    """An int of a class of its own."""


class Text(str):
    """A text of a class of its own."""


class Small(enum.IntEnum):
    one = 1
    two = 2


class Marked(Tensor):
    """A tensor of a class of its own."""


class Mute:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Vague:
    """It has no truth and no hash, and is equal to nothing, loudly."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def _generator() -> Iterator[int]:
    yield 64
    yield 64


OTHERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "17": lambda: 17,
    "64": lambda: 64,
    "-2**31": lambda: -(2**31),
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "10**30": lambda: 10**30,
    "-10**30": lambda: -(10**30),
    "0.5": lambda: 0.5,
    "64.0": lambda: 64.0,
    "-0.0": lambda: -0.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e300": lambda: 1e300,
    "1j": lambda: 1j,
    "Fraction": lambda: Fraction(1, 3),
    "Small.two": lambda: Small.two,
    "'row'": lambda: "row",
    "''": lambda: "",
    "'cpu'": lambda: "cpu",
    "'cuda:77'": lambda: "cuda:77",
    "'meta'": lambda: "meta",
    "long text": lambda: "x\n" * 5000,
    "b'cpu'": lambda: b"cpu",
    "[]": list,
    "()": lambda: (),
    "[64]": lambda: [64],
    "(64, 64)": lambda: (64, 64),
    "(64, 64, 64)": lambda: (64, 64, 64),
    "(64, None)": lambda: (64, None),
    "[[64], [64]]": lambda: [[64], [64]],
    "[64, [64, 64]]": lambda: [64, [64, 64]],
    "['a', 'b']": lambda: ["a", "b"],
    "[True, False]": lambda: [True, False],
    "[10**30, 1]": lambda: [10**30, 1],
    "[2**62] * 4": lambda: [2**62] * 4,
    "(tensor, tensor)": lambda: (torch.ones(2), torch.ones(2)),
    "(Mute(), Mute())": lambda: (Mute(), Mute()),
    "range": lambda: range(10**6),
    "generator": _generator,
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{64, 128}": lambda: {64, 128},
    "object()": object,
    "Mute()": Mute,
    "Vague()": Vague,
    "a class": lambda: int,
    "a function": lambda: len,
    "an array": lambda: np.ones(2),
    "an array of ints": lambda: np.array([64, 64]),
    "an array of objects": lambda: np.array([None, object()], dtype=object),
    "an empty array": lambda: np.ones((0, 3)),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "np.int64(-3)": lambda: np.int64(-3),
    "np.bool_": lambda: np.bool_(True),
    "np.str_": lambda: np.str_("cpu"),
    "np.datetime64": lambda: np.datetime64("2026-01-01"),
    "np.dtype": lambda: np.dtype("float32"),
    "float32": lambda: torch.float32,
    "int8": lambda: torch.int8,
    "complex64": lambda: torch.complex64,
    "bool": lambda: torch.bool,
    "float8_e4m3fn": lambda: torch.float8_e4m3fn,
    "device(meta)": lambda: torch.device("meta"),
    "torch.strided": lambda: torch.strided,
    "tensor(64)": lambda: torch.tensor(64),
    "tensor(0.5)": lambda: torch.tensor(0.5),
    "tensor(True)": lambda: torch.tensor(True),
    "tensor([64, 64])": lambda: torch.tensor([64, 64]),
    "tensor [64, 64]": lambda: torch.ones(64, 64),
    "tensor [128, 128]": lambda: torch.ones(128, 128),
    "tensor [0]": lambda: torch.ones(0),
    "tensor [0, 64]": lambda: torch.ones(0, 64),
    "tensor of 6 dims": lambda: torch.ones(1, 1, 1, 1, 2, 2),
    "tensor on meta": lambda: torch.ones(64, 64, device="meta"),
    "tensor sparse": lambda: torch.eye(64).to_sparse(),
    "tensor sparse_csr": lambda: torch.eye(64).to_sparse_csr(),
    "tensor sparse_bsr": lambda: torch.eye(64).to_sparse_bsr((16, 16)),
    "tensor complex": lambda: torch.ones(64, 64, dtype=torch.complex64),
    "tensor quantized": lambda: torch.quantize_per_tensor(torch.ones(64, 64), 0.1, 0, torch.qint8),
    "Parameter": lambda: torch.nn.Parameter(torch.ones(64, 64)),
    "BSR": lambda: sk.random_bsr(64, 64, 32, 0.5),
    "BSR.T": lambda: sk.random_bsr(64, 96, 32, 0.5).T,
    "BlockPattern": lambda: sk.random_bsr(64, 64, 64, 0.5).pattern,
    "Semi24": lambda: sk.Semi24.from_dense(torch.ones(64, 64)),
    "QuantizedTensor": lambda: sk.quantize(torch.ones(64, 64)),
    "Quantized": lambda: sk.quantize(sk.random_bsr(64, 64, 32, 0.5)),
    "BlockMask": lambda: sk.BlockMask.causal(64, block=64),
    **contexts.ODD,
}


def _drawn(random: Random, valid: Any) -> Odd:
    forms, spoiled = _forms(valid), _spoiled(valid)
    kind = random.choice(["other", "other"] + ["form"] * bool(forms) + ["spoiled", "spoiled"] * bool(spoiled))
    table = {"form": forms, "spoiled": spoiled, "other": OTHERS}[kind]
    label = random.choice(sorted(table))
    try:
        return Odd(kind, label, table[label]())
    except (RuntimeError, TypeError):  # torch has no such form of this tensor
        return Odd("other", "None", None)


def _forms(valid: Any) -> dict[str, Callable[[], Any]]:
    """Other forms of the same value."""
    if isinstance(valid, bool):
        return {f"np.bool_({valid})": lambda: np.bool_(valid), f"int({valid})": lambda: int(valid)}
    if isinstance(valid, int):
        made = {f"np.int64({valid})": lambda: np.int64(valid), f"Whole({valid})": lambda: Whole(valid)}
        made[f"torch.tensor({valid})"] = lambda: torch.tensor(valid)
        made[f"{valid}.0"] = lambda: float(valid)
        if -128 <= valid < 128:
            made[f"np.int8({valid})"] = lambda: np.int8(valid)
        return made | {f"np.array({valid})": lambda: np.array(valid)}
    if isinstance(valid, float):
        return {
            f"np.float64({valid})": lambda: np.float64(valid),
            f"Fraction({valid})": lambda: Fraction(valid),
            f"torch.tensor({valid})": lambda: torch.tensor(valid, dtype=torch.float64),
        }
    if isinstance(valid, str):
        return {f"Text({valid!r})": lambda: Text(valid)}
    if isinstance(valid, (tuple, list)) and valid and all(isinstance(each, int) for each in valid):
        return {
            f"list {list(valid)}": lambda: list(valid),
            f"torch.Size {list(valid)}": lambda: torch.Size(valid),
            f"array {list(valid)}": lambda: np.array(valid),
            f"tensor {list(valid)}": lambda: torch.tensor(valid),
            f"np.int32s {list(valid)}": lambda: tuple(np.int32(each) for each in valid),
            f"iterator {list(valid)}": lambda: iter(valid),
        }
    if isinstance(valid, torch.dtype):
        return {f"'{valid}'": lambda: str(valid)}
    if isinstance(valid, Tensor) and valid.layout == torch.strided and not valid.is_nested:
        return _forms_of_tensor(valid)
    return {}


def _forms_of_tensor(valid: Tensor) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        "inference tensor": lambda: _in_inference_mode(valid),
        "Marked": lambda: valid.detach().clone().as_subclass(Marked),
        "other strides": lambda: torch.stack((valid.detach(), valid.detach()), -1)[..., 0],
        "storage offset": lambda: torch.cat((valid.new_zeros(1), valid.detach().flatten()))[1:].view(
            valid.shape
        ),
    }
    if valid.is_floating_point() and valid.element_size() > 1:
        made["requires_grad"] = lambda: valid.detach().clone().requires_grad_()
        made["neg view"] = lambda: torch._neg_view(-valid.detach())
        made["product"] = lambda: valid.detach().clone().requires_grad_() * 1
    if valid.dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool):
        made["array"] = lambda: valid.detach().numpy()
        made["list"] = lambda: valid.detach().tolist()
    return made


def _in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _spoiled(valid: Any) -> dict[str, Callable[[], Any]]:
    """Values that are nearly right."""
    if isinstance(valid, (int, float)) and not isinstance(valid, bool):
        return {
            f"{valid} + 1": lambda: valid + 1,
            f"-{valid}": lambda: -valid,
            f"2 * {valid}": lambda: 2 * valid,
            "2**32 more": lambda: valid + 2**32,
        }
    if isinstance(valid, str):
        return {
            "upper case": valid.upper,
            "with a space": lambda: f"{valid} ",
            "with a 0": lambda: f"{valid}\0",
        }
    if isinstance(valid, (tuple, list)) and valid:
        made: dict[str, Callable[[], Any]] = {
            "one less": lambda: valid[:-1],
            "one more": lambda: (*valid, valid[-1]),
            "with None": lambda: (*valid[:-1], None),
            "with text": lambda: (*valid[:-1], "64"),
            "negative": lambda: tuple(-each if isinstance(each, int) else each for each in valid),
            "2**32 more": lambda: tuple(each + 2**32 if isinstance(each, int) else each for each in valid),
        }
        return made
    if isinstance(valid, dict) and valid:
        last = next(reversed(valid))
        return {
            "one less": lambda: {key: each for key, each in valid.items() if key != last},
            "one more": lambda: valid | {"more": valid[last]},
            "a key that is no text": lambda: valid | {64: valid[last]},
            "with None": lambda: valid | {last: None},
            "with an array": lambda: valid | {last: np.ones((64, 64))},
            "with a meta tensor": lambda: valid | {last: torch.ones(64, 64, device="meta")},
        }
    if not isinstance(valid, Tensor) or valid.layout != torch.strided or valid.is_nested:
        return {}
    x = valid.detach()
    made = {f"in {dtype}": lambda dtype=dtype: x.to(dtype) for dtype in DTYPES if dtype != x.dtype}
    made |= {
        "on meta": lambda: torch.empty_like(x, device="meta"),
        "flat": x.flatten,
        "one dim more": lambda: x[None],
        "cut to 0": lambda: x[:0] if x.ndim else x.new_zeros(0),
        "first": lambda: x[0] if x.ndim and x.shape[0] else x,
        "longer": lambda: torch.cat((x, x)) if x.ndim else x[None],
        "lazily conjugated": lambda: (
            torch.complex(x.float(), x.float()).conj().imag if x.is_floating_point() else x
        ),
        "negative": lambda: -x.float() - 1,
        "2**32 more": lambda: x.long() + 2**32,
        "NaN": lambda: torch.full_like(x, float("nan")) if x.is_floating_point() else x,
        "Inf": lambda: torch.full_like(x, float("inf")) if x.is_floating_point() else x,
    }
    made |= contexts.odd_forms(x)
    if x.dtype in (torch.int32, torch.int64, torch.uint8):
        made |= {"plus 1": lambda: x + 1, "minus 1": lambda: x - 1, "ones": lambda: torch.ones_like(x)}
    if x.ndim > 1:
        made |= {"transposed": lambda: x.mT, "sideways": lambda: x.mT.contiguous().mT}
        made["expanded"] = lambda: x[:1].expand_as(x) if x.shape[0] else x
    if x.ndim == 2:
        made |= {"sparse": x.to_sparse, "sparse_csr": x.to_sparse_csr}
    return made


REFUSED = (
    "nested",
    "jagged",
    "mkldnn",
    "uninitialized",
    "on meta",
    "with None",
    "with text",
    "with an array",
    "with a meta tensor",
)

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.int8, torch.int32,
    torch.int64, torch.bool, torch.complex64,
)  # fmt: skip


def sort_of(value: Any) -> str:
    """The sort of a value, as `Call.also` names it."""
    if value is None:
        return "none"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and not value.ndim):
        return "int"
    if isinstance(value, (float, np.floating, Fraction)):
        return "float"
    if isinstance(value, str):
        return "text"
    if isinstance(value, torch.dtype):
        return "dtype"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, (tuple, list, range)):
        return "sequence"
    if isinstance(value, dict):
        return "dict"
    return type(value).__name__


# What comes back.


class Unsound(Exception):
    """A result that its own constructor would refuse."""


def sound(result: Any) -> None:
    """Raises Unsound unless the checked constructors accept what was returned."""
    try:
        for part in _matrices(result):
            _rebuilt(part)
    except SparseKError as error:
        raise Unsound(f"{type(result).__name__}: {error}") from error


def _matrices(result: Any) -> list[Any]:
    known = (sk.BSR, sk.Semi24, sk.BSR24, sk.Quantized, sk.QuantizedTensor, sk.BlockMask, sk.BlockPattern)
    leaves = _pytree.tree_leaves(result, is_leaf=lambda each: isinstance(each, known))
    return [each for each in leaves if isinstance(each, known)]


def _rebuilt(part: Any) -> None:
    if isinstance(part, sk.BlockPattern):
        sk.BlockPattern(part.shape, part.block, part.indptr, part.indices)
    elif isinstance(part, sk.BSR):
        _rebuilt(part.pattern)
        if not isinstance(part.values, contexts.TwoTensor):  # of which no constructor sees the padding
            sk.BSR(part.pattern, part.values, part.order)
    elif isinstance(part, sk.Semi24):
        sk.Semi24(part.values, part.meta)
    elif isinstance(part, sk.BSR24):
        _rebuilt(part.pattern)
        sk.BSR24(part.pattern, part.values, part.meta)
    elif isinstance(part, sk.Quantized):
        sk.Quantized(part.matrix, part.scale, part.kind, part.fast_accum)
    elif isinstance(part, sk.QuantizedTensor):
        sk.QuantizedTensor(part.values, part.scale, part.turned)
    elif isinstance(part, sk.BlockMask):
        made, given = part.__reduce__()
        again = made(*given)
        if part.sizes.exact and again.sizes != part.sizes:
            raise Unsound(f"sizes are {part.sizes}, and the lists hold {again.sizes}")
        repr(part)


def difference(a: Any, b: Any) -> str:
    """What tells two results apart, in words; "" if they are the same. Floats are sums, whose order is
    free: bits depend on the strides and the alignment of operands, and on the CPU.
    """
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{type(a).__name__} and {type(b).__name__}"
    (parts, how), (others, other_how) = _pytree.tree_flatten(a), _pytree.tree_flatten(b)
    if how != other_how:
        return "of another structure"
    for one, other in zip(parts, others, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
                return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
            if not _close(_plain(one), _plain(other)):
                return "other elements"
        elif isinstance(one, float) and not math.isclose(one, other, rel_tol=1e-5) and one == one:
            return f"{one} and {other}"
        elif isinstance(one, (int, str)) and one != other:
            return f"{one!r:.80} and {other!r:.80}"
    return ""


def _plain(x: Tensor) -> Tensor:
    return x.detach().to_dense().resolve_neg().resolve_conj().as_subclass(Tensor)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are equal, floats up to the rounding of their largest element."""
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    least = 32 * torch.finfo(one.dtype).eps * float(other.double().nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(one.double(), other.double(), rtol=0, atol=least, equal_nan=True)


# What there is.


def public_names(inside: Callable[[str], bool]) -> set[str]:
    """Every function and every public method of `sparsek.__all__` whose module is `inside`: "linear", "BSR.to".

    A class stands for its constructor. Properties take no arguments, and those of Python's or torch's base classes are
    not SparseK's.
    """
    found: set[str] = set()
    named = {name: getattr(sk, name) for name in sk.__all__ if name not in sk.ROOMS}
    for room in sk.ROOMS:
        named |= {f"{room}.{name}": getattr(getattr(sk, room), name) for name in getattr(sk, room).__all__}
    for name, each in named.items():
        if not inside(each.__module__):
            continue
        found.add(name)
        for kind in each.__mro__ if isinstance(each, type) else ():
            if kind.__module__.startswith("sparsek."):
                found |= {f"{name}.{method}" for method in vars(kind) if _is_method(kind, method)}
    return found


def _is_method(kind: type, name: str) -> bool:
    held = vars(kind)[name]
    return not name.startswith("_") and (isinstance(held, (classmethod, staticmethod)) or callable(held))
