"""attn/kernels/forward/lengths.py in Triton's interpreter: the order of torch's sorts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.kernels.forward.lengths import Lengths, launched_order, launched_walk, longest_first, walked


@st.composite
def lengths(draw: st.DrawFn) -> Lengths:
    groups, members, tiles = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 80))
    top, seed = draw(st.sampled_from((0, 1, 5, 60))), draw(st.integers(0, 2**31))
    noise = torch.Generator().manual_seed(seed)
    p, f = torch.randint(0, top + 1, (2, groups * members * tiles), generator=noise, dtype=torch.int32)
    times = draw(st.integers(1, 2))
    found = Lengths(p, f, groups, tiles, 0, members, times)
    return found._replace(most=int(found.costs.max()) + draw(st.sampled_from((0, 3))))


@settings(max_examples=10)
@given(lengths())
def test_tiles_are_ordered_as_by_a_stable_sort(given_lengths: Lengths) -> None:
    assert torch.equal(launched_order(given_lengths), longest_first(given_lengths))


@settings(max_examples=12)
@given(lengths(), st.integers(1, 50), st.integers(1, 2), st.integers(0, 30))
def test_parts_are_those_of_walk(given_lengths: Lengths, part: int, replicas: int, slack: int) -> None:
    visited, heads = (int(given_lengths.costs.sum()) + slack) * replicas, given_lengths.groups * replicas
    found = launched_walk(given_lengths, visited, part, 4, heads)
    wanted = walked(given_lengths, visited, part, 4, heads)
    there = wanted.order[..., 0] >= 0
    assert found.order.shape == wanted.order.shape
    assert torch.equal(found.order[there], wanted.order[there])
    assert bool((found.order[~there] == torch.tensor([-1, 0, 0, 0])).all())
    assert (found.lead, found.section, found.replicas, found.slots) == (
        wanted.lead,
        wanted.section,
        wanted.replicas,
        wanted.slots,
    )
    assert (found.merges is None) == (wanted.merges is None)
    if found.merges is not None and wanted.merges is not None:
        cut = wanted.merges[:, 3] > 1
        assert torch.equal(found.merges[cut], wanted.merges[cut])
        assert not found.merges[~cut].any()


def test_lengths_beyond_what_the_host_knows_write_nothing_out_of_bounds() -> None:
    big = 2**31 - 1
    counts = torch.tensor([big, -big, 5, 40, big, 3, 7, -1] * 4, dtype=torch.int32)
    made = launched_walk(Lengths(counts, counts.flip(0), 4, 8, 40), 150, 8, 4, 4)
    assert int(made.order[..., 0].min()) >= -1
    assert int(made.order[..., 0].max()) < 8
    assert int(made.order[..., 3].max()) < made.slots
    assert made.merges is not None
    assert int((made.merges[:, 2] + made.merges[:, 3])[made.merges[:, 3] > 0].max()) <= made.slots
