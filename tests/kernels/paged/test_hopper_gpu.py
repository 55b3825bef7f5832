"""hopper.attention_paged on a GPU: right on drawn batches, with NaN wherever no key is, and the same bits every time.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: run it under pytest-xdist.
"""

from dataclasses import replace

import pytest
import torch

from sparsek.kernels import load
from tests.kernels.lang.drawn import fresh
from tests.kernels.paged.ragged import Ragged, check, drawn, found_before, make, run

pytestmark = pytest.mark.gpu
KERNEL = "hopper.attention_paged"
EDGES = {
    "one tile": Ragged((128,), (128,), heads=(1, 1)),
    "keys end in a box": Ragged((5, 1), (70, 129), heads=(1, 1)),
    "nothing to see": Ragged((3, 0, 50), (0, 7, 20), behind=9),
    "not causal": Ragged((3, 0, 50), (0, 7, 300), causal=False),
    "window": Ragged((700, 1), (2000, 3000), window=300),
    "window and sinks": Ragged((700, 1), (2000, 3000), window=300, sinks=200),
    "window to both sides": Ragged((700, 1), (2000, 3000), window=300, sinks=4, causal=False),
    "softcap and sinks": Ragged((200, 1, 3), (500, 300, 0), softcap=5.0, sink_logits=True, spread=4.0),
    "out of odd strides": Ragged((200, 33), (500, 300), odd_out=True, dims=(96, 64)),
    "pages shared": Ragged((200, 33, 1), (900, 500, 800), shared=True, page=64),
    "one head of keys": Ragged((40, 1, 1), (500, 300, 9), heads=(64, 1)),
    "more tiles than CTAs": Ragged((1500, 900), (1500, 2000), heads=(32, 8)),
    **{f"pages of {n}": Ragged((300, 77), (300, 1000), page=n) for n in (16, 32, 64, 256)},
    **{f"heads of {n}": Ragged((300, 77), (300, 1000), dims=(n, n)) for n in (64, 96, 256)},
    **{f"lists of {n} heads": Ragged((300, 100), (900, 2000), list_heads=n) for n in (1, 2, 4)},
    "small blocks": Ragged((300, 100), (900, 2000), list_heads=2, list_block=(64, 64), page=16, causal=False),
}


def hold(batch: Ragged, seed: int) -> None:
    """Every config, twice: within the budget, and the same bits; and with scores of 0, lse counts the keys."""
    kernel, made = load(KERNEL), make(batch, seed)
    assert kernel.why_not(made.problem) == []
    for c in kernel.configs(made.problem):
        out, lse = (None if x is None else x.clone() for x in run(kernel, made, c))
        assert out is not None
        check(made, out, lse, f"{c}, seed {seed}")
        again, other = run(kernel, made, c)
        assert torch.equal(out.nan_to_num(), again.nan_to_num()), f"{c}, seed {seed}: other bits"
        assert lse is None or other is None or torch.equal(lse.nan_to_num(), other.nan_to_num())
    made.call.q.zero_()
    out, lse = run(kernel, made)
    check(made, out, lse, f"scores of 0, seed {seed}")


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_edges(name: str, dtype: torch.dtype) -> None:
    hold(replace(EDGES[name], dtype=dtype), fresh())


@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("sinks", [0, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_pages_that_no_window_reaches_may_hold_nan(page: int, sinks: int, causal: bool) -> None:
    batch = Ragged((3, 1, 260, 1), (1500, 900, 1700, 31), window=90, sinks=sinks, page=page, causal=causal)
    made = make(batch, fresh())
    for c in load(KERNEL).configs(made.problem):
        found_before(made, load(KERNEL), c)


@pytest.mark.parametrize("number", range(24))
def test_drawn_batches(number: int) -> None:
    seed = fresh()
    hold(drawn(seed), seed)


def test_a_request_has_the_same_bits_in_any_batch() -> None:
    kernel, seed = load(KERNEL), fresh()
    made = make(Ragged((200, 90, 333), (700, 90, 2000)), seed)
    c = kernel.default(made.problem)
    whole, _ = run(kernel, made, c)
    whole = whole.clone()
    for r, (first, last) in enumerate(((0, 200), (200, 290), (290, 623))):
        out = torch.full_like(whole[first:last], torch.nan)
        edges = torch.tensor([0, last - first], dtype=torch.int32, device="cuda")
        call = made.call._replace(
            q=made.call.q[first:last], out=out, lse=torch.empty(4, last - first, dtype=torch.float32, device="cuda"),
            cu_seqlens_q=edges, seq_lens=made.call.seq_lens[r : r + 1], block_table=made.call.block_table[r : r + 1],
        )  # fmt: skip
        kernel.launch(c, kernel.prepare(made.problem, c, out.device), call)
        assert torch.equal(out, whole[first:last]), f"request {r}, seed {seed}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cu_seqlens_q", [5, -7, 2**30]),
        ("cu_seqlens_q", [500, 0, 500]),
        ("seq_lens", [2**31 - 1, -4]),
        ("block_table", None),
    ],
)
def test_bad_lengths_and_tables_read_and_write_within_their_tensors(
    name: str, values: "list[int] | None"
) -> None:
    kernel, made = load(KERNEL), make(Ragged((300, 200), (900, 500)), fresh())
    tensor = getattr(made.call, name)
    if values is None:
        tensor.random_(-(2**31), 2**31 - 1)
    else:
        tensor.copy_(torch.tensor(values, dtype=torch.int32))
    run(kernel, made)
    torch.cuda.synchronize()
    assert (made.room[:, 4:] == 3).all()
    assert (made.room[:, :, 128:] == 3).all()


def test_a_graph_stays_right_while_lengths_tables_and_lists_change() -> None:
    kernel, seed = load(KERNEL), fresh()
    batch = Ragged((300, 200, 1), (900, 500, 700))
    made = make(batch, seed)
    c, call = kernel.default(made.problem), made.call
    work = kernel.prepare(made.problem, c, call.q.device)
    kernel.launch(c, work, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(c, work, call)
    for queries, keys in (
        ((1, 400, 100), (64, 900, 100)),
        ((0, 0, 401), (0, 128, 900)),
        (batch.queries, batch.keys),
    ):
        other = make(replace(batch, queries=queries, keys=keys, behind=501 - sum(queries)), seed + 1)
        for name in ("q", "seq_lens", "cu_seqlens_q"):
            getattr(call, name).copy_(getattr(other.call, name))
        width, pages = other.call.block_table.shape[1], other.call.k.shape[0]
        call.block_table.fill_(-1)
        call.block_table[:, :width] = other.call.block_table
        for name in ("k", "v"):
            getattr(call, name).fill_(torch.nan)
            getattr(call, name)[:pages] = getattr(other.call, name)
        call.out.fill_(torch.nan)
        assert call.lse is not None
        call.lse.fill_(torch.nan)
        graph.replay()
        made.batch = other.batch
        check(made, call.out, call.lse, f"{queries}, {keys}, seed {seed}")
