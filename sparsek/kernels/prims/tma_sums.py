"""Sums in memory by TMA, and messages between CTAs about what is there."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def tma_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> Any:
    """Device code: adds a box of shared memory to global memory. As with a store, `tma_store_wait` ends the reading."""
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


@gluon.jit
def tma_written():
    """Until what this thread gave TMA to store or add is in memory: more than that shared memory was read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquired(pointer):
    """What is there, and with it all that was written before it was stored."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; fence.proxy.async;",
        "=r,l",
        [pointer.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def released(pointer, value):
    """Stores a value after all that this thread knows to be written, by TMA too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r",
        [pointer.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
