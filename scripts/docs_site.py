"""Hooks of mkdocs, which mkdocs.yml names: pages of the site from files beside docs/.

Pages at the root of the checkout become pages of "Internals". Links that lead to them, and their own links into docs/,
are rewritten, so that one text works in both places.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Files at the root, and the page that each becomes.
AT_ROOT = {
    f"{name.upper()}.md": f"internals/{name}.md"
    for name in ("design", "contributing", "changelog", "security")
}
LINK = re.compile(r"(?<=\]\()([\w./-]+\.\w+)(?=[)#])")
MARKED = re.compile(r"^```python ([\w ]+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of AT_ROOT."""
    for source, page in AT_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links, and turns the marks of an example (gpu, or the packages that it needs) into a title."""
    here = page.file.src_uri
    source = next((name for name, uri in AT_ROOT.items() if uri == here), f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        uri = AT_ROOT.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(uri, posixpath.dirname(here) or ".")

    return MARKED.sub(_title, LINK.sub(link, markdown))


def _title(found: re.Match[str]) -> str:
    needs = "a GPU" if found[1] == "gpu" else found[1].replace(" ", ", ")
    return f'```python title="needs {needs}"'
