"""The texts of the experiment, split before anything was tuned.

| split | text | for |
|---|---|---|
| train | most documents of the Python packages; WordNet; the dictionary GCIDE | training the GPT, distillation |
| calibration, validation | one document of a hundred each, by the hash of its name | pruning; choosing recipes |
| test | the fortunes of Debian, without a sentence of any other split | MiniLM |
| heldout | the documents of the package scipy, which is in no other split | GPT |

A document is a docstring, a text file, or a letter pair of a dictionary.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from examples.prune_and_repair import documents, sentences

HELD_OUT = "scipy"  # the package whose documents the GPT is tested on
TESTS, HELD_OUT_DOCUMENTS = 1000, 800
SPLITS = ("train", "calibration", "validation", "test", "heldout")


class Texts(NamedTuple):
    """The documents, and the sentences, of each split; `hash` is that of all of them."""

    documents: dict[str, list[str]]
    sentences: dict[str, list[str]]
    hash: str


def split_of(name: str) -> str:
    """The split of a document that is neither test nor heldout."""
    return {0: "calibration", 1: "validation"}.get(number_of(name) % 100, "train")


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    """The definitions and examples of WordNet's data files, a document for each pair of letters of its words."""
    for path in sorted(folder.glob("data.*")):
        for line in path.read_text("utf-8", "ignore").splitlines():
            head, _, gloss = line.partition("|")
            word = head.split()[4] if len(head.split()) > 4 else ""
            parts = re.split(r";\s+", gloss.strip().replace('"', ""))
            text = "\n\n".join(part[:1].upper() + part[1:] + "." for part in parts if part)
            yield f"{path.name}/{word[:2].lower()}", text


def dictionary(path: Path) -> Iterator[tuple[str, str]]:
    """The paragraphs of a dictd database without markup."""
    text = re.sub(
        r"\[[^\]]*\]|\{|\}|--[A-Z].*", "", gzip.decompress(path.read_bytes()).decode("utf-8", "ignore")
    )
    for entry in re.split(r"\n(?=\S)", text):
        paragraphs = (
            re.sub(r"^\d+\.|^\(\w\)", "", part.strip()) for part in entry.split("\n\n")[1:] or [entry]
        )
        yield f"{path.name}/{entry[:2].lower()}", "\n\n".join(paragraphs)


def fortunes(folder: Path) -> Iterator[str]:
    """The sentences of the fortunes, without their authors."""
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.suffix not in (".dat", ".u8"):
            for each in path.read_text("utf-8", "ignore").split("\n%\n"):
                yield from sentences(re.sub(r"(?s)\n\s*-- .*", "", each))


def collect(debian: Path) -> dict[str, list[str]]:
    """All splits, from this Python and unpacked Debian packages: wordnet-base, dict-gcide, fortunes, fortunes-min."""
    share, found = debian / "usr" / "share", {name: dict[str, None]() for name in SPLITS}
    for name, text in documents(Path(sysconfig.get_paths()["purelib"])):
        top = re.split(r"[/.:-]", name)[0]
        if len(text) > 40 and not re.search("licen[cs]e|RECORD|top_level|entry_points|SOURCES", name):
            found["heldout" if top == HELD_OUT else split_of(name)][text] = None
    for name, text in (*wordnet(share / "wordnet"), *dictionary(share / "dictd" / "gcide.dict.dz")):
        if len(text) > 40:
            found[split_of(name)][text] = None
    elsewhere = {each for texts in found.values() for text in texts for each in map(key, sentences(text))}
    tests = {key(each): each for each in fortunes(share / "games" / "fortunes") if key(each) not in elsewhere}
    chosen = {name: list(texts) for name, texts in found.items()}
    chosen["heldout"] = least(chosen["heldout"], HELD_OUT_DOCUMENTS)
    chosen["test"] = least(tests.values(), TESTS)
    seen = set(chosen["heldout"])
    for name in ("validation", "calibration", "train"):
        chosen[name] = [text for text in chosen[name] if text not in seen]
        seen.update(chosen[name])
    return chosen


def least(texts: Iterable[str], count: int) -> list[str]:
    """So many texts, those of the least hashes."""
    return sorted(texts, key=number_of)[:count]


def key(sentence: str) -> str:
    return "".join(each for each in sentence.lower() if each.isalpha())


def write(path: Path, splits: dict[str, list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(splits).encode(), preset=4))


def read(path: Path) -> Texts:
    """The texts of a file of `write`."""
    data = lzma.decompress(path.read_bytes())
    splits = json.loads(data)
    found = {
        name: list(dict.fromkeys(each for text in splits[name] for each in sentences(text)))
        for name in SPLITS
    }
    found["test"] = splits["test"]
    return Texts(splits, found, hashlib.sha256(data).hexdigest()[:12])
