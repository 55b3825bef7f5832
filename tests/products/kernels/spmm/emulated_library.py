"""Compiles the roles of a .cu file by g++ for this machine, with wrappers of PTX instructions that run on a CPU."""

import ctypes
import platform
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.engine.launch.kept import kept, version

FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-strict-aliasing")


@cache
def library(c: Any, source: str, wrappers: Path) -> ctypes.CDLL:
    """`source` in the place of the .cu file of the config `c`; its PTX wrappers are those of the header `wrappers`."""
    constants, *parts = source.split("// " + "-" * 100 + " PTX wrappers")
    roles = "".join(part.split("// " + "-" * 100 + " tiles and roles")[1] for part in parts)
    header = wrappers.read_text(encoding="utf-8")
    text = f"{constants}\n{header}\n{roles}\n#define RUNS\n{header}"

    with TemporaryDirectory() as folder:
        made, written = Path(folder, "roles.so"), Path(folder, "roles.cpp")

        def make() -> bytes:
            written.write_text(text, encoding="utf-8")
            command = ["g++", *FLAGS, *c.defines, "-o", str(made), str(written)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            return made.read_bytes()

        of = text, FLAGS, c.defines, version("g++"), platform.platform()
        made.write_bytes(kept(make, *of))
        found = ctypes.CDLL(str(made))
    found.launch.restype = ctypes.c_char_p
    return found
