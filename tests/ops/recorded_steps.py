"""Steps, forward and backward passes of new tensors, beside unbound ones, and what may change between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.engine.call import recorded_calls
from sparsek.engine.launch.recorder import MISS, Recorded
from sparsek.engine.table import load
from sparsek.products.formats.pattern import BlockPattern, HostPattern
from sparsek.products.ops import recorded_products
from sparsek.products.reference.epilogue import ACTIVATIONS

VERBS = (
    "A @ x",
    "A.T @ x",
    "x @ A",
    "x @ A.T",
    "linear",
    "linear relu",
    "linear silu",
    "linear gelu",
    "linear 3-D",
    "2:4",
    "2:4 values",
    "fp8",
    "attention",
)


class Again(Recorded):
    """A recorded call that runs the recorded function on its tensors, with what the given ones hold."""

    __slots__ = ("__weakref__", "made_of", "operands", "ran", "rerun", "version")

    def __init__(self, rerun: Callable[[], Any], operands: Sequence[torch.Tensor]) -> None:
        self.rerun, self.made_of, self.version, self.ran = rerun, operands[0], operands[0]._version, 0
        # Without dims of stride 0, as an expanded tensor has; writes to these have no version.
        self.operands = [single(x.data) for x in operands]
        self.device, self.stream = 0, NOW["stream"]

    def repeat(self, given: Sequence[torch.Tensor]) -> Any:
        if not self.is_fresh():
            return MISS
        self.ran += 1
        now = [single(x.data).clone() for x in given]
        held = [x.clone() for x in self.operands]
        with torch.no_grad():
            for x, new in zip(self.operands, now, strict=True):
                x.copy_(new)
            made = self.rerun()
            for x, old in zip(self.operands, held, strict=True):
                x.copy_(old)
        return made

    def is_fresh(self) -> bool:
        return self.made_of._version == self.version


def single(x: torch.Tensor) -> torch.Tensor:
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


class Mode(TorchDispatchMode):
    """What records a call is a dispatch mode too, in which nothing is recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


NOW = {"device": 0, "stream": 0}


class Lists(NamedTuple):
    """Work that is all that a kernel reads of a pattern."""

    p: Any
    indptr: torch.Tensor
    indices: torch.Tensor
    order: torch.Tensor | None


def let_patterns_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns pass on a CPU too, and kernels read only their work of them."""
    monkeypatch.setattr(BlockPattern, "passing", property(lambda p: "passing" in p._memo))
    host = property(lambda p: HostPattern(p.indptr.numpy(), p.indices.numpy()))
    monkeypatch.setattr(BlockPattern, "host", host)
    for kept in (recorded_products.PASSING.known, recorded_products.PASSING.recent, recorded_products.SHARED):
        kept.clear()
    real: dict[str, Any] = {}
    for kernel in map(load, ("cpu.spmm", "reference.spmm", "reference.sddmm")):

        def prepare(self: Any, p: Any, c: Any, of: Any) -> Lists:
            known, order = (of.pattern, of.order) if isinstance(of, sk.BSR) else (of, None)
            return Lists(
                p, known.indptr.clone(), known.indices.clone(), None if order is None else order.clone()
            )

        def launch(
            self: Any,
            c: Any,
            work: Lists,
            *given: Any,
            kernel: Any = kernel,
            old: Any = kernel.launch,
            **more: Any,
        ) -> None:
            p, indptr, indices, order = work
            shape = (p.m, p.n) if order is None and p.op == "sddmm" else (p.m, p.k)
            known = sk.BlockPattern(shape, p.block, indptr, indices)
            if p.op == "sddmm":
                return old(c, None, *given[:2], known, *given[3:])
            a = sk.BSR.unchecked(known, given[0].values, order)
            return old(c, real[kernel.name](p, c, a), a, *given[1:], **more)

        real[kernel.name] = kernel.prepare
        for name, value in (("prepare", prepare), ("launch", launch), ("shares", True)):
            monkeypatch.setattr(type(kernel), name, value, raising=False)


class Step:
    """A forward and backward pass of new tensors of the same shapes."""

    def __init__(self, verb: str, learns: Sequence[int] = (0, 1, 2)) -> None:
        self.verb, self.learns = verb, learns
        self.a = sk.random_bsr(128, 192, 64, 0.5, dtype=torch.float64, seed=0)
        self.w = sk.Semi24.from_dense(torch.randn(128, 192).double())
        self.q = sk.quantize(self.w)
        self.mask = sk.BlockMask.causal(64)

    def draw(self) -> list[torch.Tensor]:
        if self.verb == "attention":
            given = [*torch.randn(3, 1, 2, 64, 16).double()]
        else:
            sides = (4, 6) if self.verb.endswith("3-D") else (24,)
            last = 128 if self.verb in ("A.T @ x", "x @ A") else 192
            stored = self.w if self.verb == "2:4 values" else self.a
            given = [*map(torch.randn, (stored.values.shape, (*sides, last), (128,)))]
            given = [x.double() for x in given]
        return [x.clone().requires_grad_(at in self.learns) for at, x in enumerate(given)]

    def forward(self, one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
        if self.verb == "attention":
            return sk.attention(one, two, three, self.mask)
        if self.verb == "2:4 values":
            return sk.linear(two, sk.Semi24.unchecked(one, self.w.meta), three, "gelu")
        b = sk.BSR.unchecked(self.a.pattern, one)
        if self.verb == "fp8":
            return sk.linear(two.float(), self.q, three.float(), "relu")
        if self.verb == "2:4":
            return sk.linear(two, self.w, three, "gelu")
        if self.verb == "sddmm":
            return sk.sddmm(two[:, :64].T.repeat(2, 1), two, self.a.pattern).values
        if self.verb.startswith("linear"):
            last = self.verb.split()[-1]
            activation = cast(Any, last if last in ACTIVATIONS else None)
            return sk.linear(two, b, three, activation, two.detach()[..., :128])
        b = b.T if "A.T" in self.verb else b
        return b @ two.T if self.verb.endswith("x") else two @ b

    def run(self, given: Sequence[torch.Tensor], dy: Any = None, **how: Any) -> list[Any]:
        """The result and the gradients of what learns."""
        out, wanted = self.forward(*given), [x for x in given if x.requires_grad]
        if not out.requires_grad:
            return [out]
        dy = drawn(out) if dy is None else dy(out)
        return [out, *torch.autograd.grad(out, wanted, dy, allow_unused=True, **how)]

    def turn(self, run: Any = None) -> None:
        """A step, or `run`, of new tensors, which finds what it finds where nothing is recorded."""
        given, run = self.draw(), run or self.run
        found = run(given)
        with pytest.MonkeyPatch.context() as patch:
            for module in (recorded_calls, recorded_products):
                patch.setattr(module, "repeat", lambda *given: recorded_calls.UNBOUND)
            right = run(given)
        torch.testing.assert_close(found, right)


def drawn(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(like.dtype)


def expanded(step: Step) -> None:
    step.turn(lambda given: step.run(given, lambda out: torch.full((), 0.5).to(out).expand(out.shape)))


def in_columns(step: Step) -> None:
    step.turn(lambda given: step.run(given, lambda out: drawn(out).mT.contiguous().mT))


def with_gaps(step: Step) -> None:
    step.turn(
        lambda given: step.run(
            given, lambda out: torch.cat((drawn(out), drawn(out)), -1)[..., : out.shape[-1]]
        )
    )


def turned_operands(step: Step) -> None:
    step.turn(lambda given: step.run([given[0], given[1].mT.contiguous().mT, given[2]]))


def twice(step: Step) -> None:
    def run(given: Any) -> list[Any]:
        out = step.forward(*given)
        wanted = [x for x in given if x.requires_grad]
        grads = [torch.autograd.grad(out, wanted, k * drawn(out), True, allow_unused=True) for k in (1, 2)]
        return [*grads[0], *grads[1]]

    step.turn(run)


def again(step: Step) -> None:
    def run(given: Any) -> list[Any]:
        _, *first = (x for x in step.run(given, create_graph=True) if x is not None)
        norm = torch.stack([x.square().sum() for x in first]).sum()
        return [*torch.autograd.grad(norm, given, allow_unused=True)]

    if step.verb == "attention":
        with pytest.raises(InvalidInput, match="no gradients themselves"):
            step.turn(run)
    else:
        step.turn(run)


def by_torch_func(step: Step) -> None:
    def loss(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
        return step.forward(one, two, three).square().sum()

    step.turn(lambda given: list(torch.func.grad(loss, (0, 1, 2))(*given)))


def under_hooks(step: Step) -> None:
    def run(given: Any) -> list[Any]:
        def turned(x: torch.Tensor) -> torch.Tensor:
            return x.mT if x.ndim > 1 else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: turned(x).contiguous(), turned):
            return step.run(given)

    step.turn(run)


def under_autocast(step: Step) -> None:
    def run(given: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return step.run(given)

    step.turn(run)


def without_gradients(step: Step) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(3):
            with mode():
                out = step.forward(*step.draw())
            assert not out.requires_grad


def written_to(step: Step) -> None:
    given = step.draw()
    out = step.forward(*given)
    if step.verb in ("2:4", "fp8"):  # whose x has to be kept for no gradient
        return
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def inference_tensors(step: Step) -> None:
    given = step.draw()
    if step.verb in ("2:4", "fp8"):
        return
    with torch.inference_mode():
        given[1] = given[1].detach().clone()
    with pytest.raises(InvalidInput, match="inference_mode"):
        step.forward(*given)


CHANGES = (
    expanded, in_columns, with_gaps, turned_operands, twice, again, by_torch_func, under_hooks, under_autocast,
    without_gradients, written_to, inference_tensors,
)  # fmt: skip
