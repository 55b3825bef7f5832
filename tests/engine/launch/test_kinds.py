"""Configs of kernels: what their text tells apart, and which tiles they refuse."""

from dataclasses import fields, replace
from typing import Any

import pytest

from sparsek.attn.kernels.backward import hopper_bwd, hopper_bwd_wide, portable_bwd
from sparsek.attn.kernels.forward import hopper_fp8, hopper_fwd, portable_fwd
from sparsek.attn.kernels.paged import hopper as hopper_paged
from sparsek.attn.kernels.paged import portable as portable_paged
from sparsek.core.errors import InvalidInput
from sparsek.products.kernels.sddmm import hopper as hopper_sddmm
from sparsek.products.kernels.sddmm import portable as portable_sddmm
from sparsek.products.kernels.spgemm import portable as portable_spgemm
from sparsek.products.kernels.spmm import hopper, hopper_24, hopper_mma, hopper_paired, hopper_skinny_24
from sparsek.products.kernels.spmm import hopper_fp8 as hopper_spmm_fp8
from sparsek.products.kernels.spmm import portable as portable_spmm

BLOCK = (128, 128)
HOPPER = (
    hopper.Config(BLOCK, 2, 1, 256, 64, 1, 4),
    hopper_spmm_fp8.Config(BLOCK, 2, 1, 256, 64, 1, 4),
    hopper_paired.Config((64, 64)),
    hopper_mma.Config(),
    hopper_24.Config(fp8=".e4m3.e5m2"),
    hopper_skinny_24.Config(4, 1, 1, 2, 2, 1),
    hopper_sddmm.Config(BLOCK, 2, 1, 128, 64, 1, 4),
    hopper_fwd.Config(64, 128, BLOCK, 2, 128, 2, 1),
    hopper_fp8.Config(64, 128, BLOCK, 2, 128, 2, 1),
    hopper_bwd.Config(64, 128, BLOCK, 2, 2),
    hopper_bwd_wide.Config(256, 128, BLOCK),
    hopper_paged.Config(64, 128, 16, 2, 128, 2, 1),
)
PORTABLE = (
    portable_spmm.Config(64, 64, 64, 4, 2),
    portable_fwd.Config(64, 64, 4, 2),
    portable_bwd.Tile(64, 64, 4, 2),
    portable_paged.Config(64, 64, 4, 2),
    portable_sddmm.Config(64, 64, 64, 4, 2),
    portable_spgemm.Config(64, 64, 64, 4, 2),
)
OTHER = {
    bool: lambda x: not x,
    int: lambda x: 2 * x or 1,
    str: lambda x: x + "relu",
    tuple: lambda x: (x[0], x[1] + 64),
}


def name(c: Any) -> str:
    return type(c).__module__.removeprefix("sparsek.")


@pytest.mark.parametrize("c", [*HOPPER, *PORTABLE], ids=name)
def test_a_text_tells_configs_apart_that_differ_in_any_field(c: Any) -> None:
    """Triton caches compiled kernels by it."""
    for each in fields(c):
        value = getattr(c, each.name)
        other = replace(c, **{each.name: OTHER[type(value)](value)})
        assert str(other) != str(c), each.name
        assert repr(other) == str(other)


@pytest.mark.parametrize("c", PORTABLE, ids=name)
def test_the_sides_of_a_portable_tile_are_powers_of_two_from_16_up(c: Any) -> None:
    for side in c.SIDES:
        replace(c, **{side: 16})
        for size in (0, 8, 48, -16):
            with pytest.raises(
                InvalidInput, match=f"{side} of {c.KERNEL} must be a power of two from 16 up, not {size}"
            ):
                replace(c, **{side: size})
