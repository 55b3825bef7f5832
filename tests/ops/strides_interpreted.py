"""The stride zoo by the portable kernels, in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from sparsek.products.formats.convert import Rule
from sparsek.products.kernels.pack.to_24 import pack24
from sparsek.products.kernels.pack.to_bsr import pack_bsr
from sparsek.products.kernels.pack.to_fp8 import round_rows
from tests.ops.stride_forms import FORMS
from tests.ops.stride_walk import Form, Sizes, walk
from tests.ops.strides import layouts
from tests.ops.test_strides import SHARE, check, telling
from tests.sampling import half, sampled

SMALL = Sizes(m=64, k=64, n=24, batch=2)
PORTABLE = [form for form in FORMS if any(name and name.startswith("portable.") for name in form.kernels())]


@pytest.mark.parametrize("form", PORTABLE, ids=str)
def test_layouts_by_the_portable_kernels(form: Form) -> None:
    kernels = [name for name in form.kernels() if name and name.startswith("portable.")]
    check([*walk(form, SMALL, torch.float16, "cpu", kernels, telling, SHARE)])


@pytest.mark.parametrize("form", half(form for form in PORTABLE if "linear" not in form.name), ids=str)
def test_sizes_of_one(form: Form) -> None:
    kernels = [name for name in form.kernels() if name and name.startswith("portable.")]
    for sizes in sampled([SMALL._replace(n=1), SMALL._replace(batch=1)], 1, of=str(form)):
        check([*walk(form, sizes, torch.float16, "cpu", kernels, lambda layout: not layout.own, SHARE)])


@pytest.mark.parametrize("shape", [(3, 24, 64), (24, 64), (2, 1, 64)], ids=str)
def test_kernels_that_pack_and_round(shape: tuple[int, ...]) -> None:
    """The same bits from every layout, or None, and torch does it. They are asked for CUDA tensors only."""
    draw = torch.Generator().manual_seed(0)
    taken = dict.fromkeys(PACKING, 0)
    for layout in layouts(shape):
        placed = layout.place(shape, torch.float16, "cpu", draw)
        assert placed is not None
        for name, pack in PACKING.items():
            found, expected = pack(placed.x), pack(placed.x.contiguous())
            assert expected is not None or len(shape) > 2
            if found is not None and expected is not None:
                taken[name] += 1
                for mine, theirs in zip(found, expected, strict=True):
                    assert torch.equal(mine.float(), theirs.float()), f"{name} of {layout.name}"
    assert all(taken[name] > 3 for name in ("to FP8", "to 2:4"))


def _to_bsr(w: Tensor) -> tuple[Tensor, ...] | None:
    made = None if w.ndim != 2 else pack_bsr(w, (16, 16), Rule(None, None, 0.5, "global"))
    return None if made is None else (made.values, made.pattern.indices)


PACKING = {
    "to FP8": lambda x: round_rows(x, torch.float8_e4m3fn),
    "to 2:4": lambda w: pack24(w, None),
    "to BSR": _to_bsr,
}
