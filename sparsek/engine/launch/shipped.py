"""Machine code shipped with the package: kernels of common calls, compiled for sm_90a when the package was built.

    key      the kernel, Triton's specialization for the arguments, and the launch options  -> name of a cubin
    valid    for the hash of all kernel sources, under a Triton whose argument block is known (launch/driver.py), unless
             an environment variable changes how Triton compiles

`make cubins` writes ARCHIVE without a GPU (scripts/cubins.py lists the calls). A kernel that is not in it is compiled
on first use.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from sparsek.core import env
from sparsek.engine.launch import driver
from sparsek.engine.launch.driver import Code

PACKAGE = Path(__file__).parents[2]
SOURCES = {"kernels", "launch"}  # folders of kernels, and of what launches them
ARCHIVE = Path(__file__).with_name("shipped.zip")
INDEX = "index.json"
CAPABILITY = (9, 0)

# By the kernel's id: Triton's hash of a kernel reads its source, which takes 8 ms.
_found: dict[Any, Code | None] = {}
_binders: dict[int, Any] = {}
_lock = threading.Lock()


class Store(NamedTuple):
    """The archive, read into memory: forked processes share no file position, and a release installed meanwhile has
    no effect. `kernels`: by `name_of`, the fields of Code except the function. Cubins have the same names.
    """

    archive: ZipFile
    kernels: Mapping[str, Mapping[str, Any]]

    def read(self, name: str) -> bytes | None:
        """None for a missing or damaged entry."""
        try:
            with _lock:
                return self.archive.read(name)
        except (KeyError, BadZipFile, zlib.error):
            return None


def source() -> str:
    """The hash of all kernel sources."""
    hashed = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.cu") for path in PACKAGE.rglob(kind)):
        if SOURCES.intersection(path.relative_to(PACKAGE).parts):
            hashed.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return hashed.hexdigest()


@cache
def store() -> Store | None:
    """The archive; None if there is none for this source."""
    try:
        archive = ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
        index = json.loads(archive.read(INDEX))
        found = Store(archive, index["kernels"])
        return found if index["source"] == source() else None
    except (OSError, BadZipFile, zlib.error, KeyError, TypeError, ValueError):
        return None


def find(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Code | None:
    """The code of a Triton or Gluon kernel for these arguments and options, loaded on torch's current device."""
    if not _serves():
        return None
    device = torch._C._cuda_getDevice()
    if not _is_hopper(device):
        return None
    special, options = specialized(kernel, args, named)
    key = id(kernel), device, special, options
    if key not in _found:
        _found[key] = _load(name_of(kernel, special, options), device)
    return _found[key]


@cache
def _serves() -> bool:
    if env.interpreting() or env.compiling_differently():
        return False
    return torch.cuda.is_available() and driver.is_tested() and store() is not None


@cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == CAPABILITY


def specialized(
    kernel: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Triton's specialization: the type of each argument with its known properties; and the options."""
    _, special, options = binder(kernel)(*args, **named)
    return tuple(special), tuple(sorted(options.items()))


def binder(kernel: Any) -> Any:
    """Triton's binder of a kernel's arguments, made for sm_90 without querying the driver for the card."""
    found = _binders.get(id(kernel))
    if found is None:
        found = _binders[id(kernel)] = _binder(kernel)
    return found


def _binder(kernel: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )


def name_of(kernel: Any, special: Sequence[Any], options: Sequence[Any]) -> str:
    """The index name of a kernel with this specialization."""
    return _hash(kernel.fn.__module__, kernel.fn.__qualname__, str(special), str(options))


def _load(name: str, device: int) -> Code | None:
    held = store()
    entry = held and held.kernels.get(name)
    code = held.read(name) if held and entry else None
    if not entry or code is None:
        return None
    function = driver.function(code, entry["name"], entry["shared"], device)
    kinds, boxes = tuple(entry["kinds"]), entry["boxes"]
    return Code(function, kinds, boxes, entry["threads"], entry["shared"], entry["cooperative"])


def cuda_name(text: str, options: Sequence[str]) -> str:
    """The archive name of a CUDA C++ cubin compiled with these options."""
    return _hash("cuda", text, *options)


def cuda(text: str, options: Sequence[str]) -> bytes | None:
    """The cubin of CUDA C++ source, if shipped."""
    held = store()
    return held and held.read(cuda_name(text, options))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
