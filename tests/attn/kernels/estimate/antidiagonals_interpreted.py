"""XAttention's estimate: kernels in Triton's interpreter against plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.kernels.estimate import antidiagonals, groups
from sparsek.attn.reference import antidiagonals as reference
from tests.sampling import sampled

TINY = antidiagonals.Config(tile_m=16, tile_n=16, num_warps=4, num_stages=2, tma=False)


def both(
    q: torch.Tensor, k: torch.Tensor, config: antidiagonals.Config | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    said = {"stride": 16, "block": (128, 128), "causal": True, "q_offset": k.shape[2] - q.shape[2], **options}
    return antidiagonals.block_mass(q, k, config=config, **said), reference.block_mass(q, k, **said)


def operands(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int) -> list[torch.Tensor]:
    return [
        (torch.randn(batch, n, length, dim) * 2).half() for n, length in ((heads, q_len), (kv_heads, kv_len))
    ]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 1, 270, 270, 16), {"fp8": True}),
        ((2, 2, 2, 70, 330, 24), {"fp8": True, "stride": 8, "block": (64, 128)}),
        ((1, 2, 1, 130, 260, 40), {"causal": False, "block": (128, 64)}),
        ((1, 1, 1, 40, 300, 32), {"stride": 8, "block": (64, 64), "q_offset": -20, "scale": 0.03}),
        ((1, 1, 1, 200, 90, 16), {"q_offset": 5, "fp8": True}),
        ((1, 1, 1, 200, 200, 8), {"fp8": True}),
        ((1, 1, 1, 100, 100, 5), {}),
    ],
)
def test_mass_is_that_of_the_specification(sizes: tuple[int, ...], options: dict[str, Any]):
    torch.manual_seed(1)
    q, k = operands(*sizes)
    ours, right = both(q, k, **options)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    assert right.sum() > 0


@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [(40, 600, False), (200, 500, True)])
def test_rows_after_the_last_query_count_nothing(q_len: int, kv_len: int, causal: bool):
    q, k = operands(1, 2, 1, q_len, kv_len, 16)
    ours, right = both(q, k, TINY, causal=causal, q_offset=kv_len - q_len)
    torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4)


def test_several_tiles_for_each_program():
    """The running maximum rises and falls over key tiles; a middle tile has no partner."""
    torch.manual_seed(2)
    q, k = operands(1, 2, 2, 8 * 80, 8 * 80, 16)
    k *= torch.linspace(0.1, 3, 640).roll(200)[:, None]
    ours, right = both(q, k, TINY, stride=8, block=(128, 64))
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", sampled(["step", "column", "expanded"], 2))
def test_lengths_may_have_any_strides(form: str):
    q, k = operands(2, 2, 1, 100, 190, 16)
    wide = torch.tensor([[[9, 70], [50, 3], [62, 1]], [[0, 5], [64, 2], [30, 8]]], dtype=torch.int32)
    lengths = {"step": wide[..., 0], "column": wide[:, :1, 0].repeat(1, 3).mT.contiguous().mT}.get(form)
    lengths = wide[:1, :1, 0].expand(2, 3) if lengths is None else lengths
    ours, right = both(q, k, block=(64, 64), kv_lengths=lengths)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, both(q, k, block=(64, 64), kv_lengths=lengths.contiguous())[0])


@given(st.data())
@settings(max_examples=2)
def test_blocks_with_lengths(data: st.DataObject):
    """Keys that do not exist have no part in it, whatever they hold."""
    causal, fp8, block = (
        data.draw(st.sampled_from(each)) for each in ((True, False), (True, False), (64, 128))
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q, k = operands(2, 2, 1, 100, 190, 16)
    blocks = -(-190 // block)
    lengths = torch.randint(0, block + 1, (data.draw(st.sampled_from((1, 2))), blocks), dtype=torch.int32)
    options = {"block": (64, block), "causal": causal, "fp8": fp8, "kv_lengths": lengths}
    ours, right = both(q, k, **options)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    absent = torch.arange(blocks * block) % block >= lengths.repeat_interleave(block, 1)
    spoiled = k.masked_fill(absent[:, None, :190, None].expand(2, -1, -1, -1), torch.nan)
    assert torch.equal(both(q, spoiled, **options)[0], ours)


def test_any_strides_and_scales():
    """Heads between tokens; magnitudes from 1e-7 to 6e4, where each group has its own scale."""
    torch.manual_seed(3)
    q, k = (torch.randn(1, 128, 2, 16).half().transpose(1, 2) for _ in range(2))
    q[:, :, :64] *= 1e-4
    k[:, :, 64:] *= 1e3
    ours, right = both(q, k, fp8=True, block=(64, 64))
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    made = groups.group(q, k, 16, 64, None, True, (16, 16))
    assert made.q_scale is not None
    values = made.q.float() * made.q_scale[:, None]
    expected = reference.rounded(reference.grouped(q, 16 * made.q_rows, 16)).flip(3).flatten(3).flatten(0, 2)
    assert torch.equal(values, expected)


def test_a_nan_reaches_only_rows_that_see_it():
    torch.manual_seed(4)
    q, k = operands(1, 1, 1, 256, 256, 16)
    k[0, 0, 200] = torch.nan
    ours, right = both(q, k, block=(64, 64), stride=8)
    for mass in (ours, right):
        assert not mass[0, 0, :3].isnan().any()
        assert mass[0, 0, 3].isnan().all()
