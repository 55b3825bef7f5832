"""Compiles the kernels of common calls for sm_90a into sparsek/engine/launch/shipped.zip. No GPU is needed.

walk       each call of CALLS runs on CPU tensors that pose as tensors on an H200: the library plans it, and every
           kernel launch is noted instead, with its arguments
compile    each kernel once, by Triton or NVRTC, on all of the machine's cores
write      the cubins and index.json (sparsek/engine/launch/shipped.py)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

import sparsek as sk
from sparsek.attn.kernels.mask.choose import choose_blocks
from sparsek.attn.kernels.mask.unions import token_unions
from sparsek.attn.mask.build import banded, selection_reference, unions
from sparsek.attn.mask.build.selection import written
from sparsek.attn.mask.lists import Place
from sparsek.core import device as devices
from sparsek.core import operations
from sparsek.engine.launch import driver, launch, nvrtc, shipped
from sparsek.products.formats import convert
from sparsek.products.kernels.pack.transpose import transposed_lists
from sparsek.products.ops import recorded_products
from sparsek_bench.suites.host import FIRST
from sparsek_bench.suites.host_calls import CALLS

TARGET = GPUTarget("cuda", 90, 32)
MOST_BYTES = 12 << 20  # of the archive
HALVES = (torch.bfloat16, torch.float16)
F8 = torch.float8_e4m3fn


@functools.cache
def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """Tensors of one shape have the same values, because drawing 4096 x 4096 takes longer than planning a call."""
    return _drawn(*shape).to(dtype, copy=True).requires_grad_(grad)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Common calls, by name. Sizes are small where kernels and their configs do not depend on them."""
    for case in FIRST:
        yield case.name, lambda c=case: CALLS[c.call].make(c, torch.device("cpu")).ours()
    for dtype in HALVES:
        for block in (128, 64, 32):
            yield f"from_dense {block} {dtype}", lambda d=dtype, b=block: from_dense(d, b)
            yield f"products {block} {dtype}", lambda d=dtype, b=block: products(d, b)
        yield f"2:4 {dtype}", lambda d=dtype: two_four(d)
        for heads, size in ((8, 128), (8, 64)):
            yield f"attention {size} {dtype}", lambda d=dtype, h=heads, s=size: attention(d, h, s)
        yield f"blocks of tokens {dtype}", lambda d=dtype: blocks_of_tokens(d)
    yield "FP8", fp8
    yield "masks", masks
    yield "policies", policies


def from_dense(dtype: torch.dtype, block: int) -> None:
    w = normal(4096, 4096, dtype=dtype)
    for scope in convert.SCOPES:
        sk.BSR.from_dense(w, block, keep=0.25, scope=scope)
    sk.BSR.from_dense(w, block, threshold=0)


def products(dtype: torch.dtype, block: int) -> None:
    """A @ B, and layers with their gradients."""
    n, k = 4096, 4096
    a = sk.random_bsr(n, k, block, 0.25, dtype=dtype)
    a @ normal(k, 4096, dtype=dtype)
    new = sk.BlockPattern.unchecked(a.shape, a.block, a.pattern.indptr, a.pattern.indices)
    sk.BSR.unchecked(new, a.values) @ normal(k, 4096, dtype=dtype)
    w = sk.BSR(a.pattern, a.values.detach().requires_grad_())
    bias = normal(n, dtype=dtype)
    for tokens in (1, 16, 64, 256, 4096):
        x = normal(tokens, k, dtype=dtype)
        for activation in (None, "gelu", "silu"):
            sk.linear(x, a, bias, activation)
        sk.linear(x, a)
        sk.linear(x.requires_grad_(), w, bias.requires_grad_()).backward(normal(tokens, n, dtype=dtype))


def two_four(dtype: torch.dtype) -> None:
    dense = normal(4096, 4096, dtype=dtype)
    bsr = sk.random_bsr(4096, 4096, 128, 0.25, dtype=dtype)
    for w in (sk.Semi24.from_dense(dense), sk.BSR24.from_bsr(bsr)):
        for tokens in (1, 16, 64, 4096):
            x = normal(tokens, 4096, dtype=dtype)
            sk.linear(x, w)
            sk.linear(x, w, normal(4096, dtype=dtype), "gelu")


def fp8() -> None:
    for w in (sk.random_bsr(4096, 4096, 128, 0.25), sk.Semi24.from_dense(normal(4096, 4096))):
        q = sk.quantize(w)
        for tokens in (1, 16, 4096):
            x = normal(tokens, 4096)
            sk.linear(x, q)
            sk.linear(x, q, normal(4096), "gelu")


def attention(dtype: torch.dtype, heads: int, size: int) -> None:
    for length in (1024, 4096):
        q, k, v = (normal(1, heads, length, size, dtype=dtype, grad=True) for _ in range(3))
        masks = [
            sk.BlockMask.causal(length),
            sk.BlockMask.sliding_window(length, 256),
            sk.BlockMask.topk(torch.randn(length // 128, length // 128), 4, seq_len=length, block=128),
        ]
        for mask in masks:
            sk.attention(q.detach(), k.detach(), v.detach(), mask)
            sk.attention(q, k, v, mask).backward(normal(1, heads, length, size, dtype=dtype))


def blocks_of_tokens(dtype: torch.dtype) -> None:
    """Both passes over blocks of each token, of 64 heads that share 4."""
    q, grad = (normal(1, 64, 512, 128, dtype=dtype, grad=each) for each in (True, False))
    k, v = (normal(1, 4, 512, 128, dtype=dtype, grad=True) for _ in range(2))
    for block in (128, 64):
        lists = sk.TokenLists(torch.zeros(1, 4, 512, 16, dtype=torch.int32), block)
        sk.attention(q.detach(), k.detach(), v.detach(), lists)
        sk.attention(q, k, v, lists).backward(grad)


def masks() -> None:
    """Masks of closed form, of chosen blocks and of the lists of tokens."""
    of_closed_form()
    of_chosen_blocks()
    of_token_lists()


def of_closed_form() -> None:
    with mock.patch.object(banded, "has_kernels", return_value=True):
        for block in (64, 128):
            frame: Any = {"block": block, "device": "cpu"}
            for causal in (True, False):
                for sinks in (0, 128, 100):
                    sk.BlockMask.sliding_window(4096, 512, sinks, causal, **frame)
                sk.BlockMask.strided(4096, 512, 256, causal, **frame)
                sk.BlockMask.dilated(4096, 512, 2, causal, **frame)
                sk.BlockMask.block_diagonal([1000, 3096], causal, **frame)
                for random in (1, 2, 3):
                    sk.BlockMask.bigbird(4096, 256, 128, random, causal=causal, **frame)
            sk.BlockMask.causal(4096, **frame)
            sk.BlockMask.full(4096, **frame)
            sk.BlockMask.full(4000, **frame)
            for dtype in (torch.int32, torch.int64):
                edges = torch.tensor([0, 1000, 4096], dtype=dtype)
                sk.BlockMask.documents(edges, 4096, block=block)


def of_chosen_blocks() -> None:
    """The kernel of masks of chosen blocks, to which no call with CPU tensors comes."""
    made = functools.partial(written, write=choose_blocks)
    with mock.patch.object(selection_reference, "by_a_kernel", new=made):
        for block, blocks, causal in itertools.product((128, 64), (64, 128, 256, 512), (True, False)):
            length = block * blocks
            frame = {"seq_len": length, "block": block, "causal": causal}
            scores = torch.zeros(1, 1, blocks, blocks)
            sk.BlockMask.topk(scores, 4, **frame)
            sk.BlockMask.topk(scores, 4, always=(1, 2), **frame)
            sk.BlockMask.cumulative(scores, 0.9, **frame)
            sk.BlockMask.from_block_map(scores > 0, **frame)
            sk.BlockMask.from_indices(torch.zeros(blocks, blocks // 8, dtype=torch.int32), **frame)
            q = torch.empty(1, 1, length, 64)
            sk.MaskPolicy(topk=4, block=block, causal=causal).mask_for(q, q)


def of_token_lists() -> None:
    """The kernel of unions, for 16 blocks of each token in groups of heads, which too sees no CPU tensors."""
    for group, block in itertools.product((1, 4, 8, 16), (64, 128)):
        tile = unions.ROWS // unions.packed_heads(group)
        place = Place(4096, 4096, (tile, block), torch.device("cpu"), 0)
        lists = torch.zeros(1, 1, 4096, 16, dtype=torch.int32)
        inputs = unions.UnionInputs(lists, None, None, place, block, True, 0, 0, "")
        unions.written(sk.BlockMask, inputs, token_unions)


def policies() -> None:
    """Estimates, of heads of 128."""
    q, k = normal(1, 4, 512, 128), normal(1, 2, 512, 128)
    for causal in (True, False):
        sk.policies.XAttention(causal=causal).mask(q, k)
    for length in (512, 4096, 32768):
        q, k = normal(1, 4, length, 128), normal(1, 2, length, 128)
        sk.policies.FlexPrefill().mask(q, k)
        sk.policies.VerticalSlash().mask(q, k)
    q, k, v = normal(1, 4, 4096, 128), normal(1, 2, 4096, 128), normal(1, 2, 4096, 128)
    for causal, block in itertools.product((True, False), (64, 128)):
        sk.policies.MeanTopK(causal=causal, block=block).mask(q, k)
        sk.policies.SubBlock(causal=causal, block=block).mask(q, k)
    sk.policies.Nabla().mask(q, k)
    vsa = sk.policies.VSA(topk=8)
    (vsa | vsa).mask(q, k)
    (vsa & vsa).mask(q, k)
    for gate in (q, None):
        vsa.attention(q, k, v, gate)


class Walk:
    """The launches of the calls: Triton and Gluon kernels by their name in the index, CUDA C++ by its own."""

    def __init__(self) -> None:
        self.kernels: dict[str, tuple[Any, ...]] = {}
        self.cuda: dict[str, tuple[str, str, tuple[str, ...]]] = {}

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        special, options = shipped.specialized(kernel, args, named)
        self.kernels.setdefault(shipped.name_of(kernel, special, options), (kernel, args, named))

    def note_cuda(self, source: str, name: str, options: Any) -> bytes:
        self.cuda.setdefault(shipped.cuda_name(source, options), (source, name, tuple(options)))
        return b""


@contextlib.contextmanager
def on_paper(walk: Walk) -> Iterator[None]:
    """The library as on an H200, with launches noted instead of run."""
    card, of_card = devices.card_named("h200"), devices.card_of
    with contextlib.ExitStack() as patches:

        def replace(owner: Any, name: str, **by: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, **by))

        for module in [each for name, each in sys.modules.items() if name.startswith("sparsek")]:
            if getattr(module, "card_of", None) is of_card:
                replace(module, "card_of", return_value=card)
        replace(JITFunction, "run", new=lambda self, *args, **named: walk.note(self, *args, **named))  # noqa: PLW0108
        replace(nvrtc, "compiled", new=walk.note_cuda)
        for owner, name in (
            (driver, "function"),
            (driver, "enter"),
            (launch, "_go"),
            (torch.cuda, "current_device"),
        ):
            replace(owner, name, return_value=None)
        replace(driver, "tensor_map", return_value=ctypes.c_uint64())
        replace(Tensor, "is_cuda", new=True)
        once: dict[str, Any] = {
            "mask_again": lambda name, tensors, options, build: build()
        }  # nothing is recorded here
        once["transposed_lists"] = lambda *lists: transposed_lists(*lists) and None  # then torch makes them
        patches.enter_context(mock.patch.dict(operations.KERNELS, once))
        patches.enter_context(mock.patch.dict(recorded_products.SHARED, clear=True))
        replace(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0)
        # Memory that no kernel writes is zero, so that every walk is the same.
        replace(torch, "empty", new=torch.zeros)
        replace(Tensor, "new_empty", new=Tensor.new_zeros)
        replace(torch.cuda, "get_device_capability", return_value=(9, 0))
        replace(torch.cuda, "is_current_stream_capturing", return_value=False)
        yield


def walked(only: str = "") -> Walk:
    """The launches of the calls whose names begin with `only`."""
    walk = Walk()
    torch.manual_seed(0)
    with on_paper(walk):
        for name, call in calls():
            if name.startswith(only):
                call()
    return walk


def compiled(name: str, job: tuple[Any, ...]) -> tuple[str, dict[str, Any], bytes]:
    """The name in the index, its entry, and the cubin."""
    if not isinstance(job[0], JITFunction):
        return name, {}, nvrtc.compile_cuda(*job)[0]
    kernel, args, named = job
    bound, special, options = shipped.binder(kernel)(*args, **named)
    parsed, signature, constants, attributes = kernel._pack_args(
        make_backend(TARGET), named, bound, special, options
    )
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    made: Any = triton.compile(source, target=TARGET, options=parsed.__dict__)
    m = made.metadata
    if m.global_scratch_size or m.profile_scratch_size or m.launch_pdl or m.num_ctas != 1:
        raise ValueError(f"{m.name} needs what the launcher does not give")
    entry = {
        "name": m.name,
        "kinds": list(signature.values()),
        "boxes": m.tensordesc_meta or [],
        "threads": 32 * m.num_warps,
        "shared": m.shared,
        "cooperative": bool(m.launch_cooperative_grid),
    }
    return name, entry, made.asm["cubin"]


# Of this process and its forks: tensors among a kernel's arguments are not sent.
JOBS: list[tuple[str, tuple[Any, ...]]] = []


def _job(at: int) -> tuple[str, dict[str, Any], bytes]:
    return compiled(*JOBS[at])


def main() -> None:
    arguments = argparse.ArgumentParser(description="Compiles the kernels of common calls for sm_90a.")
    arguments.add_argument("--workers", type=int, default=os.cpu_count())
    workers = arguments.parse_args().workers
    if not triton.__version__.startswith(driver.TESTED):
        sys.exit(f"Triton {triton.__version__} is not one of {', '.join(driver.TESTED)}*")
    if shipped.store() is not None:
        print(f"{shipped.ARCHIVE} is up to date")
        return
    walk = walked()
    JOBS.extend([*walk.kernels.items(), *walk.cuda.items()])
    index: dict[str, Any] = {"source": shipped.source(), "triton": triton.__version__, "kernels": {}}
    began = time.monotonic()
    made = shipped.ARCHIVE.with_suffix(".new")
    with (
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        multiprocessing.get_context("fork").Pool(workers) as pool,
    ):
        for done, (name, entry, cubin) in enumerate(pool.imap_unordered(_job, range(len(JOBS))), 1):
            if entry:
                index["kernels"][name] = entry
            archive.writestr(name, cubin)
            if sys.stdout.isatty() or done == len(JOBS):
                print(
                    f"\r{done} of {len(JOBS)} kernels, {time.monotonic() - began:.0f} s", end="", flush=True
                )
        archive.writestr(shipped.INDEX, json.dumps(index))
    print(f"\n{shipped.ARCHIVE}: {made.stat().st_size / 1e6:.1f} MB")
    if made.stat().st_size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES / 1e6:.1f} MB: fewer calls, or a larger bound")
    made.replace(shipped.ARCHIVE)


if __name__ == "__main__":
    main()
