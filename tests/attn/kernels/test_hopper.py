"""What Hopper's kernels of attention say: texts of configs, reasons, and predictions that grow. Without a GPU."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.attn.plan.attention_schedule import part_blocks
from sparsek.core.device import CPU, H200
from sparsek.engine.table import load

pytest.importorskip("triton")

from tests.attn.kernels.backward import test_hopper_bwd as bwd
from tests.attn.kernels.backward import test_hopper_bwd_wide as wide
from tests.attn.kernels.forward import test_hopper_fp8 as fp8
from tests.attn.kernels.forward import test_hopper_fwd as fwd
from tests.attn.kernels.forward.problems import BLOCKS, SMEM_PER_SM, hold_predictions
from tests.attn.kernels.paged import test_hopper as paged
from tests.problems import A100, B200

MEMBERS: dict[str, st.SearchStrategy[Any]] = {
    "members": st.sampled_from((1, 2, 8)),
    "member_ends": st.booleans(),
}
FLAGS = dict.fromkeys(("interval", "bits", "split", "lse"), st.booleans()) | MEMBERS
SIDES, WIDE_SIDES = st.sampled_from((32, 64, 128, 256)), st.sampled_from((64, 128, 256))
BLOCK, HALVES = st.sampled_from(BLOCKS), st.sampled_from((1, 2))
OF_TILES: dict[str, st.SearchStrategy[Any]] = {
    "groups": HALVES,
    "keys": st.sampled_from((64, 128)),
    "stages": st.integers(2, 12),
    "q_slots": HALVES,
    "pack": st.sampled_from((1, 2, 4, 8, 16, 32, 64)),
}
# Every field of a kernel's configs, with what it may be.
FIELDS: dict[Any, dict[str, st.SearchStrategy[Any]]] = {
    fwd: OF_TILES | FLAGS | {
        "dim": SIDES, "v_dim": SIDES, "block": BLOCK, "softcap": st.booleans(), "alibi": st.booleans(),
        "sinks": st.sampled_from(("", "fp32", "bf16", "fp16")),
    },
    fp8: OF_TILES | FLAGS | {
        "dim": SIDES, "v_dim": SIDES, "block": BLOCK, "by_block": st.booleans(), "half": st.booleans(),
    },
    bwd: MEMBERS | {
        "dim": SIDES, "v_dim": SIDES, "block": BLOCK, "halves": HALVES, "stages": st.integers(2, 8),
        "dq_slots": st.integers(1, 4), "sums": st.integers(0, 4), "queries": st.sampled_from((64, 128)),
        **dict.fromkeys(("interval", "bits", "softcap", "alibi", "parts", "paired"), st.booleans()),
    },
    wide: MEMBERS | {
        "dim": WIDE_SIDES, "v_dim": WIDE_SIDES, "block": BLOCK, "stages": st.integers(2, 8), "v_slots": HALVES,
        "interval": st.booleans(), "bits": st.booleans(),
    },
    paged: OF_TILES | {
        "dim": WIDE_SIDES, "v_dim": WIDE_SIDES, "page": st.sampled_from((16, 64, 128)),
        "list_block": st.sampled_from(((0, 0), (64, 64), (64, 128), (128, 64))),
        **dict.fromkeys(("causal", "window", "sinks", "softcap", "sink_logits", "lse"), st.booleans()),
    },
}  # fmt: skip
NAMES = [of.KERNEL.name for of in FIELDS]


@pytest.mark.parametrize("of", FIELDS, ids=NAMES)
def test_configs_have_texts_of_their_own(of: Any) -> None:
    """Triton keeps compiled kernels by the text of their constants: two configs with one text ran one kernel."""
    options = FIELDS[of]
    assert {field.name for field in fields(of.Config)} == set(options)

    @given(st.builds(of.Config, **options), st.data())
    def differ(c: Any, data: st.DataObject) -> None:
        assert repr(c) == str(c)
        for name, values in options.items():
            other = replace(c, **{name: data.draw(values)})
            assert (str(c) == str(other)) == (c == other), name

    differ()
    known = getattr(of, "CONFIGS", [])
    assert len({str(c) for c in known}) == len(known)


OTHER_CARDS: list[tuple[dict[str, Any], str]] = [
    ({"card": A100}, "needs a Hopper card .* NVIDIA A100"),
    ({"card": B200}, "needs a Hopper card .* NVIDIA B200"),
    ({"card": CPU}, "needs a Hopper card .* cpu"),
    ({"aligned": False}, "multiples of 16 bytes"),
]
REASONS: dict[Any, list[tuple[dict[str, Any], str]]] = {
    fwd: [
        ({"dtype": "fp32"}, "multiplies bf16 and fp16, not fp32"),
        ({"dtype": "fp64"}, "multiplies bf16 and fp16, not fp64"),
        ({"dim": 264}, "multiples of 8 up to 256, not 264 and 128"),
        ({"v_dim": 512}, "multiples of 8 up to 256, not 128 and 512"),
        ({"dim": 100}, "multiples of 8 up to 256, not 100 and 128"),
        ({"v_dim": 4}, "multiples of 8 up to 256, not 128 and 4"),
        ({"q_len": 2**29 + 1, "mask_heads": 1}, "32 bits"),
        ({"kv_len": 2**29 + 1}, "32 bits"),
        ({"q_len": 2**27}, "32 bits"),
    ],
    fp8: [
        ({"out": "fp32"}, "gives bf16 and fp16, not fp32"),
        ({"softcap": True}, "does not change scores, and these have softcap"),
        ({"sink_logits": "fp32"}, "fp32 sinks"),
        ({"dim": 264}, "multiples of 16 up to 256 for k and 128 for v, not 264 and 128"),
        ({"v_dim": 192}, "not 128 and 192"),
        ({"dim": 40}, "not 40 and 128"),
        ({"kv_len": 2**29 + 1}, "32 bits"),
    ],
    bwd: [
        ({"dim": 256, "v_dim": 256}, "at most 128 columns"),
        ({"dim": 100, "v_dim": 100}, "multiples of 8"),
        ({"dtype": "fp32"}, "bf16 and fp16"),
        ({"block": (128, 64)}, "in order with blocks of 64 keys; name that, or deterministic=False"),
    ],
    wide: [
        ({"dim": 128, "v_dim": 128}, "is for head dims above 128"),
        ({"dim": 512, "v_dim": 512}, "up to 256"),
        ({"dim": 196, "v_dim": 196}, "multiples of 8"),
        ({"block": (64, 128)}, "blocks must too, not 64"),
        ({"softcap": True}, "no softcap"),
        ({"alibi": True}, "no ALiBi"),
        ({"dtype": "fp32"}, "bf16 and fp16"),
        ({"batch": 2**20, "q_heads": 2**4, "q_len": 128, "kv_len": 128}, "32 bits"),
    ],
    paged: [
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "multiplies bf16 and fp16, not fp32"),
        ({"kv_dtype": "e4m3"}, "pages of q's dtype, bf16, not e4m3"),
        ({"dim": 264}, "multiples of 8 up to 256, not 264 and 128"),
        ({"v_dim": 100}, "multiples of 8 up to 256, not 128 and 100"),
        ({"page": 8}, "powers of two from 16 on, not 8"),
        ({"page": 48}, "powers of two from 16 on, not 48"),
        ({"max_k": 2**30}, "32 bits"),
        ({"list_heads": 8, "list_block": (128, 32), "listed": 9}, r"not \(128, 32\)"),
        ({"list_heads": 8, "list_block": (1, 128), "listed": 9999}, r"not \(1, 128\)"),
        ({"list_heads": 8, "list_block": (1, 128), "listed": 32, "tokens": 2**25}, r"under 2\^31 words"),
    ],
}


@pytest.mark.parametrize(
    ("of", "change", "reason"),
    [
        pytest.param(of, *each, id=f"{of.KERNEL.name}-{' '.join(each[0])}-{each[1]}")
        for of, reasons in REASONS.items()
        for each in OTHER_CARDS + reasons
    ],
)
def test_a_reason_names_what_is_in_the_way(of: Any, change: dict[str, Any], reason: str) -> None:
    assert of.KERNEL.why_not(of.problem()) == []
    (found,) = of.KERNEL.why_not(replace(of.problem(), **change))
    assert re.search(reason, found), found


def test_every_reason_is_given_at_once() -> None:
    wrong = {"card": CPU, "dtype": "fp32", "dim": 7, "aligned": False, "kv_len": 2**30}
    assert len(fwd.KERNEL.why_not(replace(fwd.problem(), **wrong))) == 5


def test_what_the_gradients_take_in_any_order() -> None:
    """There the Hopper kernel is the faster one, and of narrow heads that are padded the only one."""
    for p in (
        bwd.problem(block=(64, 128)),
        bwd.problem(block=(64, 64), deterministic=False),
        bwd.problem(80, block=(64, 64)),
    ):
        assert load("hopper.attention_bwd").why_not(p) == []


PREDICTED: list[tuple[Any, Callable[..., Any], tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    (fwd, fwd.problem, (32, 64, 128, 256), BLOCKS),
    (fp8, fp8.problem, (32, 64, 128), BLOCKS),
    (wide, wide.problem, (192, 256), ((128, 128), (128, 64))),
    (wide, lambda dim, block: wide.problem(dim, 128, block=block), (256,), ((128, 128),)),
]


@pytest.mark.parametrize(
    ("of", "problem", "dims", "blocks"), PREDICTED, ids=["fwd", "fp8", "wide", "wide, v of 128"]
)
def test_predictions_grow_with_work_and_never_beat_the_bandwidth(
    of: Any, problem: Any, dims: tuple[int, ...], blocks: tuple[tuple[int, int], ...]
) -> None:
    hold_predictions(of.KERNEL, lambda dim, block: problem(dim, block=block), product(dims, blocks))


@pytest.mark.parametrize(("of", "unit", "most"), [(fwd, 8, (32, 32)), (fp8, 16, (16, 8))], ids=NAMES[:2])
@settings(max_examples=40)
@given(
    sides=st.tuples(st.integers(0, 31), st.integers(0, 31)),
    block=BLOCK,
    length=st.sampled_from((1, 30, 64, 65, 1000, 100_000)),
    heads=st.sampled_from(((1, 1), (8, 8), (6, 2), (64, 1), (24, 2))),
    of_mask=st.integers(0, 2),
    longest=st.sampled_from((0, 1, 9, 781)),
    rows=st.sampled_from((0, 64, 128, 192)),
)
def test_every_config_fits_the_card_and_the_problem(
    of: Any, unit: int, most: tuple[int, int], sides: tuple[int, int], block: tuple[int, int], length: int,
    heads: tuple[int, int], of_mask: int, longest: int, rows: int,
) -> None:  # fmt: skip
    """`rows` share a scale in FP8, 0 for all of a head."""
    p = of.problem(
        *(unit * (1 + side % n) for side, n in zip(sides, most, strict=True)), block=block, q_len=length,
        kv_len=100_000, q_heads=heads[0], kv_heads=heads[1], mask_heads=(1, *heads)[of_mask], longest=longest,
        by_interval=True, lse=True, **({"scale_rows": (rows, rows, rows)} if of is fp8 else {}),
    )  # fmt: skip
    kernel = of.KERNEL
    configs = list(kernel.configs(p))
    assert len(set(configs)) == len(configs) > 0
    assert configs == list(kernel.configs(replace(p)))
    assert kernel.default(p) == kernel.default(replace(p))
    best = min(kernel.seconds(p, c) for c in configs)
    assert kernel.seconds(p, kernel.default(p)) == best > p.compulsory_bytes / H200.bandwidth
    for c in configs:
        assert c.ctas_per_sm * (c.smem_bytes + 320 + 1024) <= SMEM_PER_SM, "320: what Triton adds at most"
        assert p.dim <= c.dim < 2 * max(p.dim, 32), c
        assert p.v_dim <= c.v_dim < 2 * max(p.v_dim, 32), c
        assert c.block[0] % c.rows == c.block[1] % c.keys == 0, c
        assert (c.block, c.interval, c.bits, c.lse) == (p.block, True, False, True)
        assert c.stages >= 2, c
        shared = p.mask_heads in (1, p.kv_heads)
        assert c.pack == 1 or (shared and p.group % c.pack == 0 and 2 * p.q_len <= p.block[0]), c
        assert c.split == (p.longest > part_blocks(p, kernel._shape(p, c))), c
        if of is fp8:
            assert rows % c.keys == 0, "a step has one scale"
            assert c.by_block == (rows > 0)
