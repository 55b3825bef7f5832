"""Records as one HTML file that needs nothing else: environment, pictures, and the tables that pages show."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, zip_longest

from sparsek_bench.engine import report
from sparsek_bench.engine.bench import TABLES, Record

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #767676; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 0.5rem 0; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: left; }
th { vertical-align: bottom; }
td { white-space: nowrap; }
.n { text-align: right; }
figure { margin: 1.5rem 0; padding: 0.75rem; background: #fff; }
figure svg { max-width: 100%; height: auto; }
figcaption, p { color: var(--dim); font-size: 0.85rem; }
"""
FACTS = {
    "gpu": "card",
    "driver": "driver",
    "power_limit_w": "power limit, W",
    "torch": "torch",
    "triton": "Triton",
    "cuda": "CUDA",
}


def page(found: Sequence[Record], pictures: Iterable[tuple[str, str]], title: str) -> str:
    """The text of the file. `pictures`: titles, and SVG as text, which is put in as it is."""
    parts = [f"<h1>{escape(title)}</h1>", "<h2>Environment</h2>", _environment(found)]
    figures = [
        f"<figure><figcaption>{escape(name)}</figcaption>{svg[svg.index('<svg') :]}</figure>"
        for name, svg in pictures
    ]
    parts += ["<h2>Pictures</h2>", *figures] if figures else []
    for op in report.measured(found):
        parts += [f"<h2>{escape(TABLES[op].title)}</h2>", from_markdown(report.markdown(found, op))]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _environment(found: Sequence[Record]) -> str:
    """What the records were measured with: every value of each fact, and the dates."""
    if not found:
        return "<p>No records.</p>"
    rows = []
    for field, name in FACTS.items():
        values = dict.fromkeys(f"{each['env'][field]}" for each in found if each["env"][field] is not None)
        rows.append((name, ", ".join(values) or "none"))
    return _table([], [*rows, ("measured", report.dates(found))])


def from_markdown(text: str) -> str:
    """The tables and paragraphs of a page's section as HTML."""
    parts = []
    for is_table, group in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            heads, rules, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in group)
            parts.append(_table(heads, rows, [rule.endswith(":") for rule in rules]))
        else:
            parts += [f"<p>{escape(line)}</p>" for line in group if line]
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    """`numbers`: the columns that stand on the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        classes = (" class=n" if number else "" for _, number in zip_longest(cells, numbers))
        parts = (f"<{tag}{each}>{escape(cell)}</{tag}>" for cell, each in zip(cells, classes, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(f"{line('td', row)}\n" for row in rows)
    return f'<div class="wide"><table><thead>{line("th", heads)}</thead><tbody>\n{body}</tbody></table></div>'
