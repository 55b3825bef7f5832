"""FlashAttention-3 and FlashInfer's block-sparse attention, and the peers of attention in FP8, on a GPU."""

from typing import Any

import pytest
import torch

from sparsek_bench.engine.peer import UnavailableError
from sparsek_bench.suites.attention import PEERS, AttentionCase
from sparsek_bench.suites.attention_fp8 import BENCH, AttentionFp8Case

pytestmark = pytest.mark.gpu
# FlashInfer has one library for plans of this size and of the published rows.
SIZE = (1, 16, 16, 4096, 4096, 128, 128)
CASES = [
    *(("fa3", AttentionCase(*SIZE, mask)) for mask in ("full", "causal")),
    ("fa3", AttentionCase(2, 8, 2, 1000, 1500, 64, 64, "causal")),
    *(("fa3_vllm", AttentionCase(*SIZE, f"window:{keys}")) for keys in (200, 384)),
    ("fa3_vllm", AttentionCase(1, 8, 2, 1000, 1500, 64, 64, "causal", dtype="fp16")),
    *(("fa3_fp8", AttentionFp8Case(*SIZE, mask)) for mask in ("full", "causal")),
    *(("flashinfer", AttentionCase(*SIZE, "blocks:0.25", (side, side))) for side in (64, 128)),
    *(
        (name, AttentionFp8Case(*SIZE, "blocks:0.25", (side, side)))
        for name in ("cudnn_bsa_fp8", "flashinfer_fp8")
        for side in (64, 128)
    ),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_a_peer_is_right_on_every_set(name: str, case: AttentionCase) -> None:
    device = torch.device("cuda", 0)
    peer: Any = next(each for each in (*PEERS, *BENCH.peers) if each.name == name)
    assert peer.why_not(case, device) == []
    sets = case.operands(device)[:2]
    try:
        ready = [peer.ready(case, [one], lambda text: None) for one in sets]  # each is judged
    except UnavailableError as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))
    outs = [each.calls[0]() for each in ready]
    assert not torch.equal(*outs)
