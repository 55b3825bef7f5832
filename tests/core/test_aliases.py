"""Old paths of modules and names of classes, in imports and in pickles, go on working with a warning."""

import gzip
import io
import pickle
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core import aliases, clock, errors
from sparsek.core.aliases import MovedWarning

# By name, the pickle and the repr of public objects of commit c424793, and two state dicts that torch.save wrote there.
STORED: dict[str, tuple[bytes, str]] = pickle.loads(  # noqa: S301  a file of this repository
    gzip.decompress(Path(__file__).with_name("c424793.pickle.gz").read_bytes())
)
STATES = ("state_dict", "BSR.state_dict")


def unpickled(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MovedWarning)
        return pickle.loads(STORED[name][0])  # noqa: S301


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder that is now two, and modules with other names; some moved twice."""
    rows = {"old": ("core", "files"), "old.hour": ("core.clock",), "core.mistakes": ("core.errors",)}
    rows |= {"older": ("old",), "older.hours": ("older.hour",)}
    monkeypatch.setattr(aliases, "MOVED", rows)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if type(getattr(sys.modules[name], "__loader__", None)) is aliases.Aliases:
            del sys.modules[name]
            room, _, stem = name.rpartition(".")
            vars(sys.modules.get(room, sk)).pop(stem, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("old.errors:InvalidInput", errors.InvalidInput),
        ("old.io:save", sk.save),
        ("old.hour:host_seconds", clock.host_seconds),
        ("core.mistakes:Unsupported", sk.Unsupported),
        ("older.io:save", sk.save),
        ("older.hours:host_seconds", clock.host_seconds),
        ("older.mistakes:Unsupported", sk.Unsupported),
    ],
)
def test_an_old_path_has_the_names_of_the_new_one_and_warns(moved: None, old: str, new: object) -> None:
    path, name = f"sparsek.{old}".split(":")
    with pytest.warns(MovedWarning, match=rf"{path}\.{name} is sparsek\..*\.{name} now") as found:
        assert getattr(import_module(path), name) is new
    assert len(found) == 1
    assert found[0].filename == __file__


def test_an_import_of_all_names_of_an_old_path_gives_those_of_the_new_one(moved: None) -> None:
    names: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        exec("from sparsek.core.mistakes import *", names)
    assert {each.category for each in found} == {MovedWarning}
    public = {name for name in vars(errors) if not name.startswith("_")}
    assert public == {name for name in names if not name.startswith("_")}
    assert names["InvalidInput"] is sk.InvalidInput


def test_a_pickle_that_names_an_old_path_loads(moved: None) -> None:
    written = pickle.dumps(sk.InvalidInput("x is 3"), protocol=0).replace(
        b"sparsek.core.errors", b"sparsek.core.mistakes"
    )
    with pytest.warns(MovedWarning, match="core.mistakes"):
        assert type(pickle.loads(written)) is sk.InvalidInput  # noqa: S301


@pytest.mark.parametrize(
    "path", ["sparsek.old.nothing", "sparsek.old.hour.errors", "sparsek.nothing", "sparsek.nothing.errors"]
)
def test_a_path_that_never_was_is_not_found(moved: None, path: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=path.rsplit(".", 1)[0]):
        import_module(path)


@pytest.mark.parametrize("path", aliases.RENAMED)
def test_a_class_is_found_by_its_earlier_name(path: str) -> None:
    home, _, name = path.rpartition(".")
    today = getattr(import_module(home), aliases.RENAMED[path])
    with pytest.warns(MovedWarning, match=rf"{name} is {home}.{today.__name__} now") as found:
        assert getattr(import_module(re.sub(r"\.(tools|attn)\.", ".", home)), name) is today
    assert found[0].filename == __file__


def test_a_name_that_never_was_is_not_found(moved: None) -> None:
    with pytest.raises(
        AttributeError, match=r"'sparsek.old.hour', now sparsek.core.clock, has no attribute 'nothing'"
    ):
        _ = import_module("sparsek.old.hour").nothing


def test_every_old_path_leads_somewhere() -> None:
    for old in aliases.MOVED:
        found = aliases.homes(f"sparsek.{old}")
        assert found, old
        for home in found:
            import_module(home)


def test_python_m_runs_the_command_line_by_its_old_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsek", "--version"])
    with pytest.warns(MovedWarning, match=r"is sparsek\.tools\.cli\.__main__ now"), pytest.raises(SystemExit):
        runpy.run_module("sparsek.cli", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out == f"sparsek {sk.__version__}\n"


@pytest.mark.parametrize("name", sorted(STORED.keys() - STATES))
def test_a_pickle_of_c424793_loads(name: str) -> None:
    assert repr(unpickled(name)) == STORED[name][1]


def test_a_state_dict_of_a_layer_of_c424793_loads() -> None:
    state = torch.load(io.BytesIO(STORED["state_dict"][0]), weights_only=True)
    layer = sk.nn.BlockSparseLinear.random(32, 32, 16, 0.25, bias=False)
    layer.load_state_dict(state)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), unpickled("BlockSparseLinear")(x))


def test_a_state_dict_of_a_matrix_of_c424793_loads() -> None:
    written, shown = STORED["BSR.state_dict"]
    assert repr(sk.BSR.from_state_dict(torch.load(io.BytesIO(written), weights_only=True))) == shown


@pytest.mark.parametrize(
    "module", ["spmm.hopper", "sddmm.portable", "spgemm.match", "paged.steps", "mask.runs", "estimate.maps"]
)
def test_kernels_of_both_wings_are_found_by_their_old_paths(module: str) -> None:
    assert aliases.homes(f"sparsek.kernels.{module}")
    assert not aliases.homes(f"sparsek.kernels.{module}.nothing")
