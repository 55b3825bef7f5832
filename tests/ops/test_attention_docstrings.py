"""The docstrings of attention and its masks: each has what an API reference needs, and its example runs."""

import doctest
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsek as sk

MASK_BUILDERS = (
    "full", "causal", "sliding_window", "strided", "dilated", "bigbird", "block_diagonal", "topk", "from_blocks",
    "from_dense", "from_transformers", "from_flex", "from_mask_mod", "from_pattern", "per_head", "per_batch",
)  # fmt: skip
EXPORTS = ("to_flex", "to_fa4", "to_pattern", "to_dense", "dense_rows", "element_mask", "verify", "to")
DOCUMENTED: dict[str, Callable[..., Any]] = {
    **{
        each.__name__: each
        for each in (
            sk.attention,
            sk.attention_varlen,
            sk.attention_paged,
            sk.plan_attention,
            sk.plan_attention_backward,
            sk.plan_attention_paged,
        )
    },
    **{f"BlockMask.{name}": getattr(sk.BlockMask, name) for name in (*MASK_BUILDERS, *EXPORTS)},
    **{f"MaskPolicy.{name}": getattr(sk.MaskPolicy, name) for name in ("mask", "mask_for", "packed")},
    **{f"PageLists.{name}": getattr(sk.PageLists, name) for name in ("from_indices", "of_masks")},
    "BlockMask": sk.BlockMask,
    "BlockMask.__and__": sk.BlockMask.__and__,
    "BlockMask.__or__": sk.BlockMask.__or__,
    "MaskPolicy": sk.MaskPolicy,
    "merge_attention": sk.merge_attention,
    "nn.SparseAttention": sk.nn.SparseAttention,
    "nn.SparseAttention.forward": sk.nn.SparseAttention.forward,
}
SELF = ("self", "mask", "a")  # of functions that are methods of BlockMask
WITHOUT_EXAMPLE = {"nn.SparseAttention.forward", "BlockMask.to_fa4", "BlockMask.element_mask", "BlockMask.to"}


def documentation(name: str) -> str:
    found = DOCUMENTED[name]
    return inspect.getdoc(found.__call__ if name == "BlockMask.full" else found) or ""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_has_a_summary_every_argument_its_errors_and_an_example(name: str):
    text, found = documentation(name), DOCUMENTED[name]
    found = found.__call__ if name == "BlockMask.full" else found
    summary, _, rest = text.partition("\n")
    assert summary.endswith("."), summary
    assert not rest or rest.startswith("\n")
    arguments = [each for each in inspect.signature(found).parameters if each not in SELF]
    section = text.partition("Args:\n")[2].partition("\n\nReturns:")[0]
    fields = text.partition("Attributes:\n")[2]
    missing = [
        each for each in arguments if f"    {each}: " not in section + fields and f"**{each}: " not in section
    ]
    assert missing == []
    assert "Raises:" in text
    assert name in WITHOUT_EXAMPLE or ">>> " in text


@pytest.mark.parametrize("name", sorted(set(DOCUMENTED) - WITHOUT_EXAMPLE))
def test_the_example_of_a_docstring_prints_what_it_shows(name: str):
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(documentation(name), {}, name, None, 0)
    printed = io.StringIO()
    assert doctest.DocTestRunner().run(example, out=printed.write).failed == 0, printed.getvalue()
