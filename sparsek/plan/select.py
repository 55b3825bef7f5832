"""Which kernel, and why: every kernel of the table is asked, the fastest by prediction is chosen, nothing is timed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern
from sparsek.plan import operands
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem


@dataclass(frozen=True)
class Candidate:
    """What one kernel answered: a config with its predicted seconds, or the reasons why it cannot run.

    `only_by_name` is the reason why an automatic choice passes it over, if there is one.
    """

    name: str
    config: Any = None
    seconds: float = float("inf")
    why_not: tuple[str, ...] = ()
    only_by_name: str = ""


@dataclass(frozen=True, eq=False)
class Plan:
    """A kernel and a config for one problem, with what had to be made ready once. Call it: `plan(A, B, out=None)`.

    `seconds` is the predicted time of a call on `problem.card`, `bound_seconds` the roofline below which no kernel
    can fall: useful FLOPs over the card's dense rate, or compulsory bytes over its copy bandwidth.
    `pattern` is a weak reference: a pattern keeps its plans.
    """

    problem: SpmmProblem
    kernel: str
    config: Any
    seconds: float
    bound_seconds: float
    candidates: tuple[Candidate, ...]
    implementation: SpmmKernel = field(repr=False)
    pattern: Callable[[], BlockPattern | None] = field(repr=False)
    work: Any = field(default=None, repr=False)
    ready: bool = True

    def __call__(self, a: BSR, b: Tensor, out: Tensor | None = None) -> Tensor:
        """C = A @ B for A of the planned pattern and B as planned; `out` [..., M, N] is overwritten. No host sync.

        Raises InvalidInput for other operands. Values may change between calls, the pattern may not.
        """
        p = self.problem
        if not self.ready:
            raise InvalidInput(
                f"this plan is a prediction for {p.card.name}; plan with operands on that card to run it"
            )
        operands.check_operands(a, b)
        operands.check_no_gradient(a, b)
        if out is not None:
            operands.check_out(a, b, out)
        self._check_planned(a, b, out)
        return self.run(a, b, out)

    def run(self, a: BSR, b: Tensor, out: Tensor | None = None) -> Tensor:
        """The call without its checks, for operands that are known to fit."""
        p = self.problem
        if out is None:
            out = b.new_empty((*b.shape[:-2], p.m, p.n))
        if out.numel():
            with dtypes.as_given(b.device):
                self.implementation.launch(self.config, self.work, a, b, out)
        return out

    def _check_planned(self, a: BSR, b: Tensor, out: Tensor | None) -> None:
        p = self.problem
        if self.pattern() is not a.pattern or p.transposed != (a.order is not None):
            raise InvalidInput(
                "this plan was made for another pattern of blocks; call plan_spmm(A, B) for this A, or spmm(A, B)"
            )
        batch, layout = b.shape[:-2].numel(), operands.layout(b)
        if (batch, b.shape[-1], layout, dtypes.name(b.dtype)) != (p.batch, p.n, p.b_layout, p.dtype):
            raise InvalidInput(
                f"this plan multiplies {p.dtype} B of {p.batch} x [{p.k}, {p.n}], {p.b_layout}-major; got {b.dtype} "
                f"{list(b.shape)}, {layout}-major"
            )
        if p.aligned and not operands.aligned(b, out):
            raise InvalidInput(
                "this plan needs pointers and leading strides of B and out that are multiples of 16 bytes; "
                "spmm(A, B) takes any"
            )

    @property
    def losers(self) -> tuple[Candidate, ...]:
        """Every kernel that was not chosen."""
        return tuple(c for c in self.candidates if c.name != self.kernel)

    def explain(self) -> str:
        """The choice in words: problem, kernel, config, prediction against the roofline, and why the others lost."""
        p = self.problem
        batch = f"{p.batch} x " if p.batch != 1 else ""
        flops = p.useful_flops / (p.card.tflops[_rate_name(p)] * 1e12)
        moved = p.compulsory_bytes / p.card.bandwidth
        limit = "arithmetic" if flops >= moved else "memory"
        lines = [
            (
                f"C = A @ B   A [{p.m}, {p.k}] {p.dtype}, {p.nnzb} blocks of {p.block[0]}x{p.block[1]} "
                f"({100 * p.density:.3g} % stored), B {batch}[{p.k}, {p.n}] {p.b_layout}-major, on {p.card.name}"
            ),
            f"  kernel     {self.kernel}: {self.config}",
            (
                f"  predicted  {_us(self.seconds)}, {_tflops(p.useful_flops, self.seconds)} useful, "
                f"{_tflops(p.dense_flops, self.seconds)} dense-equivalent"
            ),
            (
                f"  roofline   {_us(self.bound_seconds)}, bound by {limit}: {p.useful_flops / 1e9:.4g} GFLOP in "
                f"{_us(flops)}, {p.compulsory_bytes / 1e6:.4g} MB in {_us(moved)}"
            ),
        ]
        if _rate_name(p) not in p.card.measured:
            lines.append(
                "  rates      guessed for this card and dtype, not measured: expect the order of kernels, not the times"
            )
        imbalance = getattr(self.work, "imbalance", None)
        if imbalance is not None:
            lines.append(f"  schedule   fullest CTA has {imbalance:.2f} times the mean work")
        for c in self.losers:
            why = (
                "; ".join(c.why_not)
                if c.why_not
                else f"{_us(c.seconds)}, {c.seconds / self.seconds:.2f}x the time"
            )
            aside = f"; only by name: {c.only_by_name}" if c.only_by_name and not c.why_not else ""
            lines.append(f"  not        {c.name}: {why}{aside}")
        return "\n".join(lines)


def bound_seconds(p: SpmmProblem) -> float:
    """The roofline on `p.card`: the larger of arithmetic and memory time, each at the card's rate."""
    return max(p.useful_flops / (p.card.tflops[_rate_name(p)] * 1e12), p.compulsory_bytes / p.card.bandwidth)


def select(
    p: SpmmProblem, kernels: Iterable[SpmmKernel], *, only: str | None = None, config: Any = None
) -> tuple[SpmmKernel, Any, tuple[Candidate, ...]]:
    """The kernel to use, its config, and what every kernel answered.

    Without `only`, the smallest prediction wins among kernels that may be chosen unasked, and the table's order breaks
    ties. With `only`, that kernel runs or Unsupported says why not. Raises Unsupported with every reason of every
    kernel if none can run.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    candidates = []
    for name, kernel in by_name.items():
        why_not = tuple(kernel.why_not(p))
        if why_not:
            candidates.append(Candidate(name, why_not=why_not))
            continue
        chosen = kernel.default(p)
        if config is not None and name == only:
            if config != chosen and config not in kernel.configs(p):
                raise InvalidInput(
                    f"{config!r} is no config of {name} for this problem; its default is {chosen!r}"
                )
            chosen = config
        aside = getattr(kernel, "only_by_name", "")
        candidates.append(Candidate(name, chosen, kernel.seconds(p, chosen), only_by_name=aside))
    able = [
        c for c in candidates if not c.why_not and (c.name == only or (only is None and not c.only_by_name))
    ]
    if not able:
        others = ", ".join(c.name for c in candidates if not c.why_not)
        what = f"no kernel can multiply this on {p.card.name}" if only is None else f"{only} cannot run this"
        raise Unsupported(
            f"{what}; {others} can" if others else what, {c.name: c.why_not for c in candidates if c.why_not}
        )
    best = min(able, key=lambda c: c.seconds)
    return by_name[best.name], best.config, tuple(candidates)


def _rate_name(p: SpmmProblem) -> str:
    return "tf32" if p.dtype == "fp32" and p.tf32 else p.dtype


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _tflops(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.3g} TFLOPS"
