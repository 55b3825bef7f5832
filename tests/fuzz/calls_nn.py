"""Every public function of layers, with valid arguments for the fuzz. See `engine.Call`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from tests.fuzz.calls_ops import (
    ATTENTION,
    BF16,
    BIAS,
    CU,
    LAYER,
    PLACE,
    RESIDUAL,
    X,
    bsr,
    dense,
    fp8,
    function,
    mask,
    policy,
    two_four,
)
from tests.fuzz.engine import Call, Made


def here(module: str) -> bool:
    return module.startswith("sparsek.nn")


@lru_cache
def layer() -> sk.nn.BlockSparseLinear:
    return sk.nn.BlockSparseLinear.random(64, 128, 32, 0.5)


@lru_cache
def attending(**options: Any) -> sk.nn.SparseAttention:
    return sk.nn.SparseAttention(32, 4, policy(**options))


def fresh(name: str, make: Callable[[], Any], /, **arguments: Any) -> Callable[[Random], Made]:
    """A method of a layer of its own at each call."""
    return lambda random: (getattr(make(), name), dict(arguments))


def blocked() -> Any:
    return sk.nn.BlockSparseLinear.random(64, 128, 32, 0.5)


def semi() -> Any:
    return sk.nn.SparseLinear(two_four())


def _reset(random: Random) -> Made:
    made = random.choice((blocked, semi, lambda: sk.nn.SparseLinear(fp8())))()
    return made.reset_parameters, {"generator": torch.Generator().manual_seed(0)}


def replaced(make: Callable[[], Any]) -> Callable[[Random], Made]:
    """A call of a layer whose tensors were set to others, as far as torch lets them be set."""

    def made(random: Random) -> Made:
        layer = make()
        x = X.to(layer.bias.dtype)

        def called(**tensors: Any) -> Any:
            try:
                for name, given in tensors.items():
                    parameter = name in layer._parameters and isinstance(given, Tensor)
                    if parameter and given.is_mkldnn and torch._C._are_functorch_transforms_active():
                        raise TypeError("a wrapper of torch.func hides what it is")
                    setattr(layer, name, torch.nn.Parameter(given, False) if parameter else given)
            except Exception as error:
                raise sk.InvalidInput("torch refuses it") from error
            return layer(x)

        return called, layer.state_dict()

    return made


def loaded(make: Callable[[], Any], assign: bool) -> Callable[[Random], Made]:
    """A call of a layer that has loaded tensors."""

    def made(random: Random) -> Made:
        layer = make()
        x = X.to(layer.bias.dtype)

        def called(**tensors: Any) -> Any:
            try:
                layer.load_state_dict(tensors, assign=assign)
            except RuntimeError as error:  # torch's own, about what a layer refuses
                if not str(error).startswith("Error(s) in loading"):
                    raise
                raise sk.InvalidInput("it is refused") from error
            return layer(x)

        return called, {name: x.clone() for name, x in layer.state_dict().items()}

    return made


GATE = sk.policies.MoBAGate(topk=1, block=64)
LAYERS: dict[str, Callable[[], Any]] = {
    "BSR": blocked,
    "2:4": lambda: sk.nn.SparseLinear(two_four(), BIAS.clone()),
    "BSR24": lambda: sk.nn.SparseLinear(two_four(sk.BSR24), BIAS.clone()),
    "FP8": lambda: sk.nn.SparseLinear(fp8(), BIAS.to(BF16)),
}
ANY: dict[str, str] = dict.fromkeys(
    ("bias", "values", "codes", "scale", "metadata", "indptr", "indices"), "any"
)


def scheduled() -> Any:
    return sk.nn.PatternSchedule(blocked(), end=10, every=1, keep=0.25, swapped=0.1, by="random")


def _recorded(random: Random) -> Made:
    def recorded(model: Any) -> None:
        with sk.nn.dense_gradients(model):
            pass

    return recorded, {"model": torch.nn.Sequential(blocked())}


CALLS: dict[str, Call] = {
    "nn.BlockSparseLinear": Call(
        function(
            sk.nn.BlockSparseLinear,
            pattern=bsr().pattern,
            bias=True,
            activation="relu",
            dtype=BF16,
            device="cpu",
        ),
        {**PLACE, "activation": "none text", "dtype": "none dtype"},
    ),
    "nn.BlockSparseLinear.random": Call(
        function(
            sk.nn.BlockSparseLinear.random,
            in_features=64,
            out_features=128,
            block=32,
            density=0.5,
            seed=1,
            bias=True,
            activation=None,
            dtype=None,
            device="cpu",
        ),
        {**PLACE, "block": "int sequence", "activation": "text", "dtype": "dtype", "density": "int"},
    ),
    "nn.BlockSparseLinear.from_dense": Call(
        function(
            sk.nn.BlockSparseLinear.from_dense,
            dense=dense(128, 64),
            block=32,
            keep=0.5,
            scope="row",
            activation=None,
        ),
        {"block": "int sequence", "keep": "none int", "activation": "text", "scope": "none"},
    ),
    "nn.BlockSparseLinear.from_bsr": Call(
        function(sk.nn.BlockSparseLinear.from_bsr, a=bsr(), bias=BIAS, activation="gelu"), LAYER
    ),
    "nn.BlockSparseLinear.forward": Call(function(layer(), x=X, residual=RESIDUAL), LAYER),
    "nn.BlockSparseLinear.reset_parameters": Call(_reset, {"generator": "none"}),
    "nn.SparseAttention": Call(
        function(
            sk.nn.SparseAttention,
            dim=32,
            heads=4,
            mask=policy(window=16),
            kv_heads=2,
            head_dim=8,
            bias=False,
            softcap=5.0,
            sink_logits=True,
            dtype=None,
            device="cpu",
        ),
        {
            **PLACE,
            "softcap": "float int",
            "mask": "none",
            "kv_heads": "none",
            "head_dim": "none",
            "dtype": "dtype",
        },
    ),
    "nn.SparseAttention.forward": Call(
        function(attending(window=16), x=dense(2, 100, 32), mask=None, cu_seqlens=None)
    ),
    "nn.SparseAttention.forward (packed)": Call(
        function(attending(window=16), x=dense(100, 32), cu_seqlens=CU),
        {"cu_seqlens": "none"},  # with one dim more x is a batch
    ),
    "nn.SparseAttention.forward (top-k)": Call(
        function(attending(topk=1), x=dense(2, 100, 32), mask=mask()), ATTENTION
    ),
    "nn.MoBA": Call(
        function(
            sk.nn.MoBA,
            dim=32,
            heads=4,
            mask=GATE,
            kv_heads=2,
            head_dim=8,
            bias=False,
            dtype=None,
            device="cpu",
        ),
        {**PLACE, "mask": "none", "kv_heads": "none", "head_dim": "none", "dtype": "dtype"},
    ),
    "nn.MoBA.forward": Call(
        function(sk.nn.MoBA(32, 4, GATE), x=dense(2, 100, 32), mask=mask(), cu_seqlens=None), ATTENTION
    ),
    "nn.NativeSparseAttention": Call(
        function(
            sk.nn.NativeSparseAttention,
            dim=32,
            heads=4,
            mask=sk.policies.NSA(topk=4),
            window=16,
            kv_heads=2,
            head_dim=8,
            shared_kv=True,
            learned=False,
            bias=False,
            dtype=None,
            device="cpu",
        ),
        {**PLACE, "mask": "none", "kv_heads": "none", "head_dim": "none", "dtype": "dtype"},
    ),
    "nn.NativeSparseAttention.forward": Call(
        function(
            sk.nn.NativeSparseAttention(32, 4, sk.policies.NSA(topk=4)),
            x=dense(2, 100, 32),
            mask=None,
            cu_seqlens=None,
        ),
        every=10,
    ),
    "nn.BlockSparseLinear.set_pattern": Call(
        fresh("set_pattern", blocked, pattern=bsr().pattern, optimizer=None),
        {"pattern": "tensor", "optimizer": "sequence"},
    ),
    "nn.BlockSparseLinear.prune_": Call(
        fresh("prune_", blocked, keep=0.25, by="magnitude", optimizer=None, scope="row"),
        {"keep": "int", "optimizer": "sequence"},
    ),
    "nn.BlockSparseLinear.grow_": Call(
        fresh("grow_", blocked, blocks=2, by="random", optimizer=None, generator=None),
        {"blocks": "float", "optimizer": "sequence", "generator": "Generator"},
    ),
    "nn.dense_gradients": Call(_recorded),
    "nn.PatternSchedule": Call(
        function(
            sk.nn.PatternSchedule,
            model=blocked(),
            end=10,
            begin=2,
            every=3,
            keep=0.25,
            swapped=0.5,
            by="gradient",
            generator=None,
        ),
        {"model": "any", "keep": "none int", "swapped": "int", "generator": "Generator"},
    ),
    "nn.PatternSchedule.share": Call(fresh("share", scheduled, name="", step=3), {"step": "none"}),
    "nn.PatternSchedule.step": Call(fresh("step", scheduled, optimizer=None), {"optimizer": "sequence"}),
    "nn.PatternSchedule.load_state_dict": Call(
        fresh("load_state_dict", scheduled, state={"steps": 3, "first": {"": 0.5}})
    ),
    "nn.distillation_loss": Call(
        function(
            sk.nn.distillation_loss,
            student=dense(3, 40),
            teacher=dense(3, 40),
            temperature=2.0,
            mask=torch.ones(3, dtype=torch.bool),
            of="logits",
        ),
        {"temperature": "int", "mask": "none dtype"},
    ),
    "nn.SparseLinear": Call(
        function(sk.nn.SparseLinear, weight=two_four(), bias=BIAS, activation="gelu"), LAYER
    ),
    "nn.SparseLinear (FP8)": Call(
        function(sk.nn.SparseLinear, weight=fp8(), bias=BIAS.to(BF16), activation=None), LAYER
    ),
    "nn.SparseLinear.from_dense": Call(
        function(sk.nn.SparseLinear.from_dense, dense=dense(128, 64), config="semi24", activation=None),
        {"dense": "meta", "activation": "text"},
    ),
    "nn.SparseLinear.from_dense (blocks)": Call(
        function(
            sk.nn.SparseLinear.from_dense,
            dense=dense(128, 64),
            config="bsr_fp8",
            block=32,
            keep=0.5,
            scope="row",
            activation=None,
        ),
        {"dense": "meta", "block": "int sequence", "keep": "int", "activation": "text", "scope": "none"},
    ),
    "nn.SparseLinear.from_matrix": Call(
        function(sk.nn.SparseLinear.from_matrix, weight=two_four(sk.BSR24), bias=BIAS, activation=None),
        LAYER | {"weight": "BSR Semi24 BSR24 Quantized"},
    ),
    "nn.SparseLinear.forward": Call(fresh("__call__", semi, x=X, residual=RESIDUAL), LAYER),
    **{
        f"nn.SparseLinear ({name}, other tensors)": Call(replaced(LAYERS[name]), ANY, every=4)
        for name in LAYERS
    },
    **{
        f"nn.SparseLinear ({name}, {'assigned' if assign else 'loaded'})": Call(
            loaded(LAYERS[name], assign), ANY, every=4
        )
        for name in LAYERS
        for assign in (False, True)
    },
    "nn.SparseLinear.reset_parameters": Call(_reset, {"generator": "none"}),
    "nn.SparseLinear.keep_pruned": Call(
        fresh("keep_pruned", semi, dense=dense(128, 64), decay=1e-4), {"dense": "none Linear", "decay": "int"}
    ),
    "nn.SparseLinear.choose_again": Call(
        fresh("choose_again", semi, scores=dense(128, 64), optimizer=None), {"scores": "none"}
    ),
    "nn.SparseLinear.to_dense": Call(fresh("to_dense", semi, dtype=BF16), {"dtype": "none dtype"}),
}

# What has no arguments to spoil, or is drawn by another name.
INHERITED = ("from_matrix", "keep_pruned", "choose_again", "to_dense", "form_of_bsr")
REASONS = {
    "extra_repr": "takes no arguments",
    "to_linear": "takes no arguments",
    "gradients": "takes no arguments",
    "callback": "takes no arguments",
    "state_dict": "takes no arguments",
    "distributed.check_patterns": "in calls_distributed.py",
    "nn.SparseLinear.form_of_bsr": "for the layers: a class",
    **{f"nn.BlockSparseLinear.{name}": "that of SparseLinear" for name in INHERITED},
}
