"""What `cache-admin serve` knows and exports, of a real index in memory, on clocks that the test moves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import kvstore.admin.serve.server
from kvstore.admin.backends import Cache
from kvstore.admin.counting import Growth
from kvstore.admin.reports import Amount, FastBackend
from kvstore.admin.serve import collector as surveying
from kvstore.admin.serve import sessions
from kvstore.admin.serve.collector import HIGHLIGHTS_S, LOOK_MOST_S
from kvstore.admin.serve.exporter import Exporter
from kvstore.admin.serve.exposed import Exposition
from kvstore.admin.serve.history import KEPT_S, SAMPLE_S, History
from kvstore.admin.serve.listener import HttpRequest
from kvstore.admin.serve.monitor import HANGS_S, READY_S, Monitor
from kvstore.admin.serve.reports import ServingReport
from kvstore.admin.serve.server import TEXT_KEPT_S, Serving
from kvstore.build import load_settings
from kvstore.errors import Throttled, TransientError
from kvstore.index.eviction import Scope
from kvstore.index.port import Outcome
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.janitor.janitor import Janitor
from kvstore.janitor.reports import STEPS, JanitorFault, JanitorState, StepState
from kvstore.keys import NO_SALT, NO_SESSION, NamespaceId, SegmentId, SessionId, new_segment_id, session_id
from kvstore.payloads import bucket
from kvstore.payloads.s3.store import S3Payloads
from kvstore.rules.reasons import MISS_REASONS, UNSAVED
from schemas.namespace import Namespace
from schemas.records import EvictionRule, PartRecord, SegmentRecord
from tests.admin.conftest import Admin, Filled, ec_space, kv_space
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
A = NamespaceId("a" * 16)


class World:
    """An index and a payload store in memory, a Monitor, and time."""

    def __init__(self, name: str, **settings: Any) -> None:
        tree = {"payloads": f"memory://{name}", "index": f"memory://{name}", "capacity_bytes": 10_000}
        self.cache = Cache(load_settings(tree | settings, {}))
        index = self.cache.made_index()
        assert isinstance(index, SqliteIndex)
        self.index = index
        self.now = 1_700_000_000.0
        self.monitor = Monitor(self.cache, clock=lambda: self.now, monotonic=lambda: self.now)

    def look(self, after_s: float = 0.0) -> ServingReport:
        self.now += after_s
        self.monitor.look()
        self.monitor.ask_payloads()
        return self.report()

    def report(self, window_s: int = 3600, janitor: JanitorState | None = None) -> ServingReport:
        return self.monitor.report(window_s, janitor)

    def register(self, namespace: Namespace) -> NamespaceId:
        return self.index.register(namespace, expected_blocks=100)

    def commit(
        self,
        name: NamespaceId,
        *,
        slots: int = 4,
        depth: int = 0,
        cost_us: int = 0,
        session: SessionId = NO_SESSION,
    ) -> SegmentId:
        segment = new_segment_id()
        record = SegmentRecord(
            parts=(PartRecord(100, (225,) * slots),),
            slots=slots,
            codec="none",
            created_s=int(self.now),
            depth=depth,
            cost_us=cost_us,
        )
        digests = b"".join(segment + bytes([i]) * 8 for i in range(slots))
        self.index.commit(name, segment, digests, record, rank=0, ranks=1, session=session)
        if not session:
            self.index.touch(name, [segment], self.now)
        return segment

    def tell(self, name: NamespaceId, asked: int, served: int, reason: str = "", op: Any = "match") -> None:
        outcome = Outcome(
            at_s=self.now,
            request="chat-1",
            op=op,
            asked=asked,
            served=served,
            reason=reason,
            position=served,
            missing=b"",
        )
        self.index.tell(name, [outcome])

    def metrics(self, janitor: JanitorState | None = None) -> dict[str, Metric]:
        text = exposition(self.monitor, janitor)(HttpRequest({}, "")).body.decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, family: str, **labels: str) -> float:
        """The sum of what has these labels."""
        samples = self.metrics()[family].samples
        return sum(one.value for one in samples if labels.items() <= one.labels.items())


def exposition(monitor: Monitor, janitor: JanitorState | None = None) -> Exposition:
    return Exposition(Exporter(monitor, lambda: janitor).metrics)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(f"serve-{request.node.name}")
    with made.cache:
        yield made


def a_janitor(now: float) -> JanitorState:
    steps = tuple(StepState(step=step, runs=number + 2, failures=number) for number, step in enumerate(STEPS))
    fault = JanitorFault(at_s=now, step="scrub", namespace=A, segment="ab" * 8, problem="checksum\nwrong")
    return JanitorState(at_s=now, rounds=7, last_round_s=now, steps=steps, faults=(fault,))


# -- totals and history --------------------------------------------------------------------------------------


def test_growth_counts_what_is_added_and_what_begins_anew() -> None:
    growth = Growth()
    assert growth.advance(A, {"asked": 100}) == {}
    assert growth.advance(A, {"asked": 130, "served": 5}) == {"asked": 30, "served": 5}
    assert growth.advance(A, {"asked": 130, "served": 5}) == {}
    # The index was emptied, and 20 were asked for since.
    assert growth.advance(A, {"asked": 20}) == {"asked": 20}
    growth.keep_to(())
    assert growth.advance(A, {"asked": 7}, is_new=True) == {"asked": 7}


def test_a_history_adds_up_in_every_window() -> None:
    history = History(0.0)
    for number in range(3 * 360):
        history.count({"asked": 10, "served": number % 10, "miss:absent": 10 - number % 10, "evicted": 3})
        history.sample(number * SAMPLE_S, number)
    now = 3 * 3600.0
    for window in (900, 3600, 7200, KEPT_S):
        report = history.report(now, window)
        assert len(report.points) <= 182
        assert all(point.at_s % report.step_s == 0 for point in report.points)
        samples = [n for n in range(3 * 360) if n * SAMPLE_S >= report.points[0].at_s]
        assert sum(point.asked for point in report.points) == 10 * len(samples)
        assert sum(point.served for point in report.points) == sum(n % 10 for n in samples)
        assert sum(point.misses["absent"] for point in report.points) == sum(10 - n % 10 for n in samples)
        assert sum(point.evicted_bytes for point in report.points) == 3 * len(samples)
        assert report.points[-1].stored_bytes == 3 * 360 - 1
        assert report.points[0].at_s >= now - window - report.step_s


def test_looks_in_quick_succession_are_one_sample() -> None:
    history = History(0.0)
    for at_s in range(0, 100, 2):
        history.count({"asked": 1})
        history.sample(at_s, at_s)
    points = history.report(100, 100).points
    assert [point.at_s for point in points] == list(range(0, 100, SAMPLE_S))
    # What came after the last sample is not in it yet.
    assert sum(point.asked for point in points) == 46


# -- a look --------------------------------------------------------------------------------------------------


def test_what_is_held_is_what_the_index_says(world: World) -> None:
    kv, ec = world.register(kv_space(model="m", tenant="t")), world.register(ec_space())
    segments = [world.commit(kv, slots=4, depth=4 * i, cost_us=1000) for i in range(3)]
    world.commit(ec, slots=1)
    world.index.pin(kv, segments[:1], most_bytes=5_000)
    world.index.evict(kv, segments[2:], delete_after_s=world.now, rule="admin")
    report = world.look()
    status = report.status
    assert status.total == Amount(segments=3, blocks=9, stored_bytes=2 * 1000 + 325)
    lines = {line.id: line for line in status.namespaces}
    assert set(lines) == {kv, ec}
    line = lines[kv]
    assert (line.model, line.tenant, line.kind, line.usage.stored_bytes) == ("m", "t", "kv", 2000)
    assert (line.upkeep.pinned_bytes, line.upkeep.trashed) == (1000, 1)
    assert line.cost_s == report.cost_s == world.index.usage(kv).cost_us / 1e6 > 0
    assert world.value("kvstore_stored_bytes", cache_namespace=kv) == 2000
    assert world.value("kvstore_stored_bytes") == 2325
    assert world.value("kvstore_recompute_seconds", cache_namespace=kv) == pytest.approx(line.cost_s)


def test_quotas_are_those_in_force(world: World) -> None:
    kv = world.register(kv_space(tenant="t"))
    world.commit(kv)
    world.index.set_quota(Scope.namespace(kv), 5_000)
    world.index.set_quota(Scope.tenant("t"), 7_000)
    world.index.set_quota(Scope.STORE, 20_000)
    status = world.look().status
    assert status.capacity_bytes == 20_000
    assert {line.scope: (line.quota_bytes, line.used_bytes) for line in status.quotas} == {
        "store": (20_000, 1_000),
        "tenant/t": (7_000, 1_000),
        f"namespace/{kv}": (5_000, 1_000),
    }
    assert status.namespaces[0].quota_bytes == 5_000
    assert world.value("kvstore_quota_bytes", scope="tenant/t") == 7_000
    assert world.value("kvstore_capacity_bytes") == 20_000


def test_history_begins_with_this_server_and_counters_with_the_namespace(world: World) -> None:
    kv = world.register(kv_space())
    world.tell(kv, 100, 60, "absent")
    before = world.look()
    assert sum(point.asked for point in before.history.points) == 0
    assert before.stats.total.asked == 100
    world.tell(kv, 50, 20, "deadline")
    world.tell(kv, 8, 5, "not_admitted", op="save")
    after = world.look(SAMPLE_S)
    points = after.history.points
    assert (sum(p.asked for p in points), sum(p.served for p in points)) == (50, 20)
    assert points[-1].misses == {"deadline": 30}
    told = after.stats.namespaces[0]
    assert (told.asked, told.served, told.misses) == (150, 80, {"absent": 40, "deadline": 30})
    assert world.value("kvstore_asked_blocks", cache_namespace=kv) == 150
    assert world.value("kvstore_missed_blocks", cache_namespace=kv, reason="absent") == 40
    assert world.value("kvstore_missed_blocks", cache_namespace=kv, reason="corrupt") == 0
    assert world.value("kvstore_offered_blocks", cache_namespace=kv) == 8
    assert world.value("kvstore_saved_blocks", cache_namespace=kv) == 5
    assert world.value("kvstore_unsaved_blocks", cache_namespace=kv, reason="not_admitted") == 3
    # What came while it ran is counted from its beginning.
    new = world.register(ec_space())
    world.tell(new, 9, 9)
    points = world.look(SAMPLE_S).history.points
    assert sum(p.asked for p in points) == 59


def test_a_reason_of_a_newer_version_is_counted_as_other(world: World) -> None:
    kv = world.register(kv_space())
    world.tell(kv, 9, 2, "eaten_by_a_bear")
    assert world.look().stats.total.misses == {"eaten_by_a_bear": 7}
    assert world.value("kvstore_missed_blocks", reason="other") == 7
    assert world.value("kvstore_missed_blocks") == 7


def test_counters_of_others_only_grow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "NAMED", 2)
    monkeypatch.setattr(surveying, "_OTHERS_AT_ONCE", 2)
    names = [world.register(kv_space(model=f"m{i}")) for i in range(7)]
    for number, name in enumerate(names):
        for _ in range(7 - number):
            world.commit(name)
        world.tell(name, 1000, 1000)
    report = world.look()
    assert [line.id for line in report.status.namespaces] == names[:2]
    assert report.others == 5
    assert report.status.total is not None and report.status.total.segments == 28
    assert world.value("kvstore_segments", cache_namespace="other") == 15
    for _ in range(3):
        world.look(SAMPLE_S)
    assert world.value("kvstore_asked_blocks", cache_namespace="other") == 0
    # The smallest becomes the largest: it stays where it is, or its counter would vanish from one place.
    for _ in range(20):
        world.commit(names[6])
    for name in names:
        world.tell(name, 10, 4, "absent")
    seen = []
    for _ in range(4):
        assert {line.id for line in world.look(SAMPLE_S).status.namespaces} == set(names[:2])
        seen.append(world.value("kvstore_asked_blocks", cache_namespace="other"))
    assert seen == sorted(seen)
    assert seen[-1] == 5 * 10
    assert world.value("kvstore_missed_blocks", cache_namespace="other", reason="absent") == 5 * 6
    # One of the others goes; one that was told apart goes, and its place is taken by the largest.
    for gone in (names[5], names[0]):
        empty(world, gone)
    after = world.look(SAMPLE_S)
    assert {line.id for line in after.status.namespaces} == {names[1], names[6]}
    assert world.value("kvstore_asked_blocks", cache_namespace="other") == 50
    assert sum(p.asked for p in world.report(KEPT_S).history.points) == 70


def empty(world: World, name: NamespaceId) -> None:
    """Erase a namespace with all it holds."""
    world.index.invalidate(name)
    world.index.drain(name, delete_after_s=0, limit=1000)
    world.index.reaped(name, [segment for segment, _ in world.index.reapable(name, world.now, 1000)])
    while world.index.erase(name, 1000) == "more":
        pass


def test_an_index_that_was_emptied_is_begun_with_anew(world: World) -> None:
    kv = world.register(kv_space())
    segment = world.commit(kv)
    world.tell(kv, 100, 100)
    world.look()
    world.index.evict(kv, [segment], delete_after_s=0, rule="capacity")
    assert world.look(SAMPLE_S).evictions_by_rule == {"capacity": 1}
    empty(world, kv)
    world.look(SAMPLE_S)
    world.register(kv_space())
    world.tell(kv, 5, 5)
    world.index.evict(kv, [world.commit(kv)], delete_after_s=world.now, rule="bad")
    report = world.look(SAMPLE_S)
    assert sum(point.asked for point in report.history.points) == 5
    assert report.stats.total.asked == 5
    assert report.events.events[-1].rule == "bad"
    # Anybody may ask: no name of an operator, and no digest of what somebody asked for.
    assert {(one.by, one.first, one.last, one.position) for one in report.events.events} == {
        ("", None, None, "")
    }
    assert report.evictions_by_rule["bad"] == 1


def test_an_event_that_is_read_again_after_a_gap_is_counted_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = world.register(kv_space())
    first, second = world.commit(kv), world.commit(kv)
    world.index.evict(kv, [first], delete_after_s=world.now, rule="capacity")
    world.look()
    # As where one of several shards has lost some: the others' are read from the beginning.
    monkeypatch.setattr(world.index, "has_lost", lambda *_: True)
    world.index.evict(kv, [second], delete_after_s=world.now, rule="capacity")
    report = world.look(SAMPLE_S)
    assert report.evictions_by_rule == {"capacity": 2}
    assert [line.segment for line in report.events.events] == [first.hex(), second.hex()]


def test_what_was_joined_is_counted_and_is_no_loss(world: World) -> None:
    kv = world.register(kv_space())
    segment = world.commit(kv)
    world.look()
    world.index.evict(kv, [segment], delete_after_s=world.now, rule="joined")
    report = world.look(SAMPLE_S)
    assert (report.events.events, report.evictions_by_rule) == ((), {"joined": 1})


def test_evictions_before_and_since(world: World) -> None:
    kv = world.register(kv_space())
    first, second = world.commit(kv, depth=8), world.commit(kv)
    world.index.evict(kv, [first], delete_after_s=world.now, rule="capacity")
    # The journal has the index's own time.
    world.monitor = Monitor(world.cache)
    report = world.look()
    assert report.evictions_by_rule == {}
    assert [(line.segment, line.rule, line.depth) for line in report.events.events] == [
        (first.hex(), "capacity", 8)
    ]
    world.index.evict(kv, [second], delete_after_s=world.now, rule="tenant_quota")
    report = world.look(SAMPLE_S)
    assert {line.segment for line in report.events.events} == {first.hex(), second.hex()}
    assert [line.stored_bytes for line in report.events.events] == [1000, 1000]
    assert report.evictions_by_rule == {"tenant_quota": 1}
    world.commit(kv)
    world.index.invalidate(kv)
    newest = world.look().events.events[-1]
    assert (newest.rule, newest.segment) == ("invalidated", None)
    assert world.value("kvstore_evictions", rule="invalidated") == 1


def test_prefixes_are_read_now_and_then(world: World) -> None:
    kv = world.register(kv_space())
    cold, warm = world.commit(kv, depth=4), world.commit(kv)
    world.now += 60
    world.index.touch(kv, [warm], world.now)
    report = world.look().top
    assert report.hottest[0].segment == warm.hex()
    assert [line.segment for line in report.coldest] == [cold.hex(), warm.hex()]
    world.index.evict(kv, [cold], delete_after_s=world.now, rule="admin")
    assert world.look(SAMPLE_S).top.coldest == report.coldest
    assert [line.segment for line in world.look(HIGHLIGHTS_S).top.coldest] == [warm.hex()]


def test_sessions_are_counted_and_the_largest_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = world.register(kv_space()), world.register(ec_space())
    ended, waits, lives = (session_id(NO_SALT, one) for one in ("ended", "waits", "lives"))
    for name, session, slots in ((names[0], ended, 4), (names[0], waits, 8), (names[1], lives, 1)):
        world.commit(name, slots=slots, session=session)
    world.index.session(names[0], ended, [], world.now, Hint(end=True))
    hint, allowance = Hint(retain_s=600), Allowance(10_000, 10_000, 10_000)
    told = world.index.session(names[0], waits, [], world.now, hint, allowance=allowance)
    [waiting] = world.index.find_sessions(names[0], [waits])
    assert waiting is not None
    report = world.look()
    seen = report.sessions
    assert (seen.live, seen.retained, seen.ended, report.sessions_read_s) == (1, 1, 1, world.now)
    assert (seen.retained_bytes, report.retainable_bytes) == (told.retained_bytes, 1000)
    assert [(one.session, one.state, one.until_s) for one in seen.sessions] == [
        (waits.hex(), "retained", waiting.until_s),
        (ended.hex(), "ended", None),
        (lives.hex(), "live", None),
    ]
    # Many are read in several looks, and what is told is of the last time that all were.
    monkeypatch.setattr(sessions, "AT_ONCE", 2)
    world.index.session(names[1], lives, [], world.now, Hint(end=True))
    assert world.look(sessions.PAUSE_S).sessions.ended == 1
    assert world.look(SAMPLE_S).sessions.ended == 2
    # A server that has just begun has met some.
    began = sessions.SessionRounds(lambda: world.now)
    began.read(world.index, names)
    assert (began.seen.live + began.seen.retained + began.seen.ended, began.read_s) == (2, None)
    began.read(world.index, names)
    assert (began.seen.retained, began.seen.ended, began.read_s) == (1, 2, world.now)


def test_faults_are_what_should_not_have_been(world: World) -> None:
    kv = world.register(kv_space())
    world.tell(kv, 10, 4, "absent")
    world.tell(kv, 10, 3, "corrupt", op="load")
    world.tell(kv, 10, 10)
    report = world.look()
    assert [(fault.where, fault.problem, fault.subject) for fault in report.faults] == [
        ("load", "corrupt, 7 of 10 blocks", "chat-1")
    ]
    shown = world.report(janitor=a_janitor(world.now + 1)).faults
    assert [fault.where for fault in shown] == ["janitor: scrub", "load"]
    assert "\n" not in shown[0].problem


# -- whether it is well --------------------------------------------------------------------------------------


def test_a_server_is_ready_once_both_have_answered_and_not_long_after_they_cease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not world.monitor.ready().ok
    assert "no answer from index" in world.monitor.ready().why
    world.monitor.look()
    assert "no answer from payloads" in world.monitor.ready().why
    world.monitor.ask_payloads()
    assert world.monitor.ready().ok

    def down() -> Any:
        raise TransientError("redis://10.0.0.1: connection refused")

    world.commit(world.register(kv_space()))
    before = world.look()
    monkeypatch.setattr(world.index, "accounts", down)
    world.now += READY_S
    world.monitor.ask_payloads()
    failed = world.look()
    assert world.monitor.ready().ok  # for so long it is a hiccup
    assert failed.status.index.state == "unreachable"
    assert "refused" in failed.status.index.problem
    assert (failed.index.since_s, failed.index.answered_s) == (world.now, before.at_s)
    # What was known stays, with its age.
    assert (failed.status.total, failed.looked_s) == (before.status.total, before.looked_s)
    assert failed.faults[0].where == "index"
    assert world.value("kvstore_up", backend="index") == 0
    assert world.value("kvstore_up", backend="payloads") == 1
    assert world.value("kvstore_stored_bytes") == 1000
    world.look(1.0)
    ready = world.monitor.ready()
    assert not ready.ok
    assert re.fullmatch(r"no answer from index \(memory://.*\) for 31 s: redis://.*refused", ready.why)
    assert [fault.where for fault in world.report().faults] == ["index"], "one fault, not one per look"
    monkeypatch.undo()
    assert world.look(1.0).status.index.state == "ok"
    assert world.monitor.ready().ok


def test_a_loop_that_hangs_is_not_healthy(world: World) -> None:
    world.look()
    world.now += HANGS_S
    assert world.monitor.turning().ok
    world.now += 1
    assert not world.monitor.turning().ok


def test_a_look_at_a_slow_index_is_broken_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        world.register(kv_space(model=f"m{number}"))
    calls = 0
    answer = world.index.seen

    def slow(name: NamespaceId) -> Mapping[str, int]:
        nonlocal calls
        calls += 1
        world.now += LOOK_MOST_S / 3
        return answer(name)

    monkeypatch.setattr(world.index, "seen", slow)
    index = world.look().status.index
    assert index.state == "unreachable"
    assert "slow" in index.problem
    assert calls == 4
    assert world.monitor.turning().ok


def test_asking_costs_the_backends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.commit(world.register(kv_space()))
    world.look()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a request reached a backend")

    for name in [name for name in dir(SqliteIndex) if not name.startswith("_")]:
        if callable(getattr(SqliteIndex, name)) and name not in ("close", "from_settings", "in_memory"):
            monkeypatch.setattr(world.index, name, never)
    for name in ("read", "list", "ping"):
        monkeypatch.setattr(world.cache.payloads, name, never)
    for _ in range(10):
        assert world.value("kvstore_segments") == 1
        assert len(world.report().status.namespaces) == 1
        assert world.monitor.ready().ok


def test_ten_scrapers_cost_one(world: World) -> None:
    name = world.register(kv_space())
    exporter = Exporter(world.monitor, lambda: None)
    text = Exposition(exporter.metrics, kept_s=TEXT_KEPT_S, monotonic=lambda: world.now)
    plain = HttpRequest({}, "text/plain")
    world.commit(name)
    world.look()
    first = text(plain)
    world.commit(name)
    world.look(TEXT_KEPT_S - 0.1)
    assert text(plain) == first
    other = text(HttpRequest({}, "application/openmetrics-text;version=1.0.0"))
    assert other.content_type.startswith("application/openmetrics-text")
    assert text(plain) != first
    world.commit(name)
    world.look(TEXT_KEPT_S)
    assert " 3.0" in text(plain).body.decode().split("kvstore_segments{")[1].splitlines()[0]


# -- hostile texts -------------------------------------------------------------------------------------------

HOSTILE = (
    '"} 1\n# TYPE kvstore_up counter\nkvstore_up{x="\\ <img src=x onerror=alert(1)> \u202e\x1b[31m \U0001f600'
)


def test_names_cannot_write_metrics_of_their_own(world: World) -> None:
    name = world.register(kv_space(model=HOSTILE, tenant=HOSTILE))
    world.commit(name)
    world.index.set_quota(Scope.tenant(HOSTILE), 5)
    report = world.look()
    assert report.model_dump_json().isprintable()
    plain = exposition(world.monitor)(HttpRequest({}, "text/plain"))
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    samples = [s for f in text_string_to_metric_families(plain.body.decode()) for s in f.samples]
    assert {s.labels["backend"] for s in samples if s.name == "kvstore_up"} == {"index", "payloads"}
    models = {s.labels["model"] for s in samples if s.name == "kvstore_stored_bytes"}
    assert models == {report.status.namespaces[0].model}
    assert "<img src=x onerror=alert(1)>" in models.pop()
    asked = HttpRequest({}, "application/openmetrics-text;version=1.0.0")
    text = exposition(world.monitor, a_janitor(world.now))(asked)
    assert text.content_type.startswith("application/openmetrics-text")
    assert {f.name for f in openmetrics(text.body.decode())} >= {"kvstore_up", "kvstore_janitor_step_runs"}


def test_what_is_not_a_namespace_of_this_version_is_shown_by_its_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(kv_space())
    texts = ("", "[]", "{", '{"model": 7, "parallel": 3, "epoch": []}', '{"model": "\\ud800\\u0000"}')
    for stored in texts:
        monkeypatch.setattr(world.index, "namespaces", lambda stored=stored: {name: stored})
        monitor = Monitor(world.cache, clock=lambda: world.now, monotonic=lambda: world.now)
        monitor.look()
        report = monitor.report(3600, None)
        assert report.status.index.state == "ok"
        assert report.status.namespaces[0].model in ("", "7", "\\ud800\\x00")
        exposition(monitor)(HttpRequest({}, "")).body.decode("utf-8")
        report.model_dump_json().encode("utf-8")


# -- the metrics' documentation ------------------------------------------------------------------------------


def everything(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, Metric]:
    """Every family there can be."""
    fast = FastBackend(
        url="file:///f", state="ok", capacity_bytes=10, used_bytes=5, payloads=1, dirty_bytes=2
    )
    monkeypatch.setattr(Cache, "fast_state", lambda _: fast)
    monkeypatch.setattr(SqliteIndex, "memory", lambda _: (5, 10))
    kv = world.register(kv_space())
    world.commit(kv)
    world.tell(kv, 4, 2, "absent")
    assert world.look().status.fast == fast
    return world.metrics(a_janitor(world.now))


def documented() -> dict[str, str]:
    """Metric -> labels, of the section on this server."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.split("\n# Metrics of `cache-admin serve`\n")[1].split("\n# ")[0]
    rows = re.findall(r"^\| `(kvstore_\w+)` \| ([^|]*) \| [^|]+ \|$", section, re.MULTILINE)
    return {name: labels.strip() for name, labels in rows}


def test_every_metric_is_documented_with_its_labels(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    families = everything(world, monkeypatch)
    exported = {}
    for family in families.values():
        if family.name.startswith("process_"):
            continue
        assert family.samples, f"{family.name} is never set"
        assert family.documentation
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = list(dict.fromkeys(label for sample in family.samples for label in sample.labels))
        exported[name] = ", ".join(f"`{label}`" for label in labels if label not in NAMESPACE) or (
            "namespace" if "cache_namespace" in labels else ""
        )
        if "cache_namespace" in labels and exported[name] != "namespace":
            exported[name] = f"namespace, {exported[name]}"
    assert documented() == exported


NAMESPACE = ("cache_namespace", "kind", "model", "tenant")


def test_every_reason_rule_and_step_is_there_from_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = everything(world, monkeypatch)

    def values(family: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in families[family].samples}

    assert values("kvstore_missed_blocks", "reason") == {*MISS_REASONS, "other"}
    assert values("kvstore_unsaved_blocks", "reason") == {*UNSAVED, "other"}
    assert values("kvstore_evictions", "rule") == set(get_args(EvictionRule))
    assert values("kvstore_janitor_step_runs", "step") == set(STEPS)


# -- the threads ---------------------------------------------------------------------------------------------


def asked(url: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_a_janitor_that_ended_is_not_healthy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()
    monkeypatch.setattr(Janitor, "run", lambda *_: going_on.wait(PATIENCE_S))
    serving = Serving(world.cache)
    url = serving.start("127.0.0.1", 0)
    try:
        assert asked(f"{url}healthz") == (200, "ok\n")
        going_on.set()
        until(lambda: asked(f"{url}healthz")[0] != 200)
        assert asked(f"{url}healthz") == (503, "ended: janitor\n")
        assert asked(f"{url}readyz")[0] == 200
    finally:
        assert serving.stop(PATIENCE_S) == []


def test_a_look_that_fails_unexpectedly_is_logged_and_looked_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvstore.admin.serve.server, "LOOK_S", 0.01)
    looks: list[int] = []
    looked = threading.Event()

    def broken(_: Monitor) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise ZeroDivisionError("a bug")
        looked.set()

    monkeypatch.setattr(Monitor, "look", broken)
    serving = Serving(world.cache, janitor=False)
    serving.start("127.0.0.1", 0)
    try:
        assert looked.wait(PATIENCE_S)
        assert "a bug" in caplog.text
        assert serving.healthy().ok
    finally:
        assert serving.stop(PATIENCE_S) == []


# -- serve --once --------------------------------------------------------------------------------------------


def test_once_does_a_round_and_prints_what_there_is(admin: Admin, filled: Filled) -> None:
    ran = admin("serve", "--once", "--json", *filled.options)
    assert ran.code == 0
    report = ServingReport.model_validate_json(ran.out)
    status = admin("status", "--json", *filled.options).json
    assert report.status.model_dump()["total"] == status["total"]
    assert report.janitor is not None
    assert report.janitor.rounds == 1
    assert {step.step for step in report.janitor.steps if step.runs} >= {"evict", "reap", "sweep"}
    assert "janitor" not in {quota.scope for quota in report.status.quotas}
    text = admin("serve", "--once", *filled.options)
    assert text.code == 0
    assert "5 segments, 14 blocks, 2 namespaces" in text.out
    assert "1 round" in text.out


def test_once_with_a_step_that_fails_was_partly_done(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any, **__: Any) -> Any:
        raise TransientError("sweeping is out of order")

    monkeypatch.setattr(SqliteIndex, "sweep", down)
    ran = admin("serve", "--once", *filled.options)
    assert ran.code == 4
    assert "sweeping is out of order" in ran.out


def test_once_without_a_janitor_changes_nothing(admin: Admin, filled: Filled) -> None:
    tight = {"KVSTORE_CAPACITY_BYTES": "10KiB"}
    report = admin("serve", "--once", "--no-janitor", "--json", *filled.options, env=tight).json
    assert report["janitor"] is None
    assert report["status"]["total"]["segments"] == 5
    status = admin("serve", "--once", "--json", *filled.options, env=tight).json["status"]
    assert status["total"]["stored_bytes"] <= 10 << 10
    assert status["upkeep"]["trashed"] == 5 - status["total"]["segments"] > 0


def test_once_of_nothing_yet_makes_nothing(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    ran = admin("serve", "--once", "--json", "--payloads", f"file://{folder}")
    assert ran.code == 0
    assert ran.json["status"]["index"]["state"] == ran.json["status"]["payloads"]["state"] == "absent"
    assert not folder.exists()


def test_once_without_its_index_says_so(admin: Admin, filled: Filled) -> None:
    options = ["--payloads", f"file://{filled.folder}", "--index", "redis://127.0.0.1:1/0"]
    ran = admin("serve", "--once", "--json", *options)
    assert ran.code == 5
    assert ran.json["status"]["index"]["state"] == "unreachable"
    assert ran.json["looked_s"] is None
    text = admin("serve", "--once", *options)
    assert text.code == 5
    assert "unknown: the index can't be asked" in text.out


@pytest.mark.parametrize(
    "place",
    ["", "9464", ":9464", "localhost", "localhost:", "localhost:x", "localhost:65536", "::1:9464", "a:-1"],
)
def test_a_place_to_listen_that_is_none_is_a_sentence(admin: Admin, filled: Filled, place: str) -> None:
    ran = admin("serve", "--listen", place, *filled.options)
    assert ran.code == 2
    assert "HOST:PORT" in ran.err


def test_a_place_that_cannot_be_listened_on_ends_it(admin: Admin, filled: Filled) -> None:
    ran = admin("serve", "--listen", "192.0.2.1:9464", *filled.options)
    assert ran.code == 2
    assert "can't listen on 192.0.2.1:9464" in ran.err


def test_its_janitor_does_not_wait_as_long_for_a_bucket_as_tools_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes again."""
    world, calls = World("brief"), list[Any]()
    janitor = Serving(world.cache)._opened_janitor()
    assert janitor is not None
    assert janitor._scrubbing._payloads is world.cache.brief_payloads

    def refuse(*args: Any) -> None:
        calls.append(args)
        raise Throttled("slow down")

    monkeypatch.setattr(S3Payloads, "delete", refuse)
    monkeypatch.setattr(bucket, "pause", lambda _: None)
    settings = load_settings({"payloads": "s3://bucket/pre", "index": "redis://127.0.0.1:1/0"}, {})
    with Cache(settings) as cache:
        with pytest.raises(Throttled):
            cache.brief_payloads.delete(["one"])
    assert 0 < len(calls) <= settings.s3.attempts
