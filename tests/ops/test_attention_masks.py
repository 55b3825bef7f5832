"""Every form of a mask that attention takes, against dense attention in float64; and that conversions are kept."""

import dataclasses
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

import sparsek as sk
from sparsek.attn.mask.convert import argument
from sparsek.attn.ops.foreign_options import HARMLESS, REFUSED, REFUSED_PACKED
from sparsek.core.errors import InvalidInput
from tests.engine.launch.covering import once
from tests.ops.tensors import qkv, window
from tests.ops.test_attention_compiled import calls
from tests.refusals import refused

B, HQ, HKV = 2, 4, 2


def drawn(q_len: int, kv_len: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (B, HQ, q_len, 32), (B, HKV, kv_len, 32), (B, HKV, kv_len, 16)
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with `seen` bool, which broadcasts to [B, Hq, S, T]."""
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    empty = ~seen.expand_as(scores).any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return weights @ v, scores.logsumexp(-1)


def positions(q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)


def of_flex(
    mod: Any, q_len: int, kv_len: int, batch: int | None = None, heads: int | None = None
) -> tuple[flex.BlockMask, Tensor]:
    made = flex.create_block_mask(mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=64)
    return made, flex.create_mask(mod, batch or 1, heads or 1, q_len, kv_len, device="cpu")


def causal_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 40 + 30 * h)


Mask = sk.BlockMask | sk.MaskPolicy | Tensor | flex.BlockMask
Form = Callable[[int, int, torch.Generator], tuple[Mask, Tensor]]
"""From the lengths: what attention gets, and which keys each query sees."""


def of_shape(*shape: Any, share: float = 0.3) -> Form:
    """A bool tensor: "S" and "T" are the lengths."""

    def form(q_len: int, kv_len: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        lengths: Any = {"S": q_len, "T": kv_len}
        mask = torch.rand([lengths.get(side, side) for side in shape], generator=draw) < share
        return mask, mask

    return form


def block_sparse(q_len: int, kv_len: int, draw: torch.Generator) -> tuple[Mask, Tensor]:
    mask = of_shape(B, HQ, "S", "T")(q_len, kv_len, draw)[1]
    return sk.BlockMask.from_dense(mask, (64, 128)), mask


def policy(q_len: int, kv_len: int, draw: torch.Generator) -> tuple[Mask, Tensor]:
    q, k = positions(q_len, kv_len)
    p = q + kv_len - q_len
    return sk.MaskPolicy(window=50, sinks=7), (k <= p) & ((k > p - 50) | (k < 7))


def flex_of_documents(q_len: int, kv_len: int, draw: torch.Generator) -> tuple[Mask, Tensor]:
    ids = torch.randint(0, 3, (B, max(q_len, kv_len)), generator=draw).sort().values

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[b, q] == ids[b, k]) & causal_window(b, h, q, k)

    return of_flex(mod, q_len, kv_len, B, HQ)


FORMS: dict[str, Form] = {
    "block mask": block_sparse,
    "policy": policy,
    "bool [S, T]": of_shape("S", "T"),
    "bool [T]": of_shape("T"),
    "bool [1, T]": of_shape(1, "T"),
    "bool [S, 1]": of_shape("S", 1, share=0.8),
    "bool [B, 1, 1, T]": of_shape(B, 1, 1, "T"),
    "bool [B, 1, S, T]": of_shape(B, 1, "S", "T"),
    "bool [B, H, S, T]": of_shape(B, HQ, "S", "T"),
    "bool [H, S, T]": of_shape(HQ, "S", "T"),
    "bool, rows of few keys": of_shape(1, HQ, "S", "T", share=0.002),
    "flex": lambda q_len, kv_len, draw: of_flex(lambda b, h, q, k: (q - k).abs() < 60, q_len, kv_len),
    "flex per head": lambda q_len, kv_len, draw: of_flex(causal_window, q_len, kv_len, None, HQ),
    "flex of documents": flex_of_documents,
}


@pytest.mark.parametrize(
    ("name", "lengths"), once(product(FORMS, ((192, 192), (100, 230), (150, 70)))), ids=str
)
def test_each_form_gives_what_dense_attention_gives_with_its_gradients(name: str, lengths: tuple[int, int]):
    seed = torch.Generator().seed() % 2**32
    draw = torch.Generator().manual_seed(seed)
    mask, seen = FORMS[name](*lengths, draw)
    tensors = drawn(*lengths, seed)
    out, lse = sk.attention(*tensors, mask, return_lse=True)
    expected = dense_attention(*tensors, seen)
    note = f"seed {seed}"
    for got, want in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=lambda text: f"{note}: {text}")
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    of_lse = torch.randn(lse.shape, generator=draw, dtype=torch.float64)
    found, right = (
        torch.autograd.grad((o * weights).sum() + (x * of_lse)[x.isfinite()].sum(), tensors)
        for o, x in ((out, lse), expected)
    )
    torch.testing.assert_close(found, right, rtol=0, atol=1e-11, msg=lambda text: f"{note}: {text}")


def test_a_mask_for_each_head_of_k_serves_the_heads_of_q_that_share_it():
    mask = torch.rand(B, HKV, 100, 130) < 0.4
    tensors = drawn(100, 130, 0)
    want = dense_attention(*tensors, mask.repeat_interleave(HQ // HKV, 1))[0]
    torch.testing.assert_close(sk.attention(*tensors, mask), want, rtol=0, atol=1e-12)


def test_three_dims_begin_with_heads_of_q_also_where_the_mask_is_kept():
    q, k, v = (x.detach() for x in drawn(100, 130, 0))
    mask = torch.rand(HKV, 100, 130) < 0.4
    want = dense_attention(q[:, :HKV], k[:, :1], v[:, :1], mask)[0]  # repeats k twice
    torch.testing.assert_close(sk.attention(q[:, :HKV], k[:, :1], v[:, :1], mask), want, rtol=0, atol=1e-12)
    refused("the first of three dims is heads of q", sk.attention, q, k, v, mask)


@pytest.mark.parametrize("lengths", [(130, 130), (70, 200), (200, 70), (1, 90), (90, 1)], ids=str)
def test_is_causal_is_that_of_torch_whatever_the_lengths(lengths: tuple[int, int]):
    tensors = drawn(*lengths, torch.Generator().seed() % 2**32)
    out = sk.attention(*tensors, is_causal=True)
    want = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    found, right = (torch.autograd.grad((x * weights).sum(), tensors) for x in (out, want))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_a_bool_tensor_or_is_causal_without_queries_or_keys(lengths: tuple[int, int]):
    q, k, v = drawn(*lengths, 0)
    assert not sk.attention(q, k, v, torch.ones(lengths, dtype=torch.bool)).any()
    assert not sk.attention(q, k, v, is_causal=True).any()
    q, k, v = (x[:0] for x in drawn(5, 5, 0))
    assert sk.attention(q, k, v, torch.ones(0, 1, 5, 5, dtype=torch.bool)).shape == (0, HQ, 5, 16)


def test_packed_documents_and_the_layer_take_every_form():
    q, k, v = (x[0].transpose(0, 1).detach() for x in drawn(130, 130, 0))
    bounds = torch.tensor([0, 60, 130])
    ids = torch.arange(130) >= 60
    seen = (ids[:, None] == ids) & torch.ones(130, 130, dtype=torch.bool).tril()
    made, _ = of_flex(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 130, 130)
    layer, x = sk.nn.SparseAttention(32, 4, dtype=torch.float64), torch.randn(130, 32, dtype=torch.float64)
    want = sk.attention_varlen(q, k, v, bounds, mask=sk.MaskPolicy())
    of_layer = layer(x, cu_seqlens=bounds)
    for mask in (seen, made, sk.BlockMask.from_dense(seen)):
        torch.testing.assert_close(sk.attention_varlen(q, k, v, bounds, mask=mask), want, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(x, mask, cu_seqlens=bounds), of_layer, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(x[None], mask)[0], of_layer, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[None], sk.MaskPolicy(causal=False)), layer(x[None], seen | True))


def test_plans_take_every_form():
    q, k, v = qkv(130, dims=(32, 64))
    dense = torch.ones(130, 130, dtype=torch.bool).tril()
    for mask in (dense, sk.MaskPolicy(), of_flex(lambda b, h, q, k: q >= k, 130, 130)[0]):
        plan = sk.plan_attention(q, k, v, mask)
        assert torch.equal(sk.attention(q, k, v, mask, plan=plan), sk.attention(q, k, v, mask))
        assert sk.plan_attention_backward(q, k, v, mask).kernel == "cpu.attention_bwd"
    q, k, v = (x.to("meta", torch.bfloat16) for x in (q, k, v))
    plan = sk.plan_attention(q, k, v, sk.MaskPolicy(window=64), device="h200")
    assert plan.kernel == "hopper.attention_fwd"


# Conversions are kept.


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conversions that were made, by name."""
    made: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(sk.BlockMask, name)

        def convert(*args: Any) -> Any:
            made.append(name)
            return real(*args)

        return convert

    for name in ("from_dense", "from_flex"):
        monkeypatch.setattr(sk.BlockMask, name, counted(name))
    return made


def test_a_second_call_converts_and_plans_nothing(conversions: list[str], plans_made: list[str]):
    q, k, v = qkv(130)
    for mask in (
        torch.rand(130, 130) < 0.5,
        of_flex(causal_window, 130, 130, None, 4)[0],
        sk.MaskPolicy(window=33),
    ):
        first = sk.attention(q, k, v, mask)
        made = len(conversions), len(plans_made)
        for _ in range(2):
            assert torch.equal(sk.attention(q, k, v, mask), first)
        assert (len(conversions), len(plans_made)) == made
    assert conversions == ["from_dense", "from_flex"]
    causal = [sk.attention(q, k, v, is_causal=True) for _ in range(2)]
    assert torch.equal(*causal)
    assert len(plans_made) == made[1] + 1


def test_views_of_a_tensor_that_are_made_anew_are_found_again(conversions: list[str]):
    q, k, v = qkv(130)
    padding = torch.rand(2, 130) < 0.7
    for _ in range(3):
        out = sk.attention(q, k, v, padding[:, None, None, :])
        sk.attention(q, k, v, padding[:1])
    assert conversions == ["from_dense"] * 2
    torch.testing.assert_close(
        out, sk.attention(q, k, v, sk.BlockMask.from_dense(padding[:, None, None].expand(2, 1, 130, -1)))
    )
    for _ in range(2):
        for first in range(20):
            sk.attention(q[:, :, :1], k[:, :, :8], v[:, :, :8], padding[:, None, None, first : first + 8])
    assert all(len(known[1]) <= 8 for known in argument._OF_TENSORS._kept.values())


@pytest.mark.parametrize("view", [False, True])
def test_a_tensor_that_was_written_to_gives_a_new_mask(view: bool, conversions: list[str]):
    q, k, v = (x.double() for x in qkv(130))
    whole = torch.rand(130, 130) < 0.5
    mask = whole.view(1, 130, 130) if view else whole
    sk.attention(q, k, v, mask)
    for change in (
        whole.logical_not_,
        lambda: whole[3].fill_(True),
        lambda: whole.copy_(whole.mT.clone()),
    ):
        change()
        want = dense_attention(q, k, v, whole)[0]
        torch.testing.assert_close(sk.attention(q, k, v, mask), want, rtol=0, atol=1e-12)
    assert conversions == ["from_dense"] * 4


@pytest.mark.parametrize("view", [False, True])
def test_a_tensor_whose_memory_was_replaced_gives_a_new_mask(view: bool, conversions: list[str]):
    q, k, v = (x.double() for x in qkv(130))
    mask = torch.rand(1, 130, 130)[0] < 0.5 if view else torch.rand(130, 130) < 0.5
    for _ in range(2):
        want = dense_attention(q, k, v, mask)[0]
        torch.testing.assert_close(sk.attention(q, k, v, mask), want, rtol=0, atol=1e-12)
        mask.data = ~mask  # torch counts no write
    assert conversions == ["from_dense"] * 2


def test_a_tensor_of_inference_mode_is_read_every_time(conversions: list[str]):
    q, k, v = (x.double() for x in qkv(130))
    with torch.inference_mode():
        mask = torch.rand(130, 130) < 0.5
        for _ in range(2):
            want = dense_attention(q, k, v, mask)[0]
            torch.testing.assert_close(sk.attention(q, k, v, mask), want, rtol=0, atol=1e-12)
            mask.logical_not_()
    assert conversions == ["from_dense"] * 2


def test_what_was_made_of_a_tensor_or_a_flex_mask_goes_with_it():
    q, k, v = qkv(130)
    gc.collect()
    before = len(argument._OF_TENSORS), len(argument._OF_FLEX)
    masks = [torch.rand(130, 130) < 0.5, of_flex(lambda b, h, q, k: q >= k, 130, 130)[0]]
    made = []
    for mask in masks:
        leaf = q.clone().requires_grad_()
        sk.attention(leaf, k, v, mask).sum().backward()
        made.append(weakref.ref(argument.block_mask(mask, q, k)))
    refs = [weakref.ref(mask) for mask in masks]
    assert all(ref() is not None for ref in (*refs, *made))
    del mask, masks, leaf
    gc.collect()
    assert [ref() for ref in (*refs, *made)] == [None] * 4
    assert (len(argument._OF_TENSORS), len(argument._OF_FLEX)) == before


OFFSET = torch.zeros((), dtype=torch.int64)


def after_offset(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q + OFFSET >= k


def from_a_closure(offset: Tensor) -> Any:
    return lambda b, h, q, k: q + offset >= k


class Offset(torch.nn.Module):
    """An object that has a rule and, as an attribute, the mask that is made of it."""

    offset: Tensor
    mask: Any = None

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def rule(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + self.offset >= k


def rule_of(holder: Offset) -> Any:
    return lambda b, h, q, k: holder.rule(b, h, q, k) & (k >= 0)


def reading(offset: Tensor) -> dict[str, Any]:
    """Rules that read a tensor, each in another way."""
    return {
        "closure": from_a_closure(offset),
        "method": Offset(offset).rule,
        "object of a closure": rule_of(Offset(offset)),
        "global": after_offset,
        "joined": flex.and_masks(from_a_closure(offset), lambda b, h, q, k: k >= 0),
        "default": lambda b, h, q, k, offset=offset: q + offset >= k,
        "partial": functools.partial(lambda offset, b, h, q, k: q + offset >= k, offset),
    }


class Limits:
    keys = 0


LIMITS, TABLE = [0], {"keys": 0}
NAMESPACE = SimpleNamespace(keys=0)


@dataclasses.dataclass
class Config:
    keys: list[int] = dataclasses.field(default_factory=lambda: [0])

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + self.keys[0] >= k


CONFIG = Config()
NUMBERS: dict[str, tuple[Any, Callable[[int], None]]] = {
    "list": (lambda b, h, q, k: q + LIMITS[0] >= k, lambda to: LIMITS.__setitem__(0, to)),
    "dict": (lambda b, h, q, k: q + TABLE["keys"] >= k, lambda to: TABLE.update(keys=to)),
    "namespace": (lambda b, h, q, k: q + NAMESPACE.keys >= k, lambda to: setattr(NAMESPACE, "keys", to)),
    "class": (lambda b, h, q, k: q + Limits.keys >= k, lambda to: setattr(Limits, "keys", to)),
    "dataclass": (lambda b, h, q, k: q + CONFIG.keys[0] >= k, lambda to: CONFIG.keys.__setitem__(0, to)),
    "called object": (CONFIG, lambda to: CONFIG.keys.__setitem__(0, to)),
    "inner function": (
        lambda b, h, q, k: (lambda: q + TABLE["keys"] >= k)(),
        lambda to: TABLE.update(keys=to),
    ),
    "dict of a partial": (
        functools.partial(lambda b, h, q, k, table: q + table["keys"] >= k, table=TABLE),
        lambda to: TABLE.update(keys=to),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_rule_that_reads_a_changed_number_is_converted_anew(name: str, conversions: list[str]):
    tensors, (rule, change) = drawn(130, 130, 0), NUMBERS[name]
    lists = torch.full((1, 1, 3), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    mask = flex.BlockMask.from_kv_blocks(
        lists[0], lists[1].contiguous(), BLOCK_SIZE=64, mask_mod=rule, seq_lengths=(130, 130)
    )
    q, k = positions(130, 130)
    for keys in (0, 40, -30):
        change(keys)
        want = dense_attention(*tensors, q + keys >= k)[0]
        for _ in range(2):
            torch.testing.assert_close(sk.attention(*tensors, mask), want, rtol=0, atol=1e-12)
    assert conversions == ["from_flex"] * 3


@pytest.mark.parametrize("name", reading(OFFSET))
def test_a_flex_mask_whose_rule_reads_a_changed_tensor_is_converted_anew(name: str, conversions: list[str]):
    tensors = drawn(130, 130, 0)
    rule = reading(OFFSET)[name]
    OFFSET.zero_()
    lists = flex.create_block_mask(
        lambda b, h, q, k: k >= 0, None, None, 130, 130, device="cpu", BLOCK_SIZE=64
    )
    ones = torch.full((1, 1, 3), 3, dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(
        ones, torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous(), BLOCK_SIZE=64, mask_mod=rule,
        seq_lengths=lists.seq_lengths,
    )  # fmt: skip
    q, k = positions(130, 130)
    for offset in (0, 40, -30):
        OFFSET.fill_(offset)
        want = dense_attention(*tensors, q + offset >= k)[0]
        for _ in range(2):
            torch.testing.assert_close(sk.attention(*tensors, mask), want, rtol=0, atol=1e-12)
    assert conversions == ["from_flex"] * 3
    mask.mask_mod = causal_window if name == "closure" else from_a_closure(torch.tensor(7))
    sk.attention(*tensors, mask)
    assert conversions == ["from_flex"] * 4


def test_an_object_that_has_the_rule_and_the_mask_is_not_kept_alive():
    holder, (q, k, v) = Offset(torch.zeros((), dtype=torch.int64)), qkv(130)
    holder.mask = of_flex(rule_of(holder), 130, 130)[0]
    sk.attention(q, k, v, holder.mask)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


# Tracing.


@pytest.mark.parametrize("name", ["policy", "is_causal"])
def test_compiled_a_policy_or_is_causal_is_one_node(name: str, recorder: Any):
    tensors = qkv(100, 130)
    more: dict[str, Any] = {"mask": sk.MaskPolicy(window=41)} if name == "policy" else {"is_causal": True}
    compiled = torch.compile(lambda q, k, v: sk.attention(q, k, v, **more), fullgraph=True, backend=recorder)
    for _ in range(2):
        assert torch.equal(compiled(*tensors), sk.attention(*tensors, **more))
    (graph,) = recorder.fw_graphs
    assert len(calls(graph)) == 1
    assert "sparsek.attention" in calls(graph)[0]


def test_compiled_a_bool_tensor_is_converted_between_two_graphs_and_never_stale(conversions: list[str]):
    torch._dynamo.reset()
    (q, k, v), mask = qkv(130, dtype=torch.float64), torch.rand(130, 130) < 0.5

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return 2 * sk.attention(q, k, v, mask)

    with pytest.raises(Exception, match=r"a block mask is made inside torch\.compile; make it outside"):
        torch.compile(run, fullgraph=True, backend="eager")(q, k, v, mask)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager")
    for _ in range(3):
        want = 2 * dense_attention(q, k, v, mask)[0]
        for _ in range(2):
            torch.testing.assert_close(compiled(q, k, v, mask), want, rtol=0, atol=1e-12)
        mask.logical_not_()
    assert conversions == ["from_dense"] * 3
    made, seen = of_flex(causal_window, 130, 130, None, HQ)
    want = 2 * dense_attention(q, k, v, seen)[0]
    torch.testing.assert_close(compiled(q, k, v, made), want, rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_in_torch_func_a_mask_that_is_shared_is_converted_and_one_that_is_mapped_refused(
    conversions: list[str],
):
    q, k, v = (x.detach() for x in drawn(100, 130, 0))
    mask = torch.rand(100, 130) < 0.5
    several = torch.stack((q, 2 * q))
    got = torch.func.vmap(lambda q: sk.attention(q, k, v, mask))(several)
    want = torch.stack([dense_attention(x, k, v, mask)[0] for x in several])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    found = torch.func.grad(lambda q, mask: sk.attention(q, k, v, mask).square().sum())(q, mask)
    leaf = q.clone().requires_grad_()
    dense_attention(leaf, k, v, mask)[0].square().sum().backward()
    torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-11)
    assert conversions == ["from_dense"]
    with pytest.raises(
        InvalidInput, match=r"masks depend on the values of mask, which torch.func.vmap maps over"
    ):
        torch.func.vmap(lambda mask: sk.attention(q, k, v, mask))(torch.stack((mask, mask)))


# Options of other libraries, which no type admits.

attend: Any = sk.attention
attend_packed: Any = sk.attention_varlen


@pytest.mark.parametrize("name", REFUSED)
def test_options_of_other_libraries_are_refused_with_what_to_do_instead(name: str):
    q, k, v = qkv(64)
    with pytest.raises(InvalidInput) as raised:
        attend(q, k, v, window(64), **{name: 0.5})
    text = str(raised.value)
    assert text == f"attention has no argument {name}: {REFUSED[name]}"
    assert ". " not in text  # one sentence


@pytest.mark.parametrize("name", REFUSED_PACKED)
def test_so_they_are_for_packed_documents(name: str):
    q, k, v = (x[0].transpose(0, 1) for x in qkv(64))
    with pytest.raises(InvalidInput, match=f"attention_varlen has no argument {name}: "):
        attend_packed(q, k, v, torch.tensor([0, 64]), **{name: 0.5})


def test_options_of_other_libraries_pass_at_values_that_change_nothing():
    (q, k, v), mask = qkv(64), window(64)
    want = sk.attention(q, k, v, mask)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 64])
    want_packed = attend_packed(*packed, bounds)
    for name in {**REFUSED, **REFUSED_PACKED}:
        for value in (None, *HARMLESS.get(name, ())):
            if name in REFUSED:
                assert torch.equal(attend(q, k, v, mask, **{name: value}), want)
            if name in REFUSED_PACKED:
                assert torch.equal(attend_packed(*packed, bounds, **{name: value}), want_packed)
    assert torch.equal(attend(q, k, v, mask, dropout_p=0, softcap=0), want)
    for option in ({"dropout_p": 0.1}, {"dropout": True}, {"window_size": (128, 0)}):
        refused("attention has no argument", attend, q, k, v, mask, **option)
    for name in ("attn_mask", "block_mask", "attn_bias"):
        refused(f"attention has no argument {name}: ", attend, q, k, v, **{name: torch.zeros(64, 64)})


def test_the_refusals_say_what_works():
    q, k, v = qkv(130, heads=(2, 2))
    mask = sk.BlockMask.sliding_window(130, 40, block=64)

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / 5) * 5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # eager flex_attention is slow
        found = flex.flex_attention(q, k, v, score_mod=bias, block_mask=mask.to_flex())
    assert found.shape == (2, 2, 130, 64)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense(), dropout_p=0.0),
        sk.attention(q, k, v, mask),
    )
    additive = torch.zeros(130, 130).masked_fill(~mask.to_dense()[0, 0], -torch.inf)
    torch.testing.assert_close(sk.attention(q, k, v, additive == 0), sk.attention(q, k, v, mask))
    of_mod = sk.BlockMask.from_mask_mod(causal_window, None, None, 130, 130, device="cpu")
    assert torch.equal(sk.attention(q, k, v, of_mod), sk.attention(q, k, v, sk.MaskPolicy(window=40)))


def test_a_name_that_nobody_knows_is_pythons_own_error():
    for call in (attend, functools.partial(attend_packed, cu_seqlens_q=torch.tensor([0, 64]))):
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'speed'"):
            call(*qkv(64), speed=2)
