"""Compiles a plain Triton kernel for a card that is not there, as its `launch` specialises it, and reads the code."""

import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsek.core.device import Card

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Code(NamedTuple):
    """Facts of one compiled kernel; sizes in bytes. `vectors` are the widths of its global stores, in elements of 32
    bits: "v4" moves 16 bytes.
    """

    ttgir: str
    ptx: str
    stack: int
    registers: int
    shared: int

    @property
    def copies(self) -> bool:
        """Asynchronous 16-byte copies are there."""
        return "cp.async.cg.shared.global" in self.ptx

    @property
    def wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def stores(self) -> set[str]:
        """The distinct global stores: "v4.b32" moves 16 bytes."""
        return set(re.findall(r"st\.global\.(\S+)", self.ptx))


def compiled(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    card: Card,
    warps: int,
    stages: int,
    *,
    aligned: "Collection[str] | None" = None,
) -> Code:
    """`function` with pointers and ints that are multiples of 16, or only those `aligned`, but for `constants`.

    Those are 1, 0 and None too. `types` names the arguments that are no 32-bit ints.
    """
    names = list(function.arg_names)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    plain = {p.name for p in function.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    known = [
        name
        for name in names
        if name not in constants and name not in plain and signature[name] != "fp32"
        if aligned is None or name in aligned
    ]
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in known},
    )
    major, minor = card.capability
    options = {"num_warps": warps, "num_stages": stages}
    kernel: Any = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Code(kernel.asm["ttgir"], kernel.asm["ptx"], int(found[2]), int(found[1]), kernel.metadata.shared)
