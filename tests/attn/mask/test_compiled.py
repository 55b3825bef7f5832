"""Masks that are made inside a compiled function: of options as constants, of tensors by one op, others not at all."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from tests.refusals import refused
from tests.sampling import sampled
from tests.sums import alike

MASK = BlockMask.causal(256, device="cpu")
LENGTH = 500  # in 4 blocks of 128, the last one cut
Make = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scores(*shape: int) -> Tensor:
    return torch.rand(shape or (1, 2, 4, 4))


def indices() -> Tensor:
    return torch.stack([torch.randperm(4)[:3] for _ in range(4)])


def edges() -> Tensor:
    return torch.tensor([0, *sorted(torch.randint(1, LENGTH - 3, (3,)).tolist()), LENGTH - 3])


OF_OPTIONS: dict[str, Make] = {
    "full": lambda _: BlockMask.full(LENGTH, device="cpu"),
    "causal": lambda _: BlockMask.causal(LENGTH, device="cpu"),
    "sliding_window": lambda _: BlockMask.sliding_window(LENGTH, 64, sinks=3, device="cpu"),
    "strided": lambda _: BlockMask.strided(LENGTH, 128, 64, block=64, device="cpu"),
    "dilated": lambda _: BlockMask.dilated(LENGTH, 64, 2, device="cpu"),
    "bigbird": lambda _: BlockMask.bigbird(LENGTH, 64, 64, 1, block=64, device="cpu"),
    "block_diagonal": lambda _: BlockMask.block_diagonal([100, LENGTH - 100], device="cpu"),
    "from_blocks": lambda _: BlockMask.from_blocks([0, 1, 2, 2, 3], [1, 0, 3], LENGTH, LENGTH, device="cpu"),
}
OF_TENSORS: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "topk": (lambda x: BlockMask.topk(x, 2, causal=True, always=(1, 1), seq_len=LENGTH), scores),
    "topk, one head": (lambda x: BlockMask.topk(x, 1, seq_len=LENGTH), lambda: scores(4, 4)),
    "topk, halves": (lambda x: BlockMask.topk(x, 1, seq_len=LENGTH, block=256), lambda: scores(2, 2)),
    "topk, bits": (
        lambda x: BlockMask.topk(x, 2, True, seq_len=LENGTH, kv_lengths=(128 * x[0, 0, 0]).int()),
        scores,
    ),
    "budgets": (
        lambda x: BlockMask.topk(x, (1 + 3 * x[0, :, 0, 0]).int(), seq_len=LENGTH, most=3),
        scores,
    ),
    "cumulative": (lambda x: BlockMask.cumulative(x, 0.6, True, seq_len=LENGTH), scores),
    "from_block_map": (lambda x: BlockMask.from_block_map(x > 0.5, LENGTH, causal=True), scores),
    "from_indices": (lambda x: BlockMask.from_indices(x, seq_len=LENGTH, causal=True), indices),
    "documents": (lambda x: BlockMask.documents(x, LENGTH), edges),
    "documents, window": (lambda x: BlockMask.documents(x, LENGTH, window=70, causal=False, block=64), edges),
    "lists": (lambda x: sk.TokenLists(x, 128, window=70), lambda: torch.randint(-1, 5, (1, 1, LENGTH, 2))),
    "packed": (lambda x: sk.MaskPolicy(window=90).packed(x, seq_len=LENGTH), edges),
}
REFUSED: dict[str, Make] = {
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
    "block_diagonal of a tensor": lambda x: BlockMask.block_diagonal((x[0] > 9).int(), device="cpu"),
}


class Counting:
    """A backend of torch.compile that counts its graphs and notes the ops of the last one."""

    def __init__(self, name: str = "eager") -> None:
        self.name, self.graphs, self.ops = name, 0, list[str]()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        self.ops = [str(node.target) for node in graph.graph.nodes if "sparsek" in str(node.target)]
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)


def qkv(length: int = LENGTH) -> list[Tensor]:
    return [torch.randn(1, heads, length, 32, requires_grad=True) for heads in (2, 1, 1)]


def check(run: Callable[..., Tensor], compiled: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Both give the same, and so do their gradients."""
    out, expected = compiled(*given), run(*given)
    assert alike(out, expected)
    wanted = [x for x in given if x.requires_grad]
    grad = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, wanted, grad), torch.autograd.grad(expected, wanted, grad), strict=True
    ):
        assert alike(x, y)


@pytest.mark.parametrize("name", sampled(OF_OPTIONS, 2))
def test_a_mask_of_options_is_a_constant_of_the_graph(name: str):
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sk.attention(q, k, v, OF_OPTIONS[name](q))

    counting = Counting()
    compiled = torch.compile(run, fullgraph=True, backend=counting)
    for _ in range(2):
        check(run, compiled, qkv())
    assert (counting.graphs, counting.ops) == (1, ["sparsek.attention"])


@pytest.mark.parametrize("name", sampled(OF_TENSORS, 4))
def test_a_mask_of_tensors_is_one_node_and_new_values_do_not_compile_again(name: str):
    make, draw = OF_TENSORS[name]

    def run(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sk.attention(q, k, v, make(x))

    counting = Counting()
    compiled = torch.compile(run, fullgraph=True, backend=counting)
    for _ in range(3):
        check(run, compiled, [draw(), *qkv()])
    assert (counting.graphs, counting.ops) == (1, ["sparsek.mask", "sparsek.attention"])


POLICIES: dict[str, Any] = {
    "mean": sk.policies.MeanTopK(topk=2, block=64),
    "topk": sk.MaskPolicy(topk=2, block=64),
    "xattention": sk.policies.XAttention(threshold=0.7, block=64),
    "window": sk.MaskPolicy(window=90),
}


@pytest.mark.parametrize(("name", "strict"), sampled(product((*OF_TENSORS, *POLICIES), (False, True)), 6))
def test_an_exported_program_chooses_by_the_values_of_its_call(name: str, strict: bool):
    make, draw = OF_TENSORS.get(name, (lambda x: POLICIES[name], scores))

    class Program(torch.nn.Module):
        def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sk.attention(q, k, v, make(x))

    given = [draw(), *(x.detach() for x in qkv())]
    exported = torch.export.export(Program(), tuple(given), strict=strict).module()
    for _ in range(2):
        other = [draw(), *(x.detach() for x in qkv())]
        assert alike(exported(*other), Program()(*other))


@pytest.mark.parametrize("backend", sampled(["aot_eager", "inductor"], 1))
def test_other_backends(backend: str):
    def run(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = BlockMask.topk(x.relu(), 2, causal=True, seq_len=LENGTH)
        return sk.attention(2 * q, k, v + 1, mask) * 3 + sk.attention(q, k, v, mask)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        check(run, compiled, [scores(), *qkv()])


def test_other_lengths_and_options_compile_again():
    def run(x: Tensor, share: float, kept: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        best = sk.attention(q, k, v, BlockMask.topk(x, kept, seq_len=length))
        return best + sk.attention(q, k, v, BlockMask.cumulative(x, share, seq_len=length))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for length, share, kept in ((500, 0.3, 1), (500, 0.7, 2), (300, 0.7, 2)):
        x = scores(1, 2, *[-(-length // 128)] * 2)
        given = x, share, kept, *qkv(length)
        assert torch.equal(compiled(*given), run(*given))


LISTS = torch.randint(-1, 4, (1, 1, LENGTH, 2))
GIVEN: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    "lists, window": (lambda n: sk.TokenLists(LISTS, 128, window=n), (70, 71, 72)),
    "lists, block": (lambda n: sk.TokenLists(LISTS, n), (32, 64, 128)),
    "window": (lambda n: sk.MaskPolicy(window=n), (70, 71, 72)),
    "stride": (lambda n: sk.MaskPolicy(128, stride=n), (128, 256, 384)),
}


@pytest.mark.parametrize("name", sampled(GIVEN, 3))
def test_a_rule_given_to_the_graph_may_have_other_numbers_in_each_call(name: str):
    """torch.compile has symbols for numbers that change."""
    make, numbers = GIVEN[name]
    compiled = torch.compile(sk.attention, fullgraph=True, backend="eager")
    q, k, v = (x.detach() for x in qkv())
    for each in numbers:
        assert torch.equal(compiled(q, k, v, make(each)), sk.attention(q, k, v, make(each)))


def test_the_mask_itself_may_leave_the_graph():
    made = torch.compile(lambda x: BlockMask.topk(x, 2, seq_len=LENGTH), fullgraph=True, backend="aot_eager")
    x = scores()
    mask, expected = made(x), BlockMask.topk(x, 2, seq_len=LENGTH)
    assert torch.equal(mask.to_dense(), expected.to_dense())
    q, k, v = qkv()
    assert torch.equal(sk.attention(q, k, v, mask), sk.attention(q, k, v, expected))
    assert not mask.sizes.exact
    assert (mask.label, mask.stored_blocks) == (expected.label, expected.stored_blocks)


def test_faults_in_values_are_raised_by_the_run():
    compiled = torch.compile(
        lambda x: BlockMask.topk(x, 2, seq_len=LENGTH).lo, fullgraph=True, backend="aot_eager"
    )
    compiled(scores())
    refused(r"scores\[0, 0, 0, 0\] is NaN", compiled, scores() * torch.nan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: BlockMask.topk(x, 0, seq_len=LENGTH), "k is 0; it must be an int"),
        (lambda x: BlockMask.causal(LENGTH, block=3), "block is 3; masks have blocks"),
        (lambda x: BlockMask.documents(x.int()), "inside torch.compile no cu_seqlens are read, so give it"),
    ],
    ids=["topk", "causal", "documents"],
)
def test_wrong_options_are_told_while_it_compiles(make: Make, message: str):
    with pytest.raises(Exception, match=message):
        torch.compile(make, fullgraph=True, backend="eager")(torch.zeros(5))


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_not_made_within_one_graph(name: str):
    compiled = torch.compile(REFUSED[name], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"a block mask is made inside torch\.compile.*make it\s+outside"):
        compiled(scores(4, 4))


BETWEEN = {name: make for name, make in REFUSED.items() if name != "block_diagonal of a tensor"} | {
    "documents that are read": lambda x: BlockMask.documents((x[0, :2] > 9).int())
}


@pytest.mark.parametrize("name", sampled(BETWEEN, 1))
def test_they_are_made_between_two_graphs(name: str):
    given = scores(4, 4)
    compiled = torch.compile(lambda x: BETWEEN[name](2 * x).to_dense() & True, backend="eager")
    assert torch.equal(compiled(given), BETWEEN[name](2 * given).to_dense())


def test_a_recipe_of_another_process_is_refused():
    refused("mask recipe topk-0 is of another process", torch.ops.sparsek.mask, [scores()], "topk-0")
