"""launch/launch.py without a GPU: what reaches the driver when shipped code is launched again."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.engine.launch import driver, launch
from sparsek.engine.launch.driver import Code
from sparsek.engine.launch.gluon import describe, launch_on
from sparsek.engine.launch.launch import launch_cuda, launch_unspecialized

KINDS = ("*bf16", "i32", "constexpr", "fp32", "*i32")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Grid and arguments of each launch, as CUDA would read them."""
    found: list[tuple[Any, ...]] = []

    def noted(config: Any, function: Any, pointers: Any, extra: Any) -> int:  # by reference
        of = config._obj
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        arguments = [kind.from_address(at).value for kind, at in zip(kinds, pointers._obj, strict=False)]
        found.append(((of.gx, of.gy, of.gz), *arguments))
        return 0

    monkeypatch.setattr(driver, "cuda", lambda: SimpleNamespace(cuLaunchKernelEx=noted))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


def values(x: Tensor, number: int, factor: float, y: Tensor) -> tuple[Any, ...]:
    return x, number, "a constant", factor, y


def test_a_second_launch_has_its_own_arguments(seen: list[tuple[Any, ...]]) -> None:
    code = Code(ctypes.c_void_p(1), KINDS, (), 128, 0, False)
    x, y = torch.empty(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int32)
    launch._run(code, (5,), values(x, 3, 0.5, y), 0, None)
    launch._run(code, (2, 7), values(x[4:], -1, 2.0, y[1:]), 0, None)
    assert seen == [
        ((5, 1, 1), x.data_ptr(), 3, 0.5, y.data_ptr(), 0),
        ((2, 7, 1), x.data_ptr() + 8, -1, 2.0, y.data_ptr() + 4, 0),
    ]


def test_codes_and_threads_have_argument_blocks_of_their_own(seen: list[tuple[Any, ...]]) -> None:
    x, y = torch.empty(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int32)

    def blocks(code: Code) -> int:
        for number in range(2):
            launch._run(code, (1,), values(x, number, 1.0, y), 0, None)
        return ctypes.addressof(launch._kept.steps[id(code)].pointers)

    codes = [Code(ctypes.c_void_p(place), KINDS, (), 128, 0, False) for place in range(2)]
    with ThreadPoolExecutor(1) as other:
        found = {blocks(codes[0]), blocks(codes[1]), other.submit(blocks, codes[0]).result()}
    assert len(found) == 3
    assert [each[2] for each in seen] == [0, 1] * 3


def test_an_output_in_another_dtype_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands in FP8 come with outputs in bf16 and fp16, under one config. Code for one must not write the other."""
    asked: list[tuple[Any, ...]] = []

    class Kernel:
        arg_names = ("a_desc", "out_desc", "scale", "T", "SOURCE")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: asked.append(args) or SimpleNamespace()

    monkeypatch.setattr(driver, "is_tested", lambda: True)
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel, a, scale = Kernel(), torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.zeros(16, 16, dtype=dtype)
        launch_on(
            a.device, kernel, 1, (describe(a, (16, 16)), describe(out, (16, 16)), scale, "config", "source")
        )
    assert [args[1].base.dtype for args in asked] == [torch.bfloat16, torch.float16, torch.float32]


def test_without_programs_nothing_is_launched() -> None:
    """The driver refuses an empty grid; no kernel is found or compiled either."""
    launch_unspecialized(None, torch.device("cuda", 0), 0, (), (), 4)
    launch_cuda(ctypes.c_void_p(), 0, 128, 0, 0, (), ())
