"""Decode context parallelism of vLLM, with a thread for each rank: every token is on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.integrations.vllm import Options
from sparsek.integrations.vllm_layer import LayerAttention, batch_of
from sparsek.integrations.vllm_shards import ContextShard, combined
from tests.integrations.vllm_batches import Drawn, drawn, engine, everything, layer, right, served
from tests.refusals import refused

NEW, OLD, SCALE = (
    [1, 1, 1, 90, 64, 200],
    [0, 63, 300, 0, 64, 150],
    0.3,
)  # three decodes, then chunks of prompts


class Group:
    """vLLM's GroupCoordinator of the threads of a test."""

    def __init__(self, ranks: int) -> None:
        self.world_size, self._given = ranks, cast(list[Any], [None] * ranks)
        self._barrier, self._local = threading.Barrier(ranks, timeout=60), threading.local()

    def _all(self, x: Tensor) -> list[Any]:
        self._given[self._local.rank] = x
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack(self._all(x)).sum(0).chunk(self.world_size, dim)[self._local.rank]

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns in each thread."""

        def start(rank: int) -> Any:
            self._local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(start, range(self.world_size)))


def shard_of(batch: Drawn, shard: ContextShard, seed: int) -> Drawn:
    """The batch of one rank: its own queries, all keys, and a cache of the tokens that are here."""
    here = [torch.arange(n) // shard.interleave % shard.ranks == shard.rank for n in batch.lengths]
    local = [int(each.sum()) for each in here]
    cached = drawn(local, [0] * len(local), page=batch.page, dtype=batch.q.dtype)
    at = iter(cached.slots.split(local))
    slots = []
    for r, (each, new) in enumerate(zip(here, batch.new, strict=True)):
        of = torch.full((len(each),), -1)
        of[each] = next(at)
        old = of[: len(each) - new][each[: len(each) - new]]
        both = torch.cat((batch.k[r], batch.v[r]), 2)[: len(each) - new][each[: len(each) - new]]
        cached.cache.transpose(1, 2)[old // batch.page, old % batch.page] = both
        slots.append(of[len(each) - new :])
    q = drawn(batch.new, OLD, seed=seed, dtype=batch.q.dtype).q
    return Drawn(
        batch.new,
        batch.lengths,
        q,
        batch.k,
        batch.v,
        batch.page,
        cached.table,
        cached.cache,
        torch.cat(slots),
    )


@pytest.mark.parametrize(
    ("ranks", "interleave", "options"),
    [
        (2, 1, {}),
        (3, 16, {"logits_soft_cap": 2.0, "sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}),
        (2, 64, {}),
    ],
)
def test_ranks_that_share_the_tokens_of_requests(
    ranks: int, interleave: int, options: dict[str, Any]
) -> None:
    batch, group = drawn(NEW, OLD), Group(ranks)
    shards = [ContextShard(ranks, rank, interleave) for rank in range(ranks)]
    parts = [shard_of(batch, shard, shard.rank) for shard in shards]

    def work(rank: int) -> Tensor:
        impl = LayerAttention(4, 16, SCALE, 2, **options)
        impl.group = group
        spans = batch_of(parts[rank].common(), Options(), shard=shards[rank])
        assert [each.host is None for each in spans.spans] == [True, False]
        return served(impl, parts[rank], spans)

    for part, found in zip(parts, group.run(work), strict=True):
        wanted = right(part, everything, SCALE, options.get("logits_soft_cap", 0.0), options.get("sinks"))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_new_tokens_are_read_as_an_fp8_cache_has_them() -> None:
    factor, one = torch.tensor(0.5), ContextShard(1, 0)
    outs = []
    for shard in (None, one):
        batch = drawn([5, 1], [0, 0])
        batch.cache = torch.full(batch.cache.shape, 0x7F, dtype=torch.uint8)
        impl = LayerAttention(4, 16, SCALE, 2, kv_cache_dtype="fp8")
        impl.group = Group(1)
        impl.group._local.rank = 0
        spans = batch_of(batch.common(), Options(), shard=shard)
        outs.append(served(impl, batch, spans, layer(_k_scale=factor, _v_scale=factor)))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)


def test_lengths_and_bounds() -> None:
    at, lengths = torch.arange(200), torch.arange(200)
    for shard in (ContextShard(3, rank, interleave) for rank in range(3) for interleave in (1, 4)):
        here = (at // shard.interleave % 3 == shard.rank).int().cumsum(0) - (
            at // shard.interleave % 3 == shard.rank
        ).int()
        assert torch.equal(shard.lengths(lengths), here.int())
        assert all(int(here[n]) <= shard.bound(n) for n in range(200))


def test_an_engine_whose_ranks_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=4)
    made = engine(monkeypatch, {"layers.0": {}}, (4, 2), 16, SCALE, parallel_config=shared)
    common = drawn(NEW, OLD).common(dcp_local_seq_lens=torch.full((6,), 7))
    spans = made.builder.build(0, common)
    assert spans.shard == ContextShard(2, 1, 4)
    assert spans.spans[0].lengths.tolist() == [7, 7, 7]  # of vLLM, which a graph reads anew
    longest = made.builder.build_for_cudagraph_capture(common).spans[0].max_k
    assert longest == 4096
    kind = made.builder.get_cudagraph_support(made.builder.vllm_config, None)
    assert kind.name == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert made.backend.get_impl_cls().supports_dcp
    policy = {"sparsek": {"policy": "XAttention"}}
    again = (monkeypatch, {"layers.0": {}}, (4, 2), 16, SCALE)
    refused("sliding windows and policies", engine, *again, parallel_config=shared, additional_config=policy)
    monkeypatch.setattr(sk.integrations.vllm_layer.LayerAttention, "dcp_world_size", 2, raising=False)
    refused(
        "a layer has a sliding window", engine, monkeypatch, {"layers.0": {"sliding_window": 8}}, *again[2:]
    )


def test_a_nan_stays_one_and_a_row_without_tokens_is_zero() -> None:
    group = Group(2)
    out = torch.ones(3, 4, 8)
    lse = torch.tensor([[0.0, torch.nan, -torch.inf]]).expand(4, 3)
    for found, sums in group.run(lambda rank: combined(out, lse, 1, cast(Any, group), rank)):
        assert [row.isnan().all().item() for row in found] == [False, True, False]
        torch.testing.assert_close(found[0], out[0, :2])
        assert not found[2].any()
        assert (sums[2] == -torch.inf).all()
