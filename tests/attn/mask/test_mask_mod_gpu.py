"""BlockMask.from_mask_mod on a GPU: compiled by inductor, and how often the host waits."""

import warnings

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask

pytestmark = pytest.mark.gpu


def waits(told: list[str]) -> int:
    """How many of torch's warnings tell of a wait; the mode's own warning, once a process, is none."""
    return sum("called a synchronizing" in each for each in told)


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings(
    "ignore:tl.where with a non-boolean condition"
)  # in code of torch 2.11's compiler
def test_the_host_waits_once(bits: bool, compiled: bool):
    document = torch.arange(3000, device="cuda") // 700

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (document[q] == document[k])
        return seen & ((q - k) % 3 == 0) if bits else seen

    def build(device: str, compiled: bool) -> BlockMask:
        return BlockMask.from_mask_mod(mask_mod, None, 2, 3000, 2900, device=device, compiled=compiled)

    build("cuda", compiled)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            made = build("cuda", compiled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    texts = [str(each.message) for each in told]
    assert 1 <= waits(texts) <= 1 + bits, texts
    document = document.cpu()
    wanted = build("cpu", False)
    assert made.sizes == wanted.sizes
    assert (made.pure, made.heavy_blocks) == (wanted.pure, wanted.heavy_blocks)
    assert torch.equal(made.to_dense().cpu(), wanted.to_dense())
