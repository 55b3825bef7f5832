"""core/memory.py: tensors that share one allocation."""

import torch

from sparsek.core.memory import carved

CPU = torch.device("cpu")


def test_views_are_aligned_apart_and_of_one_allocation():
    shapes = [(3,), None, (2, 5), (0,), (), (4, 1, 1)]
    base, views = carved([3, *shapes[1:]], CPU)
    assert [None if x is None else tuple(x.shape) for x in views] == shapes
    assert carved([0, None], CPU)[0].data_ptr()
    base.zero_()
    for at, view in enumerate(views):
        if view is not None:
            assert view.is_contiguous()
            assert (view.data_ptr() - base.data_ptr()) % 16 == 0 or not view.numel()
            view.fill_(at + 1)
    assert [int(x.sum()) for x in views if x is not None] == [3, 30, 0, 5, 24]
    assert int(base.sum()) == 62
