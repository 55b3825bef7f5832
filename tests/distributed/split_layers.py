"""Layers that tests split over a mesh of four processes of gloo, beside those of one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.core.errors import InvalidInput

RANKS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "bsr": {"block": (16, 32), "keep": 0.5},
    "semi24": {},
    "bsr24": {"block": 64, "keep": 0.5},
    "bsr_fp8": {"block": 32, "keep": 0.5},
    "semi24_fp8": {},
    "bsr24_fp8": {"block": 64, "keep": 0.5},
}

CASES: dict[str, Callable[[], None]] = {}


def case(work: Callable[[], None]) -> Callable[[], None]:
    CASES[work.__name__] = work
    return work


def own_half() -> int:
    """Which two ranks this process is one of."""
    return dist.get_rank() // 2


def of_half(half: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A case of two ranks, while those of the other half run another."""
    return lambda work: case(functools.wraps(work)(lambda: work() if own_half() == half else None))


def layer_of(form: str, rows: int, columns: int, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    dtype = torch.float32 if "fp8" in form else torch.float64
    dense = nn.Linear(columns, rows, dtype=dtype)
    return sk.nn.SparseLinear.from_dense(
        dense, form, **OPTIONS[form], scope="global" if "bsr" in form else "row", **options
    )


@functools.cache
def meshes() -> tuple[Any, Any]:
    """Of all ranks, and of the two of each half."""
    from torch.distributed.device_mesh import init_device_mesh

    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), two["tp"]


def near(x: Any, y: Any, loose: bool = False) -> None:
    torch.testing.assert_close(
        x, y, rtol=0.1 if loose else 1e-9, atol=0.1 if loose else 1e-9, check_dtype=False
    )


def raises(part: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except InvalidInput as error:
        assert part in str(error), str(error)
    else:
        raise AssertionError(f"no InvalidInput with {part!r}")


def local(x: Any, layout: Any, rank: int, sizes: Any) -> Tensor:
    """The part of a rank of x, of which the features lie in parts of these sizes, or the tokens in equal ones."""
    if not hasattr(layout, "dim"):
        return x
    return x.split(list(sizes), -1)[rank] if layout.dim == -1 else x.chunk(len(sizes), layout.dim)[rank]


def check_gradients(whole: Any, split: Any) -> None:
    """The gradients of Parameters, gathered, against those of one process."""
    shadow = copy.deepcopy(split)
    for name, each in whole.named_parameters():
        shadow._parameters[name] = nn.Parameter(split._parameters[name].grad)
        near(getattr(shadow.gathered(), name), each.grad)


def compare(style: Any, form: str, rows: int, columns: int, mesh: Any) -> None:
    """A layer in a style against the layer of one process: y, the gradients, and the weight of all ranks."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    rank, ranks, loose = mesh.get_local_rank(), mesh.size(), "fp8" in form
    whole = layer_of(form, rows, columns, activation="gelu")
    own = copy.deepcopy(whole)
    if rank and not loose:  # those of the first rank are taken
        own.values.data.mul_(2)
    split: Any = parallelize_module(own, mesh, style)
    assert type(split).__name__ == type(whole).__name__
    assert sum(split._split.sizes) == (rows if style.side == "rows" else columns)
    of_x, of_y = (columns // ranks,) * ranks, (rows // ranks,) * ranks
    of_x, of_y = (of_x, split._split.sizes) if style.side == "rows" else (split._split.sizes, of_y)
    draw = torch.Generator().manual_seed(1)
    kind = torch.float32 if loose else torch.float64
    x, g = (torch.randn(2, 8, n, dtype=kind, generator=draw) for n in (columns, rows))
    mine = local(x, style.input_layouts, rank, of_x).clone().requires_grad_()
    x.requires_grad_()
    y = whole(x)
    y.backward(g)
    found = split(mine)
    assert isinstance(found, DTensor) != style.use_local_output
    if not style.use_local_output:
        assert found.shape == y.shape
        near(found.full_tensor(), y, loose)
        found = found.to_local()
    near(found, local(y, style.output_layouts, rank, of_y), loose)
    found.backward(local(g, style.output_layouts, rank, of_y))
    near(mine.grad, local(x.grad, style.input_layouts, rank, of_x), loose)
    near(split.gathered().to_dense(), whole.to_dense())
    if not loose:
        check_gradients(whole, split)


def layouts() -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), Shard(1), Shard(-1)]


class MLP(nn.Module):
    def __init__(self, form: str, bias: bool) -> None:
        super().__init__()
        kind = torch.float32 if "fp8" in form else torch.float64
        make = functools.partial(nn.Linear, bias=bias, dtype=kind)
        torch.manual_seed(3)
        self.gate_proj, self.up_proj, self.down_proj = make(128, 320), make(128, 320), make(320, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
