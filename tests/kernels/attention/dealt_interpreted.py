"""kernels/attention/dealt.py in Triton's interpreter."""

import pytest
import torch

from sparsek.kernels.attention import dealt as portable
from sparsek.plan import attention_grad_schedule as schedule


@pytest.mark.parametrize("ctas", [1, 2, 7, 132, 200])
@pytest.mark.parametrize("tiles", [0, 1, 6, 150])
def test_it_deals_as_the_plan_does(tiles: int, ctas: int) -> None:
    ticks = torch.randint(1, 40, (tiles,), dtype=torch.int32)
    for given in (ticks, ticks.sort(descending=True).values, torch.full_like(ticks, 5)):
        found, wanted = portable.deal(given, ctas), schedule.deal(given, ctas)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(x.dtype == torch.int32 for x in found)
