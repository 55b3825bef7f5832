"""Plain English: pages, docstrings, comments, messages and names have no wording that scripts/prose.py lists."""

from pathlib import Path

import pytest

from scripts import prose


def test_the_text_is_plain() -> None:
    checked = prose.files()
    assert len(checked) > 100
    assert [str(each) for path in checked for each in prose.findings(path)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The plan says which kernel runs.", "says"),
        ("A mask said once.", "said"),
        ("The device was asked for it.", "asked"),
        ("The kernel knows its tile.", "kernel knows"),
        ("A record of which the first line is a header.", "of which"),
        ("A graph that was kept holds that it saw.", "that was kept holds that it"),
        ("Peers are timed in turns.", "in turns"),
        ("Values that are not\nthere count.", "that are not there"),
        ("The transpose view of such a matrix.", "such a"),
        ("Rows behind one another.", "behind one another"),
        ("One " + "word " * 40 + "more.", "One word word word word word ..."),
    ],
)
@pytest.mark.parametrize(
    ("name", "form"),
    [("page.md", "# Title\n\n{}\n"), ("doc.py", '"""Title.\n\n{}\n"""\n')],
    ids=["page", "docstring"],
)
def test_poor_wording_is_found(tmp_path: Path, name: str, form: str, text: str, found: str) -> None:
    (tmp_path / name).write_text(form.format(text))
    assert [(each.line, each.words) for each in prose.findings(tmp_path / name, tmp_path)] == [(3, found)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("comment.py", "x = 1  # what the device\ny = 2\n# of values that are\n# not there\n", 3),
        ("message.py", "def f(x):\n    raise ValueError(\n        f'{x} wants a size'\n    )\n", 3),
        ("concatenated.py", "TEXT = (\n    'the plan '\n    'says so'\n)\n", 2),
        ("kernel.cu", "int a;  // 1\nint b;  // the host tells\n", 2),
    ],
)
def test_comments_and_messages_are_read(tmp_path: Path, name: str, text: str, line: int) -> None:
    (tmp_path / name).write_text(text)
    assert [each.line for each in prose.findings(tmp_path / name, tmp_path)] == [line]


@pytest.mark.parametrize(
    "text",
    [
        "Most of which are cached. A nested `such a` in code.\n\n```\nthe plan says\n```\n",
        "<!-- prose: allow -->\nA user asked for it.\n",
        "| " + "word " * 50 + "|\n",
        "- " + "word " * 30 + "\n- " + "word " * 30 + "\n",
    ],
    ids=["code", "allowed", "table", "list"],
)
def test_what_is_fine_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(text)
    assert prose.findings(tmp_path / "page.md", tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("mask/again.py", "", (1, "again")),
        ("mask/fresh_lists.py", "", (1, "fresh_lists")),
        ("accepted/__init__.py", "", (1, "accepted")),
        ("mask/lists.py", "\nclass ListedBlocks:\n    pass\n", (2, "ListedBlocks")),
        ("mask/lists.py", "class _KeptBlocks:\n    pass\n", (1, "_KeptBlocks")),
        ("mask/lists.py", "class Lists:\n    chosen: int\n    kept = 1\n", (2, "chosen")),
        ("mask/lists.py", "def lists(kept): ...\n", None),
        ("mask/lists.py", "class Lists:\n    def of(self, told=False): ...\n", (2, "told")),
        ("mask/lists.py", "def lists(\n    x,\n    *,\n    dtype_asked=None,\n): ...\n", (4, "dtype_asked")),
        ("mask/lists.py", "def _lists(told): ...\nasked = 1\n", None),
        ("kernels/lists.py", "def lists(joined): ...\n", None),
        ("mask/refreshed.py", "class Choice: ...\n", None),
    ],
)
def test_names_are_nouns_of_the_field(
    tmp_path: Path, name: str, text: str, found: tuple[int, str] | None
) -> None:
    """Those of modules, classes and parameters of public functions."""
    path = tmp_path / "sparsek" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert [(each.line, each.words) for each in prose.findings(path, tmp_path)] == ([found] if found else [])
