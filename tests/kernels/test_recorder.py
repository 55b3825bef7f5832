"""What a Recorder takes for a view, without a GPU: its addresses are not looked at here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsek.kernels.lang.recorder import recording


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
