"""Which matrices are looked at, how they are grouped, and what is said of them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.files.weights import WeightFile, open_weights
from sparsek.products.formats.bsr import BSR
from sparsek.testing.budget import Gate
from sparsek.tools.advise import weights as advise
from sparsek.tools.advise.weights import Advice, AdviceSettings, NoAdvice, ProductTimes, Pruned, WeightGroup

PREDICT = AdviceSettings(block=(32, 32), keep=0.25, tokens=256, device="h200")


@pytest.fixture
def weights(tmp_path: Path) -> WeightFile:
    draw = np.random.default_rng(0)
    names = {"layer.0.w": (128, 96), "layer.1.w": (128, 96), "head": (64, 64), "tiny": (8, 64), "bias": (64,)}
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
    path = tmp_path / "model.npz"
    np.savez(path, **arrays)
    return open_weights(path)


def test_all_matrices_of_at_least_one_block_are_chosen(weights: WeightFile) -> None:
    assert advise.choose(weights, [], (32, 32)) == ["layer.0.w", "layer.1.w", "head"]
    assert advise.choose(weights, [], (16, 64)) == ["layer.0.w", "layer.1.w", "head"]


def test_names_and_wildcards_choose(weights: WeightFile) -> None:
    assert advise.choose(weights, ["tiny", "layer.*"], (32, 32)) == ["tiny", "layer.0.w", "layer.1.w"]


def test_few_matrices_stand_alone() -> None:
    groups = advise.grouped([("a.0", (64, 64)), ("a.1", (64, 64))])
    assert [group.label for group in groups] == ["a.0", "a.1"]


def test_many_matrices_are_grouped_by_name_and_shape() -> None:
    listed = [(f"layer.{i}.{part}", (64, 64)) for i in range(12) for part in ("q", "k")] + [
        ("head", (64, 128))
    ]
    groups = advise.grouped(listed)
    assert [group.label for group in groups] == ["layer.*.q (12)", "layer.*.k (12)", "head"]
    assert sorted(name for group in groups for name in group.names) == sorted(name for name, _ in listed)


def test_very_many_names_are_grouped_by_shape() -> None:
    listed = [(chr(97 + i) * 3, (64, 64) if i % 2 else (32, 64)) for i in range(26)]
    assert [(group.label, len(group.names)) for group in advise.grouped(listed)] == [
        ("* (13)", 13),
        ("* (13)", 13),
    ]


def test_a_pruned_matrix_keeps_its_largest_blocks_and_passes_the_check(weights: WeightFile) -> None:
    weight = weights.read("layer.0.w")
    pruned = advise.prune("layer.0.w", weight, PREDICT)
    assert pruned.matrix.nnzb == 3
    norms = weight.view(4, 32, 3, 32).transpose(1, 2).flatten(2).norm(dim=2).flatten()
    assert pruned.kept_norm == pytest.approx(float(norms.sort().values[-3:].norm() / norms.norm()), rel=0.01)
    assert pruned.gate.passed


def test_a_question_may_keep_no_block(weights: WeightFile) -> None:
    pruned = advise.prune("layer.0.w", weights.read("layer.0.w"), AdviceSettings((32, 32), 0, 256, "h200"))
    assert (pruned.matrix.nnzb, pruned.kept_norm, pruned.gate.passed) == (0, 0.0, True)


def test_the_kept_norm_of_large_weights_is_a_fraction() -> None:
    pruned = advise.prune("w", torch.full((64, 64), 1e30), PREDICT)
    assert pruned.kept_norm == pytest.approx(0.5)


def test_a_matrix_that_fails_leaves_the_others_of_its_group(weights: WeightFile) -> None:
    def read(name: str) -> torch.Tensor:
        if name == "broken":
            raise MemoryError("Unable to allocate 9 GiB")
        return weights.read(name)

    steps: list[str] = []
    group = WeightGroup("* (3)", ("broken", "layer.0.w", "layer.1.w"), (128, 96))
    advice = advise.advise(group, read, PREDICT, steps.append)
    assert isinstance(advice, Advice)
    assert steps == list(group.names)
    assert advice.first.name == "layer.0.w"
    assert advice.checked == 2
    assert [str(failure) for failure in advice.failures] == [
        "'broken': out of memory: Unable to allocate 9 GiB"
    ]
    assert advice.verdict.endswith(", 1 of 3 failed")
    hopeless = advise.advise(WeightGroup("broken", ("broken",), (128, 96)), read, PREDICT, steps.append)
    assert isinstance(hopeless, NoAdvice)
    assert hopeless.verdict == "failed"


def test_a_defect_is_no_failure_of_a_matrix() -> None:
    def read(name: str) -> torch.Tensor:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        advise.advise(WeightGroup("w", ("w",), (64, 64)), read, PREDICT, lambda name: None)


def test_predictions_without_memory_are_those_with_it(weights: WeightFile) -> None:
    weight = weights.read("layer.0.w")
    a = advise.prune("layer.0.w", weight, PREDICT).matrix
    x = torch.empty(PREDICT.tokens, a.shape[1], dtype=a.dtype)
    times = advise.timed(a, weight, PREDICT)
    assert times.sparse == advise.best_sparse(a, x.T, "h200").seconds


def test_every_matrix_of_a_group_is_read_and_checked(weights: WeightFile) -> None:
    group = WeightGroup("layer.*.w (2)", ("layer.0.w", "layer.1.w"), (128, 96))
    steps: list[str] = []
    advice = advise.advise(group, weights.read, PREDICT, steps.append)
    assert isinstance(advice, Advice)
    assert steps == ["layer.0.w", "layer.1.w"]
    assert len(advice.times) == 2
    assert all(times.predicted for times in advice.times)
    assert advice.wrong == ()
    assert 0 < advice.worst_error <= 1
    assert advice.kept_norm[0] < advice.kept_norm[1]


@pytest.mark.parametrize("scope", ["global", "row"])
def test_the_curve_prunes_by_the_rule_of_the_question(scope: str) -> None:
    weight = torch.randn(200, 170, generator=torch.Generator().manual_seed(0)).bfloat16()
    for keep in (0.01, 0.25, 0.6, 1.0):
        question = AdviceSettings((32, 32), keep, 256, "h200", scope=scope)
        curve, matrix = advise.TimeCurve.of(weight, question), advise.prune("w", weight, question).matrix
        assert curve.pattern(max(1, round(keep * 42))).same_as(matrix.pattern)


def uneven(side: int = 4096) -> torch.Tensor:
    """A weight whose large blocks all stand in its first rows."""
    weight = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    return weight * torch.linspace(8, 1, side)[:, None]


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.9])
def test_sparse_wins_up_to_the_break_even_density_and_loses_above(keep: float) -> None:
    question = AdviceSettings((128, 128), keep, 4096, "h200")
    weight = uneven().bfloat16()
    curve, matrix = advise.TimeCurve.of(weight, question), BSR.from_dense(weight, (128, 128), keep=keep)
    own = curve.plan(matrix.pattern).seconds
    dense = advise.predicted_dense(question, (4096, 4096), "h200")
    even = curve.break_even(matrix.nnzb, own, dense)
    assert (even >= matrix.density) == (own <= dense)
    if 0 < even < 1:
        assert curve.plan(curve.pattern(round(even * 1024))).seconds <= dense
        assert curve.plan(curve.pattern(round(even * 1024) + 10)).seconds > dense
    assert curve.break_even(matrix.nnzb, own, 0.0) == 0
    assert curve.break_even(matrix.nnzb, own, 1.0) == 1


def test_embeddings_are_look_ups_unless_they_were_wanted() -> None:
    listed = [("word_Embeddings.weight", (64, 64)), ("head", (64, 64))]
    assert [group.lookup for group in advise.grouped(listed)] == [True, False]
    assert [group.lookup for group in advise.grouped(listed, wanted=True)] == [False, False]
    many = [(f"{chr(97 + i) * 3}{'embed' * (i % 2)}", (64, 64)) for i in range(26)]
    assert [(group.lookup, len(group.names)) for group in advise.grouped(many)] == [(False, 13), (True, 13)]


HOST = 24e-6


@pytest.mark.parametrize(
    ("dense", "sparse", "needs"),
    [(1e-3, 5e-4, False), (2e-5, 1e-5, True), (5e-5, 2e-5, False), (1e-5, 2e-5, False)],
)
def test_products_shorter_than_an_eager_call_gain_only_in_a_cuda_graph(dense, sparse, needs) -> None:
    assert ProductTimes(dense, sparse, "hopper.spmm", 0.5, True, HOST).needs_graph == needs
    assert not ProductTimes(dense, sparse, "cpu.spmm", 0.5, True).needs_graph


def advice_of(times: list[ProductTimes], wrong: tuple[str, ...] = (), lookup: bool = False) -> Advice:
    matrix = BSR.from_dense(torch.ones(64, 64), (16, 16), keep=0.5)
    first = Pruned("w", matrix, 1.0, Gate(0.0, 1.0, True), 8)
    group = WeightGroup("w", ("w",) * len(times), (64, 64), lookup)
    return Advice(group, 16, (1.0, 1.0), tuple(times), wrong, 0.5, first)


@pytest.mark.parametrize(
    ("dense", "even", "wrong", "lookup", "verdict"),
    [
        ([2.0], [0.9], (), False, "faster"),
        ([2.0], [0.9], (), True, "look-up, not a product"),
        ([2.0, 1.0], [0.9, 0.5], (), False, "1 of 2 faster"),
        ([1.0], [0.2], (), False, "no gain"),
        ([1.0, 0.5], [0.2, 0.2], (), False, "no gain"),
        ([0.5], [0.25], (), False, "prune to 25 %"),
        ([0.5, 0.4], [0.25, 0.125], (), False, "prune to 12.5 %"),
        ([0.5], [0.5], (), False, "stay dense"),
        ([0.5], [0.0], (), False, "stay dense"),
        ([9.0], [0.9], ("w: error 1.0",), False, "wrong result"),
    ],
)
def test_the_verdict_is_in_words(dense, even, wrong, lookup, verdict) -> None:
    times = [ProductTimes(a, 1.0, "hopper.spmm", b, True) for a, b in zip(dense, even, strict=True)]
    assert advice_of(times, wrong, lookup).verdict == verdict


def test_the_verdict_names_the_cuda_graph() -> None:
    times = ProductTimes(2e-5, 1e-5, "hopper.spmm", 0.9, True, HOST)
    assert advice_of([times]).verdict == "faster in a CUDA graph"


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((64, 64), np.int32), r"'w' \(int32 of shape \[64, 64\]\)"),
        (np.zeros(64, np.float32), r"'w' \(fp32 of shape \[64\]\)"),
        (np.zeros((2, 64, 64)), r"'w' \(fp64 of shape \[2, 64, 64\]\)"),
        (np.array([[None]]), r"'w' \(pickled Python objects of shape \[1, 1\], which are never read\)"),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_file_without_a_float_matrix_is_told_by_what_is_in_it(tmp_path: Path, array, said, suffix) -> None:
    path = tmp_path / f"w{suffix}"
    _ = np.save(path, array) if suffix == ".npy" else np.savez(path, w=array)
    with pytest.raises(InvalidInput, match="no 2-D float matrix is in it; found " + said):
        advise.choose(open_weights(path), [], (32, 32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": 10**11}, "tokens must be from 1 to 2147482624"),
        ({"keep": -0.1}, "keep is -0.1"),
        ({"keep": math.nan}, "keep is nan"),
        ({"scope": "column"}, "scope"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_question_without_sense_is_refused(change: dict, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        AdviceSettings(**change)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_default_is_predictions_for_the_h200() -> None:
    assert AdviceSettings().predicted_for == "h200"
    with pytest.raises(InvalidInput, match="there is no GPU"):
        AdviceSettings(device="cuda")
