"""The calls whose host time is measured, as users write them, each beside torch's.

As a program this makes one call in a fresh process and prints its seconds and its gate as JSON:
`python -m sparsek.bench.suites.host_calls CALL DEVICE`, CALL a JSON object of the fields of `HostCall`. It therefore
imports nothing but torch and the public face of the library: what the first call imports is part of its time.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from sparsek.core import dtypes
from sparsek.reference.epilogue import Activation

if TYPE_CHECKING:
    from sparsek.testing.budget import Gate

ACTIVATION = "gelu"
STORAGES = ("bsr", "semi24", "bsr24", "fp8")


@dataclass(frozen=True)
class HostCall:
    """Which call: a key of CALLS, what its operands measure, and how the sparse one is stored, one of STORAGES.

    `sides`: m, k, n of products; tokens, features in, features out of layers; heads, length, head size of attention;
    rows and columns of a matrix.
    """

    call: str
    sides: tuple[int, ...]
    storage: str = "bsr"
    block: tuple[int, int] = (128, 128)
    density: float = 0.25
    dtype: str = "bf16"


class Pair(NamedTuple):
    """A call of this library on its own operands, torch's, and whether a result of the first is right."""

    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    judge: Callable[[Any], "Gate"]


def product(call: HostCall, device: torch.device, *, planned: bool = False) -> Pair:
    """A @ B, or a plan of it that is called, beside torch.mm."""
    m, k, n = call.sides
    a, b = _sparse(call, m, k, device), _normal(call, device, 1, k, n)
    dense = a.to_dense()
    ours: Callable[[], Tensor] = partial(sk.plan_spmm(a, b), a, b) if planned else lambda: a @ b

    def judge(out: Tensor) -> "Gate":
        from sparsek.testing.budget import check_spmm

        return check_spmm(a, b, out)

    return Pair(ours, lambda: torch.mm(dense, b), judge)


def linear(call: HostCall, device: torch.device) -> Pair:
    """sk.linear with a bias and an activation beside F.linear and torch's activation."""
    tokens, k, n = call.sides
    w = _stored(call, n, k, device)
    x, bias = _normal(call, device, 1, tokens, k), _normal(call, device, 2, n)
    dense = _dense(w, x.dtype)
    return Pair(
        lambda: sk.linear(x, w, bias, ACTIVATION),
        lambda: functional.gelu(functional.linear(x, dense, bias)),
        lambda out: _judge_linear(x, w, out, bias, ACTIVATION),
    )


def layer(call: HostCall, device: torch.device) -> Pair:
    """A layer without an activation beside nn.Linear: BlockSparseLinear, or sk.linear of a 2:4 matrix."""
    tokens, k, n = call.sides
    w = _stored(call, n, k, device)
    x, bias = _normal(call, device, 1, tokens, k), _normal(call, device, 2, n)
    beside = torch.nn.Linear(k, n, dtype=x.dtype, device=device)
    with torch.no_grad():
        beside.weight.copy_(_dense(w, x.dtype))
        beside.bias.copy_(bias)
    ours: Callable[[Tensor], Tensor] = lambda x: sk.linear(x, w, bias)  # noqa: E731
    if isinstance(w, sk.BSR):
        ours = sk.nn.BlockSparseLinear.from_bsr(w, bias)
    return Pair(lambda: ours(x), lambda: beside(x), lambda out: _judge_linear(x, w, out, bias, None))


def linear_backward(call: HostCall, device: torch.device) -> Pair:
    """sk.linear and the gradients of x and of W's values, beside F.linear's."""
    tokens, k, n = call.sides
    drawn = _sparse(call, n, k, device)
    w = sk.BSR(drawn.pattern, drawn.values.detach().requires_grad_())
    x = _normal(call, device, 1, tokens, k).requires_grad_()
    dy = _normal(call, device, 2, tokens, n)
    dense = drawn.to_dense().requires_grad_()

    def judge(found: tuple[Tensor, ...]) -> "Gate":
        from sparsek.testing.compare import near_dense, worst
        from sparsek.testing.product_budget import stored

        def step(dtype: torch.dtype) -> tuple[Tensor, ...]:
            y, dx, dw = _dense_step(x, dense, dy, dtype)
            return y, dx, stored(dw, w.pattern)

        return worst(
            [near_dense(*each) for each in zip(found, step(torch.float64), step(x.dtype), strict=True)]
        )

    def ours() -> tuple[Tensor, ...]:
        y = sk.linear(x, w)
        return y, *torch.autograd.grad(y, (x, w.values), dy)

    def torchs() -> tuple[Tensor, ...]:
        y = functional.linear(x, dense)
        return y, *torch.autograd.grad(y, (x, dense), dy)

    return Pair(ours, torchs, judge)


def _dense_step(x: Tensor, w: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    wanted = tuple(one.detach().to(dtype).requires_grad_() for one in (x, w))
    with torch.enable_grad():
        y = functional.linear(*wanted)
        return y.detach(), *torch.autograd.grad(y, wanted, dy.to(dtype))


def attention(call: HostCall, device: torch.device, *, trains: bool = False) -> Pair:
    """Causal sk.attention beside scaled_dot_product_attention, or both with the gradients of q, k and v."""
    heads, length, dim = call.sides
    q, k, v, dy = (_normal(call, device, place, 1, heads, length, dim) for place in (1, 2, 3, 4))
    mask = sk.BlockMask.causal(length, block=call.block, device=device)
    wanted = tuple(x.requires_grad_(trains) for x in (q, k, v))

    def judge(found: Any) -> "Gate":
        from sparsek.testing.attention_budget import check_attention, check_attention_backward

        if not trains:
            return check_attention(q, k, v, mask, found)
        return check_attention_backward(q.detach(), k.detach(), v.detach(), mask, dy, found)

    def ours() -> Tensor:
        return sk.attention(q, k, v, mask)

    def torchs() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not trains:
        return Pair(ours, torchs, judge)
    return Pair(
        lambda: torch.autograd.grad(ours(), wanted, dy),
        lambda: torch.autograd.grad(torchs(), wanted, dy),
        judge,
    )


def from_dense(call: HostCall, device: torch.device) -> Pair:
    """BSR.from_dense, which keeps a share of the blocks, beside torch's copy of the matrix."""
    w = _normal(call, device, 1, *call.sides)

    def judge(out: sk.BSR) -> "Gate":
        from sparsek.testing.pack_budget import check_bsr

        blocks = max(1, round(call.density * w.numel() / (call.block[0] * call.block[1])))
        return check_bsr(w, out, blocks)

    return Pair(lambda: sk.BSR.from_dense(w, call.block, keep=call.density), w.clone, judge)


CALLS: Mapping[str, Callable[[HostCall, torch.device], Pair]] = {
    "A @ B": product,
    "plan of A @ B": partial(product, planned=True),
    "linear": linear,
    "attention": attention,
    "linear + backward": linear_backward,
    "attention + backward": partial(attention, trains=True),
    "layer": layer,
    "from_dense": from_dense,
}


def _normal(call: HostCall, device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtypes.parse(call.dtype), device=device, generator=generator)


def _sparse(call: HostCall, m: int, k: int, device: torch.device) -> sk.BSR:
    return sk.random_bsr(m, k, call.block, call.density, dtype=dtypes.parse(call.dtype), device=device)


def _stored(call: HostCall, m: int, k: int, device: torch.device) -> Any:
    """W [m, k] in the call's storage: blocks, two of every four neighbours, both, or blocks in FP8."""
    if call.storage == "semi24":
        return sk.Semi24.from_dense(_normal(call, device, 0, m, k).mul_(k**-0.5))
    w = _sparse(call, m, k, device)
    if call.storage == "bsr24":
        return sk.BSR24.from_bsr(w)
    return sk.quantize(w) if call.storage == "fp8" else w


def _dense(w: Any, dtype: torch.dtype) -> Tensor:
    return w.to_dense().to(dtype)


def _judge_linear(
    x: Tensor, w: Any, out: Tensor, bias: Tensor | None, activation: Activation | None
) -> "Gate":
    from sparsek.testing.product_budget import check_linear

    rows = sk.quantize(x) if isinstance(w, sk.Quantized) else x
    return check_linear(rows, w, out, bias, activation)


def main(fields: str, device_name: str) -> None:
    """Makes the call once and prints its seconds, from an idle device to an idle one, and its gate."""
    fields_of: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(fields).items()
    }
    call, device = HostCall(**fields_of), torch.device(device_name)
    pair = CALLS[call.call](call, device)
    # What torch loads for its own first gradient (sympy, 2 s) is not this library's.
    x = torch.ones(1, dtype=torch.float32, device=device).requires_grad_()
    torch.autograd.grad(x * x, x, x.detach())
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    result = pair.ours()
    wait()
    spent = time.perf_counter() - begin
    gate = pair.judge(result)
    answer = {"seconds": spent, "error": gate.error, "budget": gate.budget, "passed": bool(gate.passed)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
