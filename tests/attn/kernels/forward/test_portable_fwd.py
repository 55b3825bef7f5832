"""portable.attention_fwd without a GPU: arithmetic in Triton's interpreter, code by compiling for real cards."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.attn.plan.kernels import AttentionCall, AttentionGradCall
from sparsek.attn.plan.problems import AttentionProblem

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import packed_rows
from sparsek.attn.kernels.forward import portable_fwd as portable
from sparsek.engine.launch.recorder import recording
from tests.attn.kernels.forward.portable_fwd_code import chained, compiled, merged
from tests.attn.kernels.forward.problems import BLOCKS, attention_problem, hold_predictions, hold_refusals
from tests.attn.mask.members import drawn
from tests.engine.launch import newest
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS
from tests.sampling import sampled

KERNEL: Any = portable.KERNEL
# One address of lse's way out, on sm_80; no loop touches it.
STACK = 8


def problem(card: str, *dims: int, length: int = 8192, **more: Any) -> AttentionProblem:
    """On a card of CARDS, with as many keys as queries."""
    return attention_problem(AttentionProblem, *dims, card=CARDS[card], q_len=length, kv_len=length, **more)


def check_code(card: str, p: AttentionProblem, c: portable.Config, code: Code, stack: int = STACK) -> None:
    what = f"{card} {p.dim}:{p.v_dim} {p.block} {c}: {code._replace(ptx='', ttgir='')}"
    assert code.stack <= stack, f"spills: {what}"
    assert code.shared <= portable._shared(p, c) <= p.card.smem_bytes, what
    assert code.copies, f"16-byte asynchronous copies are missing: {what}"
    assert code.wgmma == (card == "sm_90"), what
    assert chained(code, c.num_warps) or (card != "sm_90" and c.tile_m < max(c.tile_n, p.v_dim)), (
        f"P is not in registers: {what}"
    )


@pytest.mark.parametrize(("card", "dim"), once(product(("sm_90", "sm_80"), (64, 128, 256)), most=2))
def test_every_config_compiles_without_spills_into_shared_memory(card: str, dim: int) -> None:
    p = problem(card, dim)
    configs = list(KERNEL.configs(p))
    assert len(configs) >= 3
    for c in sampled(configs, 1, of=(card, dim)):
        check_code(card, p, c, compiled(card, dim, dim, p.block, "both", c))


OTHERS = (
    ((96, 96), (128, 128), "interval", "bf16"),
    ((192, 128), (128, 128), "none", "fp16"),
    ((32, 32), (128, 64), "bits", "fp16"),
    ((128, 128), (64, 64), "interval", "bf16"),
    ((128, 128), (128, 128), "members", "bf16"),
)


@pytest.mark.parametrize(("card", "other"), once(product(CARDS, OTHERS), most=2), ids=str)
def test_defaults_for_other_dims_blocks_and_rules_compile_without_spills(
    card: str, other: tuple[tuple[int, int], tuple[int, int], str, str]
) -> None:
    dims, block, rules, dtype = other
    p = problem(card, *dims, block=block, dtype=dtype)
    c = KERNEL.default(p)
    check_code(card, p, c, compiled(card, *dims, block, rules, c, dtype))


def test_the_newest_triton_compiles_the_defaults() -> None:
    drawn = sampled(list(product(("sm_90", "sm_80"), (64, 128, 256))), 1)
    problems = [(card, problem(card, dim)) for card, dim in drawn]
    chosen = [(card, p, KERNEL.default(p)) for card, p in problems]
    found = newest.calls(compiled, [(card, p.dim, p.v_dim, p.block, "both", c) for card, p, c in chosen])
    for (card, p, c), code in zip(chosen, found, strict=True):
        check_code(card, p, c, code, stack=32)


@pytest.mark.parametrize(("card", "v_dim"), once(product(("sm_90", "sm_80"), (96, 256)), most=1))
def test_the_merge_compiles_without_spills(card: str, v_dim: int) -> None:
    assert merged(card, v_dim).stack == 0


def test_every_problem_has_configs_that_divide_its_block_and_fit_its_card() -> None:
    for card, dim, v_dim, block in product(CARDS, portable.DIMS, portable.DIMS, BLOCKS):
        p = problem(card, dim, v_dim, block=block)
        assert KERNEL.why_not(p) == []
        configs = list(KERNEL.configs(p))
        assert KERNEL.default(p) in configs
        for c in configs:
            assert block[0] % c.tile_m == block[1] % c.tile_n == 0
            assert portable._shared(p, c) <= p.card.smem_bytes


def test_reasons_name_what_is_wrong() -> None:
    hold_refusals(KERNEL, problem("sm_90"), {}, "tiles of queries")


def test_the_default_is_the_first_config_unless_tiles_are_fewer_than_sms() -> None:
    p = problem("sm_90")
    assert KERNEL.default(p) == next(iter(KERNEL.configs(p)))
    few = problem("sm_90", length=1024)
    assert KERNEL.default(few).tile_m == 64
    assert KERNEL.default(problem("sm_90", length=128)).tile_m == 64


def test_heads_are_walked_together_while_their_keys_fit_in_half_of_l2() -> None:
    long = problem("sm_90", length=32768)
    assert portable._section(long) == 2  # 16.8 MB of K and V a head
    assert portable._section(replace(long, kv_heads=4)) == 4  # 4 heads of q to each of k
    assert portable._section(problem("sm_90", length=2048)) == 16
    # Causal: the longest row is twice the mean, and 8 sections would each end on one.
    causal = replace(problem("sm_90"), stored=16 * 64 * 65 // 2, longest=64)
    assert portable._section(causal) == 16


def test_predictions_grow_with_work_and_never_beat_the_bandwidth() -> None:
    hold_predictions(KERNEL, lambda dim, block: problem("sm_90", dim, block=block))
    one_row = replace(problem("sm_90"), longest=64 * 40)
    assert KERNEL.seconds(one_row, KERNEL.default(one_row)) > 2 * KERNEL.seconds(
        problem("sm_90"), KERNEL.default(one_row)
    )


@pytest.mark.parametrize("length", [8192, 32768])
def test_the_prediction_is_about_what_flex_attention_takes(length: int) -> None:
    """332 and 362 TFLOPS were measured for its Triton kernel on this problem."""
    p = problem("sm_90", length=length)
    assert 320e12 < p.useful_flops / KERNEL.seconds(p, KERNEL.default(p)) < 390e12


def test_notes_say_what_is_padded() -> None:
    p = problem("sm_90", 192, 96)
    assert KERNEL.notes(p, KERNEL.default(p)) == ["head dim 96 as 128 and 192 as 256, padded with zeros"]
    assert KERNEL.notes(problem("sm_90"), KERNEL.default(problem("sm_90"))) == []


def test_config_sides_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="tile_n of portable"):
        portable.Config(64, 48, 4, 3)


def test_packed_rows_are_copied_by_launches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded calls contain no other operators than allocations and views."""
    launches: list[tuple[Any, Any]] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda at: 0, raising=False)
    monkeypatch.setattr(packed_rows, "copy", lambda *given: launches.append(given))
    mask = drawn(37, 150, (16, 64), window=3).mask
    q, lse = torch.zeros(2, 8, 37, 64), torch.zeros(2, 8, 37)
    seen: list[Any] = []

    class Inner:
        name = "inner"

        def prepare(self, *given: Any) -> Any:
            return seen.extend(given)

        def launch(self, c: Any, work: Any, call: Any) -> None:
            seen.append(call)

    more = {"q_heads": 8, "kv_heads": 1, "mask_heads": 1, "block": (16, 64), "members": 1}
    p = problem("sm_90", 64, length=37, **more)
    kernel, key = packed_rows.PackedRows(Inner()), torch.zeros(2, 1, 150, 64)
    calls = (
        AttentionCall(q, key, key, mask, 1.0, q, lse),
        AttentionGradCall(q, key, key, mask, 1.0, q, lse, q, None, q, key, key),
    )
    with recording([q, lse, key]) as recorder:
        for call in calls:
            kernel.launch(None, kernel.prepare(p, None, mask), call)
    assert recorder.reason == ""
    for packed in (each for each in seen if hasattr(each, "scores")):
        assert packed.q.shape == (2, 1, 37 * 8, 64)
        assert packed.mask.block == (128, 64)
        assert packed.mask.lo.shape == (1, 37 * 8)
    assert len(launches) == 2 + 3 + 2 + 5
