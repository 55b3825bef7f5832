"""Records: one JSON object per measured (case, kernel), appended as lines, and the only source of published numbers.

A record has the case, the kernel, the times, the peers of the same rounds, the machine, and the source:
`{op, case{}, kernel, config, ms{median,min,max,rounds}, tflops{useful,dense_equivalent}, gbps,
 roofline{bound_ms,fraction}, gate{error,budget,passed}, peers{name:{ms{},tflops}}, ratio{peer: rate over its
 rate}, env{gpu,driver,power_limit_w,torch,triton,cuda,watts,sm_mhz}, source_hash, date}`.

- `watts` and `sm_mhz`: means over the rounds of the power and of the SM clock; null on a CPU and where NVML is missing.
  Records of before 2026-11-23 lack both, and are read as if they were null.
- `op` is the meaning of `ms`, and OPS has the contents of each op's records. An operation's own name: one call on the
  device. "fresh": mask build, schedule and kernels of one call, host included. "mask_plan": one mask built and
  planned, host included. "host": wall-clock time of a call as users write it: how long the host is busy, or, of
  layers and of first calls of a process, until the GPU is idle. "pack": a dense matrix packed, ratios those of bytes
  a second.
- "model": prefill, a step of decoding, or a training step of a whole model until the GPU is idle, beside the dense one;
  `predicted` and `whole`: the speedup as the planner predicts it, null on a CPU, and that of 32 layers with a head of
  128,256 tokens. "pattern_steps": one of 100 training steps with one pattern. "generate": a token of transformers.
  "prune_memory": a whole model pruned; its fields are those of `PruneMemoryCase`. "fresh_product": a product with a new
  pattern, host included.
- "mesh": a training step of attention over several GPUs by the fastest way, wall time until all are done, beside one
  GPU and the other ways; its fields are those of `MeshCase`. "mesh_memory": the most memory of a card in a step.
  "mesh_model": a whole model in tensor parallel, beside the same on one GPU.
- Where nothing is rated, tflops (of peers too), gbps and roofline are null; "pack" has the last two.
- `memory` of attention and of its peers: the largest allocation of one call beyond q, k, v and the output, over the
  bytes of these; of attention_backward beyond dq, dk and dv, over the same bytes. `peak_gb` of attention_train: the
  most that a step and its operands hold at once, in 1e9 bytes. Both are null on a CPU.
- `symbolic_ms` and `symbolic_share` of spgemm: finding out which blocks meet, host included, and its share of a call on
  new patterns. `symbolic_gpu_ms` and `symbolic_gpu_share`: the same of the GPU's own time; null on a CPU.
- `ran` of records of host time: the functions of sparsek that one call executes, which `source_hash` is of. Older
  records lack it.
- Several kernels that are timed together, as in a step of an MLP: their names, joined by " + ".
"""

import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sparsek.core import files
from sparsek.core.clock import Times
from sparsek.core.device import CARDS, card_of
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError
from sparsek.core.machine import smi_facts, version_of
from sparsek.core.parsing import json_value
from sparsek.engine.plan.select import config_fields
from sparsek_bench.engine import sensors
from sparsek_bench.engine.bench import OPS, Record
from sparsek_bench.engine.case import Case
from sparsek_bench.engine.sources import JOINED, names_hash, source_hash

FIELDS = (
    *("op", "case", "kernel", "config", "ms", "tflops", "gbps", "roofline", "gate", "peers", "ratio"),
    *("env", "source_hash", "date"),
)
ENV_FIELDS = ("gpu", "driver", "power_limit_w", "torch", "triton", "cuda", *sensors.FIELDS)
TIMES = ("median", "min", "max", "rounds")
# Shapes of values, by what a value of another shape is called.
ANY, NUMBER, OR_NULL, TEXT = "", "not a number", "neither a number nor null", "not a non-empty string"


def fields_of(op: str) -> tuple[str, ...]:
    """The fields of the records of an op, in order."""
    return (*FIELDS, *OPS[op].extra, *(("ran",) if OPS[op].hosted else ()))


def faults(record: Any) -> list[str]:
    """Everything that keeps an object from being a record; [] means it is one."""
    if not isinstance(record, dict):
        return [f"a record is a JSON object, got {type(record).__name__}"]
    op = record.get("op", "spmm")
    if not isinstance(op, str) or op not in OPS:
        return [f"op {op!r} is not one of {', '.join(OPS)}"]
    wanted = fields_of(op)
    found = [f"field {name} is missing" for name in wanted if name not in record and name != "ran"]
    found += [f"field {name} is not part of a record" for name in record if name not in wanted]
    objects = ("case", "ms", "gate", "peers", "ratio", "env")
    found = found or [f"{name} is not an object" for name in objects if not isinstance(record[name], dict)]
    return found or list(_faults(record, OPS[op]))


def _faults(record: Record, kind: type[Case]) -> Iterator[str]:
    """The faults of a record that has every field, and objects where it should."""
    of_case = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    wrong = list(_wrong("case", record["case"], dict.fromkeys(of_case, ANY), may_lack=kind.later))
    try:
        if not wrong:
            case_of(record)
    except (SparseKError, TypeError, ValueError, IndexError) as error:
        wrong = [f"case: {error}"]
    yield from wrong
    times = dict.fromkeys(TIMES, NUMBER)
    peer = {"ms": times, "tflops": ANY, **dict.fromkeys(kind.peer_extra, OR_NULL)}
    shapes: dict[str, Any] = {
        "ms": times,
        "tflops": {"useful": NUMBER, "dense_equivalent": NUMBER},
        "roofline": {"bound_ms": NUMBER, "fraction": NUMBER},
        "gbps": NUMBER if kind.rated else OR_NULL,
        **dict.fromkeys(kind.extra, OR_NULL),
        "gate": dict.fromkeys(("error", "budget", "passed"), ANY),
        "peers": dict.fromkeys(record["peers"], peer),
        "ratio": dict.fromkeys(record["peers"], NUMBER),
        "env": dict.fromkeys(ENV_FIELDS, ANY) | dict.fromkeys(sensors.FIELDS, OR_NULL),
        **dict.fromkeys(("kernel", "source_hash", "date"), TEXT),
    }
    for name, shape in shapes.items():
        if kind.rated or record[name] is not None or name not in ("tflops", "roofline"):
            yield from _wrong(name, record[name], shape, may_lack=sensors.FIELDS)
    if record["gate"].get("passed") is not True:
        yield "gate.passed is not true: a time without a passed gate is not a record"
    try:
        datetime.datetime.fromisoformat(str(record["date"]))
    except ValueError:
        yield f"date {record['date']!r} is not an ISO date"


def _wrong(where: str, value: Any, shape: Any, may_lack: Iterable[str] = ()) -> Iterator[str]:
    """What keeps a value from its shape: one of ANY, NUMBER, OR_NULL and TEXT, or the shapes of an object's fields."""
    if isinstance(shape, str):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        text = isinstance(value, str) and value != ""
        if not {ANY: True, NUMBER: number, OR_NULL: number or value is None, TEXT: text}[shape]:
            yield f"{where} is {shape}"
    elif not isinstance(value, dict):
        yield f"{where} is not an object"
    elif not set(shape).difference(may_lack) <= set(value) <= set(shape):
        yield f"{where} has the fields {sorted(value)}, expected {sorted(shape)}"
    else:
        wrong = [each for name in value for each in _wrong(f"{where}.{name}", value[name], shape[name])]
        yield from wrong
        if tuple(shape) == TIMES and not wrong:
            if not 0 < value["min"] <= value["median"] <= value["max"]:
                yield f"{where} does not hold 0 < min <= median <= max"
            elif value["rounds"] < 1:
                yield f"{where}.rounds is not positive"


def case_of(record: Mapping[str, Any]) -> Any:
    """The case of a well-formed record."""
    return OPS[record["op"]].from_record(record["case"])


def append(path: Path, records: Iterable[Record]) -> None:
    """Appends records to a JSON-lines file, made if needed. Raises InvalidInput for a malformed one."""
    lines = []
    for record in records:
        wrong = faults(record)
        if wrong:
            raise InvalidInput(f"not a record: {'; '.join(wrong)}")
        lines.append(json.dumps(record, sort_keys=False, allow_nan=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        files.blamed_on(path, InvalidInput, "cannot be written"),
        open(path, "a", encoding="utf-8", opener=files.open_at_once) as file,
    ):
        file.write("".join(lines))


def read(path: Path) -> list[Record]:
    """Records of one .jsonl file, or of every one under a folder, in file order. Raises InvalidFile with
    file:line.
    """
    found: list[Record] = []
    for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
        try:
            lines = files.content(file).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{file}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = json_value(line, f"{file}:{number}")
            wrong = faults(record)
            if wrong:
                raise InvalidFile(f"{file}:{number}: {'; '.join(wrong)}")
            record["env"] = dict.fromkeys(sensors.FIELDS) | record["env"]
            found.append(record)
    return found


def short_name(card: str) -> str:
    """The folder of a card's records: "h200" of "NVIDIA H200"."""
    short = next((name for name, known in CARDS.items() if known.name == card), card)
    return short.lower().replace(" ", "_")


def newest(records: Iterable[Record]) -> list[Record]:
    """The newest record of every (case, kernel, card), in order of first appearance."""
    best: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (case_of(record), record["kernel"], record["env"]["gpu"])
        if key not in best or when(record) >= when(best[key]):
            best[key] = record
    return list(best.values())


def when(record: Record) -> datetime.datetime:
    """When it was measured; without a zone, in UTC."""
    moment = datetime.datetime.fromisoformat(record["date"])
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)


def now() -> str:
    """The time of a record: UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def times_of(times: Times) -> dict[str, float | int]:
    """The `ms` object of a record, rounded to nanoseconds."""
    return {name: round(getattr(times, name), 6) for name in TIMES}


def config_of(config: Any) -> dict[str, Any]:
    """A kernel's frozen config, or the configs of several by name, as a JSON object; what JSON lacks becomes text."""
    if isinstance(config, Mapping):
        return {name: config_of(one) for name, one in config.items()}
    if not is_dataclass(config) or isinstance(config, type):
        return {} if config is None else {"config": str(config)}
    return config_fields(config)


def hash_of(op: str, kernel: str, ran: Iterable[str] = ()) -> str:
    """The source hash of a record: of the kernel and of what else the op times, or of the functions that `ran`."""
    kind = OPS[op]
    return names_hash(ran) if kind.hosted else source_hash(JOINED.join((kernel, *kind.sources)))


def is_fresh(record: Mapping[str, Any]) -> bool:
    """Whether the kernel's source is still the one that was measured."""
    try:
        ran = record.get("ran")
        if OPS[record["op"]].hosted and not ran:  # of before 2026-11-28
            return False
        return record["source_hash"] == hash_of(record["op"], record["kernel"], ran or ())
    except InvalidInput:
        return False


def environment(device: torch.device, seen: sensors.Sensors | None = None) -> dict[str, Any]:
    """What a measurement ran on; with what the sensors saw, the `env` object of a record.

    On a CPU, driver, power limit and CUDA are null.
    """
    on_gpu = device.type == "cuda"
    driver, power = smi_facts(device.index or 0) if on_gpu else (None, None)
    return {
        "gpu": card_of(device).name,
        "driver": driver,
        "power_limit_w": power,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda if on_gpu else None,
        **(seen.means() if seen else {}),
    }
