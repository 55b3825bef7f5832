"""What is public of whole models, with valid arguments for the fuzz. See `engine.Call`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import torch

import sparsek as sk
from tests.fuzz.calls_ops import dense, function
from tests.fuzz.engine import Call, Made


def here(module: str) -> bool:
    return module.startswith("sparsek.models")


# Without filter_fn, and load_model's model: whatever can be called is called, and raises its own errors.


def _dense() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))


def _sparsify(random: Random) -> Made:
    given = {"config": sk.BlockSparse(16, 0.5), "card": random.choice((None, "h200"))}
    return sk.sparsify_, {"model": _dense(), **given, "tokens": 64, "skip_slower": False}


def _densify(random: Random) -> Made:
    layer = sk.nn.BlockSparseLinear.random(32, 64, 16, 0.5)
    return sk.densify_, {"model": torch.nn.Sequential(layer)}


def _prune(random: Random) -> Made:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))
    given = {
        "config": sk.BlockSparse(16, 0.5),
        "calibration": [dense(48, 32)],
        "device": "cpu",
        "budget": "owl",
    }
    if random.random() < 0.3:
        given |= {"config": random.choice((sk.Float8(sk.SemiSparse()), sk.Float8())), "budget": "uniform"}
    elif random.random() < 0.3:
        given |= {"config": "auto", "max_error": 0.5, "card": "h200", "tokens": 64, "budget": "uniform"}
    return sk.prune, {"model": model, **given, "method": "wanda", "reconstruct": "layer"}


def _sparse(random: Random) -> torch.nn.Module:
    model = _dense()
    sk.sparsify_(model, random.choice((sk.BlockSparse(16, 0.5), sk.SemiSparse(), sk.Float8())))
    return model


def _save_model(random: Random) -> Made:
    return sk.save_model, {"model": _sparse(random), "directory": Path("saved")}


def _load_model(random: Random) -> Made:
    folder = Path("loaded")
    if not folder.exists():
        sk.save_model(_sparse(random), folder)
    return partial(sk.load_model, _dense()), {"directory": folder, "device": "cpu"}


BLOCKS = {"block": "int sequence", "keep": "int"}

CALLS: dict[str, Call] = {
    "prune": Call(_prune, {"reconstruct": "none"}, every=20),
    "sparsify_": Call(_sparsify, {"config": "dict", "card": "text"}, every=10),
    "densify_": Call(_densify, every=10),
    "save_model": Call(_save_model, {"directory": "text"}, 10, (OSError,)),
    "load_model": Call(_load_model, {"directory": "text", "device": "none text"}, 10, (OSError,)),
    "BlockSparse": Call(function(sk.BlockSparse, block=32, keep=0.5, scope="row"), BLOCKS),
    "BlockSemiSparse": Call(function(sk.BlockSemiSparse, block=64, keep=0.5, scope="row"), BLOCKS),
    "Float8": Call(function(sk.Float8, of=sk.SemiSparse()), {"of": "none"}),
    "BlockSparse.from_dict": Call(function(sk.BlockSparse.from_dict, data=sk.BlockSparse().to_dict())),
    "SemiSparse.from_dict": Call(function(sk.SemiSparse.from_dict, data=sk.SemiSparse().to_dict())),
    "BlockSemiSparse.from_dict": Call(
        function(sk.BlockSemiSparse.from_dict, data=sk.BlockSemiSparse().to_dict())
    ),
    "Float8.from_dict": Call(function(sk.Float8.from_dict, data=sk.Float8().to_dict()), {"data": "any"}),
}

# What has no arguments to spoil.
REASONS = {"SemiSparse": "takes no arguments", "to_dict": "takes no arguments"}
