"""attention/dealt.py: in Triton's interpreter, compiled for real cards, and on a GPU."""

import pytest
import torch

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.kernels.attention import dealt as portable
from sparsek.plan import attention_grad_schedule as schedule
from tests.kernels.lang.portable_code import compiled


@pytest.mark.parametrize("lanes", [128, 256, 512])
def test_a_warp_holds_every_cta_in_registers(lanes: int) -> None:
    types = {"ticks": "*i32", "cta": "*i32", "start": "*i32"}
    code = compiled(portable._deal, types, {"LANES": lanes}, H200, 1, 3)
    assert code.stack == 0
    assert code.registers <= 128


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [1, 131, 133, 5000])
def test_it_deals_as_the_plan_does_on_a_gpu(tiles: int) -> None:
    ticks = torch.randint(1, 300, (tiles,), dtype=torch.int32)
    found, wanted = portable.deal(ticks.cuda(), 132), schedule.deal(ticks, 132)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
