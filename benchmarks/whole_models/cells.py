"""The cells of the experiment, each a model pruned in one way to one share, after one stage of repair."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import sparsek as sk
from benchmarks.whole_models.models import Model
from examples.prune_and_repair import distill, ruled
from sparsek.core.clock import time_rounds
from sparsek.models.stream import stacks_of

FORMS = ("blocks of 32", "blocks of 64", "blocks of 128", "2:4", "unstructured")
KEEPS = (0.5, 0.25, 0.75, 0.9)
STAGES = ("magnitude", "wanda", "obs", "layer", "block", "distilled", "speed")


FFN = "minilm-ffn"  # MiniLM with dense attention


class Cell(NamedTuple):
    """What one record is of.

    stage: "magnitude", "wanda" and "obs" are one-shot; "layer" is "obs" and least squares for each layer, "block" that
    and Adam for each transformer block, "distilled" that and training against the dense model. "speed" is the time of
    the whole model.
    """

    model: str
    form: str
    keep: float
    stage: str


def cells(models: Sequence[str]) -> list[Cell]:
    """All cells, those of half of the weights first, and all stages of one form and share together."""
    return [
        Cell(model, form, keep, stage)
        for keep in KEEPS
        for model in models
        for form in FORMS
        for stage in STAGES
        if (form != "2:4" or keep == 0.5)
        and (form != "unstructured" or (stage in ("magnitude", "wanda", "distilled") and model != FFN))
    ]


def config_of(cell: Cell) -> Any:
    if cell.form == "2:4":
        config: Any = sk.SemiSparse()
    else:
        config = sk.BlockSparse(int(cell.form.rpartition(" ")[2]), cell.keep)
    return ruled(config, "ffn" if cell.model == FFN else "all")


def pruned(of: Model, cell: Cell) -> Any:
    """The pruned model of a cell, before distillation."""
    student = copy.deepcopy(of.dense)
    stage = "block" if cell.stage == "distilled" else cell.stage
    if cell.form == "unstructured":
        drop(student, cell.keep, None if stage == "magnitude" else of.calibration)
        return student
    one_shot = stage in ("magnitude", "wanda", "obs")
    reconstruct = stage if stage in ("layer", "block") else None
    method = stage if one_shot else "obs"
    # Time depends on the pattern alone.
    calibration = of.calibration[:1] if stage == "speed" else of.calibration
    sk.prune(
        student,
        config_of(cell),
        calibration=None if method == "magnitude" else calibration,
        method=cast(Any, method),
        reconstruct=cast(Any, reconstruct),
    )
    return student


def measure(of: Model, cell: Cell, minutes: float, rate: float) -> dict[str, Any]:
    """What a record has of a cell: scores on test text, or times; the seconds that it took; the learning curve.

    `minutes` and `rate` are of distillation.
    """
    begin = time.perf_counter()
    student = pruned(of, cell)
    found: dict[str, Any] = {"stored": stored_share(student, of.dense)}
    if cell.stage == "speed":
        return found | times(of, student)
    if cell.stage == "distilled":
        curve: list[list[float]] = []

        def check(seconds: float, step: int) -> None:
            scores = [round(x, 4) for x in of.score(student, "validation").values()]
            curve.append([round(seconds, 1), step, *scores])
            print(*cell, *curve[-1], flush=True)

        count = distill(student, of.dense, of.train(), of.loss, minutes=minutes, rate=rate, check=check)
        found |= {"minutes": minutes, "rate": rate, "steps": count, "curve": curve}
    scores = {name: round(value, 5) for name, value in of.score(student, "test").items()}
    return found | scores | {"seconds": round(time.perf_counter() - begin, 1)}


def stored_share(student: nn.Module, dense: nn.Module) -> float:
    """The stored share of the elements of the pruned layers."""
    stored = total = 0
    known = dict(dense.named_modules())
    for name, layer in student.named_modules():
        if isinstance(layer, sk.nn.SparseLinear):
            stored, total = stored + layer.values.numel(), total + cast(Any, known[name]).weight.numel()
        elif hasattr(layer, "kept_share"):
            size = cast(Any, layer).weight.numel()
            stored, total = stored + round(cast(Any, layer).kept_share * size), total + size
    return round(stored / total, 4)


@torch.no_grad()
def drop(model: nn.Module, keep: float, calibration: list[dict[str, Tensor]] | None) -> None:
    """Set all but a share of each row to zero, by |W| sqrt(E x^2) (Wanda, arXiv:2306.11695) or |W|, block after block.

    Dropped elements stay zero in training: their gradients are set to zero.
    """
    for stack in stacks_of(model):
        for block in stack.blocks.values():
            layers = [each for each in block.modules() if isinstance(each, nn.Linear)]
            norms = {}
            if calibration is not None:
                norms = squares(model, layers, calibration)
            for layer in layers:
                weight = cast(Any, layer).weight
                scores = weight.square() * norms[layer] if layer in norms else weight.square()
                least = round((1 - keep) * weight.shape[1])
                order = scores.argsort(dim=1, stable=True)
                mask = torch.ones_like(weight).scatter_(1, order[:, :least], 0)
                weight.mul_(mask)
                weight.register_hook(lambda gradient, mask=mask: gradient * mask)
                cast(Any, layer).kept_share = 1 - least / weight.shape[1]


def squares(model: nn.Module, layers: list[Any], calibration: list[dict[str, Tensor]]) -> dict[Any, Tensor]:
    """The sums over all tokens of the squared inputs [K] of layers."""
    found: dict[Any, Tensor] = {}
    with observed(layers, found) as seen:
        for batch in calibration:
            seen["mask"] = batch.get("attention_mask")
            model(**batch)
    return found


@contextmanager
def observed(layers: list[Any], found: dict[Any, Tensor]) -> Iterator[dict[str, Any]]:
    seen: dict[str, Any] = {}

    def see(layer: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].float().square()
        x = x if seen["mask"] is None else x * seen["mask"][:, :, None]
        found[layer] = found.get(layer, 0) + x.flatten(0, -2).sum(0)

    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def times(of: Model, student: Any) -> dict[str, Any]:
    """Milliseconds of a forward pass of the whole model, dense and pruned, in interleaved rounds: calls, and graphs.

    In bfloat16 on a GPU. `graph` has a CUDA graph of each, or why there is none.
    """
    device = of.speed.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = {"dense": copy.deepcopy(of.dense).to(dtype), "pruned": student.to(dtype)}
    with torch.inference_mode():
        calls = {name: (lambda model=model: model(input_ids=of.speed)) for name, model in models.items()}
        found: dict[str, Any] = {
            "tokens": of.speed.numel(),
            "eager_ms": medians(calls, device),
            "graph_ms": None,
        }
        if device.type == "cuda":
            try:
                graphs = {name: captured(call) for name, call in calls.items()}
            except Exception as error:  # a graph that cannot be captured is a result
                found["graph_error"] = str(error).splitlines()[0][:200]
                torch.cuda.synchronize(device)
            else:
                found["graph_ms"] = medians({name: graph.replay for name, graph in graphs.items()}, device)
    return found


def medians(calls: dict[str, Any], device: torch.device) -> dict[str, float]:
    return {name: round(each.median, 4) for name, each in time_rounds(calls, device=device, rounds=7).items()}


def captured(call: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
