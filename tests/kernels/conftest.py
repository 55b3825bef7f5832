"""What tests of kernels share, on a GPU and in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from sparsek.core import env
from tests.kernels.lang.drawn import fresh


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Many processes share the card: what a large test leaves in torch's cache goes back."""
    yield
    if torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch allocates is NaN, or the largest integer: nothing is right by what was there before."""
    device = "cpu" if env.interpreting() else "cuda"
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4, device=device).isnan().all()
    assert torch.empty(4, dtype=torch.int32, device=device).new_empty(1) == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """One that no run had before."""
    return fresh()
