"""Masks of packed documents against their definition, element by element; which blocks they store; what they cost."""

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.build.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy
from tests.attn.mask.masks import check_mask
from tests.refusals import refused

NEARS = st.builds(
    Window,
    st.sampled_from((None, 1, 5, 70, 200)),
    st.sampled_from((None, 1, 1, 30, 100)),
    st.sampled_from((0, 0, 1, 3, 64, 100, 130, 200)),
)
BLOCKS = st.sampled_from((64, 128, (64, 128), (128, 64)))


def defined(scene: PackedLayout, near: Window) -> Tensor:
    """What Window and Documents say, bool [batch, 1, q_len, kv_len]."""
    seen = torch.zeros(scene.batch, 1, scene.q_len, scene.kv_len, dtype=torch.bool)
    k = torch.arange(scene.kv_len)
    for item, q_start, q_end, k_start, k_end, shift, origin in zip(
        *(x.tolist() for x in scene.docs), strict=True
    ):
        p = (torch.arange(q_start, q_end) + shift)[:, None]
        window = torch.ones(len(p), scene.kv_len, dtype=torch.bool)
        if near.back is not None:
            window &= k > p - near.back
        if near.ahead is not None:
            window &= k < p + near.ahead
        sinks = (k < origin + near.sinks) & (
            (k <= p) if near.ahead == 1 and not near.sinks_ahead else torch.tensor(True)
        )
        seen[item, 0, q_start:q_end] = (k_start <= k) & (k < k_end) & (window | sinks)
    return seen


@st.composite
def edges(draw: st.DrawFn, length: int, count: int) -> np.ndarray:
    inner = draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1))
    return np.array([0, *sorted(inner), length])


@st.composite
def packed(draw: st.DrawFn) -> PackedLayout:
    q_len = draw(st.sampled_from((0, 1, 5, 64, 130, 300)))
    count = draw(st.integers(1, 12))
    q_edges = draw(edges(q_len, count))
    if draw(st.booleans()):
        return PackedLayout(Documents.packed(q_edges, q_edges), q_len, q_len)
    kv_len = draw(st.sampled_from((0, 3, 64, 200, 500)))
    return PackedLayout(Documents.packed(q_edges, draw(edges(kv_len, count))), q_len, kv_len)


@st.composite
def scenes(draw: st.DrawFn) -> PackedLayout:
    """Several batch items, gaps between documents, keys and positions of any kind."""
    q_len, kv_len = draw(st.sampled_from((5, 130, 300))), draw(st.sampled_from((0, 64, 200)))
    batch, rows = draw(st.integers(1, 3)), []
    for item in range(batch):
        at = draw(edges(q_len, draw(st.integers(2, 5))))
        for q_start, q_end in itertools.pairwise(at):
            if draw(st.integers(0, 3)):
                k_start, k_end = sorted((draw(st.integers(0, kv_len)), draw(st.integers(0, kv_len))))
                shift, before = (
                    draw(st.integers(-q_len - 5, kv_len + 5)),
                    draw(st.sampled_from((0, 0, 1, 50))),
                )
                rows.append((item, q_start, q_end, k_start, k_end, shift, k_start - before))
    return PackedLayout(Documents(*np.array(rows, np.int64).reshape(-1, 7).T), q_len, kv_len, batch)


@settings(max_examples=30)
@given(packed(), NEARS, BLOCKS)
@example(PackedLayout(Documents.packed(*[np.array([0, 450])] * 2), 450, 450), Window(70, 1, 130), 64)
def test_packed_documents_are_masked_as_defined_and_store_no_block_too_many(
    scene: PackedLayout, near: Window, block: int
):
    mask = documents_mask(BlockMask, scene, near, block, "cpu", "drawn")
    assert torch.equal(check_mask(mask), defined(scene, near))


@settings(max_examples=30)
@given(scenes(), NEARS, BLOCKS)
def test_any_scene_is_masked_as_defined(scene: PackedLayout, near: Window, block: int):
    mask = documents_mask(BlockMask, scene, near, block, "cpu", "drawn")
    assert torch.equal(mask.to_dense(), defined(scene, near))
    assert mask.sizes.exact
    assert mask.stored_blocks <= BlockMask.from_dense(defined(scene, near), block).stored_blocks


def test_tiles_of_one_document_share_the_bits_of_its_sinks():
    at = np.array([0, 5000, 20000])
    mask = documents_mask(
        BlockMask, PackedLayout(Documents.packed(at, at), 20000, 20000), Window(256, 1, 10), 128, "cpu", ""
    )
    assert mask.bits is not None
    assert len(mask.bits) < 16


def test_half_a_million_tokens_cost_what_their_blocks_cost():
    at = np.arange(0, 512 * 1024 + 1, 4096)
    start = time.perf_counter()
    mask = documents_mask(
        BlockMask, PackedLayout(Documents.packed(at, at), at[-1], at[-1]), Window(1024, 1, 64), 128, "cpu", ""
    )
    assert time.perf_counter() - start < 10  # measured: 0.2 s; one byte for every pair would be 256 GB
    assert mask.stored_blocks < 11 * mask.rows
    assert mask.nbytes < 40e6


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(no_sync: Callable[[], AbstractContextManager[None]]):
    at = np.array([0, 100, 100, 400, 1000])
    scene = PackedLayout(Documents.packed(at, at), 1000, 1000)
    documents_mask(BlockMask, scene, Window(70, 1, 10), 64, "cuda", "")
    with no_sync():
        mask = documents_mask(BlockMask, scene, Window(70, 1, 10), 64, "cuda", "")
    assert torch.equal(mask.to_dense().cpu(), defined(scene, Window(70, 1, 10)))


def test_a_window_of_one_that_is_not_causal_sees_later_sinks_in_packed_documents_too():
    policy = MaskPolicy(window=1, sinks=3, causal=False, block=64)
    document = policy.mask(70).to_dense()[0, 0]
    packed = policy.packed(torch.tensor([0, 70, 140])).to_dense()[0, 0]
    assert document[0, 2]
    assert torch.equal(packed, torch.block_diag(document, document))


def test_a_policy_takes_cu_seqlens_that_it_need_not_read():
    cu_seqlens = torch.tensor([0, 100, 100, 400, 1000])
    for policy in (MaskPolicy(), MaskPolicy(window=70), MaskPolicy(window=70, causal=False, block=64)):
        wanted = policy.packed(cu_seqlens).to_dense()
        assert torch.equal(policy.packed(cu_seqlens, seq_len=1000, max_seqlen=600).to_dense(), wanted)
        longer = policy.packed(cu_seqlens, cu_seqlens, seq_len=1010).to_dense()
        assert torch.equal(longer[..., :1000, :1000], wanted)
        assert not longer[..., 1000:, :].any()
        assert not longer[..., 1000:].any()


REFUSED = {
    "sinks": (MaskPolicy(window=9, sinks=1), {"seq_len": 9}, "seq_len goes with a policy without sinks"),
    "stride": (MaskPolicy(window=9, stride=128), {"seq_len": 9}, "seq_len goes with a policy without sinks"),
    "keys": (
        MaskPolicy(),
        {"seq_len": 9, "cu_seqlens_k": torch.tensor([0, 9])},
        "seq_len goes with a policy without",
    ),
    "long": (MaskPolicy(), {"seq_len": 9, "max_seqlen": 8}, "max_seqlen is 8; a document has 9 tokens"),
    "short": (MaskPolicy(), {"seq_len": 8}, "cu_seqlens ends at 9; there are 8 tokens"),
    "alone": (MaskPolicy(), {"max_seqlen": 9}, "max_seqlen goes with seq_len"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_seq_len_is_refused(name: str):
    policy, more, text = REFUSED[name]
    refused(text, policy.packed, torch.tensor([0, 9]), **more)


@given(st.data())
def test_documents_are_block_diagonal_masks_with_a_window(data: st.DataObject):
    at = data.draw(edges(data.draw(st.integers(1, 400)), data.draw(st.integers(1, 6))))
    window, causal = data.draw(st.integers(1, 200)), data.draw(st.booleans())
    mask = BlockMask.documents(torch.from_numpy(at), window=window, causal=causal, block=64)
    scene = PackedLayout(Documents.packed(at, at), int(at[-1]), int(at[-1]))
    assert torch.equal(check_mask(mask), defined(scene, Window(window, 1 if causal else window)))
