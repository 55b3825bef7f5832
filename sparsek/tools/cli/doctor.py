"""`sparsek doctor`: what is installed, what it can run, and whether the arithmetic is right."""

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.quantized_heads import quantize_heads
from sparsek.attn.ops.attention import attention, plan_attention, plan_attention_backward
from sparsek.attn.ops.attention_paged import plan_attention_paged
from sparsek.core.device import H200, Card, card_of
from sparsek.core.errors import Unsupported
from sparsek.core.machine import smi_facts, version_of
from sparsek.core.terminal import AsJson, console, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek.engine.plan.plan import Plan, time_text
from sparsek.engine.planning import choose
from sparsek.engine.table import names_for
from sparsek.products.formats.random import random_dense
from sparsek.products.ops.linear import plan_layer
from sparsek.products.ops.sddmm import plan_sddmm
from sparsek.products.ops.spgemm import plan_spgemm
from sparsek.products.ops.spmm import plan_spmm
from sparsek.testing.attention_budget import check_attention, check_attention_backward
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.paged_budget import PagedInputs, check_attention_paged
from sparsek.testing.product_budget import check_sddmm, check_spgemm

# What the screen shows a kernel for: sides large enough that a GPU's kernels differ.
SIDE, BLOCK, DENSITY = 2048, (128, 128), 0.125
TOKENS, WINDOW = 4096, 1024


def _factors(
    device: torch.device,
    sides: tuple[int, int, int] = (512, 512, 64),  # as many columns as every kernel takes
    block: tuple[int, int] = (64, 64),
    density: float = 0.5,
) -> tuple[sk.BSR, Tensor]:
    """A [m, k] and B [k, n] in bf16."""
    m, k, n = sides
    a = sk.random_bsr(m, k, block, density, dtype=torch.bfloat16, device=device)
    return a, random_dense(k, n, dtype=a.dtype, device=device, seed=1)


def _heads(
    device: torch.device, heads: tuple[int, int] = (2, 1), tokens: int = 500, dim: int = 64, window: int = 150
) -> tuple[Tensor, Tensor, Tensor, sk.BlockMask]:
    """q, k and v in bf16 of so many heads of queries and of keys, and a mask."""
    q, k, v = (
        random_dense(1, count, tokens, dim, dtype=torch.bfloat16, device=device, seed=seed)
        for seed, count in enumerate((heads[0], heads[1], heads[1]))
    )
    return q, k, v, sk.BlockMask.sliding_window(tokens, window, device=device)


@dataclass(frozen=True)
class Checked:
    """One kernel: the gate of a product that it computed, or why it does not run here."""

    operation: str
    name: str
    gate: Gate | None = None
    why_not: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        return self.gate is not None and not self.gate.passed

    def as_json(self) -> dict[str, Any]:
        gate = self.gate
        found = {"error": gate.error, "budget": gate.budget, "passed": bool(gate.passed)} if gate else None
        return {"operation": self.operation, "name": self.name, "gate": found, "why_not": self.why_not}


def doctor(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every kernel, and why it does not run here.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Shows versions, GPUs and the kernel of each operation, and checks every kernel that runs here.

    Exit code 1 if a kernel computes a wrong result.

    --json: {sparsek, python, platform, torch, triton, numpy, cuda, driver, cards, operations, kernels, healthy}.
    A card: {name, capability, sm_count, memory_bytes, bandwidth, tflops, caveat, rates, power_limit_w}. An operation:
    {operation, kernel, predicted_seconds, roofline_seconds, on_h200}. A kernel: {operation, name, gate: {error, budget,
    passed} or null, why_not}.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plans = {name: make() for name, make in _typical(device).items()}
    found = _checked(device)
    wrong = [each.name for each in found if each.is_wrong]
    if json:
        kernels = [each.as_json() for each in found]
        operations = [_as_json(name, plan) for name, plan in plans.items()]
        print_json({**_facts(device), "operations": operations, "kernels": kernels, "healthy": not wrong})
    else:
        out = console()
        out.print(_versions(_facts(device)))
        out.print(_operations(plans, device))
        if verbose:
            out.print(_kernels(found))
        out.print(_summary(found, device, verbose))
        if wrong:
            out.print(f"wrong results from {', '.join(wrong)}", style="bold red")
    if wrong:
        raise typer.Exit(1)


def _facts(device: torch.device) -> dict[str, Any]:
    """Versions and cards."""
    on_gpu = device.type == "cuda"
    return {
        "sparsek": sk.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "cuda": torch.version.cuda,
        "driver": smi_facts(0)[0] if on_gpu else None,
        "cards": [_card(index) for index in range(torch.cuda.device_count())] if on_gpu else [],
    }


def _card(index: int) -> dict[str, Any]:
    card = card_of(torch.device("cuda", index))
    plain = ("name", "capability", "sm_count", "memory_bytes", "bandwidth")
    return {
        **{name: getattr(card, name) for name in plain},
        "tflops": dict(card.tflops),
        "caveat": card.caveat("bf16"),
        "rates": rates_of(card),
        "power_limit_w": smi_facts(index)[1],
    }


def _versions(facts: Mapping[str, Any]) -> Table:
    table = new_table("SparseK")
    table.show_header = False
    table.add_row("sparsek", f"{facts['sparsek']}, Python {facts['python']} on {facts['platform']}")
    packages = (f"{name} {facts[name] or 'not installed'}" for name in ("torch", "triton", "numpy"))
    table.add_row("with", ", ".join(packages))
    if not facts["cards"]:
        built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "a CPU build"
        table.add_row("GPU", f"none that torch can use (torch is {built}); everything runs on the CPU")
        return table
    same = Counter(
        (
            f"{card['name']}, sm_{card['capability'][0]}{card['capability'][1]}, {card['sm_count']} SMs"
            + (f", {card['power_limit_w']:.0f} W" if card["power_limit_w"] else ""),
            card["rates"],
        )
        for card in facts["cards"]
    )
    for (words, rates), count in same.items():
        table.add_row("GPU", f"{count} x {words}" if count > 1 else words)
        table.add_row("rates", rates)
    driver = facts["driver"] or "unknown (nvidia-smi does not answer)"
    table.add_row("driver", f"{driver}, CUDA {facts['cuda']} of torch")
    return table


def rates_of(card: Card) -> str:
    """The rates that plans use for the card, and their source."""
    shown = f"{card.tflops['bf16']:.0f} TFLOPS in bf16, {card.bandwidth / 1e12:.3g} TB/s"
    return f"{shown}, {card.caveat('bf16') or 'measured'}"


def _typical(device: torch.device) -> dict[str, Callable[[], Plan]]:
    """The plan of a typical case of each operation, by its name."""
    bf16 = torch.bfloat16
    a, b = _factors(device, (SIDE, SIDE, SIDE), BLOCK, DENSITY)
    x, weight = b.T, torch.randn(SIDE, SIDE, dtype=bf16, device=device)
    q, k, v, mask = _heads(device, (8, 8), TOKENS, 128, WINDOW)
    blocks, heads = sk.BSR24.from_bsr(a), quantize_heads(q, k, v, check=False)
    return {
        "spmm, BSR": lambda: plan_spmm(a, b),
        "spmm, 2:4": lambda: plan_layer(x, sk.Semi24.from_dense(weight)),
        "spmm, 2:4 in blocks": lambda: plan_layer(x, blocks),
        "spmm, FP8 in blocks": lambda: plan_layer(x, sk.quantize(a)),
        "sddmm": lambda: plan_sddmm(b, x, a.pattern),
        "spgemm": lambda: plan_spgemm(a, a),
        "attention": lambda: plan_attention(q, k, v, mask),
        "attention, FP8": lambda: plan_attention(*heads, mask),
        "attention, backward": lambda: plan_attention_backward(q, k, v, mask),
    }


def _as_json(name: str, plan: Plan) -> dict[str, Any]:
    return {
        "operation": name,
        "kernel": plan.kernel,
        "predicted_seconds": plan.seconds,
        "roofline_seconds": plan.bound_seconds,
        "on_h200": choose(replace(plan.problem, card=H200)).kernel.name,
    }


def _operations(plans: Mapping[str, Plan], device: torch.device) -> Table:
    """The kernel of each operation here; without a GPU also the one on an H200."""
    table = new_table(
        f"Kernels of typical cases: products of {SIDE}³ in bf16, {DENSITY:.3g} of the blocks of {BLOCK[0]}; "
        f"{TOKENS} tokens, window {WINDOW}"
    )
    on_gpu = device.type == "cuda"
    for title in ("operation", "here", *(("predicted",) if on_gpu else ("on an H200", "predicted there"))):
        table.add_column(title, no_wrap=True)
    for name, plan in plans.items():
        if on_gpu:
            table.add_row(name, plan.kernel, time_text(plan.seconds))
        else:
            there = choose(replace(plan.problem, card=H200))
            table.add_row(name, plan.kernel, there.kernel.name, time_text(there.seconds))
    return table


def _kernels(found: Sequence[Checked]) -> Table:
    table = new_table("Kernels")
    table.add_column("kernel", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why")
    for each in found:
        if each.gate is None:
            table.add_row(each.name, "no", "; ".join(each.why_not))
            continue
        share = f"error {each.gate.error:.1e} of {each.gate.budget:.1e} allowed"
        word = Text("wrong", "bold red") if each.is_wrong else Text("runs", "green")
        table.add_row(each.name, word, share)
    return table


def _summary(found: Sequence[Checked], device: torch.device, verbose: bool) -> str:
    ran = [each for each in found if each.gate is not None]
    right = sum(not each.is_wrong for each in ran)
    passed = f"all {right} gave" if right == len(ran) else f"{right} of them gave"
    more = "" if verbose else " `sparsek doctor --verbose` shows each kernel, and why it does not run."
    return (
        f"Self check: {len(ran)} of {len(found)} kernels run on this {device.type}; {passed} results within the error "
        f"budget.{more}"
    )


def _checked(device: torch.device) -> list[Checked]:
    """Every kernel on small operands."""
    checks = _products(device)
    for op, check in _others(device).items():
        checks += _checks(op, check)
    several = Counter(name for _, name, _ in checks)
    found: list[Checked] = []
    with progress(len(checks), "kernels") as (say, advance):
        for op, name, check in checks:
            label = name if several[name] == 1 else f"{name} ({op})"
            say(label)
            try:
                found.append(Checked(op, label, check(name)))
            except Unsupported as error:
                found.append(Checked(op, label, None, tuple(error.reasons.get(name, [str(error)]))))
            advance()
    return found


Check = Callable[[str], Gate]


def _checks(op: str, check: Check, storage: str | None = None) -> list[tuple[str, str, Check]]:
    return [(storage or op, name, check) for name in names_for(op, storage)]


def _products(device: torch.device) -> list[tuple[str, str, Check]]:
    """A @ B for A in every format, as it is and in FP8."""

    def product(a: Any, b: Any, dtype: torch.dtype | None = None) -> Check:
        return lambda name: check_spmm(a, b, plan_spmm(a, b, kernel=name, dtype=dtype)(a, b))

    a, b = _factors(device)
    wide, _ = _factors(device, block=(128, 128))  # blocks that every kernel of FP8 takes
    few = b[:, :32].contiguous()  # as many columns as every kernel of 2:4 takes
    formats: dict[str, tuple[Callable[[sk.BSR], Any], Tensor]] = {
        "bsr": (lambda a: a, b),
        "semi24": (lambda a: sk.Semi24.from_dense(a.to_dense()), few),
        "bsr24": (sk.BSR24.from_bsr, few),
    }
    checks = []
    for name, (stored, x) in formats.items():
        checks += _checks("spmm", product(stored(a), x), name)
    for name, (stored, _) in formats.items():
        check = product(sk.quantize(stored(wide)), sk.quantize(b.T).mT, b.dtype)
        checks += _checks("spmm", check, f"{name}_fp8")
    return checks


def _paged(device: torch.device) -> Check:
    """Two requests: a decoding step over 300 keys, and the last 70 queries of 200 keys, in pages of 64."""
    heads, kv_heads, dim, page = 4, 2, 64, 64
    table, lengths, edges = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 0]], [300, 200], [0, 1, 71])
    )
    q = torch.randn(71, heads, dim, dtype=torch.bfloat16, device=device)
    cache = torch.randn(9, kv_heads, page, 2 * dim, dtype=torch.bfloat16, device=device)
    inputs = PagedInputs(
        q, cache, cache[..., :dim], cache[..., dim:], table, lengths, edges, None, None, None, None, dim**-0.5, 0.0,
        True, 0, 0, 70, 300, 71,
    )  # fmt: skip
    bounds: dict[str, Any] = {"max_seqlen_q": 70, "max_seqlen_k": 300}

    def check(name: str) -> Gate:
        plan = plan_attention_paged(q, cache, table, lengths, edges, kernel=name, **bounds)
        return check_attention_paged(inputs, plan(q, cache, table, lengths, edges, **bounds))

    return check


def _others(device: torch.device) -> dict[str, Check]:
    """One call of each other operation."""
    (a, b), (q, k, v, mask) = _factors(device), _heads(device)
    heads, (out, lse) = quantize_heads(q, k, v), attention(q, k, v, mask, return_lse=True)
    grad = torch.randn_like(out)

    def sampled(name: str) -> Gate:
        return check_sddmm(b, b.T, plan_sddmm(b, b.T, a.pattern, kernel=name)(b, b.T, a.pattern))

    def attended(name: str) -> Gate:
        return check_attention(q, k, v, mask, plan_attention(q, k, v, mask, kernel=name)(q, k, v, mask))

    def in_fp8(name: str) -> Gate:
        return check_attention_fp8(*heads, mask, plan_attention(*heads, mask, kernel=name)(*heads, mask))

    def gradients(name: str) -> Gate:
        plan = plan_attention_backward(q, k, v, mask, kernel=name)
        return check_attention_backward(q, k, v, mask, grad, plan(q, k, v, mask, out, lse, grad))

    return {
        "sddmm": sampled,
        "spgemm": lambda name: check_spgemm(a, a.T, plan_spgemm(a, a.T, kernel=name)(a, a.T)),
        "attention": attended,
        "attention_fp8": in_fp8,
        "attention_backward": gradients,
        "attention_paged": _paged(device),
    }
