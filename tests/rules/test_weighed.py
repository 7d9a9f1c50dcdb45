from __future__ import annotations

import pytest

from kvstore.index.port import DETAIL_CHARS
from kvstore.rules.weighed import Weighed


def test_what_is_told_is_read() -> None:
    weighed = Weighed(0.34, 12.0, 131072)
    assert weighed.told() == "340 12000 131072"
    assert Weighed.read(weighed.told()) == weighed
    assert str(weighed) == "loading 131,072 tokens was expected to take 0.34 s, computing them 12 s"
    assert len(Weighed(1e9 - 1, 1e9 - 1, 10**12 - 1).told()) <= DETAIL_CHARS


@pytest.mark.parametrize(
    "text", ["", "1 2", "1 2 3 4", "inf 1 2", "-1 2 3", "1.5 2 3", "\u0661 2 3", "1" * 20 + " 2 3", "a b c\n"]
)
def test_what_another_release_told_is_left_alone(text: str) -> None:
    assert Weighed.read(text) is None
