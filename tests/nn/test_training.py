"""Schedules of patterns in a plain loop, in Trainers and under DistributedDataParallel, and losses of a teacher."""

import copy
import json
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear
from tests.house.tools import need
from tests.nn.test_loading import ranks
from tests.nn.test_set_pattern import GRID, data, layer, mask, train


def test_a_schedule_prunes_along_the_cubic_curve() -> None:
    made = layer(torch.ones(GRID, dtype=torch.bool))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    schedule = sk.nn.PatternSchedule(nn.Sequential(made), begin=2, end=10, every=4, keep=0.2)
    changed = []
    for i in range(12):
        with schedule.gradients():
            train(made, optimizer, range(i, i + 1))
        if schedule.step(optimizer):
            t = (i + 1 - 2) / 8
            assert made.weight.nnzb == round(20 * (0.2 + 0.8 * (1 - t) ** 3))
            changed.append(i + 1)
    assert changed == [2, 6, 10]
    assert made.weight.nnzb == 4
    assert schedule.share("0") == pytest.approx(0.2)
    assert optimizer.state[made.values]["exp_avg"].shape == made.values.shape


@pytest.mark.parametrize("by", ["gradient", "random", "union"])
def test_a_schedule_swaps_blocks_and_resumes(by: Any) -> None:
    def run(made: BlockSparseLinear, schedule: sk.nn.PatternSchedule, steps: range) -> None:
        for i in steps:
            with schedule.gradients():
                train(made, optimizers[id(made)], range(i, i + 1))
            schedule.step(optimizers[id(made)])

    first, second = layer(), layer()
    draws = [torch.Generator().manual_seed(3) for _ in range(3)]
    share: Any = {"keep": 0.3} if by == "union" else {"swapped": 0.5}
    optimizers = {id(x): torch.optim.SGD(x.parameters(), lr=0.1, momentum=0.9) for x in (first, second)}
    a, b = (
        sk.nn.PatternSchedule(x, end=9, every=2, by=by, generator=draw, **share)
        for x, draw in zip((first, second), draws[:2], strict=True)
    )
    before = first.pattern
    run(first, a, range(10))
    assert first.weight.nnzb == (6 if by == "union" else before.nnzb)
    assert not first.pattern.same_as(before)
    run(second, b, range(4))
    resumed = sk.nn.PatternSchedule(second, end=9, every=2, by=by, generator=draws[2], **share)
    resumed.load_state_dict(json.loads(json.dumps(b.state_dict())))
    run(second, resumed, range(4, 10))
    assert second.pattern.same_as(first.pattern)
    torch.testing.assert_close(second.values.detach(), first.values.detach())


def test_a_swap_drops_the_smallest_and_takes_the_largest_gradients() -> None:
    made, other = layer(), layer()
    schedule = sk.nn.PatternSchedule(made, end=100, every=10, swapped=0.3)
    x, y = data(0)
    with pytest.raises(InvalidInput, match=r"schedule\.gradients"):
        schedule.step()
    assert schedule.steps == 0
    with schedule.gradients(), sk.nn.dense_gradients(other):
        for each in (made, other):
            functional.mse_loss(each(x), y).backward()
    count = made.weight.nnzb
    new = round(0.3 * count)
    assert schedule.step()
    other.prune_((count - new) / 20, scope="global").grow_(new)
    assert made.pattern.same_as(other.pattern)
    assert made.weight.nnzb == count


@pytest.mark.parametrize("kind", ["swapped", "keep", "union"])
def test_gradients_with_nan_or_inf_choose_no_blocks(kind: str) -> None:
    """A GradScaler skips such a step of the optimizer, and a loop then calls the schedule all the same."""
    made = layer()
    before, cells = made.pattern, made.pattern.grid[0] * made.pattern.grid[1]
    keep = (before.nnzb - 2) / cells
    options: dict[str, dict[str, Any]] = {
        "swapped": {"swapped": 0.5},
        "keep": {"keep": keep, "swapped": 0.5},
        "union": {"keep": keep, "by": "union"},
    }
    schedule = sk.nn.PatternSchedule(made, end=9, every=2, **options[kind])
    for wrong in (torch.inf, torch.nan):
        with schedule.gradients():
            (made(data(0)[0]).sum() * wrong).backward()
        assert schedule.step() or wrong is torch.nan
        assert made.pattern.same_as(before)
        with sk.nn.dense_gradients(made):
            (made(data(0)[0]).sum() * wrong).backward()
        with pytest.raises(InvalidInput, match="NaN or Inf"):
            made.grow_(2)
        assert made.pattern.same_as(before)


def test_wrong_schedules_are_refused() -> None:
    for name, bad in (("end", 0), ("every", 0), ("begin", 0), ("keep", 2), ("swapped", -1), ("by", "x")):
        with pytest.raises(InvalidInput, match=name):
            sk.nn.PatternSchedule(layer(), **{"end": 5, "keep": 0.5, name: bad})
    with pytest.raises(InvalidInput, match=r"keep is 0.75, and no layer stores more than 0.25 of its blocks"):
        sk.nn.PatternSchedule(sk.nn.BlockSparseLinear.random(128, 128, 32, 0.25), end=6, keep=0.75)
    with pytest.raises(InvalidInput, match="neither keep nor swapped"):
        sk.nn.PatternSchedule(layer(), end=5)
    with pytest.raises(InvalidInput, match="no BlockSparseLinear"):
        sk.nn.PatternSchedule(nn.Linear(3, 3), end=5, keep=0.5)
    options: list[dict[str, Any]] = [{}, {"keep": 0.5, "swapped": 0.1}]
    for more in options:
        with pytest.raises(InvalidInput, match="union"):
            sk.nn.PatternSchedule(layer(), end=5, by="union", **more)
    schedule = sk.nn.PatternSchedule(layer(), end=5, keep=0.5, generator=torch.Generator())
    good = schedule.state_dict()
    for bad in (
        {},
        {"steps": 1, "first": {"x": 0.5}},
        {"steps": -1, "first": {"": 0.5}},
        *({**good, "steps": 3, "generator": x} for x in (None, "x", "00", 3)),
    ):
        with pytest.raises(InvalidInput):
            schedule.load_state_dict(bad)
    assert schedule.state_dict() == good
    with pytest.raises(InvalidInput, match="generator"):
        sk.nn.PatternSchedule(layer(), end=5, keep=0.5).load_state_dict(good)


def test_a_union_stores_the_largest_norms_and_the_largest_gradients() -> None:
    made, other = layer(), layer()
    schedule = sk.nn.PatternSchedule(made, end=100, every=10, keep=0.25, by="union")
    x, y = data(0)
    with schedule.gradients(), sk.nn.dense_gradients(other):
        for each in (made, other):
            functional.mse_loss(each(x), y).backward()
    count = round(schedule.share("", 1) * 20)
    norms = other.weight.detach().block_norms()
    kept = torch.zeros(20, dtype=torch.bool)
    stored = mask(0.5, 1).view(-1).nonzero()[:, 0]
    kept[stored[norms.topk(count).indices]] = True
    other.set_pattern(torch.zeros(GRID, dtype=torch.bool))
    other.grow_(count)
    grown = sk.BSR.unchecked(other.pattern, torch.ones(count, 32, 16)).to_dense()[::32, ::16].bool()
    assert schedule.step()
    wanted = kept.view(GRID) | grown
    assert made.pattern.same_as(layer(wanted).pattern)
    assert made.weight.nnzb > count


def recall(made: nn.Module) -> list[Tensor]:
    return [x.clone() for x in made.state_dict().values()]


class Model(nn.Module):
    """Two layers and a loss, as Trainers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (BlockSparseLinear.random(64, 64, 16, 1.0, seed=seed) for seed in (1, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return {"loss": functional.mse_loss(y, labels)}


def batches(number: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{name: torch.randn(64, generator=draw) for name in ("x", "labels")} for _ in range(number)]


def scheduled(model: nn.Module) -> sk.nn.PatternSchedule:
    return sk.nn.PatternSchedule(model, end=6, begin=2, every=2, keep=0.25, swapped=0.3)


def plain(steps: int, parts: int = 2) -> list[Tensor]:
    """What Trainers are to do: `parts` batches of four a step."""
    model, found = Model(), batches(64)
    schedule = scheduled(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    for i in range(steps):
        optimizer.zero_grad()
        with schedule.gradients():
            for j in range(i * parts, (i + 1) * parts):
                batch = found[4 * j : 4 * j + 4]
                (model(*(torch.stack([x[n] for x in batch]) for n in batch[0]))["loss"] / parts).backward()
        optimizer.step()
        schedule.step()
    return recall(model)


@pytest.mark.parametrize("restore", [False, True], ids=["", "callbacks made anew"])
def test_a_trainer_of_transformers_follows_and_resumes(restore: bool, tmp_path: Path) -> None:
    need("transformers")
    from transformers import Trainer, TrainingArguments

    for start in (None, tmp_path / "checkpoint-3"):
        model = Model()
        schedule = scheduled(model)
        options = TrainingArguments(
            str(tmp_path),
            max_steps=7,
            save_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            train_sampling_strategy="sequential",
            restore_callback_states_from_checkpoint=restore,
        )
        trainer = Trainer(model, options, train_dataset=batches(64), callbacks=[schedule.callback()])
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
        assert schedule.steps == 7
        assert model.up.weight.nnzb == 4
        for found, wanted in zip(recall(model), plain(7), strict=True):
            torch.testing.assert_close(found, wanted)


class Lightning:
    """How Lightning's Trainer calls its callbacks."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.global_step = callback, 0

    def fit(self, model: nn.Module, steps: range, saved: Any = None) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
        found, module = batches(64), object()
        call = self.callback
        call.setup(self, module, stage="fit")
        if saved is not None:
            model.load_state_dict(saved["model"])
            call.on_load_checkpoint(self, module, saved)
            call.load_state_dict(copy.deepcopy(saved["callbacks"][call.state_key]))
            optimizer.load_state_dict(saved["optimizer"])
            self.global_step = saved["global_step"]
        call.on_train_start(self, module)
        for j in range(2 * steps.start, 2 * steps.stop):
            batch = {n: torch.stack([x[n] for x in found[4 * j : 4 * j + 4]]) for n in found[0]}
            call.on_train_batch_start(self, module, batch, j)
            (model(**batch)["loss"] / 2).backward()
            if j % 2:
                optimizer.step()
                self.global_step += 1
                optimizer.zero_grad()
            call.on_train_batch_end(self, module, None, batch, j)
        call.on_train_end(self, module)
        return copy.deepcopy(
            {
                "model": model.state_dict(),
                "callbacks": {call.state_key: call.state_dict()},
                "optimizer": optimizer.state_dict(),
                "global_step": self.global_step,
            }
        )


class Callback:
    """The part of Lightning's that is called here."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None: ...
    def on_load_checkpoint(self, trainer: Any, module: Any, saved: Any) -> None: ...


def test_a_trainer_as_lightning_follows_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        module: Any = types.ModuleType(name)
        module.Callback = Callback
        monkeypatch.setitem(sys.modules, name, module)
    model, again = Model(), Model()
    schedule, other = scheduled(model), scheduled(again)
    assert isinstance(schedule.callback(), Callback)
    saved = Lightning(schedule.callback()).fit(model, range(3))
    Lightning(other.callback()).fit(again, range(3, 7), saved)
    assert other.steps == 7
    for found, wanted in zip(recall(again), plain(7), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_callback_needs_a_trainer_to_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InvalidInput, match=r"imported.*schedule\.step"):
        scheduled(Model()).callback()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def doubled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that shows that DistributedDataParallel had a gradient."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def wrap(model: nn.Module) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, doubled)
    return wrapped


def learns(wrapped: Any, made: BlockSparseLinear) -> bool:
    """Whether the gradient of all values went through DistributedDataParallel."""
    right = copy.deepcopy(made)
    for each in (wrapped, right):
        each.zero_grad()
        each(data(0)[0]).square().sum().backward()
    torch.testing.assert_close(made.values.grad, 2 * right.values.grad)  # type: ignore[operator]
    return True


CHANGES: dict[str, Any] = {
    "set_pattern": lambda made, new: made.set_pattern(new),
    "load_state_dict": lambda made, new: made.load_state_dict(layer(new).state_dict()),
}


@pytest.mark.parametrize("called", ["called", "new", "called directly"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrapped_model_waits_for_new_blocks_or_raises(change: str, called: str, alone: None) -> None:
    made = layer()
    wrapped = wrap(nn.Sequential(made))
    if called == "called":
        for _ in range(2):
            assert learns(wrapped, made)
        CHANGES[change](made, mask(0.5, 1).flip(1))  # as many blocks
        for _ in range(2):
            assert learns(wrapped, made)
    CHANGES[change](made, mask(0.5, 2))
    if called == "called directly":
        wrapped.module(data(0)[0]).sum().backward()
    for _ in range(2):
        with torch.no_grad():
            wrapped(data(0)[0])
        with pytest.raises(InvalidInput, match=r"DistributedDataParallel\(model\.module\)"):
            wrapped(data(0)[0])
    wrapped = wrap(wrapped.module)  # the cure
    for _ in range(2):
        assert learns(wrapped, made)


def test_values_that_begin_to_learn_after_they_were_wrapped_are_noticed(alone: None) -> None:
    models: list[Any] = [nn.Sequential(nn.Linear(70, 70, dtype=torch.float64), layer()) for _ in range(2)]
    for model in models:
        model[1].values.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(models[1], ["1.values"])
    for model, match in zip(models, ("requires_grad", None), strict=True):
        wrapped = DistributedDataParallel(model)
        wrapped(data(0)[0]).sum().backward()
        model[1].values.requires_grad_()
        model[1].set_pattern(mask(0.5, 1).flip(1))
        if match is None:
            wrapped(data(0)[0]).sum().backward()
        else:
            with pytest.raises(InvalidInput, match=match):
                wrapped(data(0)[0])


@pytest.mark.parametrize(("by", "is_static"), [("gradient", False), ("random", False), ("gradient", True)])
def test_a_schedule_trains_a_wrapped_model_as_a_plain_one(by: Any, is_static: bool, alone: None) -> None:
    models: list[Any] = [nn.Sequential(layer(torch.ones(GRID, dtype=torch.bool))) for _ in range(2)]
    first = DistributedDataParallel(models[0], static_graph=is_static)
    for model, wrapped in zip(models, (first, models[1]), strict=True):
        schedule = sk.nn.PatternSchedule(
            model, end=5, every=1, keep=0.3, swapped=0.3, by=by, generator=torch.Generator().manual_seed(1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for i in range(7):
            with schedule.gradients():
                train(wrapped, optimizer, range(i, i + 1))
            schedule.step()
        if wrapped is not model:
            wrapped.register_comm_hook(None, doubled)
            assert learns(wrapped, model[0])
    for x, y in zip(recall(models[0]), recall(models[1]), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("by", ["gradient", "random"])
def test_ranks_grow_the_same_blocks(by: Any, alone: None) -> None:
    right, made = layer(), [layer() for _ in range(2)]
    with sk.nn.dense_gradients(nn.ModuleList([right, *made])):
        for i, (each, group) in enumerate(zip(made, ranks(), strict=True)):
            wrapper = SimpleNamespace(process_group=group)
            each._history.wrapper = lambda wrapper=wrapper: wrapper  # type: ignore[assignment]
            for one in (each, right):
                one(data(i)[0]).square().sum().backward()
    with ThreadPoolExecutor(2) as pool:
        draws = [torch.Generator().manual_seed(i) for i in range(2)]
        list(pool.map(lambda each, draw: each.grow_(4, by=by, generator=draw), made, draws))
    right.grow_(4, by=by, generator=torch.Generator().manual_seed(0))
    assert made[0].pattern.same_as(right.pattern)
    assert made[1].pattern.same_as(right.pattern)


def test_a_schedule_of_sharded_values_is_refused_at_its_first_step(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made = layer()
    schedule = sk.nn.PatternSchedule(made, begin=100, end=200, keep=0.5)
    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InvalidInput, match="sharded"):
        schedule.step()


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_the_divergence_of_a_teacher(temperature: float, masked: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    teacher.requires_grad_()
    counts = (
        torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]) if masked else torch.ones(2, 5, dtype=torch.int64)
    )
    found = sk.nn.distillation_loss(student, teacher, temperature, mask=counts if masked else None)
    wanted = torch.zeros((), dtype=torch.float64)
    for i, j in counts.nonzero().tolist():
        p, q = ((x[i, j] / temperature).softmax(0) for x in (teacher.detach(), student))
        wanted = wanted + (p * (p / q).log()).sum() * temperature**2 / counts.sum()
    torch.testing.assert_close(found, wanted)
    gradient, right = (torch.autograd.grad(x, student)[0] for x in (found, wanted))
    torch.testing.assert_close(gradient, right)
    assert not found.detach().isnan()
    assert sk.nn.distillation_loss(student, student, temperature).abs() < 1e-12
    hidden = sk.nn.distillation_loss(student, teacher, of="hidden", mask=counts if masked else None)
    chosen = counts.bool()
    size = (student - teacher)[chosen].square().sum() / teacher[chosen].square().sum()
    torch.testing.assert_close(hidden, size.detach(), check_stride=False)


def test_distillation_of_odd_tokens() -> None:
    student = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.randn(3, 6)
    with torch.no_grad():
        student[:, 2] = teacher[:, 2] = -torch.inf  # not in the vocabulary
    none = torch.zeros(3, dtype=torch.bool)
    losses = [
        sk.nn.distillation_loss(student, teacher, 2.0),
        sk.nn.distillation_loss(student, teacher, mask=none),
        sk.nn.distillation_loss(student[:0], teacher[:0]),
        sk.nn.distillation_loss(student[:, :2], teacher[:, :2], of="hidden", mask=none),
    ]
    assert [x.dtype for x in losses] == [torch.float32] * 4
    assert not any(losses[1:])
    sum(losses).backward()  # type: ignore[union-attr]
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"teacher": torch.zeros(2, 4)}, "teacher is"),
        ({"teacher": None}, "teacher"),
        ({"student": torch.zeros(2, 3, dtype=torch.int64)}, "student"),
        ({"mask": torch.zeros(2, 3)}, "mask has shape"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 2.0, "of": "hidden"}, "is for logits"),
        ({"of": "x"}, "of is"),
    ],
)
def test_wrong_losses_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        sk.nn.distillation_loss(**{"student": torch.zeros(2, 3), "teacher": torch.zeros(2, 3), **given})
