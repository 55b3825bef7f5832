"""Compiles CUDA C++ with NVRTC, NVIDIA's compiler library, on first use of a kernel, and caches the result on disk.

torch with CUDA installs NVRTC, as does the package nvidia-cuda-nvrtc. It needs neither a GPU nor a CUDA toolkit. Four
functions are called by ctypes; cuda-bindings would be one more package, whose version must match.

Cache: $SPARSEK_CACHE (an absolute path) or ~/.cache/sparsek, one file per source, options and compiler version. A file
begins with the hash of the rest, so a truncated or foreign file is compiled anew. If the folder is not writable, every
process compiles for itself.
"""

import ctypes
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparsek.core import env, files
from sparsek.core.errors import InvalidFile, Unsupported
from sparsek.engine.launch import driver, shipped
from sparsek.engine.launch.progress import patient

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
# Folders of packages below each entry of sys.path, and folders of toolkits.
PACKAGES = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
TOOLKITS = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib")
DIGEST = 64
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-lineinfo")
INCLUDE = re.compile(r'#include "([\w./]+\.cu)"\n')


class CompilerError(RuntimeError):
    """The compiler's messages about a source."""


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC, or None. Searched in $NVRTC, packages, toolkits, and where the system's loader searches.

    Of several versions, the one of torch's CUDA is used, which torch loads too.
    """
    for path in _places():
        if path.is_file():
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                _opened(str(builtins))  # NVRTC loads it by its bare name
            found = _opened(str(path))
            if found is not None:
                return found
    if env.nvrtc_path():
        return None
    return next((found for name in _names() if (found := _opened(name)) is not None), None)


def _names() -> list[str]:
    own = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    return sorted(NAMES, key=lambda name: name != own)


def _places() -> Iterator[Path]:
    if env.nvrtc_path():
        yield Path(env.nvrtc_path())
        return
    folders = [Path(each, package) for each in sys.path if each for package in PACKAGES]
    for name in _names():
        yield from (folder / name for folder in [*folders, *map(Path, TOOLKITS)])


def _opened(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL if "builtins" in name else ctypes.DEFAULT_MODE)
    except OSError:
        return None


def missing() -> list[str]:
    """The reason of a kernel in CUDA C++ not to run, where a GPU is but NVRTC is not."""
    if torch.cuda.is_available() and library() is None:
        return ["NVRTC, which compiles it, is not here: install nvidia-cuda-nvrtc or set $NVRTC"]
    return []


@cache
def version() -> tuple[int, int]:
    """The version of NVRTC, as (13, 0). Raises Unsupported without NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_needed().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _needed() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise Unsupported("NVRTC is not here; install nvidia-cuda-nvrtc, or name libnvrtc.so in $NVRTC", {})
    return found


def _check(status: int, name: str = "NVRTC", said: str = "") -> None:
    if status:
        raise CompilerError(f"{name}: NVRTC error {status}{said}")


def compile_cuda(source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, compiler messages) of CUDA C++ without includes. `name` appears in the messages.

    Raises CompilerError with the messages, and Unsupported without NVRTC.
    """
    nvrtc = _needed()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None), name
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), name)
        log = ctypes.create_string_buffer(max(1, size.value))
        _check(nvrtc.nvrtcGetProgramLog(program, log), name)
        said = log.value.decode(errors="replace")
        _check(failed, name, f"\n{said}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), name)
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), name)
        return cubin.raw, said
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def compiled(source: str, name: str, options: Sequence[str]) -> bytes:
    """The cubin: shipped with the package, from the disk cache, or compiled now."""
    came = shipped.cuda(source, options)
    if came is not None:
        return came
    hashed = "\0".join([source, name, *options, *map(str, version())])
    key = hashlib.sha256(hashed.encode()).hexdigest()
    path = Path(env.cache_dir()) / f"{Path(name).stem}-{key[:32]}.cubin"
    kept = _read(path)
    if kept is None:
        with patient(name):
            kept = compile_cuda(source, name, options)[0]
        _write(path, kept)
    return kept


@dataclass(frozen=True)
class Program:
    """A CUDA C++ file with one kernel, `entry`. Its configs have `defines`, options of the compiler, and `smem`."""

    path: Path
    entry: str

    @property
    def source(self) -> str:
        """The file, with others, named from its folder, in the place of the lines that include them."""
        text = self.path.read_text(encoding="utf-8")
        return INCLUDE.sub(lambda line: (self.path.parent / line[1]).read_text(encoding="utf-8"), text)

    def code(self, c: Any) -> bytes:
        """The cubin of the config `c`."""
        return compiled(self.source, self.path.name, [*OPTIONS, *c.defines])


@cache
def loaded(program: Program, c: Any, device: int) -> ctypes.c_void_p:
    """The kernel of the config `c`, on `device`."""
    return driver.function(program.code(c), program.entry, c.smem, device)


def _read(path: Path) -> bytes | None:
    try:
        held = files.content(path)
    except (OSError, InvalidFile):
        return None
    digest, code = held[:DIGEST], held[DIGEST:]
    return code if hashlib.sha256(code).hexdigest().encode() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Writes the whole file or nothing, also when other processes write it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).hexdigest().encode() + code)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
