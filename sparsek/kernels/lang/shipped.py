"""Machine code that comes with the package: kernels of common calls, compiled for sm_90a where the package was made.

    key      kernel, what Triton specializes it for of these arguments, launch options     -> name of a cubin
    valid    while the source of all kernels is the one that it was compiled from, under a Triton whose argument block
             is known (lang/driver.py) and that no variable asks to compile otherwise

`make cubins` writes ARCHIVE (scripts/cubins.py says of which calls); no GPU is needed. What is not in it is compiled
when it is first used.
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
from sparsek.kernels.lang import driver
from sparsek.kernels.lang.driver import Code

ROOM = Path(__file__).parents[1]
ARCHIVE = ROOM / "shipped.zip"
INDEX = "index.json"
CAPABILITY = (9, 0)

# By the kernel's id: Triton's hash of a kernel is that of its source, which takes 8 ms.
_found: dict[Any, Code | None] = {}
_binders: dict[int, Any] = {}
_lock = threading.Lock()


class Store(NamedTuple):
    """The archive, all of it in memory: processes that are forked share no place in a file, and another release that is
    installed meanwhile is not seen. `kernels`: by `name_of`, what Code holds beside the function. Cubins have the same
    names.
    """

    archive: ZipFile
    kernels: Mapping[str, Mapping[str, Any]]

    def read(self, name: str) -> bytes | None:
        """None for what is not there, or broken."""
        try:
            with _lock:
                return self.archive.read(name)
        except (KeyError, BadZipFile, zlib.error):
            return None


def source() -> str:
    """The hash of all that kernels are compiled from."""
    hashed = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.cu") for path in ROOM.rglob(kind)):
        hashed.update(str(path.relative_to(ROOM)).encode() + path.read_bytes())
    return hashed.hexdigest()


@cache
def store() -> Store | None:
    """The archive, None where there is none for this source."""
    try:
        archive = ZipFile(io.BytesIO(ARCHIVE.read_bytes()))
        index = json.loads(archive.read(INDEX))
        found = Store(archive, index["kernels"])
        return found if index["source"] == source() else None
    except (OSError, BadZipFile, zlib.error, KeyError, TypeError, ValueError):
        return None


def find(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Code | None:
    """The code of a kernel of Triton or Gluon for these arguments and options, loaded on torch's current device."""
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
    """What Triton compiles a kernel for: the type of each argument with what it is known to be; and the options."""
    _, special, options = binder(kernel)(*args, **named)
    return tuple(special), tuple(sorted(options.items()))


def binder(kernel: Any) -> Any:
    """Triton's own function of a kernel's arguments, made for sm_90 without asking the driver which card this is."""
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
    """What the index calls a kernel so specialized."""
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
    """What the archive calls the cubin of CUDA C++ compiled with these options."""
    return _hash("cuda", text, *options)


def cuda(text: str, options: Sequence[str]) -> bytes | None:
    """The cubin of CUDA C++, if it is here."""
    held = store()
    return held and held.read(cuda_name(text, options))


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
