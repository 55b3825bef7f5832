"""`sparsek doctor`: what is installed, what it can run, and whether the arithmetic is right."""

import platform
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import typer
from rich.table import Table
from rich.text import Text

import sparsek as sk
from sparsek.bench.engine.records import smi_facts, version_of
from sparsek.bench.suites.attention import AttentionCase
from sparsek.bench.suites.spmm import SpmmCase
from sparsek.cli.output import console, progress
from sparsek.cli.output import table as new_table
from sparsek.core.device import Card, card_of
from sparsek.core.errors import Unsupported
from sparsek.kernels import names_for
from sparsek.ops.attention import attention, plan_attention, plan_attention_backward
from sparsek.ops.sddmm import plan_sddmm
from sparsek.ops.spgemm import plan_spgemm
from sparsek.ops.spmm import plan_spmm
from sparsek.testing.attention_budget import check_attention, check_attention_backward
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.cases import BSR24_CASES, ROW, SEMI24_CASES, Case
from sparsek.testing.product_budget import check_sddmm, check_spgemm

# As many columns as every kernel takes.
PRODUCT = SpmmCase(512, 512, 64, (64, 64), 0.5)
IN_FP8 = {
    "bsr_fp8": Case(512, 512, 64, (128, 128), "doctor", scales=ROW),
    "semi24_fp8": Case(512, 512, 64, None, "doctor", scales=ROW),
    "bsr24_fp8": Case(512, 512, 64, (128, 128), "doctor", two_four=True, scales=ROW),
}
ATTENTION = AttentionCase(
    batch=1, heads=2, kv_heads=1, q_len=500, kv_len=500, dim=64, v_dim=64, mask="window:150"
)


def doctor() -> None:
    """Shows versions, the GPU and the kernels, says why any does not run here, and checks products and attention."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = console()
    out.print(_versions(device))
    table, wrong = _kernels(device)
    out.print(table)
    if wrong:
        out.print(f"wrong results from {', '.join(wrong)}", style="bold red")
        raise typer.Exit(1)
    out.print(
        f"self check: A @ B, B @ B.T at the blocks of A, and A @ A.T, {PRODUCT.name}; A @ B in 2:4 and in FP8; "
        f"attention and its gradients, {ATTENTION.name}. On {device.type} every kernel that runs here is within its "
        "error budget"
    )


def _versions(device: torch.device) -> Table:
    table = new_table("SparseK")
    table.show_header = False
    table.add_row("sparsek", getattr(sk, "__version__", None) or version_of("sparsek") or "from source")
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", torch.__version__)
    table.add_row("triton", version_of("triton") or "not installed")
    table.add_row("numpy", version_of("numpy") or "not installed")
    if device.type == "cuda":
        card = card_of(device)
        driver, power = smi_facts(device.index or 0)
        facts = f"{card.name}, sm_{card.capability[0]}{card.capability[1]}, {card.sm_count} SMs"
        table.add_row("GPU", f"{facts}, {power:.0f} W" if power else facts)
        table.add_row("rates", rates_of(card))
        table.add_row("driver", driver or "unknown (nvidia-smi does not answer)")
        table.add_row("CUDA of torch", torch.version.cuda or "none")
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        table.add_row("GPU", f"none that torch can use (torch is {built}); everything runs on the CPU")
    return table


def rates_of(card: Card) -> str:
    """What plans take for the card's rates, and where they are from."""
    shown = f"{card.tflops['bf16']:.0f} TFLOPS in bf16, {card.bandwidth / 1e12:.3g} TB/s"
    return f"{shown}, {card.caveat('bf16') or 'measured'}"


def _kernels(device: torch.device) -> tuple[Table, list[str]]:
    """The table of kernels, and the names of those whose result is wrong."""
    table = new_table("Kernels")
    table.add_column("kernel", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why")
    wrong: list[str] = []
    bf16 = torch.bfloat16
    checks = [
        *_checks("spmm", _product(*PRODUCT.make(device)), "bsr"),
        *_checks("spmm", _product(*SEMI24_CASES[0].make(str(device), bf16)), "semi24"),
        *_checks("spmm", _product(*BSR24_CASES[0].make(str(device), bf16)), "bsr24"),
    ]
    for storage, one in IN_FP8.items():
        checks += _checks("spmm", _product(*one.make(str(device)), dtype=bf16), storage)
    checks += [
        *_checks("sddmm", _sampled(device)),
        *_checks("spgemm", _sparse(device)),
        *_checks("attention", _attention(device)),
        *_checks("attention_backward", _gradients(device)),
    ]
    several = Counter(name for _, name, _ in checks)
    with progress(len(checks), "kernels") as (say, advance):
        for op, name, check in checks:
            label = name if several[name] == 1 else f"{name} ({op})"
            say(label)
            try:
                got = check(name)
            except Unsupported as error:
                table.add_row(label, "no", "; ".join(error.reasons.get(name, [str(error)])))
            else:
                share = f"error {got.error:.1e} of {got.budget:.1e} allowed"
                table.add_row(
                    label, Text("runs", "green") if got.passed else Text("wrong", "bold red"), share
                )
                if not got.passed:
                    wrong.append(label)
            advance()
    return table, wrong


Check = Callable[[str], Gate]


def _checks(op: str, check: Check, storage: str | None = None) -> list[tuple[str, str, Check]]:
    return [(storage or op, name, check) for name in names_for(op, storage)]


def _product(a: Any, b: Any, *_: Any, dtype: torch.dtype | None = None) -> Check:
    return lambda name: check_spmm(a, b, plan_spmm(a, b, kernel=name, dtype=dtype)(a, b))


def _sampled(device: torch.device) -> Check:
    a, b = PRODUCT.make(device)
    return lambda name: check_sddmm(b, b.T, plan_sddmm(b, b.T, a.pattern, kernel=name)(b, b.T, a.pattern))


def _sparse(device: torch.device) -> Check:
    a, _ = PRODUCT.make(device)
    return lambda name: check_spgemm(a, a.T, plan_spgemm(a, a.T, kernel=name)(a, a.T))


def _attention(device: torch.device) -> Check:
    one = ATTENTION.operands(device)[0]
    q, k, v, mask = one.q, one.k, one.v, one.mask
    return lambda name: check_attention(
        q, k, v, mask, plan_attention(q, k, v, mask, kernel=name)(q, k, v, mask)
    )


def _gradients(device: torch.device) -> Check:
    one = ATTENTION.operands(device)[0]
    q, k, v, mask = one.q, one.k, one.v, one.mask
    out, lse = attention(q, k, v, mask, return_lse=True)
    grad = torch.randn_like(out)

    def check(name: str) -> Gate:
        plan = plan_attention_backward(q, k, v, mask, kernel=name)
        return check_attention_backward(q, k, v, mask, grad, plan(q, k, v, mask, out, lse, grad))

    return check
