"""SparseLinear over every storage: forward and gradients, state, conversions, loaders, copies, training."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear, SparseLinear
from sparsek.nn.indices import CheckedTensor
from sparsek.products.formats import two_four
from sparsek.products.ops.weight_formats import WeightFormat
from tests.sampling import sampled

BF16, F32 = torch.bfloat16, torch.float32
BLOCKS = {
    "bsr24": {"block": 64, "keep": 0.5},
    "bsr_fp8": {"block": 32, "keep": 0.5},
    "bsr24_fp8": {"block": 64, "keep": 0.5},
}
LEARNS = ("semi24", "bsr24")
FP8 = ("bsr_fp8", "semi24_fp8", "bsr24_fp8", "dense_fp8")
FORMS = (*LEARNS, *FP8)
TENSORS = {
    "semi24": {"values", "metadata"},
    "bsr24": {"values", "metadata", "indptr", "indices"},
    "bsr_fp8": {"codes", "scale", "indptr", "indices"},
    "semi24_fp8": {"codes", "scale", "metadata"},
    "bsr24_fp8": {"codes", "scale", "metadata", "indptr", "indices"},
    "dense_fp8": {"codes", "scale", "indptr", "indices"},
}


def dense(seed: int = 0, bias: bool = True, dtype: torch.dtype = F32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(200, 100, bias, dtype=dtype)


def layer(form: str, seed: int = 0, **options: Any) -> SparseLinear:
    return SparseLinear.from_dense(
        dense(seed, options.pop("bias", True)), form, **BLOCKS.get(form, {}), **options
    )


def x(rows: int = 6, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(rows, 200, generator=torch.Generator().manual_seed(1)).to(dtype)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a(x()), b(x())) and torch.equal(a.weight.to_dense(), b.weight.to_dense())


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_layer_of_its_matrix(form: str):
    made, whole = layer(form, activation="gelu"), dense()
    assert type(made) is SparseLinear
    assert {*made.state_dict()} == {*TENSORS[form], "bias"}
    assert {name for name, _ in made.named_parameters()} == {"bias", *TENSORS[form] & {"values"}}
    residual = torch.randn(2, 3, 100)
    y = made(x().view(2, 3, 200), residual)
    assert torch.equal(y, sk.linear(x().view(2, 3, 200), made.weight, made.bias, "gelu", residual))
    assert torch.equal(y, made(input=x().view(2, 3, 200), residual=residual))  # its name in torch.nn.Linear
    with pytest.raises(InvalidInput, match="x and input are two names"):
        made(x(), input=x())
    weight = WeightFormat(form, *BLOCKS.get(form, {}).values(), scope="row").convert(whole.weight)
    assert torch.equal(made.to_dense(), weight.to_dense())
    again = SparseLinear.from_matrix(cast(Any, weight), whole.bias, activation="gelu")
    assert torch.equal(again(x()), made(x()))
    assert "in_features=200, out_features=100, " in repr(made)
    made.activation = None
    back = made.to_linear()
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, made.to_dense())
    assert torch.equal(back.bias, whole.bias)
    assert back.weight.is_leaf
    assert back.weight.requires_grad


def test_a_bsr_has_the_block_sparse_layer():
    made = SparseLinear.from_dense(dense(), "bsr", block=32, keep=0.5)
    assert type(made) is BlockSparseLinear
    assert isinstance(made, SparseLinear)
    twin = BlockSparseLinear.from_dense(dense(), 32, keep=0.5)
    assert same(made, twin)
    assert type(SparseLinear.from_matrix(twin.weight, twin.bias)) is BlockSparseLinear
    assert torch.equal(made.to_linear().weight, twin.weight.to_dense())
    assert type(SparseLinear.from_dense(dense(), WeightFormat("bsr", 32, 0.25))) is BlockSparseLinear
    for inner, form in ((WeightFormat("bsr24", 64, 0.5, "row"), "bsr24_fp8"), (None, "dense_fp8")):
        rounded = SparseLinear.from_dense(dense(), SimpleNamespace(of=inner))
        assert same(rounded, layer(form))


def test_transformers_conv1d_is_taken_with_its_weight_transposed():
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(100, 200)
    for form in ("bsr", *FORMS):
        how = {"block": 64, "keep": 1.0} if form.startswith("bsr") else {}
        made = SparseLinear.from_dense(conv, form, **how)
        assert (made.in_features, made.out_features) == (200, 100)
        twin = SparseLinear.from_dense(conv.weight.T, form, **how)
        assert torch.equal(made.to_dense(), twin.to_dense())
        assert torch.equal(made.bias, conv.bias)


def _zip(made: Any, path: Path) -> Any:
    torch.save(made, path / "x.pt")
    return torch.load(path / "x.pt", weights_only=False)


def _fresh(form: str) -> SparseLinear:
    return layer(form, seed=5)


def _tensors(made: Any, path: Path, assign: bool, meta: bool, form: str) -> Any:
    from safetensors.torch import load_file, save_file

    save_file({"odd": torch.zeros(3, dtype=torch.uint8), **made.state_dict()}, path / "x.safetensors")
    state = load_file(path / "x.safetensors")
    del state["odd"]
    other = (
        SparseLinear.from_dense(nn.Linear(200, 100, device="meta"), form, **BLOCKS.get(form, {}))
        if meta
        else _fresh(form)
    )
    if meta and not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(state, assign=assign)
    return other


def _one_by_one(made: Any, path: Path, form: str) -> Any:
    other = _fresh(form)
    other(x())
    for name, part in made.state_dict().items():
        owner = other._parameters if name in other._parameters else other._buffers
        owner[name] = nn.Parameter(part.clone()) if name in other._parameters else part.clone()
    return other


def _in_place(made: Any, path: Path, form: str) -> Any:
    other = _fresh(form)
    other(x())
    with torch.no_grad():
        for name, part in made.state_dict().items():
            other.state_dict()[name].copy_(part)
    return other


COPIES: dict[str, Callable[[Any, Path, str], Any]] = {
    "deepcopy": lambda made, path, form: copy.deepcopy(made),
    "pickle": lambda made, path, form: pickle.loads(pickle.dumps(made)),  # noqa: S301
    "torch.save": lambda made, path, form: _zip(made, path),
    "state_dict": lambda made, path, form: _tensors(made, path, False, False, form),
    "assign": lambda made, path, form: _tensors(made, path, True, False, form),
    "meta, assign": lambda made, path, form: _tensors(made, path, True, True, form),
    "meta, to_empty": lambda made, path, form: _tensors(made, path, False, True, form),
    "one tensor after the other": _one_by_one,
    "in place": _in_place,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_copy_and_load_gives_the_same_layer(form: str, way: str, tmp_path: Path):
    made = layer(form)
    other = COPIES[way](made, tmp_path, form)
    assert same(other, made)
    for name, part in made.state_dict().items():
        found = other.state_dict()[name]
        assert found.dtype == part.dtype
        assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))
        assert name in ("indptr", "indices", "bias") or found.data_ptr() % 16 == 0
        assert found.data_ptr() != part.data_ptr()


@pytest.mark.parametrize("form", ["bsr24", "bsr_fp8", "bsr24_fp8"])
def test_load_state_dict_takes_any_number_of_blocks(form: str):
    made = layer(form)
    other = SparseLinear.from_dense(dense(3), form, **{**BLOCKS[form], "keep": 1.0})
    other(x()).sum().backward()
    kept = dict(other.named_parameters())
    other.load_state_dict(made.state_dict())
    assert same(other, made)
    assert all(kept[name] is part for name, part in other.named_parameters())


@pytest.mark.parametrize("form", FORMS)
def test_conversions_leave_codes_scales_and_indices_in_their_dtypes(form: str):
    made = layer(form)
    before = made.state_dict()
    for dtype, how in (
        (BF16, lambda m: m.to(BF16)),
        (torch.float16, lambda m: m.half()),
        (BF16, lambda m: m.bfloat16()),
    ):
        low = how(copy.deepcopy(made))
        for name, part in low.state_dict().items():
            wanted = dtype if name in ("values", "bias") else before[name].dtype
            assert part.dtype == wanted, name
            assert torch.equal(part, before[name].to(wanted))
        assert low(x(dtype=dtype)).dtype == dtype
        assert low.to_dense().dtype == low.to_linear().weight.dtype == dtype
    moved = made.to("meta")
    assert all(part.is_meta for part in moved.state_dict().values())


@pytest.mark.parametrize("form", FORMS)
def test_deferred_initialisation_draws_what_a_layer_stores(form: str):
    made = SparseLinear.from_dense(nn.Linear(200, 100, device="meta"), form, **BLOCKS.get(form, {}))
    made.to_empty(device="cpu")
    made.reset_parameters()
    weight = made.to_dense()
    share = (weight != 0).double().mean()
    assert 0.1 < share <= 1
    limit = 1 / (share * 200) ** 0.5
    assert 0.8 * limit < weight.abs().max() < 1.3 * limit
    assert torch.equal(made(x()), sk.linear(x(), made.weight, made.bias))
    assert made.bias.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused_and_changes_nothing(form: str):
    made = layer(form)
    before = {name: part.clone() for name, part in made.state_dict().items()}
    wrong: list[dict[str, Tensor]] = []
    if "metadata" in before:
        wrong.append({**before, "metadata": torch.zeros_like(before["metadata"])})
    if "scale" in before:
        wrong.append({**before, "scale": -before["scale"]})
        wrong.append({**before, "codes": before["codes"].view(torch.float8_e5m2)})
    if "indices" in before:
        wrong.append({**before, "indices": before["indices"] + 9})
    stored = "codes" if form in FP8 else "values"
    wrong += [
        {**before, stored: before[stored][:-1]},
        {name: part for name, part in before.items() if name != TENSOR_LAST[form]},
        {stored: before[stored]},  # of another pattern, perhaps
    ]
    for state in wrong:
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
            made.load_state_dict(state, strict=False)
        assert all(
            torch.equal(part.view(torch.uint8), before[name].view(torch.uint8))
            for name, part in made.state_dict().items()
        )
    made(x())
    for name, bad in (("metadata", 0), ("scale", -1.0), ("indices", 99)):
        if name in before:
            spoiled = copy.deepcopy(made)
            spoiled.get_buffer(name).fill_(bad)
            with pytest.raises(InvalidInput, match="of this SparseLinear: "):
                spoiled(x())


TENSOR_LAST = {
    "semi24": "metadata",
    "bsr24": "indices",
    "bsr_fp8": "scale",
    "semi24_fp8": "metadata",
    "bsr24_fp8": "indptr",
    "dense_fp8": "scale",
}


@pytest.mark.parametrize("form", sampled(FORMS, 2, of="compilers"))
def test_functional_call_compile_and_export_take_its_tensors(form: str):
    torch._dynamo.reset()
    made, other = layer(form, activation="silu"), layer(form, seed=4, activation="silu")
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(made, other.state_dict(), (x(),)), other(x()))
        assert torch.equal(made(x()), layer(form, activation="silu")(x()))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    a, b = (x().requires_grad_() for _ in range(2))
    assert_close(compiled(a), made(b))
    given = list(made.parameters())
    first, second = (
        torch.autograd.grad(run(at).square().sum(), [at, *given]) for run, at in ((compiled, a), (made, b))
    )
    assert_close(first, second)
    made.load_state_dict(other.state_dict())
    assert_close(compiled(x()), other(x()))
    exported = torch.export.export(made, (x(),))
    stream = io.BytesIO()
    torch.export.save(exported, stream)
    stream.seek(0)
    assert_close(torch.export.load(stream).module()(x()), other(x()))


@pytest.mark.parametrize("form", LEARNS)
def test_it_trains_as_a_masked_dense_layer(form: str):
    mine, frozen = layer(form).double(), layer(form).double()
    with torch.no_grad():
        mask = SparseLinear.from_matrix(frozen.weight.map(torch.ones_like)).to_dense() != 0
    plain = mine.to_linear()
    ours = torch.optim.AdamW(mine.parameters(), 1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), 1e-2)
    target = torch.randn(6, 100)
    for _ in range(5):
        for made, optimizer in ((mine, ours), (plain, theirs)):
            optimizer.zero_grad()
            (made(x().double()) - target).square().mean().backward()
            if made is plain:
                plain.weight.grad *= mask
            optimizer.step()
        assert_close(mine.to_dense(), plain.weight)
        assert_close(mine.bias, plain.bias)
    assert torch.equal(mine.metadata, frozen.metadata)


@pytest.mark.parametrize("form", FP8)
def test_an_adapter_beside_fp8_learns_as_beside_the_dequantized_weight(form: str):
    frozen = layer(form, bias=False)
    down, up = torch.randn(200, 4) / 14, torch.zeros(4, 100).requires_grad_()
    down.requires_grad_()
    before = layer(form, seed=2)
    given = nn.Linear(200, 200)
    y = frozen(given(x())) + given(x()) @ down @ up
    found = torch.autograd.grad(y.square().sum(), [given.weight, up, down], materialize_grads=True)
    rounded = frozen(given(x())).detach()
    z = given(x())
    through = z @ frozen.to_dense().T
    exact = (through + (rounded - through).detach()) + z @ down @ up
    assert_close(
        found, torch.autograd.grad(exact.square().sum(), [given.weight, up, down]), atol=1e-3, rtol=1e-3
    )
    assert not any(each.requires_grad for each in frozen.buffers())
    assert before is not frozen


def test_accelerate_loads_it_on_every_path(tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    for form in FORMS:
        made = nn.Sequential(layer(form))
        accelerate.utils.save(made.state_dict(), str(tmp_path / "x.safetensors"), safe_serialization=True)
        for device_map in (None, {"": "cpu"}):
            other = nn.Sequential(layer(form, seed=5))
            other(x())
            accelerate.load_checkpoint_in_model(other, str(tmp_path / "x.safetensors"), device_map=device_map)
            assert torch.equal(other(x()), made(x()))
        offloaded = accelerate.cpu_offload(copy.deepcopy(made), torch.device("cpu"), offload_buffers=True)
        assert torch.equal(offloaded(x()), made(x()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SparseLinear.from_dense(dense(), "dense"), "config is 'dense'; it must be semi24, bsr, "),
        (lambda: SparseLinear.from_dense(dense(), "bsr24"), "bsr24 needs block= and keep="),
        (lambda: SparseLinear.from_dense(dense(), "semi24", keep=0.5), "are for formats with blocks, not semi24"),
        (lambda: SparseLinear.from_dense(dense(), WeightFormat("semi24"), block=32), "this config has its own"),
        (lambda: SparseLinear.from_dense(nn.Linear(20, 8), "semi24"), "K must be a multiple of 8, not 20"),
        (lambda: SparseLinear.from_dense(dense(), "bsr24", block=32, keep=1.0), "its blocks are multiples of 64"),
        (lambda: SparseLinear.from_dense(nn.Conv1d(4, 4, 1), "semi24"), "takes a torch.nn.Linear .*, got Conv1d"),
        (lambda: SparseLinear.from_dense(torch.ones(3), "semi24"), r"weight is \[3\]; it must be"),
        (lambda: SparseLinear(sk.random_bsr(64, 64, 32, 0.5)), "it must be a Semi24, BSR24 or Quantized"),
        (lambda: SparseLinear.from_matrix(layer("semi24").weight, torch.ones(7)), r"bias is torch.float32 \[7\]"),
        (lambda: layer("semi24", activation="tanh"), "activation is 'tanh'"),
        (lambda: layer("semi24", activation="relu").to_linear(), "a torch.nn.Linear has no activation"),
        (lambda: layer("semi24").keep_pruned(dense().to("meta")), "dense is on meta and the layer on cpu"),
        (lambda: torch.jit.trace(layer("semi24"), x()), "torch.jit.trace cannot take a SparseLinear"),
    ],
)  # fmt: skip
def test_what_makes_no_layer_is_told(make: Callable[[], Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize("form", LEARNS)
def test_sr_ste_is_that_of_a_dense_weight(form: str):
    """A dense weight, masked in the forward pass, with the gradient of all elements and the decay of the paper."""
    whole = dense(dtype=torch.float64)
    mine = SparseLinear.from_dense(whole, form, **BLOCKS.get(form, {}), activation="gelu").keep_pruned(
        whole, decay=0.1
    )
    first = SparseLinear.from_matrix(mine.weight.map(torch.ones_like)).to_dense() != 0
    cells = first.view(100, 50, 4).any(-1, keepdim=True).expand(-1, -1, 4).reshape(100, 200)
    plain = (whole.weight * cells).detach().requires_grad_()
    bias = whole.bias.detach().clone().requires_grad_()
    ours, theirs = torch.optim.AdamW(mine.parameters(), 1e-2), torch.optim.AdamW([plain, bias], 1e-2)
    target, mask = torch.randn(6, 100, dtype=torch.float64), first
    for step in range(6):
        ours.zero_grad()
        theirs.zero_grad()
        at, right = (x(dtype=torch.float64).requires_grad_() for _ in range(2))
        (mine(at) - target).square().mean().backward()
        ours.step()
        masked = (plain.detach() * mask).requires_grad_()
        (nn.functional.gelu(right @ masked.T + bias) - target).square().mean().backward()
        plain.grad = (masked.grad + 0.1 * plain.detach() * ~mask) * cells
        theirs.step()
        assert_close(mine.to_dense(), (plain * mask).detach())
        assert_close(at.grad, right.grad)
        if step % 2:
            mine.choose_again(optimizer=ours)
            mask = (sk.Semi24.from_dense(plain.detach()).to_dense() != 0) & cells
            assert_close(mine.to_dense(), (plain * mask).detach())
    assert (mask != first).any()


def test_scores_choose_what_is_stored_and_kept_elements_keep_their_values():
    made = layer("semi24")
    before, scores = made.to_dense().detach(), torch.randn(100, 200)
    y = made(x())
    made(x()).sum().backward()
    made.choose_again(scores)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    by_group = scores.view(100, 50, 4)
    mask = (by_group >= by_group.topk(2).values[..., 1:]).view(100, 200)
    assert torch.equal(made.to_dense(), before * mask)
    assert torch.equal(made(x()), sk.linear(x(), sk.Semi24.from_dense(before, mask), made.bias))
    for wrong in (layer("bsr_fp8"), SparseLinear.from_dense(dense(), "bsr", block=32, keep=0.5)):
        with pytest.raises(InvalidInput, match="choose_again is for a 2:4 weight whose values learn"):
            wrong.choose_again()
    with pytest.raises(InvalidInput, match=r"it must be dense \[100, 200\]"):
        made.choose_again(torch.ones(3, 3))


def test_complements_of_metadata():
    nibbles = (4, 8, 12, 9, 13, 14)
    every = torch.tensor([a | b << 4 for a in nibbles for b in nibbles], dtype=torch.uint8)
    ones = torch.ones(4 * len(every))
    both = two_four.unpack(ones, every) + 2 * two_four.unpack(ones, two_four.complement(every))
    assert both.view(-1, 4).sort(-1).values.tolist() == [[1, 1, 2, 2]] * (2 * len(every))
    two_four.check_nibbles(two_four.complement(every)[None])


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
@pytest.mark.parametrize("form", FORMS)
def test_fsdp2_and_ddp_train_it(form: str, alone: None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made: Any = nn.Sequential(
        SparseLinear.from_dense(nn.Linear(200, 100, device="meta"), form, **BLOCKS.get(form, {}))
    )
    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    made.to_empty(device="cpu")
    made[0].reset_parameters()
    right = nn.Sequential(_fresh(form))
    right.load_state_dict(
        {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in made.state_dict().items()}
    )
    wrapped = copy.deepcopy(right)
    if form in LEARNS:  # gloo has no FP8
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    outputs = []
    for each in (made, right, wrapped):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            each(x()).square().sum().backward()
            optimizer.step()
        outputs.append(each(x()).detach())
    assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert_close(outputs[2], outputs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_modes_and_transforms_of_torch_take_it(form: str, monkeypatch: pytest.MonkeyPatch):
    made, other = layer(form), layer(form, seed=3)
    low = x().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = made(low)
    y.float().sum().backward()
    assert y.dtype == BF16
    assert {cast(Tensor, each.grad).dtype for each in (low, *made.parameters())} == {F32}
    both = [made, layer(form)]
    parameters, buffers = torch.func.stack_module_state(both)
    base, given = copy.deepcopy(made).to("meta"), x()
    each = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (given,)))(
        parameters, buffers
    )
    assert_close(each[0], made(x()))
    with torch.inference_mode():  # writes to it are not counted
        read = given.clone()
    assert not CheckedTensor.of(read).holds(read)
    weight = dense().weight.detach()
    if form.startswith("semi24"):  # blocks are chosen by values
        torch.func.vmap(lambda w: SparseLinear.from_dense(w, form).metadata)(torch.stack((weight, weight)))
        with pytest.raises(InvalidInput, match="maps over metadata"):
            torch.func.vmap(lambda w: SparseLinear.from_dense(w, form).metadata)(
                torch.stack((weight, -weight.flip(1)))
            )
    fresh = layer(form)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fresh(torch.empty(3, 200, device="cpu", dtype=F32)).shape == (3, 100)
    assert same(fresh, made)
    fresh = layer(form)
    assert same(fresh, made)
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    fresh.load_state_dict(other.state_dict())
    assert same(fresh, other)
    assert fresh.half().float()(x()).dtype == F32


@pytest.mark.parametrize("form", LEARNS)
def test_pruned_elements_learn_under_compile_and_autocast(form: str):
    torch._dynamo.reset()
    made = layer(form).keep_pruned(dense())
    found = []
    for run in (made, torch.compile(made, fullgraph=True, backend="aot_eager")):
        made.zero_grad()
        run(x()).square().sum().backward()
        found.append([each.grad for each in made.parameters()])
    assert_close(*found, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", BF16):
        y = made(x())
    y.float().sum().backward()
    assert made.pruned.grad.dtype == F32
    made.zero_grad()
    z = made(x())
    z += 1
    z.square().sum().backward()
    assert made.pruned.grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_it_learns_as_the_dense_weight_does(
    form: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    how = {"block": 128, "keep": 0.5} if form in BLOCKS else {}
    whole = nn.Linear(1024, 512, device="cuda", dtype=BF16)
    made = SparseLinear.from_dense(whole, form, **how)
    plain = made.to_linear()
    given = torch.randn(256, 1024, device="cuda", dtype=BF16)
    a, b = (given.clone().requires_grad_() for _ in range(2))
    dy = torch.randn(256, 512, device="cuda", dtype=BF16)
    for _ in range(3):
        a.grad = b.grad = None
        made.zero_grad()
        plain.zero_grad()
        y, right = made(a), plain(b)
        y.backward(dy)
        right.backward(dy)
    near: Any = {"atol": 0.1 if form in FP8 else 0.02, "rtol": 0.05}
    assert_close(y, right, **near)
    assert_close(a.grad, b.grad, atol=0.05, rtol=0.05)
    if form in LEARNS:
        assert made.values.grad is not None
        found = SparseLinear.from_matrix(made.weight.detach().map(lambda _: cast(Tensor, made.values.grad)))
        mask = SparseLinear.from_matrix(made.weight.detach().map(torch.ones_like)).to_dense() != 0
        assert_close(found.to_dense(), cast(Tensor, plain.weight.grad) * mask, atol=0.1, rtol=0.05)
        made.keep_pruned(whole)
        made(a).backward(dy)
        made.choose_again()
    with torch.no_grad():
        made(given)
        made(given)
        with no_sync():
            expected = made(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = made(given)
        graph.replay()
        assert torch.equal(inside, expected)
    assert_close(copy.deepcopy(made).cpu().to(F32)(given.cpu().float()), expected.cpu().float(), **near)


@pytest.mark.parametrize("form", FORMS)
def test_transformers_loads_a_model_that_makes_it(form: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")

    class Sparse(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            mlp = self.model.layers[0].mlp
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(mlp, name, SparseLinear.from_dense(getattr(mlp, name), form, **BLOCKS.get(form, {})))

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    made, ids = cast(Any, Sparse)(config).eval(), torch.arange(12).view(2, 6)
    made.save_pretrained(tmp_path)
    for options in ({}, {"dtype": BF16}):
        found: Any = cast(Any, Sparse).from_pretrained(tmp_path, **options).eval()
        near = 1e-5 if not options else 0.02  # from_pretrained lets the gated MLP run fused
        with torch.no_grad():
            assert_close(found(ids).logits.float(), made(ids).logits, atol=near, rtol=near)
