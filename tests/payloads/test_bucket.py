"""How long engines and tools wait for a bucket that asks for fewer requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvstore.breaker import Breaker
from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.errors import Throttled
from kvstore.payloads.bucket import for_engines, for_tools
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.throttle import Throttle
from kvstore.threads.each import for_each
from kvstore.threads.transfers import Crew
from schemas.settings import BreakerSettings, S3Settings
from tests.waiting import PATIENCE_S

S3 = S3Settings(max_backoff_s=0.05)


class Refusing(MemoryPayloads):
    """Refuses the first calls that put."""

    refusals = 9

    def put(self, *args: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Throttled("slow down")
        super().put(*args)  # type: ignore[arg-type]


def as_engine(bucket: PayloadStore) -> PayloadStore:
    breaker, throttle = Breaker("payloads", BreakerSettings()), Throttle(longest_s=S3.max_backoff_s)
    return for_engines(bucket, S3, breaker, throttle, together=Crew(1).together, count=lambda _: None)


def test_a_tool_waits_as_long_as_it_takes_and_an_engine_does_not(store_name: str) -> None:
    name = fresh_name()
    with for_tools(Refusing(store_name), S3) as tool:
        tool.put(name, views(b"abc"))
        assert fetch(tool, name) == b"abc"
    with as_engine(refusing := Refusing(store_name)) as engine:
        with pytest.raises(Throttled):
            engine.put(name, views(b"abc"))
        assert refusing.refusals >= Refusing.refusals - S3.attempts
    with for_tools(refusing := Refusing(store_name), S3, patient=False) as brief:
        with pytest.raises(Throttled):
            brief.put(name, views(b"abc"))
        assert refusing.refusals >= Refusing.refusals - S3.attempts


def test_nothing_is_waited_for_when_the_work_has_been_stopped(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a failure, comes while the other jobs wait for their turns."""
    one_waits, calls = threading.Event(), list[str]()

    class Bucket(MemoryPayloads):
        def delete(self, names: Sequence[str]) -> int:
            calls.append(names[0])
            one_waits.set()
            raise Throttled("slow down")

    def work(thing: str) -> None:
        if thing == "stops":
            assert one_waits.wait(PATIENCE_S)
            raise KeyboardInterrupt
        tool.delete([thing])

    monkeypatch.setattr(Throttle, "turn", lambda *_: (1000 * PATIENCE_S if calls else 0.0, 0.0))
    with for_tools(Bucket(store_name), S3) as tool, pytest.raises(KeyboardInterrupt):
        for_each(work, ["waits", "stops"], 2)
    assert calls == ["waits"]
