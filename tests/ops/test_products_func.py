"""Products under torch.func: gradients and vmap are those of the dense product; forward mode is refused."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.engine.call import transforms
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops import library_args
from tests.engine.launch.covering import once
from tests.sums import alike

F64 = torch.float64
CASES = ["A @ B", "x @ W", "A.T @ B", "linear", "linear relu", "linear gelu", "swiglu", "sddmm", "A @ A.T"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def a() -> BSR:
    made = random_bsr(40, 56, 16, 0.5, dtype=F64, seed=3)
    assert made.T.T.pattern is made.pattern  # a view is there before torch.func transforms anything
    return made


def of(case: str, a: BSR) -> tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]:
    """The product of (values, dense operand), the same in plain torch, and operands."""

    def like(v: Tensor) -> BSR:
        return BSR.unchecked(a.pattern, v)

    def dense(v: Tensor) -> Tensor:
        (rows, columns), (bm, bk) = a.pattern.padded_shape, a.block
        full = v.new_zeros(rows // bm, columns // bk, bm, bk)
        at = a.pattern.block_rows.long(), a.pattern.indices.long()
        return full.index_put(at, v).transpose(1, 2).reshape(rows, columns)[: a.shape[0], : a.shape[1]]

    (m, k), gelu = a.shape, nn.functional.gelu
    bias, other, residual, right = (draw(*sides, seed=5) for sides in ((m,), (3, m), (3, m), (m, k)))

    pairs: dict[str, tuple[Any, Any, Tensor]] = {
        "A @ B": (lambda v, b: like(v) @ b, lambda v, b: dense(v) @ b, draw(k, 5)),
        "x @ W": (lambda v, x: x @ like(v), lambda v, x: x @ dense(v), draw(2, 3, m)),
        "A.T @ B": (lambda v, b: like(v).T @ b, lambda v, b: dense(v).T @ b, draw(2, m, 5)),
        "linear": (
            lambda v, x: sk.linear(x, like(v), bias, residual=residual),
            lambda v, x: x @ dense(v).T + bias + residual,
            draw(3, k),
        ),
        "linear relu": (
            lambda v, x: sk.linear(x, like(v), bias, "relu", other),
            lambda v, x: (x @ dense(v).T + bias).relu() + other,
            draw(3, k),
        ),
        "linear gelu": (
            lambda v, x: sk.linear(x, like(v), activation="gelu"),
            lambda v, x: gelu(x @ dense(v).T),
            draw(2, 3, k),
        ),
        "swiglu": (
            lambda v, x: sk.swiglu(x, like(v), like(2 * v)),
            lambda v, x: nn.functional.silu(x @ dense(v).T) * (x @ dense(2 * v).T),
            draw(3, k),
        ),
        "sddmm": (
            lambda v, x: sk.sddmm(x, x.mT @ right, a.pattern).values * v,
            lambda v, x: _blocks(x @ (x.mT @ right), a) * v,
            draw(m, 6),
        ),
        "A @ A.T": (
            lambda v, x: sk.spgemm(like(v), like(v).T) @ x + (like(v) @ like(v).T) @ x,
            lambda v, x: 2 * dense(v) @ (dense(v).T @ x),
            draw(m, 3),
        ),
    }
    run, plain, given = pairs[case]
    return run, plain, (a.values, given)


def _blocks(s: Tensor, a: BSR) -> Tensor:
    """The stored blocks of a matrix of a's shape, 0 outside of it."""
    (bm, bk), (rows, columns) = a.block, a.pattern.padded_shape
    s = nn.functional.pad(s, (0, columns - s.shape[1], 0, rows - s.shape[0]))
    tiles = s.unflatten(0, (-1, bm)).unflatten(2, (-1, bk)).transpose(1, 2)
    return tiles[a.pattern.block_rows.long(), a.pattern.indices.long()]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_torch_func_differentiates_products(case: str, a: BSR):
    run, plain, given = of(case, a)

    def loss(f: Any, *args: Tensor) -> Tensor:
        return f(*args).square().sum()

    both = [torch.func.grad(partial(loss, f), argnums=(0, 1))(*given) for f in (run, plain)]
    close(*both)
    twice = [
        torch.func.grad(lambda v, x, f=f: torch.func.grad(partial(loss, f), 1)(v, x).pow(2).sum(), (0, 1))(
            *given
        )
        for f in (run, plain)
    ]
    close(*twice)
    values, back, *_ = torch.func.vjp(run, *given)
    _, wanted, *_ = torch.func.vjp(plain, *given)
    close(back(values), wanted(values))


QUIET = pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])


@QUIET
@pytest.mark.parametrize("case", CASES)
def test_vjp_is_pulled_back_where_autograd_is_off(case: str, quiet: Any, a: BSR):
    run, plain, given = of(case, a)
    values, back, *_ = torch.func.vjp(run, *given)
    _, wanted, *_ = torch.func.vjp(plain, *given)
    right, each = wanted(values), torch.vmap(wanted)(values[None])  # torch 2.11 has relu's outside only
    with quiet():
        close(back(values), right)
        close(torch.vmap(back)(values[None]), each)
        if not torch.func.grad(torch.sum)(torch.ones(())):  # of torch 2.11 in inference mode
            with pytest.raises(InvalidInput, match=r"no gradients in .*inference_mode; use torch.no_grad"):
                torch.func.vjp(run, *given)
            return
        inside, back, *_ = torch.func.vjp(run, *given)
        close(back(values), right)
        close(torch.vmap(back)(values[None]), each)
    close(inside, values)


SHARED = sk.BlockMask.causal(64, block=64)
Q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
S24 = sk.Semi24.from_dense(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
W1, W2 = random_bsr(64, 64, 32, 0.5, seed=1), random_bsr(64, 64, 32, 0.5, seed=2)
MORE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "attention": (lambda q: sk.attention(q, Q, Q, SHARED), Q),
    "lse": (lambda k: sk.attention(Q, k, Q, SHARED, return_lse=True)[1], Q),
    "sinks": (lambda sinks: sk.attention(Q, Q, Q, SHARED, sink_logits=sinks), Q[0, :, 0, 0]),
    "varlen": (
        lambda q: sk.attention_varlen(q, q, q, torch.tensor([0, 20, 64]), mask=sk.MaskPolicy()),
        Q[0].transpose(0, 1),
    ),
    "Semi24": (lambda b: S24 @ b, Q[0, 0]),
    "mlp": (lambda x: sk.mlp(x, W1, W2, activation="silu"), Q[0, 0].mT.contiguous()),
}


@QUIET
@pytest.mark.parametrize("case", MORE)
def test_vjp_of_the_others_too(case: str, quiet: Any):
    run, given = MORE[case]
    leaf = given.clone().requires_grad_()
    right = run(leaf)
    (wanted,) = torch.autograd.grad(right, leaf, right.detach())
    values, back, *_ = torch.func.vjp(run, given)
    with quiet():
        assert alike(back(values)[0], wanted, terms=1 << 14)  # a chain, which magnifies


def test_an_operand_that_outlives_its_transform_is_refused_with_a_cure(a: BSR):
    kept: list[Tensor] = []

    def run(v: Tensor) -> Tensor:
        kept.append(v * 1)
        return BSR.unchecked(a.pattern, v) @ draw(a.shape[1], 3)

    torch.func.vjp(run, a.values)
    for call in (lambda w, x: w @ x, lambda w, x: sk.spgemm(w, w.T)):
        with torch.no_grad(), pytest.raises(InvalidInput, match=r"call \.clone"):
            call(BSR.unchecked(a.pattern, kept[0]), draw(a.shape[1], 3))
        call(BSR.unchecked(a.pattern, kept[0].clone()), draw(a.shape[1], 3))


@pytest.mark.parametrize("case", CASES)
def test_jacrev_of_products(case: str, a: BSR):
    run, plain, given = of(case, a)
    found, wanted = (
        torch.func.jacrev(lambda v, x, f=f: f(v, x).sum(-1), (0, 1))(*given) for f in (run, plain)
    )
    close(found, wanted)


@pytest.mark.parametrize("in_dims", [(None, 0), (None, 2), (0, None), (1, 0)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_vmap_and_gradients_of_each_item(case: str, in_dims: tuple[int | None, ...], a: BSR):
    run, plain, given = of(case, a)
    stacked = [
        x if dim is None else torch.stack((x, x * 2, -x), dim) for x, dim in zip(given, in_dims, strict=True)
    ]
    close(torch.vmap(run, in_dims)(*stacked), torch.vmap(plain, in_dims)(*stacked))
    of_one = [torch.func.grad(lambda v, x, f=f: f(v, x).square().sum(), (0, 1)) for f in (run, plain)]
    close(*(torch.vmap(f, in_dims)(*stacked) for f in of_one))
    # The other way round vmap hides from the product that a gradient is wanted.
    of_all = [
        torch.func.grad(lambda v, x, f=f: torch.vmap(f, in_dims)(v, x).square().sum(), (0, 1))
        for f in (run, plain)
    ]
    close(*(f(*stacked) for f in of_all))


def test_vmap_of_tokens_is_one_product(a: BSR, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    true = library_args.matrix
    monkeypatch.setattr(library_args, "matrix", lambda *args: calls.append(0) or true(*args))
    y = torch.vmap(lambda x: sk.linear(x, a))(draw(4, 3, a.shape[1]))
    assert y.shape == (4, 3, a.shape[0])
    assert len(calls) == 1


def mlp() -> nn.Module:
    sizes, density = (48, 80, 32), 0.5
    torch.manual_seed(0)
    layers = [
        sk.nn.BlockSparseLinear(random_bsr(n, k, 16, density, dtype=F64).pattern, dtype=F64, activation=act)
        for k, n, act in zip(sizes, sizes[1:], ("gelu", None), strict=False)
    ]
    return nn.Sequential(*layers)


def test_a_functional_mlp_has_the_gradients_of_a_module_and_of_each_sample():
    net, x = mlp(), draw(6, 48)
    params = dict(net.named_parameters())
    (net(x) ** 2).sum().backward()
    detached = {name: p.detach() for name, p in params.items()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(net, p, (x,)) ** 2).sum()

    found = torch.func.grad(loss)(detached, x)
    close(found, {name: p.grad for name, p in params.items()})
    each = torch.vmap(torch.func.grad(loss), (None, 0))(detached, x)
    close({name: g.sum(0) for name, g in each.items()}, found)
    for i in (0, 5):
        close({name: g[i] for name, g in each.items()}, torch.func.grad(loss)(detached, x[i]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", [0, 1])
def test_forward_mode_is_refused_not_ignored(case: str, at: int, a: BSR):
    run, _, given = of(case, a)

    def one(x: Tensor) -> Tensor:
        return run(*given[:at], x, *given[at + 1 :])

    if case == "sddmm" and at == 0:
        pytest.skip("values take no part in sddmm")
    x, text = given[at], r"no forward-mode derivative \(jvp, jacfwd, hessian\): torch.autograd.functional.jvp"
    for call in (
        lambda: torch.func.jvp(one, (x,), (x,)),
        lambda: torch.func.jacfwd(one)(x),
        lambda: torch.func.hessian(lambda x: one(x).square().sum())(x),
        lambda: torch.func.jvp(torch.vmap(one), (x[None],), (x[None],)),
        lambda: torch.func.jvp(torch.func.grad(lambda x: one(x).square().sum()), (x,), (x,)),
    ):
        with pytest.raises(InvalidInput, match=text):
            call()
    with forward_ad.dual_level():
        one(x)  # no tangent, no harm
        for given_x in (x, x.clone().requires_grad_()):
            with pytest.raises(InvalidInput, match=text):
                one(forward_ad.make_dual(given_x, x))


def test_the_way_that_the_refusal_names_is_right(a: BSR):
    for case in ("A @ B", "linear relu", "sddmm"):
        run, plain, given = of(case, a)
        tangents = tuple(draw(*x.shape, seed=9) for x in given)
        _, found = torch.autograd.functional.jvp(run, given, tangents)
        _, wanted, *_ = torch.func.jvp(plain, given, tangents)
        close(found, wanted)


def test_forward_mode_of_a_bias_a_residual_and_of_a_plan_is_refused(a: BSR):
    x, bias, residual = draw(3, a.shape[1]), draw(a.shape[0]), draw(3, a.shape[0])
    b = draw(a.shape[1], 4)
    plans = sk.plan_spmm(a, b), sk.plan_sddmm(b.mT.mT, b.mT, (a.T @ a).pattern), sk.plan_spgemm(a.T, a)
    pattern = plans[1].pattern()
    assert pattern is not None
    calls: list[tuple[Callable[[Tensor], Any], Tensor]] = [
        (lambda t: sk.linear(x, a, t), bias),
        (lambda t: sk.linear(x, a, None, None, t), residual),
        (lambda t: S24 @ t, Q[0, 0].mT.contiguous().mT),
        (lambda t: sk.spmm(a, t, plan=plans[0]), b),
        (lambda t: sk.spmm(a, t, out=torch.empty(a.shape[0], 4, dtype=F64)), b),
        (lambda t: sk.sddmm(t, b.mT, pattern, plan=plans[1]), b),
        (lambda t: sk.spgemm(a.T, BSR.unchecked(a.pattern, t), plan=plans[2]), a.values),
    ]
    for call, t in calls:
        with forward_ad.dual_level(), pytest.raises(InvalidInput, match="no forward-mode derivative"):
            call(forward_ad.make_dual(t, t))


@pytest.mark.parametrize("how", ["jvp", "dual"])
def test_torch_compile_does_not_take_a_tangent_for_0(how: str, a: BSR):
    b = draw(a.shape[1], 4)

    def jvp(b: Tensor) -> Tensor:
        return torch.func.jvp(lambda b: sk.spmm(a, b), (b,), (b,))[1]

    def dual(b: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return torch.compile(partial(sk.spmm, a), backend="eager", fullgraph=True)(
                forward_ad.make_dual(b, b)
            )

    call = dual if how == "dual" else torch.compile(jvp, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="no forward-mode derivative"):
        call(b)


@pytest.mark.parametrize(
    ("case", "how"),
    once(product(("A @ B", "linear relu", "sddmm"), ("grad", "vmap", "vmap of grad", "vmap of vmap"))),
)
@pytest.mark.filterwarnings("ignore")  # torch's, of what it does not trace
def test_torch_compile_runs_a_transform_that_it_cannot_trace(case: str, how: str, a: BSR):
    of_case, _, (values, dense) = of(case, a)
    grad = torch.func.grad(lambda v: of_case(v, dense).sin().sum())
    vmap = torch.func.vmap
    each = vmap(lambda v: of_case(v, dense))
    call, x = {
        "grad": (grad, values),
        "vmap": (each, values[None]),
        "vmap of grad": (vmap(grad), values[None]),
        "vmap of vmap": (vmap(each), values[None, None]),
    }[how]
    assert alike(torch.compile(call, backend="aot_eager")(x), call(x))


def test_functionalize_is_refused(a: BSR):
    b = draw(a.shape[1], 4)
    calls: list[Callable[..., Any]] = [
        torch.func.functionalize(lambda b: a @ b),
        torch.func.functionalize(torch.func.grad(lambda b: (a @ b).sum())),
        torch.func.grad(torch.func.functionalize(lambda b: sk.linear(b.mT, a).sum())),
        torch.func.functionalize(lambda b: sk.attention(*b.expand(3, 1, 1, *b.shape))),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="functionalize does not transform"):
            call(b)


def test_what_torch_func_cannot_transform_is_told(a: BSR):
    b = draw(a.shape[1], 4)
    plan, out = sk.plan_spmm(a, b), torch.empty(a.shape[0], 4, dtype=F64)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "plan= inside a function that torch.func transforms": lambda b: sk.spmm(a, b, plan=plan).sum(),
        "out= inside a function that torch.func transforms": lambda b: sk.spmm(a, b, out=out).sum(),
        "this pattern was made inside a function": lambda b: (random_like(a) @ b).sum(),
    }
    for text, call in calls.items():
        with pytest.raises(InvalidInput, match=text):
            torch.func.grad(call)(b)
    with pytest.raises(InvalidInput, match="size 0"):
        torch.vmap(lambda v: BSR.unchecked(a.pattern, v) @ b)(a.values.new_empty(0, *a.values.shape))


def random_like(a: BSR) -> BSR:
    """A matrix whose pattern is made here."""
    p = a.pattern
    made = sk.BlockPattern.unchecked(p.shape, p.block, p.indptr.clone(), p.indices.clone())
    return BSR.unchecked(made, a.values)


def test_patterns_that_a_product_finds_under_torch_func_are_plain(a: BSR):
    def loss(v: Tensor) -> Tensor:
        return (BSR.unchecked(a.pattern, v) @ a.T).values.sum()

    grad = torch.func.grad(loss)(a.values)
    again = a.values.clone().requires_grad_()
    loss(again).backward()
    assert again.grad is not None
    close(grad, again.grad)
    assert not transforms.active()


def test_a_layer_under_torch_func_may_be_written_to_in_place(a: BSR):
    def loss(x: Tensor) -> Tensor:
        y = sk.linear(x, a)
        y += 1
        return y.square().sum()

    x = draw(3, a.shape[1])
    close(torch.func.grad(loss)(x), 2 * (x @ a.to_dense().T + 1) @ a.to_dense())


def test_what_a_pattern_keeps_is_plain_also_if_it_was_first_wanted_inside() -> None:
    a, b = sk.random_bsr(64, 48, 16, 0.5), torch.randn(64, 8)
    found = torch.func.grad(lambda b: (a.T @ b).sum())(b)
    assert torch.allclose(found, a.to_dense().sum(1, keepdim=True).expand(64, 8), atol=1e-5)
    assert torch.allclose(a.T @ b, a.to_dense().T @ b, atol=1e-5)
    assert not any(is_functorch_wrapped_tensor(x) for x in (a.T.pattern.indptr, a.T.pattern.indices))
