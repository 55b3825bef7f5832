"""`sparsek prune MODEL -o OUT --calib texts.txt`: a checkpoint of transformers becomes sparse, with a report."""

import hashlib
import importlib
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import torch
import typer
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, files
from sparsek.core.device import GPUS
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, first_line
from sparsek.core.memory import gigabytes
from sparsek.core.parsing import json_value, parse_block, unknown
from sparsek.core.terminal import AsJson, console, json_text, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek.files.tensor_file import opened
from sparsek.models import prune as pruning
from sparsek.models import quality, scores, stream
from sparsek.models.checkpoint import weight_files
from sparsek.models.config import AUTO, BlockSemiSparse, BlockSparse, Float8, SemiSparse
from sparsek.models.report import ModelReport, Quality
from sparsek.models.sparsify import check_matches, layers_of
from sparsek.products.ops.weight_formats import FORMATS, FP8
from sparsek.tools.cli.options import Keep

Each = TypeVar("Each")
UNFINISHED = "unfinished"  # the folder of a run inside of OUT
CAUSAL, PAIRS, ENCODER = "causal", "pairs", "encoder"  # tasks; PAIRS: a decoder writes a target of a text
HELD_OUT = 10  # of so many texts one is held out
MOST_TEXTS = 256  # of an evaluation


class Text(NamedTuple):
    """A text, and what a decoder writes of it."""

    text: str
    target: str | None = None


def prune(
    model: Annotated[
        Path,
        typer.Argument(
            help="A folder of transformers: config.json, .safetensors, a tokenizer.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of the new checkpoint.", show_default=False)
    ],
    calib: Annotated[
        Path,
        typer.Option(
            help='Texts: one a line, or in .jsonl objects with "text", and "target" for a decoder after an encoder.',
            show_default=False,
        ),
    ],
    config: Annotated[
        str,
        typer.Option(
            help=f"What layers become: {AUTO}, dense, or one of {', '.join(FORMATS[1:])}, also with block and share: "
            "bsr:64:0.25."
        ),
    ] = "bsr",
    keep: Keep = 0.5,
    block: Annotated[str, typer.Option(help="Block: 64, or 64x128.")] = "64",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=CONFIG", help="A config for layers by name; the first that matches. Repeatable."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"What is dropped: one of {', '.join(scores.METHODS)}.")
    ] = "obs",
    reconstruct: Annotated[
        str, typer.Option(help="How weights are updated: layer, block or none.")
    ] = "layer",
    budget: Annotated[
        str, typer.Option(help=f"How --keep is spread over layers: one of {', '.join(scores.BUDGETS)}.")
    ] = "uniform",
    permute: Annotated[
        bool, typer.Option(help="With obs, drop whole hidden units and heads, and sort the others.")
    ] = True,
    max_error: Annotated[
        float | None, typer.Option(help="With auto: the largest relative error of a layer's outputs.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="With auto: the predicted speed of all layers over dense.")
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(help=f"Predict for it: one of {', '.join(GPUS)}. Default: the GPU, else h200."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Rows of x in predictions.")] = 4096,
    evaluate: Annotated[
        Path | None,
        typer.Option("--eval", help="Texts to compare on. Default: every tenth of --calib, held out."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Texts of the calibration; of causal models pieces of text.")
    ] = 512,
    length: Annotated[int, typer.Option(help="Tokens of a text or piece.")] = 512,
    batch: Annotated[int, typer.Option(help="Texts in a batch.")] = 8,
    device: Annotated[
        str | None, typer.Option(help="Where one block at a time is computed. Default: the GPU, else cpu.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was ended.")] = False,
    json: AsJson = False,
) -> None:
    """Prunes the linear layers of a model by calibration, and writes a checkpoint that from_pretrained loads.

    Activations and finished blocks are in OUT/unfinished until the checkpoint is written. After a kill, --resume with
    the same options goes on there; of a finished run it only names the result. report.html and report.json beside the
    checkpoint have the error and kept norm of each layer, and speeds. On texts that were held out they have the
    perplexity of a causal model, or of the targets of an encoder-decoder, or the mean cosine of an encoder's hidden
    states to the dense ones. Nothing is downloaded, and no code of a model is run.

    --json: that of report.json: {out, rows: [{name, shape, format, why_not, why, config, kept, kept_norm, error,
    error_after, seconds, dense_seconds, pruning_seconds, measured_speed, speed}], card, tokens, speed, measured:
    {dense_seconds, seconds, card, what}, quality: {measure, before, after, texts}, settings}.
    """
    began = time.monotonic()
    arguments.one_of("--method", method, scores.METHODS)
    arguments.one_of("--reconstruct", reconstruct, ("none", *get_args(pruning.Reconstruct)))
    arguments.one_of("--budget", budget, scores.BUDGETS)
    for name, value in (("--samples", samples), ("--length", length), ("--batch", batch)):
        arguments.integer(name, value, 2 if name == "--length" else 1)
    rules = _rules(config, rule or [], keep, block)
    about = {
        "model": model.resolve().name,
        "config": ", ".join([*(rule or []), f"{config} (block {block}, keep {keep} where not given)"]),
        "method": f"{method}, reconstruct {reconstruct}, budget {budget}{'' if permute else ', no-permute'}",
        "run": _run_of(model, (calib, evaluate), (max_error, speedup, card, tokens, samples, length, batch)),
    }
    document = _finished(out, about) if resume else None
    if document is not None:
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        if json:
            print_json(document)
        else:
            console().print(
                f"{out}: the run is finished; its report is {out / 'report.html'}", soft_wrap=True
            )
        return
    folder, where = _folder(out, resume), arguments.device("--device", device or _usual_device())
    texts, held_out = _texts(calib), None if evaluate is None else _texts(evaluate)
    if held_out is None:
        texts, held_out = _split(texts, calib)
    found, tokenizer, task = _loaded(model)
    check_matches(rules, layers_of(found))
    _check_words(tokenizer, texts, model)
    data = _Data(tokenizer, task, min(length, _longest(found, tokenizer)), batch)
    for path, those in ((calib, texts), (evaluate or calib, held_out)):
        if task == PAIRS and any(each.target is None for each in those):
            raise InvalidInput(
                f"{path}: {type(found).__name__} is an encoder with a decoder; each line of a .jsonl file must be an "
                'object with a "text" and a "target", such as its summary or translation'
            )
    calibration = data.batches(texts, samples)
    pieces = data.batches(held_out, MOST_TEXTS, batch if task == ENCODER else 1)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    blocks = max(1, sum(len(stack.blocks) for stack in stream.stacks_of(found)))
    with _made(out), progress(blocks + 2, "prune", left=True) as (say, advance):
        done = 0

        def step(finished: int, total: int, name: str) -> None:
            nonlocal done
            for _ in range(done, min(finished, blocks)):
                advance()
            done = max(done, finished)
            say(name or "writes the checkpoint")

        say("measures the dense model")
        before = _measured(found, pieces, task, where)
        finite = before.isfinite().all() if isinstance(before, Tensor) else math.isfinite(before)
        if not bool(finite):
            _check_parameters(found)
        advance()
        report = pruning.prune(
            found,
            rules,
            calibration=calibration,
            method=method,  # type: ignore[arg-type]
            reconstruct=None if reconstruct == "none" else reconstruct,  # type: ignore[arg-type]
            budget=budget,  # type: ignore[arg-type]
            permute=permute,
            max_error=max_error,
            speedup=speedup,
            card=card or ("h200" if where.type == "cpu" else str(where)),
            tokens=tokens,
            device=where,
            folder=folder,
            progress=step,
        )
        say("measures the sparse model")
        after = _measured(found, pieces, task, where)
        advance()
        with _quiet():
            found.save_pretrained(out)
            tokenizer.save_pretrained(out)
    shown = {
        **about,
        "calibration": f"{calib.name}, {_count(calibration)} texts of up to {data.length} tokens",
        "time": f"{time.monotonic() - began:.0f} s",
        "peak memory": _peak(where),
    }
    report = replace(report, quality=_quality(before, after, _count(pieces)), settings=shown)
    report.to_html(out / "report.html")
    document = {"out": str(out), **report.to_dict()}
    with files.replacing(out / "report.json") as file:
        file.write((json_text(document) + "\n").encode())
    shutil.rmtree(folder)
    if json:
        print_json(document)
    else:
        _show(report, out)


def config_of(text: str, keep: float, block: str) -> Any:
    """A config from "bsr", "bsr:64", "bsr:64x128:0.25", "semi24_fp8", "auto" or "dense" (None)."""
    name, *sizes = text.strip().split(":")
    if name == AUTO or name == "dense":
        if sizes:
            raise InvalidInput(f"{text!r}: {name} has neither block nor share")
        return AUTO if name == AUTO else None
    if name not in FORMATS:
        raise unknown("config", name, (AUTO, *FORMATS))
    base = name.removesuffix(FP8)
    if base in ("dense", "semi24") and sizes:
        raise InvalidInput(f"{text!r}: {name} has no blocks; write {name}")
    if len(sizes) > 2:
        raise InvalidInput(f"{text!r}: write FORMAT:BLOCK:SHARE, such as bsr:64:0.25")
    inner: Any = None
    if base == "semi24":
        inner = SemiSparse()
    elif base != "dense":
        try:
            share = float(sizes[1]) if len(sizes) > 1 else keep
        except ValueError:
            raise InvalidInput(f"{text!r}: {sizes[1]} is no share of blocks, such as 0.25") from None
        inner = (BlockSparse if base == "bsr" else BlockSemiSparse)(
            parse_block(sizes[0] if sizes else block), share
        )
    return Float8(inner) if name.endswith(FP8) else inner


def _rules(config: str, given: Sequence[str], keep: float, block: str) -> Any:
    """The rules of the options: those by name in their order, and then the one for all."""
    whole = config_of(config, keep, block)
    rules: dict[str, Any] = {}
    for each in given:
        glob, equals, text = each.rpartition("=")
        if not equals or not glob:
            raise InvalidInput(f"--rule {each!r}: write GLOB=CONFIG, such as '*.mlp.*=bsr:64:0.25'")
        if glob in rules:
            raise InvalidInput(f"--rule {each!r}: there is a rule for {glob!r} already")
        rules[glob] = config_of(text, keep, block)
    if not rules and whole is None:
        raise InvalidInput("--config dense leaves all layers as they are; add a --rule for some of them")
    return {**rules, "*": whole} if rules else whole


def _check_words(tokenizer: Any, texts: Sequence[Text], path: Path) -> None:
    """InvalidInput for a tokenizer without words, as transformers makes one for a folder without its files."""
    special, seen = {*tokenizer.all_special_ids}, set()
    for text, _ in texts:
        seen |= {*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]} - special
        if len(seen) > 1:
            return
    raise InvalidInput(
        f"{path}: its tokenizer makes {len(seen)} different tokens of the texts, besides special ones; the folder "
        "needs the files of the tokenizer, such as tokenizer.json, tokenizer.model or vocab.txt"
    )


def _finished(out: Path, about: Mapping[str, str]) -> Any:
    """The report of a run that is finished, or None. Raises InvalidInput for one of other options."""
    path = out / "report.json"
    if not path.is_file():  # which is written last
        return None
    document = json_value(files.content(path), path)
    had = document.get("settings") if isinstance(document, Mapping) else None
    if not isinstance(had, Mapping) or not about.keys() <= had.keys():
        return None
    for name, value in about.items():
        if had[name] != value:
            whose = f"whose {name} is {had[name]}, and not {value}"
            if name == "run":
                whose = "of another model, calibration or option"
            raise InvalidInput(f"{out}: has a finished run {whose}; -o names the folder of a new checkpoint")
    if not _has_checkpoint(out, any(row["format"] for row in document["rows"])):
        raise InvalidInput(
            f"{out}: has the report of a finished run, but not its checkpoint; -o names the folder of a new one"
        )
    return document


def _has_checkpoint(out: Path, sparse: bool) -> bool:
    """Whether all files of weights are there, and a config that names sparse layers if there are some."""
    config = out / "config.json"
    try:
        if not config.is_file() or not all(each.is_file() for each in weight_files(out)):
            return False
    except FileNotFoundError:
        return False
    about = json_value(files.content(config), config).get("quantization_config") or {}
    return not sparse or about.get("quant_method") == "sparsek"


def _run_of(model: Path, texts: Sequence[Path | None], options: Any) -> str:
    """What a run depends on besides the settings that its report names, as a hash: files of the model by name, size and
    time, the texts, and other options.
    """
    own = [each for each in model.iterdir() if each.is_file()] if model.is_dir() else []
    there = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in own]
    parts = [None if each is None else hashlib.sha256(files.content(each)).hexdigest() for each in texts]
    return hashlib.sha256(repr((sorted(there), parts, options)).encode()).hexdigest()[:12]


def _check_parameters(model: Any) -> None:
    """InvalidInput for the first parameter with NaN or Inf, in a block or outside."""
    for name, each in model.named_parameters():
        if each.is_floating_point() and not bool(each.float().isfinite().all()):
            owner, _, own = name.rpartition(".")
            raise InvalidInput(f"{owner or type(model).__name__}: its {own} has NaN or Inf")


def _folder(out: Path, resume: bool) -> Path:
    """The folder of the run, in that of the checkpoint. Raises InvalidInput where there is something else."""
    folder = out / UNFINISHED
    with _made(out), files.blamed_on(out, InvalidInput, "cannot be read"):
        others = [each for each in out.iterdir() if each != folder]
    if (folder / stream.STATE).exists():
        if not resume:
            raise InvalidInput(f"{out}: has a run that was ended; --resume continues it, or delete {folder}")
    elif others:
        raise InvalidInput(f"{out}: is not empty; -o names the folder of a new checkpoint")
    return folder


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """A folder, made with those above it. Those that it makes and that stay empty go; so does a run without a state."""
    folder = out / UNFINISHED
    with files.blamed_on(out, InvalidInput, "cannot be made"):
        new = [each for each in (folder, out, *out.parents) if not each.exists()]
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except SparseKError:
        if folder in new and not (folder / stream.STATE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for each in new:
            with suppress(OSError):
                each.rmdir()


def _usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _texts(path: Path) -> list[Text]:
    """The texts of a file, without empty ones."""
    try:
        lines = files.content(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidFile(f"{path}: is no text in UTF-8: {error}") from None
    if path.suffix == ".jsonl":
        found = [json_value(line, f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
        if not all(
            isinstance(each, Mapping)
            and isinstance(each.get("text"), str)
            and isinstance(each.get("target"), str | None)
            for each in found
        ):
            raise InvalidFile(
                f'{path}: each line must be an object with a "text", and a "target" for encoder-decoders'
            )
        texts = [Text(each["text"], each.get("target")) for each in found if each["text"].strip()]
    else:
        texts = [Text(each) for each in lines if each.strip()]
    if not texts:
        raise InvalidFile(f"{path}: has no text")
    return texts


def _split(texts: list[Text], path: Path) -> tuple[list[Text], list[Text]]:
    """Texts for the calibration, and every tenth, held out."""
    if len(texts) < 2:
        raise InvalidInput(
            f"{path}: has one text only, and one must be held out; --eval names a file of others"
        )
    step = min(HELD_OUT, len(texts))
    held_out = texts[step - 1 :: step]
    return [each for at, each in enumerate(texts, 1) if at % step], held_out


def _loaded(path: Path) -> tuple[Any, Any, str]:
    """A model of transformers in its dtype on the CPU, its tokenizer, and its task."""
    try:
        lib: Any = importlib.import_module("transformers")
        auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        raise InvalidInput("sparsek prune needs transformers: pip install 'sparsek[transformers]'") from None
    if not (path / "config.json").is_file():
        raise InvalidInput(f"{path}: is no folder of transformers with a config.json")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet():
            config = lib.AutoConfig.from_pretrained(path, **options)
            if getattr(config, "quantization_config", None) is not None:
                raise InvalidInput(f"{path}: is quantized or sparse already; prune the dense model")
            names = getattr(config, "architectures", None) or ()
            kind = getattr(lib, names[0], None) if names else None
            if not (isinstance(kind, type) and issubclass(kind, lib.PreTrainedModel)):
                kind = lib.AutoModel
            given = getattr(kind, "main_input_name", "input_ids")
            if given != "input_ids":
                raise InvalidInput(
                    f"{path}: {kind.__name__} takes {given}, no texts; prune it from Python by sk.prune, with "
                    f"batches of {given} as calibration"
                )
            tokenizer = lib.AutoTokenizer.from_pretrained(path, **options)
            state = _tensors(path)
            loading: Any = {
                "config": config,
                "state_dict": state,
                "dtype": "auto",
                "output_loading_info": True,
            }
            model, info = kind.from_pretrained(None, **loading)
            if (path / "generation_config.json").is_file():
                model.generation_config = lib.GenerationConfig.from_pretrained(path, local_files_only=True)
    except SparseKError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise InvalidInput(f"{path}: transformers cannot load it: {first_line(error)}") from None
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise InvalidFile(f"{path}: lacks {some} of {type(model).__name__}")
    name = type(model).__name__
    if name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        return model, tokenizer, PAIRS
    return model, tokenizer, CAUSAL if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else ENCODER


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, each in memory of its own, so that a layer's is free once the layer is replaced."""
    found: dict[str, Tensor] = {}
    for each in weight_files(path):
        with opened(each) as file:
            found |= {name: file.read(name) for name in file.tensors}
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars and warnings of transformers."""
    logs: Any = importlib.import_module("transformers.utils.logging")
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def _longest(model: Any, tokenizer: Any) -> int:
    """The most tokens of a text that the model takes."""
    known = (
        getattr(model.config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    )
    return min(each for each in (*known, 1 << 30) if isinstance(each, int) and each > 1)


class _Data:
    """Texts as batches of a model: of a causal one pieces without padding, of others padded texts, and targets."""

    def __init__(self, tokenizer: Any, task: str, length: int, batch: int) -> None:
        self.tokenizer, self.task, self.length, self.batch = tokenizer, task, length, batch

    def batches(self, texts: Sequence[Text], most: int, size: int = 0) -> list[dict[str, Tensor]]:
        """At most so many texts or pieces. `size`: of a batch."""
        size = size or self.batch
        if self.task == CAUSAL:
            pieces = self._pieces(texts)[:most]
            return [{"input_ids": torch.stack(part)} for part in _parts(pieces, size)]
        options = {"padding": True, "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        made = []
        for part in _parts(texts[:most], size):
            made.append(dict(self.tokenizer([each.text for each in part], **options)))
            if self.task == PAIRS:
                words = self.tokenizer(text_target=[each.target for each in part], **options)
                labels = words["input_ids"].masked_fill(words["attention_mask"] == 0, stream.IGNORED)
                # Not as long as the texts: by their length, masks are those of the encoder or of the decoder.
                more = int(labels.shape == made[-1]["input_ids"].shape)
                made[-1]["labels"] = functional.pad(labels, (0, more), value=stream.IGNORED)
        return made

    def _pieces(self, texts: Sequence[Text]) -> list[Tensor]:
        """The tokens of all texts, one after the other, in pieces of a length; what is left over is dropped."""
        end = self.tokenizer.eos_token_id
        words: list[int] = []
        for text, _ in texts:
            words += self.tokenizer(text, add_special_tokens=not words, verbose=False)["input_ids"]
            words += [] if end is None else [end]
        length = min(self.length, len(words))
        if length < 2:
            raise InvalidInput("the texts have less than two tokens")
        ids = torch.tensor(words[: len(words) // length * length], dtype=torch.int64, device="cpu")
        return list(ids.view(-1, length))


def _parts(items: Sequence[Each], size: int) -> list[list[Each]]:
    """Items in lists of at most so many."""
    return [list(items[at : at + size]) for at in range(0, len(items), size)]


def _count(batches: Sequence[dict[str, Tensor]]) -> int:
    """The texts of batches."""
    return sum(len(each["input_ids"]) for each in batches)


def _measured(model: Any, batches: list[dict[str, Tensor]], task: str, device: torch.device) -> Any:
    """The perplexity of a model that writes words, and of an encoder the mean hidden states."""
    measure = quality.hidden_means if task == ENCODER else quality.perplexity
    return measure(model, batches, device)


def _quality(before: Any, after: Any, texts: int) -> Quality:
    if not isinstance(before, Tensor):
        return Quality("perplexity", before, after, texts)
    return Quality("cosine", 1.0, float(functional.cosine_similarity(before, after).mean()), texts)


def _peak(device: torch.device) -> str:
    """The most memory that the process had, and on the device the most that was allocated by this run."""
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type != "cuda":
        return f"{gigabytes(host)} of the whole process"
    return f"host {gigabytes(host)}, device {gigabytes(torch.cuda.max_memory_allocated(device))}"


def _show(report: ModelReport, out: Path) -> None:
    screen, (heads, *lines) = console(), report.cells()
    screen.print(f"{out}: {report.facts[0]}", soft_wrap=True)
    shown = new_table("")
    for head in heads:
        words = head in ("layer", "shape", "format", "why")
        shown.add_column(head, justify="left" if words else "right", no_wrap=head != "why")
    for line in lines:
        shown.add_row(*line)
    screen.print(shown)
    for fact in report.facts[1:]:
        screen.print(f"{fact[0].upper()}{fact[1:]}.", soft_wrap=True)
    screen.print(f"The page of all layers: {out / 'report.html'}", soft_wrap=True)
