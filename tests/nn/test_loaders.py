"""Loaders of other libraries, from files of one BlockSparseLinear into a model with another pattern: equal outputs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsek as sk
from sparsek.nn import BlockSparseLinear
from tests.house.tools import need
from tests.refusals import refused
from tests.sums import alike

X = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))


def model(seed: int) -> nn.Sequential:
    """Two layers of random patterns; those of two seeds have equally many blocks."""
    return nn.Sequential(
        BlockSparseLinear.random(70, 100, (32, 16), 0.4, seed=seed, activation="gelu"),
        BlockSparseLinear.random(100, 30, 16, 0.5, seed=seed),
    )


def loader(name: str) -> Any:
    need(name)
    return import_module(name)


def called(accelerate: Any) -> nn.Module:
    made = model(2)
    made(X)
    return made


def on_meta(accelerate: Any) -> nn.Module:
    with torch.device("meta"):
        return model(2)


def empty(accelerate: Any) -> nn.Module:
    with accelerate.init_empty_weights():
        return model(2)


def empty_with_buffers(accelerate: Any) -> nn.Module:
    with accelerate.init_empty_weights(include_buffers=True):
        return model(2)


@pytest.mark.parametrize("begin", [called, empty, empty_with_buffers, on_meta])
@pytest.mark.parametrize("how", ["loaded", "placed", "dispatched"])
def test_accelerate(begin: Callable[[Any], nn.Module], how: str, tmp_path: Path) -> None:
    accelerate, right = loader("accelerate"), model(1)
    file, made = str(tmp_path / "model.safetensors"), begin(accelerate)
    accelerate.utils.save(right.state_dict(), file, safe_serialization=True)
    if how == "dispatched":
        made = accelerate.load_checkpoint_and_dispatch(made, file, device_map={"": "cpu"})
    elif how == "placed" or begin is not called:
        accelerate.load_checkpoint_in_model(made, file, device_map={"": "cpu"})
    else:
        accelerate.load_checkpoint_in_model(made, file)
    assert alike(made(X), right(X))
    made.double().float()
    assert alike(made(X), right(X))


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "and buffers"])
def test_layers_that_accelerate_moves_in_and_out_of_every_call(buffers: bool) -> None:
    accelerate, made, right = loader("accelerate"), model(2), model(2)
    accelerate.cpu_offload(made, execution_device=torch.device("cpu"), offload_buffers=buffers)
    patterns = set()
    for _ in range(3):
        assert alike(made(X), right(X))
        patterns.add(made[0]._seen[0].pattern)  # type: ignore[union-attr]
        weight: Any = made[0].weight  # which T5 looks at before the call
        assert weight.device.type == "meta"
    assert len(patterns) == 1  # which keeps the plans


def test_hooks_of_accelerate_stay_no_longer_than_they_are_there() -> None:
    """It sets a forward in each layer, and leaves that of the class there when its hooks are removed."""
    accelerate, dense = loader("accelerate"), nn.Sequential(nn.Linear(64, 128))
    accelerate.dispatch_model(dense, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert "a forward of its own" in sk.sparsify_(dense, sk.BlockSparse(16, 0.5)).skipped[0].why_not
    accelerate.hooks.remove_hook_from_submodules(dense)
    assert sk.sparsify_(dense, sk.BlockSparse(16, 0.5)).replaced
    x, right = torch.randn(3, 64), copy.deepcopy(dense)
    sk.densify_(right)
    accelerate.dispatch_model(dense, {"": "cpu"}, main_device="cpu", force_hooks=True)
    refused("0 has a forward of its own.*remove_hook_from_submodules", sk.densify_, dense)
    accelerate.hooks.remove_hook_from_submodules(dense)
    sk.densify_(dense)
    assert alike(dense(x), right(x))


def llama(seed: int) -> type:
    """A class of tiny models whose MLPs are sparse, in patterns of this seed."""
    transformers = loader("transformers")

    class Sparse(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                for name in ("gate_proj", "up_proj", "down_proj"):
                    old = getattr(layer.mlp, name)
                    new = BlockSparseLinear.random(
                        old.in_features, old.out_features, 16, 0.25, seed=seed, bias=False
                    )
                    setattr(layer.mlp, name, new)
            self.post_init()

    return Sparse


def logits(made: Any) -> Tensor:
    with torch.inference_mode():
        return made.eval()(torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}], ids=["", "device_map"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
def test_transformers(options: dict[str, Any], inference: bool, tmp_path: Path) -> None:
    transformers = loader("transformers")
    if options:
        need("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    right = llama(1)(config)
    right.save_pretrained(tmp_path / "first")
    with torch.inference_mode(inference):
        made: Any = llama(2).from_pretrained(tmp_path / "first", **options)
    assert alike(logits(made), logits(right), terms=1 << 14)
    made.double().float().save_pretrained(tmp_path / "second")
    again: Any = llama(3).from_pretrained(tmp_path / "second", **options)
    assert alike(logits(again), logits(right), terms=1 << 14)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu")
@pytest.mark.parametrize("seed", [None, 3], ids=["drawn", "loaded"])
def test_fsdp2_fills_a_model_that_was_made_on_meta(alone: None, seed: int | None) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        made: Any = model(2)
    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    made.to_empty(device="cpu")
    if seed is None:
        for layer in made:
            layer.reset_parameters()
            assert 0 < layer.values.full_tensor().abs().amax() <= 1
        right = model(2)
        right.load_state_dict(
            {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in made.state_dict().items()}
        )
    else:
        right = model(seed)
        set_model_state_dict(made, right.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert alike(made(X), right(X))
    made(X).sum().backward()


@pytest.mark.parametrize("by_rank_0", [False, True], ids=["", "cpu_ram_efficient_loading"])
def test_accelerate_wraps_in_fsdp2(by_rank_0: bool, alone: None) -> None:
    """With cpu_ram_efficient_loading it takes no model that saves buffers."""
    utils, made = loader("accelerate").utils, model(2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=by_rank_0, auto_wrap_policy="NO_WRAP"
    )
    ranks = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp"]),
        device=torch.device("cpu"),
        is_main_process=True,
        mixed_precision="no",
    )
    if by_rank_0:
        with pytest.raises(AttributeError, match="device_mesh"):
            utils.fsdp_utils.fsdp2_prepare_model(ranks, made)
        return
    made = utils.fsdp_utils.fsdp2_prepare_model(ranks, made)
    assert alike(made(X), model(2)(X))
    made(X).sum().backward()


@pytest.mark.gpu
def test_calls_after_loading_do_not_wait_for_a_gpu(
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    made, right, x = model(2).cuda(), model(1).cuda(), X.cuda()
    made(x)
    for name, tensor in made.state_dict().items():
        tensor.copy_(right.state_dict()[name])
    with torch.inference_mode():
        for _ in range(3):
            y = made(x)
        assert alike(y, right(x))
        with no_sync():
            y = made(x)
        assert alike(y, right(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(x)
        graph.replay()
        assert alike(y, right(x))


def test_the_readme_of_a_sparse_checkpoint_goes_with_its_sparse_layers(tmp_path: Path) -> None:
    transformers = loader("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes))
    other = transformers.BertForMaskedLM(made.config)
    readme, texts = tmp_path / "README.md", []
    for each in (made, other, made):
        sk.sparsify_(each, sk.BlockSparse(block=16, keep=0.5), filter_fn=lambda _, name: "output" in name)
        each.save_pretrained(tmp_path)
        texts.append(readme.read_text())
    assert texts[0] == texts[2] == texts[1].replace("BertForMaskedLM", "BertModel") != texts[1]
    own = [
        texts[0] + "More of the user.\n",
        texts[0].replace("transformers\ntags", "transformers\nlicense: mit\ntags"),
    ]
    for text in own:
        readme.write_text(text)
        other.save_pretrained(tmp_path)
        assert readme.read_text() == text
    sk.densify_(made)
    for text in own:
        readme.write_text(text)
        made.save_pretrained(tmp_path)
        assert readme.read_text() == text
    readme.write_text(texts[1])
    made.save_pretrained(save_directory=str(tmp_path), is_main_process=False)
    assert readme.exists()
    made.save_pretrained(str(tmp_path))
    assert not readme.exists()
    assert type(transformers.BertModel.from_pretrained(tmp_path).encoder.layer[0].output.dense) is nn.Linear
