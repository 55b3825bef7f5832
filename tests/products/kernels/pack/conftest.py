"""What the tests of packing share."""

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def last_page() -> Iterator[Tensor]:
    """Bytes behind which there is no memory: who reads on dies."""
    size = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * size)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(whole.data_ptr() + size), ctypes.c_size_t(size), 0) == 0
    yield whole[:size]
    protect(ctypes.c_void_p(whole.data_ptr() + size), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE)
