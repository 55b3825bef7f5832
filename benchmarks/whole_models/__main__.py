"""`python -m benchmarks.whole_models`: pack what a machine without a network needs, run cells, and make the page."""

from __future__ import annotations

import argparse
import datetime
import json
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.whole_models import cells, models, table, texts
from sparsek import __version__
from sparsek.core.device import card_of

HERE = Path(__file__).parent
RECORDS = HERE / "records.jsonl"
PACKED = Path("build/whole_models")
LONGEST = 30.0  # seconds that a cell without distillation is expected to take at first


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_models", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    pack = verbs.add_parser("pack", help="write texts.xz, and MiniLM in float16, into a folder to carry")
    pack.add_argument(
        "--debian", type=Path, required=True, help="folder of unpacked Debian packages: texts.py"
    )
    pack.add_argument("--folder", type=Path, default=PACKED)
    run = verbs.add_parser("run", help="make the cells that have no record, in the order of their interest")
    run.add_argument("--models", nargs="+", choices=("minilm", cells.FFN, "gpt"), default=["minilm", "gpt"])
    run.add_argument("--forms", nargs="+", choices=cells.FORMS, default=list(cells.FORMS))
    run.add_argument("--keep", nargs="+", type=float, choices=cells.KEEPS, default=list(cells.KEEPS))
    run.add_argument("--stages", nargs="+", choices=cells.STAGES, default=list(cells.STAGES))
    run.add_argument("--minutes", type=float, default=8.0, help="no cell begins that would end later")
    run.add_argument("--distill-minutes", type=float, default=1.0)
    run.add_argument("--rate", type=float, default=5e-4, help="of distillation")
    run.add_argument("--train-minutes", type=float, default=4.0, help="of the GPT")
    run.add_argument(
        "--calibration", type=int, default=models.CALIBRATION["minilm"], help="sentences for MiniLM"
    )
    run.add_argument("--folder", type=Path, default=PACKED, help="of pack; the GPT is kept there too")
    run.add_argument("--records", type=Path, default=RECORDS)
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    page = verbs.add_parser("page", help="write the tables, and the picture, of the records into the page")
    page.add_argument("--records", type=Path, default=RECORDS)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.verb == "pack":
        texts.write(given.folder / "texts.xz", texts.collect(given.debian))
        models.pack_minilm(given.folder / "minilm")
    elif given.verb == "page":
        table.write_page(read(given.records))
    else:
        fill(given)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; [] if there is none. A last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def identity(record: dict[str, Any]) -> tuple[Any, ...]:
    """What two records of one measurement share: cell, texts and card, and the recipe of distillation."""
    names = (
        *cells.Cell._fields,
        "texts",
        "gpu",
        *(("minutes", "rate") if record["stage"] == "distilled" else ()),
    )
    return tuple(record[name] for name in names)


def fill(given: argparse.Namespace) -> None:
    """Make and append the records that are missing, until the time is up."""
    begin = time.perf_counter()
    device = torch.device(given.device)
    card = card_of(device).name
    kept = read(given.records)
    done = {identity(each) for each in kept}
    if given.records.exists():  # without a line that was cut off
        given.records.write_text("".join(json.dumps(each) + "\n" for each in kept), "utf-8")
    known = texts.read(given.folder / "texts.xz")
    recipe = {"texts": known.hash, "gpu": card, "minutes": given.distill_minutes, "rate": given.rate}
    wanted = [
        cell
        for cell in cells.cells(given.models)
        if identity(cell._asdict() | recipe) not in done
        and cell.form in given.forms
        and cell.keep in given.keep
        and cell.stage in given.stages
    ]
    loaded, longest = dict[str, models.Model](), LONGEST
    for cell in wanted:
        name = cell.model.partition("-")[0]
        if name not in loaded:
            loaded[name] = load(name, given, known, device)
        needs = longest + (60 * given.distill_minutes if cell.stage == "distilled" else 0)
        if time.perf_counter() - begin + needs > 60 * given.minutes:
            continue
        start = time.perf_counter()
        of = loaded[name]
        try:
            found = cells.measure(of, cell, given.distill_minutes, given.rate)
        except (
            Exception
        ):  # the other cells are made; this one has no record, and is tried again in the next run
            print(f"{cell}: {traceback.format_exc()}", flush=True)
            continue
        if cell.stage != "distilled":
            longest = max(longest, time.perf_counter() - start)
        record = cell._asdict() | found | of.facts
        record |= {"texts": known.hash, "gpu": card, "torch": torch.__version__, "sparsek": __version__}
        record["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        given.records.parent.mkdir(parents=True, exist_ok=True)
        with given.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(*cell, found, flush=True)


def load(name: str, given: argparse.Namespace, known: texts.Texts, device: torch.device) -> models.Model:
    if name == "gpt":
        return models.gpt(given.folder, known, device, given.train_minutes)
    folder = given.folder / "minilm"
    return models.minilm(folder if folder.exists() else None, known, device, given.calibration)


if __name__ == "__main__":
    main()
