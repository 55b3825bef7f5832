"""What sk.prune sees of a model that runs: shared biases, residuals, inputs, and what an error leaves."""

import copy
import json
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.models import passes, reconstruct

HALF = sk.BlockSparse(block=16, keep=0.5)


class Block(nn.Module):
    """Layers, and a forward of a test: forward(block, x)."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.how = forward
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.norm, self.act = nn.LayerNorm(32), nn.ReLU()
        self.fixed = nn.Buffer(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def model(forward: Callable[[Any, Tensor], Tensor], blocks: int = 2) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(forward) for _ in range(blocks)))


def data(count: int = 2) -> list[Tensor]:
    draw = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(96, 32, generator=draw) for _ in range(count)]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(each, other[name]) if each.dtype != torch.float32 else torch.allclose(each, other[name])
        for name, each in one.items()
    )


def test_layers_whose_bias_is_shared_stay_dense():
    made: Any = nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Linear(64, 64),
    )
    made[2].bias = made[0].bias  # a fit for the one would be wrong for the other
    made[4].bias = made[3].bias  # and for a norm
    before = made[3].bias.clone()
    report = sk.prune(made, HALF, calibration=[torch.randn(99, 64)])
    assert [row.name for row in report.replaced] == ["5"]
    assert [row.why_not for row in report.skipped] == [f"shares its bias with {each}" for each in (2, 0, 3)]
    assert torch.equal(made[3].bias, before)


def residuals(block: nn.Module, x: Tensor) -> dict[str, passes.TensorPlace]:
    layers = {name: each for name, each in block.named_children() if isinstance(each, nn.Linear)}

    def run() -> None:
        with torch.no_grad():
            block(x)

    return passes.residuals_of(block, layers, passes.groups_of(layers, run), run)


def test_a_layer_that_adds_nothing_or_little_has_no_residual():
    def gated(own: Any, x: Tensor) -> Tensor:
        x = own.act(x)
        return own.act(x) + own.b(own.norm(x)) * (1 + 8 * own.c(own.norm(x)))

    (block, *_) = blocks = model(gated)
    for each in blocks:
        nn.init.zeros_(each.c.weight)
        nn.init.zeros_(each.c.bias)
    assert "c" not in residuals(block, data()[0])
    dense = copy.deepcopy(blocks)
    sk.prune(blocks, HALF, calibration=data())
    assert all(float(each.c.to_dense().detach().abs().max()) == 0 for each in blocks)
    assert all(torch.equal(each.c.bias, old.c.bias) for each, old in zip(blocks, dense, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_residuals_are_found_element_by_element_beside_massive_activations(dtype: torch.dtype):
    def usual(own: Any, x: Tensor) -> Tensor:
        x = x + own.b(own.a(own.norm(x)))
        y = own.act(x)
        return own.c(y) + y

    (block,) = model(usual, 1).to(dtype)
    x = data()[0].to(dtype)
    x[0, 5] = 1000.0  # as the first token of language models has
    found = residuals(block, x)
    assert found == {"b": passes.TensorPlace("", False, 0), "c": passes.TensorPlace("act", True, 0)}


def test_the_search_for_residuals_holds_the_sum_and_its_parts_alone():
    class Deep(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for each in self:
                y = each(y)
            most.append(sum(tensor() is not None for tensor in passed))
            return x + y

    passed: list[weakref.ref[Tensor]] = []
    most: list[int] = []
    block = Deep(*(nn.Linear(32, 32) for _ in range(12)))

    def note(_: nn.Module, args: Any, y: Tensor) -> None:
        passed.append(weakref.ref(y))

    for each in block:
        each.register_forward_hook(note)
    assert residuals(block, torch.randn(64, 32)) == {"11": passes.TensorPlace("", False, 0)}
    assert most[-1] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.eye(len(x)).to_sparse(),
        lambda x: torch.nested.nested_tensor([x[:1], x], layout=torch.jagged),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.ones(1, 1).expand(2**20, 2**20),  # a mask, of four terabytes if copied
    ],
)
def test_the_search_for_residuals_passes_over_what_is_no_sum(make: Any):
    def passing(own: Any, x: Tensor) -> Tensor:
        own.act(own.fixed, make(x))
        return x + own.a(x)

    block: Any = model(passing)[0]
    block.act.forward = lambda x, _: x
    mask = torch.arange(96)[:, None] > 90
    with torch.no_grad():
        found = passes.residuals_of(
            block, {"a": block.a}, [("a",)], lambda: block(data()[0]), lambda x: x.masked_fill(mask, 0)
        )
    assert found == {"a": passes.TensorPlace("", False, 0)}


@pytest.mark.parametrize("form", [HALF, sk.Float8(HALF)])
def test_layers_on_one_input_whose_outputs_are_added_are_no_residuals_of_each_other(form: Any):
    def parallel(own: Any, x: Tensor) -> Tensor:
        return x + own.c(own.act(own.a(x) + own.b(x)))

    made = model(parallel)
    assert residuals(made[0], data()[0]) == {"c": passes.TensorPlace("", False, 0)}
    dense, x = copy.deepcopy(made), data(1)[0]
    assert len(sk.prune(made, form, calibration=data()).replaced) == 6
    assert (made(x) - dense(x)).norm() < 0.5 * dense(x).norm()


def test_a_residual_that_some_batches_lack_is_made_up_for_in_the_others():
    def changing(own: Any, x: Tensor) -> Tensor:
        y = own.norm(x) if len(x) == 96 else torch.tanh(x)
        return own.act(y + own.a(own.act(y)))

    made = model(changing)
    report = sk.prune(made, HALF, calibration=[*data(), torch.randn(50, 32)])
    assert [row.name for row in report.replaced] == ["0.a", "1.a"]


def cut(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :16]), x[:, 16:]], 1)


def cut_(x: Tensor) -> Tensor:
    x[:, :16] = 0
    return x


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "input of the block": (
        lambda own, x: own.norm(own.a(x) + own.b(x.mul_(2))),
        lambda own, x: own.norm(own.a(x) + own.b(x * 2)),
    ),
    "between two layers": (
        lambda own, x: own.norm(own.a(h := x.clone()) + own.b(cut_(h))),
        lambda own, x: own.norm(own.a(x) + own.b(cut(x))),
    ),
    "between two calls": (
        lambda own, x: own.norm(own.a(h := x.clone()) + own.a(cut_(h))),
        lambda own, x: own.norm(own.a(x) + own.a(cut(x))),
    ),
    "after it is a residual": (
        lambda own, x: own.norm((h := own.act(x)) + own.a(own.act(x))) + h.mul_(2),
        lambda own, x: own.norm((h := own.act(x)) + own.a(own.act(x))) + 2 * h,
    ),
}


@pytest.mark.parametrize("options", [{"method": "wanda", "reconstruct": None}, {}])
@pytest.mark.parametrize("case", PAIRS)
def test_tensors_that_are_written_to_are_those_of_the_call(case: str, options: Any):
    found = []
    for how in PAIRS[case]:
        made, x = model(how), data()
        rows = sk.prune(made, HALF, calibration=x, permute=False, **options).replaced
        assert all(torch.equal(a, b) for a, b in zip(x, data(), strict=True))
        found.append((state(made), [row.error for row in rows]))
    if case != "after it is a residual":
        assert same(found[0][0], found[1][0])
    assert found[0][1][:1] == pytest.approx(found[1][1][:1], rel=1e-4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_blocks_are_pruned_as_they_are_written(wrapped: bool):
    def run(own: Any, x: Tensor) -> Tensor:
        return x + own.b(own.a(x).relu())

    plain, made = model(run), model(run)
    wanted = sk.prune(plain, HALF, calibration=data())
    for at, block in enumerate(made):
        if wrapped:
            made[at] = torch.compile(block, backend="eager")
        else:
            block.compile(backend="eager")
    found = sk.prune(made, HALF, calibration=data())
    assert [row.why for row in found.replaced] == [""] * len(wanted.replaced)
    assert [row.error_after for row in found.replaced] == [row.error_after for row in wanted.replaced]


def test_what_is_timed_stays_compiled():
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    made: Any = torch.compile(nn.Linear(8, 8), backend=backend)
    for compiled in (False, True):
        with passes.evaluated(made, compiled=compiled):
            made(torch.randn(2, 8))
        assert len(graphs) == compiled


def test_layers_called_in_a_transform_are_refused():
    made = model(lambda own, x: x + torch.func.vmap(own.a)(x))
    with pytest.raises(InvalidInput, match=r"0\.a is called in a transform of torch\.func"):
        sk.prune(made, HALF, calibration=data(), method="wanda")


def test_inputs_may_have_one_dimension_and_a_name():
    def learned(own: Any, x: Tensor) -> Tensor:
        return x + own.a(input=own.norm(x)) + own.c(own.fixed) + own.b(input=own.act(own.fixed))

    made = model(learned)
    before, x = made(data()[0]), data()[0]
    report = sk.prune(made, sk.Float8(HALF), calibration=data())
    assert len(report.replaced) == 6
    assert made(x).shape == before.shape
    assert report.replaced[-1].error_after is not None


def test_inputs_by_name_are_rounded_too():
    found = []
    for how in (lambda own, x: own.b(own.a(x)), lambda own, x: own.b(input=own.a(input=x))):
        made = model(how)
        sk.prune(made, sk.Float8(HALF), calibration=data(), permute=False)
        found.append(state(made))
    assert same(*found)


def test_a_calibration_without_a_token_is_refused():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(9, 32), model(lambda own, x: x + own.a(x))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.blocks(self.embed(input_ids))

    ids = torch.ones(2, 6, dtype=torch.int64)
    empty = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    for made, batches in (
        (model(lambda own, x: own.a(x)), [data()[0][:0]]),
        (model(lambda own, x: own.a(x)), [(data()[0][:0],), (data()[0][:0],)]),
        (Masked(), [empty, empty]),
        (Masked(), [{name: each[:0] for name, each in empty.items()}]),
    ):
        for options in ({}, {"method": "magnitude", "reconstruct": None}):
            with pytest.raises(InvalidInput, match="calibration has no token"):
                sk.prune(made, HALF, calibration=batches, **options)
    sk.prune(Masked(), HALF, calibration=[empty, {**empty, "attention_mask": ids}])


@pytest.mark.parametrize("options", [{}, {"method": "wanda", "budget": "owl"}, {"reconstruct": "block"}])
def test_a_layer_that_no_token_reaches_is_pruned_by_magnitude_and_the_report_says_so(
    options: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconstruct.fit_block, "__defaults__", (6,))

    def routed(own: Any, x: Tensor) -> Tensor:
        here = x[:, 0] > 100
        y = torch.zeros_like(x).index_add(0, here.nonzero()[:, 0], own.b(x[here]))
        return own.norm(x + y + own.a(x))

    report = sk.prune(model(routed), HALF, calibration=data(), **options)
    rows = {row.name: row for row in report.replaced}
    assert rows["1.b"].why == "no token of the calibration reaches it, pruned by magnitude"
    assert rows["1.b"].error is rows["1.b"].error_after is None
    assert rows["1.a"].why == ""
    assert rows["1.a"].error
    assert "no token of the calibration" in str(report)


def detached(own: Any, x: Tensor) -> Tensor:
    return x + own.a(x).detach()


@torch.no_grad()
def without_gradients(own: Any, x: Tensor) -> Tensor:
    return x + own.a(x)


@torch.inference_mode()
def for_inference(own: Any, x: Tensor) -> Tensor:
    return x + own.a(x)


def overwritten(own: Any, x: Tensor) -> Tensor:
    y = own.a(x)
    x.mul_(2)
    return x + y


@pytest.mark.parametrize("how", [detached, without_gradients, for_inference, overwritten])
def test_blocks_without_gradients_are_refused_by_name_and_are_as_they_were(how: Any):
    made = model(how)
    made[0].a.weight.requires_grad_(False)
    before = state(made)
    with pytest.raises(InvalidInput, match=r'^0: reconstruct="block" needs gradients'):
        sk.prune(made, HALF, calibration=data(), reconstruct="block")
    assert same(state(made), before)
    assert [each.requires_grad for each in made[0].a.parameters()] == [False, True]
    assert all(each.grad is None for each in made.parameters())
    assert sk.prune(made, HALF, calibration=data()).replaced


def test_layers_that_run_for_some_batches_learn_from_these(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconstruct.fit_block, "__defaults__", (6,))

    def some(own: Any, x: Tensor) -> Tensor:
        if len(x) == 7:
            return x.clone()  # no layer at all
        return x + (own.a(x) if len(x) == 96 else own.b(x).detach() + own.c(x))

    made = model(some, 2)
    calibration = [torch.ones(7, 32), *data(), torch.randn(50, 32)]
    report = sk.prune(made, HALF, calibration=calibration, reconstruct="block")
    assert len(report.replaced) == 6


@pytest.mark.parametrize("reconstruct", ["layer", "block"])
@pytest.mark.parametrize("config", [HALF, sk.SemiSparse(), sk.Float8(HALF)], ids=str)
def test_padding_may_hold_anything(config: Any, reconstruct: Any):
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model(lambda own, x: x + own.b(nn.functional.gelu(own.a(own.norm(x)))))

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.blocks(x)

    mask = torch.arange(12).expand(8, 12) < torch.tensor([[12], [5]]).repeat(4, 1)
    made, reports = [], []
    for held in (1.0, torch.nan, torch.inf):
        x = data(1)[0].view(8, 12, 32).masked_fill(~mask[..., None], held)
        made.append(Padded())
        batches = [{"x": x, "attention_mask": mask}]
        reports.append(sk.prune(made[-1], config, calibration=batches, reconstruct=reconstruct))
    for other, report in zip(made[1:], reports[1:], strict=True):
        assert same(state(made[0]), state(other))
        for row, plain in zip(report.rows, reports[0].rows, strict=True):
            assert (row.error, row.error_after) == pytest.approx((plain.error, plain.error_after))
    broken = [{"x": torch.full((8, 12, 32), torch.nan), "attention_mask": mask}]
    with pytest.raises(InvalidInput, match=r"0\.a: its inputs on calibration batch 0 have NaN"):
        sk.prune(Padded(), config, calibration=broken, reconstruct=reconstruct)


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("batch", "0.a: its inputs on calibration batch 2 have NaN or Inf; the batch has them itself"),
        ("residual", "0.b: its residual on calibration batch 2 has NaN or Inf; the batch has them itself"),
        ("norm", "1.a: its inputs on calibration batch 0 have NaN or Inf; 1.norm returns them"),
        ("block", "1.a: its inputs on calibration batch 0 have NaN or Inf; 0 returns them"),
        (
            "function",
            "0.b: its inputs on calibration batch 0 have NaN or Inf; what runs before 0.b makes them",
        ),
        (
            "large",
            "its inputs on the calibration are not finite in float32; give smaller inputs, or leave it dense by a rule",
        ),
    ],
)
def test_nan_is_traced_to_the_first_layer_that_has_it_and_to_its_source(where: str, said: str, permute: bool):
    def usual(own: Any, x: Tensor) -> Tensor:
        y = own.act(own.a(x.nan_to_num() if where == "residual" else x if where == "large" else own.norm(x)))
        y = y.masked_fill(x > 1e3, torch.inf) if where == "batch" else y
        return x + own.b(y / 0 if where == "function" else y)

    made, batches = model(usual), data(3)
    if where in ("batch", "residual"):
        batches[2][5, 7] = torch.nan
    if where == "batch":
        batches[1][5, 7] = 1e4  # whose fault comes later
    if where == "large":
        batches[2][5] = 1e30
    if where == "norm":
        made[1].norm.weight.data[3] = torch.nan
    if where == "block":
        made[0].c.bias.data[3] = torch.inf
        made[0].b = made[0].c
    rules: Any = {"0.*": None, "*": HALF} if where == "block" else HALF
    with pytest.raises(InvalidInput, match=f"{re.escape(said)}$"):
        sk.prune(made, rules, calibration=batches, permute=permute)


class Ended(BaseException):
    """As of a user who ends a run."""


@pytest.mark.parametrize("fault", ["nan", "batch", "learning", "replacing", "progress"])
@pytest.mark.parametrize("form", [HALF, sk.Float8(HALF)])
def test_an_error_leaves_its_block_and_those_after_it_as_they_were(
    fault: str, form: Any, monkeypatch: pytest.MonkeyPatch
):
    def usual(own: Any, x: Tensor) -> Tensor:
        if fault == "batch" and own.last and len(x) == 50:
            raise ValueError("odd batch")
        return x + own.c(own.act(own.b(own.a(own.norm(x)))))

    made = model(usual, 3)
    for block in made:
        block.last = block is made[2]
    made[2].c.weight.requires_grad_(False)
    made[1].a.bias.requires_grad_(False)
    if fault == "nan":
        made[2].c.weight.data[0, 0] = torch.nan
    before, learns = state(made[2]), [each.requires_grad for each in made[2].parameters()]
    places = [each.data_ptr() for each in made[2].parameters()]

    def report(done: int, total: int, name: str) -> None:
        if fault == "progress" and done == 2:
            raise Ended
        if done == 2 and fault == "learning":
            monkeypatch.setattr(torch.optim.Adam, "step", end)
        if done == 2 and fault == "replacing":
            monkeypatch.setattr("sparsek.models.prune.swap", end)

    def end(*args: Any) -> None:
        raise Ended

    monkeypatch.setattr(reconstruct.fit_block, "__defaults__", (3,))
    with pytest.raises((InvalidInput, Ended)):
        sk.prune(
            made,
            form,
            calibration=[*data(), torch.randn(50, 32)],
            reconstruct="block" if fault == "learning" else "layer",
            progress=report,
        )
    kind = type(sk.nn.SparseLinear.from_dense(nn.Linear(32, 32), form))
    done = 0 if fault == "batch" else 2  # the calibration runs to the last block first
    assert [type(each.a) for each in made][:done] == [kind] * done
    assert type(made[2].a) is type(made[2].c) is nn.Linear
    after = state(made[2])
    assert all(torch.equal(after[name].nan_to_num(), each.nan_to_num()) for name, each in before.items())
    assert [each.data_ptr() for each in made[2].parameters()] == places
    assert [each.requires_grad for each in made[2].parameters()] == learns
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in made.modules())


def of_other(change: str) -> Any:
    made = model(lambda own, x: x + own.a(own.norm(x)) * own.fixed)
    block = made[1]
    with torch.no_grad():
        match change:
            case "norm":
                block.norm.weight.mul_(2)
            case "bias":
                block.a.bias.add_(1)
            case "buffer":
                block.fixed.add_(1)
            case "number":
                block.norm.eps = 0.1
            case "class":
                block.act = nn.GELU()
            case "layer":
                block.more = nn.Identity()
    return made


def test_a_folder_of_another_model_or_calibration_is_refused(tmp_path: Any):
    options: Any = {"method": "magnitude", "reconstruct": None, "folder": tmp_path}
    rules = {"*.a": HALF}
    sk.prune(of_other(""), rules, calibration=data(), **options)
    for change in ("norm", "bias", "buffer", "number", "class", "layer"):
        with pytest.raises(InvalidInput, match="another model"):
            sk.prune(of_other(change), rules, calibration=data(), **options)
    assert len(sk.prune(of_other(""), rules, calibration=data(), **options).replaced) == 2


def test_what_tells_calibrations_apart_is_their_form_tensors_and_plain_values():
    x, y = data()
    trees: list[Any] = [
        [((x,), {})],
        [((y,), {})],
        [((x, y), {})],
        [((x,), {"scale": y})],
        [((x, 1), {})],
        [((x, 1.0), {})],
        [((x, True), {})],
        [((x, -5.0), {})],
        [((x, "a"), {})],
        [((x, None), {})],
        [((x, torch.float16), {})],
        [((x, x.numpy()), {})],
        [((x, y.numpy()), {})],
        [((x,), {}), ((y,), {})],
        [((x.to_sparse(),), {})],
        [((x[:0],), {})],
    ]
    found = [json.dumps(passes.tree_facts(each)) for each in trees]
    assert len({*found}) == len(trees)
    assert found == [json.dumps(passes.tree_facts(copy.deepcopy(each))) for each in trees]
    objects = [json.dumps(passes.tree_facts([((x, object()), {"f": lambda: 3})])) for _ in range(2)]
    assert objects[0] == objects[1]  # and no address


def test_models_that_are_wrapped_or_compiled_are_refused():
    kind = nn.parallel.DistributedDataParallel
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(32, 32)
    scripted: Any = torch.jit.ScriptModule.__new__(torch.jit.ScriptModule)
    for each, said in (
        (wrapped, "prune the model before, and wrap"),
        (nn.ModuleList([wrapped]), "DistributedDataParallel"),
        (scripted, "prune the model before it is compiled"),
        (sk.nn.SparseLinear.from_dense(nn.Linear(32, 32), HALF), "is itself a BlockSparseLinear"),
    ):
        with pytest.raises(InvalidInput, match=said):
            sk.prune(each, HALF, method="magnitude", reconstruct=None)
