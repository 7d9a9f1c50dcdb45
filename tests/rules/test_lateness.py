"""Which payloads may still be on their way to the shared store."""

from __future__ import annotations

import pytest

from kvstore.rules.lateness import is_late
from schemas.records import PartRecord, SegmentRecord
from schemas.settings import Settings

RECORD = SegmentRecord((PartRecord(4096, (8,)),), 1, "none", created_s=100_000)


def settings(write: str | None) -> Settings:
    bucket = "s3://bucket/prefix"
    payloads = bucket if write is None else {"fast": "file:///tier", "slow": bucket, "write": write}
    return Settings.model_validate({"payloads": payloads, "index": "redis://host"})


@pytest.mark.parametrize(
    ("write", "now_s", "late"),
    [
        ("back", 100_000, True),
        ("back", 100_599, True),
        ("back", 100_600, False),
        # An index whose clock was ahead: for ten minutes, but not for as long as it is.
        ("back", 99_401, True),
        ("back", 99_400, False),
        ("through", 100_000, False),
        (None, 100_000, False),
    ],
)
def test_a_payload_is_late_for_ten_minutes_with_write_back(
    write: str | None, now_s: float, late: bool
) -> None:
    assert is_late(RECORD, settings(write), lambda: now_s) is late
