"""FlexPrefill's and VerticalSlash's kernels in Triton's interpreter against plain torch."""

import pytest
import torch

from sparsek.attn.kernels.estimate import cut, line_blocks, probe
from sparsek.attn.reference import line_blocks as reference
from sparsek.attn.reference import lines
from sparsek.attn.reference.line_blocks import BLOCKS, LINES, NEAR, Grid, Head
from tests.attn.kernels.estimate.line_cases import CORNERS, check_corner

LINE, STREAM, SCORED = Head(LINES, 40, 120), Head(NEAR, 20, 100), Head(BLOCKS, 2, 0)


def operands(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> list[torch.Tensor]:
    torch.manual_seed(q_len + kv_len)
    return [
        (torch.randn(batch, n, length, 16) * 2).half() for n, length in ((heads, q_len), (kv_heads, kv_len))
    ]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "heads", "grid"),
    [
        (1, 1, (LINE, STREAM, SCORED), Grid(150, 150, (64, 64), 0)),
        (2, 1, (Head(LINES, 30, 50), SCORED), Grid(40, 230, (128, 64), 190)),
        (1, 2, (STREAM, LINE), Grid(70, 60, (64, 128), -30)),
    ],
)
def test_vertical_slash_keeps_the_blocks_of_the_specification(
    batch: int, kv_heads: int, heads: tuple[Head, ...], grid: Grid
):
    q, k = operands(batch, len(heads), kv_heads, grid.q_len, grid.kv_len)
    for scale in (None, 0.05):
        ours, right = (
            each.vertical_slash_blocks(q, k, grid, heads, 64, scale) for each in (line_blocks, reference)
        )
        assert torch.equal(ours, right)
        assert right.sum() > 0


@pytest.mark.parametrize("distance", CORNERS)
def test_a_distance_that_meets_a_block_in_its_corner_keeps_it(distance: int):
    check_corner(distance, 16, "cpu")


@pytest.mark.parametrize(
    ("batch", "tau", "grid"),
    [
        (1, 0.0, Grid(190, 190, (64, 64), 0)),
        (1, 0.25, Grid(60, 300, (64, 128), 240)),
        (1, 1.0, Grid(260, 260, (64, 64), 0)),
        (2, 0.0, Grid(70, 60, (128, 64), -30)),
    ],
)
def test_flexprefill_keeps_the_blocks_of_the_specification(batch: int, tau: float, grid: Grid):
    q, k = operands(batch, 2, 1, grid.q_len, grid.kv_len)
    q[:, 1] *= 3  # the heads differ in how near their softmax is to that of means
    options = {"last": 128, "gamma": 0.6, "tau": tau, "least": 1}
    (ours, flags), (right, aware) = (
        each.flex_blocks(q, k, grid, **options) for each in (line_blocks, reference)
    )
    assert torch.equal(ours, right)
    assert torch.equal(flags.bool(), aware)
    assert aware.any() == (tau > 0)
    (ours, _), (right, _) = (
        each.flex_blocks(q, k, grid, scale=0.05, **options) for each in (line_blocks, reference)
    )
    assert torch.equal(ours, right)


@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(100, 200, 100), (20, 150, 150), (70, 90, -30)])
def test_lines_have_the_mass_of_the_specification(q_len: int, kv_len: int, offset: int):
    q, k = operands(1, 1, 1, q_len, kv_len)
    (ours_v, ours_s), right = probe.token_lines(q, k, 64, offset), lines.token_lines(q, k, 64, offset)
    torch.testing.assert_close(ours_v, right.vertical, rtol=1e-5, atol=1e-5)
    n = right.slash.shape[-1]
    torch.testing.assert_close(ours_s[..., :n], right.slash, rtol=1e-5, atol=1e-5)
    assert not ours_s[..., n:].any()


@pytest.mark.parametrize(
    ("n", "share", "least"), [(300, 0.9, 2), (5000, 0.0, 700), (17, 1.0, 0), (5, 0.0, 99)]
)
def test_a_cut_keeps_exactly_what_the_specification_keeps(n: int, share: float, least: int):
    torch.manual_seed(n)
    mass = torch.rand(2, n) ** 8
    mass[0, : n // 2] = 0
    mass[1, 3] = torch.nan
    found, counts = cut.cut(mass, share, least)
    assert counts is not None
    kept = counts.diff().bool()
    assert torch.equal(kept, lines.cut(mass, share, least))
    assert torch.equal(kept, lines.codes(mass) >= found[:, None])
