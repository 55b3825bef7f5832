"""What every test may use: the `gpu` marker's skip, a `device` fixture, hypothesis without deadlines, one thread."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from hypothesis import settings

settings.register_profile("sparsek", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("sparsek")

# Workers share the cores, and torch's threads wait for each other: on a busy machine they take eight times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that the test is to run on."""
    return request.param


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests that hold times against each other: those of one thread compare well on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync():` fails where its body waits for the device."""

    @contextmanager
    def refuse() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refuse
