"""Tiny checkpoints of every quantized layout: what is read as a weight, and what is passed over."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.tools.advise.sources import opened
from sparsek.tools.advise.weights import choose

N, K = 96, 64
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> str:
    """A file of one quantized layer `q` beside a dense one, with a config."""
    save_file(
        {"dense.weight": drawn(N, K, seed=9), "q.bias": torch.zeros(N), **tensors}, folder / "m.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return str(folder)


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Each scale over its block, by another way than the code's."""
    return scale.float().kron(torch.ones(rows, columns))[:N, :K]


FP8 = drawn(N, K).to(E4M3)
INT8 = (drawn(N, K) * 40).round().clamp(-127, 127).to(torch.int8)
ROWS, BLOCKS = drawn(N, 1).abs() + 0.1, drawn(3, 2).abs() + 0.1

DECOMPRESSED = {
    "FP8, one scale": (
        {"q.weight": FP8, "q.weight_scale": torch.tensor(0.5)}, {"quant_method": "fp8"}, FP8.float() * 0.5
    ),
    "FP8, one scale [1]": ({"q.weight": FP8, "q.weight_scale": torch.tensor([0.5])}, None, FP8.float() * 0.5),
    "FP8, a scale per row": (
        {"q.weight": FP8, "q.weight_scale": ROWS.bfloat16(), "q.input_scale": torch.tensor(1.0)},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        FP8.float() * ROWS.bfloat16().float(),
    ),
    "FP8, [N]": ({"q.weight": FP8, "q.weight_scale": ROWS[:, 0]}, None, FP8.float() * ROWS),
    "FP8, blocks by the config": (
        {"q.weight": FP8, "q.weight_scale_inv": BLOCKS},
        {"quant_method": "fp8", "weight_block_size": [40, 48]},
        FP8.float() * spread(BLOCKS, 40, 48),
    ),
    "FP8, blocks by their number": (
        {"q.weight": FP8, "q.weight_scale_inv": BLOCKS}, None, FP8.float() * spread(BLOCKS, 32, 32)
    ),
    "FP8, powers of two": (
        {"q.weight": FP8, "q.scale": torch.tensor([[126, 128], [127, 127], [120, 130]], dtype=torch.uint8).view(E8M0)},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        FP8.float() * spread(torch.tensor([[0.5, 2], [1, 1], [2**-7, 8]]), 32, 32),
    ),
    "FP8 of 128 at an edge": (
        {"q.weight": drawn(200, 130).to(E4M3), "q.weight_scale_inv": drawn(2, 2)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        drawn(200, 130).to(E4M3).float() * drawn(2, 2).kron(torch.ones(128, 128))[:200, :130],
    ),
    "FP8 without a scale": ({"q.weight": FP8}, None, FP8.float()),
    "FP8, E5M2, scale_weight": (
        {"q.weight": FP8.float().to(torch.float8_e5m2), "q.scale_weight": torch.tensor(2.0)},
        None,
        FP8.float().to(torch.float8_e5m2).float() * 2,
    ),
    "int8, a scale per row": (
        {"q.weight": INT8, "q.weight_scale": ROWS}, {"quant_method": "compressed-tensors"}, INT8.float() * ROWS
    ),
    "int8 in groups with zero points": (
        {
            "q.weight": INT8,
            "q.weight_scale": drawn(N, 4),
            "q.weight_zero_point": torch.full((N, 4), 3, dtype=torch.int8),
        },
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        (INT8.float() - 3) * spread(drawn(N, 4), 1, 16),
    ),
    "int8 of bitsandbytes": (
        {"q.weight": INT8, "q.SCB": ROWS[:, 0] * 127}, {"quant_method": "bitsandbytes"}, INT8.float() * ROWS
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "config", "expected"), DECOMPRESSED.values(), ids=DECOMPRESSED)
def test_what_is_one_step_from_dense_is_decompressed(tmp_path, tensors, config, expected):
    weights, skipped = opened([checkpoint(tmp_path, tensors, config)])
    assert sorted(entry.name for entry in weights.names()) == ["dense.weight", "q.weight"]
    torch.testing.assert_close(weights.read("q.weight"), expected, rtol=1e-6, atol=0)
    assert torch.equal(weights.read("dense.weight"), drawn(N, K, seed=9))
    told = " ".join(each.what for each in skipped)
    assert all(name in told for name in tensors if "scale" in name and "input" not in name)


def bitmask(dense: torch.Tensor, two_four: bool, name: str = "q") -> dict[str, torch.Tensor]:
    mask = dense != 0
    packed = torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    as_bytes = dense.view(torch.uint8) if dense.element_size() == 1 else dense
    values = as_bytes[mask].view(dense.dtype)
    shape = torch.tensor(dense.shape)
    parts = {"compressed": values.reshape(len(dense), -1) if two_four else values, "bitmask": packed}
    parts["shape"] = shape[:, None] if two_four else shape
    if not two_four:
        parts["row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}


@pytest.mark.parametrize("name", ["q", "q.weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
@pytest.mark.parametrize("two_four", [True, False], ids=["sparse-24-bitmask", "sparse-bitmask"])
def test_weights_behind_bit_masks_are_read_dense(tmp_path, two_four, dtype, name):
    dense = drawn(N, 68)
    if two_four:
        dense = dense.abs() + 0.1
        dense.view(-1, 4)[:, [0, 3]] = 0
    else:
        dense[drawn(N, 68, seed=1) < 0.3] = 0
    dense = dense.to(dtype)
    dense = torch.where(dense.float() == 0, torch.zeros(()), dense.float()).to(dtype)  # no -0
    parts = bitmask(dense, two_four, name) | ({"q.weight_scale": ROWS} if dtype == E4M3 else {})
    config = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    weights, skipped = opened([checkpoint(tmp_path, parts, config)])
    assert {entry.name: entry.shape for entry in weights.names()} == {
        "dense.weight": (N, K),
        "q.weight": (N, 68),
    }
    expected = dense.float() * ROWS if dtype == E4M3 else dense
    assert torch.equal(weights.read("q.weight"), expected)
    assert any("bit masks of weights that are read decompressed" in each.why for each in skipped)


def test_a_bit_mask_of_another_number_of_values_is_refused(tmp_path):
    parts = bitmask(drawn(N, K), False)
    parts["q.compressed"] = parts["q.compressed"][:-1]
    weights, _ = opened([checkpoint(tmp_path, parts)])
    with pytest.raises(InvalidFile, match=r"'q\.weight' has 6144 bits in its mask for 6143 values"):
        weights.read("q.weight")


def packed(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


U8, I8 = torch.uint8, torch.int8
PACKED = {
    "gptq": {
        "q.qweight": packed(128, 256), "q.qzeros": packed(8, 32), "q.g_idx": packed(64),
        "q.scales": drawn(64, 256).half(),
    },
    "awq": {"q.qweight": packed(256, 128), "q.qzeros": packed(64, 128), "q.scales": drawn(64, 256).half()},
    "compressed-tensors": {
        "q.weight_packed": packed(256, 128), "q.weight_scale": drawn(256, 64).bfloat16(),
        "q.weight_zero_point": packed(32, 64), "q.weight_shape": torch.tensor([256, 1024]),
    },
    "nvfp4": {
        "q.weight_packed": packed(256, 512, dtype=U8), "q.weight_scale": drawn(256, 64).to(E4M3),
        "q.weight_global_scale": torch.ones(1),
    },
    "modelopt": {
        "q.weight": packed(256, 512, dtype=U8), "q.weight_scale": drawn(256, 64).to(E4M3),
        "q.weight_scale_2": torch.ones(()),
    },
    "mxfp4": {"q.up_proj_blocks": packed(2, 64, 4, 16, dtype=U8), "q.up_proj_scales": packed(2, 64, 4, dtype=U8)},
    "marlin-24": {
        "q.weight_packed": packed(64, 256), "q.scale_packed": drawn(64, 256).half(),
        "q.meta": packed(64, 64, dtype=torch.int16),
    },
    "marlin": {"q.B": packed(64, 256), "q.s": drawn(64, 256).half()},
    "bitsandbytes": {
        "q.weight": packed(4096, 1, dtype=U8), "q.weight.absmax": drawn(64, 64), "q.weight.quant_map": drawn(16),
    },
    "quanto": {
        "q.weight._data": packed(256, 128, dtype=U8), "q.weight._scale": drawn(256, 64),
        "q.weight._shift": drawn(256, 64),
    },
    "int4 in int8": {"q.weight": packed(256, 128, dtype=I8), "q.weight_scale": drawn(256, 64)},
    "a scale that fits nothing": {"q.weight": drawn(250, 100).to(E4M3), "q.weight_scale": drawn(77, 99)},
    "cut mask": {
        "q.compressed": drawn(256, 128), "q.bitmask": packed(256, 30, dtype=U8), "q.shape": torch.tensor([256, 256]),
    },
}  # fmt: skip


@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize("method", PACKED)
def test_packed_values_and_their_scales_are_no_weights(tmp_path, method, config):
    about = {"quant_method": method, "bits": 4} if config or method == "int4 in int8" else None
    weights, skipped = opened([checkpoint(tmp_path, PACKED[method], about)])
    assert [entry.name for entry in weights.names()] == ["dense.weight"]
    told = {name: each.why for each in skipped for name in PACKED[method] if name in each.what}
    large = {name for name, tensor in PACKED[method].items() if tensor.ndim >= 2}
    assert large - told.keys() == set()
    if config and "q.qweight" in told:
        assert told["q.qweight"] == f"packed values of a quantized weight ({method}), which are not unpacked"
    name = max(large)
    with pytest.raises(InvalidInput, match=f"'{name}' is no weight; it is one of "):
        weights.read(name)


def test_scales_in_another_shard_than_their_weight_are_found(tmp_path):
    save_file({"q.weight": FP8, "a.weight": drawn(N, K)}, tmp_path / "m-1.safetensors")
    save_file({"q.weight_scale_inv": BLOCKS, "b.scales": drawn(N, K)}, tmp_path / "m-2.safetensors")
    weights, _ = opened([str(tmp_path)])
    assert sorted(entry.name for entry in weights.names()) == ["a.weight", "b.scales", "q.weight"]
    assert torch.equal(weights.read("q.weight"), FP8.float() * spread(BLOCKS, 32, 32))


def test_scales_whose_weight_is_in_a_missing_shard_are_no_weights_by_the_config(tmp_path):
    weights, skipped = opened([checkpoint(tmp_path, {"q.scales": drawn(256, 64)}, {"quant_method": "gptq"})])
    assert [entry.name for entry in weights.names()] == ["dense.weight"]
    assert any("q.scales" in each.what for each in skipped)


def test_a_plain_checkpoint_is_read_as_it_is(tmp_path):
    tensors = {
        "q.scales": drawn(N, K),
        "q.weight": drawn(N, K),
        "q.position_ids": torch.ones(1, 512, dtype=torch.int64),
    }
    weights, skipped = opened([checkpoint(tmp_path, tensors)])
    assert [entry.name for entry in weights.names()] == ["dense.weight", "q.scales", "q.weight"]
    assert skipped == []


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", '{"quantization_config": 3}', "[]", '{"quantization_config": {"bits": "4"}}']
)
def test_a_config_that_cannot_be_read_is_passed_over(tmp_path, text):
    folder = checkpoint(tmp_path, {"q.weight": FP8})
    (tmp_path / "config.json").write_text(text)
    weights, skipped = opened([f"{folder}/m.safetensors"])
    assert {entry.name for entry in weights.names()} == {"dense.weight", "q.weight"}
    assert [each.why.partition(":")[0] for each in skipped] == (
        ["not JSON"] if text[:2] in ("[[", "{") else []
    )


def test_a_checkpoint_of_packed_values_alone_says_what_it_holds(tmp_path):
    save_file(PACKED["gptq"], tmp_path / "m.safetensors")
    weights, _ = opened([str(tmp_path)])
    with pytest.raises(
        InvalidInput, match=r"no 2-D float matrix is in it; .*packed values of a quantized weight"
    ):
        choose(weights, [], (32, 32))
