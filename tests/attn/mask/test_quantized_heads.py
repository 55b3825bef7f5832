"""QuantizedHeads and quantize_heads on a CPU: values, scales, the order of keys, and what is refused."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

import sparsek as sk
from sparsek.attn.mask.quantized_heads import E4M3, KEY_ORDER, QuantizedHeads, in_key_order, out_of_key_order
from tests.refusals import refused


def drawn(
    length: int = 100, keys: int | None = None, dim: int = 32, dtype: Any = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 4, length, dim, dtype=dtype)
    k, v = torch.randn(2, 2, 2, keys or length, dim, dtype=dtype).unbind()
    return q, k, v


def test_keys_of_sixteen_lie_as_a_thread_holds_their_weights() -> None:
    """Thread t of four has the scores of keys 2 t and 2 t + 1 of each eight; its four are neighbours."""
    values = torch.arange(32).to(torch.uint8)
    lie = out_of_key_order(values.view(E4M3)).view(torch.uint8).tolist()
    assert lie[:16] == list(KEY_ORDER) == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert lie[16:] == [16 + key for key in KEY_ORDER]
    assert torch.equal(in_key_order(out_of_key_order(values.view(E4M3))).view(torch.uint8), values)


@given(
    length=st.integers(0, 150),
    keys=st.integers(0, 150),
    scale=st.sampled_from(("head", "block")),
    rows=st.sampled_from((64, 128)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_heads_are_within_half_a_step_of_e4m3(
    length: int, keys: int, scale: Any, rows: int, dtype: Any
) -> None:
    given = drawn(length, keys, 16, dtype)
    given[0][:, :1] *= 1e-6  # a scale of its own
    heads = sk.quantize_heads(given[0], given[1], given[2], scale, rows=rows)
    for x, made, turned in zip(given, heads, (False, False, True), strict=True):
        assert made.shape == x.shape
        assert (made.turned, made.kind, made.source_dtype) == (turned, scale, dtype)
        assert made.scale.shape == (*x.shape[:2], *((-(-x.shape[2] // rows),) if scale == "block" else ()))
        assert torch.equal(replace(made).dequantize(), made.dequantize()), (
            "the constructor takes what was made"
        )
        back = made.dequantize(torch.float64)
        of_row = made.scale.double()
        if scale == "block":
            of_row = of_row.repeat_interleave(rows, 2)[:, :, : x.shape[2]]
        else:
            of_row = of_row[..., None].expand(x.shape[:3])
        allowed = torch.maximum(x.double().abs() * 2.0**-4, of_row[..., None] * 2.0**-10) * (1 + 1e-6)
        assert bool(((back - x.double()).abs() <= allowed).all())
        assert made.values.view(torch.uint8).abs().numel() == made.values.numel()


def test_the_largest_value_of_a_scale_becomes_448() -> None:
    q, k, v = drawn(200)
    whole, blocks = sk.quantize_heads(q, k, v)[2], sk.quantize_heads(q, k, v, "block", rows=64)[2]
    assert torch.equal(whole.values.float().abs().amax((2, 3)), torch.full((2, 2), 448.0))
    parts = blocks.dequantize().split(64, 2)
    for at, part in enumerate(parts):
        assert torch.allclose(part.abs().amax((2, 3)), 448 * blocks.scale[:, :, at])


def test_heads_of_zeros_have_a_scale_of_one() -> None:
    nothing = torch.zeros(1, 1, 20, 16)
    heads = sk.quantize_heads(nothing, nothing, nothing)
    for made in heads:
        assert torch.equal(made.scale, torch.ones(1, 1))
        assert not made.dequantize().any()
        assert made.error(torch.zeros(1, 1, 20, 16)) == 0


def test_turned_values_are_padded_with_zeros_to_whole_sixteens() -> None:
    made = sk.quantize_heads(*drawn(17))[2]
    assert made.values.shape == (2, 2, 32, 32)
    assert made.values.is_contiguous()
    assert not in_key_order(made.values)[..., 17:].float().any()


def test_copies_and_pickles_are_equal() -> None:
    for made in sk.quantize_heads(*drawn(40), "block"):
        again = pickle.loads(pickle.dumps(made))  # noqa: S301
        for other in (copy.copy(made), copy.deepcopy(made), again, made.to("cpu")):
            assert torch.equal(other.dequantize(), made.dequantize())
            assert str(other) == str(made)
        leaves, spec = _pytree.tree_flatten(made)
        assert len(leaves) == 2
        assert torch.equal(_pytree.tree_unflatten(leaves, spec).dequantize(), made.dequantize())


def test_the_repr_tells_size_and_scales() -> None:
    q, _, v = sk.quantize_heads(*drawn(300), "block")
    assert repr(q) == "QuantizedHeads(2x4x300x32 e4m3, scale per block of 128, 0.0769 MB, cpu)"
    assert repr(v) == "QuantizedHeads(2x2x300x32 e4m3, scale per block of 128, along keys, 0.039 MB, cpu)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 100}, "rows is 100"),
        ({"rows": 0}, "rows is 0"),
        ({"scale": "row"}, "scale"),
        ({"check": 1}, "check is 1"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], message: str) -> None:
    refused(message, sk.quantize_heads, *drawn(), **change)


def test_nan_and_inf_are_refused_unless_unchecked() -> None:
    q, k, v = drawn()
    k[1, 0, 5, 2] = torch.inf
    refused(r"1 of .* values of k are NaN or Inf.*\[1, 0, 5, 2\]", sk.quantize_heads, q, k, v)
    assert bool(sk.quantize_heads(q, k, v, check=False)[1].dequantize()[1, 0].isnan().any())


def test_operands_that_require_gradients_are_refused() -> None:
    q, k, v = drawn()
    refused("k requires a gradient, and FP8 attention has none", sk.quantize_heads, q, k.requires_grad_(), v)
    with torch.no_grad():
        sk.quantize_heads(q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(1, 1, 16, 16)}, "values"),
        ({"scale": torch.ones(1, 2)}, r"scale has shape \[1, 2\]"),
        ({"scale": torch.zeros(1, 1)}, "1 of 1 scales are not positive"),
        ({"rows": 32}, "rows is 32"),
        ({"length": 3}, "length is 3"),
        ({"turned": True, "length": 17}, "length is 17"),
        ({"source_dtype": torch.int8}, "source_dtype"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"values": torch.zeros(1, 1, 16, 16).to(E4M3), "scale": torch.ones(1, 1)}
    QuantizedHeads(**parts)
    refused(message, QuantizedHeads, **parts | change)
