"""Up to which share of stored values sparse wins, by prediction."""

from pathlib import Path
from typing import Any

import pytest

from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.tools.advise import break_even as even
from sparsek.tools.advise.break_even import Curve, CurveSetting

SETTING = CurveSetting((4096, 4096))


@pytest.mark.parametrize(("form", "values"), [("bsr", 1.0), ("bsr24", 0.5)])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [64, 4096])
def test_sparse_wins_up_to_the_share_and_loses_above(
    form: str, values: float, block: int, tokens: int
) -> None:
    share = even.break_even(form, block, tokens, SETTING) / values
    limit = SETTING.dense_seconds(tokens)
    assert SETTING.seconds(form, block, tokens, share) <= limit
    if share < 1:
        assert SETTING.seconds(form, block, tokens, share + 1 / even.FINE) > limit


def test_small_blocks_need_more_to_be_gone() -> None:
    shares = [even.break_even("bsr", block, 4096, SETTING) for block in (16, 32, 64, 128)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1]


def test_where_nothing_runs_nothing_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(p: Any) -> Any:
        raise Unsupported("no kernel", {})

    monkeypatch.setattr(even, "choose", refuse)
    assert even.break_even("bsr", 64, 64, SETTING) == 0


@pytest.mark.parametrize(
    ("form", "block", "tokens", "said"),
    [
        ("csr", 64, 16, "no format is called 'csr'"),
        ("bsr24", 32, 16, "multiples of 64"),
        ("bsr", 64, 0, "tokens must be at least 1"),
    ],
)
def test_questions_without_sense_are_refused(form: str, block: int, tokens: int, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        even.break_even(form, block, tokens)


def test_curves_are_of_every_format_and_block_that_fits() -> None:
    found = even.curves(CurveSetting((128, 256)), tokens=(16, 1024))
    assert [(curve.form, curve.block) for curve in found] == [
        ("semi24", 0), ("bsr", 16), ("bsr", 32), ("bsr", 64), ("bsr", 128), ("bsr24", 64), ("bsr24", 128),
    ]  # fmt: skip
    assert all(len(curve.shares) == 2 for curve in found)
    assert all(share in (0, 0.5) for share in found[0].shares)
    assert even.curves(CurveSetting((128, 100)), (64,), (16,))[0].form == "bsr"


def test_two_four_wins_or_loses_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = SETTING.seconds("semi24", 0, 4096, 0.5)
    monkeypatch.setattr(even, "dense_seconds", lambda *sides, **more: seconds)
    assert even.break_even("semi24", 0, 4096, SETTING) == 0.5
    monkeypatch.setattr(even, "dense_seconds", lambda *sides, **more: seconds * 0.99)
    assert even.break_even("semi24", 0, 4096, SETTING) == 0


def test_the_picture_has_a_panel_for_each_format_with_blocks(tmp_path: Path) -> None:
    one, two = (tmp_path / name for name in ("one.svg", "two.svg"))
    flat = Curve("bsr", 64, (0.5, 0.5))
    even.draw([Curve("semi24", 0, (0.5, 0.5)), flat], SETTING, one, (16, 1024))
    even.draw([flat, Curve("bsr24", 64, (0.25, 0.25))], SETTING, two, (16, 1024))
    lines = [path.read_text().count("<polyline") for path in (one, two)]
    assert lines == [1, 2]
