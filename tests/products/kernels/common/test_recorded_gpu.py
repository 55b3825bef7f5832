"""engine/launch/launch.py on a GPU: what is recorded of a call, what is not and why, and what comes of repeating it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from sparsek.engine.launch.launch import launch, launch_unspecialized
from sparsek.engine.launch.recorder import MISS, Recorded, record, recording

pytestmark = pytest.mark.gpu
SIZE = 256


@triton.jit
def _add(x, y, out, n, SIZE: tl.constexpr):
    """out += x + y: what out held is seen."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    held = tl.load(out + at, mask=inside)
    tl.store(out + at, held + tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def _sum(x, y, out, n, SIZE: tl.constexpr):
    """out = x + y"""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def add(x: Tensor, y: Tensor, out: Tensor, kernel: Any = _sum) -> Tensor:
    """By elements as they lie in memory."""
    n = out.numel()
    launch(kernel, (-(-n // SIZE),), x, y, out, n, SIZE)
    return out


def add_directly(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    n = out.numel()
    launch_unspecialized(_sum, out.device, -(-n // SIZE), (x, y, out, n), (SIZE,), 4)
    return out


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape or (8, 48), device="cuda")


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """What torch allocates is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def several(x: Tensor, y: Tensor) -> Any:
    out = add(x, y, x.new_empty(x.shape))
    return out, None, out[1:].mT, out.view(-1)[5:], x


def in_columns(x: Tensor, y: Tensor) -> Any:
    """An allocation whose strides are others, and one of another dtype that nobody returns."""
    torch.empty_strided(x.shape, (1, x.shape[0]), dtype=torch.int8, device=x.device)
    return add(x, y, torch.empty_strided(x.shape, (1, x.shape[0]), dtype=x.dtype, device=x.device))


def right_in_columns(x: Tensor, y: Tensor) -> Any:
    return (x + y).view(-1).view(x.shape[::-1]).mT


def into_zeros(x: Tensor, y: Tensor) -> Tensor:
    """Zeros of two kinds, of which one is a part of an allocation."""
    whole = x.new_empty(2, *x.shape)
    first = add(x, y, torch.zeros(x.shape, dtype=x.dtype, device=x.device), _add)
    return add(first, x, whole[1].zero_(), _add)


def in_turns(x: Tensor, y: Tensor) -> Tensor:
    """Three launches, through memory of the call's own; the same address is in several argument blocks."""
    between = add(x, y, torch.empty_like(x))
    return add(between, x, add(between, y, x.new_empty(x.shape)), _add)


def of_parts(x: Tensor, y: Tensor) -> Tensor:
    """Addresses inside of operands."""
    return add(x[2:], y[:-2], x.new_empty(x.shape[0] - 2, *x.shape[1:]))


def directly(x: Tensor, y: Tensor) -> Tensor:
    """Past Triton's JIT."""
    return add_directly(x, y, x.new_empty(x.shape))


def written_to(x: Tensor, y: Tensor) -> Tensor:
    """An operand is the output."""
    return add(x, y, x)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda x, y: add(x, y, x.new_empty(x.shape)), lambda x, y: x + y),
    "several results": (several, lambda x, y: (x + y, None, (x + y)[1:].mT, (x + y).view(-1)[5:], x)),
    "in columns": (in_columns, right_in_columns),
    "into zeros": (into_zeros, lambda x, y: x + y + x),
    "in turns": (in_turns, lambda x, y: (x + y) + y + ((x + y) + x)),
    "of parts": (of_parts, lambda x, y: x[2:] + y[:-2]),
    "directly": (directly, lambda x, y: x + y),
    "written to": (written_to, lambda x, y: x + y),
}


def same(found: Any, right: Any) -> None:
    for mine, wanted in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, right)), strict=True):
        if wanted is None:
            assert mine is None
            continue
        assert mine.shape == wanted.shape
        assert mine.double().sub(wanted.double()).abs().max() < 1e-5


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_is_repeated_with_other_operands(name: str) -> None:
    call, right = CALLS[name]
    call(drawn(), drawn())  # compiles
    x, y = drawn(), drawn()
    wanted = right(x.clone(), y)
    found, made = record(lambda: call(x, y), (x, y))
    same(found, wanted)
    assert made is not None
    for _ in range(4):
        x, y = drawn(), drawn()
        wanted = right(x.clone(), y)
        again = made.repeat((x, y))
        same(again, wanted)
        strides = [[None if each is None else each.stride() for each in tree(z)] for z in (found, again)]
        assert strides[0] == strides[1]
    if name == "several results":
        assert again[4] is x
        assert again[2].untyped_storage().data_ptr() == again[0].data_ptr()


def tree(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


_elsewhere: list[Tensor] = []
OUTSIDE = "neither an operand nor allocated in it"
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "an operator between": (lambda x, y: add(x, add(x, y, torch.empty_like(x)) * 2, torch.empty_like(x)), "aten::mul"),
    "a copy": (lambda x, y: add(x.mT.contiguous(), y, torch.empty_like(x)), "aten::clone"),
    "an operator behind": (lambda x, y: add(x, y, torch.empty_like(x)).relu(), "aten::relu"),
    "a random number": (lambda x, y: add(x, torch.randn_like(y), torch.empty_like(x)), "aten::randn_like"),
    "no launch": (lambda x, y: torch.empty_like(x), "nothing was launched"),
    "a result of another call": (lambda x, y: (add(x, y, torch.empty_like(x)), *_elsewhere), OUTSIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_not_recorded(name: str) -> None:
    call, reason = REFUSED[name]
    _elsewhere[:] = [drawn()]
    x, y = drawn(), drawn()
    call(x, y)
    with recording((x, y)) as recorder:
        out = call(x, y)
    assert recorder.recorded(out) is None
    assert reason in recorder.reason
    _elsewhere.clear()


def test_operands_at_one_address_are_not_recorded_and_may_be_repeated() -> None:
    call, right = CALLS["sum"]
    x, y = drawn(), drawn()
    _, apart = record(lambda: call(x, y), (x, y))
    with recording((x, x)) as recorder:
        out = call(x, x)
    assert recorder.recorded(out) is None
    assert "same address" in recorder.reason
    assert apart is not None
    x = drawn()
    same(apart.repeat((x, x.view_as(x))), right(x, x))


def made_of(*operands: Tensor, call: Callable[..., Any] = CALLS["sum"][0]) -> Recorded:
    call(*operands)
    _, made = record(lambda: call(*operands), operands)
    assert made is not None
    return made


def test_a_view_of_an_operand_comes_back_wherever_that_lies() -> None:
    """Recorded with operands in one storage, as parts of a workspace are."""

    def call(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return add(x, y, out).mT

    made = made_of(*drawn(3, 8, 48).unbind(), call=call)
    for x, y, out in ([drawn() for _ in range(3)], drawn(5, 8, 48)[2:].unbind(), drawn(3, 8, 48).unbind()):
        found = made.repeat((x, y, out))
        same(found, (x + y).mT)
        assert found.data_ptr() == out.data_ptr()


def test_other_alignments_are_missed_and_nothing_is_done() -> None:
    made = made_of(drawn(), drawn(), call=written_to)
    x, y = drawn(8 * 48 + 1)[1:].view(8, 48), drawn()
    before = x.clone()
    assert made.repeat((x, y)) is MISS
    assert made.repeat((drawn(), drawn(8 * 48 + 1)[1:].view(8, 48))) is MISS
    assert torch.equal(x, before)
    x, y = drawn(), drawn()
    wanted = x + y
    same(made.repeat((x, y)), wanted)
    shifted = made_of(before[1:], y[1:])  # 192 bytes on, a multiple of 16
    same(shifted.repeat((x[1:], y[1:])), x[1:] + y[1:])


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_triton_is_a_miss(name: str) -> None:
    made, hooks = made_of(drawn(), drawn()), getattr(knobs.runtime, name)
    seen: list[Any] = []

    def heard(metadata: Any) -> None:
        seen.append(metadata)

    hooks.add(heard)
    try:
        assert made.repeat((drawn(), drawn())) is MISS
        assert not seen
        CALLS["sum"][0](drawn(), drawn())
        CALLS["directly"][0](drawn(), drawn())
        assert len(seen) == 2
    finally:
        hooks.remove(heard)
    assert made.repeat((drawn(), drawn())) is not MISS


def watching(source: Tensor) -> tuple[Recorded, Callable[[Tensor, Tensor], Tensor]]:
    """A call with a constant that was made of `source`."""
    constant = source * 2

    def call(x: Tensor, y: Tensor) -> Tensor:
        between = add(x, constant, x.new_empty(x.shape))
        return add(between, y, x.new_empty(x.shape))

    x, y = drawn(), drawn()
    call(x, y)
    with recording((x, y)) as recorder:
        out = call(x, y)
        recorder.watch(source)
    made = recorder.recorded(out)
    assert made is not None
    return made, call


def test_a_write_to_what_constants_were_made_of_ends_the_call() -> None:
    source = drawn()
    made, call = watching(source)
    x, y = drawn(), drawn()
    same(made.repeat((x, y)), x + 2 * source + y)
    assert made.is_fresh()
    source.add_(1)
    assert made.repeat((x, y)) is MISS
    assert not made.is_fresh()
    made, call = watching(source)
    same(made.repeat((x, y)), call(x, y))
    del source
    assert made.repeat((x, y)) is MISS
    assert not made.is_fresh()


def test_constants_of_inference_mode_are_not_recorded() -> None:
    with torch.inference_mode():
        source = drawn()
    x, y = drawn(), drawn()
    with recording((x, y)) as recorder:
        out = CALLS["sum"][0](x, y)
        recorder.watch(source)
    assert recorder.recorded(out) is None
    assert "inference mode" in recorder.reason


def with_a_constant(constant: Tensor) -> tuple[Recorded, list[Any]]:
    """A call that reads `constant`, and references to that and to the operands."""

    def call(x: Tensor, y: Tensor) -> Tensor:
        return add(add(x, constant, x.new_empty(x.shape)), y, x.new_empty(x.shape))

    operands = drawn(), drawn()
    made = made_of(*operands, call=call)
    return made, [weakref.ref(each) for each in (constant, *operands)]


def test_constants_live_as_long_as_the_call_and_operands_do_not() -> None:
    value = drawn()
    made, references = with_a_constant(value.clone())
    gc.collect()
    assert [each() is None for each in references] == [False, True, True]
    x, y, others = drawn(), drawn(), [torch.full_like(value, torch.nan) for _ in range(4)]
    same(made.repeat((x, y)), x + value + y)
    del made, others
    gc.collect()
    assert references[0]() is None


def test_a_call_follows_the_stream_that_it_was_recorded_on() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = made_of(drawn(), drawn())
        x, y = drawn(), drawn()
        torch.cuda._sleep(20_000_000)
        x.add_(1)  # behind the sleep: a launch elsewhere would not see it
        out = made.repeat((x, y))
    side.synchronize()
    assert made.stream == side.cuda_stream
    same(out, x + y)


def test_a_call_may_be_repeated_in_a_thread_without_a_context() -> None:
    made, found = made_of(drawn(), drawn()), []
    x, y = drawn(), drawn()
    torch.cuda.synchronize()
    thread = Thread(target=lambda: found.append(made.repeat((x, y))))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    same(found[0], x + y)


def test_a_thread_is_not_recorded_with_another() -> None:
    """What another thread launches meanwhile is no part of the call."""
    call, right = CALLS["sum"]
    x, y = drawn(), drawn()
    call(x, y)

    def both() -> Tensor:
        thread = Thread(target=lambda: call(drawn(), drawn()) * 2)
        thread.start()
        thread.join()
        return call(x, y)

    _, made = record(both, (x, y))
    assert made is not None
    assert [len(part.steps) for part in made.parts] == [1]
    x, y = drawn(), drawn()
    same(made.repeat((x, y)), right(x, y))
