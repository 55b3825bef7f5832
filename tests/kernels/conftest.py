"""What tests of kernels share, on a GPU and in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from sparsek.core import env


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch allocates is NaN, or the largest integer: nothing is right by what was there before."""
    device = "cpu" if env.interpreting() else "cuda"
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4, device=device).isnan().all()
    assert torch.empty(4, dtype=torch.int32, device=device).new_empty(1) == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(False)
