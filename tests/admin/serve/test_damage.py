"""`cache-admin serve` over a journal with entries that nobody of ours wrote: it goes on, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from kvstore.admin.backends import Cache
from kvstore.admin.serve.collector import HIGHLIGHTS_S, IndexCollector
from kvstore.admin.serve.monitor import HANGS_S, Monitor
from kvstore.build import load_settings
from kvstore.keys import namespace_id
from tests.admin.conftest import fill, kv_space

pytestmark = pytest.mark.servers

LAST = "18446744073709551615-18446744073709551615"
#: Entries of which one stopped the loop for good.
ENTRIES = [
    ("events", "*", {b"\xff": b"\xff"}),
    ("events", "*", {"op": b"\xff", "segment": "", "first": "", "last": "", "depth": "0"}),
    ("faults", "*", {"at": "now", "request": b"\xff"}),
    ("faults", "*", {"at": "nan", "request": "r", "op": "match", "asked": "x"}),
    ("events", LAST, {"op": "evict", "segment": "x", "rule": "bad"}),
]


def poisoned(redis_url: str, folder: Path) -> dict[str, str]:
    filled = fill(folder / "cache", redis_url)
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        for kind, position, fields in ENTRIES:
            raw.xadd(f"kvs:{{{filled.kv_id}}}:{kind}", fields, id=position)  # type: ignore[arg-type]
    return {"index": redis_url, "payloads": f"file://{folder / 'cache'}"}


def test_a_look_passes_over_what_makes_no_sense_and_survives_what_is_unknown(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would not help: /healthz stays right."""
    now = 1_700_000_000.0
    with Cache(load_settings(poisoned(redis_url, tmp_path), {})) as cache:
        monitor = Monitor(cache, clock=lambda: now, monotonic=lambda: now)
        # One look is not enough: what failed came behind the first one's accounts.
        for _ in range(2):
            now += HIGHLIGHTS_S
            monitor.look()
            monitor.ask_payloads()
        assert monitor.ready().ok and monitor.turning().ok
        report = monitor.report(3600, None)
        assert namespace_id(kv_space()) in {one.id for one in report.status.namespaces}
        assert report.looked_s == now
        look = monitor.last_look()
        assert look is not None and look.unreadable >= len(ENTRIES)

        def fail(*_: object) -> None:
            raise ZeroDivisionError("x")

        monkeypatch.setattr(IndexCollector, "highlight", fail)
        for _ in range(20):
            now += HANGS_S / 10
            monitor.look()
            monitor.ask_payloads()
        assert monitor.turning().ok
        assert not monitor.ready().ok and "ZeroDivisionError" in monitor.ready().why
        monkeypatch.undo()
        monitor.look()
        assert monitor.ready().ok
