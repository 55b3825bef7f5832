"""What a rule reads: a changed state converts its mask anew, of every kind; common rules are converted once."""

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import math
import operator
import os
import threading
import types
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sparsek as sk
from sparsek.attn.mask.convert.argument import block_mask

S = 64
Q = torch.zeros(1, 1, S, 16)
State = tuple[Callable[[], Any], Callable[[], Any]]  # what a rule reads as its window, 20, and a change to 9


def of_rule(rule: Any) -> flex.BlockMask:
    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    return flex.BlockMask.from_kv_blocks(
        counts, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=64, mask_mod=rule, seq_lengths=(S, S)
    )


class Space(types.SimpleNamespace):
    pass


class Slots:
    __slots__ = ("window",)

    def __init__(self, window: int) -> None:
        self.window = window


class Equal(Slots):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Color(enum.Enum):
    FAR = 20
    NEAR = 9


class Shared:
    window = 20

    @classmethod
    def read(cls) -> int:
        return cls.window

    def of_type(self) -> int:
        return type(self).window


@dataclasses.dataclass
class Inner:
    window: int = 20


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    name: str = "outer"


class Computed:
    def __init__(self) -> None:
        self.held = [20]

    @property
    def window(self) -> int:
        return self.held[0]

    def __len__(self) -> int:
        return self.held[0]

    def star(*given: Any) -> int:
        return given[0].held[0]

    def made_within(self) -> int:
        return (lambda: [self.held[0] for _ in range(1)][0])()

    def last(self) -> int:
        at: Any = self
        while hasattr(at, "next"):
            at = at.next
        return at.held[0]


class Hooked:
    def __init__(self, table: dict[str, int]) -> None:
        self.table = table

    def __getattr__(self, name: str) -> int:
        return self.table[name]


class Layer(nn.Module):
    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor(20.0))
        self.scales = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        with torch.no_grad():
            next(self.scales.parameters()).fill_(1)
        self.plain = 20

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scale: Any = self.scales[0]
        return q - k < scale(self.window[None])[0]


def set_in(holder: Any, key: Any = "w", to: Any = 9) -> Callable[[], None]:
    return lambda: operator.setitem(holder, key, to)


def attribute(holder: Any, name: str = "window", to: Any = 9) -> Callable[[], None]:
    return lambda: setattr(holder, name, to)


def filled(x: Tensor) -> Callable[[], Any]:
    return lambda: x.data.fill_(9)


def window_of(x: Any) -> Any:
    return x.window


MODULE = types.ModuleType("of_a_user")
GLOBAL = 20


def states() -> dict[str, State]:  # lambdas, because the rule is what reads
    """Every kind of state behind a rule, with a change that leaves every identity that it can as it is."""
    table, numbers, inner, outer = {"w": 20}, [20], Space(window=20), Outer()
    MODULE.window, Shared.window, os.environ["SPARSEK_TEST_WINDOW"] = 20, 20, "20"  # type: ignore[attr-defined]
    globals().update(GLOBAL=20)
    nested, boxed, computed, layer = Space(inner=inner), [Slots(20)], Computed(), Layer()
    equal, chosen, tensor, strided = [Equal(20)], [Color.FAR], torch.tensor(20), torch.full((4,), 20)[::3]
    small, large = np.array([np.nan, 20.0]), np.full(20_000, 20)
    shared, variable, local = np.full(4, 20), contextvars.ContextVar("window", default=20), threading.local()
    local.window, queue, raw, typed = 20, collections.deque([20]), bytearray([20]), array.array("i", [20])
    proxy, named, refs = (
        types.MappingProxyType(table),
        collections.namedtuple("named", "w"),
        weakref.ref(inner),
    )
    tuples, shape, extra, graded = [named(20)], torch.arange(20), torch.zeros(1), torch.zeros(1)
    extra.window, graded.grad, dict_get = 20, torch.tensor([20.0]), table.get  # type: ignore[attr-defined]
    cached, chain, hooked = (
        functools.lru_cache(lambda: numbers[0]),
        collections.ChainMap({}, table),
        Hooked(table),
    )
    parts, first, second, linked = nn.ParameterList([torch.tensor(20.0)]), [20], [9], Computed()
    linked_to = linked.next = Computed()  # type: ignore[attr-defined]
    view, of_text = memoryview(raw), ["".join(["w", "20"])]
    lists, helper, function, near = [second, first, second], Space(read=lambda: 20), (lambda: 20), (lambda: 9)
    from_array = torch.from_numpy(shared)
    layers, zero, kinds = [nn.Module() for _ in range(4)], [0.0], [20.0]
    for each in layers:
        each.window = 20  # type: ignore[assignment]

    def swap() -> None:
        function.__code__ = near.__code__

    return {
        "global": (lambda: GLOBAL, lambda: globals().update(GLOBAL=9)),
        "object of an object": (lambda: nested.inner.window, attribute(inner)),
        "object that is passed": (lambda: window_of(inner), attribute(inner)),
        "dataclasses": (lambda: outer.inner.window, attribute(outer.inner)),
        "slots": (lambda: boxed[0].window, attribute(boxed[0])),
        "equal to all": (lambda: equal[0].window, set_in(equal, 0, Equal(9))),
        "enum": (lambda: chosen[0].value, set_in(chosen, 0, Color.NEAR)),
        "class": (lambda: Shared.window, attribute(Shared)),
        "class of a method": (Shared.read, attribute(Shared)),
        "type of an object": (Shared().of_type, attribute(Shared)),
        "property": (lambda: computed.window, set_in(computed.held, 0)),
        "length": (computed.__len__, set_in(computed.held, 0)),
        "method of any arguments": (computed.star, set_in(computed.held, 0)),
        "function in a method": (computed.made_within, set_in(computed.held, 0)),
        "linked objects": (linked.last, set_in(linked_to.held, 0)),
        "__getattr__": (lambda: hooked.w, set_in(table)),
        "module of Python": (lambda: MODULE.window, attribute(MODULE)),
        "module that is passed": (lambda: window_of(MODULE), attribute(MODULE)),
        "getattr": (lambda: getattr(MODULE, "window"), attribute(MODULE)),  # noqa: B009
        "globals": (lambda: globals()["GLOBAL"], lambda: globals().update(GLOBAL=9)),
        "environment": (
            lambda: int(os.environ["SPARSEK_TEST_WINDOW"]),
            set_in(os.environ, "SPARSEK_TEST_WINDOW", "9"),
        ),
        "context": (variable.get, lambda: variable.set(9)),
        "thread": (lambda: local.window, attribute(local)),
        "weak reference": (lambda: refs().window, attribute(inner)),  # type: ignore[union-attr]
        "bound method of C": (lambda: dict_get("w"), set_in(table)),
        "getter of C": (lambda: operator.itemgetter("w")(table), set_in(table)),
        "cache": (cached, lambda: (cached.cache_clear(), set_in(numbers, 0)())),
        "chain of dicts": (lambda: chain["w"], set_in(table)),
        "proxy": (lambda: proxy["w"], set_in(table)),
        "deque": (lambda: queue[0], set_in(queue, 0)),
        "bytes": (lambda: raw[0], set_in(raw, 0)),
        "view of bytes": (lambda: view[0], set_in(raw, 0)),
        "array": (lambda: typed[0], set_in(typed, 0)),
        "numpy": (lambda: float(small[1]), set_in(small, 1)),
        "large numpy": (lambda: int(large[9]), set_in(large, 9)),
        "named tuple": (lambda: tuples[0].w, set_in(tuples, 0, named(9))),
        "text": (lambda: int(of_text[0][1:]), set_in(of_text, 0, "w9")),
        "other order": (lambda: lists[1][0], set_in(lists, slice(None), [second, second, first])),
        "kind of a number": (lambda: 20 if type_of(kinds[0]) else 9, set_in(kinds, 0, 20)),
        "sign of zero": (lambda: 20 if math.copysign(1, zero[0]) > 0 else 9, set_in(zero, 0, -0.0)),
        "helper": (lambda: helper.read() + 0, attribute(helper, "read", lambda: 9)),
        "code of a helper": (function, swap),
        "tensor": (lambda: tensor, lambda: tensor.fill_(9)),
        "tensor's data": (lambda: strided[1], filled(strided[1])),
        "memory of numpy": (lambda: from_array[2], set_in(shared, 2)),
        "shape": (lambda: shape.shape[0], lambda: setattr(shape, "data", shape.data[:9])),
        "attribute of a tensor": (lambda: extra.window, attribute(extra)),  # type: ignore[attr-defined]
        "gradient": (lambda: graded.grad[0], lambda: graded.grad.fill_(9)),  # type: ignore[union-attr,index]
        "list of parameters": (lambda: parts[0], filled(parts[0])),
        "number of a layer": (lambda: layer.plain, attribute(layer, "plain")),
        "last of layers": (lambda: min(map(window_of, layers)), attribute(layers[3])),
    }


def type_of(x: Any) -> bool:
    return isinstance(x, float)


FOLLOWED = {
    "global", "object of an object", "object that is passed", "dataclasses", "enum", "class", "property", "deque",
    "module of Python", "proxy", "numpy", "named tuple", "tensor", "tensor's data", "helper", "number of a layer",
}  # fmt: skip


@pytest.mark.parametrize("name", states())
def test_changed_state_gives_a_new_mask(name: str):
    read, change = states()[name]
    mask = of_rule(lambda b, h, q, k: (k <= q) & (q - k < read()))
    first = block_mask(mask, Q, Q)
    assert first is not None
    again = block_mask(mask, Q, Q)
    assert again is first or name not in FOLLOWED
    change()
    late = block_mask(mask, Q, Q)
    assert late is not None
    q, k = torch.arange(S)[:, None], torch.arange(S)
    for found, window in ((first, 20), (late, 9)):
        assert torch.equal(found.to_dense()[0, 0], (k <= q) & (q - k < window))


@pytest.mark.parametrize(
    "made",
    [Fraction, np.int64, range, Slots, lambda n: bytes([n] * 3), lambda n: f"w{n}"],
)
def test_a_value_at_the_address_of_another_is_another(made: Callable[[int], Any]):
    def number(x: Any) -> int:
        if isinstance(x, (range, bytes)):
            return len(x) if isinstance(x, range) else x[0]
        return x.window if hasattr(x, "window") else int(x[1:] if hasattr(x, "encode") else x)

    q, k = torch.arange(S)[:, None], torch.arange(S)
    for _ in range(5):
        x = made(20)
        mask = of_rule(lambda b, h, q, k: q - k < number(x))  # noqa: B023
        block_mask(mask, Q, Q)
        x = None
        x = made(9)
        found = block_mask(mask, Q, Q)
        assert found is not None
        assert torch.equal(found.to_dense()[0, 0], q - k < 9)


@pytest.mark.parametrize("way", ["weight", "buffer", "layer", "hook"])
def test_a_changed_layer_gives_a_new_mask(way: str):
    layer, other = Layer(), nn.Linear(1, 1, bias=False)
    mask = of_rule(lambda b, h, q, k: layer(q, k))
    first = block_mask(mask, Q, Q)
    assert block_mask(mask, Q, Q) is first
    with torch.no_grad():
        other.weight.fill_(0.45)
        if way == "weight":
            next(layer.scales.parameters()).mul_(0.45)
        elif way == "buffer":
            layer.window.data.fill_(9)
        elif way == "layer":
            layer.scales[0] = other
        else:
            layer.scales[0].register_forward_hook(lambda *given: 0.45 * given[2])
    late = block_mask(mask, Q, Q)
    assert late is not None
    q, k = torch.arange(S)[:, None], torch.arange(S)
    assert torch.equal(late.to_dense()[0, 0], q - k < 9)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sliding(window: int) -> Any:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= window

    made = flex.and_masks(sees, causal)
    made.__name__ = f"sliding_{window}"
    return made


def documents(rule: Any, offsets: Tensor) -> Any:
    document = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = rule(b, h, q - offsets[document[q]], k - offsets[document[k]])
        return (document[q] == document[k]) & inside

    return sees


def tiles(width: int) -> Any:
    def place(i: Tensor) -> tuple[Tensor, Tensor]:
        return i // width, torch.div(i, width, rounding_mode="floor").clamp(0, max(1, min(width, 3)))

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        (x, y), (u, w) = place(q), place(k)
        return torch.logical_and(nn.functional.relu(x - u) <= math.floor(2.5), torch.where(y > w, y, w) >= 0)

    return sees


class Called:
    def __init__(self, window: int) -> None:
        self.window = window

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.window})"

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < self.window


OUTER, CALLED, LENGTHS = Outer(), Called(3), torch.tensor([9])
COMMON: dict[str, Any] = {
    "causal": causal,
    "all": flex.noop_mask,
    "window": sliding(9),
    "either": flex.or_masks(sliding(3), causal),
    "documents": documents(causal, torch.tensor([0, 20, S])),
    "tiles": tiles(8),
    "partial": functools.partial(lambda n, b, h, q, k: q - k < n, 5),
    "lengths": lambda b, h, q, k, lengths=LENGTHS: k < lengths[b],
    "config": lambda b, h, q, k: q - k < OUTER.inner.window,
    "config that is passed": lambda b, h, q, k: q - k < window_of(OUTER.inner),
    "object": lambda *given, called=CALLED: called(*given),
    "layer": (lambda layer: lambda b, h, q, k: layer(q, k))(Layer()),
    "method": functools.partial(Called(4).__call__),
    "of SparseK": sk.BlockMask.causal(S, device="cpu").to_flex().mask_mod,
}


@pytest.mark.parametrize("name", COMMON)
def test_common_rules_are_converted_once(name: str):
    mask = of_rule(COMMON[name])
    assert block_mask(mask, Q, Q) is block_mask(mask, Q, Q)


def test_nothing_that_a_rule_reads_is_kept_alive():
    def read() -> list[weakref.ref[Any]]:
        holder, tensor = Called(3), torch.ones(S, dtype=torch.bool)

        def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return holder(b, h, q, k) & tensor[k]

        mask = of_rule(rule)
        holder.mask = mask  # type: ignore[attr-defined]
        assert block_mask(mask, Q, Q) is block_mask(mask, Q, Q)
        return [weakref.ref(each) for each in (holder, tensor, rule, mask)]

    refs = read()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


@pytest.mark.parametrize("way", ["data", "numpy", "view"])
def test_writes_that_torch_does_not_count_are_found_on_a_cpu(way: str):
    whole = torch.ones(2, 2, S, S, dtype=torch.bool).tril()
    dense, lists = whole[1:, :1] if way == "view" else whole, of_rule(causal)
    q = torch.zeros(len(dense), dense.shape[1], S, 16)
    for _ in range(2):
        kept = [block_mask(mask, x, x) for mask, x in ((dense, q), (lists, Q))]
    assert [block_mask(mask, x, x) for mask, x in ((dense, q), (lists, Q))] == kept
    for x in (whole, lists.kv_num_blocks):
        if way == "numpy":
            x.numpy()[:] = 0
        else:
            x.data.fill_(0)
    for mask, x in ((dense, q), (lists, Q)):
        found = block_mask(mask, x, x)
        assert found is not None
        assert not found.to_dense().any()


def test_numbers_of_another_default_dtype_give_a_new_mask():
    mask = of_rule(lambda b, h, q, k: (q * 0.1 + k * 0.7).floor() % 3 == 0)
    before = block_mask(mask, Q, Q)
    torch.set_default_dtype(torch.float64)
    try:
        assert block_mask(mask, Q, Q) is not before
    finally:
        torch.set_default_dtype(torch.float32)
