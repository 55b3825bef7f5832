"""What every test may use: the `gpu` marker's skip, a `device` fixture, hypothesis without deadlines, one thread."""

import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from sparsek.core import env
from tests.sampling import EVERY, SEED

settings.register_profile("sparsek", deadline=None, max_examples=50 if EVERY else 30, derandomize=True)
settings.load_profile("sparsek")

# Workers share the cores, and torch's threads wait for each other: on a busy machine they take eight times as long.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    # Inductor else starts a process for each core, which imports torch, in every worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Of several cards each worker has one, and so have the processes that its tests start.
    cards = (
        os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    ).split(",")
    if len(cards) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker.removeprefix("gw")) % len(cards)]


# Inductor's loops on a CPU have no vectors: it would try each instruction set with a compiler and a process, and find
# what it has compiled for one under another.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

INTERPRETED = "_interpreted.py"
if env.interpreting() and importlib.util.find_spec("triton") is not None:
    from tests.engine.launch.interpreter import hasten

    hasten()


def pytest_report_header() -> str:
    return f"samples: SPARSEK_TEST_SEED={SEED}"


def pytest_configure(config: pytest.Config) -> None:
    """SPARSEK_TEST_CPU=sums,addresses,memory runs tests as on another CPU."""
    if named := os.environ.get("SPARSEK_TEST_CPU"):
        from tests.odd_cpu import asked_for

        stack = ExitStack()
        stack.enter_context(asked_for(named))
        config.add_cleanup(stack.close)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """TRITON_INTERPRET=1 selects the files *_interpreted.py. It must be set before triton is imported.

    A file that is named on the command line is collected all the same.
    """
    interpreted = collection_path.name.endswith(INTERPRETED)
    return True if collection_path.suffix == ".py" and interpreted != env.interpreting() else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not module_path.name.endswith(INTERPRETED):
        return None
    return Interpreted.from_parent(parent, path=module_path)


class Interpreted(pytest.Module):
    """A file of tests of Triton kernels on CPU tensors."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.importorskip("triton")
        if not env.interpreting():
            raise self.CollectError("runs with TRITON_INTERPRET=1: make interpreted")
        return super().collect()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and collected tests stay to the end: looking for garbage among them took a tenth of the time.

    So did looking among what tests make after every 700 new objects, as Python does.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if not torch.cuda.is_available():  # there, what waits for collection may be much memory
            gc.set_threshold(20_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """What lived through a whole collection in a test, such as a package of compilers, is not looked at again."""
    before = gc.get_stats()[2]["collections"]
    try:
        return (yield)
    finally:
        if gc.get_stats()[2]["collections"] > before and not torch.cuda.is_available():
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_masks_before() -> None:
    """The first mask of a kind in a test is the first of all, so its plan is kept (attn/mask/layout.py)."""
    for module, kept in (
        ("sparsek.attn.mask.fresh", "_KINDS"),
        ("sparsek.attn.mask.closed", "_KINDS"),
        ("sparsek.attn.ops.mask_calls", "_templates"),
    ):
        if found := sys.modules.get(module):
            getattr(found, kept).clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """SPARSEK_TEST_DEFAULTS=meta,float64 runs tests under torch defaults that only SparseK's calls see.

    Those that compile are left out: Dynamo does not trace through such a mode.
    """
    if os.environ.get("SPARSEK_TEST_DEFAULTS") and "compile" not in item.nodeid:
        from tests.odd_defaults import asked_for

        with asked_for() or nullcontext():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> "Iterator[dict[str, Any] | None]":
    """The keywords of a test do not travel to xdist's first process, which needs none: a tenth of its reports' time."""
    data = yield
    if data is not None and "keywords" in data:
        data["keywords"] = {}
    return data


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends every failure to the file that SPARSEK_TEST_FAILURES names, as it happens.

    A run on a borrowed GPU that hangs or runs out of time would take its failures with it (2026-11-21).
    """
    path = os.environ.get("SPARSEK_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(
                f"=== {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext}\n"
            )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that the test is to run on."""
    return request.param


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests that hold times against each other: those of one thread compare well on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """`with no_sync():` fails where its body waits for the device."""

    @contextmanager
    def refuse() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refuse


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Many processes share the card: what a large test leaves in torch's cache goes back."""
    yield
    if torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch allocates is NaN, or the largest integer: nothing is right by what was there before."""
    device = "cpu" if env.interpreting() else "cuda"
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4, device=device).isnan().all()
    assert torch.empty(4, dtype=torch.int32, device=device).new_empty(1) == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """One that no run had before."""
    from tests.engine.launch.drawn import fresh

    return fresh()
