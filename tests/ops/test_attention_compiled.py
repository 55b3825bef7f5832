"""attention under torch.compile, and the torch.library op behind it."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.ops import attention_args as library_args
from tests.attn.mask.masks import in_one_buffer
from tests.ops.tensors import qkv, window
from tests.sampling import sampled

# softcap, slopes and sinks in the op's order
PLAIN: tuple[Any, ...] = (0.0, None, None)
CHANGED: tuple[Any, ...] = (2.0, Tensor, Tensor)


def calls(graph: Any) -> list[str]:
    """Names of the operations in a graph that compute."""
    nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in nodes if "getitem" not in name]


def bits() -> sk.BlockMask:
    seen = torch.rand(192, 192, generator=torch.Generator().manual_seed(0)) < 0.4
    return sk.BlockMask.from_dense(seen, 64)


MASKS: dict[str, Callable[[], "sk.BlockMask | None"]] = {
    "none": lambda: None,
    "window": window,
    "bits": bits,
    "one buffer": lambda: in_one_buffer(bits()),
    "both": lambda: window() | bits(),
    "per head": lambda: sk.BlockMask.per_head([window(), window(width=9)]),
}


@pytest.mark.parametrize(("name", "lse"), sampled(list(itertools.product(MASKS, (False, True))), 5))
def test_compiled_with_the_mask_as_an_argument_it_is_one_node_of_one_graph(
    name: str, lse: bool, recorder: Any
):
    (q, k, v), mask = qkv(), MASKS[name]()

    def run(q: Tensor, k: Tensor, v: Tensor, mask: "sk.BlockMask | None") -> tuple[Tensor, ...]:
        if lse:
            return sk.attention(q, k, v, mask, scale=0.2, return_lse=True)
        return (sk.attention(q, k, v, mask, scale=0.2),)

    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    for factor in (1, 2):
        expected, got = run(factor * q, k, v, mask), compiled(factor * q, k, v, mask)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert [len(calls(graph)) for graph in recorder.fw_graphs] == [1]
    assert "sparsek.attention" in calls(recorder.fw_graphs[0])[0]


def test_compiled_twice_for_masks_of_any_sizes(recorder: Any):
    (q, k, v), draw = qkv(), torch.Generator().manual_seed(0)
    compiled = torch.compile(lambda m: sk.attention(q, k, v, m), fullgraph=True, backend=recorder)
    for share in (0.1, 0.4, 0.6, 0.8):
        blocks = torch.rand(3, 3, generator=draw) < share
        elements = torch.rand(192, 192, generator=draw) < 0.5
        mask = sk.BlockMask.from_dense(
            elements & blocks.repeat_interleave(64, 0).repeat_interleave(64, 1), 64
        )
        assert torch.equal(compiled(mask), sk.attention(q, k, v, mask))
    assert len(recorder.fw_graphs) == 2


def test_compiled_out_lies_in_memory_as_q_does():
    torch._dynamo.reset()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    compiled = torch.compile(
        lambda q, k, v: sk.attention(q, k, v).transpose(1, 2), fullgraph=True, backend="aot_eager"
    )
    assert compiled(q, k, v).is_contiguous()


def test_the_op_plans_once_and_forgets_a_mask_with_its_tensors(plans_made: list[str]):
    tensors, mask = qkv(), window()
    gc.collect()
    kept = len(library_args.MASKS)
    args = (*tensors, *library_args.flat_mask(mask), None, False, None, True, *PLAIN)
    for _ in range(2):
        torch.ops.sparsek.attention(*args)
    assert len(plans_made) == 1
    assert len(library_args.MASKS) == kept + 1
    del mask, args
    gc.collect()
    assert len(library_args.MASKS) == kept


def test_masks_that_share_lists_are_told_apart():
    q, k, v = qkv()
    one = window()
    fields = one._parts()
    wider = sk.BlockMask.unchecked(**{**fields, "lo": torch.zeros_like(fields["lo"])})
    for mask in (one, wider, one):
        args = (q, k, v, *library_args.flat_mask(mask), None, False, None, True, *PLAIN)
        got, _ = torch.ops.sparsek.attention(*args)
        torch.testing.assert_close(got, sk.attention(q, k, v, mask))


@pytest.mark.parametrize(
    ("name", "lse", "changes"),
    [
        (name, *more)
        for name in sampled(MASKS, 3)
        for more in sampled([(False, PLAIN), (True, PLAIN), (True, CHANGED)], 1, of=name)
    ],
    ids=str,
)
def test_the_op_passes_torchs_own_checks(name: str, lse: bool, changes: tuple[Any, ...]):
    q, k, v = qkv()
    given = [torch.rand(q.shape[1]) if x is Tensor else x for x in changes]
    args = (q, k, v, *library_args.flat_mask(MASKS[name]()), 0.1, lse, None, True, *given)
    torch.library.opcheck(torch.ops.sparsek.attention.default, args)


def fails_to_compile(run: Callable[..., Any], tensors: tuple[Any, ...], text: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)


def test_compiled_wrong_operands_are_told_as_eagerly():
    q, k, v = tensors = qkv()
    mask = window()
    plan = sk.plan_attention(*tensors, mask)
    fails_to_compile(sk.attention, (q, k[..., :16], v), "q has head dim 32 and k 16")
    fails_to_compile(lambda q, k, v: sk.attention(q, k, v, scale=-1.0), tensors, "finite number above 0")
    fails_to_compile(lambda q, k, v: sk.attention(q, k, v, plan=plan), tensors, "plans do not go through")
    fails_to_compile(
        lambda q, k, v: sk.attention(q, k, v, mask),
        qkv(100),
        "mask is for 192 queries and 192 keys; q has 100",
    )
