"""What calls cost the host, beside torch's, as cases: cached calls, layers in eager mode, first calls of a process."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from sparsek.bench.suites.case import (
    BLOCK,
    DENSITY,
    DTYPE,
    Bar,
    Case,
    Operands,
    Option,
    Schema,
    SuiteRow,
    block_name,
    check_case,
    shape_name,
)
from sparsek.bench.suites.host_calls import CALLS, STORAGES, HostCall
from sparsek.core.errors import InvalidInput
from sparsek.matrix.pattern import block_sides

TORCH = "torch"
LAYER = "layer"
# What a first call finds on disk: no compiled kernel, or those of a process before.
CACHES = ("empty", "filled")
SIDES = {"attention": "heads x length x head size", "from_dense": "rows x columns", "A @ B": "m x k x n"}
SIDES |= {"plan of A @ B": SIDES["A @ B"], "attention + backward": SIDES["attention"]}
LAYER_SIDES = "tokens x features in x features out"
STORED = {"bsr": "", "semi24": "2:4", "bsr24": "2:4 in", "fp8": "FP8"}
# The verb, layer or method behind each call, as a module of sparsek: the kernel of its records.
MODULES = {
    "A @ B": "ops.spmm",
    "plan of A @ B": "ops.spmm",
    "linear": "ops.linear",
    "linear + backward": "ops.linear",
    "layer": "nn.linear",
    "attention": "ops.attention",
    "attention + backward": "ops.attention",
    "from_dense": "matrix.bsr",
}
# What host time is made of: every file of these rooms.
ROOMS = ("core", "kernels/lang", "matrix", "mask", "nn", "ops", "plan")


@dataclass(frozen=True)
class HostCase(HostCall, Case):
    """One call. `caches`: "" for a call whose plan is kept; else the first of a process, one of CACHES."""

    op: ClassVar[str] = "host"

    caches: str = ""

    def __post_init__(self) -> None:
        if self.call not in CALLS:
            raise InvalidInput(f"a call is one of {', '.join(CALLS)}, got {self.call!r}")
        wanted = SIDES.get(self.call, LAYER_SIDES)
        if len(self.sides) != wanted.count(" x ") + 1 or min(self.sides) < 1:
            raise InvalidInput(f"{self.call} measures {wanted}, got {'x'.join(map(str, self.sides))}")
        if self.storage not in STORAGES:
            raise InvalidInput(f"a storage is one of {', '.join(STORAGES)}, got {self.storage!r}")
        if self.storage != "bsr" and self.call not in ("linear", LAYER):
            raise InvalidInput(f"{self.call} is measured of blocks, not of {self.storage}")
        if self.caches not in ("", *CACHES):
            raise InvalidInput(f"caches are {' or '.join(CACHES)} before a first call, got {self.caches!r}")
        block_sides(self.block)
        check_case(self)

    @property
    def is_first(self) -> bool:
        """Whether it is the first call of a process."""
        return self.caches != ""

    @property
    def on_wall(self) -> bool:
        """Whether the time is the wall's, from an idle GPU to an idle GPU: of layers, and of first calls."""
        return self.call == LAYER or self.is_first

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.call.endswith("backward")

    @property
    def module(self) -> str:
        """What is called, as a module of sparsek."""
        return MODULES[self.call] if self.call != LAYER or self.storage == "bsr" else MODULES["linear"]

    @property
    def name(self) -> str:
        """One short line: "linear + bias + gelu, 64 tokens, 1024 to 1024, block 128 25 % bf16"."""
        what = {"linear": "linear + bias + gelu"}.get(self.call, self.call)
        first = f"first call, {self.caches} caches: " if self.is_first else ""
        return f"{first}{what}, {self._measures}"

    @property
    def _measures(self) -> str:
        if self.call.startswith("attention"):
            heads, length, dim = self.sides
            return f"{length} causal, {heads} heads, D {dim}, block {block_name(self.block)} {self.dtype}"
        if self.call == "from_dense":
            size = "×".join(map(str, self.sides))
        elif self.call in ("A @ B", "plan of A @ B"):
            size = shape_name(*self.sides)
        else:
            tokens, k, n = self.sides
            size = f"{tokens} token{'s' if tokens > 1 else ''}, {k} to {n},"
        stored = STORED[self.storage]
        blocks = (
            "" if self.storage == "semi24" else f"block {block_name(self.block)} {self.density * 100:.4g} %"
        )
        return " ".join(filter(None, (size, stored, blocks, self.dtype)))

    @property
    def bar(self) -> Bar | None:
        """How long it may take: over torch's time, or, of a first call, in seconds."""
        return BARS.get((self.call, self.caches or self.storage))

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by call, then storage, then size."""
        at = list(CALLS).index(self.call)
        place = STORAGES.index(self.storage)
        return self.caches, at, place, self.sides, self.block, -self.density, self.dtype

    @property
    def dense_flops(self) -> float:
        """Nothing is rated."""
        return 0.0

    def operands(self, device: torch.device, seed: int = 0) -> Sequence[Operands]:
        """None: `host_run` makes each call on operands of its own."""
        raise InvalidInput("a case of host time is measured by host_run.run_host_time")


BARS: Mapping[tuple[str, str], Bar] = {
    ("A @ B", "bsr"): Bar(TORCH, 1.6, 1.1),
    ("plan of A @ B", "bsr"): Bar(TORCH, 1.6, 1.1),
    **{("linear", storage): Bar(TORCH, 1.6, 1.1) for storage in STORAGES},
    ("attention", "bsr"): Bar(TORCH, 1.3, 0.9),
    ("linear + backward", "bsr"): Bar(TORCH, 2.0, 1.3),
    (LAYER, "bsr"): Bar(TORCH, 0.75, 0.45),
    (LAYER, "semi24"): Bar(TORCH, 0.75, 0.6),
    **{
        (call, caches): Bar("", *limits)
        for call in ("from_dense", "A @ B", "linear + backward", "attention + backward")
        for caches, limits in zip(CACHES, ((0.5, 0.2), (0.2, 0.05)), strict=True)
    },
}
SCHEMAS: Mapping[str, Schema] = {"host": Schema(HostCase, rated=False, rooms=ROOMS)}
SMALL = (1024, 1024, 1024)
HEADS = (8, 512, 128)
FIRST: tuple[HostCase, ...] = tuple(
    HostCase(call, sides, caches=caches)
    for caches in CACHES
    for call, sides in (
        ("from_dense", (4096, 4096)),
        ("A @ B", (4096, 4096, 4096)),
        ("linear + backward", (4096, 4096, 4096)),
        ("attention + backward", (8, 4096, 128)),
    )
)
HOST: tuple[SuiteRow, ...] = tuple(
    SuiteRow(case)
    for case in (
        HostCase("A @ B", SMALL, block=(64, 64)),
        HostCase("plan of A @ B", SMALL, block=(64, 64)),
        *(HostCase("linear", (64, 1024, 1024), storage) for storage in STORAGES),
        HostCase("attention", HEADS),
        HostCase("linear + backward", (256, 1024, 1024)),
        *(HostCase(LAYER, (tokens, 4096, 14336)) for tokens in (1, 16, 64)),
        HostCase(LAYER, (16, 8192, 8192), "semi24"),
        *FIRST,
    )
)
SUITES: Mapping[str, tuple[SuiteRow, ...]] = {"host": HOST}


def parse_sides(text: str) -> tuple[int, ...]:
    """ "64x1024x1024" -> (64, 1024, 1024)."""
    if re.fullmatch(r"\d+(x\d+)*", text.strip().lower()) is None:
        raise InvalidInput(f"sides are written as 64x1024x1024, got {text!r}")
    return tuple(int(part) for part in text.lower().split("x"))


FORMS = sorted({*SIDES.values(), LAYER_SIDES})
OPTIONS: tuple[Option, ...] = (
    Option("call", "A @ B", f"Calls: {', '.join(CALLS)}."),
    Option("sides", "1024x1024x1024", f"By call: {'; '.join(FORMS)}, as 64x1024x1024.", parse_sides),
    Option("storage", "bsr", f"Of a layer's weight: {', '.join(STORAGES)}."),
    BLOCK,
    replace(DENSITY, default="0.25"),
    DTYPE,
    Option("caches", "", f"The first call of a new process, caches {' or '.join(CACHES)}."),
)
