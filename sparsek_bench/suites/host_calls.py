"""The calls whose host time is measured, as users write them, each beside torch's.

As a program this makes one call in a fresh process and prints its seconds and its gate as JSON:
`python -m sparsek_bench.suites.host_calls CALL DEVICE`, CALL a JSON object of the fields of `HostCase`. It
therefore imports nothing but torch and the public face of the library: what the first call imports is part of its time.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from sparsek.core import dtypes
from sparsek_bench.engine.sources import executed_by

if TYPE_CHECKING:
    from sparsek.testing.budget import Gate

STORAGES = ("bsr", "semi24", "bsr24", "fp8")
PRODUCT, LAYERS = "m x k x n", "tokens x features in x features out"
HEADED, WHOLE = "heads x length x head size", "rows x columns"
PAGED = "requests x heads x length x head size"
PAGE = 64  # keys of a page


class CallPair(NamedTuple):
    """A call of this library on its own operands, torch's, and whether a result of the first is right."""

    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    judge: Callable[[Any], "Gate"]


def product(call: Any, device: torch.device, *, planned: bool = False) -> CallPair:
    """A @ B, or a plan of it that is called, beside torch.mm."""
    m, k, n = call.sides
    a, b = _sparse(call, m, k, device), _normal(call, device, 1, k, n)
    dense = a.to_dense()
    ours: Callable[[], Tensor] = partial(sk.plan_spmm(a, b), a, b) if planned else lambda: a @ b

    def judge(out: Tensor) -> "Gate":
        from sparsek.testing.budget import check_spmm

        return check_spmm(a, b, out)

    return CallPair(ours, lambda: torch.mm(dense, b), judge)


def linear(call: Any, device: torch.device, *, layer: bool = False) -> CallPair:
    """sk.linear with a bias and gelu beside F.linear and torch's gelu. Of a layer, without an activation:
    BlockSparseLinear, or sk.linear of a 2:4 matrix, beside nn.Linear.
    """
    tokens, k, n = call.sides
    w = _stored(call, n, k, device)
    x, bias = _normal(call, device, 1, tokens, k), _normal(call, device, 2, n)
    dense = w.to_dense().to(x.dtype)

    def judge(out: Tensor) -> "Gate":
        from sparsek.testing.product_budget import check_linear

        rows = sk.quantize(x) if isinstance(w, sk.Quantized) else x
        return check_linear(rows, w, out, bias, None if layer else "gelu")

    if not layer:
        torchs = lambda: functional.gelu(functional.linear(x, dense, bias))  # noqa: E731
        return CallPair(lambda: sk.linear(x, w, bias, "gelu"), torchs, judge)
    beside = torch.nn.Linear(k, n, dtype=x.dtype, device=device)
    beside.load_state_dict({"weight": dense, "bias": bias})
    if not isinstance(w, sk.BSR):
        return CallPair(lambda: sk.linear(x, w, bias), lambda: beside(x), judge)
    ours = sk.nn.BlockSparseLinear.from_bsr(w, bias)
    return CallPair(lambda: ours(x), lambda: beside(x), judge)


def linear_backward(call: Any, device: torch.device) -> CallPair:
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

        def right(dtype: torch.dtype) -> tuple[Tensor, ...]:
            wanted = tuple(one.detach().to(dtype).requires_grad_() for one in (x, dense))
            with torch.enable_grad():
                y, dx, dw = _step(functional.linear, wanted, wanted, dy.to(dtype))
            return y.detach(), dx, stored(dw, w.pattern)

        return worst(
            [near_dense(*each) for each in zip(found, right(torch.float64), right(x.dtype), strict=True)]
        )

    return CallPair(
        lambda: _step(sk.linear, (x, w), (x, w.values), dy),
        lambda: _step(functional.linear, (x, dense), (x, dense), dy),
        judge,
    )


def _step(
    forward: Callable[..., Tensor], given: tuple[Any, ...], wanted: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, ...]:
    """The result, and the gradients of the wanted tensors."""
    y = forward(*given)
    return y, *torch.autograd.grad(y, wanted, dy)


def attention(call: Any, device: torch.device, *, trains: bool = False) -> CallPair:
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

    def called(forward: Callable[[], Tensor]) -> Callable[[], Any]:
        return (lambda: torch.autograd.grad(forward(), wanted, dy)) if trains else forward

    ours = called(lambda: sk.attention(q, k, v, mask))
    return CallPair(
        ours, called(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)), judge
    )


def attention_paged(call: Any, device: torch.device) -> CallPair:
    """One decoding step by sk.attention_paged, four heads to one of keys, into given memory, as engines call it,
    beside scaled_dot_product_attention of keys that lie one after another.
    """
    requests, heads, length, dim = call.sides
    kv_heads, pages = max(1, heads // 4), -(-length // PAGE)
    q = _normal(call, device, 1, requests, heads, dim)
    cache = _normal(call, device, 2, requests * pages, kv_heads, PAGE, 2 * dim)
    table = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
    lengths = torch.full((requests,), length, dtype=torch.int32, device=device)
    edges = torch.arange(requests + 1, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    plain = cache.unflatten(0, (requests, pages)).transpose(1, 2).flatten(2, 3)[:, :, :length]
    k, v = (x.contiguous() for x in plain.split(dim, -1))
    alone = q.view(requests, heads, 1, dim)

    def judge(found: Tensor) -> "Gate":
        from sparsek.testing.paged_budget import PagedInputs, expected_attention_paged

        inputs = PagedInputs(
            q, cache, cache[..., :dim], cache[..., dim:], table, lengths, edges, None, None, None, None, dim**-0.5, 0.0,
            True, 0, 0, 1, length, requests,
        )  # fmt: skip
        return expected_attention_paged(inputs).judge(found)

    ours = partial(
        sk.attention_paged, q, cache, table, lengths, edges, max_seqlen_q=1, max_seqlen_k=length, out=out
    )
    torchs = partial(functional.scaled_dot_product_attention, alone, k, v, enable_gqa=True)
    return CallPair(ours, torchs, judge)


def from_dense(call: Any, device: torch.device) -> CallPair:
    """BSR.from_dense, which keeps a share of the blocks, beside torch's copy of the matrix."""
    w = _normal(call, device, 1, *call.sides)

    def judge(out: sk.BSR) -> "Gate":
        from sparsek_bench.engine.pack_budget import check_bsr

        blocks = max(1, round(call.density * w.numel() / (call.block[0] * call.block[1])))
        return check_bsr(w, out, blocks)

    return CallPair(
        lambda: sk.BSR.from_dense(w, call.block, keep=call.density, scope="global"), w.clone, judge
    )


class CallKind(NamedTuple):
    """How a call is made, of the fields of a `HostCase`; what is called, as a module of sparsek; what its sides are."""

    make: Callable[[Any, torch.device], CallPair]
    module: str
    sides: str


CALLS: dict[str, CallKind] = {
    "A @ B": CallKind(product, "ops.spmm", PRODUCT),
    "plan of A @ B": CallKind(partial(product, planned=True), "ops.spmm", PRODUCT),
    "linear": CallKind(linear, "ops.linear", LAYERS),
    "attention": CallKind(attention, "ops.attention", HEADED),
    "attention_paged": CallKind(attention_paged, "ops.attention_paged", PAGED),
    "linear + backward": CallKind(linear_backward, "ops.linear", LAYERS),
    "attention + backward": CallKind(partial(attention, trains=True), "ops.attention", HEADED),
    "layer": CallKind(partial(linear, layer=True), "nn.linear", LAYERS),
    "from_dense": CallKind(from_dense, "matrix.bsr", WHOLE),
}


def _normal(call: Any, device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtypes.parse(call.dtype), device=device, generator=generator)


def _sparse(call: Any, m: int, k: int, device: torch.device) -> sk.BSR:
    return sk.random_bsr(m, k, call.block, call.density, dtype=dtypes.parse(call.dtype), device=device)


def _stored(call: Any, m: int, k: int, device: torch.device) -> Any:
    """W [m, k] in the call's storage: blocks, two of every four neighbours, both, or blocks in FP8."""
    if call.storage == "semi24":
        return sk.Semi24.from_dense(_normal(call, device, 0, m, k).mul_(k**-0.5))
    w = _sparse(call, m, k, device)
    if call.storage == "bsr24":
        return sk.BSR24.from_bsr(w)
    return sk.quantize(w) if call.storage == "fp8" else w


def main(fields: str, device_name: str, *named: str) -> None:
    """Makes the call once and prints its seconds, from an idle device to an idle one, and its gate. `named`: also the
    functions of sparsek that it executed, which takes longer.
    """
    call, device = SimpleNamespace(**json.loads(fields)), torch.device(device_name)
    call.block = tuple(call.block)
    pair = CALLS[call.call].make(call, device)
    # What torch loads for its own first gradient (sympy, 2 s) is not this library's.
    x = torch.ones(1, dtype=torch.float32, device=device).requires_grad_()
    torch.autograd.grad(x * x, x, x.detach())
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    made: list[Any] = []
    ran = executed_by(lambda: made.append(pair.ours())) if named else made.append(pair.ours())
    (result,) = made
    wait()
    spent = time.perf_counter() - begin
    gate = pair.judge(result)
    answer = {"seconds": spent, "error": gate.error, "budget": gate.budget, "passed": bool(gate.passed)}
    answer |= {"ran": ran} if named else {}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
