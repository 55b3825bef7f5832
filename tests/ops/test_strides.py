"""The stride zoo over every operation: each operand, output and incoming gradient in every layout, by every kernel."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput
from tests.ops.stride_forms import FORMS, SIZES
from tests.ops.stride_walk import Form, Outcome, walk
from tests.ops.strides import ZOO, StrideLayout, layouts, offsets
from tests.sampling import half, sampled

# torch multiplies FP8 on a CPU by a loop: 0.2 s for these sizes.
SLOW_ON_A_CPU = ("vendor.cublas_fp8",)
# Of the layouts, in every run others. SPARSEK_TEST_ALL=1 runs all.
SHARE, SHARE_OF_A_GPU = 1 / 20, 1 / 12


def check(found: Sequence[Outcome]) -> None:
    assert Counter(each.result for each in found)["right"] > 0
    bad = [each for each in found if each.result not in ("right", "refused")]
    assert not bad, f"{len(bad)} of {len(found)}:\n" + "\n".join(
        f"{each.form} by {each.kernel}: {each.operand} with {each.layout}, {each.sizes}: {each.result} {each.text}"
        for each in bad[:20]
    )


def telling(layout: StrideLayout) -> bool:
    """The layouts that decide where sizes are 1."""
    return not layout.own or "single" in layout.name or "odd" in layout.name


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_layout_is_computed_or_refused(form: Form) -> None:
    """By the kernel that the planner chooses; by every one those layouts that decide."""
    every = [kernel for kernel in form.kernels() if kernel is not None and kernel not in SLOW_ON_A_CPU]
    check([*walk(form, SIZES[0], torch.float32, "cpu", (None,), share=SHARE)])
    if every:
        check([*walk(form, SIZES[0], torch.float32, "cpu", every, telling, SHARE)])


@pytest.mark.parametrize("form", half(FORMS), ids=str)
def test_sizes_of_one_are_no_strides(form: Form) -> None:
    found = [
        each
        for sizes in SIZES[1:]
        for each in walk(form, sizes, torch.float32, "cpu", (None,), telling, SHARE)
    ]
    check(found)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_layout_by_every_kernel_of_a_gpu(form: Form) -> None:
    """Memory that torch hands out is NaN first. A share of the zoo in one dtype, and of what decides where sizes are 1.

    Of attention the latter run in the interpreter alone: a kernel for each kind of stride takes seconds to compile.
    """
    first, *others = SIZES if not form.name.startswith("attention") else SIZES[:1]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        share = SHARE_OF_A_GPU if others else SHARE_OF_A_GPU / 1.5
        for dtype in sampled((torch.float16, torch.bfloat16), 1, of=str(form)):
            found = [*walk(form, first, dtype, "cuda", form.kernels(), share=share)]
            for sizes in sampled(others, 1, of=str(form)):
                found += walk(form, sizes, dtype, "cuda", (None,), telling, SHARE_OF_A_GPU)
            check(found)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ZOO, ids=lambda layout: layout.name.replace(" ", "_"))
def test_parts_of_matrices_are_taken_or_refused(layout: StrideLayout) -> None:
    """Values and scales that lie otherwise than kernels read them do not get into a matrix."""
    draw = torch.Generator().manual_seed(3)
    a = sk.random_bsr(128, 128, 64, 0.5, dtype=torch.float16, seed=4)
    placed = layout.place(a.values.shape, torch.float16, "cpu", draw)
    if placed is not None:
        lies = placed.x.is_contiguous() and placed.x.data_ptr() % 16 == 0
        if lies:
            assert torch.equal(
                sk.BSR(a.pattern, placed.x).to_dense(), sk.BSR(a.pattern, placed.x.clone()).to_dense()
            )
        else:
            with pytest.raises(InvalidInput):
                sk.BSR(a.pattern, placed.x)
    x8 = sk.quantize(torch.randn(5, 64, generator=draw))
    scale = layout.place((5,), torch.float32, "cpu", draw)
    if scale is not None and not scale.x.is_contiguous():
        with pytest.raises(InvalidInput, match="contiguous"):
            sk.QuantizedTensor(x8.values, scale.x.abs_() if layout.own else scale.x)


def test_the_zoo_lays_out_what_it_says() -> None:
    """Its numbers are finite, all around them is NaN, and the layouts of a shape differ."""
    draw = torch.Generator().manual_seed(0)
    for shape in ((3, 5, 7), (5, 7), (7,), (1, 7), (5, 1), (1, 1)):
        seen = set()
        for layout in layouts(shape):
            placed = layout.place(shape, torch.float32, "cpu", draw)
            assert placed is not None
            assert placed.x.shape == shape
            assert placed.x.isfinite().all()
            assert placed.memory.isfinite().sum() == len(offsets(shape, placed.x.stride()).unique())
            assert not layout.own or placed.memory.isfinite().sum() == placed.x.numel()
            assert placed.untouched()
            seen.add((placed.x.stride(), placed.x.storage_offset()))
            placed.memory[0] = 1
            assert not placed.untouched()
            assert not placed.untouched(written=True)
        assert len(seen) == len(list(layouts(shape))) >= 3
