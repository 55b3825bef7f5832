"""What a record's source hash follows: the code that was measured, and nothing beside it."""

import ast
from pathlib import Path

import pytest

from sparsek import kernels
from sparsek.bench.engine import records
from sparsek.core.errors import InvalidInput
from sparsek.plan import sources
from sparsek.plan.sources import SETTINGS, code_in, code_of, source_files, source_hash

DEVICE = """
LAG = gl.constexpr(8)
KERNEL = Made()


@gluon.jit(do_not_specialize=["n"])
def step(a):
    \"\"\"Adds.\"\"\"
    return a + LAG  # why


class Config:
    keys: int = 64


class Made:
    def seconds(self):
        return 1.0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "sparsek"
    files = {
        "kernels/toy/spmm.py": "from sparsek.kernels.lang import launch, tiles\nimport sparsek.core.device\n",
        "kernels/lang/launch.py": "X = 1\n",
        "kernels/lang/tiles.py": "import sparsek.kernels.lang.masks\n",
        "kernels/lang/masks.py": "X = 1\n",
        "kernels/lang/other.py": "X = 1\n",
        "mask/structured.py": "Z = 1\n",
        "core/device.py": "X = 1\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("kernels/toy/spmm.py", True),
        ("kernels/lang/tiles.py", True),
        ("kernels/lang/masks.py", True),
        ("kernels/lang/other.py", False),
        ("kernels/lang/launch.py", False),
        ("core/device.py", False),
    ],
)
def test_the_hash_follows_the_kernel_and_the_prims_it_imports(tree: Path, name: str, counts: bool) -> None:
    before = source_hash("toy.spmm", tree)
    path = tree / name
    path.write_text(path.read_text() + "Y = 2\n")
    assert (source_hash("toy.spmm", tree) != before) is counts


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("a + LAG", "a - LAG", True),
        ("(8)", "(4)", True),
        ("keys: int = 64", "keys: int = 128", True),
        ('["n"]', '["m"]', True),
        ("# why", "# because", False),
        ("Adds.", "Takes away.", False),
        ("return 1.0", "return 2.0", False),
        ("Made()", "Made( )", False),
        ("return a + LAG", "return (\n        a + LAG,\n    )[0]", True),
        ("def step(a):", "def step(\n    a,\n):", False),
    ],
)
def test_of_a_device_file_what_is_compiled_counts(old: str, new: str, counts: bool) -> None:
    assert old in DEVICE
    assert (code_of(DEVICE.replace(old, new)) != code_of(DEVICE)) is counts


def test_device_functions_may_move_to_another_file(tree: Path) -> None:
    kernel, prims = tree / "kernels/toy/spmm.py", tree / "kernels/lang/tiles.py"
    kernel.write_text(kernel.read_text() + DEVICE + "\n\n@gluon.jit\ndef entry(a):\n    step(a)\n")
    prims.write_text("import sparsek.kernels.lang.masks\n@gluon.jit\ndef other(a):\n    return a\n")
    before = source_hash("toy.spmm", tree)
    start = DEVICE.index("@gluon.jit")
    stop = DEVICE.index("class Config")
    kernel.write_text(kernel.read_text().replace(DEVICE[start:stop], ""))
    prims.write_text(prims.read_text() + "\n\n" + DEVICE[start:stop])
    assert source_hash("toy.spmm", tree) == before


def test_who_times_calls_names_what_launches_them(tree: Path) -> None:
    before = source_hash("toy.spmm + lang.launch", tree)
    (tree / "kernels/lang/launch.py").write_text("X = 2\n")
    assert source_hash("toy.spmm + lang.launch", tree) != before


def test_the_hash_does_not_depend_on_line_endings(tree: Path) -> None:
    before = source_hash("toy.spmm", tree)
    path = tree / "kernels/lang/masks.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert source_hash("toy.spmm", tree) == before


def test_a_record_is_fresh_until_its_source_changes(
    record: records.Record, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "source_hash", lambda kernel: source_hash(kernel, tree))
    made = record | {"kernel": "toy.spmm", "source_hash": source_hash("toy.spmm", tree)}
    assert records.is_fresh(made)
    (tree / "kernels/lang/masks.py").write_text("X = 2\n")
    assert not records.is_fresh(made)
    assert not records.is_fresh(made | {"kernel": "gone.spmm"})


def test_a_kernel_may_have_a_schedule_that_counts(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SCHEDULES", {"toy.spmm": "plan.toy_schedule"})
    with pytest.raises(InvalidInput, match=r"no source file .*toy_schedule"):
        source_hash("toy.spmm", tree)
    schedule = tree / "plan" / "toy_schedule.py"
    schedule.parent.mkdir()
    schedule.write_text("ORDER = 1\n")
    assert [path.name for path in source_files("toy.spmm", tree)][0] == "spmm.py"
    assert schedule in source_files("toy.spmm", tree)
    before = source_hash("toy.spmm", tree)
    schedule.write_text("ORDER = 2\n")
    assert source_hash("toy.spmm", tree) != before


def test_the_gradients_of_attention_follow_their_schedule_and_what_they_share() -> None:
    files = {path.name for path in source_files("hopper.attention_bwd")}
    assert {"hopper_bwd.py", "attention_grad_schedule.py", "delta.py"} <= files


@pytest.mark.parametrize("name", ["kernels/toy/spmm.py", "kernels/lang/masks.py", "mask/structured.py"])
def test_the_hash_of_several_follows_each_of_them(tree: Path, name: str) -> None:
    both = "toy.spmm + mask.structured"
    before = source_hash(both, tree)
    assert before not in (source_hash("toy.spmm", tree), source_hash("mask.structured", tree))
    path = tree / name
    path.write_text(path.read_text() + "Y = 2\n")
    assert source_hash(both, tree) != before


def test_a_record_of_spgemm_follows_the_symbolic_phase_too() -> None:
    assert records.hash_of("spgemm", "reference.spgemm") == source_hash("reference.spgemm + plan.matches")
    assert records.hash_of("spmm", "cpu.spmm") == source_hash("cpu.spmm")


def test_a_source_outside_the_kernels_is_found_too(tree: Path) -> None:
    assert [path.name for path in source_files("mask.structured", tree)] == ["structured.py"]
    with pytest.raises(InvalidInput, match=r"no source file .*mask"):
        source_files("mask.gone", tree)


def test_cuda_code_counts_with_the_settings_it_is_compiled_with(tree: Path) -> None:
    folder = tree / "kernels/spmm"
    folder.mkdir()
    host, code = folder / "hopper_twin.py", folder / "hopper_twin.cu"
    host.write_text(
        'FILE = "hopper_twin.cu"\n\n\nclass Config:\n    keys: int = 64\n\n\ndef seconds():\n    return 1\n'
    )
    code.write_text("int f() { return 1; } // one\n")
    assert source_files("spmm.hopper_twin", tree) == [host, code]
    before = source_hash("spmm.hopper_twin", tree)

    def changed(file: Path, old: str, new: str) -> bool:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        after = source_hash("spmm.hopper_twin", tree)
        file.write_text(text)
        return after != before

    assert changed(code, "return 1", "return 2")
    assert changed(host, "64", "128")
    assert not changed(code, "// one", "/* two\n lines */")
    assert not changed(code, "{ return", "{\n    return")
    assert not changed(host, "return 1", "return 2")
    other = folder / "other.cu"
    other.write_text("int g();\n")
    assert source_hash("spmm.hopper_twin", tree) == before
    code.write_text('#include "other.cu"\n' + code.read_text())
    assert source_files("spmm.hopper_twin", tree) == [host, code, other]
    before = source_hash("spmm.hopper_twin", tree)
    assert changed(other, "int g", "int h")


@pytest.mark.parametrize("name", [name for _, name, *_ in kernels.KERNELS])
def test_every_kernel_has_code_that_counts(name: str) -> None:
    texts = [part for file in source_files(name) for part in code_in(file)]
    device = [found for found, _ in texts if found]
    assert all(text for _, text in texts)
    assert bool(device) == name.startswith(("hopper.", "portable."))
    assert source_hash(name) == sources.source_hash(name, sources.ROOT)


def test_what_settings_derive_from_are_settings() -> None:
    """A change of a base changes what is compiled (2026-11-26: that of attention's pipelines did not count)."""
    kernels = Path(sources.__file__).parents[1] / "kernels"
    bases = {
        base.id
        for file in kernels.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in SETTINGS
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert {"Tile", "Pipeline"} <= bases <= set(SETTINGS)


def test_braces_of_f_strings_read_alike_in_every_python() -> None:
    """Python 3.12 splits f-strings into tokens, and gives one brace where the source has two."""
    assert code_of('x = f"{{a {b}}}"\n') == [("", '0 x=f"{a{b}}"')]
