"""What a Recorder takes for a view, and a recorded call that is interrupted, without a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import fault_ring
from sparsek.engine.launch import driver
from sparsek.engine.launch import recorder as recorder_
from sparsek.engine.launch.recorder import MISS, Launch, Recorded, Recorder, Result, recorder, recording
from sparsek.products.ops.linear import plan_layer
from sparsek.products.plan.spmm import Product


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("mT", False),
        ("T", False),
        ("joined", False),
        ("moved", True),
        ("flat", True),
        ("dense", True),
        ("wide", True),
    ],
)
def test_a_copy_is_not_taken_for_a_view(name: str, copies: bool, mode: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    x = torch.randn(4, 6, 8)

    def made() -> Tensor:
        moved = x.transpose(0, 1)
        return {
            "mT": lambda: x.mT,
            "T": lambda: x[0].T,
            "joined": lambda: x.reshape(24, 8).to(x.dtype).contiguous(),
            "moved": lambda: moved.reshape(24, 8),
            "flat": lambda: moved.flatten(0, 1),
            "dense": moved.contiguous,
            "wide": x.double,
        }[name]()

    with mode(), recording([x]) as recorder:
        made()
    assert bool(recorder.reason) is copies, recorder.reason


def test_a_call_that_was_interrupted_leaves_no_addresses_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> int:
        if interrupted:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(driver, "cuda", lambda: SimpleNamespace(cuTensorMapReplaceAddress=replace))
    cell, seen, interrupted = ctypes.c_uint64(), [], False
    first, second = [torch.zeros(4), torch.zeros(4)], [torch.zeros(4), torch.zeros(4)]
    recorder = Recorder(first)
    (part,) = recorder.parts
    part.cells.append((cell, 0, 0))
    part.maps.append((ctypes.byref((ctypes.c_char * 128)()), ctypes.c_void_p(), 1, 0))
    part.steps.append((lambda: seen.append(cell.value) or 0, ()))
    call = Recorded(recorder, [Result(0)], True)
    call.repeat(first)
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        call.repeat(second)
    interrupted = False
    call.repeat(first)
    assert seen == [first[0].data_ptr()] * 2


def test_a_word_of_another_call_is_no_view_of_a_word_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(fault_ring, "_rings", [ring := fault_ring.FaultRing(pinned=False)])
    old, x = ring.take(), torch.zeros(4)
    recorder = Recorder([x])
    own = ring.take()
    recorder.word(own)
    assert recorder._result(own) == Result(1)
    assert not recorder.reason
    assert recorder._result(old) is None
    assert "neither an operand nor allocated" in recorder.reason


def test_a_call_runs_what_it_can_before_it_allocates_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, each on memory of its own and the second also on that of the first; an event in between."""
    ran: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    fake = SimpleNamespace(
        cuLaunchKernelEx=lambda name, cells: ran.append((name, [c.value for c in cells])) or 0
    )
    fake.cuEventRecord = lambda event, stream: ran.append((f"event {event.value}", [])) or 0
    monkeypatch.setattr(driver, "cuda", lambda: fake)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(recorder_, "_allocate", None)

    def launched(name: str, *tensors: Tensor) -> None:
        made: Any = recorder()
        step: Any = Launch(0, (1,), 32, 0, [made.cell(x.data_ptr(), x) for x in tensors])
        step.launch = name, step.cells
        made.add(step)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        one = x.new_empty((2, 3))
        launched("first", x, one)
        made: Any = recorder()
        made.mark(ctypes.c_void_p(7))
        two = one.new_empty(5, dtype=torch.int32)
        launched("second", one, two, x)
        return two, one

    with recording([torch.zeros(4)]) as made:
        recorded = made.recorded(call(made.roles[0]))
    assert isinstance(recorded, Recorded)
    ran.clear()
    allocated: list[str] = []
    for part in recorded.parts:
        part.allocations = [
            (lambda *given, run=run: (allocated.append(str(len(ran))), run(*given))[1], given)
            for run, given in part.allocations
        ]
    for x in (torch.zeros(4), torch.ones(4), torch.ones(4)):
        ran.clear()
        two, one = recorded.repeat((x,))
        assert (two.shape, two.dtype, one.shape, one.dtype) == ((5,), torch.int32, (2, 3), x.dtype)
        assert ran == [
            ("first", [x.data_ptr(), one.data_ptr()]),
            ("event 7", []),
            ("second", [one.data_ptr(), two.data_ptr(), x.data_ptr()]),
        ]
    assert allocated == ["0", "2"] * 3
    assert recorded.repeat((torch.zeros(5)[1:],)) is MISS


@pytest.mark.parametrize("k", [48, 40])
def test_a_product_in_fp8_allocates_twice_and_then_rounds_and_multiplies(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded values and their scales, of one allocation, follow it together."""
    to_fp8 = pytest.importorskip("sparsek.products.kernels.pack.to_fp8")
    w = sk.quantize(sk.random_bsr(32, k, 16, 0.5, dtype=torch.bfloat16))
    plan = plan_layer(torch.randn(3, k).bfloat16(), w)
    ran: list[list[int]] = []
    fake = SimpleNamespace(cuLaunchKernelEx=lambda cells: ran.append([c.value for c in cells]) or 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "cuda", lambda: fake)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(recorder_, "_allocate", None)

    def launched(*tensors: Tensor) -> None:
        made: Any = recorder()
        step: Any = Launch(0, (1,), 32, 0, [made.cell(x.data_ptr(), x) for x in tensors])
        step.launch = (step.cells,)
        made.add(step)

    monkeypatch.setattr(
        to_fp8, "launch_unspecialized", lambda kernel, device, ctas, args, *_: launched(*args[:3])
    )
    kernel = SimpleNamespace(launch=lambda c, work, a, b, out, epilogue: launched(b.values, b.scale, out))
    plan = replace(plan, choice=plan.choice._replace(kernel=kernel))
    x = torch.randn(3, k).bfloat16()
    with recording([x]) as made:
        recorded = made.recorded(plan.run(Product.layer(x, w), True))
    assert isinstance(recorded, Recorded), made.reason
    (part,) = recorded.parts
    assert (len(part.allocations), len(part.steps)) == (2, 2)
    for given in (x, x.clone(), x):
        out = recorded.repeat((given,))
        (read, values, scale), product = ran
        assert (read, product) == (given.data_ptr(), [values, scale, out.data_ptr()])
        assert values % 16 == 0
        assert 3 * k <= scale - values < 3 * k + 16
        ran.clear()


def test_a_product_that_rounds_b_itself_is_one_allocation_and_one_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = sk.quantize(sk.random_bsr(32, 48, 16, 0.5, dtype=torch.bfloat16))
    plan = plan_layer(torch.randn(3, 48).bfloat16(), w)
    ran: list[list[int]] = []
    fake = SimpleNamespace(cuLaunchKernelEx=lambda cells: ran.append([c.value for c in cells]) or 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(driver, "cuda", lambda: fake)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(recorder_, "_allocate", None)

    def launched(c: Any, work: Any, a: sk.Quantized, b: Tensor, out: Tensor, epilogue: Any) -> None:
        made: Any = recorder()
        step: Any = Launch(0, (1,), 32, 0, [made.cell(each.data_ptr(), each) for each in (b, out)])
        step.launch = (step.cells,)
        made.add(step)

    kernel: Any = SimpleNamespace(launch=launched, rounds=True)
    plan = replace(plan, choice=plan.choice._replace(kernel=kernel))
    x = torch.randn(3, 48).bfloat16()
    with recording([x]) as made:
        recorded = made.recorded(plan.run(Product.layer(x, w), True))
    assert isinstance(recorded, Recorded), made.reason
    assert recorded.one is not None, "one allocation and one launch, and its result no view"
    for given in (x, x.clone(), x):
        out = recorded.repeat((given,))
        assert ran.pop() == [given.data_ptr(), out.data_ptr()]
        assert not ran


def test_one_launch_reads_the_addresses_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned operands that move and come back, misaligned ones between them, and an error of the driver."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    cells, seen, status = [ctypes.c_uint64() for _ in range(3)], [], [0]
    x, y, odd = torch.zeros(4), torch.zeros(4), torch.zeros(5)[1:]
    recorder = Recorder([x, y])
    (part,) = recorder.parts
    part.cells += [(cell, role, 0) for role, cell in enumerate(cells)]
    recorder._makes(torch.zeros, (3,), torch.zeros(3))
    recorder._runs(lambda: seen.append([cell.value for cell in cells]) or status[0], ())
    call = Recorded(recorder, [Result(2)], True)
    assert call.one is not None
    for pair in ((x, y), (y, x), (y, x), (x, y)):
        out = call.repeat(pair)
        assert seen.pop() == [each.data_ptr() for each in (*pair, out)]
        assert call.repeat((x, odd)) is call.repeat((odd, x)) is MISS
    assert not seen
    status[0] = 1
    monkeypatch.setattr(driver, "check", seen.append)
    call.repeat((x, y))
    assert seen[1:] == [1]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_triton_is_a_miss_however_it_is_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added to the chain of hooks, or assigned in its place; None is no hook."""
    runtime = pytest.importorskip("triton").knobs.runtime
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    x = torch.zeros(4)
    call = Recorded(Recorder([x]), [Result(0)], True)
    assert call.repeat((x,)) is x
    getattr(runtime, name).add(print)
    try:
        assert call.repeat((x,)) is MISS
    finally:
        getattr(runtime, name).remove(print)
    for hook, found in ((print, MISS), (None, x)):
        with runtime.scope():
            setattr(runtime, name, hook)
            assert call.repeat((x,)) is found
    assert call.repeat((x,)) is x
