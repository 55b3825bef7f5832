"""What `sparsek advise` reads: files, folders, indices of shards, models in the Hugging Face cache."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparsek.core import env
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files.weights import WeightFile, open_weights
from sparsek.tools.advise.sources import Shards, opened, shards_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards with an index, a file that it does not name, pickles, and other files."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.ones(8, 8), "bias": torch.ones(8)}, folder / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(8, 16)}, folder / "model-2.safetensors")
    save_file({"a.weight": torch.ones(8, 8)}, folder / "consolidated.safetensors")
    names = {
        "a.weight": "model-1.safetensors",
        "bias": "model-1.safetensors",
        "b.weight": "model-2.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "config.json").write_text("{}")
    return folder


def reasons(skipped) -> dict[str, str]:
    return {Path(each.what).name: each.why for each in skipped}


@pytest.mark.parametrize("named", ["model", "model/model.safetensors.index.json"])
def test_the_shards_of_an_index_are_read_as_one(model: Path, named: str) -> None:
    weights, skipped = opened([str(model.parent / named)])
    assert [entry.name for entry in weights.names()] == ["a.weight", "b.weight"]
    assert torch.equal(weights.read("b.weight"), torch.zeros(8, 16))
    with pytest.raises(InvalidInput, match=r"did you mean 'b\.weight'"):
        weights.read("b.weigh")
    if named == "model":
        found = reasons(skipped)
        assert found.pop("consolidated.safetensors") == "the index of this folder does not name it"
        assert "never read" in found.pop("pytorch_model.bin")
        assert found == {"model": "2 other files, which hold no weights"}


def test_a_shard_that_is_missing_is_passed_over(model: Path) -> None:
    (model / "model-2.safetensors").unlink()
    weights, skipped = opened([str(model / "model.safetensors.index.json")])
    assert [entry.name for entry in weights.names()] == ["a.weight"]
    assert reasons(skipped) == {
        "model-2.safetensors": "not there, though model.safetensors.index.json names it"
    }


def test_names_that_two_files_share_come_after_those_of_their_files(model: Path) -> None:
    paths = [
        str(model / name)
        for name in ("model-1.safetensors", "consolidated.safetensors", "model-2.safetensors")
    ]
    weights, _ = opened([*paths, paths[0]])
    assert isinstance(weights, Shards)
    assert [entry.name for entry in weights.names()] == [
        "model-1.safetensors: a.weight",
        "consolidated.safetensors: a.weight",
        "b.weight",
    ]
    assert weights.read("consolidated.safetensors: a.weight").sum() == 64


def test_a_bad_file_is_passed_over_among_others_and_fails_alone(model: Path) -> None:
    bad = model / "bad.safetensors"
    bad.write_bytes(b"\xff" * 64)
    weights, skipped = opened([str(model / "model-1.safetensors"), str(bad)])
    assert [entry.name for entry in weights.names()] == ["a.weight"]
    assert list(reasons(skipped)) == ["bad.safetensors"]
    with pytest.raises(InvalidFile, match=r"bad\.safetensors"):
        opened([str(bad)])


def test_a_folder_without_weights_is_refused_with_what_is_in_it(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"holds no weights in .*pytorch_model\.bin: pickles can run code"):
        opened([str(model)])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"weight_map": ' * 100_000,
        "[]",
        '{"weight_map": 1}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": {"a": "b.bin"}}',
    ],
)
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(InvalidFile, match=r"index\.json"):
        shards_of(path)


def test_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    with pytest.raises(InvalidInput, match="never read"):
        opened([str(path)])


def test_an_empty_name_is_no_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    with pytest.raises(InvalidInput, match="the name of a model is empty"):
        opened([""])


def test_an_index_that_cannot_be_read_does_not_hide_the_rest_of_a_folder(model: Path) -> None:
    other = model / "other"
    other.mkdir()
    (other / "model.safetensors.index.json").write_text("[" * 100_000)
    save_file({"c.weight": torch.ones(8, 8)}, other / "model.safetensors")
    weights, skipped = opened([str(model)])
    assert [entry.name for entry in weights.names()] == ["a.weight", "b.weight", "c.weight"]
    assert reasons(skipped)["model.safetensors.index.json"].startswith(
        "not JSON: its lists or objects are nested"
    )


def test_what_vanishes_while_a_folder_is_read_is_passed_over(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "a").mkdir()
    scan = os.scandir

    def gone(path: str) -> Any:
        if Path(path).name == "a":
            (model / "a").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", gone)
    weights, skipped = opened([str(model)])
    assert [entry.name for entry in weights.names()] == ["a.weight", "b.weight"]
    assert reasons(skipped)["a"] == "No such file or directory"

    def read(path: Path) -> WeightFile:
        (model / "model-2.safetensors").unlink(missing_ok=True)
        return open_weights(path)

    weights, skipped = opened([str(model)], read)
    assert [entry.name for entry in weights.names()] == ["a.weight"]
    assert reasons(skipped)["model-2.safetensors"] == "No such file or directory"


@pytest.fixture
def cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache with two snapshots of a model, whose files are links to blobs, as the hub makes them."""
    home = tmp_path / "hub" / "models--org--small"
    for revision, name in (("abc", "model-1.safetensors"), ("old", "model-2.safetensors")):
        (home / "snapshots" / revision).mkdir(parents=True)
        (home / "snapshots" / revision / "model.safetensors").symlink_to(model / name)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_id_is_the_snapshot_of_main_in_the_cache(cache: Path) -> None:
    weights, _ = opened(["org/small"])
    assert [entry.name for entry in weights.names()] == ["a.weight"]
    (cache / "models--org--small" / "refs" / "main").unlink()
    with pytest.raises(InvalidInput, match="2 snapshots"):
        opened(["org/small"])


@pytest.mark.parametrize("name", ["org/other", "none.npz"])
def test_a_name_that_is_nowhere_says_where_it_was_looked_for(cache: Path, name: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"no such file or folder.*cache .*, which holds org/small; nothing is downloaded"
    ):
        opened([name])
    with pytest.raises(InvalidInput, match="no such file or folder"):
        opened(["a/b/c.npz"])


def test_the_cache_is_where_hugging_face_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert env.hub_cache() == "/h/.cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert env.hub_cache() == "/x/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert env.hub_cache() == "/h/hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert env.hub_cache() == "/c"
