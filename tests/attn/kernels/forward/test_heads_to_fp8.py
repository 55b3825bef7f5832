"""heads_to_fp8: how its kernel is launched."""

from typing import Any

import pytest
import torch

from sparsek.attn.kernels.forward import heads_to_fp8
from sparsek.products.formats.pattern import INT32_MAX

WIDE = INT32_MAX + 1


@pytest.mark.parametrize(
    ("shape", "strides", "wide"),
    [
        ((1, 2, 8, 16), (256, 128, 16, 1), False),
        ((1, 2, 8, 16), (WIDE, 128, 16, 1), False),
        ((2, 2, 8, 16), (WIDE, 128, 16, 1), True),
        ((1, 2, 8, 16), (1, WIDE, 16, 1), True),
    ],
    ids=str,
)
def test_strides_beyond_int32_are_another_kernel(
    shape: tuple[int, ...], strides: tuple[int, ...], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is found again without the width of its ints, and ctypes cuts those that do not fit."""
    found: list[tuple[bool, list[int]]] = []

    def launched(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found.append((True, [each for each in args if type(each) is int]))

    def unspecialized(kernel: Any, device: Any, programs: int, args: Any, *rest: Any) -> None:
        found.append((False, [each for each in args if type(each) is int]))

    monkeypatch.setattr(heads_to_fp8, "launch", launched, raising=False)
    monkeypatch.setattr(heads_to_fp8, "launch_unspecialized", unspecialized)
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    heads_to_fp8.round_heads(x, torch.empty(shape[:2], device="meta"), 0, 16, False)
    ((by_triton, ints),) = found
    assert by_triton == wide
    assert wide or max(ints) <= INT32_MAX
