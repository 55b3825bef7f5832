"""Problems of attention and of its gradients from flat facts, and what their kernels say and compile to."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from sparsek.attn.plan.problems import AttentionGradProblem, AttentionProblem
from sparsek.core.device import CPU, H200
from tests.problems import T4

Problem = TypeVar("Problem", AttentionProblem, AttentionGradProblem)
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))


def attention_problem(kind: type[Problem], dim: int = 128, v_dim: int | None = None, **more: Any) -> Problem:
    """16 heads of 8192 queries and keys on an H200, each head with its own 12.5 % of the blocks, but for `more`."""
    parts: dict[str, Any] = {
        "batch": 1, "q_heads": 16, "kv_heads": 16, "q_len": 8192, "kv_len": 8192, "dtype": "bf16", "card": H200,
        "block": (128, 128), "mask_batch": 1, "mask_heads": 16, "partial": 0,
    } | more  # fmt: skip
    bq, bk = parts["block"]
    longest = parts.pop("longest", max(1, parts["kv_len"] // bk // 8))
    stored = parts.pop("stored", longest * -(-parts["q_len"] // bq) * parts["mask_heads"])
    return kind(dim=dim, v_dim=v_dim or dim, stored=stored, longest=longest, **parts)


def hold_refusals(kernel: Any, p: Problem, more: dict[str, Any], tiles: str) -> None:
    """`kernel` takes `p`, with `more` too, and says what is wrong with others. `tiles` is what it has too many of."""
    assert kernel.why_not(p) == []
    assert kernel.why_not(replace(p, aligned=False, unit_stride=False, **more)) == []
    old = T4
    for change, reason in (
        ({"card": old}, "8.0 or newer; NVIDIA T4 has 7.5"),
        ({"card": replace(H200, smem_bytes=49152)}, "49152 bytes of shared memory"),
        ({"card": CPU, "dtype": "fp16"}, "TRITON_INTERPRET=1"),
        ({"dtype": "fp32"}, "bf16 or fp16, not fp32"),
        ({"dim": 80}, "32, 64, 96, 128, 192, 256; got 80 and 128"),
        ({"v_dim": 512}, "got 128 and 512"),
        ({"q_len": 2**31 - 1}, "2147483647 queries"),
        ({"batch": 2**22 if tiles == "tiles of queries" else 2**21, "q_heads": 2**10}, tiles),
    ):
        (found,) = kernel.why_not(replace(p, **change))
        assert reason in found, found


def hold_predictions(
    kernel: Any,
    problem: Any,
    shapes: Iterable[tuple[int, tuple[int, int]]] = tuple(product((64, 128, 256), BLOCKS)),
) -> None:
    """Four times the work takes more than three times as long, and nothing beats the memory. `problem(dim, block)`."""
    for dim, block in shapes:
        p = problem(dim, block)
        c = kernel.default(p)
        seconds = kernel.seconds(p, c)
        assert kernel.seconds(replace(p, stored=4 * p.stored, longest=4 * p.longest), c) > 3 * seconds
        assert seconds > p.compulsory_bytes / H200.bandwidth


SMEM_PER_BLOCK = 227 << 10  # what one CTA may have on sm_90
SMEM_PER_SM = 228 << 10  # what all CTAs of an SM share, 1 KB of each for the system
REGISTERS = 65536
CLEAN = ("unwritten", "mixed", "early", "fixed_bounds")
# What wgmma calls a dtype, and how many elements of it one instruction takes.
OPERANDS = {"bf16": ("bf16", 16), "fp16": ("f16", 16)}


def hold_code(
    what: Any, code: Any, dtype: str, widths: Iterable[int], products: int, ctas: int = 1, clean: Any = CLEAN
) -> str:
    """What every compiled kernel of Hopper must show: `products` of wgmma with results of `widths`, no waits that ptxas
    added, barriers and bounds as written, registers and memory. Gives a text for further checks.
    """
    where = f"{what} in {dtype}:\n{code}"
    kind, k = OPERANDS[dtype]
    kinds = {f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}" for n in widths}
    assert code.wgmma == sorted(kinds), where
    assert code.wgmma_count == products, where
    assert "serialized" not in code.log, where
    assert "Potential Performance Loss" not in code.log, where
    assert all(getattr(code, fact) == [] for fact in clean), where
    assert code.shared <= SMEM_PER_BLOCK, where
    assert ctas * (code.shared + 1024) <= SMEM_PER_SM, where
    assert ctas * code.registers * 32 * code.warps <= REGISTERS, where
    return where


def hold_forward(c: Any, dtype: str, code: Any, exponentials: int, clean: Any = CLEAN) -> str:
    """The same of a forward kernel: S before the steps and in both kinds of steps, P V in these and after them. P V is
    multiplied beside the softmax. Where steps with rules may be passed over, their loop has S a second time, without
    P V of the step before, and P V without S, if they are loaded.
    """
    passes_over = getattr(c, "members", 0) > 0 and not c.member_ends
    depth = (3 + passes_over) * (c.dim + c.keys) - c.passes * c.keys
    products = c.groups * depth // OPERANDS[dtype][1]
    where = hold_code(c, code, dtype, {c.keys, c.v_dim}, products, c.ctas_per_sm, clean)
    assert code.waits == [0, 1], where
    assert c.smem_bytes <= code.shared <= c.smem_bytes + 1024, f"smem_bytes says {c.smem_bytes}: {where}"
    assert len(code.loops) == 2 * c.groups, where
    for loop in code.loops:
        assert loop.exponentials in (exponentials, exponentials * (1 + passes_over)), where
        assert loop.beside >= 0.9 * exponentials, f"P V is waited for before the softmax: {where}"
    return where
