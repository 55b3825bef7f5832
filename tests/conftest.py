"""What every test may use: the `gpu` marker's skip, a `device` fixture, and hypothesis without deadlines."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("sparsek", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("sparsek")


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
