"""When unfinished uploads are looked for. Needs no server: nothing is asked."""

from __future__ import annotations

from kvstore.payloads.s3.store import S3Payloads
from schemas.settings import S3Settings
from schemas.urls import s3_location


def due(now: list[float], draw: float) -> S3Payloads:
    return S3Payloads(s3_location("s3://bucket/prefix"), S3Settings(), lambda: now[0], lambda: draw)


def test_the_first_look_comes_within_a_minute_and_others_hourly() -> None:
    """A process that lives for an hour at most would otherwise never abort anything."""
    now = [1000.0]
    payloads = due(now, 0.5)
    now[0] += 86400.0  # counted from the first upload in parts, not from the start
    assert not payloads._abort_due()
    now[0] += 29.0
    assert not payloads._abort_due()
    now[0] += 1.0
    assert payloads._abort_due()
    now[0] += 2600.0
    assert not payloads._abort_due()
    now[0] += 1000.0
    assert payloads._abort_due()


def test_processes_that_start_together_do_not_look_together() -> None:
    now = [1000.0]
    fleet = [due(now, number / 10) for number in range(10)]
    assert sum(payloads._abort_due() for payloads in fleet) == 1
    now[0] += 30.0
    assert sum(payloads._abort_due() for payloads in fleet) == 5
