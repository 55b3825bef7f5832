"""What a Recorder takes for a view, and a recorded call that is interrupted, without a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sparsek.core import words
from sparsek.kernels.lang import driver
from sparsek.kernels.lang.recorder import Address, Recorded, Recorder, Result, recording


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
    recorder.cells[Address(0, 0)] = cell
    recorder.maps.append(((ctypes.c_char * 128)(), Address(1, 0)))
    recorder.steps.append((lambda: seen.append(cell.value) or 0, ()))
    call = Recorded(recorder, [Result(0)], True)
    call(*first)
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        call(*second)
    interrupted = False
    call(*first)
    assert seen == [first[0].data_ptr()] * 2


def test_a_word_of_another_call_is_no_view_of_a_word_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(words, "_rings", [ring := words.Ring(pinned=False)])
    old, x = ring.take(), torch.zeros(4)
    recorder = Recorder([x])
    own = ring.take()
    recorder.word(own)
    assert recorder._result(own) == Result(1)
    assert not recorder.reason
    assert recorder._result(old) is None
    assert "neither an operand nor allocated" in recorder.reason
