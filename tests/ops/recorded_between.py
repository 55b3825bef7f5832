"""What may be different between two calls that are recorded, and how calls went: repeated, recorded or by a plan."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek.core.errors import InvalidInput
from tests.ops.recorded_subjects import Operands, Subject, cast, floats, renew


class Runs:
    """How calls went since the last `clear`: repeated, recorded, or by a plan, which recording a call does too."""

    def __init__(self) -> None:
        self.repeated: list[int] = []
        self.recorded: list[int] = []
        self.planned: list[int] = []

    def clear(self) -> None:
        for each in (self.repeated, self.recorded, self.planned):
            each.clear()

    def expect(self, subject: Subject, device: str) -> None:
        """The calls since `clear` were one turn that did nothing but repeat launches. Clears."""
        found = len(self.repeated), len(self.recorded), len(self.planned)
        if device == "cuda":
            assert found == (subject.repeats, 0, 0), f"repeated, recorded, planned {found}"
        else:
            assert not self.repeated, "nothing may be repeated here"
        self.clear()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def turn(subject: Subject, runs: Runs, device: str) -> None:
    """A turn of a recorded call: it is repeated, writes every element, and is right."""
    given = subject.draw()
    runs.clear()
    with poisoned_memory() if device == "cuda" else nullcontext():
        out = subject.call(*given)
    runs.expect(subject, device)
    subject.check(given, out)


def bind(subject: Subject, runs: Runs, device: str) -> None:
    """Two turns: one plans, one is recorded. A third is repeated."""
    for _ in range(2):
        subject.turn()
    turn(subject, runs, device)


# Each checks what it does itself. Afterwards the call is recorded as before.


def on_another_stream(subject: Subject, runs: Runs, device: str) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bind(subject, runs, device)
    side.synchronize()


def in_two_threads(subject: Subject, runs: Runs, device: str) -> None:
    def work(_: int) -> list[tuple[Operands, Any]]:
        made = [(given, subject.call(*given)) for given in (subject.draw() for _ in range(5))]
        if device == "cuda":
            torch.cuda.synchronize()
        return made

    runs.clear()
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(work, range(2))]
    assert device == "cpu" or len(runs.repeated) >= 6 * subject.repeats
    for given, out in itertools.chain(*results):
        subject.check(given, out)


def captured(subject: Subject, runs: Runs, device: str) -> None:
    """On a stream on which it was recorded."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        bind(subject, runs, device)
    side.synchronize()
    replayed(subject, runs, side)


def replayed(subject: Subject, runs: Runs, side: "torch.cuda.Stream | None" = None) -> None:
    """A graph has the launches of the call, which were neither repeated nor recorded, and reads new numbers."""
    given, graph = subject.draw(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    runs.clear()
    with torch.cuda.graph(graph, stream=side):
        out = subject.call(*given)
    assert (runs.repeated, runs.recorded) == ([], [])
    for _ in range(2):
        renew(given, subject.draw())
        with torch.no_grad():
            for x in floats(out):
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        subject.check(given, out)


def compiled(subject: Subject, runs: Runs, device: str) -> None:
    torch._dynamo.reset()
    fixed = subject.draw()[: subject.fixed]
    step = torch.compile(lambda *rest: subject.call(*fixed, *rest), fullgraph=True, backend="aot_eager")
    for _ in range(4):
        rest = subject.draw()[subject.fixed :]
        subject.check((*fixed, *rest), step(*rest))


def under_vmap(subject: Subject, runs: Runs, device: str) -> None:
    turns = [subject.draw() for _ in range(3)]
    fixed, rest = turns[0][: subject.fixed], [each[subject.fixed :] for each in turns]
    stacks = [torch.stack(each) for each in zip(*rest, strict=True)]
    found: Any = torch.func.vmap(lambda *each: subject.call(*fixed, *each))(*stacks)
    for at, each in enumerate(rest):
        subject.check((*fixed, *each), found[at])


def under_autocast(subject: Subject, runs: Runs, device: str) -> None:
    for _ in range(3):
        given = subject.draw()
        with torch.autocast(device, torch.float16):
            out = subject.call(*given)
        assert all(x.dtype is torch.float16 for x in floats(out))
        subject.check(cast(given, torch.float16), out)


def with_a_hook_of_triton(subject: Subject, runs: Runs, device: str) -> None:
    from triton import knobs

    seen: list[Any] = []

    def heard(metadata: Any) -> None:
        seen.append(metadata)

    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(heard)
        try:
            runs.clear()
            subject.turn()
        finally:
            hooks.remove(heard)
        assert runs.repeated == []
        assert seen
        seen.clear()


def misaligned(subject: Subject, runs: Runs, device: str) -> None:
    """Each operand in turn begins 2 bytes behind a multiple of 16, for calls that are recorded too."""
    for at in range(subject.fixed, len(subject.draw())):
        for _ in range(3):
            given = list(subject.draw())
            x = given[at]
            given[at] = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
            assert given[at].data_ptr() % 16
            subject.check(tuple(given), subject.call(*given))


def with_other_strides(subject: Subject, runs: Runs, device: str) -> None:
    """Rows with gaps, and columns instead of rows."""

    def padded(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_full((*x.shape[:-1], 8), torch.nan)), -1)[..., : x.shape[-1]]

    for at, lay in itertools.product(range(subject.fixed, len(subject.draw())), (padded, turned)):
        for _ in range(3):
            given = list(subject.draw())
            given[at] = lay(given[at])
            subject.check(tuple(given), subject.call(*given))


def turned(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def with_values_written_in_place(subject: Subject, runs: Runs, device: str) -> None:
    given = subject.draw()
    for _ in range(4):
        renew(given, subject.draw())
        runs.clear()
        out = subject.call(*given)
        runs.expect(subject, device)
        subject.check(given, out)


def in_other_modes(subject: Subject, runs: Runs, device: str) -> None:
    given = subject.draw()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for _ in range(3):
                subject.check(given, subject.call(*given))
                subject.turn()


def with_a_gradient(subject: Subject, runs: Runs, device: str) -> None:
    """Asked for by each tensor in turn, a matrix's values too."""
    for at in range(len(subject.draw())):
        given = subject.draw()
        leaf = given[at].values if at < subject.fixed else given[at]
        leaf.requires_grad_()
        for _ in range(3):
            out = subject.call(*given)
            assert out.requires_grad
            subject.check(given, out.detach())
            (found,) = torch.autograd.grad(out.float().square().sum(), leaf)
            assert found.isfinite().all()
            with torch.no_grad():
                out = subject.call(*given)
            assert not out.requires_grad
            subject.check(given, out)
        leaf.requires_grad_(False)
        assert not subject.call(*given).requires_grad


def with_a_tangent(subject: Subject, runs: Runs, device: str) -> None:
    given = subject.draw()
    with forward_ad.dual_level():
        runs.clear()
        subject.check(given, subject.call(*given))
        assert runs.repeated == []
        dual = forward_ad.make_dual(given[-1], torch.ones_like(given[-1]))
        for _ in range(2):
            with pytest.raises(InvalidInput):
                subject.call(*given[:-1], dual)


class Looks(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def under_a_dispatch_mode(subject: Subject, runs: Runs, device: str) -> None:
    given = subject.draw()
    with Looks() as looks:
        out = subject.call(*given)
    assert any("sparsek" in each for each in looks.seen), looks.seen
    subject.check(given, out)


def under_other_defaults(subject: Subject, runs: Runs, device: str) -> None:
    given = subject.draw()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        runs.clear()
        out = subject.call(*given)
        runs.expect(subject, device)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    subject.check(given, out)


def with_operands_that_do_not_fit(subject: Subject, runs: Runs, device: str) -> None:
    *some, last = subject.draw()
    elsewhere = last.to("cpu" if device == "cuda" else "meta")
    for wrong in (last[:-1], elsewhere, last.double()):
        for _ in range(2):
            with pytest.raises(InvalidInput):
                subject.call(*some, wrong)


TRITON = ("A @ B", "sddmm", "attention window", "A @ B, gradients")
MAIN = (*TRITON, "linear semi24", "linear bsr-fp8", "attention window, gradients")
FORWARD = ("A @ B", "linear bsr", "attention window")
ALONE = ("A @ B", "attention window")
ON_A_CPU = (
    "A @ B",
    "sddmm",
    "linear semi24",
    "linear bsr-fp8",
    "swiglu",
    "out= and beta",
    "linear, gradients",
)
ON_A_GPU_ONLY = (on_another_stream, captured, with_a_hook_of_triton)
DISTURBANCES: dict[Callable[[Subject, Runs, str], None], tuple[str, ...]] = {
    on_another_stream: (*MAIN, "A @ b"),
    in_two_threads: (*MAIN, "A @ b"),
    captured: (*MAIN, "linear bsr24", "linear, gradients"),
    compiled: (*FORWARD, "linear semi24"),
    under_vmap: FORWARD,
    under_autocast: FORWARD,
    with_a_hook_of_triton: (*TRITON, "attention window, gradients"),
    misaligned: (*ALONE, "sddmm"),
    with_other_strides: (*ALONE, "sddmm"),
    with_values_written_in_place: (*MAIN, "linear bsr24", "linear semi24-fp8"),
    in_other_modes: (*FORWARD, "sddmm", "linear semi24", "linear bsr-fp8"),
    with_a_gradient: FORWARD,
    with_a_tangent: (*FORWARD, "linear semi24", "linear bsr-fp8", "sddmm"),
    under_a_dispatch_mode: (*FORWARD, "linear semi24", "linear bsr-fp8", "sddmm"),
    under_other_defaults: MAIN,
    with_operands_that_do_not_fit: (*FORWARD, "linear semi24", "linear bsr-fp8", "sddmm"),
}
