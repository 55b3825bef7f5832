"""Libraries that meet a model with sparse layers: they work, or say what would. Rows of docs/how-to/clients.md."""

import copy
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import SparseLinear
from tests.house.tools import need
from tests.models.test_gated_experts import HALF, Gated

FORMS = (sk.BlockSparse(block=16, keep=0.5), sk.SemiSparse(), sk.Float8(sk.SemiSparse()))
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def dense() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 8))


def sparse(form: Any = FORMS[0]) -> Any:
    model = dense()
    sk.sparsify_(model, {"[02]": form})
    return model


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SparseLinear) or super().is_leaf_module(m, module_qualified_name)


@each_form
def test_symbolic_tracing_takes_leaves(form: Any) -> None:
    model = sparse(form)
    with pytest.raises(InvalidInput, match=r"Tracer\.is_leaf_module\), or use torch\.export"):
        torch.fx.symbolic_trace(model)
    made = torch.fx.GraphModule(model, Leaves().trace(model))
    assert torch.equal(made(X), model(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@each_form
def test_quantizers_of_linear_layers_leave_sparse_ones(form: Any) -> None:
    model = sparse(form)
    made = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert type(made[0]) is type(model[0])
    assert type(made[3]) is not nn.Linear
    assert torch.equal(made[:3](X), model[:3](X))


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "parametrize values": lambda layer: parametrize.register_parametrization(layer, "values", Twice()),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "assigned": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(128, 64))),
    "initialised": lambda layer: nn.init.xavier_uniform_(layer.weight),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", WEIGHTS)
@each_form
def test_what_replaces_a_weight_raises_and_changes_nothing(form: Any, how: str) -> None:
    model = sparse(form)
    before = model(X)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        WEIGHTS[how](model[0])
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_torch_prunes_stored_values(form: Any) -> None:
    model = sparse(form)
    prune.l1_unstructured(model[0], "values", 0.5)
    half = model[0].to_dense()
    assert int((half != 0).sum()) == model[0].values.numel() // 2
    right = dense()[0]
    right.weight.data, right.bias.data = half.detach(), model[0].bias.data
    torch.testing.assert_close(model[0](X), right(X))
    prune.remove(model[0], "values")
    assert torch.equal(model[0].to_dense(), half)


@each_form
def test_replicas_of_data_parallel_give_the_same(form: Any) -> None:
    layer = sparse(form)[0]
    replica = layer._replicate_for_data_parallel()  # as nn.DataParallel, which fills it with copies
    for name, each in (*layer.named_parameters(), *layer.named_buffers()):
        setattr(replica, name, each.detach().clone())
    assert torch.equal(replica(X), layer(X))


@pytest.mark.parametrize("reentrant", [False, True])
@each_form
def test_activations_computed_again_give_the_same_gradients(form: Any, reentrant: bool) -> None:
    found = []
    for wrapped in (False, True):
        model, x = sparse(form), X.clone().requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if wrapped else model(x)
        y.square().sum().backward()
        found.append([x.grad, *(each.grad for each in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@each_form
def test_torch_saves_models_and_state_dicts(form: Any) -> None:
    model = sparse(form)
    loads: Any = torch.load
    for what, options in ((model, {"weights_only": False}), (model.state_dict(), {"weights_only": True})):
        torch.save(what, file := io.BytesIO())
        file.seek(0)
        found = loads(file, **options)
        if what is not model:
            (made := sparse(form)).load_state_dict(found)
            found = made
        assert torch.equal(found(X), model(X))
    assert torch.equal(copy.deepcopy(model).share_memory()(X), model(X))


@each_form
def test_readers_of_plain_tensors_find_none_that_fits(form: Any, tmp_path: Path) -> None:
    """As those of vLLM, and converters to GGUF: a tensor of the name of a dense weight must have its shape."""
    sk.save_model(sparse(form), tmp_path)
    file = importlib.import_module("safetensors.torch").load_file(tmp_path / "model.safetensors")
    wanted = dict(dense().named_parameters())
    for name in ("0.weight", "2.weight"):
        with pytest.raises(RuntimeError):
            wanted[name].data.copy_(file[name])
    assert not {"0.weight", "2.weight"} & {name for name, each in file.items() if each.numel()}
    assert file["3.weight"].shape == wanted["3.weight"].shape
    sk.densify_(model := sparse(form))
    assert {name: each.shape for name, each in model.state_dict().items()} == {
        name: each.shape for name, each in wanted.items()
    }


@each_form
def test_flop_counters_count_stored_values(form: Any) -> None:
    importlib.import_module("sparsek.integrations.flop_counter")
    with FlopCounterMode(display=False) as counter:
        sparse(form)(X)
    of_layer = 2 * 4 * 64 * 128
    assert counter.get_total_flops() == of_layer + 2 * 4 * 64 * 8  # two layers by half
    model = sparse(FORMS[0])[:1]
    with FlopCounterMode(display=False) as counter:
        model(X.clone().requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 3 * of_layer / 2
    counts = counter.get_flop_counts()["Global"]
    assert {str(op): n for op, n in counts.items()} == {
        "sparsek.spmm": of_layer,
        "sparsek.sddmm": of_layer / 2,
    }
    a = sk.random_bsr(64, 64, block=16, density=0.25)
    with FlopCounterMode(display=False) as counter:
        sk.mlp(X, a, a)
    assert counter.get_total_flops() == 2 * 2 * a.values.numel() * len(X)


def test_styles_of_tensor_parallelism_refuse() -> None:
    styles = importlib.import_module("torch.distributed.tensor.parallel")
    for style in (styles.ColwiseParallel(), styles.RowwiseParallel()):
        with pytest.raises(NotImplementedError, match=r"nn\.Linear"):
            style._apply(sparse()[0], None)


@each_form
def test_hooks_of_diffusers_offload_and_cast(form: Any) -> None:
    need("diffusers")
    hooks = importlib.import_module("diffusers.hooks")
    model, cpu = sparse(form).requires_grad_(False), torch.device("cpu")
    expected = model(X)
    hooks.apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    torch.testing.assert_close(model(X), expected)
    model = sparse(form)
    hooks.apply_layerwise_casting(model[:2], storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    torch.testing.assert_close(model(X), expected)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_parametrized_modules_keep_their_class() -> None:
    made: Any = Gated(nn.SiLU())
    x = torch.randn(4, 32)
    made.factor = nn.Parameter(torch.ones(()))
    parametrize.register_parametrization(made, "factor", Doubled())
    sk.sparsify_(made, HALF)
    parametrize.remove_parametrizations(made, "factor")
    assert type(made) is Gated
    with torch.no_grad():
        y = made(x)
        sk.densify_(made)
        torch.testing.assert_close(made(x), y)
