"""Files of weights behind what a user names: files, folders, indices of shards, models in the Hugging Face cache.

Nothing is downloaded. Whatever is passed over is listed with the reason.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from sparsek.core import env, files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.parsing import json_value
from sparsek.files.compressed import Decompressed, quantization_of
from sparsek.files.weights import PICKLES, READERS, Entry, WeightFile, open_weights

INDEX = ".safetensors.index.json"
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SHOWN = 4  # names of what was passed over
NO_PICKLES = "pickles can run code and are never read"


@dataclass(frozen=True)
class Skipped:
    """Something that was passed over, and why."""

    what: str
    why: str


@dataclass
class WeightFiles:
    """Files of weights, each once, and what was passed over."""

    paths: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, what: object, why: str) -> None:
        self.skipped.append(Skipped(str(what), why))


class Shards(WeightFile):
    """Several files of weights as one. A name that more than one of them has comes after that of its file."""

    def __init__(self, path: Path, parts: Iterable[WeightFile]) -> None:
        self.places: dict[str, tuple[WeightFile, str]] = {}
        self.parts = list(parts)
        super().__init__(path)

    def _entries(self) -> Iterator[Entry]:
        several = {name for part in self.parts for name in part.entries if self._count(name) > 1}
        for part in self.parts:
            for name, entry in part.entries.items():
                key = f"{part.path.name}: {name}" if name in several else name
                self.places[key] = part, name
                yield entry._replace(name=key)

    def _count(self, name: str) -> int:
        return sum(name in part.entries for part in self.parts)

    def _matrix(self, entry: Entry) -> Tensor:
        part, name = self.places[entry.name]
        return part.read(name)

    def raw(self, name: str) -> Tensor:
        part, own = self.places[name]
        return part.raw(own)


def opened(
    named: Iterable[str], read: Callable[[Path], WeightFile] = open_weights
) -> tuple[WeightFile, list[Skipped]]:
    """The weights of everything that is named, and what was passed over.

    Raises InvalidInput if something named is not there or holds no weights, and the error of a file that cannot be read
    if it is the only one.
    """
    found = WeightFiles()
    for name in named:
        if not name:
            raise InvalidInput("the name of a model is empty; name a file, a folder or a model of the cache")
        before = len(found.paths)
        _look_up(name, found)
        if len(found.paths) == before:
            why = "".join(f"; {each.what}: {each.why}" for each in found.skipped[:5])
            raise InvalidInput(f"{name}: holds no weights in {', '.join(READERS)}{why}")
    paths = list(dict.fromkeys(found.paths))
    joined = read(paths[0]) if len(paths) == 1 else _joined(paths, read, found)
    about = quantization_of([path.parent for path in paths])
    for path, why in about.faults:
        found.skip(path, why)
    weights = Decompressed(joined, about)
    for why, names in weights.passed_over.items():
        found.skip(f"{len(names)} of {len(joined.entries)} arrays ({few(names)})", why)
    return weights if weights.recipes or weights.passed_over else joined, found.skipped


def few(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _joined(paths: Sequence[Path], read: Callable[[Path], WeightFile], found: WeightFiles) -> WeightFile:
    """Several files as one, without those that cannot be read."""
    parts = []
    for path in paths:
        try:
            parts.append(read(path))
        except (OSError, InvalidFile, InvalidInput) as error:
            found.skip(path, reason(path, error))
    if not parts:
        raise InvalidInput("; ".join(f"{each.what}: {each.why}" for each in found.skipped))
    return parts[0] if len(parts) == 1 else Shards(Path(f"{len(parts)} files"), parts)


def reason(path: Path, error: Exception) -> str:
    """Why a file was passed over, without its name."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.removeprefix(f"{path}: ")


def _look_up(name: str, found: WeightFiles) -> None:
    path = Path(name)
    if path.is_dir():
        _folder(path, found)
    elif path.name.endswith(".index.json"):
        _index(path, found)
    elif path.exists():
        found.paths.append(path)
    else:
        _folder(_snapshot(name), found)


def _folder(folder: Path, found: WeightFiles) -> None:
    """Every file of weights in a folder and those below it; of shards with an index those that it names."""
    there = os.walk(folder, onerror=lambda error: found.skip(error.filename, error.strerror or str(error)))
    inside = sorted(
        path for at, _, names in there for path in (Path(at, name) for name in names) if path.is_file()
    )
    listed: list[Path] = []
    for path in inside:
        if path.name.endswith(INDEX):
            before = len(found.paths)
            try:
                _index(path, found)
            except (OSError, InvalidFile, InvalidInput) as error:
                found.skip(path, reason(path, error))
            listed += found.paths[before:]
    others = 0
    for path in inside:
        suffix = path.suffix.lower()
        if path in listed or any(each.what == str(path) for each in found.skipped):
            continue
        if suffix not in READERS:
            if suffix in PICKLES:
                found.skip(path, NO_PICKLES)
            else:
                others += 1
        elif any(path.parent == shard.parent and shard.suffix == suffix for shard in listed):
            found.skip(path, "the index of this folder does not name it")
        else:
            found.paths.append(path)
    if others:
        found.skip(folder, f"{others} other files, which hold no weights")


def _index(path: Path, found: WeightFiles) -> None:
    """The shards that an index names, in its folder."""
    for shard in shards_of(path):
        if (path.parent / shard).is_file():
            found.paths.append(path.parent / shard)
        else:
            found.skip(path.parent / shard, f"not there, though {path.name} names it")


def shards_of(path: Path) -> list[str]:
    """The files that `weight_map` of an index names, each once. Raises InvalidFile for an index that has none, and for
    names that lead out of its folder, and InvalidInput for an index of pickles.
    """
    if not path.name.endswith(INDEX):
        raise InvalidInput(f"{path}: is no index of safetensors; {NO_PICKLES}")
    content = json_value(files.content(path), path)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(each, str) for each in shards.values()):
        raise InvalidFile(f"{path}: must have a weight_map from names of tensors to names of files")
    for shard in shards.values():
        if Path(shard).name != shard or Path(shard).suffix != ".safetensors":
            raise InvalidFile(f"{path}: names {shown(shard)}, which is no .safetensors file of its folder")
    return list(dict.fromkeys(shards.values()))


def _snapshot(name: str) -> Path:
    """The folder of a model in the Hugging Face cache: the snapshot that refs/main names, or else the only one."""
    cache = Path(env.hub_cache())
    if not MODEL_ID.fullmatch(name):
        raise InvalidInput(f"{name}: there is no such file or folder")
    home = cache / f"models--{name.replace('/', '--')}"
    if not home.is_dir():
        known = sorted(
            each.name.removeprefix("models--").replace("--", "/") for each in cache.glob("models--*")
        )
        models = f"holds {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}" if known else "is empty"
        raise InvalidInput(
            f"{name}: there is no such file or folder, and no such model in the Hugging Face cache {cache}, which "
            f"{models}; nothing is downloaded"
        )
    main = home / "refs" / "main"
    snapshots = sorted(path for path in home.glob("snapshots/*") if path.is_dir())
    if main.is_file():
        revision = files.content(main).decode("ascii", "replace").strip()
        snapshots = [path for path in snapshots if path.name == revision]
    if len(snapshots) != 1:
        raise InvalidInput(
            f"{name}: its folder {home} has {len(snapshots)} snapshots that could be meant; name one of its folders "
            "in snapshots/"
        )
    return snapshots[0]
