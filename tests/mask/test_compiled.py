"""Masks that are made inside a compiled function: refused in one graph, made between two."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsek.mask.mask import BlockMask

MASK = BlockMask.causal(256, device="cpu")
MAKERS: dict[str, Callable[[Tensor], BlockMask]] = {
    "full": lambda _: BlockMask.full(256, device="cpu"),
    "causal": lambda _: BlockMask.causal(256, device="cpu"),
    "sliding_window": lambda _: BlockMask.sliding_window(256, 64, sinks=3, device="cpu"),
    "strided": lambda _: BlockMask.strided(256, 128, 64, device="cpu"),
    "dilated": lambda _: BlockMask.dilated(256, 64, 2, device="cpu"),
    "bigbird": lambda _: BlockMask.bigbird(256, 64, 64, 1, block=64, device="cpu"),
    "block_diagonal": lambda _: BlockMask.block_diagonal([100, 156], device="cpu"),
    "topk": lambda scores: BlockMask.topk(scores, 1, seq_len=256),
    "from_blocks": lambda _: BlockMask.from_blocks([0, 1, 2], [1, 0], 256, 256, device="cpu"),
    "from_dense": lambda _: BlockMask.from_dense(torch.ones(256, 256).tril().bool()),
    "from_mask_mod": lambda _: BlockMask.from_mask_mod(
        lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu"
    ),
    "and": lambda _: MASK & MASK,
    "or": lambda _: MASK | MASK,
    "per_head": lambda _: BlockMask.per_head([MASK, MASK]),
    "constructor": lambda _: BlockMask(
        256, 256, (128, 128), 1, 1, MASK.full, MASK.partial, lo=MASK.lo, hi=MASK.hi
    ),
}
SCORES = torch.tensor([[0.5, -1.0], [0.25, 2.0]])


@pytest.mark.parametrize("name", MAKERS)
def test_a_mask_is_not_made_within_one_graph(name: str):
    compiled = torch.compile(MAKERS[name], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"a block mask is made inside torch\.compile; make it outside"):
        compiled(SCORES)


@pytest.mark.parametrize("name", MAKERS)
def test_a_mask_is_made_between_two_graphs(name: str):
    compiled = torch.compile(lambda scores: MAKERS[name](2 * scores).to_dense() & True, backend="eager")
    assert torch.equal(compiled(SCORES), MAKERS[name](SCORES).to_dense())
