"""Problems of attention and of its gradients from flat facts, and what every portable kernel of both says of them."""

from dataclasses import replace
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


def hold_predictions(kernel: Any, problem: Any) -> None:
    """Four times the work takes more than three times as long, and nothing beats the memory. `problem(dim, block)`."""
    for dim in (64, 128, 256):
        for block in BLOCKS:
            p = problem(dim, block)
            c = kernel.default(p)
            seconds = kernel.seconds(p, c)
            assert kernel.seconds(replace(p, stored=4 * p.stored, longest=4 * p.longest), c) > 3 * seconds
            assert seconds > p.compulsory_bytes / H200.bandwidth
