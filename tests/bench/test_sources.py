"""What a record's source hash follows: the code that was measured, and nothing beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsek.core.errors import InvalidInput
from sparsek.engine import table as kernels
from sparsek_bench.engine import records, sources
from sparsek_bench.engine.definitions import Module, Tree, digest, whole_text
from sparsek_bench.engine.sources import counted, executed_by, names_hash, source_hash

FILES = {
    "sparsek/__init__.py": "",
    "sparsek/products/kernels/__init__.py": "KERNELS: object = (('spmm', 'toy.spmm', 'toy.spmm', ''),)\n",
    "sparsek/products/kernels/toy/spmm.py": '''"""A kernel."""
from sparsek.engine.launch import launch, tiles
from sparsek.products.kernels.toy.settings import Config

LAG = gl.constexpr(8)
WARPS = 4
PRICE = 1.5


@gluon.jit(do_not_specialize=["n"])
def step(a):
    """Adds."""
    return tiles.doubled(a) + LAG  # why


class Toy:
    def seconds(self, p, c: Config):
        return PRICE * c.price

    def launch(self, c: Config, a):
        launch.launch(step, a, c.keys, WARPS)


KERNEL = Toy()
''',
    "sparsek/products/kernels/toy/settings.py": "class Config:\n    keys: int = 64\n\n"
    "    @property\n    def price(self):\n        return 2\n",
    "sparsek/products/kernels/toy/other.py": "@triton.jit\ndef apart(a):\n    return a\n",
    "sparsek/engine/launch/__init__.py": "",
    "sparsek/engine/launch/launch.py": "def launch(*given):\n    return 1\n",
    "sparsek/engine/launch/tiles.py": "FACTOR = 2\n\n\n@triton.jit\ndef doubled(a):\n    return a * FACTOR\n",
    "sparsek/plan/matches.py": "def match():\n    return 1\n",
}
TOY = "sparsek/products/kernels/toy/spmm.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "sparsek"


def changed(root: Path, file: str, old: str, new: str, of: Callable[[], str]) -> bool:
    """Whether `of()` differs once a file has changed, which is restored."""
    path, before = root.parent / file, of()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = of()
    path.write_text(text)
    return after != before


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        (TOY, "+ LAG", "- LAG", True),
        (TOY, "(8)", "(4)", True),
        (TOY, "WARPS = 4", "WARPS = 8", True),
        (TOY, '["n"]', '["m"]', True),
        ("sparsek/products/kernels/toy/settings.py", "keys: int = 64", "keys: int = 128", True),
        ("sparsek/engine/launch/tiles.py", "FACTOR = 2", "FACTOR = 3", True),
        ("sparsek/engine/launch/tiles.py", "a * FACTOR", "a + FACTOR", True),
        (TOY, "# why", "# because", False),
        (TOY, "Adds.", "Takes away.", False),
        (TOY, "def step(a):", "def step(\n    a,\n):", False),
        (TOY, "PRICE = 1.5", "PRICE = 2.5", False),
        (TOY, "PRICE * c.price", "PRICE + c.price", False),
        (
            TOY,
            "from sparsek.engine.launch import launch, tiles",
            "from sparsek.engine.launch import (\n    launch, tiles)\nimport os",
            False,
        ),
        ("sparsek/products/kernels/toy/settings.py", "return 2", "return 3", False),
        ("sparsek/products/kernels/toy/other.py", "return a", "return -a", False),
        ("sparsek/engine/launch/launch.py", "return 1", "return 2", False),
        ("sparsek/engine/launch/tiles.py", "FACTOR = 2\n", "FACTOR = 2\r\n", False),
    ],
)
def test_the_hash_of_a_kernel_follows_what_is_compiled(
    root: Path, file: str, old: str, new: str, counts: bool
) -> None:
    assert changed(root, file, old, new, lambda: source_hash("toy.spmm", root)) is counts


def test_device_functions_may_move_to_another_file(root: Path) -> None:
    before = source_hash("toy.spmm", root)
    toy, other = root / "products/kernels/toy/spmm.py", root / "products/kernels/toy/device.py"
    text = toy.read_text()
    start, stop = text.index("@gluon.jit"), text.index("class Toy")
    other.write_text(
        f"from sparsek.engine.launch import tiles\nLAG = gl.constexpr(8)\n\n\n{text[start:stop]}"
    )
    moved = text[:start] + text[stop:]
    toy.write_text(
        moved.replace("LAG = gl.constexpr(8)", "from sparsek.products.kernels.toy.device import step")
    )
    assert source_hash("toy.spmm", root) == before
    assert changed(
        root,
        "sparsek/products/kernels/toy/device.py",
        "+ LAG",
        "- LAG",
        lambda: source_hash("toy.spmm", root),
    )


def test_a_benchmark_of_calls_names_what_launches_them(root: Path) -> None:
    both = "toy.spmm + launch.launch"
    assert changed(
        root, "sparsek/engine/launch/launch.py", "return 1", "return 2", lambda: source_hash(both, root)
    )


@pytest.mark.parametrize(
    ("file", "old"),
    [
        (TOY, "+ LAG"),
        ("sparsek/engine/launch/tiles.py", "a * FACTOR"),
        ("sparsek/plan/matches.py", "return 1"),
    ],
)
def test_the_hash_of_several_follows_each_of_them(root: Path, file: str, old: str) -> None:
    both = "toy.spmm + plan.matches"
    assert source_hash(both, root) not in (source_hash("toy.spmm", root), source_hash("plan.matches", root))
    assert changed(root, file, old, f"{old} + 7", lambda: source_hash(both, root))


def test_a_name_without_a_file_is_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no source file .*gone"):
        source_hash("mask.gone", root)


def test_a_record_is_fresh_until_its_source_changes(
    record: records.Record, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "source_hash", lambda kernel: source_hash(kernel, root))
    made = record | {"kernel": "toy.spmm", "source_hash": source_hash("toy.spmm", root)}
    assert records.is_fresh(made)
    (root / "engine/launch/tiles.py").write_text("FACTOR = 3\n")
    assert not records.is_fresh(made)
    assert not records.is_fresh(made | {"kernel": "gone.spmm"})


def test_a_kernel_may_have_a_schedule_that_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SCHEDULES", {"toy.spmm": "sparsek.plan.matches"})
    (root / "plan/matches.py").write_text(
        "def match():\n    return 3\n"
    )  # another time, so nothing kept is used
    assert changed(
        root, "sparsek/plan/matches.py", "return 3", "return 4", lambda: source_hash("toy.spmm", root)
    )


def test_a_record_of_spgemm_follows_the_symbolic_phase_too() -> None:
    assert records.hash_of("spgemm", "reference.spgemm") == source_hash("reference.spgemm + plan.matches")
    assert records.hash_of("spmm", "cpu.spmm") == source_hash("cpu.spmm")


def test_cuda_code_counts_with_the_settings_it_is_compiled_with(root: Path) -> None:
    folder = root / "products/kernels/spmm"
    folder.mkdir()
    (folder / "hopper_twin.py").write_text(
        'PROGRAM = Program(Path(__file__).with_name("hopper_twin.cu"))\n\n\nclass Config:\n    keys: int = 64\n\n'
        "    def defines(self):\n        return [1]\n\n    def price(self):\n        return 2\n\n\n"
        "def launch(c):\n    return PROGRAM\n\n\ndef seconds():\n    return 1\n"
    )
    (folder / "hopper_twin.cu").write_text('#include "other.cu"\nint f() { return 1; } // one\n')
    (folder / "other.cu").write_text("int g();\n")

    def differs(file: str, old: str, new: str) -> bool:
        return changed(
            root,
            f"sparsek/products/kernels/spmm/{file}",
            old,
            new,
            lambda: source_hash("spmm.hopper_twin", root),
        )

    assert differs("hopper_twin.cu", "return 1", "return 2")
    assert differs("hopper_twin.py", "64", "128")
    assert differs("hopper_twin.py", "[1]", "[2]")
    assert differs("other.cu", "int g", "int h")
    assert not differs("hopper_twin.cu", "// one", "/* two\n lines */")
    assert not differs("hopper_twin.cu", "{ return", "{\n    return")
    assert not differs("hopper_twin.py", "return 2", "return 3")
    assert not differs("hopper_twin.py", "return 1\n", "return 4\n")


@pytest.mark.parametrize("name", [name for _, name, *_ in kernels.rows()])
def test_every_kernel_has_code_that_counts(name: str) -> None:
    texts = counted(name)
    assert texts
    assert all(text for _, text in texts)
    if name.startswith(("hopper.", "portable.")):
        assert any("jit" in text or local.endswith(".cu") for local, text in texts)
        assert not {local.rpartition(".")[2] for local, _ in texts} & {
            "seconds",
            "why_not",
            "rank",
            "prepare",
        }


def test_settings_count_with_their_bases() -> None:
    """A change of a base changes what is compiled (2026-11-26: that of attention's pipelines did not count)."""
    for name in ("hopper.spmm", "hopper.attention_fwd", "hopper.attention_bwd"):
        locals_of = [local for local, _ in counted(name)]
        assert "Config" in locals_of
    assert {"Tile", "Pipeline"} <= {
        local for name in ("hopper.spmm", "hopper.attention_fwd") for local, _ in counted(name)
    }


def test_host_time_follows_the_functions_that_a_call_executes(root: Path) -> None:
    names = ["sparsek.plan.matches:match"]
    assert changed(root, "sparsek/plan/matches.py", "return 1", "return 2", lambda: names_hash(names, root))
    assert not changed(
        root, "sparsek/engine/launch/launch.py", "return 1", "return 2", lambda: names_hash(names, root)
    )
    before = names_hash(names, root)
    (root / "plan/matches.py").rename(root / "plan/pairs.py")
    assert names_hash(names, root) == before
    (root / "plan/pairs.py").write_text("")
    with pytest.raises(InvalidInput, match="matches:match is gone"):
        names_hash(names, root)


def test_the_functions_of_a_call_are_those_that_began() -> None:
    import torch

    import sparsek as sk

    a, b = sk.random_bsr(32, 32, 16, 0.5), torch.ones(32, 2)
    names = executed_by(lambda: a @ b)
    assert "sparsek.products.ops.spmm:multiply" in names
    assert not [name for name in names if name.startswith("sparsek_bench")]


SOURCE = '''"""Text."""
from typing import TYPE_CHECKING
import sparsek.other as other
if TYPE_CHECKING:
    from somewhere import Kind
SIZE = 4

def f(x: Kind) -> Kind:
    """Text."""
    def inner(): return SIZE
    return inner() + other.thing.part

class C(Base):
    """Text."""
    x: Kind = SIZE
    again = classmethod(f)

    def method(self):
        return self.y

register(C)
'''


def test_definitions_and_what_they_read() -> None:
    module = Module("sparsek.m", SOURCE, package=False)
    kinds = {name: each.kind for name, each in module.definitions.items()}
    assert kinds == {
        "SIZE": "constant",
        "f": "function",
        "C": "class",
        "C.again": "constant",
        "C.method": "function",
        "": "body",
    }
    assert module.definitions["f"].names == {"SIZE", "inner", "other", "other.thing", "other.thing.part"}
    assert "Kind" not in module.definitions["C"].names
    assert module.definitions["C.method"].mentioned == {"y"}
    assert "method" not in module.text("C")
    assert "again" not in module.text("C")
    assert module.at(11) is module.definitions["f"]


def test_names_are_resolved_through_imports(root: Path) -> None:
    tree = Tree(root.parent)
    assert (
        tree.resolve("sparsek.products.kernels.toy.spmm", "tiles.doubled")
        == "sparsek.engine.launch.tiles:doubled"
    )
    assert (
        tree.resolve("sparsek.products.kernels.toy.spmm", "Config")
        == "sparsek.products.kernels.toy.settings:Config"
    )
    assert tree.resolve("sparsek.products.kernels.toy.spmm", "gl.constexpr") == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("SIDES = (64,)", "SIDES = (64)", False),
        ("d[1,]", "d[1]", False),
        ('x = "a b"', 'x = "ab"', False),
        ('x = "{{y}}"', 'x = "{y}"', False),
        ('x = f"{{a {b}}}"', 'x = f"{{a {c}}}"', False),
        ("def f(x: int): return x", "def f(x: float): return x", False),
        ("x = 1.0", "x = 1", False),
        ("x = (1 +\n     2)  # three", "x = 1 + 2", True),
        ("f(a,\n  b,)", "f(a, b)", True),
        ("def f():\n    'One.'\n    return 1", 'def f():\n    "Two."\n    # why\n    return (1)', True),
        ("x = 'a'", 'x = "a"', True),
    ],
)
def test_the_text_of_code_is_its_meaning(one: str, other: str, same: bool) -> None:
    assert (whole_text(one) == whole_text(other)) is same


def test_the_text_is_the_same_under_every_python() -> None:
    source = 'def f(x, *, y=1):\n    return f"{x!r:>{y}} {{z}}" if x else [*y]\n'
    assert digest(whole_text(source)) == "e73f6a5e1dfe4059"
