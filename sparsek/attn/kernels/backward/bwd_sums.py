"""Sums in memory by TMA, and release/acquire signals between CTAs about them."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def tma_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> Any:
    """Device code: adds a box of shared memory to global memory. `tma_store_wait` waits for its reads, as for a
    store.
    """
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


@gluon.jit
def tma_written():
    """Waits until this warp's TMA stores and adds are in memory, which is more than that shared memory was read.

    One lane issues them and waits; the other lanes wait for that lane.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def seen(pointer):
    """The current value. What was written before it is read as it is then, but by TMA only after `fence_tma`.

    An acquiring load costs less than a relaxed one with a fence behind it, which waits for the warp's whole memory.
    """
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [pointer.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fence_tma():
    """Afterwards, TMA of this warp reads and adds to what the warp has `seen`."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def release(pointer, value):
    """One lane stores a value, after all writes of this warp that have completed, by TMA too (`tma_written`)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.proxy.async.global; elect.sync _|p, 0xffffffff;"
        " @p st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2; }",
        "=r,l,r",
        [pointer.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
