"""Cards: data sheets where they are known, what the driver reports where they are not, and never a silent H200."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core import device as devices
from sparsek.core.device import CARDS, COPY_SHARE, H200, card_named, card_of
from sparsek.core.errors import InvalidInput
from sparsek.engine.plan.dense import dense_seconds
from sparsek.tools.cli.doctor import rates_of

BY_SHEET = [name for name in CARDS if name not in ("h200", "cpu")]
FACTS: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 79 << 30,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block_optin": 232448,
    "clock_rate": 1_980_000,
    "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120,
}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch):
    """Puts a GPU there of which torch reports these facts."""

    def put(**facts: Any) -> devices.Card:
        devices._cuda_card.cache_clear()
        found = SimpleNamespace(**{**FACTS, **facts})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        return card_of(torch.device("cuda", 0))

    yield put
    devices._cuda_card.cache_clear()


# NVIDIA's data sheets: TB/s, dense TFLOPS in bf16 and FP8, SMs, watts.
@pytest.mark.parametrize(
    ("name", "bandwidth", "bf16", "fp8", "sms", "watts"),
    [
        ("h100", 3.35, 989.4, 1978.9, 132, 700),
        ("h100-pcie", 2.0, 756, 1513, 114, 350),
        ("h100-nvl", 3.9, 835.5, 1670.5, 132, 400),
        ("h200-nvl", 4.8, 835.5, 1670.5, 132, 600),
        ("gh200", 4.0, 989.4, 1978.9, 132, 1000),
        ("gh200-144gb", 4.9, 989.4, 1978.9, 132, 1000),
        ("h800", 3.35, 989.4, 1978.9, 132, 700),
        ("h20", 4.0, 148, 296, 78, 400),
    ],
)
def test_a_card_has_the_rates_of_its_data_sheet(
    name: str, bandwidth: float, bf16: float, fp8: float, sms: int, watts: int
) -> None:
    card = card_named(name)
    copies = bandwidth * COPY_SHARE
    assert (card.bandwidth / 1e12, card.tflops["bf16"], card.tflops["fp8"]) == pytest.approx(
        (copies, bf16, fp8)
    )
    assert (card.sm_count, card.watts, card.capability) == (sms, watts, (9, 0))
    assert (card.source, card.measured) == ("NVIDIA's data sheet", frozenset())
    assert pickle.loads(pickle.dumps(card)) == card  # noqa: S301


def test_l2_feeds_no_faster_than_its_slices_and_the_sms_allow() -> None:
    assert CARDS["h200-nvl"].fabric == H200.fabric
    assert H200.fabric * 50 / 60 < CARDS["h100"].fabric < H200.fabric
    assert CARDS["h100-pcie"].fabric < CARDS["h100"].fabric
    assert CARDS["h20"].fabric == pytest.approx(H200.fabric * 78 / 132)


def test_names_are_told_apart_and_each_is_found_by_what_torch_reports(there: Any) -> None:
    assert len({card.name for card in CARDS.values()}) == len(CARDS)
    assert card_named("H100-PCIe") is CARDS["h100-pcie"]
    for name, card in CARDS.items():
        if name != "cpu":
            assert there(name=card.name, multi_processor_count=card.sm_count) is card, name
    large = there(name="NVIDIA GH200 480GB", total_memory=143 << 30)
    assert large is CARDS["gh200-144gb"]
    with pytest.raises(InvalidInput, match=r"no facts about a card named 'b200'; known: h200, .*h20, cpu"):
        card_named("b200")


def test_a_card_without_a_data_sheet_follows_from_what_the_driver_reports(there: Any) -> None:
    card = there(name="NVIDIA H100 96GB HBM3", multi_processor_count=120)
    assert card.tflops["bf16"] == pytest.approx(120 * 4096 * 1.98e9 / 1e12)
    assert card.bandwidth == pytest.approx(3.35e12 * COPY_SHARE, rel=0.01)
    assert (card.sm_count, card.l2_bytes, card.measured) == (120, 50 << 20, frozenset())
    assert card.caveat("bf16").startswith("from the SMs, clocks and memory bus that the driver reports")
    older = there(name="NVIDIA A100-SXM4-80GB", major=8, multi_processor_count=108, clock_rate=1_410_000)
    assert older.tflops["bf16"] == pytest.approx(312, rel=0.01)


def test_a_slice_of_a_card_is_not_the_card(there: Any) -> None:
    part = there(name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16)
    assert part.sm_count == 16
    assert part.tflops["bf16"] < H200.tflops["bf16"] / 4
    assert there(name=H200.name, multi_processor_count=16) is not H200


def test_a_driver_that_reports_no_clocks_gives_rates_all_the_same(there: Any) -> None:
    card = there(name="NVIDIA unknown", clock_rate=0, memory_clock_rate=0, memory_bus_width=0)
    assert 0 < card.bandwidth < H200.bandwidth
    assert 0 < card.tflops["bf16"] < 989.4


@pytest.mark.parametrize("name", BY_SHEET)
def test_a_plan_for_a_card_by_its_data_sheet_says_so(name: str) -> None:
    a, b = (
        sk.random_bsr(1024, 1024, 128, 0.25, dtype=torch.bfloat16, seed=0),
        torch.empty(1024, 512).bfloat16(),
    )
    q = torch.empty(1, 2, 1024, 128).bfloat16()
    said = "  rates      from NVIDIA's data sheet, not measured: rely on the ranking of kernels, not on the times"
    plan = sk.plan_spmm(a, b, device=name)
    texts = [
        plan.explain(),
        sk.plan_attention(q, q, q, device=name).explain(),
        sk.choose_format(b.mT, a.to_dense(), device=name).explain(),
    ]
    assert all(said in text.splitlines() for text in texts)
    assert all(f"on {CARDS[name].name}" in text for text in texts)
    assert plan.kernel == sk.plan_spmm(a, b, device="h200").kernel
    assert "data sheet" not in sk.plan_spmm(a, b, device="h200").explain()
    assert "from NVIDIA's data sheet, not measured" in rates_of(CARDS[name])


def test_models_of_kernels_read_what_a_card_keeps_up() -> None:
    h100, h20 = card_named("h100"), card_named("h20")
    assert (H200.pace, h100.pace, CARDS["cpu"].pace) == (1.0, pytest.approx(1.0), 1.0)
    assert h20.pace == pytest.approx(148 / 989.4 * 132 / 78)
    assert H200.sustained("bf16") == 690.0
    assert h100.sustained("bf16") == pytest.approx(690.0)
    assert h20.sustained("bf16") == pytest.approx(148 * 690 / 989.4)
    a, b = (
        sk.random_bsr(4096, 4096, 128, 0.25, dtype=torch.bfloat16, seed=0),
        torch.empty(4096, 4096).bfloat16(),
    )
    seconds = {name: sk.plan_spmm(a, b, device=name).seconds for name in ("h200", "h100", "h20")}
    dense = {name: dense_seconds(card_named(name), "bf16", 4096, 4096, 4096) for name in seconds}
    assert seconds["h100"] == pytest.approx(seconds["h200"], rel=0.2)
    assert seconds["h20"] > 3 * seconds["h200"]
    for name in seconds:
        assert 2 < dense[name] / seconds[name] < 5.5  # the power limit slows the longer product by more
