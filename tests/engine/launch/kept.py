"""What compilers make of a source stays in Triton's cache, as that of Triton does, for the next run of the tests."""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from subprocess import run

from triton.runtime.cache import get_cache_manager

NAME = "made"


def kept(make: Callable[[], bytes], *of: object) -> bytes:
    """What `make` makes of `of`: texts, options and versions, of which each that may change the result is named."""
    cache_of = get_cache_manager(sha256(repr(of).encode()).hexdigest())
    known = cache_of.get_file(NAME)
    if known is not None:
        return Path(known).read_bytes()
    made = make()
    cache_of.put(made, NAME)
    return made


@cache
def version(program: str) -> str:
    """What the program says of itself."""
    return run([program, "--version"], capture_output=True, text=True, check=True).stdout
