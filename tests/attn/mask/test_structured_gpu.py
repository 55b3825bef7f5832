"""What building a mask for many tokens costs on a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from tests.attn.mask.test_structured import LONG, LONG_MASKS, NoReading


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG_MASKS)
def test_512k_tokens_cost_a_gpu_few_launches_and_little_memory(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    """What its time depends on. The time itself is a row of `sparsek bench fresh`: mask_plan."""
    build, bytes_per_token = LONG_MASKS[name]
    build(4096, device="cuda")  # the first work of a process makes the context and its handles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_sync(), NoReading() as mode:
        mask = build(LONG, device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    assert mode.launches <= 42
    assert mask.nbytes <= bytes_per_token * LONG
    assert peak <= 64 * LONG  # half of what one int32 for every block would take
