"""The pages of docs/ belong together: navigation, links with anchors, an API page for every public name."""

import pkgutil
import re
from pathlib import Path

import pytest

import sparsek
from tests.docs.test_readme import PAGES, ROOT
from tests.house.tools import tree

DOCS = ROOT / "docs"
# Pages that scripts/docs_site.py makes of files at the root.
MADE = {
    f"internals/{name}.md": f"{name.upper()}.md"
    for name in ("design", "contributing", "changelog", "security")
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
OBJECT = re.compile(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?$", re.MULTILINE)
NAMED = re.compile(r"\bdocs/[\w/-]+\.md\b")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def faults(page: Path) -> list[str]:
    found = []
    for path, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / path if path else page
        is_missing = not target.exists()
        if is_missing or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in MADE.values())],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    assert faults(page) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `x` (two)\n[a](#one-x-two) [b](#three) [c](none.md) [d](https://example.org/none)\n"
    )
    assert faults(page) == ["#three", "none.md"]


def test_every_page_stands_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")]
    assert sorted(listed) == sorted([*pages, *MADE])


def test_the_api_has_every_public_name_and_only_members_that_exist() -> None:
    listed = {
        path: members.split(", ") if members else []
        for page in (DOCS / "api").glob("*.md")
        for path, members in OBJECT.findall(page.read_text(encoding="utf-8"))
    }
    rooms = {name: getattr(sparsek, name) for name in sparsek.ROOMS}
    public = {f"sparsek.{name}" for name in sparsek.__all__ if name not in rooms}
    public |= {f"sparsek.{room}.{name}" for room, module in rooms.items() for name in module.__all__}
    assert public <= listed.keys()
    objects = {path: pkgutil.resolve_name(path) for path in listed}
    assert [
        (path, name) for path in listed for name in listed[path] if not hasattr(objects[path], name)
    ] == []


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_is_one_short_page(page: Path) -> None:
    assert 60 <= len(page.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_sources_name_only_pages_that_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in tree(".py", ".cu", ".md")
        for page in NAMED.findall(path.read_text(encoding="utf-8"))
    }
    assert sorted((path, page) for path, page in named if not (ROOT / page).is_file()) == []


CLIENT = re.compile(r"^\| (?!client \||-)(.+?) \| (.+?) \| (.*?) ?\| `(tests/[\w/]+\.py)::(test_\w+)` \|$")


def test_every_client_has_a_test() -> None:
    rows = re.findall(
        r"^\|(?! client \||---).*$", (DOCS / "how-to" / "clients.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) > 20
    for row in rows:
        found = CLIENT.match(row)
        assert found, row
        path, name = found.groups()[-2:]
        assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8"), row
